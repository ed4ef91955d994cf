"""The interface of engines: requests join, the engine takes a step, and finished requests leave with their answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gracestream.pipeline.codebook import CodebookLookup, FoundEntry, Label
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import ServedAnswer
from gracestream.schemas.messages import Parameters, to_one_line


class EngineRequest(Protocol):
    """A request as an engine sees it."""

    @property
    def prompt(self) -> Prompt:
        """The tokens."""

    @property
    def parameters(self) -> Parameters:
        """The options of generation."""

    @property
    def batch_key(self) -> object:
        """The result of `ModelTask.batch_key`."""


R = TypeVar("R", bound=EngineRequest)


@dataclass(frozen=True, slots=True)
class CodebookView:
    """What the codebook did at a request's lookup. Later changes of the codebook do not affect it.

    Attributes:
        found: The entry that serves the request or is its near miss; None if there is none.
        label: The label of that entry; empty if there is none.
        seq: The codebook's last delta at the lookup.
        term: The term of that delta.
    """

    found: FoundEntry | None
    label: Label
    seq: int
    term: int

    @classmethod
    def of(cls, lookup: CodebookLookup, found: FoundEntry | None) -> "CodebookView":
        """The view of an entry that was just found."""
        label: Label = () if found is None else lookup.label(found)
        return cls(found, label, lookup.codebook.seq, lookup.codebook.term)


@dataclass(frozen=True, slots=True)
class Finished(Generic[R]):
    """A request that left the engine.

    Attributes:
        request: The request as it joined.
        served: Its answer; None if the model failed on it.
        view: What the codebook did at its lookup; None if the model failed on it.
        failure: Why the model failed on it; empty if it did not.
    """

    request: R
    served: ServedAnswer | None
    view: CodebookView | None
    failure: str = ""


class AnswerEngine(ABC, Generic[R]):
    """Answers requests with a model and a codebook. One thread at a time uses an engine.

    1. A request's answer does not depend on the other requests, apart from rounding.
    2. One state of the codebook serves a request: that of the step which it joins. The codebook may change between two
       steps.
    3. A request on which the model fails leaves with the reason. It affects no other request.

    Attributes:
        num_restarted: Requests that started again, one after the other, because a step failed; all so far.
        restart_reason: Why the last of these steps failed.
    """

    num_restarted = 0
    restart_reason = ""

    @property
    @abstractmethod
    def active(self) -> int:
        """The number of requests that have joined and not finished."""

    @abstractmethod
    def select(self, waiting: Sequence[R]) -> list[int]:
        """The indexes of the waiting requests that should join the next step; the first one joins if any does.

        Args:
            waiting: The requests in order of arrival.
        """

    @abstractmethod
    def step(self, joining: Sequence[R]) -> list[Finished[R]]:
        """Take some requests in, do a part of the work, and return the requests that finished.

        Raises:
            DeviceLostError: the device failed, so no request can be answered.
        """

    @abstractmethod
    def drop(self, requests: Sequence[R]) -> None:
        """Forget requests whose answers nobody needs any more. Unknown ones are ignored."""

    def _count_restarts(self, requests: int, reason: str) -> None:
        self.num_restarted += requests
        self.restart_reason = reason


def describe_failure(error: BaseException) -> str:
    """The class and the text of an error, in one line."""
    return f"{type(error).__name__}: {to_one_line(error)}"
