"""Limits the size, the time and the errors of an answer from Redis, which is untrusted input.

1. An answer has at most `MAX_ANSWER_BYTES`. redis-py reads answers of any size.
2. An answer is complete within the socket timeout. In redis-py the timeout applies to each read from the socket, so a
   server that sends single bytes could block its caller for ever.
3. Through `ask_redis`, a malformed answer raises a RedisError. redis-py raises errors such as IndexError or
   AttributeError.
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
"""Limit on the bytes of one answer: about four times the largest answer that gracestream requests."""


class BoundedParser(_RESP3Parser):
    """redis-py's parser in Python, with a limit on the bytes and on the time of each answer."""

    _buffer: Any

    def on_connect(self, connection: Any) -> None:
        """Put the limits between the parser and the socket of a new connection."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._bounded_socket = _BoundedSocket(self._sock, connection.socket_timeout)
        self._buffer._sock = self._bounded_socket  # noqa: SLF001  (it has no public name)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one answer, within the limits."""
        self._bounded_socket.start_answer()
        return super().read_response(*args, **options)


def ask_redis(client: Redis, command: Callable[[], T]) -> T:
    """Call `command`, which uses this client, and return its answer.

    Raises:
        RedisError: from redis-py; DataError in place of any other exception.
    """
    try:
        return command()
    except RedisError:
        raise
    except Exception as error:
        # redis-py keeps a connection after such an error in its handshake. It would then use it without having selected
        # the database, so every connection of the pool is closed.
        client.connection_pool.disconnect()
        raise DataError(f"Redis could not be asked, or its answer cannot be read: {error!r}") from error


class _BoundedSocket:
    """The part of a socket that redis-py's SocketBuffer uses, with the limits of one answer."""

    def __init__(self, sock: Any, timeout_seconds: float | None) -> None:
        self._sock, self._timeout_seconds = sock, timeout_seconds
        self.settimeout = sock.settimeout
        self.start_answer()

    def start_answer(self) -> None:
        """Start the limits of the next answer."""
        self._remaining_bytes = MAX_ANSWER_BYTES
        self._deadline = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds

    def recv(self, size: int) -> bytes:
        """Receive up to `size` bytes.

        Raises:
            TimeoutError: the time of the answer is over.
            ConnectionError: the answer has too many bytes.
        """
        timeout = self._sock.gettimeout()
        if self._deadline is None or timeout == 0:  # 0: a non-blocking check for data
            data: bytes = self._sock.recv(size)
        else:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._sock.settimeout(remaining)
            try:
                data = self._sock.recv(size)
            finally:
                self._sock.settimeout(timeout)
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise RedisConnectionError(f"an answer of Redis has more than {MAX_ANSWER_BYTES} bytes")
        return data
