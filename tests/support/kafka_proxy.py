"""A TCP proxy between a transactional producer and Kafka: it holds, cuts, copies and delays chosen requests.

The proxy reads Kafka's frames (size, API key, version, correlation id) and leaves their contents alone. A `Fault` names
a request, what happens to it, and when a held or copied request reaches the broker. Each fault happens once.

Modelled: a connection that breaks while its last request is still under way; such a request arrives late, after the
client has sent it again over another connection. Not modelled: changed bytes, and reordering within a connection.
"""

import asyncio
import contextlib
import random
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.deploy.local.processes import HOST, find_free_port

T = TypeVar("T")

ANSWER_SECONDS = 3.0
"""Seconds that a late request may wait for the broker's response."""


class Api(IntEnum):
    """The requests of a transactional producer."""

    PRODUCE = 0
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS = 24
    ADD_OFFSETS = 25
    END_TXN = 26
    OFFSET_COMMIT = 28


Action = Literal["hold", "copy", "cut before", "cut after", "delay request", "delay response"]
"""The fault of a request.

hold: the connection breaks; the request reaches the broker later. copy: the request arrives now and once more later.
cut before, cut after: the connection breaks before the broker gets the request, or before the client gets the response.
delay request, delay response: either one arrives late, in order.
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a held or copied request reaches the broker: `before` or `after` the nth later request of this kind."""

    when: Literal["before", "after"]
    api: Api
    nth: int = 1


@dataclass(slots=True)
class Fault:
    """The fault of one request; `skip` requests of its kind pass first. Seconds apply to delays."""

    api: Api
    action: Action
    release: Moment | float = 0.0
    """For `hold` and `copy`: a moment, or seconds after the fault."""
    skip: int = 0
    seconds: float = 0.3
    happened: bool = False
    released: bool = False
    error: int | None = None
    """The broker's error code for a late EndTxn; None if there was no response."""
    _resent: bool = False
    _seen: int = 0
    _request: bytes = b""
    _broker: "tuple[asyncio.StreamReader, asyncio.StreamWriter] | None" = field(default=None, repr=False)

    def __str__(self) -> str:
        late = f", released {self.release}" if self.action in ("hold", "copy") else ""
        return (
            f"{self.action} {self.api.name} (skip {self.skip}{late}): {self.happened=} {self.released=} {self.error=}"
        )


class KafkaProxy:
    """Listens on `port`; clients must find this port in the broker's advertised listeners. A context manager."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"{HOST}:{port}"
        self.target: tuple[str, int] | None = None
        """The address of the broker."""
        self.requests = dict.fromkeys(Api, 0)
        """The number of requests received, by kind."""
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, HOST, self.port))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def arm(self, *faults: Fault) -> None:
        """Set the faults to come; earlier faults that have not happened are dropped."""
        self._run(self._arm(list(faults)))

    def release(self) -> list[Fault]:
        """Send all held requests; returns all faults since `arm`."""
        self._run(self._release_all())
        return self._faults

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _arm(self, faults: list[Fault]) -> None:
        self._faults = faults

    async def _release_all(self) -> None:
        for fault in self._faults:
            await self._deliver(fault)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert self.target is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            broker = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        await _Connection(self, (reader, writer), broker).run()

    # Faults.

    def strike(self, api: Api, request: bytes) -> Fault | None:
        """The fault of this request, if any."""
        self.requests[api] += 1
        for fault in self._faults:
            if fault.api == api and not fault.happened:
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.happened = True
                if fault.action in ("hold", "copy"):
                    fault._request = request
                    fault._resent = fault.action == "copy"
                    if isinstance(fault.release, float):
                        self._spawn(self._deliver_in(fault, fault.release))
                return fault
        return None

    async def reach(self, when: Literal["before", "after"], api: Api, current: Fault | None) -> None:
        """Deliver the late requests that are due before this request, or after its response.

        A held request is due only after its second copy was answered; until then it is not late.
        """
        for fault in self._faults:
            if fault is current or not fault._request or fault.released:
                continue
            if when == "after" and api == fault.api and not fault._resent:
                fault._resent = True
                continue
            if (
                fault._resent
                and isinstance(fault.release, Moment)
                and (when, api)
                == (
                    fault.release.when,
                    fault.release.api,
                )
            ):
                fault._seen += 1
                if fault._seen == fault.release.nth:
                    await self._deliver(fault)

    async def _deliver_in(self, fault: Fault, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._deliver(fault)

    async def _deliver(self, fault: Fault) -> None:
        """Send a held request over its own connection, or a copy over a new one."""
        if not fault._request or fault.released:
            return
        fault.released = True
        assert self.target is not None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            reader, writer = fault._broker or await asyncio.open_connection(*self.target)
            writer.write(fault._request)
            async with asyncio.timeout(ANSWER_SECONDS):
                while (response := await _frame(reader))[4:8] != fault._request[8:12]:
                    pass
            if fault.api == Api.END_TXN:
                # After size and correlation id: no tags (from version 3 on), the throttle time, the error.
                at = 8 + (struct.unpack(">h", fault._request[6:8])[0] >= 3) + 4
                fault.error = struct.unpack(">h", response[at : at + 2])[0]
            writer.close()


class _Connection:
    """One connection of a client, and the one to the broker behind it."""

    def __init__(self, proxy: KafkaProxy, client: Any, broker: Any) -> None:
        self._proxy = proxy
        self._from_client, self._to_client = client
        self._from_broker, self._to_broker = broker
        self._waiting: dict[bytes, tuple[Api, Fault | None]] = {}
        self._held = False
        """True if the broker's side stays open for a held request."""

    async def run(self) -> None:
        ways = [asyncio.ensure_future(way) for way in (self._carry_requests(), self._carry_responses())]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        self._to_client.close()
        if not self._held:
            self._to_broker.close()

    async def _carry_requests(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await _frame(self._from_client)
                key = struct.unpack(">h", request[4:6])[0]
                if key in set(Api) and not await self._pass(Api(key), request):
                    return
                if key not in set(Api):
                    self._to_broker.write(request)

    async def _pass(self, api: Api, request: bytes) -> bool:
        """Forward one request, or carry out its fault; False if the connection breaks."""
        fault = self._proxy.strike(api, request)
        await self._proxy.reach("before", api, fault)
        match fault and fault.action:
            case "hold":
                assert fault is not None
                fault._broker, self._held = (self._from_broker, self._to_broker), True
                return False
            case "cut before":
                return False
            case "delay request":
                assert fault is not None
                await asyncio.sleep(fault.seconds)
        self._waiting[request[8:12]] = api, fault
        self._to_broker.write(request)
        return True

    async def _carry_responses(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                response = await _frame(self._from_broker)
                api, fault = self._waiting.pop(response[4:8], (None, None))
                if fault is not None and fault.action == "cut after":
                    return
                if fault is not None and fault.action == "delay response":
                    await asyncio.sleep(fault.seconds)
                if api is not None:
                    await self._proxy.reach("after", api, fault)
                self._to_client.write(response)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(4)
    return size + await reader.readexactly(struct.unpack(">i", size)[0])


@contextlib.contextmanager
def proxied_kafka(folder: Path) -> Iterator[tuple[KafkaProxy, LocalKafka]]:
    """A Kafka with two listeners: its own address leads straight to it, the proxy's port through the proxy."""
    own, through = find_free_port(), find_free_port()
    shown = {"advertised.listeners": f"CLIENT://{HOST}:{own},PLAINTEXT://{HOST}:{through}"}
    with (
        KafkaProxy(through) as proxy,
        LocalKafka(folder, own, protocols=("PLAINTEXT",), properties=shown) as server,
    ):
        host, port = server.addresses["PLAINTEXT"].split(":")
        proxy.target = host, int(port)
        yield proxy, server


LATER = [Api.ADD_PARTITIONS, Api.PRODUCE, Api.PRODUCE, Api.ADD_OFFSETS, Api.OFFSET_COMMIT, Api.END_TXN]
"""The requests of the next transaction at which a late request may arrive."""


def torn(random: random.Random) -> list[Fault]:
    """The fault that loses corrections: an EndTxn arrives within the next transaction."""
    moment = Moment(random.choice(("before", "after")), random.choice(LATER), random.choice((1, 1, 2)))
    return [Fault(Api.END_TXN, "hold", moment, skip=random.randrange(2))]


def copied(random: random.Random) -> list[Fault]:
    """A second copy of any request, of which the client does not know."""
    moment = Moment("before", random.choice(LATER), random.choice((1, 1, 2)))
    return [Fault(random.choice(list(Api)), "copy", moment, skip=random.randrange(2))]


def mixed(random: random.Random) -> list[Fault]:
    """One to three faults of any kind."""
    faults = []
    for _ in range(random.choice((1, 1, 2, 3))):
        moment: Moment | float = random.uniform(0, 2)
        if random.random() < 0.8:
            moment = Moment(random.choice(("before", "after")), random.choice(LATER), random.choice((1, 1, 2, 3)))
        api = random.choice([*Api, Api.END_TXN, Api.END_TXN])
        action: Action = random.choice(
            ("hold", "hold", "hold", "cut before", "cut after", "delay request", "delay response")
        )
        faults.append(Fault(api, action, moment, skip=random.randrange(3), seconds=random.uniform(0.05, 1.5)))
    return faults


PLANS: dict[str, Callable[[random.Random], list[Fault]]] = {"torn": torn, "copied": copied, "mixed": mixed}
