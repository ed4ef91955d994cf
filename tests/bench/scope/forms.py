"""Forms of a prompt that are made by rules: the same request in another spelling, frame or type of sentence."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.scope.cases import Correction, Part

SENTENCE_END = ".?!:;"

INSTRUCTIONS: Mapping[Part, tuple[str, ...]] = {
    "held-out": ("Answer in a few words.\n", "You are a helpful assistant. Reply with the answer only. "),
    "development": ("Please answer briefly. ", "Give only the answer, without an explanation.\n"),
}
"""Instructions before a prompt. The wordings of the two parts differ, so that none is tuned to."""

CONTEXTS: Mapping[Part, tuple[str, ...]] = {
    "held-out": (
        "A colleague asked me about this over lunch, and I was not sure. ",
        "I am filling in a form for a customer this morning.\n",
    ),
    "development": (
        "I am writing a short article and want to get this right. ",
        "We talked about this in class yesterday.\n",
    ),
}
"""Context before a prompt."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of case: its name, its side, and the texts that it makes of a correction.

    Attributes:
        name: As the report names it.
        applies: Whether the correction should reach these texts.
        texts: The texts of one correction; none where the kind does not fit it.
        chat: Whether the texts are user turns, asked in the model's chat template.
    """

    name: str
    applies: bool
    texts: Callable[[Correction, Part], Sequence[str]]
    chat: bool = False


def without_punctuation(text: str) -> str:
    """The text without its last mark, or without its last question mark where a frame follows it."""
    stripped = text.rstrip()
    if "?" in stripped:
        before, _, after = stripped.rpartition("?")
        return before + after
    return stripped[:-1] if stripped.endswith(tuple(SENTENCE_END)) else stripped


def typo(text: str) -> str:
    """The text with two neighbouring letters swapped inside one word; the text's own hash chooses them.

    A word's first letter stays. A text without two different neighbouring letters there stays as it is.
    """
    places = [
        place
        for word in re.finditer(r"[^\W\d_]{4,}", text)
        for place in range(word.start() + 1, word.end() - 1)
        if text[place] != text[place + 1]
    ]
    if not places:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    place = places[int.from_bytes(digest, "little") % len(places)]
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def as_plain_question(plain: str) -> str | None:
    """A question of a statement without its end: `The capital of X is` becomes `What is the capital of X?`."""
    found = re.fullmatch(r"The ([^,.]+) (is|was)( called| named)?", plain.strip())
    return f"What {found[2]} the {found[1]}?" if found else None


def as_statement(plain: str) -> str | None:
    """A statement without its end of a question: `What is the capital of X?` becomes `The capital of X is`."""
    found = re.fullmatch(r"(?:What|Who|Which) (is|was) the ([^,?]+)\??", plain.strip())
    if found is None or re.search(r"\b(?:that|which|where|who|whose|of|to|in|from|for)$", found[2]):
        return None
    return f"The {found[2]} {found[1]}"


def _changed(make: Callable[[str], str]) -> Callable[[Correction, Part], Sequence[str]]:
    """The text that a rule makes of the prompt, unless it is the prompt itself."""

    def texts(correction: Correction, _part: Part) -> Sequence[str]:
        made = make(correction.text)
        return () if made == correction.text else (made,)

    return texts


def _before(wordings: Mapping[Part, tuple[str, ...]]) -> Callable[[Correction, Part], Sequence[str]]:
    """The prompt after one of the part's wordings, which the prompt's length chooses."""

    def texts(correction: Correction, part: Part) -> Sequence[str]:
        chosen = wordings[part]
        return (chosen[len(correction.text) % len(chosen)] + correction.text,)

    return texts


def _question(correction: Correction, _part: Part) -> Sequence[str]:
    made = correction.plain if correction.plain.endswith("?") else as_plain_question(correction.plain)
    return () if made is None or made == correction.text else (made,)


def _statement(correction: Correction, _part: Part) -> Sequence[str]:
    made = as_statement(correction.plain)
    return () if made is None or made == correction.text else (made,)


FORMS = (
    Kind("upper", True, _changed(str.upper)),
    Kind("lower", True, _changed(str.lower)),
    Kind("space", True, _changed(lambda text: f"{text} ")),
    Kind("newline", True, _changed(lambda text: f"{text}\n")),
    Kind("punctuation", True, _changed(without_punctuation)),
    Kind("typo", True, _changed(typo)),
    Kind("instruction", True, _before(INSTRUCTIONS)),
    Kind("context", True, _before(CONTEXTS)),
    Kind("question", True, _question),
    Kind("statement", True, _statement),
    Kind("chat", True, lambda correction, _part: (correction.plain,), chat=True),
)
"""Kinds that any correction of a causal model has."""


def related(name: str, *, applies: bool) -> Kind:
    """A kind whose texts the correction's own data hold."""
    return Kind(name, applies, lambda correction, _part: correction.related.get(name, ()))


ITSELF = Kind("itself", True, lambda correction, _part: (correction.text,))
