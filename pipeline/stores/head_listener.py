"""Listens in Redis for publications, so that a replica reads the new head at once (docs/explanation/consistency.md).

1. A message is a hint to read the head. Its content is never used, so a forged or repeated message does no harm.
2. Hints come at most every `MIN_HINT_SECONDS`, however many messages arrive. A hint stands for up to
   `MAX_MESSAGES_PER_HINT` messages. Further messages wait in Redis, which ends the connection if they are too many.
3. Each new subscription gives a hint, since messages may have been lost before it.
4. A failed subscription is logged once, and tried again after a pause. A silent connection is tested every second.

Not promised: a hint for each publication. Redis delivers a message once at most, so a replica also polls.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gracestream.pipeline.settings import RedisSettings
from gracestream.pipeline.stores.redis_bounds import ask_redis
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

MIN_HINT_SECONDS = 0.005
"""Least seconds between two hints."""

MAX_MESSAGES_PER_HINT = 20
"""Limit on the messages that are read for one hint. It bounds the CPU time that a flood of messages takes."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 10.0
"""Seconds before the first new attempt to subscribe, and the maximum. The pause doubles with each failure.

It starts anew once a subscription has lasted for the maximum.
"""

CLOSE_TIMEOUT_SECONDS = 1.0
"""Seconds that `close` waits for the thread."""


class HeadListener:
    """A thread that subscribes to the channel of one codebook. Start it once, and close it at the end."""

    def __init__(self, settings: RedisSettings, channel: str, on_hint: Callable[[], object]) -> None:
        """`on_hint` is called in the thread, whenever the head may have changed."""
        self._client: Any = redis_client(settings)
        self._channel, self._on_hint = channel, on_hint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head-listener", daemon=True)
        self._subscribed_at: float | None = None
        """Monotonic time when the present subscription began; None without one."""
        self._is_lost = False
        """True from the failure that was logged to the next subscription."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. The connection is closed at once, so that no read goes on."""
        self._stop.set()
        self._client.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_SECONDS)

    def _run(self) -> None:
        pause = MIN_RETRY_SECONDS
        while not self._stop.is_set():
            try:
                ask_redis(self._client, self._listen)
            except RedisError as error:
                lasted = 0.0 if self._subscribed_at is None else time.monotonic() - self._subscribed_at
                self._subscribed_at = None
                if lasted >= MAX_RETRY_SECONDS:
                    pause = MIN_RETRY_SECONDS
                if not self._stop.is_set():
                    self._record_failure(error)
                self._stop.wait(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
        self._client.close()  # `close` may have come while this thread connected

    def _listen(self) -> None:
        """Subscribe, and give hints until the listener is closed.

        Raises:
            RedisError: the subscription is rejected, or Redis does not answer.
        """
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command("SUBSCRIBE", self._channel)
            is_pinged = True  # like a ping, the command has an answer that must come in time
            while not self._stop.is_set():
                try:
                    answer = connection.read_response(disconnect_on_error=False, push_request=True)
                except RedisTimeoutError:
                    if is_pinged:
                        raise
                    connection.send_command("PING")
                    is_pinged = True
                    continue
                is_pinged = False
                if isinstance(answer, list):  # a confirmation or a message; the answer to a ping is a string
                    for _ in range(MAX_MESSAGES_PER_HINT - 1):
                        if not connection.can_read():
                            break
                        connection.read_response(disconnect_on_error=False, push_request=True)
                    self._record_subscription()
                    self._on_hint()
                    self._stop.wait(MIN_HINT_SECONDS)
        finally:
            connection.disconnect()
            pool.release(connection)

    def _record_subscription(self) -> None:
        if self._subscribed_at is None:
            self._subscribed_at = time.monotonic()
        if self._is_lost:
            self._is_lost = False
            log.info("subscription_recovered", channel=self._channel)

    def _record_failure(self, error: RedisError) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        log.warning(
            "subscription_lost",
            reason=to_one_line(error),
            channel=self._channel,
            consequence="the replica learns of a new head from its next poll only; it subscribes again after a pause",
            remedy="if Redis rejects the command or the channel, allow them as in deploy/redis.acl",
        )
