"""The request within a prompt, found by rules on the text: the last sentence that asks, without a frame around it.

Context before the request, an instruction after it, and a frame such as "Question: ... Answer:" are not part of it.

Guarantees:

1. Equal texts have equal requests. No model is involved.
2. Nothing is lost: the text is the concatenation of the parts before, within and after the request.

Not promised: that the right sentence is found. Labels and instructions are recognised by English words.
"""

import re
from dataclasses import dataclass

MAX_READ_CHARACTERS = 4000
"""Characters at the end of a text that are searched. This bounds the time for long texts."""

MAX_ANNOUNCEMENT_CHARACTERS = 64
"""Characters at the end of a text that are searched for a label of the answer."""

MAX_SENTENCES = 64
"""Sentences at the end of a text that are considered."""

WORD_PATTERN = re.compile(r"[^\W_]+(?:['\u2019`.&/+-][^\W_]+)*[+#]*")
"""A word, including signs inside it such as apostrophes and hyphens."""

ABBREVIATION_PATTERN = re.compile(r"(?:^|[\s.])(?:[^\W\d_]|[A-Z][a-z]{1,2})$")
"""Text before a full stop that does not end a sentence: an initial or an abbreviated title."""

SENTENCE_END_PATTERN = re.compile(r"(?<![.!?…])[.!?…]++[\"”\u2019')\]]*(?=\s)|[。\uff1f\uff01]|\n+")
"""A possible end of a sentence."""

ANSWER_LABEL_PATTERN = re.compile(
    r"(?:(?<=[.!?…。\uff1f\uff01\"”\u2019])\s*|\n\s*)[^\W\d_]+\s*:\s*$|\s+(?:answer|a|response|assistant)\s*:\s*$",
    re.IGNORECASE,
)
"""A label of the answer at the end of a prompt, such as "Answer:"."""

QUESTION_LABEL_PATTERN = re.compile(r"\s*[^\W\d_]+\s*:\s+")
"""A label of the question, such as "Question:"."""

QUESTION_LABELS = frozenset(
    {"question", "q", "input", "user", "prompt", "query", "request", "human", "instruction", "task"}
)

BACK_REFERENCES = frozenset(
    {"it", "they", "he", "she", "this", "that", "these", "those", "its", "their", "his", "her", "there"}
)
"""First words of sentences that refer back to the sentence before."""

INSTRUCTION_WORDS = frozenset(
    {"answer", "reply", "respond", "please", "be", "give", "use", "keep", "write", "explain", "say", "thanks", "thank"}
)
"""First words of instructions. An instruction may follow a question."""


@dataclass(frozen=True, slots=True)
class ExtractedRequest:
    """The request of a text. The whole text is `before + request + after`."""

    before: str
    request: str
    after: str

    def replace_request(self, replacement: str) -> str:
        """The text with another request in place of this one."""
        return f"{self.before}{replacement}{self.after}"


def extract_request(text: str) -> ExtractedRequest:
    """The request of a text: the last sentence of more than two words, without a frame.

    1. Remove a label of the answer at the end.
    2. Find the last sentence that asks (`_last_sentence`).
    3. Remove a label of the question in front of it. Any word with a colon counts if step 1 found a label.
    """
    search_start = max(len(text) - MAX_READ_CHARACTERS, 0)
    answer_label = _find_answer_label(text, search_start)
    end = len(text) if answer_label is None else answer_label.start()
    start, end = _last_sentence(text, search_start, end)
    label = QUESTION_LABEL_PATTERN.match(text, start, end)
    if label is not None and (answer_label is not None or label[0].strip(" \t\n:").lower() in QUESTION_LABELS):
        start = label.end()
    sentence = text[start:end]
    start += len(sentence) - len(sentence.lstrip())
    end = start + len(sentence.strip())
    return ExtractedRequest(text[:start], text[start:end], text[end:])


def _find_answer_label(text: str, min_start: int) -> re.Match[str] | None:
    """The label of the answer, or None. Only a few characters are searched: white space may be long."""
    end = len(text.rstrip())
    return (
        ANSWER_LABEL_PATTERN.search(text, max(min_start, end - MAX_ANNOUNCEMENT_CHARACTERS))
        if text[end - 1 : end] == ":"
        else None
    )


def _last_sentence(text: str, min_start: int, end: int) -> tuple[int, int]:
    """Start and end of the last sentence that asks.

    The search runs backwards from `end`. An instruction after a question is cut off. A sentence of at most two words,
    or with a reference back, is joined to the sentence before it.
    """
    sentence_starts = [min_start]
    for boundary in SENTENCE_END_PATTERN.finditer(text, min_start, end):
        next_character = text[boundary.end() :].lstrip()[:1]
        if boundary[0].startswith((".", "!", "…")) and (
            next_character.islower() or ABBREVIATION_PATTERN.search(text, sentence_starts[-1], boundary.start())
        ):
            continue
        sentence_starts.append(boundary.end())
    stop = end
    for start in reversed(sentence_starts[-MAX_SENTENCES:]):
        words = WORD_PATTERN.findall(text, start, stop)
        if len(words) <= 2:
            continue
        first_word = words[0].lower()
        if first_word in INSTRUCTION_WORDS and "?" in text[min_start:start]:
            stop = end = start
            continue
        if first_word not in BACK_REFERENCES:
            return start, stop if len(WORD_PATTERN.findall(text, stop, end)) == 0 else end
        stop = start
    return min_start, end
