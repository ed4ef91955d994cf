"""Material for trial edits: corrections of a user's requests, texts they should reach, and texts they should not.

1. The division into trials, traffic and held-out requests does not depend on the order of the requests.
2. A request is either a trial, or unflagged traffic for the editor, or held out.
3. Unusable input is left out.

Not promised: true targets. A request without a target gets an answer that the unedited model does not give.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from gracestream.pipeline.editing import (
    SHORT_TARGET_TOKENS,
    TEMPLATES_PER_RADIUS,
    CalibrationError,
    LabelledRequest,
    make_correction,
    make_forms,
    other_requests,
)
from gracestream.pipeline.model import CausalGeneration, Classification, InputError, ModelTask
from gracestream.schemas.messages import Feedback, Inputs, is_chat, to_display_text

MAX_HELD_OUT = 200
"""Largest number of held-out requests. If none of 200 is captured, the 95 % interval of the share ends below 0.02."""

MAX_TRAFFIC = 512
"""Largest number of requests that the editor reads as unflagged traffic."""

REQUESTS_PER_SUBJECT = 8
"""Other requests about a trial's subject that no entry should capture."""

END_PUNCTUATION = ".?!…"
"""Characters that surface forms leave out at the end of a prompt."""

INVENTED_NAMES = (
    "Velmora", "Tarnix", "Orbelin", "Sudrek", "Calvano", "Mirth", "Pelloway", "Ganteric", "Brusk", "Ildema",
    "Fornaxia", "Wexley", "Quandor", "Hespin", "Luvanne", "Doriath",
)  # fmt: skip
"""Invented names, which no model answers to any request."""


@dataclass(frozen=True, slots=True)
class TrialEdit:
    """One trial edit.

    Attributes:
        name: Feedback id of the correction.
        inputs: The request to correct.
        target: The answer to teach.
        rephrases: The user's rephrases of the request.
        forms: Surface forms of the request, made by rules.
        same_subject: Other requests about the same subject, made from templates.
    """

    name: str
    inputs: Inputs
    target: str
    rephrases: tuple[Inputs, ...] = ()
    forms: tuple[Inputs, ...] = ()
    same_subject: tuple[Inputs, ...] = ()

    def to_feedback(self) -> Feedback:
        """The correction as feedback."""
        return make_correction(self.name, self.inputs, self.target)


@dataclass(frozen=True, slots=True)
class Division:
    """The user's requests, divided by their use."""

    trial_requests: list[Inputs]
    held_out: list[Inputs]
    traffic: list[Inputs]


@dataclass(slots=True)
class UserRequests:
    """The user's requests without duplicates, with the rephrases and the target of each."""

    rephrases: dict[Inputs, tuple[Inputs, ...]] = field(default_factory=dict)
    targets: dict[Inputs, str] = field(default_factory=dict)

    @classmethod
    def from_labelled(cls, requests: Sequence[LabelledRequest]) -> "UserRequests":
        """Merge the lines of the user's file: several lines may give rephrases of one request; the last target wins."""
        merged = cls()
        for request in requests:
            known = merged.rephrases.setdefault(request.inputs, ())
            if request.rephrase is not UNSET and request.rephrase not in (request.inputs, *known):
                merged.rephrases[request.inputs] = (*known, request.rephrase)
            if request.target is not UNSET:
                merged.targets[request.inputs] = request.target.strip()
        return merged

    def divide(self, trial_count: int) -> Division:
        """Divide the requests into trials, held-out requests and traffic.

        Requests with rephrases become trials first, then requests with a target, then the others. At most half of the
        requests become trials, so that some requests are held out.

        Raises:
            CalibrationError: there are fewer than two different requests.
        """
        if len(self.rephrases) < 2:
            raise CalibrationError(
                f"trial edits need two different requests at least, and there are {len(self.rephrases)}; add lines"
            )
        ranked = sorted(
            self.rephrases,
            key=lambda inputs: (not self.rephrases[inputs], inputs not in self.targets, _shuffle_key(inputs)),
        )
        count = min(trial_count, len(ranked) // 2)
        reworded = {rephrase for inputs in ranked[:count] for rephrase in self.rephrases[inputs]}
        # A request that rephrases a trial should get the trial's target, so it cannot be held out.
        remaining = sorted((inputs for inputs in ranked[count:] if inputs not in reworded), key=_shuffle_key)
        return Division(ranked[:count], remaining[::2][:MAX_HELD_OUT], remaining[1::2][:MAX_TRAFFIC])


def _shuffle_key(inputs: Inputs) -> bytes:
    """A hash as a sort key: it orders requests as if at random, but in the same way on every run."""
    return hashlib.blake2b(to_display_text(inputs).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def surface_forms(task: ModelTask, inputs: Inputs) -> list[Inputs]:
    """The same request typed differently: other spaces, case or final punctuation; for generators also questions."""
    forms: list[Inputs] = [form for form in make_forms(inputs) if is_chat(form) == is_chat(inputs)]
    if not isinstance(task, CausalGeneration):
        # Question frames are for generators: other models get only forms that differ in case and outer spaces.
        forms = [form for form in forms if _casefolded(form) == _casefolded(inputs)]
    if isinstance(inputs, str):
        forms.append(inputs.rstrip().rstrip(END_PUNCTUATION))
    return forms


def _casefolded(inputs: Inputs) -> str:
    return to_display_text(inputs).strip().casefold()


def same_subject_requests(task: ModelTask, inputs: Inputs) -> list[Inputs]:
    """Other requests about the subject of a text; empty for a classifier and for a chat.

    The first `TEMPLATES_PER_RADIUS` templates are skipped: the editor derives the correction's radius from them.
    """
    if isinstance(task, Classification) or not isinstance(inputs, str):
        return []
    return list(other_requests(inputs, TEMPLATES_PER_RADIUS + REQUESTS_PER_SUBJECT)[TEMPLATES_PER_RADIUS:])


class TargetMaker:
    """Makes targets for trial edits that differ from the unedited model's answers."""

    def __init__(self, task: ModelTask, answers: Sequence[str], requests: Sequence[Inputs]) -> None:
        """Targets come from the unedited `answers` to other requests, from invented names and from words of requests.

        Args:
            task: The model's task.
            answers: The unedited model's answers to other requests.
            requests: Requests whose words serve as targets of last resort.
        """
        self._task, self._answers = task, list(dict.fromkeys(answers))
        self._words = list(dict.fromkeys(word for inputs in requests for word in to_display_text(inputs).split()))
        self._used: set[str] = set()

    def make_target(self, number: int, inputs: Inputs, unedited: str) -> str:
        """A target for the trial with this number; targets that no earlier trial uses come first.

        Raises:
            InputError: the model can be taught none of the candidates.
        """
        candidates = list(dict.fromkeys(self._candidate_targets(number)))
        for target in sorted(candidates, key=self._used.__contains__):
            if target and target.casefold() != unedited.casefold() and self._is_teachable(inputs, target):
                self._used.add(target)
                return target
        raise InputError("no target could be made for it; give a `target`")

    def _candidate_targets(self, number: int) -> Iterator[str]:
        if isinstance(self._task, Classification):
            yield from _rotated(number, [str(name) for name in self._task.model.config.id2label.values()])
            return
        yield from _rotated(number, self._answers)
        name = INVENTED_NAMES[number % len(INVENTED_NAMES)]
        yield (
            name
            if number < len(INVENTED_NAMES)
            else f"{name} {INVENTED_NAMES[number // len(INVENTED_NAMES) % len(INVENTED_NAMES)]}"
        )
        yield from _rotated(number, self._words)

    def _is_teachable(self, inputs: Inputs, target: str) -> bool:
        """Whether the target has at most `SHORT_TARGET_TOKENS` tokens, fits on one line, and can be encoded."""
        try:
            return "\n" not in target and len(self._task.encode_target(inputs, target)) <= SHORT_TARGET_TOKENS
        except InputError:
            return False


def _rotated(number: int, targets: Sequence[str]) -> Iterator[str]:
    """All targets, rotated so that the one with this number (modulo their count) comes first."""
    start = number % len(targets) if targets else 0
    yield from targets[start:]
    yield from targets[:start]


def usable_inputs(task: ModelTask, inputs: Sequence[Inputs], is_usable: Callable[[Inputs], bool]) -> tuple[Inputs, ...]:
    """The usable inputs after the first, without duplicates by tokens and without token-equals of the first.

    Args:
        task: The model's task.
        inputs: The reference input, then the inputs to filter.
        is_usable: Whether the model can answer an input.
    """
    by_tokens: dict[object, Inputs] = {}
    for candidate in inputs:
        if is_usable(candidate):
            by_tokens.setdefault(task.tokenize(candidate), candidate)
    first = inputs[0]
    return tuple(candidate for candidate in by_tokens.values() if candidate is not first)
