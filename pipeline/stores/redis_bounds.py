"""Bounds on one answer of Redis: its bytes, the time until all of it is there, and the errors that it can cause.

Redis is untrusted input. redis-py reads an answer of any size, and its timeout is that of one read from the socket: a
server that sends a byte now and then would hold its caller for ever. A malformed answer makes redis-py raise errors of
its own code, such as IndexError or AttributeError; `ask_redis` turns them into a RedisError.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from redis import Redis
from redis._parsers import _RESP3Parser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, RedisError

T = TypeVar("T")

MAX_ANSWER_BYTES = 4 * 2**20
"""Of one answer; the largest that gracestream asks for has about a quarter."""


class BoundedParser(_RESP3Parser):
    """Reads answers of at most `MAX_ANSWER_BYTES`, each within the connection's socket timeout."""

    _buffer: Any

    def on_connect(self, connection: Any) -> None:
        """As its base's."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._bounded_socket = _BoundedSocket(self._sock, connection.socket_timeout)
        self._buffer._sock = self._bounded_socket  # noqa: SLF001  (there is no other way to give it one)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """As its base's."""
        self._bounded_socket.start_answer()
        return super().read_response(*args, **options)


def ask_redis(client: Redis, command: Callable[[], T]) -> T:
    """The answer to a question that uses this client.

    Raises:
        RedisError: as redis-py raised it, or DataError for any other exception.
    """
    try:
        return command()
    except RedisError:
        raise
    except Exception as error:
        # redis-py keeps a connection whose handshake failed so, and would use it without selecting the database
        client.connection_pool.disconnect()
        raise DataError(f"Redis could not be asked, or its answer cannot be read: {error!r}") from error


class _BoundedSocket:
    """What a SocketBuffer needs of a socket."""

    def __init__(self, sock: Any, timeout_seconds: float | None) -> None:
        self._sock, self._timeout_seconds = sock, timeout_seconds
        self.settimeout = sock.settimeout
        self.start_answer()

    def start_answer(self) -> None:
        """Another answer is awaited."""
        self._remaining_bytes = MAX_ANSWER_BYTES
        self._deadline = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds

    def recv(self, size: int) -> bytes:
        timeout = self._sock.gettimeout()
        if self._deadline is None or timeout == 0:  # 0: it asks whether there is something to read
            data: bytes = self._sock.recv(size)
        else:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            try:
                data = self._sock.recv(size)
            finally:
                self._sock.settimeout(timeout)
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise RedisConnectionError(f"an answer of Redis has more than {MAX_ANSWER_BYTES} bytes")
        return data
