"""`topics`, `infer` and `edit`: what a deployment runs."""

from collections.abc import Callable
from typing import Annotated

import typer

from gracestream.pipeline.kafka import BROKER_DEFAULT, DELTAS, REQUESTS, TopicError, create_topics, topic_layout
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.workers.cli.common import (
    CodebookOption,
    KafkaOption,
    LayerOption,
    ModelOption,
    PrefixOption,
    RedisOption,
    connect,
    pluralize,
    stderr_console,
    stdout_console,
)

DEFAULT_PARTITIONS = 8


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Deployment")(topics)
    for worker in (infer, edit):
        app.command(worker.__name__, help=worker.__doc__, rich_help_panel="Deployment")(_worker_command(worker))


def topics(
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
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
    settings = connect(kafka=kafka, prefix=prefix, await_name=True)  # as a service that starts with Kafka's
    created = create_topics(settings, partitions or DEFAULT_PARTITIONS, replication or BROKER_DEFAULT)
    stdout_console.print(f"created: {', '.join(created)}" if created else "all topics are there", soft_wrap=True)
    has_partitions, has_replication = topic_layout(settings)
    if created and has_replication == 1:
        stderr_console.print(
            "there is one copy of each topic: the history is lost with its broker; --replication 3 keeps three"
        )
    if partitions not in (None, has_partitions):
        raise TopicError(
            f"{settings.topic(REQUESTS)} has {has_partitions} partitions, not {partitions}; kafka-topics.sh adds some"
        )
    if replication not in (None, has_replication):
        raise TopicError(
            f"{settings.topic(DELTAS)} has {pluralize(has_replication, 'copy', 'copies')} of its partition, not"
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


def _worker_command(worker: Callable[[Settings], int]) -> Callable[..., None]:
    """A worker with the options that each of them has."""

    def command(
        kafka: KafkaOption = None,
        redis: RedisOption = None,
        prefix: PrefixOption = None,
        codebook: CodebookOption = None,
        model: ModelOption = None,
        layer: LayerOption = None,
    ) -> None:
        settings = load_settings(kafka=kafka, redis=redis, prefix=prefix, codebook=codebook, model=model, layer=layer)
        raise typer.Exit(worker(settings))

    return command
