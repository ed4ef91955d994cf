"""`topics`, `infer` and `edit`: what a deployment runs."""

from typing import Annotated

import typer

from pipeline.settings import load_settings
from pipeline.topics import create_topics
from workers.cli.common import Codebook, Kafka, Layer, Model, Prefix, Redis, connected, screen


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (topics, infer, edit):
        app.command(rich_help_panel="Deployment")(command)


def topics(
    kafka: Kafka = None,
    prefix: Prefix = None,
    partitions: Annotated[int, typer.Option(min=1, help="Of requests and predictions: the most replicas.")] = 8,
    replication: Annotated[int, typer.Option(min=1, help="Copies of each partition.")] = 1,
) -> None:
    """Create the topics that are missing, and check those that are there.

    Example: gracestream topics --kafka broker:9092 --partitions 32 --replication 3
    """
    settings = connected(kafka=kafka, prefix=prefix)
    created = create_topics(settings, partitions, replication)
    screen.print(f"created: {', '.join(created)}" if created else "all topics are there")


def infer(
    kafka: Kafka = None,
    redis: Redis = None,
    prefix: Prefix = None,
    codebook: Codebook = None,
    model: Model = None,
    layer: Layer = None,
) -> None:
    """Run one inference replica; start as many as there is work for.

    Example: gracestream infer --kafka broker:9092 --redis redis://cache:6379/0 --model ./checkpoint --layer LAYER
    """
    from workers.inference import run  # noqa: PLC0415  (faust takes a second that other commands need not wait)

    settings = load_settings(kafka=kafka, redis=redis, prefix=prefix, codebook=codebook, model=model, layer=layer)
    raise typer.Exit(run(settings))


def edit(
    kafka: Kafka = None,
    redis: Redis = None,
    prefix: Prefix = None,
    codebook: Codebook = None,
    model: Model = None,
    layer: Layer = None,
) -> None:
    """Run the editor: one for each codebook. A second one takes over, and the first stops.

    Example: gracestream edit --kafka broker:9092 --redis redis://cache:6379/0 --model ./checkpoint --layer LAYER
    """
    from workers.editor import run  # noqa: PLC0415

    settings = load_settings(kafka=kafka, redis=redis, prefix=prefix, codebook=codebook, model=model, layer=layer)
    raise typer.Exit(run(settings))
