"""A history with an error stops all workers: a replica stays alive for inspection, an editor ends."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import UNSET

from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Forked
from tests.support.hostile import Unreadable
from tests.support.running import (
    TIMEOUT,
    Users,
    flag,
    members,
    metric,
    outcomes_in_log,
    question,
    records,
    wait_until,
)
from tests.support.tiny_models import sealed, texts
from tests.support.written_history import History


@pytest.fixture
def log_of(quick: Settings) -> Iterator[History]:
    """A history for the replicas' model, in its first term."""
    assert quick.model.layer is not None
    model = EditableModel.load(quick.model.name, quick.model.layer)
    made = History(quick, model.fingerprint, model.layer)
    made.lead()
    made.publish()
    yield made
    made.close()


def break_chain(history: History) -> None:
    record = bytearray(sealed(history.codebook, op="lead"))
    record[-1] ^= 1
    history.write(bytes(record))
    history.lead()


def break_record(history: History) -> None:
    history.write(b"\x81\xa1v\x01 no delta")
    history.lead()


def another_model(history: History) -> None:
    history.write(sealed(history.codebook, op="lead", model="0" * 64))
    history.lead()


def a_gap(history: History) -> None:
    history.codebook.apply(sealed(history.codebook, op="lead"))
    history.lead()


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [
        (break_chain, "offset 1 of deltas cannot be applied: delta 2 does not continue the chain of digests"),
        (break_record, "offset 1 of deltas cannot be read: not a valid delta"),
        (another_model, "offset 1 of deltas cannot be applied: delta 2 is of model '0000"),
        (a_gap, "offset 1 of deltas cannot be applied: delta 3 of term 3 follows 1 of term 1: a gap"),
    ],
    ids=["digest", "corrupt", "another model", "gap"],
)
def test_a_replica_stops_serving_and_reports_the_reason(
    log_of: History, folder: Path, breaking: Callable[[History], None], reason: str
) -> None:
    with Forked("replica", "infer", log_of.settings, folder) as replica:
        replica.wait_ready(90)
        wait_until(lambda: len(members(log_of.settings)) == 1)
        breaking(log_of)
        log_of.publish()
        wait_until(lambda: replica.ready()[0] == 503)
        assert reason in replica.ready()[1]
        assert replica.live() == (200, "ok\n")
        assert metric(replica.port, "gracestream_ready") == 0
        wait_until(lambda: not members(log_of.settings), what="an empty group")
        assert replica.state()["seq"] == 1
        assert replica.running
        assert replica.stop() == 1


def garbage(history: History) -> None:
    history.write(b"\xff" * 100)


def a_tombstone(history: History) -> None:
    history._producer.send(history.settings.kafka.topic("deltas"), key=b"key", value=None, partition=0).get(30)


def a_flipped_bit(history: History) -> None:
    record = bytearray(sealed(history.codebook, op="lead"))
    record[-1] ^= 1
    history.write(bytes(record))


def one_far_ahead(history: History) -> None:
    history.write(sealed(history.codebook, op="lead", seq=10**6))


def one_after_a_good_one(history: History) -> None:
    history.lead()
    history.write(b"{}")


def under_an_unreadable_name(history: History) -> None:
    history.write(b"{}", headers=[(Unreadable("name"), b"value")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (garbage, "the record at offset 1 of deltas cannot be read: not a valid delta"),
        (a_tombstone, "the record at offset 1 of deltas cannot be read: the record has no value"),
        (a_flipped_bit, "the record at offset 1 of deltas cannot be applied: delta 2 does not continue the chain"),
        (one_far_ahead, "the record at offset 1 of deltas cannot be applied: delta 1000000 of term 2 follows 1"),
        (under_an_unreadable_name, "the record at offset 1 of deltas cannot be read: not a valid delta"),
        (one_after_a_good_one, "the record at offset 2 of deltas cannot be read: not a valid delta"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_replica_stops_before_a_hostile_record_is_published(
    log_of: History, folder: Path, hostile: Callable[[History], None], reason: str
) -> None:
    with Forked("replica", "infer", log_of.settings, folder) as replica:
        replica.wait_ready(90)
        hostile(log_of)
        wait_until(lambda: replica.ready()[0] == 503)
        assert reason in replica.ready()[1]
        assert replica.live() == (200, "ok\n")
        wait_until(lambda: not members(log_of.settings), what="an empty group")
        assert replica.state()["seq"] == 1
        assert replica.stop() == 1


def test_a_replica_that_starts_on_such_a_history_never_joins(log_of: History, folder: Path) -> None:
    break_record(log_of)
    log_of.publish()
    with Forked("replica", "infer", log_of.settings, folder) as replica:
        wait_until(lambda: "cannot be read" in replica.ready()[1], 90)
        assert replica.live() == (200, "ok\n")
        assert not members(log_of.settings)
        assert replica.stop() == 1


@pytest.mark.slow
def test_requests_read_before_the_error_are_answered_once_it_is_repaired(
    log_of: History, folder: Path, users_of: Callable[[Settings], Users]
) -> None:
    users = users_of(log_of.settings)
    prompts = texts(20, seed=1)
    asked = [question(f"q{number}", prompts[number % 20]) for number in range(600)]
    head = log_of.redis_key("head")
    with Forked("replica", "infer", log_of.settings, folder) as replica:
        replica.wait_ready(90)
        with users.client.predictions() as replies:
            users.client.send(asked)
            log_of.redis.hset(head, "digest", "f" * 64)
            wait_until(lambda: replica.ready()[0] == 503)
            assert "Redis and the log have disagreed on the digest of delta 1 for" in replica.ready()[1]
            wait_until(lambda: not members(log_of.settings), what="an empty group")
            replica.stop()
            log_of.redis.hset(head, "digest", log_of.codebook.digest.hex())
            replica.start()
            answers = replies.wait([request.request_id for request in asked], 90)
    assert len(answers) == len(asked)
    assert all(answer.error is UNSET for answer in answers.values())


def reason_of(editor: Forked) -> str:
    """The error of one sentence of an editor that has ended."""
    assert editor.wait() == 1
    assert not [event for event in editor.events() if "exception" in event]
    (stopped,) = (event for event in editor.events() if event["event"] == "editor_stopped")
    reason: str = stopped["reason"]
    return reason


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (break_record, "the record at offset 3 of deltas cannot be applied: not a valid delta"),
        (a_gap, "the record at offset 3 of deltas cannot be applied: delta 4 of term 4 follows 2 of term 2: a gap"),
    ],
    ids=["corrupt", "gap"],
)
def test_a_leading_editor_stops_at_a_hostile_record_without_any_feedback(
    log_of: History, folder: Path, hostile: Callable[[History], None], reason: str
) -> None:
    with Forked("editor", "edit", log_of.settings, folder) as editor:
        editor.wait_ready(90)
        lead = wait_until(lambda: records(log_of.settings, "deltas")[1:])[0]
        log_of.codebook.apply(lead.value)
        hostile(log_of)
        assert reason in reason_of(editor)


def test_a_busy_editor_commits_nothing_behind_a_hostile_record(
    log_of: History, folder: Path, users_of: Callable[[Settings], Users]
) -> None:
    given = [flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(texts(40, seed=11, shortest=6))]
    with Forked("editor", "edit", log_of.settings, folder) as editor:
        editor.wait_ready(90)
        users_of(log_of.settings).client.send(given)
        wait_until(lambda: len(outcomes_in_log(log_of.settings)) > 2)
        offset = log_of.write(b"\xff" * 100)
        assert f"the record at offset {offset} of deltas cannot be applied: not a valid delta" in reason_of(editor)
    *deltas, last = records(log_of.settings, "deltas")
    assert last.offset == offset
    outcomes = outcomes_in_log(log_of.settings)
    assert len(outcomes) < len(given)
    edits = [outcome.seq for outcome in outcomes if outcome.seq is not UNSET]
    assert edits == list(range(3, len(deltas) + 1)), (
        "after two terms, the log has each edit with an outcome, and no other"
    )


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (a_tombstone, "the record at offset 1 of deltas cannot be applied: the record has no value"),
        (a_gap, "the record at offset 1 of deltas cannot be applied: delta 3 of term 3 follows 1 of term 1: a gap"),
    ],
)
def test_an_editor_that_starts_on_such_a_history_never_leads(
    log_of: History, folder: Path, hostile: Callable[[History], None], reason: str
) -> None:
    hostile(log_of)
    before = len(records(log_of.settings, "deltas"))
    with Forked("editor", "edit", log_of.settings, folder) as editor:
        wait_until(lambda: not editor.running, 90)
        assert reason in reason_of(editor)
    assert len(records(log_of.settings, "deltas")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (garbage, "the record at offset 3 of deltas cannot be applied: not a valid delta"),
        (a_gap, "the record at offset 3 of deltas cannot be applied: delta 4 of term 4 follows 2 of term 2: a gap"),
    ],
)
def test_a_standby_stops_at_a_hostile_record_before_it_leads(
    log_of: History, folder: Path, hostile: Callable[[History], None], reason: str
) -> None:
    patient = {"session_timeout": 2 * TIMEOUT}  # the leader keeps the leadership meanwhile
    with Forked("editor", "edit", log_of.settings, folder, **patient) as editor:
        editor.wait_ready(90)
        with Forked("standby", "edit", log_of.settings, folder, **patient) as standby:
            standby.wait_ready(90)
            assert (editor.state()["leadership"], standby.state()["leadership"]) == ("leading", "standby")
            (lead,) = records(log_of.settings, "deltas")[1:]
            log_of.codebook.apply(lead.value)
            editor.pause()
            hostile(log_of)
            assert reason in reason_of(standby)
            editor.resume()
            assert reason in reason_of(editor)
