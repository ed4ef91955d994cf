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

from pipeline.relations import usual_words


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LONGEST = 4000
"""Characters from the end of a text that are read."""

WORD = re.compile(r"[^\W_]+(?:['\u2019`.&/+-][^\W_]+)*[+#]*")
"""A word, with what stands inside it."""

INITIAL = re.compile(r"(?:^|[\s.])(?:[^\W\d_]|[A-Z][a-z]{1,2})$")
"""What stands before a full stop that ends no sentence: an initial, or the short form of a title."""

STOP = re.compile(r"[.!?…]+[\"”\u2019')\]]*(?=\s)|[。\uff1f\uff01]|\n+")
"""Where a sentence may end."""

ANSWER = re.compile(
    r"(?:(?<=[.!?…。\uff1f\uff01\"”\u2019])\s*|\n\s*)[^\W\d_]+\s*:\s*$|\s+(?:answer|a|response|assistant)\s*:\s*$",
    re.IGNORECASE,
)
"""A word that announces the answer, at the end of a prompt."""

LABEL = re.compile(r"\s*[^\W\d_]+\s*:\s+")
"""A word that announces the question."""

LABELS = frozenset({"question", "q", "input", "user", "prompt", "query", "request", "human", "instruction", "task"})

QUOTED = re.compile(
    r"\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|„([^“”]+)[“”]"
    r"|(?<!\w)[\u2018']([^\u2018\u2019']+(?:['\u2019]\w[^\u2018\u2019']*)*)[\u2019'](?!\w)"
)

ARTICLES = _words("the a an la le les el los il lo die der das")

OF = ARTICLES | _words("of and & de del della di da do dos du des den van von zu zur af av y e et und ibn bin al")
"""Words that may stand inside a name, whatever its case."""

AFTER_VERBS = _words("in on for to with from at by into as")

JOINING = OF | _words("in on for to with from at")
"""Words that may stand between the capitals of a name."""

FUNCTION = JOINING | _words(
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


BACK = _words("it they he she this that these those its their his her there")
"""Words that begin a sentence which says of what the one before was about."""

INSIDE = " .&-\u2013/:'\u2019!,"
"""What may stand between the words of a name; the last of these only before another capital."""


@dataclass(frozen=True, slots=True)
class Request:
    """The part of a text that asks: all of it is `before + request + after`, for which a frame may stand around."""

    before: str
    request: str
    after: str

    def asking(self, other: str) -> str:
        """The same text with another request in the place of this one."""
        return f"{self.before}{other}{self.after}"


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    start: int
    end: int

    @property
    def lower(self) -> str:
        return self.text.lower().replace("\u2019", "'")

    @property
    def plain(self) -> str:
        return self.lower.removesuffix("'s")

    @property
    def owner(self) -> bool:
        return self.lower.endswith("'s")

    @property
    def marked(self) -> bool:
        """Whether it has a capital in front, or a capital or a number in it."""
        return any(character.isupper() or character.isdigit() for character in self.text)


def request_in(text: str) -> Request:
    """The last sentence of more than two words, without a frame such as "Question: ... Answer:"."""
    far = max(len(text) - LONGEST, 0)
    announced = ANSWER.search(text, far)
    end = len(text) if announced is None else announced.start()
    start, end = _last_sentence(text, far, end)
    label = LABEL.match(text, start, end)
    if label is not None and (announced is not None or label[0].strip(" \t\n:").lower() in LABELS):
        start = label.end()
    inner = text[start:end]
    start += len(inner) - len(inner.lstrip())
    end = start + len(inner.strip())
    return Request(text[:start], text[start:end], text[end:])


def subject_of(text: str) -> str | None:
    """What a text is about; None where the rules find nothing."""
    request = request_in(text).request
    quoted: list[str] = [next(filter(None, found.groups())).strip() for found in QUOTED.finditer(request)]
    if quoted and WORD.search(best := max(quoted, key=len)):
        return best
    words = [_Word(found[0], found.start(), found.end()) for found in WORD.finditer(request)]
    asking = FUNCTION | usual_words()
    found = _names(words, request, asking) or _contents(words, request, asking) or _contents(words, request, FUNCTION)
    if found is None or found == (0, len(words) - 1):
        return None  # nothing, or nothing else
    first, last = found
    return re.sub(r"['\u2019`][sS]?$", "", request[words[first].start : words[last].end])


def _last_sentence(text: str, far: int, end: int) -> tuple[int, int]:
    """From the last sentence on that has more than two words and points back to none before it."""
    ends = [far]
    for found in STOP.finditer(text, far, end):
        after = text[found.end() :].lstrip()[:1]
        if found[0].startswith((".", "!", "…")) and (after.islower() or INITIAL.search(text, ends[-1], found.start())):
            continue
        ends.append(found.end())
    stop = end
    for start in reversed(ends):
        words = WORD.findall(text, start, stop)
        if len(words) > 2 and words[0].lower() not in BACK:
            return start, stop if len(WORD.findall(text, stop, end)) == 0 else end
        if len(words) > 2:
            stop = start
    return far, end


def _names(words: Sequence[_Word], request: str, asking: frozenset[str]) -> tuple[int, int] | None:
    """The longest run of words with capitals or numbers, as the places of its first and last word."""
    if all(word.marked or word.lower in FUNCTION for word in words):
        words_marked = sum(word.marked for word in words)
        if words_marked == len(words) or any(word.marked and word.lower in FUNCTION for word in words[1:]):
            return None  # capitals throughout tell nothing
    best, rank = None, (False, 0)
    place = 0
    while place < len(words):
        if not _begins(words, place):
            place += 1
            continue
        last = _end_of_name(words, request, place, asking)
        run = words[place : last + 1]
        # A capital at a sentence's beginning alone makes no name where there is another.
        sure = place > 0 or any(word.marked for word in run[1:]) or any(map(str.isdigit, run[0].text))
        length = (sure, words[last].end - words[place].start)
        if length > rank and not all(word.text.isdigit() for word in run):
            best, rank = (place, last), length
        place = last + 1
    return best


def _begins(words: Sequence[_Word], place: int) -> bool:
    """Whether a name may begin here: the first word of a sentence has its capital for another reason."""
    word = words[place]
    if not word.marked or word.lower == "i":
        return False
    if place > 0 or word.lower not in FUNCTION:
        return True
    return word.lower in ARTICLES and len(words) > 1 and words[1].marked


def _end_of_name(words: Sequence[_Word], request: str, first: int, asking: frozenset[str]) -> int:
    """The place of the last word of the name that begins here, with the plain words of its kind after it."""
    last, place = first, first + 1
    while place < len(words):
        word, between = words[place], request[words[place - 1].end : words[place].start]
        if between.strip(INSIDE) or (not word.marked and between.strip(INSIDE[:-1])):
            break
        if word.marked:
            last = place
        elif word.lower not in JOINING or place - last > 2:
            break
        place += 1
    if words[last].owner and last > first:
        return last
    kind = last
    while kind + 1 < len(words) and not (words[kind + 1].plain in asking or words[kind + 1].marked):
        if request[words[kind].end : words[kind + 1].start].strip():
            return kind
        kind += 1
    if kind > last and kind + 1 < len(words) and words[kind + 1].lower in AFTER_VERBS:
        kind -= 1
    return kind


def _contents(words: Sequence[_Word], request: str, not_these: frozenset[str]) -> tuple[int, int] | None:
    """The longest run of words that are none of these; of equal ones the last."""
    best: tuple[int, int] | None = None
    place = 0
    while place < len(words):
        if words[place].plain in not_these:
            place += 1
            continue
        last, following = place, place + 1
        while following < len(words):
            if request[words[following - 1].end : words[following].start].strip(" .&-\u2013/"):
                break
            lower = words[following].plain
            if lower not in not_these:
                last = following
            elif lower not in OF or following - last > 2:
                break
            following += 1
        if best is None or last - place >= best[1] - best[0]:
            best = place, last
        place = last + 1
    return best
