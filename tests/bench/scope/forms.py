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
class CaseKind:
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


def _rewritten(make: Callable[[str], str]) -> Callable[[Correction, Part], Sequence[str]]:
    """The text that a rule makes of the prompt, unless it is the prompt itself."""

    def texts(correction: Correction, _part: Part) -> Sequence[str]:
        text = make(correction.text)
        return () if text == correction.text else (text,)

    return texts


def _prefixed(wordings: Mapping[Part, tuple[str, ...]]) -> Callable[[Correction, Part], Sequence[str]]:
    """The prompt after one of the part's wordings, which the prompt's length chooses."""

    def texts(correction: Correction, part: Part) -> Sequence[str]:
        chosen = wordings[part]
        return (chosen[len(correction.text) % len(chosen)] + correction.text,)

    return texts


def _question(correction: Correction, _part: Part) -> Sequence[str]:
    text = correction.plain if correction.plain.endswith("?") else as_plain_question(correction.plain)
    return () if text is None or text == correction.text else (text,)


def _statement(correction: Correction, _part: Part) -> Sequence[str]:
    text = as_statement(correction.plain)
    return () if text is None or text == correction.text else (text,)


FORMS = (
    CaseKind("upper", True, _rewritten(str.upper)),
    CaseKind("lower", True, _rewritten(str.lower)),
    CaseKind("space", True, _rewritten(lambda text: f"{text} ")),
    CaseKind("newline", True, _rewritten(lambda text: f"{text}\n")),
    CaseKind("punctuation", True, _rewritten(without_punctuation)),
    CaseKind("typo", True, _rewritten(typo)),
    CaseKind("instruction", True, _prefixed(INSTRUCTIONS)),
    CaseKind("context", True, _prefixed(CONTEXTS)),
    CaseKind("question", True, _question),
    CaseKind("statement", True, _statement),
    CaseKind("chat", True, lambda correction, _part: (correction.plain,), chat=True),
)
"""Kinds that any correction of a causal model has."""


def related(name: str, *, applies: bool) -> CaseKind:
    """A kind whose texts the correction's own data hold."""
    return CaseKind(name, applies, lambda correction, _part: correction.related.get(name, ()))


ITSELF = CaseKind("itself", True, lambda correction, _part: (correction.text,))
