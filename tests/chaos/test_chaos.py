"""Real processes on a real Kafka and a real Valkey, while everything that can fail does.

One deployment lives through it under load. Then the topics are read: no feedback lost, no edit doubled, an outcome
for each feedback, an answer for each request, and every replica in the same state. `make chaos` has everything happen,
several times and in random orders; the ordinary tests have the worst of it happen once.
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
"""Seconds for which a server or a network is away, beside those until a session ends."""

SOON = {"session_timeout": 6.0, "shutdown_timeout": 9.0}

CATCHING_UP = 15.0
"""Seconds that a replica takes which reads slowly: longer than another one takes to leave."""

SNAPSHOT_EVERY = 5

SNAPSHOT_STEPS = ("snapshot begun", "snapshot filed")
"""These come only once a snapshot is due."""

SHORT_STEPS = {"decided", "term sent", "delta sent", "committed", "publishing", "snapshot filed"}
"""At which the editor dies in the short story."""


@pytest.fixture(scope="module")
def kafka_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    with LocalKafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture
def site(kafka_of_its_own: LocalKafka, tmp_path: Path) -> Iterator[Site]:
    with LocalRedis(tmp_path / "valkey") as valkey:
        checkpoint = save_checkpoint("llama", tmp_path / "llama")
        settings = settings_for(
            kafka_of_its_own.bootstrap,
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
        made = Site(settings, kafka_of_its_own, valkey, tmp_path)
        try:
            made.start()
            yield made
        finally:
            made.close()


def editor_dies(step: str, corrections: int) -> Callable[[Site], None]:
    """The editor that leads dies at a step of its work, which takes so many corrections; the one that waits goes on."""

    def happen(site: Site) -> None:
        mortal = site.add_editor(die_at=step)
        mortal.wait_ready(90)
        for editor in list(site.editors):
            if editor is not mortal:
                editor.stop()
        site.correct(corrections)
        assert mortal.wait(90) == -signal.SIGKILL, mortal.stderr()
        site.add_editor().wait_ready(90)
        site.bury()
        site.correct(1)

    return happen


def editor_hangs(site: Site) -> None:
    """The editor that leads hangs until another one leads, wakes, and ends by itself."""
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
    site.bury()


def replica_dies(site: Site) -> None:
    """A replica is killed under load."""
    victim = site.replicas.pop(0)
    victim.kill()
    site.correct(2)
    site.add_replica().wait_ready(90)


def replica_hangs(site: Site) -> None:
    """A replica hangs until the group goes on without it, and wakes."""
    site.replicas[0].pause()
    site.correct(2)
    time.sleep(site.settings.kafka.session_timeout + SILENCE)
    site.replicas[0].resume()


def rebalance_while_one_catches_up(site: Site) -> None:
    """A replica goes while a third one, which reads the whole log slowly, is not ready; then that one joins."""
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
    """Kafka does not answer until the editor that leads waits no longer, and begins again."""
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
    """The newest snapshot's file loses its end: a new replica begins with the one before it, or with the log."""
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
    """Valkey forgets everything."""
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
"""What only `make chaos` has happen."""

SHORT = [name for name in EVENTS if name not in LONG]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One short story, or as many whole ones as `--chaos` says, each in an order of its own."""
    rounds = metafunc.config.getoption("--chaos")
    stories = [random.Random(seed).sample(list(EVENTS), len(EVENTS)) for seed in range(rounds)] or [SHORT]
    if "story" in metafunc.fixturenames:
        metafunc.parametrize("story", stories, ids=[f"seed-{seed}" for seed in range(len(stories))])


@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_doubled_whatever_happens(site: Site, story: list[str]) -> None:
    for name in story:
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        EVENTS[name](site)
    site.settle()
    assert site.faults() == []
    assert len(site.load.asked) > len(story)
