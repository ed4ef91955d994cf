"""The part of a prompt that asks, by rules on its text: the last sentence, without a frame around it.

Context before the request, an instruction after it, and a frame such as "Question: ... Answer:" ask for nothing
themselves. No model runs, and equal texts have equal requests.

Not promised: that it is the right sentence. What announces a question or instructs is known by English words.
"""

import re
from dataclasses import dataclass

MAX_READ_CHARACTERS = 4000
"""Characters from the end of a text that are read."""

MAX_ANNOUNCEMENT_CHARACTERS = 64
"""Characters at the end in which an announcement of the answer is looked for."""

MAX_SENTENCES = 64
"""Sentences from the end that are looked at."""

WORD_PATTERN = re.compile(r"[^\W_]+(?:['\u2019`.&/+-][^\W_]+)*[+#]*")
"""A word, with what stands inside it."""

ABBREVIATION_PATTERN = re.compile(r"(?:^|[\s.])(?:[^\W\d_]|[A-Z][a-z]{1,2})$")
"""What stands before a full stop that ends no sentence: an initial, or the short form of a title."""

SENTENCE_END_PATTERN = re.compile(r"(?<![.!?…])[.!?…]++[\"”\u2019')\]]*(?=\s)|[。\uff1f\uff01]|\n+")
"""Where a sentence may end."""

ANSWER_LABEL_PATTERN = re.compile(
    r"(?:(?<=[.!?…。\uff1f\uff01\"”\u2019])\s*|\n\s*)[^\W\d_]+\s*:\s*$|\s+(?:answer|a|response|assistant)\s*:\s*$",
    re.IGNORECASE,
)
"""A word that announces the answer, at the end of a prompt."""

QUESTION_LABEL_PATTERN = re.compile(r"\s*[^\W\d_]+\s*:\s+")
"""A word that announces the question."""

QUESTION_LABELS = frozenset(
    {"question", "q", "input", "user", "prompt", "query", "request", "human", "instruction", "task"}
)

BACK_REFERENCES = frozenset(
    {"it", "they", "he", "she", "this", "that", "these", "those", "its", "their", "his", "her", "there"}
)
"""Words that begin a sentence which says of what the one before was about."""

INSTRUCTION_WORDS = frozenset(
    {"answer", "reply", "respond", "please", "be", "give", "use", "keep", "write", "explain", "say", "thanks", "thank"}
)
"""Words that begin an instruction, which may follow a question."""


@dataclass(frozen=True, slots=True)
class ExtractedRequest:
    """The part of a text that asks: all of it is `before + request + after`, for which a frame may stand around."""

    before: str
    request: str
    after: str

    def replace_request(self, replacement: str) -> str:
        """The same text with another request in the place of this one."""
        return f"{self.before}{replacement}{self.after}"


def extract_request(text: str) -> ExtractedRequest:
    """The last sentence of more than two words, without a frame such as "Question: ... Answer:"."""
    far = max(len(text) - MAX_READ_CHARACTERS, 0)
    announced = _find_answer_label(text, far)
    end = len(text) if announced is None else announced.start()
    start, end = _last_sentence(text, far, end)
    label = QUESTION_LABEL_PATTERN.match(text, start, end)
    if label is not None and (announced is not None or label[0].strip(" \t\n:").lower() in QUESTION_LABELS):
        start = label.end()
    inner = text[start:end]
    start += len(inner) - len(inner.lstrip())
    end = start + len(inner.strip())
    return ExtractedRequest(text[:start], text[start:end], text[end:])


def _find_answer_label(text: str, min_start: int) -> re.Match[str] | None:
    """The word that announces the answer; it is looked for in a few characters, since white space may be long."""
    end = len(text.rstrip())
    return (
        ANSWER_LABEL_PATTERN.search(text, max(min_start, end - MAX_ANNOUNCEMENT_CHARACTERS))
        if text[end - 1 : end] == ":"
        else None
    )


def _last_sentence(text: str, min_start: int, end: int) -> tuple[int, int]:
    """From the last sentence on that has more than two words, points back to none before it, and does not instruct."""
    ends = [min_start]
    for found in SENTENCE_END_PATTERN.finditer(text, min_start, end):
        after = text[found.end() :].lstrip()[:1]
        if found[0].startswith((".", "!", "…")) and (
            after.islower() or ABBREVIATION_PATTERN.search(text, ends[-1], found.start())
        ):
            continue
        ends.append(found.end())
    stop = end
    for start in reversed(ends[-MAX_SENTENCES:]):
        words = WORD_PATTERN.findall(text, start, stop)
        if len(words) <= 2:
            continue
        first = words[0].lower()
        if first in INSTRUCTION_WORDS and "?" in text[min_start:start]:
            stop = end = start
            continue
        if first not in BACK_REFERENCES:
            return start, stop if len(WORD_PATTERN.findall(text, stop, end)) == 0 else end
        stop = start
    return min_start, end
