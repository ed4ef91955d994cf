"""`up` and `demo`: running the whole system on this machine."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gracestream.pipeline.settings import Settings
from gracestream.workers.cli.common import (
    JsonOption,
    LayerOption,
    ModelOption,
    PrefixOption,
    print_json,
    print_table,
    stderr_console,
    stdout_console,
)
from gracestream.workers.cli.deployment import DEFAULT_PARTITIONS

DataOption = Annotated[
    Path, typer.Option("--data", help="Folder for log files and the data of a local Kafka and Redis.")
]
ReplicasOption = Annotated[int, typer.Option("--replicas", min=1, max=64, help="Inference replicas.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (up, demo):
        app.command(rich_help_panel="On this machine")(command)


def up(
    model: ModelOption = None,
    layer: LayerOption = None,
    replicas: ReplicasOption = 2,
    data: DataOption = Path(".gracestream"),
    prefix: PrefixOption = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_400, help="Port of Kafka; Redis, the editor and the replicas get the next ports."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start Kafka, Redis, an editor and replicas, keep them running until Ctrl-C, and report each that ends early.

    Kafka and Redis come from GRACESTREAM_KAFKA and GRACESTREAM_REDIS, or from Docker, or they run locally. The model,
    its layer, the list of authors and the ports are checked before anything starts. Without --port each process keeps
    its port of the last run with the same --data.
    Example: gracestream up --replicas 3 --model smollm2 --port 9092
    """
    from gracestream.deploy.local.stack import running_stack

    _interrupt_on_sigterm()
    overrides = {"model": model, "layer": layer, "topic_prefix": prefix}
    partitions = max(DEFAULT_PARTITIONS, replicas)
    with running_stack(
        data,
        replicas=replicas,
        partitions=partitions,
        port=port,
        check=_check_model,
        report=stderr_console.print,
        **overrides,
    ) as stack:
        endpoints = stack.endpoints()
        if as_json:
            print_json(endpoints)
        else:
            table = Table("what", "where", title="gracestream is up; Ctrl-C stops it")
            table.add_row(f"Kafka ({stack.kafka_origin})", endpoints["kafka"])
            table.add_row(f"Redis ({stack.redis_origin})", endpoints["redis"])
            table.add_row("editor", endpoints["editor"])
            for replica in endpoints["replicas"]:
                table.add_row("replica", replica)
            table.add_row("model", stack.settings.model.name)
            table.add_row("layer", str(stack.settings.model.layer))
            table.add_row("logs", str(data / "logs"))
            print_table(table)
        with suppress(KeyboardInterrupt):
            stack.watch(stderr_console.print)
        stderr_console.print("stopping")


def demo(
    model: Annotated[str, typer.Option("--model", help="smollm2 or intent.")] = "smollm2",
    complete: Annotated[bool, typer.Option("--all", help="All prompts, not a sample of them.")] = False,
    data: DataOption = Path(".gracestream/demo"),
) -> None:
    """Show the whole system on this machine: wrong answers, corrections, right answers, a crash, a replay.

    Example: gracestream demo --model intent
    """
    from gracestream.deploy.demo.cases import load_script

    load_script(model)  # fails for a model without a story, before the slow imports
    from gracestream.deploy.demo.story import run_demo

    _interrupt_on_sigterm()
    raise typer.Exit(run_demo(model, data, stdout_console, complete=complete))


def _check_model(settings: Settings) -> None:
    """Load the model as a worker does, but on the CPU: this process must not hold memory of the workers' GPU.

    Raises:
        ModelError, LayerError: the model cannot be loaded, has no such layer, or the device does not exist.
    """
    from gracestream.pipeline.model import resolve_device
    from gracestream.workers.bootstrap import load_model

    model = settings.model
    stderr_console.print(f"checking the model {model.name} and its layer {model.layer}: about a minute on two cores")
    with stderr_console.status("loading the model"):
        resolve_device(model.device)
        load_model(model.model_copy(update={"device": "cpu"}), settings.editing.policy)


def _interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that everything is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
