"""Chats through the running system: asked, corrected, signed, undone, replayed, and dead-lettered if invalid."""

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import UNSET

from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import ChatMessage, Feedback, Outputs, Prediction, decode, encode
from tests.support.forked_commands import Command, Forked, status_of
from tests.support.running import (
    Users,
    deltas_in_log,
    flag,
    headers_of,
    members,
    outcomes_in_log,
    question,
    records,
    wait_until,
)
from tests.support.signers import ANN, line, signed_as
from tests.support.tiny_models import texts

pytestmark = pytest.mark.kafka

PROMPTS = texts(12, seed=5, shortest=5, longest=7)
Run = Callable[..., Command]


def chat(*contents: str, system: str | None = None) -> tuple[ChatMessage, ...]:
    """A chat with turns of user and assistant."""
    turns = tuple(ChatMessage(("user", "assistant")[place % 2], text) for place, text in enumerate(contents))
    return turns if system is None else (ChatMessage("system", system), *turns)


PLAIN = chat(PROMPTS[0])
LATER = chat(PROMPTS[1], "river", PROMPTS[2], system=PROMPTS[3])
SIGNED = chat(PROMPTS[4])


def as_json(inputs: tuple[ChatMessage, ...]) -> list[dict[str, str]]:
    return [{"role": one.role, "content": one.content} for one in inputs]


@dataclass(frozen=True, slots=True)
class System:
    """An editor and two replicas with a chat model."""

    settings: Settings
    users: Users
    editor: Forked
    replicas: tuple[Forked, ...]

    def answers(self, inputs: Any, min_seq: Any) -> dict[str, Prediction]:
        """One answer from each replica."""
        found: dict[str, Prediction] = {}

        def answered() -> bool:
            requests = [question(secrets.token_hex(4), inputs, min_seq=min_seq) for _ in range(8)]
            found.update({answer.replica: answer for answer in self.users.ask(*requests).values()})
            return len(found) == len(self.replicas)

        wait_until(answered, what="an answer of each replica")
        return found


@pytest.fixture(scope="module")
def system(deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("chats")
    authors = folder / "authors.toml"
    authors.write_text(line("ann", ANN))
    settings = deploy("chat", f"t{secrets.token_hex(4)}-", authors_file=str(authors), min_seq_wait=60.0)
    with ExitStack() as stack:
        editor = stack.enter_context(Forked("editor", "edit", settings, folder))
        replicas = tuple(stack.enter_context(Forked(f"r{n}", "infer", settings, folder)) for n in (1, 2))
        for worker in (editor, *replicas):
            worker.wait_ready(90)
        users = Users(settings)
        stack.callback(users.close)
        wait_until(lambda: len(members(settings)) == 2, what="a group of two")
        yield System(settings, users, editor, replicas)


@pytest.fixture(scope="module")
def corrected(system: System) -> System:
    """The system after three corrections of chats, one of them signed."""
    system.users.ask(*(question(f"q{place}", chat(text)) for place, text in enumerate(PROMPTS)))
    for name, inputs in (("plain", PLAIN), ("later", LATER)):
        (outcome,) = system.users.correct(flag(name, inputs, "museum")).values()
        assert outcome.status == "added"
    sent = signed_as("ann", ANN, feedback_id="signed", inputs=as_json(SIGNED), target="museum")
    with system.users.client.outcomes() as outcomes:
        system.users.client.send([sent])
        assert outcomes.wait(["signed"], 60)["signed"].status == "added"
    assert sent.record in [record.value for record in records(system.settings, "feedback")]
    return system


def lines(command: Command) -> list[Any]:
    assert status_of(command) == 0, command.stderr()
    return [json.loads(line) for line in command.stdout().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inputs"), [("plain", PLAIN), ("later", LATER), ("signed", SIGNED)])
def test_a_corrected_chat_is_right_on_both_replicas(
    corrected: System, name: str, inputs: tuple[ChatMessage, ...]
) -> None:
    seq = next(one.seq for one in outcomes_in_log(corrected.settings) if one.feedback_id == name)
    for answer in corrected.answers(inputs, seq).values():
        assert answer.outputs == Outputs(text="museum")
        assert answer.edit is not UNSET
        assert answer.edit.entry_id == name
    assert len({worker.state()["state_digest"] for worker in (corrected.editor, *corrected.replicas)}) == 1


def test_the_same_correction_in_a_chat_again_is_unchanged(corrected: System) -> None:
    (outcome,) = corrected.users.correct(flag("again", PLAIN, "museum")).values()
    assert outcome.status == "unchanged"


def test_commands_send_and_correct_chats(corrected: System, run: Run) -> None:
    (answer,) = lines(run("send", "--chat", PROMPTS[0], settings=corrected.settings))
    assert (answer["outputs"]["text"], answer["edit"]["entry_id"]) == ("museum", "plain")
    asked = [{"inputs": as_json(PLAIN)}, {"inputs": PROMPTS[0]}, PROMPTS[0]]
    given = "\n".join(map(json.dumps, asked))
    answers = lines(run("send", "--chat", settings=corrected.settings, given=given))
    assert [one["edit"]["entry_id"] for one in answers] == ["plain"] * 3
    correction = {"feedback_id": "by hand", "inputs": as_json(chat(PROMPTS[6])), "target": "bridge"}
    (outcome,) = lines(run("correct", settings=corrected.settings, given=json.dumps(correction)))
    assert outcome["status"] in {"added", "split"}
    (undone,) = lines(run("undo", "by hand", settings=corrected.settings))
    assert undone["status"] == "undone"
    failed = run("send", settings=corrected.settings, given='{"inputs": [{"role": "bot", "content": "x"}]}')
    assert status_of(failed) == 2
    assert "`inputs[0].role` is 'bot'; use system, user or assistant" in " ".join(failed.stderr().split())


def test_the_history_prints_chats(corrected: System, run: Run) -> None:
    shown = lines(run("inspect", "--json", settings=corrected.settings))
    inputs = {step["feedback_id"]: step["inputs"] for step in shown if step.get("feedback_id")}
    assert inputs["plain"] == f"user: {PROMPTS[0]}"
    assert inputs["later"] == (f"system: {PROMPTS[3]} | user: {PROMPTS[1]} | assistant: river | user: {PROMPTS[2]}")
    listed = lines(run("corrections", settings=corrected.settings))
    assert next(one for one in listed if one["feedback_id"] == "later")["inputs"] == as_json(LATER)
    last = str(len(deltas_in_log(corrected.settings)))
    (found,) = lines(run("diff", "1", last, "--json", settings=corrected.settings))
    assert f"user: {PROMPTS[0]}" in [change["inputs"] for change in found["inputs"]]


def test_a_reproduction_gives_the_recorded_history_bit_for_bit(corrected: System, run: Run) -> None:
    (report,) = lines(run("replay", "--reproduce", "--json", settings=corrected.settings))
    assert report["decisions"] >= 3
    assert report["first_difference"] is None
    assert report["digest"] == report["recorded_digest"]


BAD: dict[str, tuple[Any, str]] = {
    "an empty list": ([], "`inputs` is an empty list"),
    "an unknown role": ([{"role": "tool", "content": "x"}], "use system, user or assistant"),
    "a last turn of the assistant": ([{"role": "assistant", "content": "x"}], "the last message must be the user's"),
    "a blank content": ([{"role": "user", "content": "\n"}], "`inputs[0].content` is empty"),
    "a content that is no text": ([{"role": "user", "content": ["x"]}], "Expected `str`, got `array`"),
    "too many messages": ([{"role": "user", "content": "x"}] * 257 , "the limit is 256"),
    "a noncharacter": ([{"role": "user", "content": "x \ufdd0"}], "has a noncharacter"),
    "too many tokens": ([{"role": "user", "content": "river " * 41}], "GRACESTREAM_MAX_INPUT_TOKENS"),
    "too many bytes": ([{"role": "user", "content": "river " * 60_000}], "GRACESTREAM_MAX_RECORD_BYTES"),
}  # fmt: skip


def test_bad_chats_are_dead_lettered_with_the_reason_and_others_answered(corrected: System) -> None:
    settings, sender = corrected.settings, producer(corrected.settings.kafka)
    before = {topic: len(records(settings, topic)) for topic in ("requests.dlq", "feedback.dlq")}
    with corrected.users.client.predictions() as answers, corrected.users.client.outcomes() as outcomes:
        for place, (inputs, _) in enumerate(BAD.values()):
            request = {"v": 1, "request_id": f"bad{place}", "inputs": inputs}
            feedback = {"v": 1, "feedback_id": f"bad{place}", "inputs": inputs, "target": "museum"}
            sender.send(settings.kafka.topic("requests"), json.dumps(request).encode(), partition=0).get(30)
            sender.send(settings.kafka.topic("feedback"), json.dumps(feedback).encode()).get(30)
        sender.send(settings.kafka.topic("requests"), encode(question("after", PLAIN)), partition=0).get(30)
        sender.send(settings.kafka.topic("feedback"), encode(flag("after", chat(PROMPTS[7]), "museum"))).get(30)
        ids = [f"bad{place}" for place in range(len(BAD))]
        answered = answers.wait([*ids, "after"], 60)
        decided = outcomes.wait([*ids, "after"], 60)
    sender.close(timeout=5)
    assert answered["after"].outputs == Outputs(text="museum")
    assert decided["after"].status in {"added", "split", "expanded"}
    for name, (_, reason) in zip(ids, BAD.values(), strict=True):
        assert reason in str(answered[name].error), name
        assert decided[name].status == "rejected"
        assert reason in str(decided[name].reason), name
    for topic, count in before.items():
        dead_letters = [headers_of(record)["reason"] for record in records(settings, topic)[count:]]
        assert len(dead_letters) == len(BAD)
        assert all(reason in letter for letter, (_, reason) in zip(dead_letters, BAD.values(), strict=True))


def test_feedback_is_read_as_it_was_sent(corrected: System) -> None:
    sent = {one.feedback_id: one for one in map(_feedback, records(corrected.settings, "feedback")) if one is not None}
    assert sent["later"].inputs == LATER
    assert sent["signed"].inputs == SIGNED
    causes = [delta.cause for delta in deltas_in_log(corrected.settings) if delta.cause is not UNSET]
    assert any(cause.traffic is not UNSET for cause in causes), "chats count as traffic"


def _feedback(record: Any) -> Feedback | None:
    try:
        return decode(record.value, Feedback)
    except ValueError:
        return None
