"""`topics`, `infer` and `edit`: creating a deployment's topics, and running its workers."""

from typing import Annotated

import typer

from gracestream.pipeline.kafka import BROKER_DEFAULT, DELTAS, REQUESTS, TopicError, create_topics, topic_layout
from gracestream.pipeline.settings import load_settings
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
"""Partitions of `requests` and `predictions`, and so the largest number of replicas with work."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (topics, infer, edit):
        app.command(rich_help_panel="Deployment")(command)


def topics(
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Partitions of requests and predictions: most replicas; default: 8.")
    ] = None,
    replication: Annotated[
        int | None, typer.Option(min=1, help="Copies of each partition; default: the broker's.")
    ] = None,
) -> None:
    """Create the missing topics, and check the existing ones.

    Example: gracestream topics --kafka broker:9092 --partitions 32 --replication 3
    """
    settings = connect(
        kafka=kafka, topic_prefix=prefix, await_name=True
    )  # this may run as a service that starts before Kafka's
    created = create_topics(settings.kafka, partitions or DEFAULT_PARTITIONS, replication or BROKER_DEFAULT)
    stdout_console.print(f"created: {', '.join(created)}" if created else "all topics exist", soft_wrap=True)
    actual_partitions, actual_replication = topic_layout(settings.kafka)
    if created and actual_replication == 1:
        stderr_console.print(
            "there is one copy of each topic: the history is lost with its broker; --replication 3 keeps three"
        )
    if partitions not in (None, actual_partitions):
        raise TopicError(
            f"{settings.kafka.topic(REQUESTS)} has {actual_partitions} partitions, not {partitions}; add some with"
            " kafka-topics.sh"
        )
    if replication not in (None, actual_replication):
        raise TopicError(
            f"{settings.kafka.topic(DELTAS)} has {pluralize(actual_replication, 'copy', 'copies')} of its partition,"
            f" not {replication}; change that with kafka-reassign-partitions.sh, topic by topic"
        )


def infer(
    kafka: KafkaOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    codebook: CodebookOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
    engine: Annotated[
        str | None, typer.Option(help="auto, batch, continuous or vllm; default: GRACESTREAM_ENGINE.")
    ] = None,
) -> None:
    """Run one inference replica; start as many as the load needs.

    Example: gracestream infer --kafka broker:9092 --redis redis://cache:6379/0 --model ./checkpoint --layer LAYER
    """
    from gracestream.workers.inference import run  # importing faust takes a second

    settings = load_settings(
        kafka=kafka, redis=redis, topic_prefix=prefix, codebook=codebook, model=model, layer=layer, engine=engine
    )
    raise typer.Exit(run(settings))


def edit(
    kafka: KafkaOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    codebook: CodebookOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
) -> None:
    """Run the editor of a codebook. A second editor is a standby, and takes over when the first stops or dies.

    Example: gracestream edit --kafka broker:9092 --redis redis://cache:6379/0 --model ./checkpoint --layer LAYER
    """
    from gracestream.workers.editor import run

    settings = load_settings(kafka=kafka, redis=redis, topic_prefix=prefix, codebook=codebook, model=model, layer=layer)
    raise typer.Exit(run(settings))
