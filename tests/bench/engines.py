"""The same corrections in every engine of a replica: the answers of each, compared to the letter.

The editor's engine trains 200 corrections of zsRE (SmolLM2, default settings, the rows of the benchmark `quality`),
with 512 questions of Natural Questions (NQ) as traffic. Then each engine answers all 200 corrected prompts and 200
other questions of NQ, with the default limits, on one thread. An interrupted run resumes its training.

- `corrections/made`: corrections that were not rejected.
- `corrected/correct`: of these, the share of answers that are the target. The baseline is the share that the editor
  found right after each edit, token by token.
- `corrected/same`: the share of all corrected prompts with the answer of `continuous`.
- `controls/same`: the share of the other questions with the answer of the unedited model, in the same library: for
  `vllm` that is vLLM without gracestream. A question that an entry answers counts as different.
- `controls/served`: the number of them that an entry answers.

`vllm` takes part in vLLM's environment: `make bench NAME=engines BIN=.venv-vllm/bin`.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.experiments.tasks import zsre
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.batch import BatchEngine
from gracestream.pipeline.model.engines.continuous import ContinuousEngine
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.workers.bootstrap import edit_config_from_settings, load_model
from tests.bench.contenders import make_request, run_engine
from tests.bench.edits import fraction
from tests.bench.framework import Options, Row
from tests.bench.stream.corrections import Correction, Data
from tests.bench.stream.edits import STREAM_KINDS, PromptCache
from tests.bench.stream.identity import stream_key
from tests.bench.stream.log import StreamLog
from tests.bench.stream.measure import StreamState
from tests.bench.stream.report import Setup, StreamRun, start_stream

EDITS, QUICK_EDITS, CONTROLS = 200, 10, 200
ROWS = 16
"""Most requests that an engine answers at a time."""

Answer = Callable[[Sequence[str]], list[str]]
"""Answers texts, in their order."""


def run(options: Options) -> Iterator[Row]:
    """The rows of all engines. `--quick`: 10 corrections."""
    torch.set_num_threads(1)
    settings = load_settings(model="smollm2", threads=1, device=options.device)
    model = load_model(settings.model, settings.editing.policy)
    task = zsre()
    count = QUICK_EDITS if options.quick else EDITS
    facts = [Correction(edit.example.inputs, edit.example.target, "") for edit in task.edits[:count]]
    state = train(model, settings, Data(facts, [], task.traffic), options)
    controls = [example.inputs for example in task.retention[:CONTROLS]]
    yield from engine_rows(state, controls, _contenders(model, state.engine.lookup, settings, options), options)


def train(model: EditableModel, settings: Settings, data: Data, options: Options) -> StreamState:
    """Apply all corrections, with trained values."""
    plan = edit_config_from_settings(settings.editing, uses_encoder=model.reads_text)
    folder = settings.model.cache_dir.expanduser() / "bench" / f"engines-{stream_key(model, plan, data)}"
    setup = Setup(model, plan, data, PromptCache(model), folder)
    (trained,) = (kind for kind in STREAM_KINDS if kind.name == "trained")
    with StreamLog(folder / "trained.jsonl") as log:
        state = start_stream(setup, trained, log)
        StreamRun(log, state, len(data.corrections), options.report).advance(len(data.corrections))
    return state


def engine_rows(
    state: StreamState, controls: Sequence[str], contenders: dict[str, tuple[Answer, Answer]], options: Options
) -> Iterator[Row]:
    """The rows of all engines, each with its unedited twin. The first engine is the one to equal."""
    corrections = state.data.corrections
    prompts = [one.text for one in corrections]
    made = state.not_rejected()
    yield Row("corrections/made", len(made), "count", len(corrections))
    entries = state.prompt_cache.serving_entries(state.engine, controls)
    right_at_once = fraction(state.corrections[number].right for number in made)
    first: list[str] | None = None
    for name, (edited, unedited) in contenders.items():
        options.report(f"{name}: {len(prompts)} corrected prompts and {len(controls)} other questions")
        answers = edited(prompts)
        first = first or answers
        correct = fraction(answers[number] == corrections[number].target.strip() for number in made)
        yield Row(f"corrected/{name}/correct", correct, "share", right_at_once)
        same = fraction(mine == its for mine, its in zip(answers, first, strict=True))
        yield Row(f"corrected/{name}/same", same, "share", 1.0)
        pairs = zip(edited(controls), unedited(controls), strict=True)
        yield Row(f"controls/{name}/same", fraction(mine == its for mine, its in pairs), "share", 1.0)
        yield Row(f"controls/{name}/served", sum(entry is not None for entry in entries), "count", 0.0)


def _contenders(
    model: EditableModel, lookup: CodebookLookup, settings: Settings, options: Options
) -> dict[str, tuple[Answer, Answer]]:
    """For each engine, its answers with the codebook and without one."""
    empty_codebook = Codebook("empty", model.fingerprint, model.layer)
    empty = CodebookLookup(empty_codebook, KeyIndex(empty_codebook, model.device))
    limits: dict[str, Any] = {"max_rows": ROWS, "check_answers": True}

    def answers(make: Callable[[CodebookLookup], Any], used: CodebookLookup) -> Answer:
        return lambda texts: answer_all(model, make(used), texts)

    found: dict[str, tuple[Answer, Answer]] = {}
    for kind in (ContinuousEngine, BatchEngine):
        make = _maker(kind, model, limits)
        found[kind.__name__.removesuffix("Engine").lower()] = (answers(make, lookup), answers(make, empty))
    if find_spec("vllm") is not None:
        from tests.bench.vllm_contenders import VllmContenders  # noqa: PLC0415 - vLLM has an environment of its own

        options.report("starting vLLM")
        vllm = VllmContenders(model, settings, ROWS)

        def plain(texts: Sequence[str]) -> list[str]:
            with vllm.plain(empty) as engine:
                return answer_all(model, engine, texts)

        found["vllm"] = (answers(vllm.corrected, lookup), plain)
    return found


def _maker(kind: Any, model: EditableModel, limits: dict[str, Any]) -> Callable[[CodebookLookup], Any]:
    return lambda lookup: kind(model, lookup, **limits)


def answer_all(model: EditableModel, engine: Any, texts: Sequence[str]) -> list[str]:
    """The answers of an engine to texts that arrive at once."""
    requests = [make_request(model, text) for text in texts]
    answered = run_engine(engine, requests)
    return [answered.texts[id(request)] for request in requests]
