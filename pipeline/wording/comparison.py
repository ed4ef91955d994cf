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

from gracestream.pipeline.wording.request import extract_request
from gracestream.schemas.deltas import MAX_WORDING

RULES_VERSION = 2
"""The version of the rules in this module, and of which entries are compared (`pipeline.model.adaptor.matches`).

Raise it with every change of what they decide.
"""

MAX_WORDS = 48
"""Longer requests are texts rather than questions: their words say little of whether two ask for the same."""

ELLIPSIS = "\u2026 "
"""In front of a wording from around which text was cut that may change what it asks for."""

FRAME_CHARACTERS = frozenset(" \t\n\r.,:;!?'\"-\u2013\u2014\u2026()")
"""What may stand between the words of a frame: another sign, such as an emoji, may be what the request is about."""

WORDING_CACHE_SIZE = 4096
"""Wordings that are kept as parsed: of entries that match often."""

STEM_CACHE_SIZE = 2**14
"""Words whose stems are kept: a correction is compared with all traffic near it, word by word."""

WORD_OR_NUMBER_PATTERN = re.compile(r"\d(?:[\d.,:/-]*\d)?|[^\W\d_]+(?:['\u2019-][^\W\d_]+)*[+#]*")
POSSESSIVE_PATTERN = re.compile(r"['\u2019]s?$", re.IGNORECASE)
ORDINAL_SUFFIXES = frozenset({"st", "nd", "rd", "th"})
THOUSANDS_PATTERN = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
ROMAN_PATTERN = re.compile(r"(?=[ivx]{2})x{0,3}(?:ix|iv|v?i{0,3})$")
"""Roman numerals of at least two letters, up to 39, as kings and wars bear them."""

ACCENTS_PATTERN = re.compile("[\u0300-\u036f]")
UNSPACED_SCRIPT_PATTERN = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)
"""A letter of a script that puts no spaces between words."""

UNIT_SYMBOLS = frozenset("$€£¥%")

FOREIGN_TEXT_DIVISOR = 5
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
AMBIGUOUS_NUMBER_WORDS = frozenset({"_", "one", "first", "second"})
"""Left out of the lists: "one" is a pronoun as well, "first" an adverb, and "second" a unit of time."""

NUMBER_WORDS: Mapping[str, str] = {
    **{
        word: str(number)
        for words in (CARDINALS, ORDINALS, "_ once twice")
        for number, word in enumerate(words.split())
    },
    **{word: str(10 * number) for number, word in enumerate(TENS.split())},
}

INFLECTION_ENDINGS = (
    "ingly", "edly", "ations", "ation", "ings", "ing", "ers", "ors", "ions", "ies", "ion", "er", "or", "ed", "es", "ly",
    "s", "e", "y",
)  # fmt: skip
MIN_STEM_LETTERS = 4
"""Letters that are left of a word at least when an ending is cut off."""

MIN_TYPO_LETTERS = 4
"""Letters of a word in which a typo can be told from another word."""


@dataclass(frozen=True, slots=True)
class ParsedWording:
    """A request as its words, in order.

    Attributes:
        words: In lower case, without possessive endings; numbers in digits.
        names: Of these, those that count as names: capitals inside a sentence, or words that are not common.
        number_counts: Each with how often it occurs.
        is_negated: Whether an odd number of negations occurs.
        alternatives: By the number of a group of contrasts: which of its alternatives occur.
    """

    words: tuple[str, ...]
    names: tuple[str, ...]
    number_counts: Mapping[str, int]
    is_negated: bool
    alternatives: Mapping[int, frozenset[int]]


def extract_wording(text: str) -> str:
    """What a prompt asks for (`pipeline.wording.request`) in one line, as entries keep it; empty where it is too long.

    It begins with `ELLIPSIS` where around the request stands more than a frame.
    """
    found = extract_request(text)
    asked = " ".join(found.request.split())
    if not _is_frame(found.before) or not _is_frame(found.after):
        asked = ELLIPSIS + asked
    comparable = len(ELLIPSIS + asked) <= MAX_WORDING and 0 < len(WORD_OR_NUMBER_PATTERN.findall(asked)) <= MAX_WORDS
    return asked if comparable else ""


def mark_as_excerpt(wording: str) -> str:
    """The wording of a request which something around it may change; nothing has the same words as this one."""
    return ELLIPSIS + wording.removeprefix(ELLIPSIS) if wording else ""


def _is_frame(text: str) -> bool:
    """Whether it only greets or says how to answer (`words/framing.txt`)."""
    words = (match[0].casefold().replace("\u2019", "'") for match in WORD_OR_NUMBER_PATTERN.finditer(text))
    return FRAME_CHARACTERS.issuperset(WORD_OR_NUMBER_PATTERN.sub("", text)) and all(
        word in framing_words() for word in words
    )


def find_disagreement(edit_wording: str, prompt_wording: str) -> str:
    """Why a request in other words cannot ask for what an edit is about; empty where it can.

    Both are wordings (`extract_wording`). The reason names the words, the edit's first.
    """
    if edit_wording == prompt_wording or not edit_wording or not prompt_wording:
        return ""
    edit, other = parse_wording(edit_wording), parse_wording(prompt_wording)
    if edit.number_counts != other.number_counts:
        return f"numbers: {_join_numbers(edit.number_counts)} and {_join_numbers(other.number_counts)}"
    if edit.is_negated != other.is_negated:
        return "one of the two is negated"
    return _contrast_conflict(edit, other) or _name_conflict(edit, other) or _order_conflict(edit, other)


def wordings_agree(edit_wording: str, prompt_wording: str) -> bool:
    """Whether a request may ask for what an edit is about."""
    return not find_disagreement(edit_wording, prompt_wording)


def _contrast_conflict(edit: ParsedWording, other: ParsedWording) -> str:
    for group in sorted(edit.alternatives.keys() & other.alternatives.keys()):
        if (
            edit.alternatives[group] - other.alternatives[group]
            and other.alternatives[group] - edit.alternatives[group]
        ):
            return (
                f"{_contrast_word(edit, group, other)!r} and {_contrast_word(other, group, edit)!r} exclude each other"
            )
    return ""


def _name_conflict(edit: ParsedWording, other: ParsedWording) -> str:
    ours = [name for name in edit.names if not any(is_same_word(name, word) for word in other.words)]
    theirs = [name for name in other.names if not any(is_same_word(name, word) for word in edit.words)]
    return f"{' '.join(ours)!r} and {' '.join(theirs)!r} may be different names" if ours and theirs else ""


def _order_conflict(edit: ParsedWording, other: ParsedWording) -> str:
    """Only of the very same words: paraphrases may turn a sentence round."""
    if edit.words == other.words or Counter(edit.words) != Counter(other.words):
        return ""
    names = frozenset(edit.names) & frozenset(other.names)
    ours, theirs = ([word for word in one.words if word in names] for one in (edit, other))
    return "" if ours == theirs else f"the names stand in another order: {' '.join(theirs)!r}"


@lru_cache(WORDING_CACHE_SIZE)
def parse_wording(wording: str) -> ParsedWording:
    """The words of a wording."""
    plain = ACCENTS_PATTERN.sub("", unicodedata.normalize("NFKD", wording)).replace("\u2044", "/")
    found = [POSSESSIVE_PATTERN.sub("", match[0]) for match in WORD_OR_NUMBER_PATTERN.finditer(plain)]
    shouted = plain.upper() == plain
    words: list[str] = []
    names: list[tuple[str, bool]] = []
    poles: dict[int, set[int]] = {}
    numbers = Counter(character for character in plain if character in UNIT_SYMBOLS)
    negations = 0
    for place, raw in enumerate(found):
        word = raw.casefold().replace("\u2019", "'").replace("\u0131", "i")
        if word.endswith("n't"):
            word, negations = word[:-3], negations + 1
            if not word:  # some tokenizers put a space before it
                continue
        if (number := _normalize_number(word)) is not None:
            numbers[number] += 1
            words.append(number)
            continue
        if word in ORDINAL_SUFFIXES and place and found[place - 1][-1:].isdigit():
            continue
        negations += word in NEGATIONS
        words.append(word)
        for group, pole in contrast_groups().get(word, ()):
            poles.setdefault(group, set()).add(pole)
        capital = raw[:1].isupper() and place > 0 and not shouted and word != "i"
        if capital or not (
            len(word) == 1 or word in NEGATIONS or word in common_words() or UNSPACED_SCRIPT_PATTERN.search(word)
        ):
            names.append((word, capital))
    foreign = FOREIGN_TEXT_DIVISOR * sum(word in common_words() for word in words) < len(words)
    held = {group: frozenset(some) for group, some in poles.items()}
    chosen = tuple(name for name, capital in names if capital or not foreign)
    return ParsedWording(tuple(words), chosen, dict(numbers), negations % 2 == 1, held)


def is_same_word(one: str, other: str) -> bool:
    """Whether two words are one but for inflection, or one letter that is missing or swapped with its neighbour."""
    short, long = sorted((one, other), key=len)
    inflected = len(short) >= MIN_STEM_LETTERS and long.startswith(short) and long[len(short) :] in INFLECTION_ENDINGS
    return one == other or inflected or _differ_by_typo(one, other) or _stem(one) == _stem(other)


@lru_cache(1)
def rules_digest() -> str:
    """What decides whether wordings agree, as a digest: replicas of other rules answer differently."""
    lists = "\0".join(
        (
            *sorted(common_words()),
            *sorted(framing_words()),
            *_read_lines("contrasts.txt"),
            *_read_lines("confusable.txt"),
        )
    )
    return hashlib.sha256(f"{RULES_VERSION}\0{lists}".encode()).hexdigest()


@lru_cache(1)
def common_words() -> frozenset[str]:
    """Words in which two ways to ask for the same may differ."""
    return frozenset(_read_lines("common.txt"))


@lru_cache(1)
def framing_words() -> frozenset[str]:
    """Words of what may stand around a request without changing what it asks for."""
    return frozenset(word for line in _read_lines("framing.txt") for word in line.split())


@lru_cache(1)
def confusable_pairs() -> frozenset[tuple[str, ...]]:
    """Pairs of words, sorted, of which each looks like a typo of the other."""
    return frozenset(tuple(line.split()) for line in _read_lines("confusable.txt"))


@lru_cache(1)
def contrast_groups() -> Mapping[str, tuple[tuple[int, int], ...]]:
    """By word: the groups of contrasts that it belongs to, each with the number of its alternative there."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for group, line in enumerate(_read_lines("contrasts.txt")):
        for pole, words in enumerate(line.split("|")):
            for word in words.split():
                found[word] = (*found.get(word, ()), (group, pole))
    return found


def _read_lines(name: str) -> Iterator[str]:
    text = files("gracestream.pipeline.wording").joinpath("words", name).read_text(encoding="utf-8")
    return (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _normalize_number(word: str) -> str | None:
    """A number in one spelling: without zeros in front, with a point for its fraction."""
    if word[0].isdigit():
        digits = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in word)
        digits = digits.replace(",", "" if THOUSANDS_PATTERN.fullmatch(digits) else ".")
        whole, point, fraction = digits.partition(".")
        if point and fraction.isdigit():
            digits = f"{whole}.{fraction}".rstrip("0").rstrip(".")
        return digits.lstrip("0") or "0"
    if ROMAN_PATTERN.match(word):
        return str(_roman_value(word))
    return None if word in AMBIGUOUS_NUMBER_WORDS else NUMBER_WORDS.get(word)


def _roman_value(word: str) -> int:
    values = [{"i": 1, "v": 5, "x": 10}[letter] for letter in word]
    following = [*values[1:], 0]
    return sum(-value if value < after else value for value, after in zip(values, following, strict=True))


@lru_cache(STEM_CACHE_SIZE)
def _stem(word: str) -> str:
    for ending in INFLECTION_ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= MIN_STEM_LETTERS:
            return word[: -len(ending)]
    return word


def _differ_by_typo(one: str, other: str) -> bool:
    """Whether two neighbouring letters are swapped, or one letter is missing."""
    short, long = sorted((one, other), key=len)
    if len(short) < MIN_TYPO_LETTERS or len(long) - len(short) > 1:
        return False
    start = next((place for place, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[start:] == long[start + 1 :]
    return short[start + 2 :] == long[start + 2 :] and short[start : start + 2] == long[start : start + 2][::-1]


def _contrast_word(wording: ParsedWording, group: int, other: ParsedWording) -> str:
    """The first word of an alternative that the other wording lacks."""
    for word in wording.words:
        if any(
            number == group and pole not in other.alternatives[group]
            for number, pole in contrast_groups().get(word, ())
        ):
            return word
    return ""


def _join_numbers(numbers: Mapping[str, int]) -> str:
    return ", ".join(sorted(numbers)) or "none"
