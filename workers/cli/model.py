"""`prepare`, `layers` and `calibrate`: building a known model, and choosing the layer and the radius."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table

from gracestream.pipeline.settings import load_settings
from gracestream.schemas.messages import Request
from gracestream.workers.cli.common import (
    JsonOption,
    LinesArgument,
    ModelOption,
    convert_fields,
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
    name: Annotated[str, typer.Argument(help="smollm2 or intent; with GRACESTREAM_DATA also scotus or t5.")],
) -> None:
    """Build a model that is known by name, and print its folder. Every command that needs the model does this, too.

    Example: gracestream prepare scotus
    """
    from gracestream.pipeline.model import ensure_model_built as build

    print(build(name, load_settings().model.cache_dir, stderr_console.print))


def layers(model: ModelOption = None, as_json: JsonOption = False) -> None:
    """List the layers of a model that can be wrapped; * stands for a block's number.

    Example: gracestream layers --model smollm2
    """
    from gracestream.pipeline.model import linear_layers
    from gracestream.workers.bootstrap import load_base_model

    layer_list = linear_layers(load_base_model(load_settings(model=model).model))
    if as_json:
        for layer in layer_list:
            print_json(msgspec.to_builtins(layer))
        return
    table = Table("layer", "blocks", "kind", "weight")
    for layer in layer_list:
        table.add_row(layer.path, f"0 … {layer.count - 1}", layer.kind, "x".join(map(str, layer.shape)))
    print_table(table)


def calibrate(
    context: typer.Context,
    lines: LinesArgument,
    layer: Annotated[list[str] | None, typer.Option("--layer", help="A layer to measure; may be repeated.")] = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
    auto: Annotated[bool, typer.Option("--auto", help="Make trial edits, and print settings to use.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="With --auto: largest number of trial edits.")] = 12,
    false_positives: Annotated[
        float, typer.Option(min=0, max=1, help="With --auto: share of other requests that edits may capture.")
    ] = 0.05,
    minutes: Annotated[
        float, typer.Option(min=0, help="With --auto: stop after this time, with the results so far.")
    ] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="With --auto: plot reach against false positives into this file.")
    ] = None,
) -> None:
    """Measure the scale of layers on requests, and how well rephrases separate from other traffic.

    Each line is a text or an object with `inputs` and an optional `rephrase`, which asks the same in other words. The
    other fields of a request are ignored; an unknown field is an error. With --auto a line may have a `target`, too,
    and a wrong line is skipped. The command then makes trial edits at several layers, with several kinds of query and
    radii, on this machine alone; it reports their reach, and prints the settings to use. It ends with status 1 if no
    settings are good enough, and gives the reason. Ctrl-C shows the results so far.
    Example: gracestream calibrate requests.jsonl --layer 'model.layers[20].mlp.up_proj'
    Example: gracestream calibrate requests.jsonl --auto --plot reach.svg
    """
    if auto:
        from gracestream.workers.cli.trials import find_settings

        find_settings(lines, layer or [], model, trials, false_positives, minutes, plot, as_json=as_json)
        return
    _require_auto(context)
    _calibrate_layers(lines, layer, model, as_json=as_json)


def _require_auto(context: typer.Context) -> None:
    """Check that no option of `--auto` is given without it.

    Raises:
        typer.BadParameter: one is.
    """
    for name in ("trials", "false_positives", "minutes", "plot"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} needs --auto; add --auto")


def _calibrate_layers(lines: Path, layer: list[str] | None, model: str | None, *, as_json: bool) -> None:
    """Measure the layers without edits, and print the table.

    Raises:
        typer.BadParameter: a line is not a labelled request, or several layers would share an encoder's queries.
    """
    from gracestream.pipeline.editing import LabelledRequest, calibrate_layer
    from gracestream.workers.bootstrap import load_model, settings_use_encoder

    labelled_requests = []
    for number, fields in read_json_lines(lines):
        try:
            labelled_requests.append(convert_fields(fields, LabelledRequest, Request))
        except ValueError as error:
            raise typer.BadParameter(f"{lines}, line {number}: {error}") from error
    measured, common = [], load_settings(model=model)
    if layer and len(layer) > 1 and settings_use_encoder(common.model, common.editing.policy):
        raise typer.BadParameter(
            "an encoder makes the queries, so they are equal for all layers: name one layer, or set"
            " GRACESTREAM_QUERY_SOURCE=last to compare layers"
        )
    for settings in [load_settings(model=model, layer=path) for path in layer or (None,)]:
        loaded = load_model(settings.model, settings.editing.policy)
        measured.append(calibrate_layer(loaded, labelled_requests))
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
        f"{pluralize(len(labelled_requests), 'input', 'inputs')}."
        " 'median' is the median distance of an input to its nearest other input: the unit of radii."
        " 'reached' is the share of rephrases within their own input's radius at the best radius (last column, in"
        " medians), where no radius is more than 0.8 of the distance to the nearest other input. 'noise' is the"
        " numerical tolerance: the effect of batches and padding on a query."
    )
