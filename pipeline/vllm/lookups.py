"""Lookups for requests that come at any time: those that wait together share one pass of the encoder."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from gracestream.pipeline.codebook import CodebookLookup, if_serving
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import CodebookView, EditableModel, Prompt
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica import LiveCodebook, TimedLookup
from gracestream.pipeline.vllm.values import value_bytes

MAX_LOOKUP_BATCH = 32
"""Prompts in one pass of the encoder, at most."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What the codebook did for a prompt.

    Attributes:
        view: The entry found, and the state of the codebook.
        value: The value of the entry that serves the prompt; None if none does.
    """

    view: CodebookView
    value: bytes | None

    @property
    def version(self) -> str:
        """The state of the codebook: term and delta."""
        return f"{self.view.term}.{self.view.seq}"


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    prompt: Prompt
    result: "asyncio.Future[LookupResult]"


class LookupQueue:
    """Looks prompts up in the codebook's thread, from the published state.

    Args:
        model: Makes the queries; its weights may be dropped.
        live: The codebook.
        health: Reports lookups that take too long.
    """

    def __init__(self, model: EditableModel, live: LiveCodebook, health: Health) -> None:
        self._model, self._live, self._health = model, live, health
        self._lookup = TimedLookup(live.codebook, live.replica.index)
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._is_scheduled = False

    async def find(self, prompt: Prompt, min_seq: int) -> LookupResult:
        """The lookup of a prompt. It waits for the delta `min_seq`, but not for ever.

        Raises:
            HistoryError: the history cannot be followed, now or since an earlier lookup.
        """
        if isinstance(self._live.fault, HistoryError):
            raise self._live.fault
        if min_seq > self._live.codebook.seq:
            await self._live.wait_for_delta(min_seq, asyncio.get_running_loop().time())
        pending = _Pending(prompt, asyncio.get_running_loop().create_future())
        with self._lock:
            self._pending.append(pending)
            self._schedule()
        return await pending.result

    def _schedule(self) -> None:
        """Queue the next batch, unless one is queued or nothing waits. The caller holds the lock."""
        if self._pending and not self._is_scheduled:
            self._is_scheduled = True
            self._live.thread.submit(self._run_batch)

    def _run_batch(self) -> None:
        """Look up the prompts that wait; runs in the codebook's thread."""
        with self._lock:
            batch, self._pending = self._pending[:MAX_LOOKUP_BATCH], self._pending[MAX_LOOKUP_BATCH:]
        for pending, result in zip(batch, self._results([pending.prompt for pending in batch]), strict=True):
            pending.result.get_loop().call_soon_threadsafe(_settle, pending.result, result)
        with self._lock:
            self._is_scheduled = False
            self._schedule()

    def _results(self, prompts: list[Prompt]) -> list[LookupResult | Exception]:
        """The lookup of each prompt, or why it failed. A prompt that breaks the encoder does not affect the others."""
        try:
            with self._health.busy("model"):
                self._live.move_to_head()
                return [*look_up(self._model, self._lookup, prompts)]
        except HistoryError as error:
            self._live.record_fault(error)
            return [error] * len(prompts)
        except Exception as error:  # noqa: BLE001  (`find` raises it to its caller)
            return [error] if len(prompts) == 1 else [one for prompt in prompts for one in self._results([prompt])]


def look_up(model: EditableModel, lookup: CodebookLookup, prompts: Sequence[Prompt]) -> list[LookupResult]:
    """What the codebook does for each prompt, as it is now."""
    found_entries = lookup.find_entries(model.queries(prompts), lambda row: model.task.wording(prompts[row]))
    return [
        LookupResult(
            CodebookView.of(lookup, found),
            None if (serving := if_serving(found)) is None else value_bytes(lookup, serving),
        )
        for found in found_entries
    ]


def _settle(future: "asyncio.Future[LookupResult]", result: LookupResult | Exception) -> None:
    if future.done():  # the request was cancelled
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
