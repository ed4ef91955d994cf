"""Bad input: each record becomes a dead letter with the reason, its sender gets an answer, and the stream goes on."""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from structlog.testing import capture_logs

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.editor.accepted_feedback import admission_from_settings
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.observability.health import Health
from gracestream.pipeline.observability.metrics import REPLICA_REGISTRY
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.replica.request_handler import RequestHandler, RequestRecord
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from gracestream.schemas.deltas import EntryChange
from gracestream.schemas.messages import NearMiss, Prediction, decode, encode
from gracestream.workers.bootstrap import WorkerContext
from gracestream.workers.editor import build_editor
from gracestream.workers.inference import engine_factory
from tests.support.forked_commands import Forked
from tests.support.running import (
    TIMEOUT,
    Users,
    flag,
    headers_of,
    outcomes_in_log,
    question,
    records,
    settings_for,
    wait_for_open_transactions,
    wait_until,
)
from tests.support.tiny_models import added, changed, editable, new_codebook, texts

PROMPT = "The train to the coast leaves at seven"
LONG = " ".join(["river"] * 41)
BROKER_LIMIT = 1_048_588
"""The largest batch in bytes that a broker takes by default."""


def json(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


REQUESTS: dict[str, tuple[bytes | None, str, str | None]] = {
    "not JSON": (b"what is this", "JSON is malformed", None),
    "nothing at all": (b"", "Input data was truncated", None),
    "a list": (b"[1, 2]", "Expected `object`, got `array`", None),
    "a tombstone": (None, "the record has no value", None),
    "Latin-1": ('{"v": 1, "request_id": "latin", "inputs": "café"}'.encode("latin-1"), "not UTF-8", None),
    "half a surrogate": (rb'{"v": 1, "request_id": "s", "inputs": "a \ud83d b"}', "not a valid request", None),
    "nested without end": (b"[" * 3000, "not a valid request", None),
    "no inputs": (json(v=1, request_id="r-1"), "missing required field `inputs`", "r-1"),
    "no version": (json(request_id="r-2", inputs=PROMPT), "missing required field `v`", "r-2"),
    "no id": (json(v=1, inputs=PROMPT), "missing required field `request_id`", None),
    "an id of a wrong type": (json(v=1, request_id=7, inputs=PROMPT), "Expected `str`, got `int`", None),
    "an empty id": (json(v=1, request_id="", inputs=PROMPT), "length >= 1", None),
    "inputs of a wrong type": (json(v=1, request_id="r-3", inputs=7), "Expected `str | array`, got `int`", "r-3"),
    "blank inputs": (json(v=1, request_id="r-4", inputs=" \n"), "`inputs` is empty", "r-4"),
    "a pair": (json(v=1, request_id="r-5", inputs=["a", "b"]), "takes one text, not a pair", "r-5"),
    "a chat for a model without a template": (
        json(v=1, request_id="r-14", inputs=[{"role": "user", "content": PROMPT}]),
        "no chat template; send `inputs` as one text",
        "r-14",
    ),
    "a chat without a role that is known": (
        json(v=1, request_id="r-15", inputs=[{"role": "tool", "content": PROMPT}]),
        "`inputs[0].role` is 'tool'; use system, user or assistant",
        "r-15",
    ),
    "a prompt too long": (
        json(v=1, request_id="r-6", inputs=LONG),
        "limit is 40 (GRACESTREAM_MAX_INPUT_TOKENS)",
        "r-6",
    ),
    "an unknown parameter": (json(v=1, request_id="r-7", inputs="a", parameters={"beams": 4}), "`beams`", "r-7"),
    "a parameter out of range": (
        json(v=1, request_id="r-8", inputs="a", parameters={"max_new_tokens": 0}),
        ">= 1",
        "r-8",
    ),
    "too many new tokens": (
        json(v=1, request_id="r-13", inputs="a", parameters={"max_new_tokens": 5000}),
        "max_new_tokens is 5000; the limit is 512 (GRACESTREAM_MAX_NEW_TOKENS)",
        "r-13",
    ),
    "no room": (json(v=1, request_id="r-9", inputs="a", parameters={"max_new_tokens": 99}), "has room for 64", "r-9"),
    "a negative min_seq": (json(v=1, request_id="r-10", inputs="a", min_seq=-1), ">= 0", "r-10"),
    "a newer version": (json(v=2, request_id="r-11", inputs="a"), "schema version 2 is newer than 1", "r-11"),
    "too large": (
        json(v=1, request_id="r-12", inputs="a", note="x" * 5000),
        "(GRACESTREAM_MAX_RECORD_BYTES)",
        "r-12",
    ),
    "as large as the broker takes": (b"x" * (BROKER_LIMIT - 120), "bytes; the limit is 4096", None),
}

FEEDBACK: dict[str, tuple[bytes | None, str, str | None]] = {
    "not JSON": (b"what is this", "JSON is malformed", None),
    "a tombstone": (None, "the record has no value", None),
    "Latin-1": ('{"v": 1, "feedback_id": "latin", "inputs": "café"}'.encode("latin-1"), "not UTF-8", None),
    "no id": (json(v=1, inputs=PROMPT, target="river"), "missing required field `feedback_id`", None),
    "no target": (json(v=1, feedback_id="f-1", inputs=PROMPT), "or `inputs` and `except_from`, or `undo`", "f-1"),
    "a target of a wrong type": (json(v=1, feedback_id="f-2", inputs=PROMPT, target=[1]), "Expected `str`", "f-2"),
    "an empty target": (json(v=1, feedback_id="f-3", inputs=PROMPT, target="  "), "`target` is empty", "f-3"),
    "both": (json(v=1, feedback_id="f-4", inputs="a", target="b", undo="c"), "not several", "f-4"),
    "a target too long": (json(v=1, feedback_id="f-5", inputs=PROMPT, target="river " * 7), "limit is 6", "f-5"),
    "a prompt too long": (json(v=1, feedback_id="f-6", inputs=LONG, target="river"), "the limit is 40", "f-6"),
    "a pair": (json(v=1, feedback_id="f-7", inputs=["a", "b"], target="river"), "not a pair", "f-7"),
    "a chat for a model without a template": (
        json(v=1, feedback_id="f-11", inputs=[{"role": "user", "content": PROMPT}], target="river"),
        "no chat template; send `inputs` as one text",
        "f-11",
    ),
    "an empty chat": (json(v=1, feedback_id="f-12", inputs=[], target="river"), "`inputs` is an empty list", "f-12"),
    "words that the tokenizer lacks": (
        json(v=1, feedback_id="f-8", inputs=PROMPT, target="zebra"),
        "cannot express",
        "f-8",
    ),
    "a newer version": (json(v=9, feedback_id="f-9", inputs=PROMPT, target="river"), "newer than 1", "f-9"),
    "too large": (json(v=1, feedback_id="f-10", inputs=PROMPT, target="river", note="x" * 5000), "4096", "f-10"),
    "as large as the broker takes": (b"x" * (BROKER_LIMIT - 120), "bytes; the limit is 4096", None),
}


def key_of(number: int, value: bytes | None) -> bytes | None:
    """A key for every other record, and for every tombstone."""
    return f"key-{number}".encode() if number % 2 or value is None else None


def send_among_good(settings: Settings, topic: str, bad: Sequence[bytes | None], good: Sequence[bytes]) -> list[Any]:
    """Send each bad record to one partition, with a good record after it; returns the offsets of the bad records."""
    sender = producer(settings.kafka)
    try:
        sent = []
        for number, value in enumerate(bad):
            key = key_of(number, value)
            sent.append(sender.send(settings.kafka.topic(topic), value=value, key=key, partition=0))
            sender.send(settings.kafka.topic(topic), value=good[number], partition=0)
        sender.flush()
        return [future.get(timeout=30) for future in sent]
    finally:
        sender.close(timeout=5)


def check_dead_letters(settings: Settings, topic: str, cases: dict[str, Any], places: Sequence[Any]) -> None:
    """Each bad record is dead-lettered once, byte for byte, with its key, the reason and its source."""
    dead_letters = {headers_of(letter)["source_offset"]: letter for letter in records(settings, f"{topic}.dlq")}
    assert len(dead_letters) == len(records(settings, f"{topic}.dlq")) == len(cases)
    for number, ((name, (value, reason, _)), place) in enumerate(zip(cases.items(), places, strict=True)):
        letter = dead_letters[str(place.offset)]
        headers = headers_of(letter)
        assert letter.value == value, name
        assert letter.key == key_of(number, value), name
        assert reason in headers["reason"], name
        assert "\n" not in headers["reason"], name
        assert (headers["source_topic"], headers["source_partition"]) == (settings.kafka.topic(topic), "0")


@pytest.fixture(scope="module")
def running(deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    """Users of an editor and one replica with a limit of 4 KiB per record."""
    settings = deploy("llama", f"t{secrets.token_hex(4)}-", max_record_bytes=4096)
    folder = tmp_path_factory.mktemp("running")
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready()
        users = Users(settings)
        yield users
        users.close()
        assert editor.running, editor.stderr()[-3000:]
        assert replica.running, replica.stderr()[-3000:]


def test_bad_requests_are_dead_lettered_and_good_requests_answered(running: Users) -> None:
    settings = running.settings
    good = [question(f"good-{number}", PROMPT) for number in range(len(REQUESTS))]
    ids = [*(request.request_id for request in good), *(case[2] for case in REQUESTS.values() if case[2])]
    with running.client.predictions() as replies:
        bad = [case[0] for case in REQUESTS.values()]
        places = send_among_good(settings, "requests", bad, [encode(request) for request in good])
        answers = replies.wait(ids, TIMEOUT)
    assert sorted(set(ids) - set(answers)) == []
    for request in good:
        assert answers[request.request_id].error is UNSET
    for name, (_, reason, request_id) in REQUESTS.items():
        if request_id is not None:
            assert reason in str(answers[request_id].error), name
            assert answers[request_id].outputs is UNSET
    wait_until(lambda: len(records(settings, "requests.dlq")) >= len(REQUESTS), what="every dead letter")
    check_dead_letters(settings, "requests", REQUESTS, places)
    wait_until(lambda: len(records(settings, "predictions")) == len(ids), what="one answer each")


def test_bad_feedback_is_dead_lettered_and_good_feedback_decided(running: Users) -> None:
    settings = running.settings
    good = [flag(f"good-{number}", prompt, "river") for number, prompt in enumerate(texts(len(FEEDBACK), seed=3))]
    ids = [*(one.feedback_id for one in good), *(case[2] for case in FEEDBACK.values() if case[2])]
    with running.client.outcomes() as replies:
        bad = [case[0] for case in FEEDBACK.values()]
        places = send_among_good(settings, "feedback", bad, [encode(one) for one in good])
        outcomes = replies.wait(ids, TIMEOUT)
    assert sorted(set(ids) - set(outcomes)) == []
    for name, (_, reason, feedback_id) in FEEDBACK.items():
        if feedback_id is not None:
            assert outcomes[feedback_id].status == "rejected", name
            assert reason in str(outcomes[feedback_id].reason), name
    assert sum(outcomes[one.feedback_id].status != "rejected" for one in good) > len(good) / 2
    wait_for_open_transactions(settings, "edits", "feedback.dlq")
    check_dead_letters(settings, "feedback", FEEDBACK, places)
    assert len(outcomes_in_log(settings)) == len(ids)


def replies_of(handler: RequestHandler, records: Sequence[RequestRecord]) -> list[Prediction]:
    """The predictions for records that arrive together."""
    finished = handler.step(handler.prepare(records).requests)
    while handler.engine.active:
        finished += handler.step([])
    return [decode(reply.value, Prediction) for _, reply in finished]


@pytest.mark.parametrize("engine", ["batch", "continuous"])
def test_only_the_request_on_which_the_model_fails_gets_an_error(
    kafka: str, redis_url: str, prefix: str, engine: str
) -> None:
    settings = settings_for(kafka, redis_url, prefix, engine=engine)
    model = editable("llama")
    codebook = Codebook("default", model.fingerprint, model.layer)
    store = RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, settings.model.codebook)
    codebook_replica = CodebookReplica(
        codebook, KeyIndex(codebook, model.device), store, DeltaFollower(settings.kafka), settings
    )
    handler = RequestHandler(model, codebook_replica, settings.kafka, "replica", engine_factory(model, settings))
    prompts = texts(4, seed=5)
    words = [set(prompt.split()) for prompt in prompts]
    (breaking,) = model.task.tokenize(min(words[2] - words[0] - words[1] - words[3])).token_ids

    def fail(_module: object, args: Any) -> None:
        if args[0].shape[1] > 1 and (args[0] == breaking).any():
            raise RuntimeError("a tensor of no shape")

    model.module.get_input_embeddings().register_forward_pre_hook(fail)
    given = [
        RequestRecord(encode(question(f"q{number}", prompt)), "requests", 0, number, 0.0)
        for number, prompt in enumerate(prompts)
    ]
    restarted = REPLICA_REGISTRY.get_sample_value("gracestream_requests_restarted_total") or 0
    with capture_logs() as events:
        answers = {answer.request_id: answer for answer in replies_of(handler, given)}
    assert [(event["event"], event["reason"]) for event in events] == [
        ("requests_restarted", "RuntimeError: a tensor of no shape"),
        ("request_failed", "RuntimeError: a tensor of no shape"),
    ]
    assert events[0]["requests"] == 4
    assert REPLICA_REGISTRY.get_sample_value("gracestream_requests_restarted_total") == restarted + 4
    assert answers["q2"].error == "the model failed: RuntimeError: a tensor of no shape"
    assert [answers[fid].error for fid in ("q0", "q1", "q3")] == [UNSET] * 3


def test_feedback_on_which_the_model_fails_is_rejected_and_the_next_is_decided(
    deployment: Settings, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = editable("bert")
    examine = model.suffix_runner.inspect

    def fragile(supervised: Any, *rest: Any) -> Any:
        if len(supervised.batch.kwargs["input_ids"][0]) == 5:
            raise RuntimeError("a tensor of no shape")
        return examine(supervised, *rest)

    monkeypatch.setattr(model.suffix_runner, "inspect", fragile)
    stop = threading.Event()
    editor = build_editor(
        WorkerContext("editor", Health(), model, stop),
        deployment,
        admission_from_settings(deployment.auth, deployment.kafka, deployment.model.codebook),
    )
    working = threading.Thread(target=editor.run, args=[stop])
    working.start()
    try:
        outcomes = users.correct(
            flag("breaks", "The cat slept", "right"), flag("works", "The old bridge was closed", "both")
        )
    finally:
        stop.set()
        working.join(10)
    assert outcomes["breaks"].status == "rejected"
    assert outcomes["breaks"].reason == "the model failed: RuntimeError: a tensor of no shape"
    assert outcomes["works"].status in {"added", "unchanged"}


def test_an_answer_that_is_not_the_entrys_target_is_never_sent(kafka: str, redis_url: str, prefix: str) -> None:
    settings = settings_for(kafka, redis_url, prefix)
    model = editable("bert")
    codebook = new_codebook(model.fingerprint, model.layer)
    store = RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, settings.model.codebook)
    codebook_replica = CodebookReplica(
        codebook, KeyIndex(codebook, model.device), store, DeltaFollower(settings.kafka), settings
    )
    (prompt,) = texts(1, seed=5)
    record = RequestRecord(encode(question("q", prompt)), "requests", 0, 0, 0.0)

    def served(*, check_answers: bool = True) -> Prediction:
        checked = settings_for(kafka, redis_url, prefix, check_answers=check_answers)
        handler = RequestHandler(model, codebook_replica, settings.kafka, "replica", engine_factory(model, checked))
        (prediction,) = replies_of(handler, [record])
        return prediction

    unedited = served()
    (query_D,) = model.queries([model.task.tokenize(prompt)]).numpy()
    value_V = np.zeros(model.module.config.hidden_size)
    labels = model.module.config.num_labels
    for label in range(labels):  # a value gives at most one of these targets
        codebook_replica.index.refresh(changed(codebook, added(f"e{label}", query_D, 0.01, (label,), value_V)))
        answer, unchecked = served(), served(check_answers=False)
        assert unchecked.edit is not UNSET
        target = model.task.decode_label((label,))
        if unchecked.outputs is not UNSET and unchecked.outputs.label == target:
            assert answer.edit == unchecked.edit
            assert answer.near_miss is UNSET
        else:
            assert answer.edit is UNSET
            assert answer.near_miss == NearMiss(
                entry_id=f"e{label}",
                distance=unchecked.edit.distance,
                radius=unchecked.edit.radius,
                reason="answer",
                target=target,
            )
            assert answer.outputs == unedited.outputs
        codebook_replica.index.refresh(changed(codebook, EntryChange(entry_id=f"e{label}", removed=True), op="undo"))
