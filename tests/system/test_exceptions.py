"""A prompt that an edit answers or nearly answers wrongly becomes an exception by one command, for good."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from gracestream.pipeline.settings import Settings
from gracestream.pipeline.wording.comparison import extract_wording, find_disagreement
from gracestream.schemas.messages import Prediction, decode
from tests.support.forked_commands import Command, Forked, status_of
from tests.support.running import metric, wait_until
from tests.support.tiny_models import texts

CANDIDATES = texts(60, seed=22, shortest=6, longest=9)
EDITED = CANDIDATES[0]
MISSED = next(text for text in CANDIDATES if find_disagreement(extract_wording(EDITED), extract_wording(text)))
ANSWERED = EDITED.rsplit(" ", 1)[0]
"""A prompt whose words agree with those of the correction."""

Run = Callable[..., Command]


@dataclass(frozen=True)
class Running:
    """A deployment with an editor and a replica, and a correction of `EDITED` with every prompt within its radius."""

    settings: Settings
    run: Run
    editor: Forked
    replica: Forked
    folder: Path

    def lines(self, *command: str, given: str = "") -> list[Any]:
        """The JSON lines that a command prints."""
        done = self.run(*command, settings=self.settings, given=given)
        assert status_of(done) == 0, done.stderr()
        return [json.loads(line) for line in done.stdout().splitlines()]

    def send(self, **fields: Any) -> Any:
        (outcome,) = self.lines("correct", "--json", given=json.dumps(fields))
        wait_until(lambda: self.replica.state()["seq"] == outcome.get("seq", self.replica.state()["seq"]))
        return outcome

    def ask(self, name: str, text: str) -> Prediction:
        given = json.dumps({"request_id": name, "inputs": text})
        done = self.run("send", "-", "--json", settings=self.settings, given=given)
        return decode(done.stdout().encode(), Prediction)


@pytest.fixture
def running(run: Run, deploy: Callable[..., Settings], prefix: str, folder: Path) -> Iterator[Running]:
    settings = deploy("llama", prefix, radius=1e6, radius_unit="absolute", traffic_sample_size=0)
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready(90)
        made = Running(settings, run, editor, replica, folder)
        assert made.send(feedback_id="a", inputs=EDITED, target="train")["status"] == "added"
        yield made


@pytest.mark.slow
def test_one_command_makes_requests_exceptions_for_good(running: Running) -> None:
    answered, missed = running.ask("answered", ANSWERED), running.ask("missed", MISSED)
    assert answered.edit is not UNSET
    assert missed.near_miss is not UNSET
    asked = running.lines("near-misses", "--except", "answered", "--except", "missed")
    assert [one["except_from"] for one in asked] == ["a", "a"]
    assert [one["inputs"] for one in asked] == [ANSWERED, MISSED]
    outcomes = running.lines("correct", "--json", given="\n".join(map(json.dumps, asked)))
    assert [one["status"] for one in outcomes] == ["excepted", "excepted"]
    last = outcomes[-1]["seq"]
    wait_until(lambda: running.replica.state()["seq"] == last)
    for name, text in (("again", ANSWERED), ("missed again", MISSED)):
        prediction = running.ask(name, text)
        assert (prediction.edit, prediction.near_miss) == (UNSET, UNSET)
    assert running.ask("edited", EDITED).edit is not UNSET
    assert metric(running.editor.port, 'gracestream_feedback_total{status="excepted"}') == 2

    state = running.replica.state()
    assert state["exceptions"] == 2
    (replayed,) = running.lines("replay", "--json")
    assert replayed["state_digest"] == state["state_digest"]
    (reproduced,) = running.lines("replay", "--reproduce", "--json")
    assert reproduced["first_difference"] is None
    assert reproduced["same_records"] == 3
    (branched,) = running.lines("replay", "--to", f"{running.settings.kafka.topic_prefix}b-", "--json")
    assert branched["copied_digest"] == replayed["digest"]
    with Forked("late", "infer", running.settings, running.folder) as late:
        late.wait_ready(90)
        assert late.state()["state_digest"] == state["state_digest"]

    steps = running.lines("inspect", "a", "--json")
    first, second = (one["feedback_id"] for one in outcomes)
    assert [step["outcome"] for step in steps[:-1]] == ["added", "excepted", "excepted"]
    assert [step["entries"] for step in steps[1:-1]] == [{"a": f"exception {first}"}, {"a": f"exception {second}"}]
    assert [step["inputs"] for step in steps[1:-1]] == [ANSWERED, MISSED]
    in_force = running.lines("corrections")
    assert [one.get("except_from") for one in in_force] == [None, "a", "a"]
    (found,) = running.lines("diff", "2", str(last), "--json")
    assert [(one["inputs"], one["excepted"]) for one in found["exceptions"]] == [(ANSWERED, True), (MISSED, True)]
    table = running.run("diff", str(last), "2", settings=running.settings).stdout()
    assert "may be answered again by a" in table.replace("\n", " ")

    (undone,) = running.lines("undo", first, "--json")
    assert undone["status"] == "undone"
    wait_until(lambda: running.replica.state()["seq"] == undone["seq"])
    assert running.ask("restored", ANSWERED).edit is not UNSET
    assert running.ask("still", MISSED).near_miss is UNSET
    assert running.lines("inspect", "a", "--json")[-2]["entries"] == {"a": f"exception {first} ended"}
    assert [one["feedback_id"] for one in running.lines("corrections")] == ["a", second]


def test_an_invalid_exception_is_rejected_with_the_reason(running: Running) -> None:
    running.ask("free", EDITED)
    for inputs, edit, reason in ((ANSWERED, "nobody", "no edit 'nobody' is in force"), (EDITED, "a", "undo it")):
        done = running.run(
            "correct", "--json", settings=running.settings, given=json.dumps({"inputs": inputs, "except_from": edit})
        )
        assert status_of(done) == 1
        assert reason in json.loads(done.stdout())["reason"]
    both = {"inputs": ANSWERED, "except_from": "a", "target": "train"}
    failed = running.run("correct", settings=running.settings, given=json.dumps(both))
    assert status_of(failed) != 0
    assert "not several" in failed.stderr().replace("\n", " ")
    unknown = running.run("near-misses", "--except", "nothing", settings=running.settings)
    assert (status_of(unknown), unknown.stdout()) == (1, "")
    assert "no entry answered request 'nothing'" in unknown.stderr()


def test_a_later_correction_of_the_prompt_wins(running: Running) -> None:
    assert running.send(inputs=ANSWERED, except_from="a")["status"] == "excepted"
    assert running.ask("excepted", ANSWERED).edit is UNSET
    assert running.send(inputs=ANSWERED, target="train")["status"] in ("expanded", "added")
    prediction = running.ask("corrected", ANSWERED)
    assert prediction.edit is not UNSET
    assert prediction.outputs is not UNSET
    assert prediction.outputs.text == "train"
    assert running.replica.state()["exceptions"] == 0
