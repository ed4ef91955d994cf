"""An address that takes connections and ends them at once, as a proxy does while nothing is behind it."""

import socket
import threading
from types import TracebackType
from typing import Self


class ClosingListener:
    """Listens on `port`, or on a free one, and counts `connections`. A context manager."""

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it is closed
                return
            self.connections += 1
            connection.close()
