"""The server that all processes of `pytest -n` share."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Client

import pytest

from gracestream.deploy.local.processes import StackError
from tests.support.repository import ROOT
from tests.support.shared_server import SharedServer, address_from


class Server:
    """Counts its starts and stops."""

    def __init__(self) -> None:
        self.starts = self.stops = 0

    @contextmanager
    def run(self) -> Iterator[str]:
        self.starts += 1
        yield f"address {self.starts}"
        self.stops += 1


def test_it_starts_once_for_all_that_ask_and_stops_at_the_end() -> None:
    server = Server()
    owner = SharedServer(server.run)
    with ThreadPoolExecutor(4) as askers:
        assert set(askers.map(address_from, [owner.socket] * 8)) == {"address 1"}
    assert (server.starts, server.stops) == (1, 0)
    owner.close()
    assert (server.starts, server.stops) == (1, 1)


def test_it_does_not_start_if_no_process_asks() -> None:
    server = Server()
    SharedServer(server.run).close()
    assert server.starts == 0


def test_another_process_gets_the_address() -> None:
    owner = SharedServer(Server().run)
    program = "import sys; from tests.support.shared_server import address_from; print(address_from(sys.argv[1]))"
    ran = subprocess.run(
        [sys.executable, "-c", program, owner.socket], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "address 1\n", ran.stderr
    owner.close()


def test_a_process_that_dies_while_it_asks_harms_no_other() -> None:
    owner = SharedServer(Server().run)
    Client(owner.socket, "AF_UNIX").close()
    assert address_from(owner.socket) == "address 1"
    owner.close()


def test_everyone_that_asks_gets_the_error_of_its_start() -> None:
    @contextmanager
    def run() -> Iterator[str]:
        raise StackError("there is no java on PATH")
        yield ""

    owner = SharedServer(run)
    for _ in range(2):
        with pytest.raises(StackError, match="there is no java on PATH"):
            address_from(owner.socket)
    owner.close()
