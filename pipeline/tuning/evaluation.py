"""A codebook measured on a user's own cases: what should be answered, and what should not change."""

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gracestream.pipeline.codebook import Codebook, CodebookLookup, KeyIndex
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import EditableModel, Prompt, ServedAnswer
from gracestream.schemas.messages import Inputs, Parameters

ANSWER_BATCH_SIZE = 16


class EvaluationError(UserError):
    """The codebook cannot be measured with this model."""


class EvaluationCase(Struct, frozen=True):
    """A prompt with the `target` that its answer should be, or one whose answer the codebook must leave `unchanged`."""

    inputs: Inputs
    target: str | UnsetType = UNSET
    unchanged: bool = False
    parameters: Parameters = Parameters()

    def __post_init__(self) -> None:
        if (self.target is UNSET) is not self.unchanged:
            raise ValueError("a case needs either `target`, or `unchanged` as true")
        if self.target is not UNSET and not self.target.strip():
            raise ValueError("`target` is empty")


CaseVerdict = Literal["correct", "wrong", "unchanged", "changed"]


class CaseResult(Struct, frozen=True):
    """What became of one case.

    Attributes:
        inputs: The prompt.
        expected: The case's target; None where the answer must not change.
        verdict: `correct` where the answer begins with the target, as words; `unchanged` where it is the unedited one.
        exact: The answer is the target, and nothing follows it.
        broken: The edited model answers neither the target of the entry that serves it nor as it would unedited.
        answer: The edited model's answer: a text, or a classifier's label.
        unedited: The unedited model's answer.
        entry_id: The entry whose radius holds the prompt, if one does.
        entry_target: That entry's target.
        distance: From the prompt's query to that entry's key.
        radius: That entry's radius.
    """

    inputs: Inputs
    expected: str | None
    verdict: CaseVerdict
    exact: bool
    broken: bool
    answer: str
    unedited: str
    entry_id: str | None = None
    entry_target: str | None = None
    distance: float | None = None
    radius: float | None = None

    @property
    def passed(self) -> bool:
        """The answer is as the case asks."""
        return self.verdict in ("correct", "unchanged")


class EvaluationSummary(Struct, frozen=True):
    """Counts over cases.

    Attributes:
        cases: All of them.
        passed: Those that were answered as they ask.
        with_target: Those with a target.
        correct: Of these, answers that begin with it.
        exact: Of these, answers that are it.
        to_stay: Those whose answer must not change.
        unchanged: Of these, those whose answer does not.
        captured: Those that an entry serves.
        broken: Of these, edited answers that are neither the entry's target nor the unedited one.
    """

    cases: int
    passed: int
    with_target: int
    correct: int
    exact: int
    to_stay: int
    unchanged: int
    captured: int
    broken: int


def evaluate(
    model: EditableModel,
    codebook: Codebook,
    cases: Sequence[EvaluationCase],
    on_answer: Callable[[int], object] = lambda _: None,
    *,
    checked: bool = False,
) -> list[CaseResult]:
    """Answer each case with the edited model and, where an entry serves it, with the unedited one.

    `on_answer` is called with the number of cases that were answered. With `checked`, a case that an entry serves
    without giving its target has the unedited answer, and counts as broken all the same.

    Raises:
        EvaluationError: the codebook is of another model or layer.
        InputError: a case that the model cannot take.
    """
    if (codebook.model, codebook.layer) != (model.fingerprint, model.layer):
        raise EvaluationError(
            f"the codebook is of another model or layer: {codebook.model[:12]} at {codebook.layer}, and this is"
            f" {model.fingerprint[:12]} at {model.layer}; set GRACESTREAM_MODEL, _LAYER, _QUERY, _ENCODER and _REPLACE"
            " as the editor has them (GRACESTREAM_QUERY=last where the layer makes the queries)"
        )
    prompts = [model.task.tokenize(case.inputs) for case in cases]
    edited = _answer_cases(model, codebook, prompts, cases, on_answer, checked=checked)
    held = [place for place, served in enumerate(edited) if served.hit is not None]
    empty = Codebook(codebook.name, codebook.model, codebook.layer)
    again = _answer_cases(model, empty, [prompts[place] for place in held], [cases[place] for place in held])
    unedited = dict(zip(held, again, strict=True))
    return [
        _evaluate_case(model, codebook, case, served, unedited.get(place, served))
        for place, (case, served) in enumerate(zip(cases, edited, strict=True))
    ]


def summarize(results: Sequence[CaseResult]) -> EvaluationSummary:
    """What there is to count."""
    verdicts = [result.verdict for result in results]
    return EvaluationSummary(
        cases=len(results),
        passed=sum(result.passed for result in results),
        with_target=sum(result.expected is not None for result in results),
        correct=verdicts.count("correct"),
        exact=sum(result.exact for result in results),
        to_stay=sum(result.expected is None for result in results),
        unchanged=verdicts.count("unchanged"),
        captured=sum(result.entry_id is not None for result in results),
        broken=sum(result.broken for result in results),
    )


def begins_with_target(answer: str, target: str) -> bool:
    """Whether an answer begins with a target, as words."""
    rest = answer.removeprefix(target)
    return answer.startswith(target) and not rest[:1].isalnum()


def _answer_cases(
    model: EditableModel,
    codebook: Codebook,
    prompts: Sequence[Prompt],
    cases: Sequence[EvaluationCase],
    on_answer: Callable[[int], object] = lambda _: None,
    *,
    checked: bool = False,
) -> list[ServedAnswer]:
    """An answer to each prompt, in their order; those of similar length share a batch."""
    lookup = CodebookLookup(codebook, KeyIndex(codebook, model.device))
    groups: dict[object, list[int]] = {}
    for place, (prompt, case) in enumerate(zip(prompts, cases, strict=True)):
        groups.setdefault(model.task.batch_key(prompt, case.parameters), []).append(place)
    found: dict[int, ServedAnswer] = {}
    for members in groups.values():
        places = sorted(members, key=lambda place: len(prompts[place]))
        for start in range(0, len(places), ANSWER_BATCH_SIZE):
            batch = places[start : start + ANSWER_BATCH_SIZE]
            served = model.answer(
                [prompts[place] for place in batch],
                [cases[place].parameters for place in batch],
                lookup,
                check_answers=checked,
            )
            found |= zip(batch, served, strict=True)
            on_answer(len(found))
    return [found[place] for place in range(len(prompts))]


def _evaluate_case(
    model: EditableModel, codebook: Codebook, case: EvaluationCase, edited: ServedAnswer, unedited: ServedAnswer
) -> CaseResult:
    answer, before = _answer_text(edited), _answer_text(unedited)
    failed = edited.near_miss if edited.near_miss is not None and not edited.near_miss.disagreement else None
    hit = edited.hit or failed
    entry_target = None if hit is None else model.task.decode_label(codebook.labels[hit.slot])
    expected = None if case.target is UNSET else case.target.strip()
    verdict: CaseVerdict
    if expected is None:
        verdict = "unchanged" if answer == before else "changed"
    else:
        verdict = "correct" if begins_with_target(answer, expected) else "wrong"
    return CaseResult(
        inputs=case.inputs,
        expected=expected,
        verdict=verdict,
        exact=answer == expected,
        broken=failed is not None or (answer not in (before, entry_target) and hit is not None),
        answer=answer,
        unedited=before,
        entry_id=None if hit is None else hit.entry_id,
        entry_target=entry_target,
        distance=None if hit is None else hit.distance,
        radius=None if hit is None else hit.radius,
    )


def _answer_text(served: ServedAnswer) -> str:
    outputs = served.answer.outputs
    return outputs.text if outputs.text is not UNSET else str(outputs.label)
