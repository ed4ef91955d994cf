"""The subject of a request, found by rules on its text alone (docs/explanation/method.md).

The rules, in order:

1. the longest quotation;
2. the longest run of words with capitals or numbers, a convention of many languages;
3. the longest run of words that are neither function words nor usual words of a question;
4. the longest run of words that are not function words.

Guarantee: equal texts have equal subjects. No model is involved.

Not promised: that the subject is right. Function words are those of English and the most frequent ones of a few other
European languages. A text in a script without spaces has no subject.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gracestream.pipeline.wording.relations import template_words
from gracestream.pipeline.wording.request import WORD_PATTERN, extract_request


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


QUOTED_PATTERN = re.compile(
    r"\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|„([^“”]+)[“”]"
    r"|(?<!\w)[\u2018']([^\u2018\u2019']+(?:['\u2019]\w[^\u2018\u2019']*)*)[\u2019'](?!\w)"
)

ARTICLES = _word_set("the a an la le les el los il lo die der das")

NAME_PARTICLES = ARTICLES | _word_set(
    "of and & de del della di da do dos du des den van von zu zur af av y e et und ibn bin al"
)
"""Words that may occur inside a name, also one in lower case."""

VERB_PREPOSITIONS = _word_set("in on for to with from at by into as")
"""Prepositions that show that the word before them is a verb and not part of the name."""

NAME_CONNECTORS = NAME_PARTICLES | _word_set("in on for to with from at")
"""Words that may occur between capitalised words of a name."""

FUNCTION_WORDS = NAME_CONNECTORS | _word_set(
    # questions
    "what what's whats which who who's whos whom whose when where where's how why"
    # auxiliary verbs
    " is are was were be been being am do does did done has have had having can could may might must shall should will"
    " would isn't aren't wasn't weren't doesn't didn't don't won't can't"
    # pronouns
    " i me my mine we us our ours you your yours he him his she her hers it its they them their theirs this that these"
    " those there here one ones someone something anyone anything"
    # prepositions, conjunctions, adverbs and quantifiers
    " by as into onto about over under between during before after since until within without through than then if or"
    " nor but not no so too very also just only any some all each every both either neither more most much many few"
    " other another such same own per via up down out off again"
    # words that request an answer
    " please mean means tell give show name list say explain describe write complete find know called named"
    # other languages
    " ist wer was wo wann wie warum welche welcher welches ein eine einer en est qui que quoi où quand comment quel"
    " quelle un une es quién qué dónde cuándo cómo cuál una"
)
"""Words that never are the subject of a text by themselves."""


NAME_SEPARATORS = " .&-\u2013/:'\u2019!,"
"""Characters between the words of a name. The last one, a comma, needs a capital or number after it."""


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    start: int
    end: int

    @property
    def lower(self) -> str:
        return self.text.lower().replace("\u2019", "'")

    @property
    def without_possessive(self) -> str:
        return self.lower.removesuffix("'s")

    @property
    def is_possessive(self) -> bool:
        return self.lower.endswith("'s")

    @property
    def has_capital_or_digit(self) -> bool:
        """True if any of its characters is a capital or a digit."""
        return any(character.isupper() or character.isdigit() for character in self.text)


def extract_subject(text: str) -> str | None:
    """The subject of a text; None if no rule finds one, or if it would be the whole request."""
    request = extract_request(text).request
    quoted: list[str] = [next(filter(None, match.groups())).strip() for match in QUOTED_PATTERN.finditer(request)]
    if quoted and WORD_PATTERN.search(longest_quote := max(quoted, key=len)):
        return longest_quote
    words = [_Word(match[0], match.start(), match.end()) for match in WORD_PATTERN.finditer(request)]
    question_words = FUNCTION_WORDS | template_words()
    run = (
        _longest_name_run(words, request, question_words)
        or _longest_content_run(words, request, question_words)
        or _longest_content_run(words, request, FUNCTION_WORDS)
    )
    if run is None or run == (0, len(words) - 1):
        return None  # no subject, or nothing but the subject
    first, last = run
    return re.sub(r"['\u2019`][sS]?$", "", request[words[first].start : words[last].end])


def _longest_name_run(words: Sequence[_Word], request: str, question_words: frozenset[str]) -> tuple[int, int] | None:
    """The longest run of words with capitals or numbers, as the indexes of its first and last word."""
    if all(word.has_capital_or_digit or word.lower in FUNCTION_WORDS for word in words):
        marked_count = sum(word.has_capital_or_digit for word in words)
        if marked_count == len(words) or any(
            word.has_capital_or_digit and word.lower in FUNCTION_WORDS for word in words[1:]
        ):
            return None  # all words are capitalised, as in a title, so capitals mark no name
    best_run, best_rank = None, (False, 0)
    index = 0
    while index < len(words):
        if not _can_begin_name(words, index):
            index += 1
            continue
        last = _find_name_end(words, request, index, question_words)
        run = words[index : last + 1]
        # Every sentence begins with a capital. So a name by that capital alone loses against any other name.
        is_certain = (
            index > 0 or any(word.has_capital_or_digit for word in run[1:]) or any(map(str.isdigit, run[0].text))
        )
        rank = (is_certain, words[last].end - words[index].start)
        if rank > best_rank and not all(word.text.isdigit() for word in run):
            best_run, best_rank = (index, last), rank
        index = last + 1
    return best_run


def _can_begin_name(words: Sequence[_Word], index: int) -> bool:
    """True if a name may begin at this word.

    A function word at the beginning of the request has its capital from there, unless it is an article before a name.
    """
    word = words[index]
    if not word.has_capital_or_digit or word.lower == "i":
        return False
    if index > 0 or word.lower not in FUNCTION_WORDS:
        return True
    return word.lower in ARTICLES and len(words) > 1 and words[1].has_capital_or_digit


def _find_name_end(words: Sequence[_Word], request: str, first: int, question_words: frozenset[str]) -> int:
    """The index of the last word of the name that begins at `first`.

    1. Extend the name over words with capitals or numbers, and over connectors between them.
    2. Add the plain words after it, up to a question word, a capital, a number or a sign.
    3. Drop the last added word if a preposition follows: it probably is a verb.
    """
    last, index = first, first + 1
    while index < len(words):
        word, between = words[index], request[words[index - 1].end : words[index].start]
        if between.strip(NAME_SEPARATORS) or (not word.has_capital_or_digit and between.strip(NAME_SEPARATORS[:-1])):
            break
        if word.has_capital_or_digit:
            last = index
        elif word.lower not in NAME_CONNECTORS or index - last > 2:
            break
        index += 1
    if words[last].is_possessive and last > first:
        return last
    end = last
    while end + 1 < len(words) and not (
        words[end + 1].without_possessive in question_words or words[end + 1].has_capital_or_digit
    ):
        if request[words[end].end : words[end + 1].start].strip():
            return end
        end += 1
    if end > last and end + 1 < len(words) and words[end + 1].lower in VERB_PREPOSITIONS:
        end -= 1
    return end


def _longest_content_run(words: Sequence[_Word], request: str, excluded: frozenset[str]) -> tuple[int, int] | None:
    """The longest run of words that are not in `excluded`, as indexes of its first and last word; the last of ties."""
    longest: tuple[int, int] | None = None
    first = 0
    while first < len(words):
        if words[first].without_possessive in excluded:
            first += 1
            continue
        last, following = first, first + 1
        while following < len(words):
            if request[words[following - 1].end : words[following].start].strip(" .&-\u2013/"):
                break
            lower = words[following].without_possessive
            if lower not in excluded:
                last = following
            elif lower not in NAME_PARTICLES or following - last > 2:
                break
            following += 1
        if longest is None or last - first >= longest[1] - longest[0]:
            longest = first, last
        first = last + 1
    return longest
