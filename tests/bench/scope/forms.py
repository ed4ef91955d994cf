"""Forms of a prompt made by rules: the same request with another spelling, frame or type of sentence."""

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
"""Instructions before a prompt. The two parts have different wordings, so settings cannot fit the reported ones."""

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
    """A kind of case.

    Attributes:
        name: Its name in the report.
        applies: Whether the correction should change the answers to these texts.
        texts: Makes the texts of one correction; none if the kind does not apply.
        chat: Whether the texts are user turns in the model's chat template.
    """

    name: str
    applies: bool
    texts: Callable[[Correction, Part], Sequence[str]]
    chat: bool = False


def without_punctuation(text: str) -> str:
    """The text without its last question mark or, if it has none, without its last punctuation mark."""
    stripped = text.rstrip()
    if "?" in stripped:
        before, _, after = stripped.rpartition("?")
        return before + after
    return stripped[:-1] if stripped.endswith(tuple(SENTENCE_END)) else stripped


def typo(text: str) -> str:
    """The text with two adjacent letters swapped inside one word, chosen by a hash of the text.

    The first letter of a word stays. A text without two different adjacent letters after it is unchanged.
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
    """A question from an incomplete statement: `The capital of X is` becomes `What is the capital of X?`."""
    found = re.fullmatch(r"The ([^,.]+) (is|was)( called| named)?", plain.strip())
    return f"What {found[2]} the {found[1]}?" if found else None


def as_statement(plain: str) -> str | None:
    """An incomplete statement from a question: `What is the capital of X?` becomes `The capital of X is`."""
    found = re.fullmatch(r"(?:What|Who|Which) (is|was) the ([^,?]+)\??", plain.strip())
    if found is None or re.search(r"\b(?:that|which|where|who|whose|of|to|in|from|for)$", found[2]):
        return None
    return f"The {found[2]} {found[1]}"


def _rewritten(make: Callable[[str], str]) -> Callable[[Correction, Part], Sequence[str]]:
    """Texts by a rule; none if the rule does not change the prompt."""

    def texts(correction: Correction, _part: Part) -> Sequence[str]:
        text = make(correction.text)
        return () if text == correction.text else (text,)

    return texts


def _prefixed(wordings: Mapping[Part, tuple[str, ...]]) -> Callable[[Correction, Part], Sequence[str]]:
    """The prompt after one of the part's wordings, chosen by the prompt's length."""

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
"""The kinds for every correction of a causal model."""


def related(name: str, *, applies: bool) -> CaseKind:
    """A kind with texts from the data of the correction."""
    return CaseKind(name, applies, lambda correction, _part: correction.related.get(name, ()))


ITSELF = CaseKind("itself", True, lambda correction, _part: (correction.text,))
