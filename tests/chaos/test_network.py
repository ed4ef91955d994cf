"""Two real editors behind a network that holds, cuts, copies and delays their transactional requests.

Each round arms one plan of faults, sends four corrections and waits for their outcomes. In some rounds the leading
editor is killed as soon as a late request has arrived. Finally the topics are checked: nothing is lost or doubled.
`make chaos` runs many rounds, the ordinary tests a few.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kafka import TopicPartition

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka.clients import consumer
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ, create_topics
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from tests.support.doubles.checker import Follower, Left, faults
from tests.support.forked_commands import Forked
from tests.support.kafka_proxy import PLANS, Fault, KafkaProxy, proxied_kafka
from tests.support.running import (
    LIMITS,
    Users,
    deltas_in_log,
    flag,
    records,
    save_checkpoint,
    settings_for,
    wait_for_open_transactions,
    wait_until,
)
from tests.support.tiny_models import texts

CORRECTIONS = 4
"""Corrections per round."""

Round = tuple[str, bool, int]
"""A plan of faults, whether the leader is killed, and the seed of what is chosen in the round."""

SHORT: list[Round] = [
    (plan, kill, seed)
    for seed, (plan, kill) in enumerate(
        [("torn", False)] * 4 + [("torn", True), ("copied", False), ("mixed", False), ("mixed", True)]
    )
]
"""The rounds of the ordinary tests."""

ROUNDS = 40
"""Rounds of each story of `--chaos`."""

TARGETS = ("museum", "bridge", "train", "violin", "river", "bread")


class Network:
    """Two editors behind a proxy, and users with a direct connection to Kafka."""

    def __init__(self, settings: Settings, proxy: KafkaProxy, folder: Path) -> None:
        self.settings, self.proxy, self._folder = settings, proxy, folder
        self.users = Users(settings)
        self.editors: list[Forked] = []
        self.sent = 0
        self.happened: list[Fault] = []
        self._started = 0

    def start(self) -> None:
        """Start both editors."""
        while len(self.editors) < 2:
            self._add()
        for editor in self.editors:
            editor.wait_ready(90)

    def close(self) -> None:
        """End the editors."""
        for editor in self.editors:
            if editor.running:
                editor.kill()
        self.users.close()

    def play(self, plan: str, *, kill: bool, seed: int) -> None:
        """Run one round."""
        print(f"{time.strftime('%H:%M:%S')} {plan}{', and the leader is killed' if kill else ''}", flush=True)
        chosen = random.Random(seed)
        planned = PLANS[plan](chosen)
        self.proxy.arm(*planned)
        prompts = texts(CORRECTIONS, seed=seed, shortest=6, longest=9)
        names = [f"f{self.sent + number}" for number in range(CORRECTIONS)]
        given = [flag(name, prompt, chosen.choice(TARGETS)) for name, prompt in zip(names, prompts, strict=True)]
        self.users.client.send(given)
        self.sent += len(given)
        if kill:
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline and not any(fault.released for fault in planned):
                time.sleep(0.01)
            self._kill_leader()
        wait_until(lambda: len(records(self.settings, EDITS)) >= self.sent, 120, f"the outcomes of {names}")
        self.happened += [fault for fault in self.proxy.release() if fault.happened]
        for editor in [one for one in self.editors if not one.running]:  # ended, with a successor
            self.editors.remove(editor)
        self.start()

    def _kill_leader(self) -> None:
        leader = next(
            (editor for editor in self.editors if editor.running and editor.state()["leadership"] == "leading"), None
        )
        if leader is not None:
            leader.kill()

    def left(self) -> Left:
        """Everything on the topics and in Redis, once both editors have reached the end of the log.

        It is read again if a new leader has written meanwhile.
        """
        while True:
            wait_for_open_transactions(self.settings, DELTAS, EDITS, FEEDBACK_DLQ)
            wait_until(self._at_the_end, 60, "both editors and the head in Redis at the end of the log")
            left = self._read()
            if {follower.seq for follower in left.followers} == {deltas_in_log(self.settings)[-1].seq}:
                return left

    def _read(self) -> Left:
        store = self._store()
        reader = consumer(self.settings.kafka, group_id=self.settings.kafka.topic("editor"))
        try:
            position = reader.committed(TopicPartition(self.settings.kafka.topic(FEEDBACK), 0))
        finally:
            reader.close()
        states = [(editor.name, editor.state()) for editor in self.editors]
        return Left(
            feedback=records(self.settings, FEEDBACK),
            edits=records(self.settings, EDITS),
            deltas=records(self.settings, DELTAS),
            dead_letters=records(self.settings, FEEDBACK_DLQ),
            position=position,
            head=store.read_head(0),
            radii={name: float(np.float32(radius)) for name, radius in store.read_radii().items()},
            followers=[Follower(name, state["seq"], state["digest"], state["state_digest"]) for name, state in states],
            taken=[f"f{number}" for number in range(self.sent)],
        )

    def _at_the_end(self) -> bool:
        """True if both editors hold the whole log and Redis names its end."""
        seq = deltas_in_log(self.settings)[-1].seq
        head = self._store().read_head(0)
        if head is None or head.seq != seq:
            return False
        states = [editor.state() for editor in self.editors]
        return {state["seq"] for state in states} == {seq} and len({state["state_digest"] for state in states}) == 1

    def _store(self) -> RedisHeadStore:
        return RedisHeadStore(
            redis_client(self.settings.redis), self.settings.kafka.topic_prefix, self.settings.model.codebook
        )

    def _add(self) -> None:
        self._started += 1
        editor = Forked(f"editor-{self._started}", "edit", self.settings, self._folder, kafka=self.proxy.address)
        editor.start()
        self.editors.append(editor)


@pytest.fixture(scope="module")
def kafka_behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaProxy, LocalKafka]]:
    with proxied_kafka(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.fixture
def network(
    kafka_behind_proxy: tuple[KafkaProxy, LocalKafka], redis_url: str, prefix: str, tmp_path: Path
) -> Iterator[Network]:
    proxy, server = kafka_behind_proxy
    chosen = {**save_checkpoint("llama", tmp_path / "llama").settings(), **LIMITS, "session_timeout": 6.0}
    settings = settings_for(
        server.bootstrap, redis_url, prefix, **chosen, cache_dir=tmp_path / "cache", traffic_sample_size=0
    )
    create_topics(settings.kafka, partitions=1, replication=1)
    made = Network(settings, proxy, tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def story_of(seed: int) -> list[Round]:
    """The rounds of a story of `--chaos`."""
    chosen = random.Random(seed)
    numbers = range(seed * ROUNDS, (seed + 1) * ROUNDS)
    return [(chosen.choice([*PLANS, "torn"]), chosen.random() < 0.2, number) for number in numbers]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One short story, or the `--chaos` number of long ones."""
    seeds = range(metafunc.config.getoption("--chaos"))
    stories = {f"seed-{seed}": story_of(seed) for seed in seeds} or {"short": SHORT}
    if "story" in metafunc.fixturenames:
        metafunc.parametrize("story", stories.values(), ids=stories)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_correction_is_lost_or_doubled_on_a_bad_network(network: Network, story: list[Round]) -> None:
    for plan, kill, seed in story:
        network.play(plan, kill=kill, seed=seed)
    assert faults(network.left()) == []
    assert any(fault.released and fault.action == "hold" for fault in network.happened), "no request arrived late"
