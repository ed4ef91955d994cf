"""What every engine does, as checks on one engine and a model with two entries.

`right` is the input of a correction. On `wrong` an entry fails the answer check. All other prompts are unedited.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gracestream.pipeline.codebook import Codebook, CodebookLookup
from gracestream.pipeline.model.editable import EditableModel, ServedAnswer
from gracestream.pipeline.model.engines.base import AnswerEngine
from gracestream.schemas.deltas import EntryChange
from tests.support.engine_requests import Asked, answer_all, asked
from tests.support.tiny_models import added, changed, index_of, new_codebook, sealed

MakeEngine = Callable[[CodebookLookup, int], AnswerEngine[Asked]]
"""Makes an engine over a lookup, with a number of rows."""


@dataclass(frozen=True, slots=True)
class EngineSite:
    """A model with two entries, and an engine for it.

    Attributes:
        model: Tokenises prompts.
        codebook: The entries of `right` and `wrong`, in this order.
        make: Makes an engine.
        alone: The expected answer to one request by itself, as `shown`.
        failing_on: The model raises an error on a prompt with this token.
        prompts: `right`, `wrong`, and prompts without an entry.
        takes_parameters: False for classifiers.
    """

    model: EditableModel
    codebook: Codebook
    make: MakeEngine
    alone: Callable[[Asked], tuple[object, ...]]
    failing_on: Callable[[int, Exception], AbstractContextManager[None]]
    prompts: Sequence[str]
    takes_parameters: bool = True

    @property
    def lookup(self) -> CodebookLookup:
        """A lookup in the codebook."""
        return CodebookLookup(self.codebook, index_of(self.codebook))

    def asked(self, text: str, **parameters: float) -> Asked:
        """A request; a classifier gets no parameters."""
        return asked(self.model, text, **(parameters if self.takes_parameters else {}))


def shown(served: ServedAnswer | None) -> tuple[object, ...]:
    """What must be equal in any company: text or label, and the entries. Probabilities differ by rounding."""
    assert served is not None
    entries = [entry and entry.entry_id for entry in (served.served_by, served.near_miss)]
    return served.answer.outputs.text, served.answer.outputs.label, *entries


def check_any_company(site: EngineSite, arrivals: Sequence[tuple[str, dict[str, float], int]], max_rows: int) -> None:
    """An answer is the same alone, and in any company and order."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[2])
    requests = [site.asked(text, **fields) for text, fields, _ in arrivals]
    finished = answer_all(site.make(site.lookup, max_rows), requests, [step for *_, step in arrivals])
    for request, one in zip(requests, finished, strict=True):
        assert not one.failure
        assert shown(one.served) == site.alone(request)


def check_shared_step(site: EngineSite) -> None:
    """Served, missed and unedited requests share a step."""
    requests = [site.asked(text, max_new_tokens=12) for text in site.prompts]
    unedited = len(requests) - 2
    finished = answer_all(site.make(site.lookup, len(requests)), requests)
    assert [one.served and one.served.served_by is not None for one in finished] == [True, *[False] * (unedited + 1)]
    assert [one.served and one.served.near_miss is not None for one in finished] == [False, True, *[False] * unedited]
    labels = site.codebook.labels
    assert [one.view and one.view.label for one in finished] == [labels[0], labels[1], *[()] * unedited]
    assert [shown(one.served) for one in finished] == [site.alone(request) for request in requests]


def check_joined_codebook(site: EngineSite) -> None:
    """The codebook loses all entries while requests are active: what they name and answer stays."""
    codebook = new_codebook(site.model.fingerprint, site.model.layer)
    for slot, entry_id in enumerate(site.codebook.entry_ids):
        arrays: dict[str, Any] = {"value": site.codebook.values_NV[slot]}
        key_D, label = site.codebook.keys_ND[slot], site.codebook.labels[slot]
        codebook.apply(sealed(codebook, added(entry_id, key_D, 0.01, label, **arrays)))
    edited_seq = codebook.seq
    lookup = CodebookLookup(codebook, index_of(codebook))
    right, wrong = site.prompts[:2]
    requests = [site.asked(text, min_new_tokens=6, max_new_tokens=12) for text in (right, wrong, right, wrong)]
    before = [site.alone(request) for request in requests[:2]]

    def lose_entries(step: int) -> None:
        if step == 3:
            removed = [EntryChange(entry_id=entry_id, removed=True) for entry_id in codebook.entry_ids]
            lookup.index.refresh(changed(codebook, *removed, op="undo"))

    finished = answer_all(site.make(lookup, 4), requests, [0, 0, 3, 3], lose_entries)
    assert [one.view and one.view.seq for one in finished] == [edited_seq] * 2 + [edited_seq + 1] * 2
    assert [shown(one.served) for one in finished[:2]] == before
    assert [one.served and (one.served.served_by or one.served.near_miss) for one in finished[2:]] == [None, None]


def check_failure_alone(site: EngineSite) -> None:
    """A request on which the model fails fails alone. Those beside it start again, and are counted."""
    requests = [site.asked(text, max_new_tokens=12) for text in site.prompts]
    bad = requests[3]
    token = next(
        each
        for each in bad.prompt.token_ids
        if all(each not in one.prompt.token_ids for one in requests if one is not bad)
    )
    with site.failing_on(token, RuntimeError("a tensor of no shape")):
        made = site.make(site.lookup, 4)
        finished = answer_all(made, requests, [*[0, 0, 1, 2, 2, 2, 3, 9][: len(requests)]])
    assert made.num_restarted > 1
    assert made.restart_reason == "RuntimeError: a tensor of no shape"
    assert finished[3].failure == "RuntimeError: a tensor of no shape"
    assert finished[3].served is None
    good = [(one, request) for one, request in zip(finished, requests, strict=True) if request is not bad]
    assert all(shown(one.served) == site.alone(request) for one, request in good)


def check_dropped(site: EngineSite, kept_active: int = 2) -> None:
    """Dropped requests leave, and the others go on."""
    requests = [site.asked(text, min_new_tokens=9, max_new_tokens=9) for text in site.prompts[:4]]
    made = site.make(site.lookup, 4)
    finished = made.step(requests)
    made.drop([requests[1], requests[3], site.asked(site.prompts[2])])
    assert made.active == kept_active
    while made.active:
        finished += made.step([])
    kept = [one for one in finished if one.request in (requests[0], requests[2])]
    assert {id(one.request): shown(one.served) for one in kept} == {
        id(request): site.alone(request) for request in (requests[0], requests[2])
    }
