"""Real processes on a real Kafka and a real Valkey, with every fault that may occur.

One deployment runs through all faults under load. Then its topics are checked: no feedback is lost, no edit is doubled,
each feedback record has an outcome, each request an answer, and all replicas have the same state. `make chaos` injects
all faults, several times and in random orders; the ordinary tests inject the worst faults once.
"""

import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.deploy.local.redis import LocalRedis
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.stores.redis_client import redis_client
from tests.chaos.dying import STEPS, read_slowly
from tests.chaos.site import Site
from tests.support.running import LIMITS, save_checkpoint, settings_for, wait_until

SILENCE = 2.0
"""Seconds for which a server or a network is unavailable, in addition to those until a session ends."""

SOON = {"session_timeout": 6.0, "shutdown_timeout": 9.0}

CATCHING_UP = 15.0
"""Seconds for which a slow replica reads: longer than another replica takes to leave."""

SNAPSHOT_EVERY = 5

SNAPSHOT_STEPS = ("snapshot begun", "snapshot filed")
"""Steps that occur only if a snapshot is due."""

SHORT_STEPS = {"decided", "term sent", "delta sent", "committed", "publishing", "snapshot filed"}
"""The steps at which the editor dies in the short story."""


@pytest.fixture(scope="module")
def chaos_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    with LocalKafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture
def site(chaos_kafka: LocalKafka, tmp_path: Path) -> Iterator[Site]:
    with LocalRedis(tmp_path / "valkey") as valkey:
        checkpoint = save_checkpoint("llama", tmp_path / "llama")
        settings = settings_for(
            chaos_kafka.bootstrap,
            valkey.url,
            f"c{secrets.token_hex(3)}-",
            **{
                **checkpoint.settings(),
                **LIMITS,
                **SOON,
                "cache_dir": tmp_path / "cache",
                "redis_outage_grace": 0.6,
                "traffic_sample_size": 16,
            },
            snapshot_url=str(tmp_path / "snapshots"),
            snapshot_interval=SNAPSHOT_EVERY,
        )
        create_topics(settings.kafka, partitions=4, replication=1)
        made = Site(settings, chaos_kafka, valkey, tmp_path)
        try:
            made.start()
            yield made
        finally:
            made.close()


def editor_dies(step: str, corrections: int) -> Callable[[Site], None]:
    """The leading editor dies at a step, which takes so many corrections; the standby continues."""

    def happen(site: Site) -> None:
        mortal = site.add_editor(die_at=step)
        mortal.wait_ready(90)
        for editor in list(site.editors):
            if editor is not mortal:
                editor.stop()
        site.correct(corrections)
        assert mortal.wait(90) == -signal.SIGKILL, mortal.stderr()
        site.add_editor().wait_ready(90)
        site.remove_ended_editors()
        site.correct(1)

    return happen


def editor_hangs(site: Site) -> None:
    """The leading editor hangs until the other editor leads; then it wakes, and ends by itself."""
    site.add_editor().wait_ready(90)
    stale = site.leader()
    site.correct(3)
    stale.pause()
    others = [editor for editor in site.editors if editor is not stale]
    wait_until(lambda: any(editor.state()["leadership"] == "leading" for editor in others), 60, "another leader")
    site.correct(2)
    stale.resume()
    assert stale.wait(60) == 1
    assert "another editor has" in stale.stderr()
    site.remove_ended_editors()


def replica_dies(site: Site) -> None:
    """A replica is killed under load."""
    victim = site.replicas.pop(0)
    victim.kill()
    site.correct(2)
    site.add_replica().wait_ready(90)


def replica_hangs(site: Site) -> None:
    """A replica hangs until the group has removed it, and wakes."""
    site.replicas[0].pause()
    site.correct(2)
    time.sleep(site.settings.kafka.session_timeout + SILENCE)
    site.replicas[0].resume()


def rebalance_while_one_catches_up(site: Site) -> None:
    """A replica leaves while a third replica, which reads the log slowly, is not ready; then the third joins."""
    site.correct(3)
    wait_until(site.all_done, 60, "every outcome")
    deltas = site.leader().state()["seq"]
    third = site.add_replica(partial(read_slowly, CATCHING_UP / deltas), snapshot_url="")
    wait_until(lambda: "model_loaded" in third.stderr(), 90, "a third replica")
    leaving = site.replicas.pop(0)
    leaving.process.terminate()
    wait_until(lambda: not leaving.running or third.ready()[0] != 503, what="the end of the replica that goes")
    behind = third.state()["seq"]
    assert third.ready() == (503, "starting\n")
    assert behind < deltas
    assert not leaving.running
    third.wait_ready(90)
    assert third.state()["seq"] >= deltas
    wait_until(
        lambda: third.name in {answer.replica for answer in site.answers()}, 60, "an answer of the third replica"
    )


def kafka_dies(site: Site) -> None:
    """Kafka is killed and started again."""
    site.correct(3)
    site.kafka.kill()
    time.sleep(SILENCE)
    site.kafka.start()


def kafka_is_cut_off(site: Site, until: Callable[[], object] = lambda: time.sleep(2 * SILENCE)) -> None:
    """Kafka does not answer for a while."""
    site.correct(3)
    site.kafka.child.send_signal(signal.SIGSTOP)
    try:
        until()
    finally:
        site.kafka.child.send_signal(signal.SIGCONT)


def kafka_is_cut_off_for_long(site: Site) -> None:
    """Kafka does not answer until the leading editor gives up and begins again."""
    leader = site.leader()
    before = leader.stderr().count("kafka_connection_lost")
    given_up = partial(
        wait_until, lambda: leader.stderr().count("kafka_connection_lost") > before, 180, "an editor that noticed"
    )
    kafka_is_cut_off(site, given_up)


def valkey_dies(site: Site) -> None:
    """Valkey is killed and started again."""
    site.correct(2)
    site.valkey.kill()
    site.correct(2)
    time.sleep(SILENCE)
    site.valkey.start()


def valkey_is_cut_off(site: Site) -> None:
    """Valkey does not answer for a while."""
    site.correct(2)
    site.valkey.child.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE)
    site.correct(2)
    site.valkey.child.send_signal(signal.SIGCONT)


def newest_snapshot_is_cut(site: Site) -> None:
    """The newest snapshot's file is truncated: a new replica starts from the snapshot before it, or from the log."""
    site.correct(6)
    *older, newest = site.snapshots()
    os.truncate(newest.uri.removeprefix("file://"), newest.bytes // 2)
    fresh = site.add_replica()
    fresh.wait_ready(90)
    rejected = [line for line in fresh.stderr().splitlines() if "snapshot_rejected" in line]
    assert any(newest.uri in line for line in rejected), fresh.stderr()
    assert ("snapshot_loaded" in fresh.stderr()) == bool(older), fresh.stderr()
    site.replicas.pop(0).stop()


def valkey_is_emptied(site: Site) -> None:
    """Valkey loses everything."""
    with redis_client(site.settings.redis) as client:
        client.flushall()
    site.correct(2)


EVENTS: dict[str, Callable[[Site], None]] = {
    "a replica dies": replica_dies,
    "Valkey is emptied": valkey_is_emptied,
    "the editor hangs": editor_hangs,
    "Kafka dies": kafka_dies,
    "a rebalance while one catches up": rebalance_while_one_catches_up,
    "Valkey dies": valkey_dies,
    "Kafka is cut off": kafka_is_cut_off,
    "Kafka is cut off for long": kafka_is_cut_off_for_long,
    "a replica hangs": replica_hangs,
    "Valkey is cut off": valkey_is_cut_off,
    "the newest snapshot is cut": newest_snapshot_is_cut,
    **{
        f"the editor dies: {step}": editor_dies(step, SNAPSHOT_EVERY + 3 if step in SNAPSHOT_STEPS else 3)
        for step in STEPS
    },
}

LONG = {
    "Kafka is cut off for long",
    *(f"the editor dies: {step}" for step in STEPS.keys() - SHORT_STEPS),
}
"""The faults that only `make chaos` injects."""

SHORT = [name for name in EVENTS if name not in LONG]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One short story, or the `--chaos` number of whole stories, each in its own order."""
    seeds = range(metafunc.config.getoption("--chaos"))
    stories = {f"seed-{seed}": random.Random(seed).sample(list(EVENTS), len(EVENTS)) for seed in seeds}
    stories = stories or {"short": SHORT}
    if "story" in metafunc.fixturenames:
        metafunc.parametrize("story", stories.values(), ids=stories)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_fault_loses_or_doubles_anything(site: Site, story: list[str]) -> None:
    for name in story:
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        EVENTS[name](site)
    site.wait_until_equal()
    assert site.faults() == []
    assert len(site.load.asked) > len(story)
