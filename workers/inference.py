"""The inference worker: a replica, from settings."""

import asyncio

from gracestream.pipeline.replica import Replica
from gracestream.pipeline.settings import Settings
from gracestream.workers.bootstrap import Worker, worker


def run(settings: Settings) -> int:
    """Run one replica until it is told to stop; the exit status."""
    with worker("inference", settings) as started:
        return asyncio.run(build_replica(started, settings).run())


def build_replica(started: Worker, settings: Settings) -> Replica:
    """The replica of a started worker, on the Kafka and the Redis that the settings name."""
    return Replica(
        started.model,
        settings,
        name=started.name,
        health=started.health,
        stop=started.stop,
        idle=started.idle,
    )
