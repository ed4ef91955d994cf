"""Partly committed transactions: a new leader completes them, and `gracestream audit` reports them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import encode
from tests.chaos.dying import tear
from tests.support.doubles.checker import Left, faults
from tests.support.editor_clusters import Cluster, decided, outcome_of
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.running import Users, deltas_in_log, flag, outcomes_in_log, records, wait_until
from tests.support.tiny_models import texts

PROMPTS = texts(3, seed=21, shortest=6, longest=9)
TARGETS = ("museum", "bridge", "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept", [(DELTAS,), (DELTAS, "offset"), ("offset",)], ids=["delta", "delta and offset", "offset"]
)
def test_the_next_editor_completes_a_torn_transaction(
    deployment: Settings, users: Users, folder: Path, run: Callable[..., Command], kept: tuple[str, ...]
) -> None:
    given = [flag(f"f{number}", prompt, TARGETS[number]) for number, prompt in enumerate(PROMPTS)]
    torn = Forked("torn", "edit", deployment, folder, sabotage=partial(tear, *kept, turn=2), training_batch_size=1)
    with torn:
        torn.wait_ready()
        users.client.send(given[:2])
        torn.process.join(60)
    assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == ["f0"]
    deltas = [delta.op for delta in deltas_in_log(deployment)]
    assert len(deltas) == (3 if DELTAS in kept else 2)
    expected = {"delta": [], "delta and offset": ["delta without outcome"], "offset": ["no outcome"]}
    reported = run("audit", "--json", settings=deployment)
    *found, counts = [json.loads(line) for line in reported.stdout().splitlines()]
    assert counts["damaged"] == len(found)
    assert [one["damage"] for one in found] == expected[" and ".join(kept).replace("deltas", "delta")]
    assert status_of(reported) == int(bool(found))
    with Forked("next", "edit", deployment, folder) as following:
        following.wait_ready()
        users.client.send(given[2:])
        wait_until(lambda: len(outcomes_in_log(deployment)) == 3)
    outcomes, by_id = outcomes_in_log(deployment), {}
    for delta in deltas_in_log(deployment):
        if delta.op != "lead":
            by_id[delta.cause.feedback_id] = delta.seq  # type: ignore[union-attr]
    assert [outcome.feedback_id for outcome in outcomes] == ["f0", "f1", "f2"]
    assert {outcome.feedback_id: outcome.seq for outcome in outcomes} == by_id
    assert all(outcome.status != "rejected" for outcome in outcomes)
    left = Left(
        feedback=records(deployment, FEEDBACK), edits=records(deployment, EDITS), deltas=records(deployment, DELTAS),
        dead_letters=records(deployment, FEEDBACK_DLQ), position=3, head=None, radii={},
    )  # fmt: skip
    assert {fault.kind for fault in faults(left)} <= {"digest"}, "Redis is not used"
    assert status_of(run("audit", settings=deployment)) == 0


class TestAudit:
    """Damage before the last outcome, which no editor repairs."""

    @pytest.fixture
    def damaged(self, deployment: Settings) -> Settings:
        given = [flag(f"f{number}", "why", "museum") for number in range(4)]
        writer = producer(deployment.kafka)
        for value in (*map(encode, given), b"no feedback", *(encode(flag(f"f{n}", "why", "museum")) for n in (5, 6))):
            writer.send(deployment.kafka.topic(FEEDBACK), value=value, partition=0)
        writer.flush()
        writer.close(timeout=5)
        cluster = Cluster(deployment, None)
        log = cluster.editor()
        list(log.read_new_deltas())
        log.join()
        cluster.wait_for_membership(log, "elected")
        log.fence()
        log._transact(0, [])
        log.commit(decided(0, outcome_of("f0")))
        log._transact(3, [])  # f1 and f2 are lost
        log.commit(decided(3, msgspec.structs.replace(outcome_of("f3"), status="added", seq=9)))
        log._transact(5, [])  # the id of this record cannot be read
        f5 = decided(5, outcome_of("f5"))
        log.commit(f5)
        log._transact(6, [])
        log.commit(f5)
        log._transact(2, [])  # the group's offset may be reset; f6 is not decided yet
        cluster.close()
        return deployment

    def test_it_names_damaged_records_and_writes_lost_feedback(
        self, damaged: Settings, run: Callable[..., Command], tmp_path: Path
    ) -> None:
        lost = tmp_path / "lost.jsonl"
        reported = run("audit", "--lost", str(lost), settings=damaged)
        assert status_of(reported) == 1
        assert "checked 6 feedback records: 4 damaged" in reported.stderr()
        found = {1: "no outcome", 2: "no outcome", 3: "outcome without delta", 5: "several outcomes"}
        for number, damage in found.items():
            assert any(f"f{number}" in line and damage in line for line in reported.stdout().splitlines())
        assert [json.loads(line)["feedback_id"] for line in lost.read_text().splitlines()] == ["f1", "f2"]
        resent = run("correct", str(lost), "--no-wait", settings=damaged)
        assert status_of(resent) == 0, resent.stderr()
        assert [record.value for record in records(damaged, FEEDBACK)][-2:] == [
            encode(flag(f"f{number}", "why", "museum")) for number in (1, 2)
        ]

    def test_the_error_for_a_file_that_cannot_be_written_is_one_sentence(
        self, damaged: Settings, run: Callable[..., Command]
    ) -> None:
        failed = run("audit", "--lost", "/no/such/folder", settings=damaged)
        assert sentence(failed) == (
            "/no/such/folder cannot be written: No such file or directory; choose another --lost"
        )

    def test_an_undamaged_deployment_passes(self, deployment: Settings, run: Callable[..., Command]) -> None:
        reported = run("audit", settings=deployment)
        assert status_of(reported) == 0
        assert "checked 0 feedback records: none is damaged" in reported.stderr()
