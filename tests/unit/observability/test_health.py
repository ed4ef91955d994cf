"""What `/live`, `/ready` and `/metrics` say of a worker."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import pytest

from gracestream.pipeline.observability import metrics
from gracestream.pipeline.observability.health import Health, HealthServer

STUCK_AFTER = 0.2


@pytest.fixture
def health() -> Health:
    return Health(STUCK_AFTER)


@pytest.fixture
def get(health: Health) -> Iterator[Callable[[str], tuple[int, str]]]:
    server = HealthServer(health, "127.0.0.1", 0)

    def got(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(server.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    yield got
    server.close()


def test_a_worker_that_starts_is_live_and_not_ready(get: Callable[[str], tuple[int, str]]) -> None:
    assert get("/live") == (200, "ok\n")
    assert get("/ready") == (503, "starting\n")


def test_a_part_that_is_at_one_thing_for_too_long_is_named_until_it_is_done(
    health: Health, get: Callable[[str], tuple[int, str]]
) -> None:
    begun, resume = threading.Event(), threading.Event()

    def work() -> None:
        with health.busy("model"):
            begun.set()
            resume.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    time.sleep(2 * STUCK_AFTER)
    status, reason = get("/live")
    assert status == 503
    assert "gracestream_stalled 1.0" in get("/metrics")[1].splitlines()
    assert reason.startswith("the model is stalled: it has been at one piece of work for ")
    resume.set()
    thread.join()
    assert get("/live") == (200, "ok\n")
    assert "gracestream_stalled 0.0" in get("/metrics")[1].splitlines()


def test_a_part_that_goes_from_one_thing_to_the_next_is_not_stuck(health: Health) -> None:
    patient = Health(60.0)
    for one in (health, patient):
        one.begin("event loop")
    time.sleep(2 * STUCK_AFTER)
    assert (health.stalled_part() is None, patient.stalled_part() is None) == (False, True)
    health.begin("event loop")
    assert health.stalled_part() is None


def test_work_that_fails_is_done(health: Health) -> None:
    with pytest.raises(ValueError, match="as it may"), health.busy("model"):
        raise ValueError("as it may")
    time.sleep(2 * STUCK_AFTER)
    assert health.stalled_part() is None


def test_a_worker_that_is_stopped_by_a_fault_is_live_and_not_ready(
    health: Health, get: Callable[[str], tuple[int, str]]
) -> None:
    health.set_ready()
    assert get("/ready") == (200, "ok\n")
    health.set_not_ready("a gap in the history")
    assert get("/ready") == (503, "a gap in the history\n")
    assert get("/live") == (200, "ok\n")


def test_each_kind_of_worker_shows_its_own_metrics_and_the_shared_ones(
    health: Health, get: Callable[[str], tuple[int, str]]
) -> None:
    shown = {}
    for kind, own in (("replica", metrics.REPLICA_REGISTRY), ("editor", metrics.EDITOR_REGISTRY)):
        health.metrics = partial(metrics.render_metrics, own)
        lines = get("/metrics")[1].splitlines()
        shown[kind] = {line.split()[2] for line in lines if line.startswith("# TYPE gracestream_")}
    assert {"gracestream_codebook_seq", "gracestream_ready"} <= shown["replica"] & shown["editor"]
    assert "gracestream_head_seq" in shown["replica"] - shown["editor"]
    assert "gracestream_feedback_lag" in shown["editor"] - shown["replica"]


@pytest.mark.parametrize("series", ['feedback_total{status="rejected"}', 'requests_total{outcome="ok"}'])
def test_a_count_is_there_before_the_first_that_it_counts(series: str) -> None:
    """What Prometheus calls an increase begins with the second value that it sees."""
    lines = metrics.render_metrics(metrics.REPLICA_REGISTRY, metrics.EDITOR_REGISTRY).decode().splitlines()
    assert any(line.startswith(f"gracestream_{series} ") for line in lines)


def test_an_address_may_be_one_of_ipv6(health: Health) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = HealthServer(health, "::1", 0)
    with urllib.request.urlopen(f"{server.url}/live", timeout=10) as answer:
        assert answer.read() == b"ok\n"
    server.close()


def test_who_connects_and_says_nothing_is_let_go(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracestream.pipeline.observability.health._Handler.timeout", 0.2)
    server = HealthServer(health, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=10) as silent:
        assert silent.recv(1) == b""
    server.close()
