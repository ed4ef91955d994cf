"""The wording check: whether two requests with close queries can ask for the same.

A query for "the fee in 2021" is close to one for "the fee in 2023", and one product is close to another. So a match by
distance is followed by a comparison of words. Two wordings disagree if they differ in

1. numbers (digits, words or Roman numerals), currency signs or percent signs;
2. negation;
3. words that exclude each other (`words/contrasts.txt`): minimum and maximum, buyer and seller, summer and winter;
4. names: each wording has a name that the other lacks, or the same words have their names in another order. Words in
   which paraphrases differ (`words/common.txt`) are not names.

Ignored are case, accents, punctuation, inflection, frames such as "Question: … Answer:" and sentences before the
request. A single missing letter, or two neighbouring letters swapped, is ignored as well.

Guarantees:

1. The check is symmetric.
2. Every wording agrees with itself.

Not promised:

- Wordings that agree may still ask for different things. The radius decides on these.
- A request of more than `MAX_WORDS` words is not checked: it agrees with everything.
- The word lists are English. In another language only numbers and capitals inside the text are compared. In a script
  without spaces between words only numbers are.
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
"""Version of the rules in this package and of the choice of compared entries (`pipeline.codebook.lookup`).

It is part of `rules_digest`. Raise it with every change that can alter a decision.
"""

MAX_WORDS = 48
"""Most words of a request that is compared. Longer requests are texts, whose words say little about the question."""

ELLIPSIS = "\u2026 "
"""Prefix of a wording if text was cut off around the request that may change its meaning."""

FRAME_CHARACTERS = frozenset(" \t\n\r.,:;!?'\"-\u2013\u2014\u2026()")
"""Characters between the words of a frame. Any other one, such as an emoji, may be the topic of the request."""

WORDING_CACHE_SIZE = 4096
"""Number of parsed wordings in the cache. Entries that match often are parsed once."""

STEM_CACHE_SIZE = 2**14
"""Number of stems in the cache. A correction is compared word by word with all traffic near it."""

WORD_OR_NUMBER_PATTERN = re.compile(r"\d(?:[\d.,:/-]*\d)?|[^\W\d_]+(?:['\u2019-][^\W\d_]+)*[+#]*")
POSSESSIVE_PATTERN = re.compile(r"['\u2019]s?$", re.IGNORECASE)
ORDINAL_SUFFIXES = frozenset({"st", "nd", "rd", "th"})
THOUSANDS_PATTERN = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
ROMAN_PATTERN = re.compile(r"(?=[ivx]{2})x{0,3}(?:ix|iv|v?i{0,3})$")
"""Roman numerals of at least two letters, up to 39, as in the names of kings and wars. A single letter is a word."""

ACCENTS_PATTERN = re.compile("[\u0300-\u036f]")
UNSPACED_SCRIPT_PATTERN = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)
"""A letter of a script without spaces between words."""

UNIT_SYMBOLS = frozenset("$€£¥%")

FOREIGN_TEXT_DIVISOR = 5
"""A text with less than 1 common English word in 5 is foreign: only capitals inside it count as names."""

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
"""Not treated as numbers: "one" is also a pronoun, "first" an adverb, and "second" a unit of time."""

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
"""Fewest letters of a word without its ending; shorter stems would join unrelated words."""

MIN_TYPO_LETTERS = 4
"""Fewest letters of a word with a recognised typo. Shorter words differ from too many others by one letter."""


@dataclass(frozen=True, slots=True)
class ParsedWording:
    """A wording, parsed for comparison.

    Attributes:
        words: The words in order, in lower case, without possessive endings; numbers in digits.
        names: The words that count as names: capitals inside a sentence, or words that are not common.
        number_counts: How often each number, currency sign or percent sign occurs.
        is_negated: True if the number of negations is odd.
        alternatives: The alternatives that occur, by the index of their group of contrasts.
    """

    words: tuple[str, ...]
    names: tuple[str, ...]
    number_counts: Mapping[str, int]
    is_negated: bool
    alternatives: Mapping[int, frozenset[int]]


def extract_wording(text: str) -> str:
    """The wording of a prompt: its request (`pipeline.wording.request`) in one line; empty if too long to compare.

    It begins with `ELLIPSIS` if the text around the request is more than a frame.
    """
    extracted = extract_request(text)
    wording = " ".join(extracted.request.split())
    if not _is_frame(extracted.before) or not _is_frame(extracted.after):
        wording = ELLIPSIS + wording
    is_comparable = (
        len(ELLIPSIS + wording) <= MAX_WORDING and 0 < len(WORD_OR_NUMBER_PATTERN.findall(wording)) <= MAX_WORDS
    )
    return wording if is_comparable else ""


def mark_as_excerpt(wording: str) -> str:
    """The wording with `ELLIPSIS` in front: text around its request may change its meaning.

    No wording has the same words as a marked one (`pipeline.wording.same_words`). An empty wording stays empty.
    """
    return ELLIPSIS + wording.removeprefix(ELLIPSIS) if wording else ""


def _is_frame(text: str) -> bool:
    """True if the text only greets or says how to answer (`words/framing.txt`)."""
    words = (match[0].casefold().replace("\u2019", "'") for match in WORD_OR_NUMBER_PATTERN.finditer(text))
    return FRAME_CHARACTERS.issuperset(WORD_OR_NUMBER_PATTERN.sub("", text)) and all(
        word in framing_words() for word in words
    )


def find_disagreement(edit_wording: str, prompt_wording: str) -> str:
    """The reason why a prompt cannot ask for the same as an edit; empty if it can.

    Both arguments are wordings (`extract_wording`). The reason names the differing words, the edit's first.
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
    """True if a prompt of the second wording may ask for the same as an edit of the first."""
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
    edit_only = [name for name in edit.names if not any(is_same_word(name, word) for word in other.words)]
    prompt_only = [name for name in other.names if not any(is_same_word(name, word) for word in edit.words)]
    return (
        f"{' '.join(edit_only)!r} and {' '.join(prompt_only)!r} may be different names"
        if edit_only and prompt_only
        else ""
    )


def _order_conflict(edit: ParsedWording, other: ParsedWording) -> str:
    """The reason if equal words have their names in another order. Paraphrases are not compared: they may reorder."""
    if edit.words == other.words or Counter(edit.words) != Counter(other.words):
        return ""
    names = frozenset(edit.names) & frozenset(other.names)
    edit_names, prompt_names = ([word for word in wording.words if word in names] for wording in (edit, other))
    return "" if edit_names == prompt_names else f"the names stand in another order: {' '.join(prompt_names)!r}"


@lru_cache(WORDING_CACHE_SIZE)
def parse_wording(wording: str) -> ParsedWording:
    """Parse a wording into words, names, numbers, negation and alternatives."""
    plain = ACCENTS_PATTERN.sub("", unicodedata.normalize("NFKD", wording)).replace("\u2044", "/")
    raw_words = [POSSESSIVE_PATTERN.sub("", match[0]) for match in WORD_OR_NUMBER_PATTERN.finditer(plain)]
    all_capitals = plain.upper() == plain
    words: list[str] = []
    names: list[tuple[str, bool]] = []
    alternatives: dict[int, set[int]] = {}
    numbers = Counter(character for character in plain if character in UNIT_SYMBOLS)
    negations = 0
    for index, raw in enumerate(raw_words):
        word = raw.casefold().replace("\u2019", "'").replace("\u0131", "i")
        if word.endswith("n't"):
            word, negations = word[:-3], negations + 1
            if not word:  # some tokenizers put a space before "n't"
                continue
        if (number := _normalize_number(word)) is not None:
            numbers[number] += 1
            words.append(number)
            continue
        if word in ORDINAL_SUFFIXES and index and raw_words[index - 1][-1:].isdigit():
            continue
        negations += word in NEGATIONS
        words.append(word)
        for group, alternative in contrast_groups().get(word, ()):
            alternatives.setdefault(group, set()).add(alternative)
        capital = raw[:1].isupper() and index > 0 and not all_capitals and word != "i"
        if capital or not (
            len(word) == 1 or word in NEGATIONS or word in common_words() or UNSPACED_SCRIPT_PATTERN.search(word)
        ):
            names.append((word, capital))
    is_foreign = FOREIGN_TEXT_DIVISOR * sum(word in common_words() for word in words) < len(words)
    alternatives_by_group = {group: frozenset(numbers_of_group) for group, numbers_of_group in alternatives.items()}
    counted_names = tuple(name for name, capital in names if capital or not is_foreign)
    return ParsedWording(tuple(words), counted_names, dict(numbers), negations % 2 == 1, alternatives_by_group)


def is_same_word(one: str, other: str) -> bool:
    """True if two words are equal but for inflection, one missing letter, or two neighbouring letters swapped."""
    shorter, longer = sorted((one, other), key=len)
    inflected = (
        len(shorter) >= MIN_STEM_LETTERS and longer.startswith(shorter) and longer[len(shorter) :] in INFLECTION_ENDINGS
    )
    return one == other or inflected or _differ_by_typo(one, other) or _stem(one) == _stem(other)


@lru_cache(1)
def rules_digest() -> str:
    """SHA-256 (hex) over the rules' version and the word lists. Replicas with other rules answer differently."""
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
    """Words in which two requests for the same may differ."""
    return frozenset(_read_lines("common.txt"))


@lru_cache(1)
def framing_words() -> frozenset[str]:
    """Words of texts around a request that do not change its meaning."""
    return frozenset(word for line in _read_lines("framing.txt") for word in line.split())


@lru_cache(1)
def confusable_pairs() -> frozenset[tuple[str, ...]]:
    """Sorted pairs of two real words that look like typos of each other."""
    return frozenset(tuple(line.split()) for line in _read_lines("confusable.txt"))


@lru_cache(1)
def contrast_groups() -> Mapping[str, tuple[tuple[int, int], ...]]:
    """For each word, the indexes of its groups of contrasts and of its alternative in each group."""
    groups: dict[str, tuple[tuple[int, int], ...]] = {}
    for group, line in enumerate(_read_lines("contrasts.txt")):
        for alternative, words in enumerate(line.split("|")):
            for word in words.split():
                groups[word] = (*groups.get(word, ()), (group, alternative))
    return groups


def _read_lines(name: str) -> Iterator[str]:
    text = files("gracestream.pipeline.wording").joinpath("words", name).read_text(encoding="utf-8")
    return (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _normalize_number(word: str) -> str | None:
    """A number in a uniform spelling: digits without leading zeros, a point before the fraction. None: no number."""
    if word[0].isdigit():
        digits = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in word)
        digits = digits.replace(",", "" if THOUSANDS_PATTERN.fullmatch(digits) else ".")
        whole, separator, fraction = digits.partition(".")
        if separator and fraction.isdigit():
            digits = f"{whole}.{fraction}".rstrip("0").rstrip(".")
        return digits.lstrip("0") or "0"
    if ROMAN_PATTERN.match(word):
        return str(_roman_value(word))
    return None if word in AMBIGUOUS_NUMBER_WORDS else NUMBER_WORDS.get(word)


def _roman_value(word: str) -> int:
    values = [{"i": 1, "v": 5, "x": 10}[letter] for letter in word]
    following = [*values[1:], 0]
    return sum(-value if value < next_value else value for value, next_value in zip(values, following, strict=True))


@lru_cache(STEM_CACHE_SIZE)
def _stem(word: str) -> str:
    for ending in INFLECTION_ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= MIN_STEM_LETTERS:
            return word[: -len(ending)]
    return word


def _differ_by_typo(one: str, other: str) -> bool:
    """True if the words differ by two swapped neighbouring letters, or by one missing letter."""
    shorter, longer = sorted((one, other), key=len)
    if len(shorter) < MIN_TYPO_LETTERS or len(longer) - len(shorter) > 1:
        return False
    first_difference = next(
        (index for index, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter)
    )
    if len(shorter) < len(longer):
        return shorter[first_difference:] == longer[first_difference + 1 :]
    return (
        shorter[first_difference + 2 :] == longer[first_difference + 2 :]
        and shorter[first_difference : first_difference + 2] == longer[first_difference : first_difference + 2][::-1]
    )


def _contrast_word(wording: ParsedWording, group: int, other: ParsedWording) -> str:
    """The first word of `wording` whose alternative in this group does not occur in `other`."""
    for word in wording.words:
        if any(
            word_group == group and alternative not in other.alternatives[group]
            for word_group, alternative in contrast_groups().get(word, ())
        ):
            return word
    return ""


def _join_numbers(numbers: Mapping[str, int]) -> str:
    return ", ".join(sorted(numbers)) or "none"
