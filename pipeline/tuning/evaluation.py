"""Measuring a codebook on a user's own cases: prompts with a target, and prompts whose answer must not change.

1. Prompts go through the lookup and the model that replicas run.
2. The unedited model answers the same prompts with the same parameters, so a changed answer comes from an entry.

Not promised: bitwise equality with a replica's answer, whose prompt shares its batch with other prompts.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gracestream.pipeline.codebook import Codebook, CodebookLookup, KeyIndex
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import EditableModel, Prompt, ServedAnswer
from gracestream.schemas.messages import Inputs, Parameters

ANSWER_BATCH_SIZE = 16
"""Prompts of one forward pass."""


class EvaluationError(UserError):
    """The codebook cannot be measured with this model."""


class EvaluationCase(Struct, frozen=True):
    """A prompt with the right answer (`target`), or a prompt whose answer the codebook must leave `unchanged`."""

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
"""`correct` and `wrong` judge cases with a target, `unchanged` and `changed` the others."""


class CaseResult(Struct, frozen=True):
    """The result of one case.

    Attributes:
        inputs: The prompt.
        expected: The case's target; None: the answer must not change.
        verdict: `correct`: the answer begins with the target, at a word boundary. `unchanged`: it is the unedited one.
        exact: The answer equals the target.
        broken: The edited answer is neither the entry's target nor the unedited answer.
        answer: The edited model's answer: a text, or a classifier's label.
        unedited: The unedited model's answer.
        entry_id: The entry that matched the prompt; None: no entry matched.
        entry_target: That entry's target.
        distance: Distance from the prompt's query to that entry's key.
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
        """Whether the case is `correct` or `unchanged`."""
        return self.verdict in ("correct", "unchanged")


class EvaluationSummary(Struct, frozen=True):
    """Counts over all cases.

    Attributes:
        cases: All cases.
        passed: Cases with the verdict `correct` or `unchanged`.
        with_target: Cases with a target.
        correct: Cases whose answer begins with the target.
        exact: Cases whose answer equals the target.
        to_stay: Cases whose answer must not change.
        unchanged: Cases whose answer must not change and did not.
        captured: Cases that matched an entry.
        broken: Captured cases whose edited answer is neither the entry's target nor the unedited answer.
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
    """Answer each case with the edited model, and each case that an entry serves with the unedited model, too.

    Args:
        model: The model of the codebook.
        codebook: The codebook to measure.
        cases: The cases.
        on_answer: Called with the number of cases answered so far.
        checked: Check answers as a replica does with GRACESTREAM_CHECK_ANSWERS: a case whose entry does not produce its
            target gets the unedited answer. It still counts as broken.

    Raises:
        EvaluationError: the codebook belongs to another model or layer.
        InputError: the model cannot take a case's prompt.
    """
    if (codebook.model, codebook.layer) != (model.fingerprint, model.layer):
        raise EvaluationError(
            f"the codebook is of another model or layer: {codebook.model[:12]} at {codebook.layer}, and this is"
            f" {model.fingerprint[:12]} at {model.layer}; set GRACESTREAM_MODEL,"
            " GRACESTREAM_LAYER, GRACESTREAM_QUERY_SOURCE, GRACESTREAM_ENCODER and GRACESTREAM_INJECT_TOKENS"
            " as the editor has them (GRACESTREAM_QUERY_SOURCE=last where the layer makes the queries)"
        )
    prompts = [model.task.tokenize(case.inputs) for case in cases]
    edited = _answer_cases(model, codebook, prompts, cases, on_answer, checked=checked)
    matched = [index for index, served in enumerate(edited) if served.served_by is not None]
    # Where no entry matched, the edited answer is the unedited one already.
    empty = Codebook(codebook.name, codebook.model, codebook.layer)
    unedited_answers = _answer_cases(
        model, empty, [prompts[index] for index in matched], [cases[index] for index in matched]
    )
    unedited = dict(zip(matched, unedited_answers, strict=True))
    return [
        _evaluate_case(model, codebook, case, served, unedited.get(index, served))
        for index, (case, served) in enumerate(zip(cases, edited, strict=True))
    ]


def summarize(results: Sequence[CaseResult]) -> EvaluationSummary:
    """The counts over these results."""
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
    """Whether an answer begins with a target and the target ends at a word boundary there."""
    remainder = answer.removeprefix(target)
    return answer.startswith(target) and not remainder[:1].isalnum()


def _answer_cases(
    model: EditableModel,
    codebook: Codebook,
    prompts: Sequence[Prompt],
    cases: Sequence[EvaluationCase],
    on_answer: Callable[[int], object] = lambda _: None,
    *,
    checked: bool = False,
) -> list[ServedAnswer]:
    """The answer to each prompt, in the order of the prompts; prompts of similar length share a batch."""
    lookup = CodebookLookup(codebook, KeyIndex(codebook, model.device))
    groups: dict[object, list[int]] = {}
    for index, (prompt, case) in enumerate(zip(prompts, cases, strict=True)):
        groups.setdefault(model.task.batch_key(prompt, case.parameters), []).append(index)
    answers: dict[int, ServedAnswer] = {}
    for members in groups.values():
        indices = sorted(members, key=lambda index: len(prompts[index]))
        for start in range(0, len(indices), ANSWER_BATCH_SIZE):
            batch = indices[start : start + ANSWER_BATCH_SIZE]
            served = model.answer(
                [prompts[index] for index in batch],
                [cases[index].parameters for index in batch],
                lookup,
                check_answers=checked,
            )
            answers |= zip(batch, served, strict=True)
            on_answer(len(answers))
    return [answers[index] for index in range(len(prompts))]


def _evaluate_case(
    model: EditableModel, codebook: Codebook, case: EvaluationCase, edited: ServedAnswer, unedited: ServedAnswer
) -> CaseResult:
    answer, unedited_text = _answer_text(edited), _answer_text(unedited)
    # A near miss without a disagreement in wording is a match whose answer check failed: the replica answered unedited.
    failed_match = edited.near_miss if edited.near_miss is not None and not edited.near_miss.reason_not_served else None
    found = edited.served_by or failed_match
    entry_target = None if found is None else model.task.decode_label(codebook.labels[found.slot])
    expected = None if case.target is UNSET else case.target.strip()
    verdict: CaseVerdict
    if expected is None:
        verdict = "unchanged" if answer == unedited_text else "changed"
    else:
        verdict = "correct" if begins_with_target(answer, expected) else "wrong"
    return CaseResult(
        inputs=case.inputs,
        expected=expected,
        verdict=verdict,
        exact=answer == expected,
        broken=failed_match is not None or (answer not in (unedited_text, entry_target) and found is not None),
        answer=answer,
        unedited=unedited_text,
        entry_id=None if found is None else found.entry_id,
        entry_target=entry_target,
        distance=None if found is None else found.distance,
        radius=None if found is None else found.radius,
    )


def _answer_text(served: ServedAnswer) -> str:
    outputs = served.answer.outputs
    return outputs.text if outputs.text is not UNSET else str(outputs.label)
