"""One server for all processes of `pytest -n`.

1. The process that starts the others owns the server, so the server outlives each of them.
2. The server starts when a process first asks for its address. A run without such a test starts none.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from multiprocessing.connection import Client, Listener
from typing import cast

ASK, CLOSE = b"ask", b"close"
"""What a process sends: it asks for the address, or the owner ends."""


class SharedServer:
    """The owner of a server; it answers the other processes on a socket of this user.

    Args:
        run: A context in which the server runs; it yields the address for clients.
    """

    def __init__(self, run: Callable[[], AbstractContextManager[str]]) -> None:
        self._run = run
        self._running = ExitStack()
        self._answer = b""
        """`+` and the address, or `-` and why the server did not start; empty before anybody has asked."""
        self._listener = Listener(family="AF_UNIX")
        self._thread = threading.Thread(target=self._serve, name="shared server", daemon=True)
        self._thread.start()

    @property
    def socket(self) -> str:
        """The path of the socket, for `address_from`."""
        return cast("str", self._listener.address)

    def close(self) -> None:
        """Stop the server, if it runs."""
        with Client(self.socket, "AF_UNIX") as connection:
            connection.send_bytes(CLOSE)
        self._thread.join()
        self._listener.close()
        self._running.close()

    def _serve(self) -> None:
        """Send the address to each process that asks, one at a time, until `close`."""
        while True:
            with self._listener.accept() as connection, suppress(OSError, EOFError):  # of a process that was killed
                if connection.recv_bytes() == CLOSE:
                    return
                self._answer = self._answer or self._start()
                connection.send_bytes(self._answer)

    def _start(self) -> bytes:
        try:
            return b"+" + self._running.enter_context(self._run()).encode()
        except Exception as error:  # noqa: BLE001 - each process that asks raises it
            return b"-" + str(error).encode()


def address_from(socket: str) -> str:
    """The address of the server whose owner answers on `socket`.

    Raises:
        StackError: the server did not start.
    """
    with Client(socket, "AF_UNIX") as connection:
        connection.send_bytes(ASK)
        answer = connection.recv_bytes().decode()
    if answer.startswith("-"):
        from gracestream.deploy.local.processes import StackError  # noqa: PLC0415 - tests of the engine alone run without it

        raise StackError(answer[1:])
    return answer[1:]
