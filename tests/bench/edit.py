"""Cost of an edit, compared with a textbook GRACE, and the cost that stored entries add: `make bench NAME=edit`.

Both methods take 100 steps from the same start, on one thread. Times are CPU seconds of the process, and synchronised
wall time on a GPU. The methods take turns, and medians are compared.

A step of the textbook runs the whole model forward, searches all keys, and runs the model backward. The weights are
frozen, as in the authors' code, so no gradient of a weight is computed. Its time is measured over a few steps and
scaled up. It runs to the end once, for its loss. The product's time includes all of the editor's work on a correction
except Kafka and Redis.

- `edit/MODEL/20`: a prompt of 20 tokens. The floor of a step is a forward and a backward pass. Both cover only the
  blocks after the edited layer, and the positions that depend on the value.
- `edit/MODEL/20/waiting`: 16 waiting corrections, with values trained together. The textbook trains its 16 one after
  the other. The floor is that of one step over 16 rows.
- `edit/MODEL/100k`: the same edit in a codebook of 100,000 entries, each an edit that the retention guard protects, and
  in an empty one. These keys have no structure, so an edit has to read all of them once: 1.2 GB for BERT, which takes
  this machine 32 to 54 ms.

Columns:

- `textbook-of-ours`: the textbook's time divided by the product's. `alone-of-together`: 16 single edits divided by 16
  together.
- `seconds`: time of an edit, or of 16. The baseline is the textbook's, and with entries that of the empty codebook.
- `loss-apart`: relative difference of the final losses; the baseline is a goal.
- `stored-of-none`, `added-milliseconds`: ratio and difference of an edit with and without entries; the ratio's baseline
  is a goal.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from msgspec import UNSET, UnsetType

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.model.editable import EditableModel
from gracestream.schemas.deltas import Cause, EntryChange, Tensor
from tests.bench.codebooks import queries, stored, value_width
from tests.bench.device import timed
from tests.bench.framework import BenchError, Options, Row
from tests.bench.models import MODELS, BenchModel, select_models
from tests.bench.overhead import REAL_KEYS
from tests.bench.textbook import train

STEPS = 100
TOKENS = {"bert-base": (20, 512), "gpt2-small": (20, 200), "t5-v1.1-small": (20, 200)}
STORED_ENTRIES = 100_000
REPEATS = 5
WAITING_REPEATS = 3
"""Measurements of waiting corrections."""

TEXTBOOK_STEPS = 4
"""Steps of the textbook that are measured; the time of all steps is scaled up. Some edits take a quarter of an hour."""

TYPICAL_STEPS = 17
"""Steps of a typical edit."""

WAITING = 16
WAITING_TOKENS = {"bert-base": (20, 512), "gpt2-small": (20,), "t5-v1.1-small": (20,)}

CONFIG = EditConfig(
    recipe=ValueTrainingConfig(max_steps=STEPS, learning_rate=1.0, stop_margin=float("inf")),
    traffic_sample_size=0,
    radius=0.1,
)


def run(options: Options) -> Iterator[Row]:
    """The rows of every model with a goal. `--quick` measures one model, with a twentieth of the entries."""
    for bench_model in select_models(options, MODELS[: 1 if options.quick else 3]):
        model = bench_model.load(options.device)
        for tokens in TOKENS[bench_model.name][: 1 if options.quick else None]:
            options.report(f"{bench_model.name}: edits of {tokens} tokens")
            yield from _textbook_rows(bench_model, model, tokens)
        yield from _stored_rows(bench_model, model, STORED_ENTRIES // 20 if options.quick else STORED_ENTRIES, options)


def _textbook_rows(bench_model: BenchModel, model: EditableModel, tokens: int) -> Iterator[Row]:
    edit_seconds: list[float] = []
    seconds_per_step: list[float] = []
    for number in range(REPEATS):
        text, target = _wrong_target(bench_model, model, tokens, number)
        engine = _engine(model, CONFIG)
        elapsed, result = timed(model.device, lambda: engine.edit(make_correction("f", text, target), 0))  # noqa: B023  (called at once)
        edit_seconds.append(elapsed)
        outcome = result.outcome
        if outcome is None or outcome.steps != STEPS or outcome.loss is UNSET:
            raise BenchError(f"an edit of {bench_model.name} has an unexpected outcome: {outcome}")
        loss = outcome.loss
        elapsed, _ = timed(model.device, lambda: _textbook(model, text, target, TEXTBOOK_STEPS))  # noqa: B023  (called at once)
        seconds_per_step.append(elapsed / TEXTBOOK_STEPS)
    expected = _textbook(model, text, target, STEPS)
    name, seconds = f"edit/{bench_model.name}/{tokens}", statistics.median(edit_seconds)
    textbook = STEPS * statistics.median(seconds_per_step)
    yield Row(f"{name}/textbook-of-ours", textbook / seconds, "x")
    yield Row(f"{name}/seconds", seconds, "s", textbook)
    yield Row(f"{name}/loss-apart", abs(loss - expected) / expected, "relative", 1e-4)
    if tokens not in WAITING_TOKENS[bench_model.name]:
        return
    batched = statistics.median(
        _waiting_seconds(bench_model, model, tokens, 50 * turn) for turn in range(WAITING_REPEATS)
    )
    yield Row(f"{name}/waiting/textbook-of-ours", WAITING * textbook / batched, "x")
    yield Row(f"{name}/waiting/alone-of-together", WAITING * seconds / batched, "x")
    yield Row(f"{name}/waiting/seconds", batched, "s", WAITING * textbook)


def _waiting_seconds(bench_model: BenchModel, model: EditableModel, tokens: int, seed: int) -> float:
    """Seconds of the editor's work on waiting corrections."""
    engine = _engine(model, CONFIG)
    corrections = [
        make_correction(f"f{n}", *_wrong_target(bench_model, model, tokens, seed + n)) for n in range(WAITING)
    ]

    def edit() -> list[int | UnsetType]:
        drafts = engine.draft_values([(correction, offset) for offset, correction in enumerate(corrections)])
        steps = []
        for offset, correction in enumerate(corrections):
            result = engine.edit(correction, offset, draft=drafts.get(offset))
            if result.outcome is None:
                raise BenchError(f"an edit of {bench_model.name} has no outcome")
            if result.delta_record is not None:  # a rejected edit took all steps too, so its time counts
                engine.apply(result.delta_record)
            steps.append(result.outcome.steps)
        return steps

    seconds, steps = timed(model.device, edit)
    if set(steps) != {STEPS}:
        raise BenchError(f"edits of {bench_model.name} took {steps} steps instead of {STEPS} each")
    return seconds


def _stored_rows(bench_model: BenchModel, model: EditableModel, count: int, options: Options) -> Iterator[Row]:
    """The rows of an edit in a filled and in an empty codebook, which take turns."""
    config = replace(CONFIG, recipe=replace(CONFIG.recipe, max_steps=TYPICAL_STEPS))
    engines = {"none": _engine(model, config), "stored": _engine(model, config)}
    keys_ND = stored(queries(model, bench_model.prompts(model, REAL_KEYS)), count)
    _fill_codebook(engines["stored"], keys_ND)
    options.report(f"{bench_model.name}: {count} entries")
    seconds: dict[str, list[float]] = {codebook_kind: [] for codebook_kind in engines}
    for number in range(4 * REPEATS):
        text, target = _wrong_target(bench_model, model, 20, 1000 + number)
        for codebook_kind, engine in engines.items():

            def edit(engine: EditEngine = engine, text: str = text, target: str = target, number: int = number) -> None:
                result = engine.edit(make_correction(f"edit-{number}", text, target), number)
                if result.delta_record is not None:
                    engine.apply(result.delta_record)

            elapsed, _ = timed(model.device, edit)
            if number:  # the first edit warms up
                seconds[codebook_kind].append(elapsed)
    medians = {codebook_kind: statistics.median(samples) for codebook_kind, samples in seconds.items()}
    name = f"edit/{bench_model.name}/{count // 1000}k"
    yield Row(f"{name}/stored-of-none", medians["stored"] / medians["none"], "x", 1.05)
    yield Row(f"{name}/added-milliseconds", 1000 * (medians["stored"] - medians["none"]), "ms")
    yield Row(f"{name}/seconds", medians["stored"], "s", medians["none"])


def _engine(model: EditableModel, config: EditConfig) -> EditEngine:
    engine = EditEngine(model, "default", config)
    engine.apply(engine.lead_delta({}))
    return engine


def _fill_codebook(engine: EditEngine, keys_ND: np.ndarray) -> None:
    """Fill the codebook by one delta per entry, each with its edit."""
    width = value_width(engine.model.module.get_submodule(engine.model.layer), keys_ND.shape[1])
    value = Tensor.from_array(np.zeros(width, np.float32))
    for number, key_D in enumerate(keys_ND):
        name = f"e{number}"
        entry = EntryChange(
            entry_id=name, key=Tensor.from_array(key_D), value=value, radius=0.1, label=(number % 1000,)
        )
        cause = Cause(feedback_id=name, offset=number, entry_id=name)
        engine.apply(engine.next_delta("add", entries=(entry,), cause=cause))


def _wrong_target(bench_model: BenchModel, model: EditableModel, tokens: int, seed: int) -> tuple[str, str]:
    """A prompt of `tokens` tokens, and a target that the model does not predict."""
    assert bench_model.random is not None
    return bench_model.random.wrong_target(model, tokens, 100 + seed)


def _textbook(model: EditableModel, text: str, target: str, steps: int) -> float:
    """Train a value by the textbook method. Returns the final loss."""
    return train(model, model.prepare_correction(text, target)[1], steps, CONFIG.recipe.learning_rate)
