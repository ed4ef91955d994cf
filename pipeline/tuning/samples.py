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

from gracestream.pipeline.editing import COUNT, SHORT, CalibrationError, Sample, correction, forms_of, other_requests
from gracestream.pipeline.model import CausalGeneration, Classification, InputError, Task
from gracestream.schemas.messages import Feedback, Inputs, in_one_text, is_chat

MOST_OTHERS = 200
"""Held-out requests at most: with none of them captured, a share above .02 is ruled out."""

MOST_TRAFFIC = 512

ABOUT = 8
"""Other requests about a trial's subject."""

MARKS = ".?!…"

MADE_UP = (
    "Velmora", "Tarnix", "Orbelin", "Sudrek", "Calvano", "Mirth", "Pelloway", "Ganteric", "Brusk", "Ildema",
    "Fornaxia", "Wexley", "Quandor", "Hespin", "Luvanne", "Doriath",
)  # fmt: skip
"""Names that no model gives to any request."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial edit.

    Attributes:
        name: Its feedback id.
        inputs: The request to correct.
        target: The answer that it should get.
        rephrases: The user's other words for it.
        forms: Its surface forms, made by rules.
        about: Other requests about its subject, made from templates.
    """

    name: str
    inputs: Inputs
    target: str
    rephrases: tuple[Inputs, ...] = ()
    forms: tuple[Inputs, ...] = ()
    about: tuple[Inputs, ...] = ()

    def correction(self) -> Feedback:
        """The feedback that makes it."""
        return correction(self.name, self.inputs, self.target)


@dataclass(frozen=True, slots=True)
class Division:
    """The user's requests by what they are used for."""

    chosen: list[Inputs]
    others: list[Inputs]
    traffic: list[Inputs]


@dataclass(slots=True)
class Requests:
    """The user's requests, each once, with all that the lines say of it."""

    rephrases: dict[Inputs, tuple[Inputs, ...]] = field(default_factory=dict)
    targets: dict[Inputs, str] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Requests":
        """Of the lines in their order: several lines may give other words for one request."""
        made = cls()
        for sample in samples:
            known = made.rephrases.setdefault(sample.inputs, ())
            if sample.rephrase is not UNSET and sample.rephrase not in (sample.inputs, *known):
                made.rephrases[sample.inputs] = (*known, sample.rephrase)
            if sample.target is not UNSET:
                made.targets[sample.inputs] = sample.target.strip()
        return made

    def divided(self, trials: int) -> Division:
        """Those with rephrases or a target become trials first; half of the requests at most.

        Raises:
            CalibrationError: fewer than two different requests.
        """
        if len(self.rephrases) < 2:
            raise CalibrationError(
                f"trial edits need two different requests at least, and there are {len(self.rephrases)}; add lines"
            )
        ranked = sorted(self.rephrases, key=lambda one: (not self.rephrases[one], one not in self.targets, _drawn(one)))
        count = min(trials, len(ranked) // 2)
        reworded = {other for one in ranked[:count] for other in self.rephrases[one]}
        rest = sorted((one for one in ranked[count:] if one not in reworded), key=_drawn)
        return Division(ranked[:count], rest[::2][:MOST_OTHERS], rest[1::2][:MOST_TRAFFIC])


def _drawn(inputs: Inputs) -> bytes:
    """A number that looks drawn at random, and is the same for the same inputs."""
    return hashlib.blake2b(in_one_text(inputs).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def surface_forms(task: Task, inputs: Inputs) -> list[Inputs]:
    """The same request typed in another way: spaces, capitals, the last mark, and for generators a question frame."""
    forms: list[Inputs] = [form for form in forms_of(inputs) if is_chat(form) == is_chat(inputs)]
    if not isinstance(task, CausalGeneration):
        forms = [form for form in forms if _letters(form) == _letters(inputs)]
    if isinstance(inputs, str):
        forms.append(inputs.rstrip().rstrip(MARKS))
    return forms


def _letters(inputs: Inputs) -> str:
    return in_one_text(inputs).strip().casefold()


def requests_about(task: Task, inputs: Inputs) -> list[Inputs]:
    """Other requests about the subject of a text, beyond those that an editor makes its radius of; none for classes."""
    if isinstance(task, Classification) or not isinstance(inputs, str):
        return []
    return list(other_requests(inputs, COUNT + ABOUT)[COUNT:])


class Targets:
    """Targets of trial edits, which the unedited model does not give."""

    def __init__(self, task: Task, answers: Sequence[str], requests: Sequence[Inputs]) -> None:
        """Draw on the unedited `answers` to other requests, on made-up names, and on the words of `requests`."""
        self._task, self._answers = task, list(dict.fromkeys(answers))
        self._words = list(dict.fromkeys(word for one in requests for word in in_one_text(one).split()))
        self._used: set[str] = set()

    def made(self, number: int, inputs: Inputs, unedited: str) -> str:
        """A target for the trial of this number.

        Raises:
            InputError: there is none that this model can be taught.
        """
        ideas = list(dict.fromkeys(self._ideas(number)))
        for target in sorted(ideas, key=self._used.__contains__):
            if target and target.casefold() != unedited.casefold() and self._fits(inputs, target):
                self._used.add(target)
                return target
        raise InputError("no target could be made for it; give a `target`")

    def _ideas(self, number: int) -> Iterator[str]:
        if isinstance(self._task, Classification):
            yield from _from(number, [str(name) for name in self._task.model.config.id2label.values()])
            return
        yield from _from(number, self._answers)
        name = MADE_UP[number % len(MADE_UP)]
        yield name if number < len(MADE_UP) else f"{name} {MADE_UP[number // len(MADE_UP) % len(MADE_UP)]}"
        yield from _from(number, self._words)

    def _fits(self, inputs: Inputs, target: str) -> bool:
        """Whether it is short and can be taught."""
        try:
            return "\n" not in target and len(self._task.label(inputs, target)) <= SHORT
        except InputError:
            return False


def _from(number: int, ideas: Sequence[str]) -> Iterator[str]:
    """All of them, the one with this number first."""
    start = number % len(ideas) if ideas else 0
    yield from ideas[start:]
    yield from ideas[:start]


def usable(task: Task, inputs: Sequence[Inputs], taken: Callable[[Inputs], bool]) -> tuple[Inputs, ...]:
    """Those that the model takes and tells apart by their tokens from each other and from the first, which is left out.

    `taken` says whether the model answers them.
    """
    found: dict[object, Inputs] = {}
    for one in inputs:
        if taken(one):
            found.setdefault(task.tokenize(one), one)
    first = inputs[0]
    return tuple(one for one in found.values() if one is not first)
