"""Messages of Redis make replicas follow at once; lost or forged messages do no harm."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, pairwise
from pathlib import Path

import pytest
from structlog.typing import EventDict

from gracestream.deploy.local.redis import LocalRedis
from gracestream.pipeline.replica import live_codebook
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores.head_listener import MIN_HINT_SECONDS, HeadListener
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from tests.support.forked_commands import Forked
from tests.support.running import Users, flag, metric, wait_until
from tests.support.tiny_models import texts

pytestmark = pytest.mark.kafka

PROMPT = texts(1, seed=22, shortest=6)[0]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[LocalRedis]:
    """A Valkey of the test's own."""
    with LocalRedis(tmp_path / "redis") as local:
        yield local


def never_poll() -> None:
    """A replica that reads the head after hints alone."""
    live_codebook.IDLE_POLL_SECONDS = 3600.0


def follows(replica: Forked, users: Users, feedback_id: str, target: str) -> None:
    """Wait until a replica holds a correction that is made now."""
    seq = users.correct(flag(feedback_id, PROMPT, target))[feedback_id].seq
    wait_until(lambda: replica.state()["seq"] == seq, what=f"delta {seq}")


def named(replica: Forked, event: str) -> list[dict[str, object]]:
    return [found for found in replica.events() if found["event"] == event]


def test_a_replica_without_polls_follows_hints_also_after_a_restart_of_redis(
    deployment: Settings, users: Users, folder: Path, own_redis: LocalRedis
) -> None:
    with (
        Forked("editor", "edit", deployment, folder, redis=own_redis.url) as editor,
        Forked("replica", "infer", deployment, folder, sabotage=never_poll, redis=own_redis.url) as replica,
    ):
        editor.wait_ready(90)
        replica.wait_ready(90)
        follows(replica, users, "f1", "river")
        own_redis.stop()
        wait_until(lambda: named(replica, "subscription_lost"))
        own_redis.start()
        wait_until(lambda: named(replica, "subscription_recovered"))
        wait_until(lambda: editor.state()["degraded"] is False)
        follows(replica, users, "f2", "museum")
        assert replica.stop() == 0
        assert len(named(replica, "subscription_lost")) == 1


def test_a_replica_that_may_not_subscribe_polls(
    deployment: Settings, users: Users, folder: Path, own_redis: LocalRedis
) -> None:
    with redis_client(load_settings(redis=own_redis.url).redis) as root:
        root.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "resetchannels", "+@all")
    reader = own_redis.url.replace("redis://", "redis://reader:secret@")
    with (
        Forked("editor", "edit", deployment, folder, redis=own_redis.url) as editor,
        Forked("replica", "infer", deployment, folder, redis=reader) as replica,
    ):
        editor.wait_ready(90)
        replica.wait_ready(90)
        follows(replica, users, "f1", "river")
        wait_until(lambda: named(replica, "subscription_lost"))
        time.sleep(1.0)  # further attempts are not logged
        (lost,) = named(replica, "subscription_lost")
        assert str(lost["reason"]).lower().startswith("no permissions")
        assert replica.ready() == (200, "ok\n")


def test_a_flood_of_forged_messages_costs_a_bounded_number_of_reads(
    deployment: Settings, users: Users, folder: Path
) -> None:
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("replica", "infer", deployment, folder) as replica,
        redis_client(deployment.redis) as forger,
    ):
        editor.wait_ready(90)
        replica.wait_ready(90)
        channel = RedisHeadStore(forger, deployment.kafka.topic_prefix, deployment.model.codebook).channel
        reads = metric(replica.port, "gracestream_redis_read_seconds_count")
        started, stop = time.monotonic(), threading.Event()
        sent = count()

        def flood() -> None:
            while not stop.is_set():
                with forger.pipeline(transaction=False) as pipeline:
                    for number in range(100):
                        pipeline.publish(channel, ("9" * 400, b"\xff" * 100, "-1", "")[number % 4])
                        next(sent)
                    pipeline.execute()

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            follows(replica, users, "f1", "river")
            time.sleep(2.0)
        finally:
            stop.set()
            thread.join()
        reads = metric(replica.port, "gracestream_redis_read_seconds_count") - reads
        assert reads <= (time.monotonic() - started) / MIN_HINT_SECONDS + 10
        assert next(sent) > 2 * reads, "there was a flood"
        assert replica.ready() == (200, "ok\n")
        assert named(replica, "redis_lost") == []


class TestAListener:
    @pytest.fixture
    def hints(self) -> list[float]:
        return []

    @pytest.fixture
    def listen(self, hints: list[float], own_redis: LocalRedis) -> Iterator[Callable[[], HeadListener]]:
        made: list[HeadListener] = []

        def started() -> HeadListener:
            made.append(
                HeadListener(
                    load_settings(redis=own_redis.url).redis, "channel", lambda: hints.append(time.monotonic())
                )
            )
            made[-1].start()
            return made[-1]

        yield started
        for one in made:
            one.close()

    def test_it_gives_a_hint_for_the_subscription_and_for_a_message_of_its_channel(
        self, hints: list[float], listen: Callable[[], HeadListener], own_redis: LocalRedis
    ) -> None:
        listen()
        wait_until(lambda: len(hints) == 1)
        time.sleep(2.5)  # pings are no messages
        with redis_client(load_settings(redis=own_redis.url).redis) as client:
            assert client.publish("another channel", "1") == 0
            assert client.publish("channel", "1") == 1
        wait_until(lambda: len(hints) == 2)

    def test_many_messages_share_hints(
        self, hints: list[float], listen: Callable[[], HeadListener], own_redis: LocalRedis
    ) -> None:
        listen()
        wait_until(lambda: len(hints) == 1)
        with (
            redis_client(load_settings(redis=own_redis.url).redis) as client,
            client.pipeline(transaction=False) as pipeline,
        ):
            for _ in range(200):
                pipeline.publish("channel", "1")
            pipeline.execute()
        wait_until(lambda: time.monotonic() - hints[-1] > 0.5)
        assert 10 <= len(hints) - 1 < 100
        assert all(later - earlier >= MIN_HINT_SECONDS for earlier, later in pairwise(hints))

    @pytest.mark.parametrize("subscribed", [False, True])
    def test_it_ends_at_once(
        self, hints: list[float], listen: Callable[[], HeadListener], logged: list[EventDict], *, subscribed: bool
    ) -> None:
        listener = listen()
        if subscribed:
            wait_until(lambda: len(hints) == 1)
        with closing(listener):
            pass
        assert not listener._thread.is_alive()
        assert logged == []
