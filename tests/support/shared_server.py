"""One server for all processes of `pytest -n`.

1. The process that starts the others owns the server, so the server outlives each of them.
2. The server starts when a process first asks for its address. A run without such a test starts none.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from multiprocessing.connection import Client, Listener
from typing import cast


class SharedServer:
    """The owner of a server; it answers the other processes on a socket of this user.

    Args:
        run: A context in which the server runs; it yields the address for clients.
    """

    def __init__(self, run: Callable[[], AbstractContextManager[str]]) -> None:
        self._run = run
        self._running = ExitStack()
        self._address: str | Exception | None = None
        self._listener = Listener(family="AF_UNIX")
        self._thread = threading.Thread(target=self._answer, name="shared server", daemon=True)
        self._thread.start()

    @property
    def socket(self) -> str:
        """The path of the socket, for `address_from`."""
        return cast("str", self._listener.address)

    def close(self) -> None:
        """Stop the server, if it runs."""
        with Client(self.socket, "AF_UNIX") as connection:
            connection.send(False)
        self._thread.join()
        self._listener.close()
        self._running.close()

    def _answer(self) -> None:
        """Send the address to each process that asks, one at a time, until `close`."""
        while True:
            with self._listener.accept() as connection, suppress(OSError, EOFError):  # of a process that was killed
                if not connection.recv():
                    return
                if self._address is None:
                    self._address = self._start()
                connection.send(self._address)

    def _start(self) -> str | Exception:
        try:
            return self._running.enter_context(self._run())
        except Exception as error:  # noqa: BLE001 - each process that asks raises it
            return error


def address_from(socket: str) -> str:
    """The address of the server whose owner answers on `socket`.

    Raises:
        Exception: the error with which the server did not start.
    """
    with Client(socket, "AF_UNIX") as connection:
        connection.send(True)
        answer = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return cast("str", answer)
