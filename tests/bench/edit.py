"""What an edit costs, beside a textbook GRACE, and what stored entries add to it: `make bench NAME=edit`.

Each takes 100 steps from the same start, on one thread; CPU seconds of the process, on a GPU synchronised wall time;
they take turns, and medians are compared. The textbook's step runs the whole model forward, looks through all keys,
and runs it backward. The weights are frozen, as in the authors' code, so no gradient of a weight is computed. It is
timed over a few steps, and followed to the end once, for its loss. Ours is all that the editor does for a correction
but for what Kafka and Redis take.

- `edit/MODEL/20`: a prompt of so many tokens. The floor of a step is one pass forward and one backward through the
  blocks after the edited layer, at those positions that depend on the value.
- `edit/MODEL/20/waiting`: 16 such corrections that wait, whose values are trained together, against 16 of the
  textbook's, which takes one after the other. The floor is that of one step over 16 rows.
- `edit/MODEL/100k`: the same edit with so many entries, each an edit that the guard keeps, and with none. These keys
  have no structure, so an edit has to read them once: 1.2 GB of BERT's, which takes this machine 32 to 54 ms.
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
"""Of corrections that wait."""

TEXTBOOK_STEPS = 4
"""Of the textbook, by which its time for all is told: some of its edits take a quarter of an hour."""

TYPICAL_STEPS = 17
"""Steps of a usual edit."""

WAITING = 16
WAITING_TOKENS = {"bert-base": (20, 512), "gpt2-small": (20,), "t5-v1.1-small": (20,)}

CONFIG = EditConfig(
    recipe=ValueTrainingConfig(max_steps=STEPS, learning_rate=1.0, stop_margin=float("inf")),
    traffic_sample_size=0,
    radius=0.1,
)


def run(options: Options) -> Iterator[Row]:
    """Every model whose edits have a goal; `--quick`: one of them, with a twentieth of the entries."""
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
            raise BenchError(f"an edit of {bench_model.name} came out otherwise: {outcome}")
        loss = outcome.loss
        elapsed, _ = timed(model.device, lambda: _textbook(model, text, target, TEXTBOOK_STEPS))  # noqa: B023  (likewise)
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
    """Seconds of what the editor does for corrections that wait."""
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
                raise BenchError(f"an edit of {bench_model.name} came to nothing")
            if result.delta_record is not None:  # else all steps were taken in vain, which takes as long
                engine.apply(result.delta_record)
            steps.append(result.outcome.steps)
        return steps

    seconds, steps = timed(model.device, edit)
    if set(steps) != {STEPS}:
        raise BenchError(f"edits of {bench_model.name} took other numbers of steps: {steps}")
    return seconds


def _stored_rows(bench_model: BenchModel, model: EditableModel, count: int, options: Options) -> Iterator[Row]:
    """An edit in a full codebook and in an empty one, in turns."""
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
            if number:  # the first of each warms up
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
    """Entries by deltas, a thousand each, and the edits that made them."""
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
    """A prompt of so many tokens, and a target that the model does not give."""
    assert bench_model.random is not None
    return bench_model.random.wrong_target(model, tokens, 100 + seed)


def _textbook(model: EditableModel, text: str, target: str, steps: int) -> float:
    """Train a value as a textbook would; the loss at the end."""
    return train(model, model.prepare_correction(text, target)[1], steps, CONFIG.recipe.learning_rate)
