"""The inference worker: builds a replica from settings and runs it."""

import asyncio

from gracestream.pipeline.replica import Replica
from gracestream.pipeline.settings import Settings
from gracestream.workers.bootstrap import WorkerContext, start_worker


def run(settings: Settings) -> int:
    """Run one replica until it is stopped; the exit status."""
    with start_worker("inference", settings) as started:
        return asyncio.run(build_replica(started, settings).run())


def build_replica(worker: WorkerContext, settings: Settings) -> Replica:
    """The replica of a started worker, on the Kafka and Redis that the settings name."""
    return Replica(
        worker.model,
        settings,
        name=worker.name,
        health=worker.health,
        stop=worker.stop,
        idle=worker.idle,
    )
