"""`topics`, `infer` and `edit`: what a deployment runs."""

from collections.abc import Callable
from typing import Annotated

import typer

from gracestream.pipeline.kafka import BROKERS_CHOICE, DELTAS, REQUESTS, TopicError, create_topics, layout
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.workers.cli.common import (
    Codebook,
    Kafka,
    Layer,
    Model,
    Prefix,
    Redis,
    connected,
    counted,
    notes,
    screen,
)

PARTITIONS = 8


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Deployment")(topics)
    for worker in (infer, edit):
        app.command(worker.__name__, help=worker.__doc__, rich_help_panel="Deployment")(_command(worker))


def topics(
    kafka: Kafka = None,
    prefix: Prefix = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Of requests and predictions: the most replicas; 8 where it is not said.")
    ] = None,
    replication: Annotated[
        int | None, typer.Option(min=1, help="Copies of each partition; else the broker's default.")
    ] = None,
) -> None:
    """Create the topics that are missing, and check those that are there.

    Example: gracestream topics --kafka broker:9092 --partitions 32 --replication 3
    """
    settings = connected(kafka=kafka, prefix=prefix, await_name=True)  # as a service that starts with Kafka's
    created = create_topics(settings, partitions or PARTITIONS, replication or BROKERS_CHOICE)
    screen.print(f"created: {', '.join(created)}" if created else "all topics are there", soft_wrap=True)
    has_partitions, has_replication = layout(settings)
    if created and has_replication == 1:
        notes.print("there is one copy of each topic: the history is lost with its broker; --replication 3 keeps three")
    if partitions not in (None, has_partitions):
        raise TopicError(
            f"{settings.topic(REQUESTS)} has {has_partitions} partitions, not {partitions}; kafka-topics.sh adds some"
        )
    if replication not in (None, has_replication):
        raise TopicError(
            f"{settings.topic(DELTAS)} has {counted(has_replication, 'copy', 'copies')} of its partition, not"
            f" {replication}; kafka-reassign-partitions.sh changes that, topic by topic"
        )


def infer(settings: Settings) -> int:
    """Run one inference replica; start as many as there is work for.

    Example: gracestream infer --kafka broker:9092 --redis redis://cache:6379/0 --model ./checkpoint --layer LAYER
    """
    from gracestream.workers.inference import run  # noqa: PLC0415  (faust takes a second that other commands need not wait)

    return run(settings)


def edit(settings: Settings) -> int:
    """Run the editor of a codebook. A second one waits as standby, and takes over when the first stops or dies.

    Example: gracestream edit --kafka broker:9092 --redis redis://cache:6379/0 --model ./checkpoint --layer LAYER
    """
    from gracestream.workers.editor import run  # noqa: PLC0415

    return run(settings)


def _command(worker: Callable[[Settings], int]) -> Callable[..., None]:
    """A worker with the options that each of them has."""

    def command(
        kafka: Kafka = None,
        redis: Redis = None,
        prefix: Prefix = None,
        codebook: Codebook = None,
        model: Model = None,
        layer: Layer = None,
    ) -> None:
        settings = load_settings(kafka=kafka, redis=redis, prefix=prefix, codebook=codebook, model=model, layer=layer)
        raise typer.Exit(worker(settings))

    return command
