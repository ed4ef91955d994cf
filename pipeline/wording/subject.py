"""What a request is about, by rules on its text alone (design, section 4).

The rules read capitals, numbers and quotation marks first, which many languages share. A text without any, such as one
in lower case, is read by its words: the longest run of those that are neither function words nor usual words of a
question. No model runs, and equal texts have equal subjects.

Not promised: that the subject is the right one. Function words are English and the commonest of some neighbours', and a
text in a script without spaces has no subject.
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
"""Words that may stand inside a name, whatever its case."""

VERB_PREPOSITIONS = _word_set("in on for to with from at by into as")

NAME_CONNECTORS = NAME_PARTICLES | _word_set("in on for to with from at")
"""Words that may stand between the capitals of a name."""

FUNCTION_WORDS = NAME_CONNECTORS | _word_set(
    # questions
    "what what's whats which who who's whos whom whose when where where's how why"
    # verbs that help
    " is are was were be been being am do does did done has have had having can could may might must shall should will"
    " would isn't aren't wasn't weren't doesn't didn't don't won't can't"
    # pronouns
    " i me my mine we us our ours you your yours he him his she her hers it its they them their theirs this that these"
    " those there here one ones someone something anyone anything"
    # the rest
    " by as into onto about over under between during before after since until within without through than then if or"
    " nor but not no so too very also just only any some all each every both either neither more most much many few"
    " other another such same own per via up down out off again"
    # what asks for an answer
    " please mean means tell give show name list say explain describe write complete find know called named"
    # of other languages
    " ist wer was wo wann wie warum welche welcher welches ein eine einer en est qui que quoi où quand comment quel"
    " quelle un une es quién qué dónde cuándo cómo cuál una"
)
"""Words that say nothing of what a text is about."""


NAME_SEPARATORS = " .&-\u2013/:'\u2019!,"
"""What may stand between the words of a name; the last of these only before another capital."""


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
        """Whether it has a capital in front, or a capital or a number in it."""
        return any(character.isupper() or character.isdigit() for character in self.text)


def extract_subject(text: str) -> str | None:
    """What a text is about; None where the rules find nothing."""
    request = extract_request(text).request
    quoted: list[str] = [next(filter(None, found.groups())).strip() for found in QUOTED_PATTERN.finditer(request)]
    if quoted and WORD_PATTERN.search(best := max(quoted, key=len)):
        return best
    words = [_Word(found[0], found.start(), found.end()) for found in WORD_PATTERN.finditer(request)]
    asking = FUNCTION_WORDS | template_words()
    found = (
        _longest_name_run(words, request, asking)
        or _longest_content_run(words, request, asking)
        or _longest_content_run(words, request, FUNCTION_WORDS)
    )
    if found is None or found == (0, len(words) - 1):
        return None  # nothing, or nothing else
    first, last = found
    return re.sub(r"['\u2019`][sS]?$", "", request[words[first].start : words[last].end])


def _longest_name_run(words: Sequence[_Word], request: str, question_words: frozenset[str]) -> tuple[int, int] | None:
    """The longest run of words with capitals or numbers, as the places of its first and last word."""
    if all(word.has_capital_or_digit or word.lower in FUNCTION_WORDS for word in words):
        words_marked = sum(word.has_capital_or_digit for word in words)
        if words_marked == len(words) or any(
            word.has_capital_or_digit and word.lower in FUNCTION_WORDS for word in words[1:]
        ):
            return None  # capitals throughout tell nothing
    best, rank = None, (False, 0)
    place = 0
    while place < len(words):
        if not _can_begin_name(words, place):
            place += 1
            continue
        last = _find_name_end(words, request, place, question_words)
        run = words[place : last + 1]
        # A capital at a sentence's beginning alone makes no name where there is another.
        sure = place > 0 or any(word.has_capital_or_digit for word in run[1:]) or any(map(str.isdigit, run[0].text))
        length = (sure, words[last].end - words[place].start)
        if length > rank and not all(word.text.isdigit() for word in run):
            best, rank = (place, last), length
        place = last + 1
    return best


def _can_begin_name(words: Sequence[_Word], index: int) -> bool:
    """Whether a name may begin here: the first word of a sentence has its capital for another reason."""
    word = words[index]
    if not word.has_capital_or_digit or word.lower == "i":
        return False
    if index > 0 or word.lower not in FUNCTION_WORDS:
        return True
    return word.lower in ARTICLES and len(words) > 1 and words[1].has_capital_or_digit


def _find_name_end(words: Sequence[_Word], request: str, first: int, question_words: frozenset[str]) -> int:
    """The place of the last word of the name that begins here, with the plain words of its kind after it."""
    last, place = first, first + 1
    while place < len(words):
        word, between = words[place], request[words[place - 1].end : words[place].start]
        if between.strip(NAME_SEPARATORS) or (not word.has_capital_or_digit and between.strip(NAME_SEPARATORS[:-1])):
            break
        if word.has_capital_or_digit:
            last = place
        elif word.lower not in NAME_CONNECTORS or place - last > 2:
            break
        place += 1
    if words[last].is_possessive and last > first:
        return last
    kind = last
    while kind + 1 < len(words) and not (
        words[kind + 1].without_possessive in question_words or words[kind + 1].has_capital_or_digit
    ):
        if request[words[kind].end : words[kind + 1].start].strip():
            return kind
        kind += 1
    if kind > last and kind + 1 < len(words) and words[kind + 1].lower in VERB_PREPOSITIONS:
        kind -= 1
    return kind


def _longest_content_run(words: Sequence[_Word], request: str, excluded: frozenset[str]) -> tuple[int, int] | None:
    """The longest run of words that are none of these; of equal ones the last."""
    best: tuple[int, int] | None = None
    place = 0
    while place < len(words):
        if words[place].without_possessive in excluded:
            place += 1
            continue
        last, following = place, place + 1
        while following < len(words):
            if request[words[following - 1].end : words[following].start].strip(" .&-\u2013/"):
                break
            lower = words[following].without_possessive
            if lower not in excluded:
                last = following
            elif lower not in NAME_PARTICLES or following - last > 2:
                break
            following += 1
        if best is None or last - place >= best[1] - best[0]:
            best = place, last
        place = last + 1
    return best
