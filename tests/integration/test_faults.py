"""A history that cannot be followed stops a replica: it leaves its group, and stays to be looked at."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import UNSET

from pipeline.model import EditableModel
from pipeline.settings import Settings
from tests.integration.forked import Forked
from tests.integration.history import History
from tests.integration.running import Users, members, metric, question, wait_until
from tests.unit.engine.tiny import sealed, texts


@pytest.fixture
def log_of(quick: Settings) -> Iterator[History]:
    """A history of the replicas' own model, in its first term."""
    model = EditableModel.load(quick.model, quick.layer)
    made = History(quick, model.fingerprint, model.layer)
    made.lead()
    made.make_live()
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
        (break_chain, "delta 2 does not continue the chain of digests"),
        (break_record, "of deltas cannot be read: not a valid delta"),
        (another_model, "delta 2 is of model '0000"),
        (a_gap, "delta 3 of term 3 follows 1 of term 1: a gap"),
    ],
    ids=["digest", "corrupt", "another model", "gap"],
)
def test_a_replica_stops_serving_and_says_why(
    log_of: History, folder: Path, breaking: Callable[[History], None], reason: str
) -> None:
    with Forked("replica", "infer", log_of.settings, folder) as replica:
        replica.wait_ready(90)
        wait_until(lambda: len(members(log_of.settings)) == 1)
        breaking(log_of)
        log_of.make_live()
        wait_until(lambda: replica.ready()[0] == 503, 15)
        assert reason in replica.ready()[1]
        assert replica.live() == (200, "ok\n")
        assert metric(replica.port, "gracestream_ready") == 0
        wait_until(lambda: not members(log_of.settings), 5, "an empty group")
        assert replica.state()["seq"] == 1
        assert replica.running
        assert replica.stop() == 1


def test_a_replica_that_starts_on_such_a_history_never_joins(log_of: History, folder: Path) -> None:
    break_record(log_of)
    log_of.make_live()
    with Forked("replica", "infer", log_of.settings, folder) as replica:
        wait_until(lambda: "cannot be read" in replica.ready()[1], 90)
        assert replica.live() == (200, "ok\n")
        assert not members(log_of.settings)
        assert replica.stop() == 1


def test_questions_taken_before_the_fault_are_answered_once_it_is_mended(
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
            wait_until(lambda: replica.ready()[0] == 503, 15)
            assert "Redis and the log disagree on the digest of delta 1" in replica.ready()[1]
            wait_until(lambda: not members(log_of.settings), 5, "an empty group")
            replica.stop()
            log_of.redis.hset(head, "digest", log_of.codebook.digest.hex())
            replica.start()
            answers = replies.wait([request.request_id for request in asked], 20)
    assert len(answers) == len(asked)
    assert all(answer.error is UNSET for answer in answers.values())
