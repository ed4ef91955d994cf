"""The wording check: whether two requests that lie near each other can ask for the same.

An embedding places "the fee in 2021" beside "the fee in 2023", and one product beside another. So a match on distance
is followed by a comparison of the words. Two wordings disagree where they differ in

1. numbers, in digits, words or Roman numerals, and the signs of currencies and percent;
2. negation;
3. words that exclude each other (`words/contrasts.txt`): minimum and maximum, buyer and seller, summer and winter;
4. names: each has a word that the other lacks, and neither word is among those in which paraphrases differ
   (`words/common.txt`); or the names that they share stand in another order.

No difference is made by case, accents, punctuation, frames such as "Question: … Answer:", sentences before the request,
inflection, and one letter that is missing or swapped with its neighbour. The check is symmetric, and every wording
agrees with itself.

Not promised: that wordings which agree ask for the same, which the radius decides; and any check of a request that is
longer than `MAX_WORDS`, which agrees with everything. The lists of words are English: of a text in another language
numbers and capitals inside it are compared, and of a script without spaces between words only numbers.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from gracestream.pipeline.wording.request import request_in
from gracestream.schemas.deltas import MAX_WORDING

RULES = 2
"""The version of the rules in this module, and of which entries are compared (`pipeline.model.adaptor.matches`).

Raise it with every change of what they decide.
"""

MAX_WORDS = 48
"""Longer requests are texts rather than questions: their words say little of whether two ask for the same."""

ELLIPSIS = "\u2026 "
"""In front of a wording from around which text was cut that may change what it asks for."""

FRAMING = frozenset(" \t\n\r.,:;!?'\"-\u2013\u2014\u2026()")
"""What may stand between the words of a frame: another sign, such as an emoji, may be what the request is about."""

CACHED = 4096
"""Wordings that are kept as parsed: of entries that match often."""

CACHED_STEMS = 2**14
"""Words whose stems are kept: a correction is compared with all traffic near it, word by word."""

WORD = re.compile(r"\d(?:[\d.,:/-]*\d)?|[^\W\d_]+(?:['\u2019-][^\W\d_]+)*[+#]*")
POSSESSIVE = re.compile(r"['\u2019]s?$", re.IGNORECASE)
ORDINAL_ENDINGS = frozenset({"st", "nd", "rd", "th"})
THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
ROMAN = re.compile(r"(?=[ivx]{2})x{0,3}(?:ix|iv|v?i{0,3})$")
"""Roman numerals of at least two letters, up to 39, as kings and wars bear them."""

ACCENTS = re.compile("[\u0300-\u036f]")
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""A letter of a script that puts no spaces between words."""

SYMBOLS = frozenset("$€£¥%")

FOREIGN = 5
"""Where less than one word in so many is a common English one, only capitals inside the text count as names."""

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
    """What a prompt asks for (`pipeline.wording.request`) in one line, as entries keep it; empty where it is too long.

    It begins with `ELLIPSIS` where around the request stands more than a frame.
    """
    found = request_in(text)
    asked = " ".join(found.request.split())
    if not _frames(found.before) or not _frames(found.after):
        asked = ELLIPSIS + asked
    comparable = len(ELLIPSIS + asked) <= MAX_WORDING and 0 < len(WORD.findall(asked)) <= MAX_WORDS
    return asked if comparable else ""


def in_context(wording: str) -> str:
    """The wording of a request which something around it may change; nothing has the same words as this one."""
    return ELLIPSIS + wording.removeprefix(ELLIPSIS) if wording else ""


def _frames(text: str) -> bool:
    """Whether it only greets or says how to answer (`words/framing.txt`)."""
    words = (match[0].casefold().replace("\u2019", "'") for match in WORD.finditer(text))
    return FRAMING.issuperset(WORD.sub("", text)) and all(word in framing_words() for word in words)


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
    plain = ACCENTS.sub("", unicodedata.normalize("NFKD", wording)).replace("\u2044", "/")
    found = [POSSESSIVE.sub("", match[0]) for match in WORD.finditer(plain)]
    shouted = plain.upper() == plain
    words: list[str] = []
    names: list[tuple[str, bool]] = []
    poles: dict[int, set[int]] = {}
    numbers = Counter(character for character in plain if character in SYMBOLS)
    negations = 0
    for place, raw in enumerate(found):
        word = raw.casefold().replace("\u2019", "'").replace("\u0131", "i")
        if word.endswith("n't"):
            word, negations = word[:-3], negations + 1
            if not word:  # some tokenizers put a space before it
                continue
        if (number := _number(word)) is not None:
            numbers[number] += 1
            words.append(number)
            continue
        if word in ORDINAL_ENDINGS and place and found[place - 1][-1:].isdigit():
            continue
        negations += word in NEGATIONS
        words.append(word)
        for group, pole in contrasts().get(word, ()):
            poles.setdefault(group, set()).add(pole)
        capital = raw[:1].isupper() and place > 0 and not shouted and word != "i"
        if capital or not (len(word) == 1 or word in NEGATIONS or word in common_words() or UNSPACED.search(word)):
            names.append((word, capital))
    foreign = FOREIGN * sum(word in common_words() for word in words) < len(words)
    held = {group: frozenset(some) for group, some in poles.items()}
    chosen = tuple(name for name, capital in names if capital or not foreign)
    return Wording(tuple(words), chosen, dict(numbers), negations % 2 == 1, held)


def same_word(one: str, other: str) -> bool:
    """Whether two words are one but for inflection, or one letter that is missing or swapped with its neighbour."""
    short, long = sorted((one, other), key=len)
    inflected = len(short) >= STEM and long.startswith(short) and long[len(short) :] in ENDINGS
    return one == other or inflected or _typo(one, other) or _stem(one) == _stem(other)


@lru_cache(1)
def rules() -> str:
    """What decides whether wordings agree, as a digest: replicas of other rules answer differently."""
    lists = "\0".join(
        (*sorted(common_words()), *sorted(framing_words()), *_lines("contrasts.txt"), *_lines("confusable.txt"))
    )
    return hashlib.sha256(f"{RULES}\0{lists}".encode()).hexdigest()


@lru_cache(1)
def common_words() -> frozenset[str]:
    """Words in which two ways to ask for the same may differ."""
    return frozenset(_lines("common.txt"))


@lru_cache(1)
def framing_words() -> frozenset[str]:
    """Words of what may stand around a request without changing what it asks for."""
    return frozenset(word for line in _lines("framing.txt") for word in line.split())


@lru_cache(1)
def confusable() -> frozenset[tuple[str, ...]]:
    """Pairs of words, sorted, of which each looks like a typo of the other."""
    return frozenset(tuple(line.split()) for line in _lines("confusable.txt"))


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
    text = files("gracestream.pipeline.wording").joinpath("words", name).read_text(encoding="utf-8")
    return (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _number(word: str) -> str | None:
    """A number in one spelling: without zeros in front, with a point for its fraction."""
    if word[0].isdigit():
        digits = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in word)
        digits = digits.replace(",", "" if THOUSANDS.fullmatch(digits) else ".")
        whole, point, fraction = digits.partition(".")
        if point and fraction.isdigit():
            digits = f"{whole}.{fraction}".rstrip("0").rstrip(".")
        return digits.lstrip("0") or "0"
    if ROMAN.match(word):
        return str(_roman(word))
    return None if word in NO_NUMBERS else NUMBERS.get(word)


def _roman(word: str) -> int:
    values = [{"i": 1, "v": 5, "x": 10}[letter] for letter in word]
    following = [*values[1:], 0]
    return sum(-value if value < after else value for value, after in zip(values, following, strict=True))


@lru_cache(CACHED_STEMS)
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
