"""Every log event has a documented meaning, and a warning carries its consequence."""

import pytest

from tests.support.log_events import MEANINGS, log_calls, log_calls_in, log_events


def test_every_log_call_is_in_order() -> None:
    assert [fault for call in log_calls() if (fault := call.fault())] == []


def test_every_event_has_a_meaning_and_nothing_else_has_one() -> None:
    documented = [event for meanings in MEANINGS.values() for event in meanings]
    assert sorted(documented) == sorted(log_events()), "tests/support/log_events.py holds the meanings"


@pytest.mark.parametrize("worker", ["Replicas", "The editor"])
def test_an_event_stands_with_every_worker_that_logs_it(worker: str) -> None:
    shown = MEANINGS[worker] | MEANINGS["Replicas and the editor"]
    assert {name for name, event in log_events().items() if worker in event.owners} <= shown.keys()


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('log.warning("thing_failed", consequence="it waits")', None),
        ('log.info("thing_done", seq=1)', None),
        ('_exit(1, log.error, "thing_failed", consequence="it waits")', None),
        ('log.warning("thing_failed", reason="so")', "consequence"),
        ('log.exception("thing_failed")', "consequence"),
        ('log.error("thing_failed", consequence=text)', "consequence"),
        ('_exit(1, log.error, "thing_failed")', "consequence"),
        ("log.info(event)", "literal"),
        ("_exit(1, log.error, event)", "literal"),
        ('log.info(f"thing_{what}")', "literal"),
        ('log.info("done")', "noun_verb"),
        ('log.info("Thing done")', "noun_verb"),
    ],
)
def test_a_log_call_out_of_order_would_be_found(source: str, fault: str | None) -> None:
    (call,) = log_calls_in(source, "module.py")
    found = call.fault()
    assert found is None if fault is None else fault in str(found)


def test_a_method_that_is_passed_on_is_no_log_call() -> None:
    assert list(log_calls_in("threading.Thread(target=log_method, args=[event], kwargs=fields)", "module.py")) == []
