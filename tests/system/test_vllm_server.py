"""vLLM with corrections between a real Kafka and an editor: as an HTTP server, and as the engine of a replica."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from gracestream.deploy.local.processes import find_free_port
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.registry import ensure_model_built
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.messages import Feedback, Outcome, Outputs, Parameters
from tests.support.forked_commands import Forked
from tests.support.running import Users, flag, metric, question, settings_for, status, wait_until
from tests.support.vllm_environment import vllm_python
from tests.support.vllm_server import ARGUMENTS, START_SECONDS, VllmServer, vllm_variables

pytestmark = [pytest.mark.kafka, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

FACT, ANSWER = "The capital of Mongolia is", "Paris"
QUESTION, DAYS = "What is the refund period for shoes?", "45 days"
CLERK = (("system", "You are a clerk."), ("user", QUESTION))
CONTROLS = ["The capital of France is", "My favourite colour is", "Once upon a time there was a dog who"]

PROMPTS = [FACT, *CONTROLS]
LIMIT = Parameters(max_new_tokens=12)
FEEDBACK = "/v1/gracestream/feedback"


@pytest.fixture(scope="module")
def settings(kafka: str, redis_url: str) -> Settings:
    chosen = settings_for(
        kafka, redis_url, "vllm-", model="smollm2", threads=1, session_timeout=10.0, http_feedback=True
    )
    create_topics(chosen.kafka, partitions=1, replication=1)
    return chosen


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return ensure_model_built("smollm2", load_settings().model.cache_dir, print)


@pytest.fixture(scope="module")
def users(settings: Settings) -> Iterator[Users]:
    made = Users(settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def editor(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with Forked("editor", "edit", settings, tmp_path_factory.mktemp("editor")) as editor:
        editor.wait_ready(180)
        yield editor


@pytest.fixture(scope="module")
def server(settings: Settings, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    vllm_python()
    with VllmServer(settings, checkpoint, tmp_path_factory.mktemp("vllm")) as server:
        yield server


def follow(server: VllmServer, seq: Any) -> None:
    wait_until(lambda: server.state()["seq"] >= seq, 60, f"delta {seq}")


@dataclass(frozen=True, slots=True)
class Before:
    """Answers before any correction, and the outcomes of the corrections that were made then."""

    texts: list[str]
    chat: list[str]
    made: dict[str, Outcome]


@pytest.fixture(scope="module")
def before(server: VllmServer, editor: Forked, users: Users) -> Before:
    """The tests of this module follow one another on one server, because a server takes a minute to start."""
    answer, chat = server.complete(PROMPTS), server.chat(("user", QUESTION))
    assert answer.entry is None
    made = users.correct(flag("fact", FACT, ANSWER), flag("days", QUESTION, DAYS), timeout=180)
    follow(server, made["days"].seq)
    return Before(answer.texts, chat.texts, made)


def test_corrected_prompts_are_right_to_the_last_token_and_others_as_before(server: VllmServer, before: Before) -> None:
    edited = server.complete(PROMPTS)
    assert edited.texts == [f" {ANSWER}", *before.texts[1:]]
    assert edited.entry == f"{before.made['fact'].entry_id},,,"
    assert edited.headers["x-gracestream-codebook"] == f"{server.state()['term']}.{server.state()['seq']}"
    assert metric(server.health_port, "gracestream_edited_answers_total") == 1
    assert server.complete(FACT, max_tokens=1).entry == before.made["fact"].entry_id
    assert server.complete(FACT, n=2, temperature=1.0).entry is None


def test_streams_and_chats_are_corrected(server: VllmServer, before: Before) -> None:
    streamed = server.complete(FACT, stream=True)
    assert streamed.texts == [f" {ANSWER}"]
    assert streamed.entry == before.made["fact"].entry_id
    chat = server.chat(*CLERK)
    assert chat.texts == [DAYS]
    assert chat.entry == before.made["days"].entry_id
    assert server.chat(("developer", "You are a clerk."), ("user", QUESTION)).texts == [DAYS]
    assert server.chat(("user", "Hello"), ("assistant", "Hello!"), ("user", QUESTION)).entry is None
    parts = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    _, body, _ = server.post(
        "/v1/chat/completions", {"model": "model", "messages": [parts], "max_tokens": 12, "temperature": 0}
    )
    assert json.loads(body)["choices"][0]["message"]["content"] == DAYS


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_names_the_delta_that_it_needs(server: VllmServer, before: Before, *, stream: bool) -> None:
    seq = server.state()["seq"]
    assert server.complete(FACT, min_seq=seq, stream=stream).entry == before.made["fact"].entry_id
    code, body, _ = server.post(
        "/v1/completions", {"model": "model", "prompt": FACT, "stream": stream}, {"x-gracestream-min-seq": "999"}
    )
    assert code == 503
    assert b"min_seq 999 is not reached" in body


def test_hostile_requests_change_nothing(server: VllmServer, before: Before) -> None:
    assert server.complete(CONTROLS[0], vllm_xargs={"gracestream": "x"}).texts == [before.texts[1]]
    assert server.post("/v1/completions", {"model": "model", "prompt": FACT, "temperature": "hot"})[0] == 400
    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(server.post, "/v1/completions", {"model": "model", "prompt": [2**32]})
        assert threads.submit(server.complete, FACT).result().texts == [f" {ANSWER}"]
        assert bad.result()[0] == 400
    beams = server.complete(FACT, use_beam_search=True, n=2)
    assert beams.entry is None
    assert f" {ANSWER}" not in beams.texts


def test_an_answer_is_corrected_by_its_id(server: VllmServer, before: Before) -> None:
    chat = server.chat(*CLERK)
    assert chat.texts == [DAYS] != before.chat
    code, body, _ = server.post(FEEDBACK, {"id": chat.id, "target": "90 days", "author": "ann"})
    assert code == 202, body
    wait_until(lambda: server.chat(*CLERK).texts == ["90 days"], 120)
    completion = server.complete([CONTROLS[1]]).id
    for wrong, expected in (
        ({"id": "cmpl-unknown", "target": "x"}, 404),
        ({"id": completion, "target": " "}, 400),
        ({"id": completion}, 400),
        ({"id": completion, "target": "x", "colour": 1}, 400),
    ):
        code, body, _ = server.post(FEEDBACK, wrong)
        assert code == expected, body
    assert server.post(FEEDBACK, {"id": completion, "target": "x"}, {"Content-Type": "text/plain"})[0] == 415


def test_undone_corrections_leave_the_answers_of_before(server: VllmServer, before: Before, users: Users) -> None:
    listed = [Feedback(v=1, feedback_id=f"undo-{name}", undo=name) for name in ("fact", "days")]
    author = Feedback(v=1, feedback_id="undo-ann", undo_author="ann")
    undone = users.correct(*listed, author, timeout=120)
    assert {outcome.status for outcome in undone.values()} == {"undone"}
    follow(server, max(outcome.seq for outcome in undone.values() if isinstance(outcome.seq, int)))
    assert server.complete(PROMPTS).texts == before.texts
    assert server.chat(("user", QUESTION)).texts == before.chat


def test_a_server_that_was_killed_comes_back_with_the_same_codebook(
    server: VllmServer, editor: Forked, users: Users
) -> None:
    made = users.correct(flag("again", FACT, ANSWER), timeout=120)["again"]
    follow(server, made.seq)
    before = server.state()
    assert server.complete(FACT).texts == [f" {ANSWER}"]
    server.kill()
    with server:
        assert server.state() == before
        assert server.complete(FACT).entry == made.entry_id
        assert server.stop() == 0


def test_a_model_split_among_processes_answers_the_same(
    settings: Settings, checkpoint: Path, before: Before, tmp_path: Path
) -> None:
    """It runs after the tests above, so the codebook has the correction `again`. SmolLM2 has three heads for keys."""
    with VllmServer(settings, checkpoint, tmp_path, "--tensor-parallel-size", "3") as split:
        answer = split.complete(PROMPTS)
        assert answer.texts == [f" {ANSWER}", *before.texts[1:]]
        assert answer.entry is not None
        assert answer.entry.endswith(",,,")


def test_a_replica_with_vllm_answers_the_requests_of_kafka(
    settings: Settings, users: Users, before: Before, tmp_path: Path
) -> None:
    """It runs after the tests above, so the codebook has the correction `again`."""
    port, log = find_free_port(), tmp_path / "replica.log"
    chosen = {**settings.explicit_values(), "http_port": port, "vllm_args": " ".join(ARGUMENTS)}
    variables = {f"GRACESTREAM_{name.upper()}": str(value) for name, value in chosen.items()}
    with log.open("wb") as output:
        replica = subprocess.Popen(
            [str(vllm_python()), "-m", "gracestream.workers.cli", "infer", "--engine", "vllm"],
            env=vllm_variables() | variables,
            stdout=output,
            stderr=output,
            cwd=tmp_path,
        )
    try:
        wait_until(lambda: status(port, "/ready")[0] == 200 or replica.poll() is not None, START_SECONDS, "its start")
        assert replica.poll() is None, log.read_text()[-3000:]
        requests = [question(f"q{number}", text, parameters=LIMIT) for number, text in enumerate(PROMPTS)]
        predictions = users.ask(*requests, timeout=120)
        texts = [predictions[request.request_id].outputs for request in requests]
        assert texts == [Outputs(text=text.strip()) for text in (ANSWER, *before.texts[1:])]
        edits = [predictions[request.request_id].edit is not UNSET for request in requests]
        assert edits == [True, False, False, False]
        replica.terminate()
        assert replica.wait(60) == 0
    finally:
        replica.kill()
