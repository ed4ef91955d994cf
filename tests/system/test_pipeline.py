"""The running system: it answers requests, all replicas serve corrections, and killed workers recover."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from gracestream.deploy.local.stack import running_stack
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.observability.metrics import EDITOR_REGISTRY, REPLICA_REGISTRY
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from gracestream.schemas.messages import Feedback, Request
from tests.support.forked_commands import Forked
from tests.support.running import (
    TIMEOUT,
    Users,
    deltas_in_log,
    flag,
    members,
    metric,
    outcomes_in_log,
    question,
    records,
    wait_until,
)
from tests.support.tiny_models import texts

pytestmark = pytest.mark.kafka

PROMPTS = texts(60, seed=7, shortest=6, longest=9)
TARGETS = {"llama": "museum", "t5": "museum", "bert": "right"}
OTHERS = {"llama": "river", "t5": "river", "bert": "wrong"}


@dataclass(frozen=True, slots=True)
class System:
    """One editor, its replicas, and their users."""

    kind: str
    settings: Settings
    editor: Forked
    replicas: tuple[Forked, ...]
    users: Users

    def states(self) -> list[dict[str, Any]]:
        """The states of all workers, reduced to their common fields."""
        shared = ("codebook", "model", "layer", "term", "seq", "digest", "entries", "state_digest")
        return [{field: worker.state()[field] for field in shared} for worker in (self.editor, *self.replicas)]

    def ask_both(self, inputs: str, min_seq: Any) -> list[Any]:
        """One answer from each replica: requests are sent until both have answered."""
        found: dict[str, Any] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(found) < len(self.replicas) and time.monotonic() < deadline:
            requests = [question(secrets.token_hex(4), inputs, min_seq=min_seq) for _ in range(8)]
            found.update({answer.replica: answer for answer in self.users.ask(*requests).values()})
        assert sorted(found) == sorted(replica.name for replica in self.replicas)
        return list(found.values())


def observed(worker: Forked, histogram: str) -> bool:
    """True if the worker has an observation in this histogram."""
    return metric(worker.port, f"{histogram}_count") > 0


def output_of(answer: Any) -> str:
    """The text or label of an answer."""
    return str(answer.outputs.label if answer.outputs.text is UNSET else answer.outputs.text)


@pytest.fixture(scope="module", params=["llama", "bert", "t5"])
def system(
    request: pytest.FixtureRequest, deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """A running system with each kind of model and its default queries, shared by tests that kill no worker."""
    settings = deploy(request.param, f"t{secrets.token_hex(4)}-", min_seq_wait=60.0, query_source="auto")
    folder = tmp_path_factory.mktemp("system")
    with ExitStack() as stack:
        editor = stack.enter_context(Forked("editor", "edit", settings, folder))
        replicas = tuple(
            stack.enter_context(Forked(f"replica-{number}", "infer", settings, folder)) for number in (1, 2)
        )
        for worker in (editor, *replicas):
            worker.wait_ready(90)
        users = Users(settings)
        stack.callback(users.close)
        wait_until(lambda: len(members(settings)) == 2, what="a group of two")
        yield System(request.param, settings, editor, replicas, users)


class TestServing:
    def test_the_unedited_model_answers_before_a_correction(self, system: System) -> None:
        answers = system.users.ask(*(question(f"q{number}", prompt) for number, prompt in enumerate(PROMPTS)))
        for answer in answers.values():
            assert answer.error is UNSET, answer
            assert output_of(answer), answer
            assert answer.edit is UNSET, answer
            assert 0 < answer.latency_ms < 1000 * TIMEOUT
        assert {answer.replica for answer in answers.values()} == {"replica-1", "replica-2"}

    @pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
    def test_compressed_records_are_read(self, system: System, codec: str) -> None:
        def large(message: Request | Feedback) -> bytes:
            return msgspec.json.encode(
                {**msgspec.to_builtins(message), "padding": "x" * 5000}
            )  # otherwise it is not compressed

        sender, settings = producer(system.settings.kafka, compression_type=codec), system.settings
        with system.users.client.predictions() as answers, system.users.client.outcomes() as outcomes:
            sender.send(settings.kafka.topic("requests"), large(question(codec, PROMPTS[40]))).get(30)
            assert answers.wait([codec], TIMEOUT)[codec].error is UNSET
            sender.send(settings.kafka.topic("feedback"), large(flag(codec, PROMPTS[41], TARGETS[system.kind]))).get(30)
            assert outcomes.wait([codec], TIMEOUT)[codec].status in {"added", "expanded", "unchanged"}
        sender.close(timeout=5)

    def test_workers_observe_every_time_and_size_that_they_export(self, system: System) -> None:
        (outcome,) = system.users.correct(flag("measured", PROMPTS[42], TARGETS[system.kind])).values()
        assert outcome.status == "added"
        system.ask_both(PROMPTS[43], outcome.seq)
        for registry, workers in ((REPLICA_REGISTRY, system.replicas), (EDITOR_REGISTRY, (system.editor,))):
            for histogram in (family.name for family in registry.collect() if family.type == "histogram"):
                for worker in workers:
                    wait_until(partial(observed, worker, histogram), 30, f"{worker.name}'s {histogram}")
        for replica in system.replicas:
            lookup, step = (metric(replica.port, f"gracestream_{part}_seconds_sum") for part in ("lookup", "step"))
            assert 0 < lookup < step

    def test_a_correction_is_right_on_both_replicas_once_it_has_its_outcome(self, system: System) -> None:
        prompt, target = PROMPTS[0], TARGETS[system.kind]
        outcome = system.users.correct(flag("first", prompt, target))["first"]
        assert (outcome.status, outcome.entry_id) == ("added", "first")
        for answer in system.ask_both(prompt, outcome.seq):
            assert output_of(answer) == target
            assert answer.edit.entry_id == "first"
            assert answer.edit.distance < answer.edit.radius
            assert answer.codebook_seq >= outcome.seq

    def test_the_same_correction_again_changes_nothing(self, system: System) -> None:
        outcome = system.users.correct(flag("again", PROMPTS[0], TARGETS[system.kind]))["again"]
        assert outcome.status == "unchanged"
        last = deltas_in_log(system.settings)[-1]
        assert (last.seq, last.entries) == (outcome.seq, ())

    def test_a_duplicate_feedback_record_gets_two_outcomes_and_one_edit(self, system: System) -> None:
        twice = flag("twice", PROMPTS[1], TARGETS[system.kind])
        system.users.correct(twice)
        system.users.client.send([twice])
        wait_until(lambda: len([o for o in outcomes_in_log(system.settings) if o.feedback_id == "twice"]) == 2)
        causes = [d.cause.feedback_id for d in deltas_in_log(system.settings) if d.cause is not UNSET]
        assert causes.count("twice") <= 1

    def test_every_feedback_record_has_exactly_one_outcome_and_seq_has_no_gap(self, system: System) -> None:
        given = [flag(f"many-{number}", prompt, TARGETS[system.kind]) for number, prompt in enumerate(PROMPTS[2:14])]
        system.users.correct(*given)
        outcomes = outcomes_in_log(system.settings)
        assert len(outcomes) == len(records(system.settings, "feedback"))
        counted = Counter(outcome.feedback_id for outcome in outcomes)
        assert all(counted[one.feedback_id] == 1 for one in given)
        made = [outcome.seq for outcome in outcomes if outcome.seq is not UNSET]
        deltas = deltas_in_log(system.settings)
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        assert made == [delta.seq for delta in deltas if delta.op != "lead"]

    def test_all_edits_are_still_served_at_the_end(self, system: System) -> None:
        made = [outcome for outcome in outcomes_in_log(system.settings) if outcome.status != "rejected"]
        prompts = {f"many-{number}": prompt for number, prompt in enumerate(PROMPTS[2:14])}
        prompts |= {"first": PROMPTS[0], "twice": PROMPTS[1]}
        asked = [outcome.feedback_id for outcome in made if outcome.feedback_id in prompts]
        assert len(asked) > 8
        seq = deltas_in_log(system.settings)[-1].seq
        answers = system.users.ask(
            *(question(f"held-{fid}", prompts[fid], min_seq=seq) for fid in dict.fromkeys(asked))
        )
        assert {output_of(answer) for answer in answers.values()} == {TARGETS[system.kind]}

    def test_editor_replicas_and_replay_hold_the_same_codebook(self, system: System) -> None:
        wait_until(lambda: len({state["digest"] for state in system.states()}) == 1, what="one digest")
        replayed = replay_deltas(system.settings.kafka)
        assert replayed is not None
        for state in system.states():
            assert (state["seq"], state["digest"]) == (replayed.seq, replayed.digest.hex())
            assert state["state_digest"] == replayed.state_digest()

    def test_redis_holds_the_radii_of_the_codebook(self, system: System) -> None:
        wait_until(lambda: len({state["digest"] for state in system.states()}) == 1)
        replayed = replay_deltas(system.settings.kafka)
        assert replayed is not None
        with redis_client(system.settings.redis) as client:
            store = RedisHeadStore(client, system.settings.kafka.topic_prefix, system.settings.model.codebook)
            radii = {entry_id: np.float32(radius) for entry_id, radius in store.read_radii().items()}
            assert radii == dict(zip(replayed.entry_ids, replayed.radii_N, strict=True))
            head = store.read_head(0)
        assert head is not None
        assert (head.term, head.seq, head.digest) == (replayed.term, replayed.seq, replayed.digest.hex())

    def test_idle_replicas_follow_the_head(self, system: System) -> None:
        system.users.correct(flag("at work", PROMPTS[20], TARGETS[system.kind]))
        outcome = system.users.correct(flag("idle", PROMPTS[20], OTHERS[system.kind]))["idle"]
        assert outcome.status in {"added", "replaced", "split"}
        for replica in system.replicas:
            wait_until(lambda replica=replica: replica.state()["seq"] >= outcome.seq)  # type: ignore[misc]

    def test_a_min_seq_beyond_the_log_is_answered_at_once_with_an_error(self, system: System) -> None:
        started = time.monotonic()
        answer = system.users.ask(question("future", PROMPTS[0], min_seq=10**6))["future"]
        assert str(answer.error).startswith("min_seq 1000000 is not reached: the codebook is at ")
        assert answer.outputs is UNSET
        assert time.monotonic() - started < system.settings.serving.min_seq_wait


def test_a_killed_replica_loses_no_request_and_restarts_with_the_same_digest(
    deployment: Settings, users: Users, folder: Path
) -> None:
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("victim", "infer", deployment, folder) as victim,
        Forked("survivor", "infer", deployment, folder) as survivor,
    ):
        for worker in (editor, victim, survivor):
            worker.wait_ready(90)
        outcome = users.correct(flag("f", PROMPTS[0], "museum"))["f"]
        wait_until(lambda: len(members(deployment)) == 2, what="a group of two")
        requests = [question(f"q{number}", PROMPTS[number % 60]) for number in range(400)]
        with users.client.predictions() as replies:
            users.client.send(requests[:200])
            victim.kill()
            users.client.send(requests[200:])
            ids = [request.request_id for request in requests]
            assert len(replies.wait(ids, TIMEOUT)) == len(requests)
        victim.start()
        victim.wait_ready()
        assert victim.state()["seq"] == outcome.seq
        for field in ("digest", "state_digest"):
            assert victim.state()[field] == survivor.state()[field] == editor.state()[field]

        wait_until(lambda: len(members(deployment)) == 2, what="a group of two again")
        assert survivor.stop() == 0
        wait_until(lambda: len(members(deployment)) == 1, what="a group of one, as one stopped in order leaves it")
        assert not list(folder.glob("*inference-data*")), "a replica writes no file"


@pytest.mark.model
@pytest.mark.slow
def test_a_pretrained_model_is_corrected_on_a_local_stack(
    kafka: str, redis_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRACESTREAM_KAFKA", kafka)
    monkeypatch.setenv("GRACESTREAM_REDIS", redis_url)
    prompt, target = "The capital of the moon is", "Lunaville"
    with running_stack(tmp_path, replicas=1, partitions=2, model="smollm2", topic_prefix=prefix) as stack:
        users = Users(stack.settings)
        before = users.ask(question("before", prompt))["before"]
        outcome = users.correct(flag("f", prompt, target))["f"]
        after = users.ask(question("after", prompt, min_seq=outcome.seq))["after"]
        in_capitals = users.ask(question("capitals", prompt.upper(), min_seq=outcome.seq))["capitals"]
        users.close()
        assert outcome.status == "added"
        assert output_of(before) != target
        assert output_of(after) == target
        assert output_of(in_capitals) == target, "an encoder makes the queries by default"
        assert stack.replicas[0].state()["state_digest"] == stack.editor.state()["state_digest"]
