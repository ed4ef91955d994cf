"""Redis is untrusted input: with any answer or none, replicas and editors go on and follow the log."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec import UNSET
from redis.exceptions import RedisError
from structlog.typing import EventDict

from gracestream.deploy.local.redis import LocalRedis
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka.waiting import UnreachableError
from gracestream.pipeline.replica.codebook_replica import MAX_GOOD_ANSWERS, CodebookReplica
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores.head_listener import HeadListener
from gracestream.pipeline.stores.redis_bounds import MAX_ANSWER_BYTES
from gracestream.pipeline.stores.redis_client import redis_client, wait_for_redis
from gracestream.pipeline.stores.redis_head import Head, RedisHeadStore, StaleHeadError
from tests.support.forked_commands import Forked
from tests.support.running import Users, flag, metric, question, wait_until
from tests.support.tiny_models import texts
from tests.support.written_history import History, same

PROMPT = texts(1, seed=21, shortest=6)[0]
HUGE = b"9" * (32 * 2**20)


@pytest.fixture
def history(quick: Settings) -> Iterator[History]:
    """A history of two published deltas."""
    made = History(quick)
    made.lead()
    made.add("a", [1.0, 0.0])
    made.publish()
    yield made
    made.empty_redis()
    made.close()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[LocalRedis]:
    """A Valkey for one test, which may pause it."""
    with LocalRedis(tmp_path / "redis") as local:
        yield local
        local.child.send_signal(signal.SIGCONT)


def step(codebook_replica: CodebookReplica) -> int:
    codebook_replica.sync_to_head(codebook_replica.read_head())
    return codebook_replica.codebook.seq


def head_field(name: str, value: Any) -> Callable[[History], object]:
    return lambda history: history.redis.hset(history.redis_key("head"), name, value)


def of_type_list(key: str) -> Callable[[History], object]:
    def plant(history: History) -> None:
        history.redis.delete(history.redis_key(key))
        history.redis.rpush(history.redis_key(key), "of another type")

    return plant


def radius(value: Any) -> Callable[[History], object]:
    return lambda history: history.redis.hset(history.redis_key("radii"), "b", value)


NO_HEAD: dict[str, Callable[[History], object]] = {
    "a seq of 400 digits": head_field("seq", "9" * 400),
    "a seq beyond what scripts count": head_field("seq", str(2**53)),
    "a negative seq": head_field("seq", "-1"),
    "a seq that is no number": head_field("seq", "nan"),
    "a seq of 32 MiB": head_field("seq", HUGE),
    "a term that is no number": head_field("term", "1e3"),
    "a term in bytes": head_field("term", b"\xff\xfe"),
    "a digest that is none": head_field("digest", "Z" * 64),
    "a digest in bytes": head_field("digest", b"\xff" * 64),
    "a digest of 32 MiB": head_field("digest", HUGE),
    "no digest": lambda history: history.redis.hdel(history.redis_key("head"), "digest"),
    "a list as head": of_type_list("head"),
    "a list of changes": of_type_list("changed"),
}
"""Heads that no editor writes."""

WRONG_RADII: dict[str, Callable[[History], object]] = {
    "a radius that is not a number": radius("nan"),
    "an infinite radius": radius("1e400"),
    "a radius that is no number": radius(b"\xff\xfe"),
    "a radius of 32 MiB": radius(HUGE),
    "an entry in bytes": lambda history: history.redis.zadd(history.redis_key("changed"), {b"\xff\xfe": 3}),
    "an entry of 8 MiB": lambda history: history.redis.zadd(history.redis_key("changed"), {HUGE[: 2**23]: 3}),
}


def sent_by_redis(history: History) -> int:
    sent: int = history.redis.info("stats")["total_net_output_bytes"]
    return sent


class TestReplica:
    @pytest.mark.slow
    @pytest.mark.parametrize("plant", NO_HEAD.values(), ids=NO_HEAD)
    def test_it_follows_the_log_if_redis_holds_data_of_no_editor(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], plant: Callable[[History], object]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        assert step(codebook_replica) == 2
        history.add("b", [0.0, 1.0])
        plant(history)
        before = sent_by_redis(history)
        wait_until(lambda: step(codebook_replica) == 3)
        assert sent_by_redis(history) - before < 2**20
        assert codebook_replica.degraded
        assert same(codebook_replica.codebook, history.codebook)
        RedisPublisher(history.store, history.codebook, 0.0).reconcile()
        assert step(codebook_replica) == 3
        assert not codebook_replica.degraded

    @pytest.mark.parametrize("plant", WRONG_RADII.values(), ids=WRONG_RADII)
    def test_it_follows_redis_with_any_radii(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], plant: Callable[[History], object]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.add("b", [0.0, 1.0])
        history.publish()
        plant(history)
        wait_until(lambda: codebook_replica._follower.latest_seq == 3)
        before = sent_by_redis(history)
        assert step(codebook_replica) == 3
        assert sent_by_redis(history) - before < 2**20
        assert not codebook_replica.degraded
        assert codebook_replica.codebook.radii_N.tolist() == [1.0, 1.0]

    def test_a_wrong_digest_is_an_error_after_the_grace_period_once_the_log_was_read_to_its_end(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        assert step(codebook_replica) == 2
        for _ in range(3):  # each time for less than the grace period, in sum for more
            history.redis.hset(history.redis_key("head"), "digest", "f" * 64)
            assert step(codebook_replica) == 2
            assert codebook_replica.degraded
            time.sleep(history.settings.redis.outage_grace / 2)
            history.redis.hset(history.redis_key("head"), "digest", history.codebook.digest.hex())
            assert step(codebook_replica) == 2
        wait_until(lambda: step(codebook_replica) == 2 and not codebook_replica.degraded)
        history.redis.hset(history.redis_key("head"), "digest", "f" * 64)
        with pytest.raises(HistoryError, match=r"have disagreed on the digest of delta 2 for \d+ s"):
            wait_until(lambda: step(codebook_replica) != 2)

    def test_a_wrong_digest_is_no_error_while_the_end_of_the_log_is_unknown(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        monkeypatch.setattr(codebook_replica._follower, "request_end_check", lambda: None)
        history.redis.hset(history.redis_key("head"), "digest", "f" * 64)
        wait_until(lambda: step(codebook_replica) == 2)
        until = time.monotonic() + 3 * history.settings.redis.outage_grace
        while time.monotonic() < until:
            assert step(codebook_replica) == 2
        assert codebook_replica.degraded

    def test_a_replica_does_not_wait_for_ever_for_a_head_beyond_the_log(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        assert step(codebook_replica) == 2
        history.redis.hset(history.redis_key("head"), "seq", str(10**15))
        assert step(codebook_replica) == 2
        assert codebook_replica.unread_head_seq == 10**15
        assert not codebook_replica.degraded, "the delta may still arrive"
        history.add("b", [0.0, 1.0])
        wait_until(lambda: step(codebook_replica) == 3 and codebook_replica.degraded)
        assert codebook_replica_of(history.settings).catch_up(20), "a starting replica serves the log, too"

    def test_a_replica_does_not_wait_for_ever_behind_an_old_head(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        assert step(codebook_replica) == 2
        history.add("b", [0.0, 1.0])
        wait_until(lambda: codebook_replica._follower.latest_seq == 3)
        assert step(codebook_replica) == 2
        wait_until(lambda: step(codebook_replica) == 3)
        assert codebook_replica.degraded
        history.publish()
        assert step(codebook_replica) == 3
        assert not codebook_replica.degraded

    def test_a_head_that_is_sometimes_beyond_the_log_delays_one_batch(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        assert step(codebook_replica) == 2
        waits: list[float] = []
        take = codebook_replica._follower.poll

        def noted(seq: int, timeout: float) -> list[tuple[int, bytes]]:
            waits.append(timeout)
            return take(seq, min(timeout, 0.1))

        monkeypatch.setattr(codebook_replica._follower, "poll", noted)
        turns = cycle(["999", "2"])

        def stepped() -> int:
            history.redis.hset(history.redis_key("head"), "seq", next(turns))
            return step(codebook_replica)

        wait_until(lambda: stepped() == 2 and codebook_replica.degraded)
        assert [stepped(), codebook_replica.degraded, stepped(), codebook_replica.degraded] == [2, True, 2, True]
        assert [wait > 0 for wait in waits] == [True] + [False] * (len(waits) - 1)
        history.add("b", [0.0, 1.0])
        wait_until(lambda: stepped() == 3, what="a delta of the log")
        history.redis.hset(history.redis_key("head"), "seq", "2")  # no delta is published behind 999
        history.publish()
        wait_until(lambda: step(codebook_replica) == 3 and not codebook_replica.degraded)

    def test_a_replica_does_not_wait_for_ever_behind_alternating_old_heads(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        head = history.redis_key("head")
        old: list[dict[Any, Any]] = [history.redis.hgetall(head)]
        history.add("b", [0.0, 1.0])
        history.publish()
        old.append(history.redis.hgetall(head))
        assert step(codebook_replica) == 3
        history.add("c", [1.0, 1.0])
        wait_until(lambda: codebook_replica._follower.latest_seq == 4)
        turns = cycle(old)

        def stepped() -> int:
            history.redis.hset(head, mapping=next(turns))
            return step(codebook_replica)

        assert stepped() == 3, "the head may become the newest"
        wait_until(lambda: stepped() == 4)
        assert codebook_replica.degraded

    def test_a_transient_wrong_head_ends_no_replica(self, deployment: Settings, users: Users, folder: Path) -> None:
        with (
            Forked("editor", "edit", deployment, folder) as editor,
            Forked("replica", "infer", deployment, folder, redis_outage_grace=30.0) as replica,
            redis_client(deployment.redis) as client,
        ):
            editor.wait_ready(90)
            replica.wait_ready(90)
            head = RedisHeadStore(client, deployment.kafka.topic_prefix, deployment.model.codebook).head_key
            assert editor.stop() == 0  # otherwise it repairs the head at once
            known = client.hgetall(head)
            for name, value in (("digest", "f" * 64), ("seq", "9" * 400)):
                client.hset(head, name, value)
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 1)
                client.hset(head, name, known[name.encode()])
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 0)
                assert replica.ready() == (200, "ok\n")
            answered = users.ask(question("q", PROMPT))["q"]
            assert answered.replica == "replica"


class TestEditor:
    @pytest.mark.slow
    @pytest.mark.parametrize("plant", [*NO_HEAD.values(), of_type_list("radii")], ids=[*NO_HEAD, "a list of radii"])
    def test_it_repairs_data_of_no_editor(self, history: History, plant: Callable[[History], object]) -> None:
        publisher = RedisPublisher(history.store, history.codebook, 0.0, retry_seconds=0.0)
        publisher.reconcile()
        plant(history)
        before = sent_by_redis(history)
        for _ in range(2):
            publisher.reconcile()
        assert sent_by_redis(history) - before < 2**20
        assert publisher.in_sync
        head = history.store.read_head(0)
        assert head is not None
        assert (head.seq, head.digest, head.changed_radii) == (2, history.codebook.digest.hex(), {"a": 1.0})
        assert history.store.read_radii() == {"a": 1.0}

    def test_a_newer_head_counts_after_the_grace_period(self, history: History) -> None:
        grace = 1.0
        publisher = RedisPublisher(history.store, history.codebook, grace, retry_seconds=0.0)
        publisher.reconcile()
        seq = history.redis_key("head"), "seq"
        history.redis.hset(*seq, "999")
        publisher.reconcile()
        assert not publisher.in_sync
        history.redis.hset(*seq, "2")
        publisher.reconcile()
        assert publisher.in_sync
        history.redis.hset(*seq, "999")
        with pytest.raises(StaleHeadError, match="Redis has a newer one"):
            wait_until(publisher.reconcile, 20)

    def test_a_new_leader_waits_until_a_newer_head_is_gone(self, history: History) -> None:
        stop = threading.Event()
        seq = history.redis_key("head"), "seq"
        history.redis.hset(*seq, "999")
        publisher = RedisPublisher(history.store, history.codebook, 60.0)
        mended = threading.Timer(0.5, history.redis.hset, [*seq, "2"])
        mended.start()
        assert publisher.wait_until_not_ahead(stop)
        mended.join()
        history.redis.hset(*seq, "999")
        stop.set()
        assert not publisher.wait_until_not_ahead(stop)
        with pytest.raises(StaleHeadError, match=f"delete the key {history.store.head_key}"):
            RedisPublisher(history.store, history.codebook, 0.2).wait_until_not_ahead(threading.Event())


class Listener:
    """A server in place of Redis: it accepts connections and calls `serve` for each."""

    def __init__(self, serve: Callable[[socket.socket], object]) -> None:
        self._serve = serve
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}/0"
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self._server.accept()[0])
            except OSError:
                return
            threading.Thread(target=self._serve_one, args=[self.taken[-1]], daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client closed the connection
            self._serve(connection)

    def close(self) -> None:
        self._server.close()
        for connection in self.taken:
            connection.close()


@contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[Listener]:
    listener = Listener(serve)
    yield listener
    listener.close()


def silent(_connection: socket.socket) -> None:
    """Never answers."""


class Flood:
    """Answers with one endless string."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, connection: socket.socket) -> None:
        connection.sendall(b"$999999999999\r\n")
        while True:
            self.sent += connection.send(bytes(2**16))


def drip(connection: socket.socket) -> None:
    """Answers single bytes slowly, so that no read times out."""
    connection.sendall(b"$1000\r\n")
    while True:
        connection.send(b"x")
        time.sleep(0.1)


def nested(connection: socket.socket) -> None:
    connection.sendall(b"*1\r\n" * 100_000)


def no_number(connection: socket.socket) -> None:
    connection.sendall(b":" + b"9" * 10_000 + b"\r\n")


def empty_push(connection: socket.socket) -> None:
    """A push message without elements. RESP3 requires at least one, and redis-py reads it."""
    connection.recv(2**16)
    connection.sendall(b">0\r\n")


def hello_without_map(connection: socket.socket) -> None:
    """Answers every command with +OK, including HELLO."""
    while asked := connection.recv(2**16):
        connection.sendall(b"+OK\r\n" * asked.count(b"*"))


class Fitful:
    """Answers like Redis, always with the same head; while `hangs` is set, it does not answer reads of the head."""

    def __init__(self) -> None:
        self.hangs = False

    def __call__(self, connection: socket.socket) -> None:
        while asked := connection.recv(2**16):
            for command in asked.split(b"*")[1:]:
                if b"HELLO" in command:
                    connection.sendall(b"%1\r\n+proto\r\n:3\r\n")
                elif b"EVALSHA" not in command:
                    connection.sendall(b"+OK\r\n")
                elif not self.hangs:
                    connection.sendall(b"*3\r\n$1\r\n1\r\n$1\r\n2\r\n$64\r\n" + b"a" * 64 + b"\r\n")


def huge_radius(connection: socket.socket) -> None:
    """Answers HELLO like Redis, and a read of the head with a radius that no float can hold."""
    while asked := connection.recv(2**16):
        for command in asked.split(b"*")[1:]:
            if b"HELLO" in command:
                connection.sendall(b"%1\r\n+proto\r\n:3\r\n")
            elif b"EVALSHA" in command:
                connection.sendall(b"*5\r\n$1\r\n1\r\n$1\r\n2\r\n$64\r\n" + b"a" * 64 + b"\r\n$1\r\na\r\n")
                connection.sendall(b"(" + b"9" * 400 + b"\r\n")
            else:
                connection.sendall(b"+OK\r\n")


class Proxy:
    """A proxy of a Redis; while `pushes` is set, it sends an empty push message before each answer."""

    def __init__(self, settings: Settings) -> None:
        self.pushes, self.pushed = False, 0
        self._to = urlsplit(settings.redis.url)

    def __call__(self, connection: socket.socket) -> None:
        with socket.create_connection((self._to.hostname or "", self._to.port or 0)) as redis:
            threading.Thread(target=self._back, args=[redis, connection], daemon=True).start()
            while asked := connection.recv(2**16):
                redis.sendall(asked)

    def _back(self, redis: socket.socket, connection: socket.socket) -> None:
        with suppress(OSError):  # the client closed the connection
            while answer := redis.recv(2**16):
                if self.pushes:
                    self.pushed += 1
                    answer = b">0\r\n" + answer
                connection.sendall(answer)


class TestMalformedAnswers:
    @pytest.mark.parametrize("serve", [empty_push, hello_without_map])
    def test_a_malformed_answer_at_start_counts_as_none(self, serve: Callable[[socket.socket], object]) -> None:
        with listening(serve) as listener:
            settings = load_settings(redis=listener.url, redis_outage_grace=0.5)
            with pytest.raises(UnreachableError, match=r"does not answer \(Redis could not be asked, or its answer"):
                wait_for_redis(settings.redis, lambda _line: None)

    def test_a_radius_that_no_float_can_hold_makes_an_answer_unreadable(self) -> None:
        with (
            listening(huge_radius) as listener,
            redis_client(load_settings(redis=listener.url).redis) as client,
            pytest.raises(RedisError, match="holds content that gracestream did not write"),
        ):
            RedisHeadStore(client, "", "default").read_head(0)

    def test_malformed_answers_end_no_worker(self, deployment: Settings, users: Users, folder: Path) -> None:
        proxy = Proxy(deployment)
        with listening(proxy) as listener:
            chosen = {"redis": listener.url, "redis_outage_grace": 0.5}
            with (
                Forked("editor", "edit", deployment, folder, **chosen) as editor,
                Forked("replica", "infer", deployment, folder, **chosen) as replica,
            ):
                editor.wait_ready(90)
                replica.wait_ready(90)
                proxy.pushes = True
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 1)
                corrected = users.correct(flag("f", PROMPT, "river"))["f"]
                wait_until(lambda: editor.state()["degraded"] is True)
                answer = users.ask(question("q", PROMPT, min_seq=corrected.seq))["q"]
                assert answer.error is UNSET, "the replica follows the log"
                assert proxy.pushed > 0
                proxy.pushes = False
                wait_until(lambda: editor.state()["degraded"] is False)
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 0)
                assert replica.running
                assert editor.running

    @pytest.mark.parametrize("serve", [silent, drip, nested, no_number, empty_push, hello_without_map])
    def test_a_read_fails_with_a_redis_error(self, serve: Callable[[socket.socket], object]) -> None:
        with listening(serve) as listener, redis_client(load_settings(redis=listener.url).redis) as client:
            store = RedisHeadStore(client, "", "default")
            for ask in (lambda: store.read_head(0), store.count_radii):
                with pytest.raises(RedisError):
                    ask()

    @pytest.mark.parametrize("serve", [silent, drip, nested, no_number, empty_push, hello_without_map, Flood()])
    def test_a_listener_gets_no_hint_and_pauses(
        self, serve: Callable[[socket.socket], object], logged: list[EventDict]
    ) -> None:
        hints: list[None] = []
        with listening(serve) as listener:
            head_listener = HeadListener(load_settings(redis=listener.url).redis, "channel", lambda: hints.append(None))
            head_listener.start()
            wait_until(lambda: logged)
            time.sleep(2.0)
            assert len(listener.taken) <= 8
            head_listener.close()
        assert hints == []
        assert [event["event"] for event in logged] == ["subscription_lost"]

    def test_no_more_of_an_answer_is_read_than_the_bound(self) -> None:
        flood = Flood()
        with listening(flood) as listener, redis_client(load_settings(redis=listener.url).redis) as client:
            with pytest.raises(RedisError, match=f"more than {MAX_ANSWER_BYTES} bytes"):
                RedisHeadStore(client, "", "default").read_head(0)
            client.connection_pool.disconnect()
            assert flood.sent < MAX_ANSWER_BYTES + 2**24, "with the kernel's buffers"


class TestHangingRedis:
    def test_batches_read_the_head_again_after_several_good_answers(
        self, quick: Settings, codebook_replica_of: Callable[..., CodebookReplica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "gracestream.pipeline.replica.codebook_replica.HEAD_TIMEOUT_SECONDS", 30
        )  # a busy machine may take long; a hang fails in any case
        fitful = Fitful()
        with listening(fitful) as listener:
            codebook_replica = codebook_replica_of(quick.replace(redis=listener.url))
            assert isinstance(codebook_replica.read_head(), Head)
            assert not codebook_replica.redis_unavailable
            needed: list[int] = []
            for _ in range(6):
                fitful.hangs = True
                assert codebook_replica.read_head() == "lost"
                assert codebook_replica.redis_unavailable
                fitful.hangs = False
                needed.append(0)
                while codebook_replica.redis_unavailable and needed[-1] < 2 * MAX_GOOD_ANSWERS:
                    assert isinstance(codebook_replica.read_head(), Head)
                    needed[-1] += 1
            assert needed == [3, 6, 12, 24, MAX_GOOD_ANSWERS, MAX_GOOD_ANSWERS]
            for _ in range(2 * MAX_GOOD_ANSWERS):
                assert isinstance(codebook_replica.read_head(), Head)
            fitful.hangs = True
            assert codebook_replica.read_head() == "lost"
            fitful.hangs = False
            for away in (True, True, False):
                assert isinstance(codebook_replica.read_head(), Head)
                assert codebook_replica.redis_unavailable == away

    @pytest.mark.slow
    def test_no_batch_reads_the_head_of_a_redis_that_never_answers(
        self, deployment: Settings, users: Users, folder: Path
    ) -> None:
        with listening(silent) as listener:
            chosen = {"redis": listener.url, "redis_outage_grace": 0.5}
            with Forked("replica", "infer", deployment, folder, **chosen) as replica:
                replica.wait_ready(90)
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 1)
                asked, started = len(listener.taken), time.monotonic()
                for number in range(20):
                    users.ask(question(f"q{number}", PROMPT))
                probes = time.monotonic() - started + 2  # each read takes a second, one at a time
                subscriptions = 7  # the pauses between them double, from 0.2 to 10 seconds
                assert metric(replica.port, "gracestream_step_requests_count") >= 20
                assert len(listener.taken) - asked <= probes + subscriptions

    @pytest.mark.slow
    def test_batches_read_the_head_again_once_redis_answers(
        self, deployment: Settings, users: Users, folder: Path, own_redis: LocalRedis
    ) -> None:
        chosen = {"redis": own_redis.url, "redis_outage_grace": 0.5}
        with (
            Forked("editor", "edit", deployment, folder, **chosen) as editor,
            Forked("replica", "infer", deployment, folder, **chosen) as replica,
        ):
            editor.wait_ready(90)
            replica.wait_ready(90)
            for number in range(2):
                own_redis.child.send_signal(signal.SIGSTOP)
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 1)
                outcome = users.correct(flag(f"f{number}", PROMPT, ("river", "museum")[number]))[f"f{number}"]
                answer = users.ask(question(f"hung-{number}", PROMPT, min_seq=outcome.seq))[f"hung-{number}"]
                assert answer.error is UNSET, "the replica follows the log"
                own_redis.child.send_signal(signal.SIGCONT)
                wait_until(lambda: metric(replica.port, "gracestream_degraded") == 0)
                wait_until(lambda: editor.state()["degraded"] is False)
                wait_until(lambda: metric(replica.port, "gracestream_head_seq") == editor.state()["seq"])
            assert replica.running
            assert editor.running
