"""`layers` and `calibrate`: which layer to wrap, and how far a radius should reach."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table

from gracestream.pipeline.settings import load_settings
from gracestream.workers.cli.common import (
    JsonOption,
    LinesArgument,
    ModelOption,
    pluralize,
    print_json,
    print_table,
    read_json_lines,
    stderr_console,
    stdout_console,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (prepare, layers, calibrate):
        app.command(rich_help_panel="Tuning")(command)


def prepare(
    name: Annotated[str, typer.Argument(help="smollm2, intent, or, with GRACESTREAM_DATA, scotus or t5.")],
) -> None:
    """Build a model that is known by name, and print its folder. Whatever needs the model does this too.

    Example: gracestream prepare scotus
    """
    from gracestream.pipeline.model import ensure_model_built as build  # noqa: PLC0415

    print(build(name, load_settings().cache, stderr_console.print))


def layers(model: ModelOption = None, as_json: JsonOption = False) -> None:
    """List the layers of a model that can be wrapped; * stands for the number of a block.

    Example: gracestream layers --model smollm2
    """
    from gracestream.pipeline.model import linear_layers  # noqa: PLC0415  (torch takes seconds that other commands need not wait)
    from gracestream.workers.bootstrap import load_base_model  # noqa: PLC0415

    found = linear_layers(load_base_model(load_settings(model=model)))
    if as_json:
        for layer in found:
            print_json(msgspec.to_builtins(layer))
        return
    table = Table("layer", "blocks", "kind", "weight")
    for layer in found:
        table.add_row(layer.path, f"0 … {layer.count - 1}", layer.kind, "x".join(map(str, layer.shape)))
    print_table(table)


def calibrate(
    context: typer.Context,
    lines: LinesArgument,
    layer: Annotated[list[str] | None, typer.Option("--layer", help="A layer to measure; may be repeated.")] = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
    auto: Annotated[bool, typer.Option("--auto", help="Make trial edits, and print the settings to use.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="With --auto: requests to correct, at most.")] = 12,
    false_positives: Annotated[
        float, typer.Option(min=0, max=1, help="With --auto: the share of other requests that edits may capture.")
    ] = 0.05,
    minutes: Annotated[float, typer.Option(min=0, help="With --auto: stop after so long, with what was found.")] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="With --auto: draw reach against false positives into this file.")
    ] = None,
) -> None:
    """Measure the scale of layers on requests, and how well rephrases separate from other traffic.

    Each line is a text or an object with `inputs` and, where there is one, `rephrase`: other words for the same. With
    --auto it may have a `target`, too. Trial edits are made then at several layers, with several kinds of query and
    radii, on this machine alone; the command reports what they reach, and prints the settings to use. It ends with
    status 1 if no settings will do, and says why. Ctrl-C shows what was found so far.
    Example: gracestream calibrate requests.jsonl --layer 'model.layers[20].mlp.up_proj'
    Example: gracestream calibrate requests.jsonl --auto --plot reach.svg
    """
    if auto:
        from gracestream.workers.cli.trials import find_settings  # noqa: PLC0415  (torch takes seconds)

        find_settings(lines, layer or [], model, trials, false_positives, minutes, plot, as_json=as_json)
        return
    _require_auto(context)
    _calibrate_layers(lines, layer, model, as_json=as_json)


def _require_auto(context: typer.Context) -> None:
    """Raises typer.BadParameter where an option is given that only `--auto` has a use for."""
    for name in ("trials", "false_positives", "minutes", "plot"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} has a use with --auto only; add --auto")


def _calibrate_layers(lines: Path, layer: list[str] | None, model: str | None, *, as_json: bool) -> None:
    """Measure the layers without any edit."""
    from gracestream.pipeline.editing import LabelledRequest, calibrate_layer  # noqa: PLC0415
    from gracestream.workers.bootstrap import load_model, settings_use_encoder  # noqa: PLC0415

    samples = []
    for number, fields in read_json_lines(lines):
        try:
            samples.append(msgspec.convert({"inputs": fields} if isinstance(fields, str) else fields, LabelledRequest))
        except msgspec.ValidationError as error:
            raise typer.BadParameter(f"{lines}, line {number}: {error}") from error
    measured = []
    if layer and len(layer) > 1 and settings_use_encoder(load_settings(model=model)):
        raise typer.BadParameter(
            "an encoder makes the queries, the same for all layers: name one, or set GRACESTREAM_QUERY=last to compare"
            " layers"
        )
    for settings in [load_settings(model=model, layer=path) for path in layer or (None,)]:
        loaded = load_model(settings)
        measured.append(calibrate_layer(loaded, samples))
    if as_json:
        for row in measured:
            print_json(msgspec.to_builtins(row))
        return
    table = Table(Column("layer", overflow="fold"), "key norm", "noise", "median", "to rephrase", "reached", "radius")
    for row in measured:
        table.add_row(
            row.layer,
            f"{row.norm:.3g}",
            f"{row.noise:.1g}",
            f"{row.median:.4g}",
            "-" if row.rephrase is None else f"{row.rephrase:.4g}",
            "-" if row.reached is None else f"{row.reached:.0%}",
            "-" if row.radius is None else f"{row.radius:.1f}",
        )
    print_table(table)
    stdout_console.print(
        f"{pluralize(len(samples), 'input', 'inputs')}."
        " 'median' is the distance of an input to its nearest other one: the unit of radii."
        " 'reached' are the rephrases inside their own input's ball at the best radius (last column, in medians), with"
        " every ball kept at most 0.8 of the way to the nearest other input. 'noise' is what batches and padding do."
    )
