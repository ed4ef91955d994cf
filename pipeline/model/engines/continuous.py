"""The continuous engine for causal language models: requests join and leave between any two tokens.

A short answer does not wait for a longer one, and requests with different parameters share a step. Shapes: R rows,
C vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from gracestream.pipeline.codebook import CodebookLookup
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.model.editable import EditableModel, Prefill, ServedAnswer
from gracestream.pipeline.model.engines.base import AnswerEngine, CodebookView, Finished, R, describe_failure
from gracestream.pipeline.model.engines.row_cache import RowCache
from gracestream.pipeline.model.engines.selection import select_batch
from gracestream.pipeline.model.tasks.causal import CausalGeneration

MAX_PREFILL_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens of prompts, with padding, that join in one step. The active requests wait for them, and a CPU gains nothing
from more."""


@dataclass(slots=True, eq=False)
class _Row(Generic[R]):
    """An active request.

    Attributes:
        request: As it joined.
        max_new_tokens: Limit on `generated`.
        processors: Change the logits as the request's parameters ask.
        view: What the codebook did when the request joined; None before that.
        is_unedited: True if the unedited model answers, because the entry's value did not give its target.
        generated: The answer's token ids so far.
    """

    request: R
    max_new_tokens: int
    processors: LogitsProcessorList
    view: CodebookView | None = None
    is_unedited: bool = False
    generated: list[int] = field(default_factory=list)


class ContinuousEngine(AnswerEngine[R]):
    """Decodes one token of every active request in a step.

    1. Joining requests go through the model together (the prefill). Only then is the codebook looked up.
    2. With `check_answers`, a request whose entry did not give its target starts again, without the codebook.
    3. If the model fails in a step, its requests start again one after the other. The one at fault fails. A request
       that finds no memory beside the active ones also starts again.

    Args:
        model: A causal language model.
        lookup: Finds the entries that serve requests.
        max_rows: Active requests, at most.
        check_answers: As for `EditableModel.answer`.
    """

    def __init__(self, model: EditableModel, lookup: CodebookLookup, *, max_rows: int, check_answers: bool) -> None:
        assert isinstance(model.task, CausalGeneration)
        self._model, self._task, self._lookup = model, model.task, lookup
        self._max_rows, self._check_answers = max_rows, check_answers
        self._max_prefill_tokens = MAX_PREFILL_TOKENS.get(model.device.type, MAX_PREFILL_TOKENS["cpu"])
        self._rows: list[_Row[R]] = []
        self._cache = RowCache()
        self._unedited: deque[_Row[R]] = deque()
        """Requests that the unedited model must answer; they join the next step."""
        self._suspects: deque[_Row[R]] = deque()
        """Requests of a failed step; each joins once no other request is active."""

    @property
    def active(self) -> int:
        """The number of requests that have joined and not finished."""
        return len(self._rows) + len(self._unedited) + len(self._suspects)

    def select(self, waiting: Sequence[R]) -> list[int]:
        """The first request, with neighbours in length, as many as there are free rows."""
        free = self._max_rows - self.active
        if free <= 0 or self._suspects:
            return []
        lengths = [len(request.prompt) for request in waiting]
        longest, count = 0, 0
        selected = select_batch([(None, length) for length in lengths], free)
        # The first request always joins; its neighbours as long as the prefill stays small.
        selected.sort(key=lambda index: (index != 0, abs(lengths[index] - lengths[0])))
        for index in selected:
            longest = max(longest, lengths[index])
            if count and (count + 1) * longest > self._max_prefill_tokens:
                break
            count += 1
        return selected[:count]

    @torch.inference_mode()
    def step(self, joining: Sequence[R]) -> list[Finished[R]]:
        """Run the prompts of joining requests, then decode one token of every active request."""
        finished: list[Finished[R]] = []
        if joining:
            finished += self._join([self._new_row(request) for request in joining])
        if self._unedited:
            rows, self._unedited = list(self._unedited), deque()
            finished += self._join(rows)
        if self._suspects and not self._rows:
            finished += self._join([self._suspects.popleft()])
        if self._rows:
            finished += self._decode()
        return finished

    @torch.inference_mode()
    def drop(self, requests: Sequence[R]) -> None:
        """Forget requests; their rows are free for others."""
        dropped = {id(request) for request in requests}
        for index in reversed(range(len(self._rows))):
            if id(self._rows[index].request) in dropped:
                self._remove(index)
        self._unedited = deque(row for row in self._unedited if id(row.request) not in dropped)
        self._suspects = deque(row for row in self._suspects if id(row.request) not in dropped)

    def _new_row(self, request: R) -> _Row[R]:
        parameters = request.parameters
        return _Row(
            request,
            self._task.max_generated_tokens(parameters),
            self._task.logits_processors(parameters, len(request.prompt)),
        )

    def _join(self, rows: Sequence[_Row[R]]) -> list[Finished[R]]:
        """Run the prompts of rows, all edited or all unedited, and choose their first tokens."""
        lookup = None if rows[0].is_unedited else self._lookup
        try:
            prefill = self._model.prefill([row.request.prompt for row in rows], lookup)
        except Exception as error:  # noqa: BLE001  (a request that breaks the model must not affect the others)
            raise_if_device_lost(error)
            failure = describe_failure(error)
            lacks_memory = isinstance(error, torch.OutOfMemoryError)
        else:
            if lookup is not None:
                for row, found in zip(rows, prefill.found_entries, strict=True):
                    row.view = CodebookView.of(lookup, found)
            return self._add_rows(rows, prefill)
        # Outside the `except` block: its error holds the frames of the failed pass, and so tensors in device memory.
        return self._fail(rows, failure, may_fit_alone=lacks_memory and bool(self._rows))

    def _add_rows(self, rows: Sequence[_Row[R]], prefill: Prefill) -> list[Finished[R]]:
        """Add rows to the active ones, with their first tokens."""
        self._rows += rows
        try:
            self._cache.append(prefill.cache, [len(row.request.prompt) for row in rows])
        except torch.OutOfMemoryError as error:
            failure = describe_failure(error)
        else:
            return self._append_tokens(prefill.logits_BC, range(len(self._rows) - len(rows), len(self._rows)))
        return self._fail_active(failure)

    def _decode(self) -> list[Finished[R]]:
        """One step of all active rows."""
        tokens_R = [row.generated[-1] for row in self._rows]
        try:
            self._cache.begin_step()
            logits_RC = self._task.decode(
                tokens_R, self._cache.mask_RT(), self._cache.positions_R1(), self._cache.cache
            )
        except Exception as error:  # noqa: BLE001  (likewise)
            raise_if_device_lost(error)
            failure = describe_failure(error)
        else:
            self._cache.end_step()
            return self._append_tokens(logits_RC, range(len(self._rows)))
        return self._fail_active(failure)

    def _fail_active(self, failure: str) -> list[Finished[R]]:
        """The active rows failed together, and the cache may be incomplete."""
        rows, self._rows, self._cache = self._rows, [], RowCache()
        return self._fail(rows, failure)

    def _fail(self, rows: Sequence[_Row[R]], failure: str, *, may_fit_alone: bool = False) -> list[Finished[R]]:
        """The result of one row that failed alone; rows that may not be at fault become suspects."""
        if len(rows) == 1 and not may_fit_alone:
            return [Finished(rows[0].request, None, None, failure)]
        for row in rows:
            row.generated.clear()
        self._suspects.extend(rows)
        self._count_restarts(len(rows), failure)
        return []

    def _append_tokens(self, logits_RC: Tensor, indexes: range) -> list[Finished[R]]:
        """Choose the next token of these rows, and take the rows out that are complete."""
        for number, index in enumerate(indexes):
            row = self._rows[index]
            if row.processors:
                ids_1T = torch.tensor([[*row.request.prompt.token_ids, *row.generated]], device=logits_RC.device)
                logits_RC[number] = row.processors(ids_1T, logits_RC[number : number + 1])[0]
        finished = []
        for index, token in zip(indexes, logits_RC.argmax(dim=-1).tolist(), strict=True):
            self._rows[index].generated.append(token)
        for index in reversed(indexes):
            row = self._rows[index]
            if len(row.generated) >= row.max_new_tokens or row.generated[-1] in self._task.eos_token_ids:
                self._remove(index)
                finished += self._finish(row)
        return finished[::-1]

    def _finish(self, row: _Row[R]) -> list[Finished[R]]:
        """The result of a row that is complete; none if the unedited model must answer it."""
        assert row.view is not None
        answer = self._task.to_answer(row.generated)
        view = row.view
        served = ServedAnswer.of(answer, view.found)
        if row.is_unedited:
            served = ServedAnswer(answer, None, near_miss=view.found)
        elif (
            self._check_answers
            and served.served_by is not None
            and not self._task.matches_target(answer, view.label, row.request.parameters)
        ):
            row.is_unedited = True
            row.generated = []
            self._unedited.append(row)
            return []
        return [Finished(row.request, served, view)]

    def _remove(self, index: int) -> None:
        """Take a row out; the last one takes its place, as in the cache."""
        self._cache.remove(index)
        self._rows[index] = self._rows[-1]
        self._rows.pop()
