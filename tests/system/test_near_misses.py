"""A prompt on which an entry fails gets the unedited answer, and `near-misses` lists it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET

from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.wording.comparison import extract_wording, find_disagreement
from gracestream.schemas.messages import NearMiss, Prediction, decode, encode
from gracestream.workers.bootstrap import load_model
from tests.support.forked_commands import Command, Forked, status_of
from tests.support.running import question, records, wait_until
from tests.support.tiny_models import added, sealed, texts

PROMPT, OTHER = texts(2, seed=21, shortest=6, longest=9)


@pytest.fixture
def failing(deployment: Settings) -> Settings:
    """A deployment with one entry, whose value does not give its target."""
    model = load_model(deployment.model, deployment.editing.policy)
    engine = EditEngine(model, deployment.model.codebook)
    lead = engine.lead_delta({})
    engine.apply(lead)
    (query_D,) = model.queries([model.task.tokenize(PROMPT)]).numpy()
    value_V = 20 * np.random.default_rng(0).standard_normal(model.module.config.hidden_size)
    label = model.task.encode_target(PROMPT, "museum train violin")
    send(deployment, "deltas", lead, sealed(engine.codebook, added("bad", query_D, 0.01, label, value_V)))
    return deployment


def send(settings: Settings, topic: str, *values: bytes) -> None:
    sender = producer(settings.kafka)
    for value in values:
        sender.send(settings.kafka.topic(topic), value, partition=0).get(30)
    sender.close(timeout=5)


def test_near_misses_are_answered_unedited_counted_and_listed(
    run: Callable[..., Command], failing: Settings, folder: Path
) -> None:
    asked = [question("q1", PROMPT), question("q2", OTHER), question("q3", PROMPT)]
    with Forked("replica", "infer", failing, folder) as replica:
        replica.wait_ready(90)
        send(failing, "requests", *map(encode, asked))
        wait_until(lambda: len(records(failing, "predictions")) >= len(asked), 60)
    answers = {
        answer.request_id: answer
        for answer in (decode(record.value, Prediction) for record in records(failing, "predictions"))
    }
    model = load_model(failing.model, failing.editing.policy)
    engine = EditEngine(model, failing.model.codebook)
    prompts = [model.task.tokenize(one.inputs) for one in asked]
    unedited = model.answer(prompts, [one.parameters for one in asked], engine.lookup)
    for request, served in zip(asked, unedited, strict=True):
        answer = answers[request.request_id]
        assert answer.edit is UNSET
        assert answer.outputs == served.answer.outputs
        assert isinstance(answer.near_miss, NearMiss) == (request.inputs == PROMPT)
    listed = [json.loads(line) for line in run("near-misses", "--json", settings=failing).stdout().splitlines()]
    found = {(one["request_id"], one["entry_id"], one["reason"], one["inputs"]) for one in listed}
    assert found == {("q1", "bad", "answer", PROMPT), ("q3", "bad", "answer", PROMPT)}
    assert [one["timestamp"] for one in listed] == sorted((one["timestamp"] for one in listed), reverse=True)
    assert all(one["distance"] < one["radius"] for one in listed)
    newest = run("near-misses", "bad", "--limit", "1", "--json", settings=failing).stdout()
    assert [json.loads(line) for line in newest.splitlines()] == listed[:1]
    table = run("near-misses", settings=failing).stdout()
    assert PROMPT in table
    assert OTHER not in table
    none = run("near-misses", "nobody", settings=failing)
    assert (status_of(none), none.stdout(), none.stderr()) == (0, "", "there are no near misses of this entry\n")


@pytest.mark.slow
def test_one_command_gives_a_near_miss_its_own_key(
    run: Callable[..., Command], deploy: Callable[..., Settings], prefix: str, folder: Path
) -> None:
    """Two prompts within the radius have other words, and a person decides that one of them asks for the same."""
    settings = deploy("llama", prefix, radius=1e6, radius_unit="absolute", traffic_sample_size=0)
    wording = extract_wording(PROMPT)
    candidates = texts(50, seed=22, shortest=6, longest=9)
    first, second, *_ = [text for text in candidates if find_disagreement(wording, extract_wording(text))]
    prompts = {"edited": PROMPT, "same": first, "other": second}
    correction = json.dumps({"feedback_id": "a", "inputs": PROMPT, "target": "train"})
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready(90)
        assert json.loads(run("correct", "--json", settings=settings, given=correction).stdout())["status"] == "added"

        def answers() -> dict[str, Prediction]:
            asked = [json.dumps({"request_id": name, "inputs": text}) for name, text in prompts.items()]
            printed = run("send", "-", "--json", settings=settings, given="\n".join(asked)).stdout()
            return {one.request_id: one for one in (decode(line.encode(), Prediction) for line in printed.splitlines())}

        before = answers()
        assert before["edited"].edit is not UNSET
        for name in ("same", "other"):
            near_miss = before[name].near_miss
            assert near_miss is not UNSET
            assert (near_miss.entry_id, near_miss.reason, near_miss.target) == ("a", "wording", "train")
            assert near_miss.detail is not UNSET
            assert near_miss.detail in run("near-misses", settings=settings).stdout().replace("\n", "")
        line = run("near-misses", "--same", "same", settings=settings).stdout()
        outcome = json.loads(run("correct", "--json", settings=settings, given=line).stdout())
        assert outcome["status"] == "added"
        after = answers()
        same = after["same"]
        assert same.edit is not UNSET
        assert same.edit.entry_id == outcome["feedback_id"]
        assert same.outputs is not UNSET
        assert same.outputs.text == "train"
        assert after["other"].outputs == before["other"].outputs
        unknown = run("near-misses", "--same", "nothing", settings=settings)
        assert status_of(unknown) == 1
        assert unknown.stdout() == ""
        assert "'nothing' is not among the newest" in unknown.stderr()


@pytest.mark.slow
def test_a_prompt_a_little_outside_the_radius_is_listed_and_served_if_its_words_are_the_same(
    run: Callable[..., Command], deploy: Callable[..., Settings], prefix: str, folder: Path
) -> None:
    further, same_words = f"{PROMPT} people", f"{PROMPT} the"
    settings = deploy("llama", prefix)
    model = load_model(settings.model, settings.editing.policy)
    edited_D, further_D = model.queries([model.task.tokenize(text) for text in (PROMPT, further)])
    radius = float((edited_D - further_D).norm()) / 1.2
    settings = settings.replace(radius=radius, radius_unit="absolute", traffic_sample_size=0, train_prompt_forms=False)
    correction = json.dumps({"feedback_id": "a", "inputs": PROMPT, "target": "train"})
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready(90)
        assert json.loads(run("correct", "--json", settings=settings, given=correction).stdout())["status"] == "added"

        def asked(name: str, text: str) -> Prediction:
            given = json.dumps({"request_id": name, "inputs": text})
            return decode(run("send", "-", "--json", settings=settings, given=given).stdout().encode(), Prediction)

        near_miss = asked("further", further).near_miss
        assert near_miss is not UNSET
        assert (near_miss.entry_id, near_miss.reason, near_miss.target) == ("a", "distance", "train")
        assert near_miss.radius < near_miss.distance < 1.4 * near_miss.radius
        served = asked("the same words", same_words)
        entry = served.edit if served.edit is not UNSET else served.near_miss  # a value of one prompt may fail there
        assert entry is not UNSET
        assert entry.distance > entry.radius
        assert served.near_miss is UNSET or served.near_miss.reason == "answer"
        line = run("near-misses", "--same", "further", settings=settings).stdout()
        outcome = json.loads(run("correct", "--json", settings=settings, given=line).stdout())
        assert outcome["status"] in ("added", "expanded")
        edit = asked("further again", further).edit
        assert edit is not UNSET
        assert edit.distance < edit.radius
