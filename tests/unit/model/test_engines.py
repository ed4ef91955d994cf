"""Every engine: the same answer alone and in any company, from one state of the codebook, and no harm to neighbours."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.batch import BatchEngine
from gracestream.pipeline.model.engines.choose import EngineName, make_engine
from gracestream.pipeline.model.engines.continuous import MAX_PREFILL_TOKENS, ContinuousEngine
from gracestream.pipeline.model.layers import linear_layers
from gracestream.schemas.messages import Parameters
from tests.support.engine_behaviour import (
    EngineSite,
    check_any_company,
    check_dropped,
    check_failure_alone,
    check_joined_codebook,
    check_shared_step,
    shown,
)
from tests.support.engine_requests import Asked, answer_all, asked
from tests.support.tiny_models import (
    KINDS,
    LIMITS,
    MODEL,
    SIZE,
    Failing,
    added,
    correct,
    editable,
    index_of,
    new_codebook,
    sealed,
    texts,
    tokenizer,
)

ENGINES: dict[str, Any] = {"batch": BatchEngine, "continuous": ContinuousEngine}
CAUSAL = ["llama", "gpt2"]
SUPPORTED = [(kind, "batch") for kind in KINDS] + [(kind, "continuous") for kind in CAUSAL]
every_engine = pytest.mark.parametrize(("kind", "name"), SUPPORTED)

PROMPTS = texts(8, seed=5)
RIGHT, WRONG = PROMPTS[:2]
"""The input of a correction, and a prompt that an entry serves without giving its target."""


def engine_for(name: str, engine: EditEngine, max_rows: int = 4) -> Any:
    return ENGINES[name](engine.model, engine.lookup, max_rows=max_rows, check_answers=True)


@functools.cache
def edited(kind: str) -> EditEngine:
    """A model with a correction of `RIGHT` and an entry at `WRONG` that fails the answer check."""
    engine = EditEngine(editable(kind), "default")
    engine.apply(engine.lead_delta({}))
    (query_D,) = engine.model.queries([engine.model.task.tokenize(WRONG)]).cpu().numpy()
    value_V = np.random.default_rng(0).standard_normal(engine.model.module.config.hidden_size)
    if kind == "bert":
        assert "added" in [correct(engine, f"f{target}", RIGHT, target)[0].status for target in ("wrong", "right")]
        trial = new_codebook()
        trial.apply(sealed(trial, added("trial", query_D, 0.01, value=value_V)))
        lookup = CodebookLookup(trial, index_of(trial))
        (given,) = engine.model.answer([engine.model.task.tokenize(WRONG)], [Parameters()], lookup)
        label = engine.model.task.encode_target(WRONG, "both" if given.answer.outputs.label == "wrong" else "wrong")
    else:
        assert correct(engine, "f0", RIGHT, "train")[0].status == "added"
        label = engine.model.task.encode_target(WRONG, "violin museum")
    engine.apply(sealed(engine.codebook, added("fails", query_D, 0.01, label, value_V)))
    return engine


def alone(engine: EditEngine, request: Asked) -> tuple[object, ...]:
    """The answer of the model to one request by itself."""
    (served,) = engine.model.answer([request.prompt], [request.parameters], engine.lookup, check_answers=True)
    return shown(served)


PARAMETERS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(8, 20)},
    optional={
        "min_new_tokens": st.integers(0, 8),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
        "no_repeat_ngram_size": st.integers(0, 3),
    },
)
SHORT = st.fixed_dictionaries({"max_new_tokens": st.integers(1, 3)})
ARRIVALS = st.lists(
    st.tuples(st.sampled_from(PROMPTS), PARAMETERS | SHORT, st.integers(0, 30)), min_size=1, max_size=10
)


def site(kind: str, name: str) -> EngineSite:
    """An engine over a model with the two entries."""
    engine = edited(kind)

    def make(lookup: CodebookLookup, max_rows: int) -> Any:
        return ENGINES[name](engine.model, lookup, max_rows=max_rows, check_answers=True)

    return EngineSite(
        engine.model,
        engine.codebook,
        make,
        partial(alone, engine),
        partial(failing_on, engine.model),
        PROMPTS,
        takes_parameters=kind != "bert",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "continuous"), ("gpt2", "continuous"), ("gpt2", "batch"), ("t5-encoder", "batch"), ("bert", "batch")],
)
@given(ARRIVALS, st.integers(1, 5))
def test_an_answer_is_the_same_alone_and_in_any_company_and_order(
    kind: str, name: str, arrivals: list[tuple[str, dict[str, float], int]], max_rows: int
) -> None:
    check_any_company(site(kind, name), arrivals, max_rows)


@every_engine
def test_served_missed_and_unedited_requests_share_a_step(kind: str, name: str) -> None:
    check_shared_step(site(kind, name))


@every_engine
def test_an_answer_is_of_the_codebook_that_its_request_joined(kind: str, name: str) -> None:
    check_joined_codebook(site(kind, name))


@contextmanager
def failing_on(model: EditableModel, token: int, error: Exception) -> Iterator[None]:
    """The model raises the error if it reads a prompt with the token."""

    def check(_module: Any, args: Any) -> None:
        if args[0].shape[1] > 1 and (args[0] == token).any():
            raise error

    embeddings = [each for each in model.module.modules() if isinstance(each, torch.nn.Embedding)]
    handles = [each.register_forward_pre_hook(check) for each in embeddings if each.num_embeddings == SIZE]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@every_engine
def test_a_request_on_which_the_model_fails_fails_alone(kind: str, name: str) -> None:
    check_failure_alone(site(kind, name))


@pytest.mark.parametrize("name", list(ENGINES))
def test_requests_that_do_not_fit_together_are_answered_one_by_one(name: str) -> None:
    engine = edited("llama")
    requests = [asked(engine.model, text) for text in PROMPTS]
    expected = [alone(engine, request) for request in requests]
    layers = engine.model.module.model.layers
    whole = layers[2].mlp
    layers[2].mlp = Failing(whole, torch.OutOfMemoryError("CUDA out of memory"), room=1)
    try:
        made = engine_for(name, engine)
        finished = answer_all(made, requests, [0, 0, 0, 0, 0, 2, 3, 4])
        layers[2].mlp.room = 0
        hopeless = answer_all(engine_for(name, engine), requests[:3])
    finally:
        layers[2].mlp = whole
    assert [one.served and shown(one.served) for one in finished] == expected
    assert made.num_restarted > 1
    assert made.restart_reason == "OutOfMemoryError: CUDA out of memory"
    assert {one.failure for one in hopeless} == {"OutOfMemoryError: CUDA out of memory"}


def test_a_request_without_room_beside_others_is_answered_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = edited("llama")
    requests = [asked(engine.model, text, max_new_tokens=5) for text in PROMPTS[2:5]]
    made = engine_for("continuous", engine)
    prefill = engine.model.prefill

    def full(prompts: Any, lookup: Any) -> Any:
        if made.active:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(prompts, lookup)

    monkeypatch.setattr(engine.model, "prefill", full)
    finished = answer_all(made, requests, [0, 1, 2])
    assert made.num_restarted == 1
    assert [one.served and shown(one.served) for one in finished] == [alone(engine, request) for request in requests]


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_lost_device_answers_nothing(name: str) -> None:
    engine = edited("llama")
    request = asked(engine.model, RIGHT)
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with failing_on(engine.model, request.prompt.token_ids[0], error), pytest.raises(DeviceLostError):
        answer_all(engine_for(name, engine), [request])


def test_a_short_answer_does_not_wait_for_a_long_one() -> None:
    engine = edited("llama")
    long = asked(engine.model, PROMPTS[3], min_new_tokens=30, max_new_tokens=30)
    short = asked(engine.model, PROMPTS[4], max_new_tokens=2)
    made = engine_for("continuous", engine)
    assert made.step([long]) == []
    assert made.step([]) == []
    (finished,) = made.step([short])  # the prompt gives the first token, and the same step the second
    assert finished.request is short
    assert made.active == 1


def test_the_longest_waiting_request_joins_first_and_a_prefill_is_bounded() -> None:
    engine = edited("llama")
    made = engine_for("continuous", engine, 64)
    assert made.select([]) == []
    bound = MAX_PREFILL_TOKENS["cpu"]
    waiting = [asked(engine.model, text) for text in texts(100, seed=9)]
    selected = made.select(waiting)
    assert selected[0] == 0
    assert len(set(selected)) == len(selected) > 20
    assert max(len(waiting[index].prompt) for index in selected) * len(selected) <= bound
    long = [Asked("", Prompt((5,) * length), Parameters(), None) for length in (bound // 2, 1, bound, bound // 2 - 1)]
    assert made.select(long) == [0, 3]
    long[0] = Asked("", Prompt((5,) * 2 * bound), Parameters(), None)
    assert made.select(long) == [0], "a prompt that is longer than the bound joins alone"
    small = engine_for("continuous", engine, 5)
    small.step(waiting[:3])
    assert len(small.select(waiting[3:])) == 5 - small.active
    assert 0 in small.select(waiting[3:])


@pytest.mark.parametrize("name", list(ENGINES))
def test_dropped_requests_leave_and_the_others_go_on(name: str) -> None:
    check_dropped(site("llama", name), kept_active=0 if name == "batch" else 2)


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5},
    "bloom": {"n_layer": 3, "n_head": 4},
    "gpt_neo": {
        "num_layers": 3, "num_heads": 4, "window_size": 5,
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
    },
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "expansion_ratio": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "sliding_window": 5},
    "mamba": {"state_size": 4},
}  # fmt: skip
"""Models unlike llama: windows, biases instead of positions, experts; and one without attention."""


def family(name: str) -> EditableModel:
    config = AutoConfig.for_model(
        name, vocab_size=SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=2, eos_token_id=4,
        **FAMILIES[name],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config)
    layer = linear_layers(module)[-1].path.replace("*", "0", 1)
    return EditableModel(module, tokenizer(), layer, limits=LIMITS, fingerprint=MODEL)


def chosen(name: EngineName, engine: EditEngine) -> tuple[Any, list[str]]:
    """The engine of a replica for three requests at a time, and why `auto` did not take the continuous one."""
    reasons: list[str] = []
    made: Any = make_engine(
        name, engine.model, engine.lookup, max_rows=3, check_answers=True, on_fallback=reasons.append
    )
    return made, reasons


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mamba"])
def test_families_of_attention_decode_rows_of_different_ages_together(name: str) -> None:
    engine = EditEngine(family(name), "default")
    requests = [
        asked(engine.model, text, max_new_tokens=budget)
        for text, budget in zip(PROMPTS, (3, 30, 9, 1, 20, 5, 12, 30), strict=True)
    ]
    made, _ = chosen("auto", engine)
    assert isinstance(made, ContinuousEngine)
    finished = answer_all(made, requests, [0, 0, 2, 5, 5, 8, 9, 20])
    assert [one.served and shown(one.served) for one in finished] == [alone(engine, request) for request in requests]


def test_a_model_without_keys_and_values_gets_the_batch_engine_and_a_warning() -> None:
    engine = EditEngine(family("mamba"), "default")
    made, reasons = chosen("auto", engine)
    assert isinstance(made, BatchEngine)
    assert len(reasons) == 1
    requests = [asked(engine.model, text) for text in PROMPTS]
    assert [one.served and shown(one.served) for one in answer_all(made, requests)] == [
        alone(engine, request) for request in requests
    ]
    with pytest.raises(
        UserError, match="does not support GRACESTREAM_ENGINE=continuous: its keys and values cannot be"
    ):
        chosen("continuous", engine)


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", ContinuousEngine), ("t5-encoder", BatchEngine), ("bert", BatchEngine)]
)
def test_auto_is_continuous_for_causal_models(kind: str, expected: type) -> None:
    engine = edited(kind)
    made, _ = chosen("auto", engine)
    assert type(made) is expected
    asked_for, _ = chosen("batch", engine)
    assert type(asked_for) is BatchEngine
    if expected is BatchEngine:
        with pytest.raises(UserError, match="it is not a causal language model"):
            chosen("continuous", engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_whose_rows_affect_each_other_gets_the_batch_engine(dtype: torch.dtype) -> None:
    """As one that ignores the attention mask would."""
    engine = EditEngine(editable("gpt2", dtype=dtype), "default")
    assert type(chosen("auto", engine)[0]) is ContinuousEngine
    forward = engine.model.module.forward

    def ignore_mask(attention_mask: Any = None, **kwargs: Any) -> Any:
        del attention_mask
        return forward(**kwargs)

    engine.model.module.forward = ignore_mask
    made, reasons = chosen("auto", engine)
    assert isinstance(made, BatchEngine)
    assert "rows of different lengths affect each other" in reasons[0]
