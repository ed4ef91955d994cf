"""What trial edits are made of: corrections of a user's requests, texts they should reach, and texts they should not.

1. The same requests make the same trials, whatever their order.
2. A request is a trial, or part of the traffic that the editor sees, or held out; never two of these.
3. Input that cannot be used is left out, and a note says why.

Not promised: that targets are true. Where a request has no target, it gets one that the model does not give.
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
"""Held-out requests at most: with none of them captured, a share above .02 is ruled out."""

MAX_TRAFFIC = 512

REQUESTS_PER_SUBJECT = 8
"""Other requests about a trial's subject."""

END_PUNCTUATION = ".?!…"

INVENTED_NAMES = (
    "Velmora", "Tarnix", "Orbelin", "Sudrek", "Calvano", "Mirth", "Pelloway", "Ganteric", "Brusk", "Ildema",
    "Fornaxia", "Wexley", "Quandor", "Hespin", "Luvanne", "Doriath",
)  # fmt: skip
"""Names that no model gives to any request."""


@dataclass(frozen=True, slots=True)
class TrialEdit:
    """One trial edit.

    Attributes:
        name: Its feedback id.
        inputs: The request to correct.
        target: The answer that it should get.
        rephrases: The user's other words for it.
        forms: Its surface forms, made by rules.
        same_subject: Other requests about its subject, made from templates.
    """

    name: str
    inputs: Inputs
    target: str
    rephrases: tuple[Inputs, ...] = ()
    forms: tuple[Inputs, ...] = ()
    same_subject: tuple[Inputs, ...] = ()

    def to_feedback(self) -> Feedback:
        """The feedback that makes it."""
        return make_correction(self.name, self.inputs, self.target)


@dataclass(frozen=True, slots=True)
class Division:
    """The user's requests by what they are used for."""

    trial_requests: list[Inputs]
    held_out: list[Inputs]
    traffic: list[Inputs]


@dataclass(slots=True)
class UserRequests:
    """The user's requests, each once, with all that the lines say of it."""

    rephrases: dict[Inputs, tuple[Inputs, ...]] = field(default_factory=dict)
    targets: dict[Inputs, str] = field(default_factory=dict)

    @classmethod
    def from_labelled(cls, requests: Sequence[LabelledRequest]) -> "UserRequests":
        """Of the lines in their order: several lines may give other words for one request."""
        made = cls()
        for sample in requests:
            known = made.rephrases.setdefault(sample.inputs, ())
            if sample.rephrase is not UNSET and sample.rephrase not in (sample.inputs, *known):
                made.rephrases[sample.inputs] = (*known, sample.rephrase)
            if sample.target is not UNSET:
                made.targets[sample.inputs] = sample.target.strip()
        return made

    def divide(self, trial_count: int) -> Division:
        """Those with rephrases or a target become trials first; half of the requests at most.

        Raises:
            CalibrationError: fewer than two different requests.
        """
        if len(self.rephrases) < 2:
            raise CalibrationError(
                f"trial edits need two different requests at least, and there are {len(self.rephrases)}; add lines"
            )
        ranked = sorted(
            self.rephrases, key=lambda one: (not self.rephrases[one], one not in self.targets, _shuffle_key(one))
        )
        count = min(trial_count, len(ranked) // 2)
        reworded = {other for one in ranked[:count] for other in self.rephrases[one]}
        rest = sorted((one for one in ranked[count:] if one not in reworded), key=_shuffle_key)
        return Division(ranked[:count], rest[::2][:MAX_HELD_OUT], rest[1::2][:MAX_TRAFFIC])


def _shuffle_key(inputs: Inputs) -> bytes:
    """A number that looks drawn at random, and is the same for the same inputs."""
    return hashlib.blake2b(to_display_text(inputs).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def surface_forms(task: ModelTask, inputs: Inputs) -> list[Inputs]:
    """The same request typed in another way: spaces, capitals, the last mark, and for generators a question frame."""
    forms: list[Inputs] = [form for form in make_forms(inputs) if is_chat(form) == is_chat(inputs)]
    if not isinstance(task, CausalGeneration):
        forms = [form for form in forms if _casefolded(form) == _casefolded(inputs)]
    if isinstance(inputs, str):
        forms.append(inputs.rstrip().rstrip(END_PUNCTUATION))
    return forms


def _casefolded(inputs: Inputs) -> str:
    return to_display_text(inputs).strip().casefold()


def same_subject_requests(task: ModelTask, inputs: Inputs) -> list[Inputs]:
    """Other requests about the subject of a text, beyond those that an editor makes its radius of; none for classes."""
    if isinstance(task, Classification) or not isinstance(inputs, str):
        return []
    return list(other_requests(inputs, TEMPLATES_PER_RADIUS + REQUESTS_PER_SUBJECT)[TEMPLATES_PER_RADIUS:])


class TargetMaker:
    """Targets of trial edits, which the unedited model does not give."""

    def __init__(self, task: ModelTask, answers: Sequence[str], requests: Sequence[Inputs]) -> None:
        """Draw on the unedited `answers` to other requests, on made-up names, and on the words of `requests`."""
        self._task, self._answers = task, list(dict.fromkeys(answers))
        self._words = list(dict.fromkeys(word for one in requests for word in to_display_text(one).split()))
        self._used: set[str] = set()

    def make_target(self, number: int, inputs: Inputs, unedited: str) -> str:
        """A target for the trial of this number.

        Raises:
            InputError: there is none that this model can be taught.
        """
        ideas = list(dict.fromkeys(self._candidate_targets(number)))
        for target in sorted(ideas, key=self._used.__contains__):
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
        """Whether it is short and can be taught."""
        try:
            return "\n" not in target and len(self._task.encode_target(inputs, target)) <= SHORT_TARGET_TOKENS
        except InputError:
            return False


def _rotated(number: int, targets: Sequence[str]) -> Iterator[str]:
    """All of them, the one with this number first."""
    start = number % len(targets) if targets else 0
    yield from targets[start:]
    yield from targets[:start]


def usable_inputs(
    task: ModelTask, inputs: Sequence[Inputs], is_accepted: Callable[[Inputs], bool]
) -> tuple[Inputs, ...]:
    """Those that the model takes and tells apart by their tokens from each other and from the first, which is left out.

    `is_accepted` says whether the model answers them.
    """
    found: dict[object, Inputs] = {}
    for one in inputs:
        if is_accepted(one):
            found.setdefault(task.tokenize(one), one)
    first = inputs[0]
    return tuple(one for one in found.values() if one is not first)
