"""Every script in `examples/` runs against a deployment and gives its documented result."""

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import ChatMessage, Inputs, Outputs, Prediction, Request, encode
from tests.support.forked_commands import Forked
from tests.support.repository import ROOT
from tests.support.running import wait_until
from tests.support.tiny_models import texts

pytestmark = pytest.mark.kafka

EXAMPLES = ROOT / "examples"
PROMPTS = texts(4, seed=51, shortest=6, longest=9)


def is_past(milliseconds: int) -> bool:
    """Whether the clock, in milliseconds, is later than this time of a record."""
    return 1000 * time.time() >= milliseconds + 1


@dataclass(frozen=True)
class Deployment:
    """A deployment with an editor and a replica; runs scripts against it."""

    settings: Settings
    workers: tuple[Forked, ...]

    def run(self, script: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        kafka = self.settings.kafka
        own = {"GRACESTREAM_KAFKA": kafka.servers, "GRACESTREAM_TOPIC_PREFIX": kafka.topic_prefix}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRACESTREAM_")}
        return subprocess.run(
            [sys.executable, str(EXAMPLES / script), *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": str(ROOT), **own},
            check=False,
        )


@pytest.fixture(scope="module")
def deployment(deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = deploy("llama", f"t{secrets.token_hex(4)}-")
    folder = tmp_path_factory.mktemp("examples")
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready()
        yield Deployment(settings, (editor, replica))


def test_every_example_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{script.name}"' in source for script in EXAMPLES.glob("*.py"))


def test_the_client_gets_its_corrected_answer(deployment: Deployment) -> None:
    done = deployment.run("client.py", PROMPTS[0], "museum")
    assert done.returncode == 0, done.stderr
    before, edit, after = done.stdout.splitlines()
    assert "museum" not in before
    assert edit.startswith("outcome: added as delta ")
    assert after == "after:  museum"


def test_a_review_corrects_answers_that_a_person_replaces(deployment: Deployment) -> None:
    for prompt in PROMPTS[1:3]:
        assert deployment.run("client.py", prompt, "river").returncode == 0
    done = deployment.run("review.py", "--author", "ann", given="\nmuseum\nmuseum\n")
    assert done.returncode == 0, done.stderr
    assert all(prompt in done.stdout for prompt in PROMPTS[:3])
    outcomes = [json.loads(found) for found in re.findall(r'\{"status".*\}', done.stdout)]
    assert len(outcomes) == 2
    assert {outcome["status"] for outcome in outcomes} <= {"replaced", "unchanged"}


def test_the_end_of_input_sends_the_corrections_so_far(deployment: Deployment) -> None:
    for prompt in PROMPTS[2:4]:
        assert deployment.run("client.py", prompt, "river").returncode == 0
    done = deployment.run("review.py", "--author", "ann", given="museum")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r'\{"status".*\}', done.stdout)) == 1


def test_a_review_shows_the_newest_answer_of_each_prompt_and_chats_by_message(
    deploy: Callable[..., Settings],
) -> None:
    settings = deploy("llama", f"t{secrets.token_hex(4)}-")
    chat = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Where?"))
    # In any order of the partitions, one of the two prompts has its older request last.
    asked: list[tuple[int, Inputs, str]] = [
        (0, "first", "old"), (1, "second", "old"), (1, "first", "new"), (0, "second", "new"), (0, chat, "here"),
    ]  # fmt: skip
    writer = producer(settings.kafka)
    for number, (partition, inputs, text) in enumerate(asked):
        request = Request(v=1, request_id=f"r{number}", inputs=inputs)
        writer.send(settings.kafka.topic("requests"), encode(request), partition=partition).get(timeout=30)
        answer = Prediction(
            v=1, request_id=f"r{number}", outputs=Outputs(text=text), codebook_seq=1, term=1, model="m", replica="r",
            latency_ms=1.0,
        )  # fmt: skip
        sent = writer.send(settings.kafka.topic("predictions"), encode(answer), partition=partition).get(timeout=30)
        wait_until(partial(is_past, sent.timestamp), what="a later millisecond, for a later record")
    writer.send(settings.kafka.topic("requests"), b"no request").get(timeout=30)
    writer.close()
    done = Deployment(settings, ()).run("review.py", "--author", "ann", given="\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("  right answer: ") == [
        "first\n  new\n", "second\n  new\n", "system: Be brief.\nuser: Where?\n  here\n", "\n",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_nightly_check_reports_equal_and_unequal_states(deployment: Deployment) -> None:
    workers = [f"http://127.0.0.1:{worker.port}" for worker in deployment.workers]
    done = deployment.run("nightly_replay.py", *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["equal"] for line in done.stdout.splitlines()] == [True, True]
    with urllib.request.urlopen(f"{workers[0]}/state", timeout=10) as answer:
        other = json.load(answer) | {"state_digest": "0" * 64}
    with answering(json.dumps(other).encode()) as wrong:
        done = deployment.run("nightly_replay.py", workers[0], wrong)
    assert done.returncode == 1
    assert [json.loads(line)["equal"] for line in done.stdout.splitlines()] == [True, False]


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that answers every request with these bytes; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
