"""What the server of `forked_commands` imports once, so that no command forked from it imports it again."""

# ruff: noqa: F401

import gc

import faiss
import faust.assignor.partition_assignor
import faust.events
import faust.tables.manager
import faust.topics
import faust.transport.drivers.aiokafka
import mode.worker

import gracestream.pipeline.history
import gracestream.pipeline.replay
import gracestream.pipeline.reproduction
import gracestream.pipeline.tuning.workbench
import gracestream.workers.cli.app
import gracestream.workers.editor
import gracestream.workers.inference
import tests.support.forked_commands

gc.collect()
gc.freeze()  # a collection in a command would touch, and so copy, the memory of everything above
