"""The wording check: whether two requests that lie near each other can ask for the same.

An embedding places "the fee in 2021" beside "the fee in 2023", and one product beside another. So a match on distance
is followed by a comparison of the words. Two wordings disagree where they differ in

1. numbers, as digits or as words, and units beside them;
2. negation;
3. words that exclude each other (`words/contrasts.txt`): minimum and maximum, buyer and seller, summer and winter;
4. names: each has a word that the other lacks, and neither word is among those in which paraphrases differ
   (`words/common.txt`); or the names that they share stand in another order.

Case, punctuation, frames such as "Question: … Answer:", sentences before the request, inflection and a typo of one
letter make no difference. The check is symmetric, and every wording agrees with itself.

Not promised: that wordings which agree ask for the same, which the radius decides; and any check of a request that is
longer than `MAX_WORDS`, or in a script without spaces between words. These agree with everything.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from pipeline.request import request_in
from schemas.deltas import MAX_WORDING

MAX_WORDS = 48
"""Longer requests are texts rather than questions: their words say little of whether two ask for the same."""

CACHED = 4096
"""Wordings that are kept as parsed: of entries that match often."""

WORD = re.compile(r"\d(?:[\d.,:/-]*\d)?|[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
POSSESSIVE = re.compile(r"['\u2019]s?$", re.IGNORECASE)

NEGATIONS = frozenset(
    {"not", "no", "never", "without", "none", "nobody", "nothing", "neither", "nor", "cannot", "except", "unless"}
)

CARDINALS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty"
)
ORDINALS = (
    "_ first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth"
    " fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
TENS = "_ _ _ thirty forty fifty sixty seventy eighty ninety"
NO_NUMBERS = frozenset({"_", "one", "first", "second"})
"""Left out of the lists: "one" is a pronoun as well, "first" an adverb, and "second" a unit of time."""

NUMBERS: Mapping[str, str] = {
    **{
        word: str(number)
        for words in (CARDINALS, ORDINALS, "_ once twice")
        for number, word in enumerate(words.split())
    },
    **{word: str(10 * number) for number, word in enumerate(TENS.split())},
}

ENDINGS = (
    "ingly", "edly", "ations", "ation", "ings", "ing", "ers", "ors", "ions", "ies", "ion", "er", "or", "ed", "es", "ly",
    "s", "e", "y",
)  # fmt: skip
STEM = 4
"""Letters that are left of a word at least when an ending is cut off."""

SAME_START = 6
"""Words of a language's derived forms that begin with so many equal letters count as one: nation, nationality."""

TYPO = 4
"""Letters of a word in which a typo can be told from another word."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A request as its words, in order.

    Attributes:
        words: In lower case, without possessive endings; numbers in digits.
        names: Of these, those that count as names: capitals inside a sentence, or words that are not common.
        numbers: Each with how often it occurs.
        negated: Whether an odd number of negations occurs.
        poles: By the number of a group of contrasts: which of its alternatives occur.
    """

    words: tuple[str, ...]
    names: tuple[str, ...]
    numbers: Mapping[str, int]
    negated: bool
    poles: Mapping[int, frozenset[int]]


def wording_of(text: str) -> str:
    """What a prompt asks for (`pipeline.request`) in one line, as entries keep it; empty where it is too long."""
    asked = " ".join(request_in(text).request.split())
    comparable = len(asked) <= MAX_WORDING and 0 < len(WORD.findall(asked)) <= MAX_WORDS
    return asked if comparable else ""


def disagreement(edited: str, asked: str) -> str:
    """Why a request in other words cannot ask for what an edit is about; empty where it can.

    Both are wordings (`wording_of`). The reason names the words, the edit's first.
    """
    if edited == asked or not edited or not asked:
        return ""
    edit, other = parsed(edited), parsed(asked)
    if edit.numbers != other.numbers:
        return f"numbers: {_listed(edit.numbers)} and {_listed(other.numbers)}"
    if edit.negated != other.negated:
        return "one of the two is negated"
    return _excluded(edit, other) or _other_names(edit, other) or _other_order(edit, other)


def agrees(edited: str, asked: str) -> bool:
    """Whether a request may ask for what an edit is about."""
    return not disagreement(edited, asked)


def _excluded(edit: Wording, other: Wording) -> str:
    for group in sorted(edit.poles.keys() & other.poles.keys()):
        if edit.poles[group] - other.poles[group] and other.poles[group] - edit.poles[group]:
            return f"{_pole(edit, group, other)!r} and {_pole(other, group, edit)!r} exclude each other"
    return ""


def _other_names(edit: Wording, other: Wording) -> str:
    ours = [name for name in edit.names if not any(same_word(name, word) for word in other.words)]
    theirs = [name for name in other.names if not any(same_word(name, word) for word in edit.words)]
    return f"{' '.join(ours)!r} and {' '.join(theirs)!r} may be different names" if ours and theirs else ""


def _other_order(edit: Wording, other: Wording) -> str:
    """Only of the very same words: paraphrases may turn a sentence round."""
    if edit.words == other.words or Counter(edit.words) != Counter(other.words):
        return ""
    names = frozenset(edit.names) & frozenset(other.names)
    ours, theirs = ([word for word in one.words if word in names] for one in (edit, other))
    return "" if ours == theirs else f"the names stand in another order: {' '.join(theirs)!r}"


@lru_cache(CACHED)
def parsed(wording: str) -> Wording:
    """The words of a wording."""
    found = list(WORD.finditer(wording))
    shouted = wording.upper() == wording
    words: list[str] = []
    names: list[str] = []
    poles: dict[int, set[int]] = {}
    numbers: Counter[str] = Counter()
    negations = 0
    for place, match in enumerate(found):
        raw = POSSESSIVE.sub("", match[0])
        word = raw.lower().replace("\u2019", "'")
        if word.endswith("n't"):
            word, negations = word[:-3], negations + 1
        if (number := _number(word)) is not None:
            numbers[number] += 1
            words.append(number)
            continue
        if word in NEGATIONS:
            negations += 1
        words.append(word)
        for group, pole in contrasts().get(word, ()):
            poles.setdefault(group, set()).add(pole)
        capital = raw[:1].isupper() and place > 0 and not shouted
        if (capital or word not in common_words()) and len(word) > 1 and word not in NEGATIONS:
            names.append(word)
    held = {group: frozenset(some) for group, some in poles.items()}
    return Wording(tuple(words), tuple(names), dict(numbers), negations % 2 == 1, held)


def same_word(one: str, other: str) -> bool:
    """Whether two words are one but for inflection or a typo of one letter."""
    if one == other or _typo(one, other):
        return True
    stems = _stem(one), _stem(other)
    return stems[0] == stems[1] or (min(map(len, stems)) >= SAME_START - 1 and one[:SAME_START] == other[:SAME_START])


@lru_cache(1)
def common_words() -> frozenset[str]:
    """Words in which two ways to ask for the same may differ."""
    return frozenset(_lines("common.txt"))


@lru_cache(1)
def contrasts() -> Mapping[str, tuple[tuple[int, int], ...]]:
    """By word: the groups of contrasts that it belongs to, each with the number of its alternative there."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for group, line in enumerate(_lines("contrasts.txt")):
        for pole, words in enumerate(line.split("|")):
            for word in words.split():
                found[word] = (*found.get(word, ()), (group, pole))
    return found


def _lines(name: str) -> Iterator[str]:
    text = files("pipeline").joinpath("words", name).read_text(encoding="utf-8")
    return (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _number(word: str) -> str | None:
    if word[0].isdigit():
        return word.replace(",", "")
    return None if word in NO_NUMBERS else NUMBERS.get(word)


def _stem(word: str) -> str:
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= STEM:
            return word[: -len(ending)]
    return word


def _typo(one: str, other: str) -> bool:
    """Whether two neighbouring letters are swapped, or one letter is missing."""
    short, long = sorted((one, other), key=len)
    if len(short) < TYPO or len(long) - len(short) > 1:
        return False
    start = next((place for place, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[start:] == long[start + 1 :]
    return short[start + 2 :] == long[start + 2 :] and short[start : start + 2] == long[start : start + 2][::-1]


def _pole(wording: Wording, group: int, other: Wording) -> str:
    """The first word of an alternative that the other wording lacks."""
    for word in wording.words:
        if any(number == group and pole not in other.poles[group] for number, pole in contrasts().get(word, ())):
            return word
    return ""


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(sorted(numbers)) or "none"
