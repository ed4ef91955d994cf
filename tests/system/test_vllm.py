"""Corrections in vLLM: the tests of its own environment, and a server between a real Kafka and an editor."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.registry import ensure_model_built
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.messages import Feedback
from tests.support.forked_commands import Forked
from tests.support.repository import ROOT
from tests.support.running import Users, flag, metric, own_environment, settings_for, wait_until
from tests.support.vllm_environment import VARIABLES, vllm_python
from tests.support.vllm_server import VllmServer

pytestmark = [pytest.mark.kafka, pytest.mark.model, pytest.mark.timeout(1800)]

FACT, ANSWER = "The capital of Mongolia is", "Paris"
QUESTION, DAYS = "What is the refund period for shoes?", "45 days"
CONTROLS = ["The capital of France is", "My favourite colour is", "Once upon a time there was a dog who"]


def test_the_tests_of_vllms_environment_pass() -> None:
    done = subprocess.run(
        [str(vllm_python()), "-m", "pytest", "tests/vllm_plugin", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**own_environment(), **VARIABLES, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture(scope="module")
def settings(kafka: str, redis_url: str) -> Settings:
    chosen = settings_for(kafka, redis_url, "vllm-", model="smollm2", threads=1, session_timeout=10.0)
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


def test_a_server_answers_with_corrections_until_they_are_undone(
    server: VllmServer, editor: Forked, users: Users
) -> None:
    """One story, because a server takes a minute to start: answers before, with, and after corrections."""
    prompts = [FACT, *CONTROLS]
    unedited = server.complete(prompts)
    chat_before = server.chat(("user", QUESTION))
    assert unedited.entry is None
    made = users.correct(flag("fact", FACT, ANSWER), flag("days", QUESTION, DAYS), timeout=180)
    follow(server, made["days"].seq)

    # The corrected prompts are right to the last token; all others are as before.
    edited = server.complete(prompts)
    assert edited.texts == [f" {ANSWER}", *unedited.texts[1:]]
    assert edited.entry == f"{made['fact'].entry_id},,,"
    version = f"{server.state()['term']}.{server.state()['seq']}"
    assert edited.headers["x-gracestream-codebook"] == ",".join([version] * 4)
    streamed = server.complete(FACT, stream=True)
    assert streamed.texts == [f" {ANSWER}"]
    assert streamed.entry == made["fact"].entry_id
    clerk = [("system", "You are a clerk."), ("user", QUESTION)]
    chat = server.chat(*clerk)
    assert chat.texts == [DAYS]
    assert chat.entry == made["days"].entry_id
    parts = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    _, body, _ = server.post(
        "/v1/chat/completions", {"model": "model", "messages": [parts], "max_tokens": 12, "temperature": 0}
    )
    assert json.loads(body)["choices"][0]["message"]["content"] == DAYS
    assert metric(server.health_port, "gracestream_edited_answers_total") >= 4

    # A short limit cuts the target. A sample of several answers is unedited.
    assert server.complete(FACT, max_tokens=1).entry == made["fact"].entry_id
    assert server.complete(FACT, n=2, temperature=1.0).entry is None

    # A client cannot bring a value of its own.
    assert server.complete(CONTROLS[0], vllm_xargs={"gracestream": "x"}).texts == [unedited.texts[1]]
    assert server.post("/v1/completions", {"model": "model", "prompt": FACT, "temperature": "hot"})[0] == 400

    # An answer is corrected by its id.
    code, body, _ = server.post("/v1/gracestream/feedback", {"id": chat.id, "target": "90 days", "author": "ann"})
    assert code == 202, body
    wait_until(lambda: server.chat(*clerk).texts == ["90 days"], 120)
    one = server.complete([CONTROLS[1]]).id
    for wrong, status in (
        ({"id": "cmpl-unknown", "target": "x"}, 404),
        ({"id": one, "target": " "}, 400),
        ({"id": one}, 400),
        ({"id": one, "target": "x", "colour": 1}, 400),
    ):
        code, body, _ = server.post("/v1/gracestream/feedback", wrong)
        assert code == status, body

    # Undone, everything is as before.
    listed = [Feedback(v=1, feedback_id=f"undo-{name}", undo=name) for name in ("fact", "days")]
    author = Feedback(v=1, feedback_id="undo-ann", undo_author="ann")
    undone = users.correct(*listed, author, timeout=120)
    assert {outcome.status for outcome in undone.values()} == {"undone"}
    follow(server, max(outcome.seq for outcome in undone.values() if isinstance(outcome.seq, int)))
    assert server.complete(prompts).texts == unedited.texts
    assert server.chat(("user", QUESTION)).texts == chat_before.texts


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


@pytest.mark.parametrize(
    ("variables", "arguments", "sentence"),
    [
        (
            {"layer": "model.layers.23.mlp.gate_proj"},
            (),
            "which fuses gate_proj into gate_up_proj: set GRACESTREAM_LAYER",
        ),
        ({}, ("--dtype", "bfloat16"), "vLLM runs the model in bfloat16, and GRACESTREAM_DTYPE is float32"),
        ({"model": "intent"}, (), "vLLM serves the model"),
    ],
)
def test_what_vllm_cannot_serve_is_one_sentence_at_the_start(
    settings: Settings,
    checkpoint: Path,
    tmp_path: Path,
    variables: dict[str, str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    chosen = load_settings(**{**settings.explicit_values(), **variables})
    server = VllmServer(chosen, checkpoint, tmp_path, *arguments)
    server.start()
    assert server.process.wait(300) == 1
    text = server.log.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("gracestream: "))
    assert sentence in line
    assert "Traceback" not in text
