"""The vLLM engine: the behaviour of every engine, with real weights, chunks of prompts and cached prefixes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.settings import load_settings
from gracestream.workers.bootstrap import checkpoint_from_settings, edit_config_from_settings, load_model
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
from tests.support.tiny_models import added, correct, sealed

pytest.importorskip("vllm", reason="tests/system/test_vllm.py runs these tests in vLLM's own environment")

from gracestream.pipeline.vllm.engine import VllmEngine
from gracestream.pipeline.vllm.startup import start_engine

RIGHT = (
    "Question: Which small town near the northern coast, at the mouth of the river and not far from the old border, is"
    " the seat of the oldest museum of tea pots? Answer:"
)
"""The input of a correction. Its tokens fill more than one block of the cache, and more than one chunk."""

WRONG = "My favourite kind of weather is"
PROMPTS = (
    RIGHT,
    WRONG,
    "The capital of France is",
    "She put the violin back and said",
    "In the year 1999 the people of the town decided that",
    "Water boils at a lower",
)
CHUNK_TOKENS = 32
BLOCK_TOKENS = 32
ARGUMENTS = (
    f"--enforce-eager --max-model-len 512 --max-num-batched-tokens {CHUNK_TOKENS} --block-size {BLOCK_TOKENS}"
    " --max-num-seqs 8 --enable-prefix-caching"
)

pytestmark = pytest.mark.timeout(900)


@functools.cache
def edited() -> EditEngine:
    """A correction of `RIGHT`, and an entry at `WRONG` that fails the answer check. The model keeps its weights."""
    chosen = load_settings(device="cpu")
    model = load_model(chosen.model, chosen.editing.policy)
    engine = EditEngine(model, "default", edit_config_from_settings(chosen.editing, uses_encoder=True))
    engine.apply(engine.lead_delta({}))
    assert correct(engine, "right", RIGHT, "Bergen Hollow")[0].status == "added"
    (query_D,) = model.queries([model.task.tokenize(WRONG)]).cpu().numpy()
    value_V = np.random.default_rng(0).standard_normal(model.module.config.hidden_size)
    label = model.task.encode_target(WRONG, "violin museum")
    engine.apply(sealed(engine.codebook, added("wrong", query_D, 0.01, label, value_V)))
    return engine


@functools.cache
def vllm() -> tuple[Any, EditableModel]:
    """vLLM's engine, and the model without weights. A process has one."""
    chosen = load_settings(device="cpu", engine="vllm", vllm_args=ARGUMENTS)
    model = load_model(chosen.model, chosen.editing.policy)
    model.drop_weights()
    return start_engine(model, checkpoint_from_settings(chosen.model), chosen), model


@pytest.fixture(scope="module", autouse=True)
def _started() -> None:
    """An engine that does not start is tried once."""
    vllm()


def make(lookup: CodebookLookup, max_rows: int) -> VllmEngine[Asked]:
    llm, model = vllm()
    return VllmEngine(llm, model, lookup, max_rows=max_rows, check_answers=True)


@functools.cache
def expected(text: str, parameters: Any) -> tuple[object, ...]:
    engine = edited()
    prompt = engine.model.task.tokenize(text)
    (served,) = engine.model.answer([prompt], [parameters], engine.lookup, check_answers=True)
    return shown(served)


def alone(request: Asked) -> tuple[object, ...]:
    """The answer of Hugging Face's model, which the editor uses, to one request by itself."""
    return expected(request.text, request.parameters)


@contextmanager
def failing_on(token: int, error: Exception) -> Iterator[None]:
    """vLLM's model raises the error if a step has the token."""

    def check(_module: Any, _args: Any, kwargs: Any) -> None:
        if (kwargs["input_ids"] == token).any():
            raise error

    llm, _ = vllm()
    (handle,) = llm.apply_model(lambda model: model.register_forward_pre_hook(check, with_kwargs=True))
    try:
        yield
    finally:
        handle.remove()


def site() -> EngineSite:
    engine = edited()
    return EngineSite(engine.model, engine.codebook, make, alone, failing_on, PROMPTS)


PARAMETERS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(8, 14)},
    optional={"min_new_tokens": st.sampled_from([0, 4]), "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7])},
)
ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        PARAMETERS | st.fixed_dictionaries({"max_new_tokens": st.integers(1, 3)}),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=10)
@given(ARRIVALS, st.integers(1, 5))
def test_an_answer_is_the_editors_to_the_letter_alone_and_in_any_company(
    arrivals: list[tuple[str, dict[str, float], int]], max_rows: int
) -> None:
    check_any_company(site(), arrivals, max_rows)


def test_served_missed_and_unedited_requests_share_a_step() -> None:
    check_shared_step(site())


def test_an_answer_is_of_the_codebook_that_its_request_joined() -> None:
    check_joined_codebook(site())


def test_a_request_on_which_the_model_fails_fails_alone() -> None:
    check_failure_alone(site())


def test_dropped_requests_leave_and_the_others_go_on() -> None:
    check_dropped(site())


def test_cached_prefixes_of_an_edited_prompt_reach_no_unedited_one() -> None:
    """The prompt of a correction is cached; then prompts that begin with its tokens, and its own once it is undone."""
    here = site()
    assert len(here.asked(RIGHT).prompt) > BLOCK_TOKENS
    empty = EditEngine(here.model, "default")
    longer = [f"{RIGHT} Bergen Hollow", f"{RIGHT} Bergen Hollow. Question: Who lives there? Answer:"]
    requests = [here.asked(RIGHT, max_new_tokens=12)]
    for _ in range(2):
        assert [shown(one.served) for one in answer_all(make(here.lookup, 4), requests)] == [alone(requests[0])]
    for text in (*longer, RIGHT):
        request = here.asked(text, max_new_tokens=12)
        (unedited,) = here.model.answer([request.prompt], [request.parameters], empty.lookup)
        (one,) = answer_all(make(empty.lookup, 4), [request])
        assert shown(one.served) == shown(unedited)


def test_a_failed_step_leaves_no_block_in_the_cache() -> None:
    """vLLM lists blocks as cached when it schedules them. The step that computes these fails."""
    here = site()
    long = f"Once there was a {' and a '.join(['dog', 'cat', 'bird', 'fish', 'horse'] * 5)} that lived in"
    bad = here.asked(f"{long} zebra")
    good = here.asked(f"{long} the", max_new_tokens=8)
    expected_answer = alone(good)
    made = make(here.lookup, 4)
    with failing_on(bad.prompt.token_ids[-1], RuntimeError("a tensor of no shape")):
        (failed,) = answer_all(made, [bad])
    assert failed.failure == "RuntimeError: a tensor of no shape"
    (one,) = answer_all(made, [good])
    assert shown(one.served) == expected_answer


def test_an_edit_at_the_first_token_of_a_chunk_applies() -> None:
    """A chunk ends just before the last token of the prompt, so that a step computes this token alone."""
    engine = edited()
    text = RIGHT
    while (len(engine.model.task.tokenize(text).token_ids) - 1) % CHUNK_TOKENS:
        text = f"Well, {text}"
    assert correct(engine, "chunked", text, "Bergen Hollow")[0].status in ("added", "expanded", "unchanged")
    request = asked(engine.model, text)
    (one,) = answer_all(make(engine.lookup, 4), [request])
    assert one.served
    assert one.served.served_by is not None
    assert one.served.answer.outputs.text == "Bergen Hollow"


def test_a_parameter_that_vllm_does_not_have_is_an_error() -> None:
    (one,) = answer_all(make(edited().lookup, 4), [site().asked(RIGHT, no_repeat_ngram_size=2)])
    assert one.failure == "ValueError: no_repeat_ngram_size is not supported with GRACESTREAM_ENGINE=vllm"


def test_the_model_without_weights_makes_the_same_queries() -> None:
    prompts = [edited().model.task.tokenize(text) for text in PROMPTS]
    assert torch.equal(vllm()[1].queries(prompts), edited().model.queries(prompts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-option", "GRACESTREAM_VLLM_ARGS: "),
        ("--dtype bfloat16", "vLLM runs the model in bfloat16, and GRACESTREAM_DTYPE is float32: set --dtype or"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: str, message: str) -> None:
    chosen = load_settings(device="cpu", engine="vllm", vllm_args=arguments)
    with pytest.raises(UserError, match=message):
        start_engine(vllm()[1], checkpoint_from_settings(chosen.model), chosen)
