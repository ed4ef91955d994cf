"""Requests in the same words as a correction: a prompt that asks them is served, however far its query lies.

A line break at the end, capitals, a typo or a greeting in front move a query. At some layers they move it out of any
radius that keeps other requests out, though the prompt asks for the same. So where no entry serves a prompt by
distance, one whose wording has the same words does.

1. Two wordings have the same words where the same words and signs stand in the same order. Capitals, "the", quotation
   marks, commas and marks at a word's end make no difference, and neither do typos.
2. A typo swaps two neighbouring letters, or doubles one or leaves one of two out, in a word of at least `TYPO` ASCII
   letters. Two words that are both known are no typos of each other (`words/confusable.txt`): "form" and "from".
3. A wording with `ELLIPSIS` in front has the same words as none: what stands around its request may change it.

Not promised: that a typo that leaves out a letter is found. "Johnson" and "Johnston" are different names. Nor that
words of which only a capital tells two meanings apart, "Turkey" and "turkey", are different ones.
"""

import unicodedata
from functools import lru_cache

from gracestream.pipeline.wording.comparison import (
    CACHED,
    ELLIPSIS,
    TYPO,
    agrees,
    common_words,
    confusable,
    disagreement,
)

IGNORED = frozenset({"the"})
EDGES = "\"'\u201c\u201d\u2018\u2019\u00ab\u00bb,;:\u00bf\u00a1"
"""Signs at the edges of a word that make no difference."""
ENDS = ".?\u2026\u3002\uff1f\uff01"
"""Marks at the end of a word that make no difference; "!" does not either, except after a number."""


class SameWords:
    """Wordings under names, found by another wording that has the same words."""

    def __init__(self) -> None:
        self._wordings: dict[str, tuple[str, ...]] = {}
        self._names: dict[int, set[str]] = {}
        """By the hash of what wordings with the same words have in common."""

    def __len__(self) -> int:
        return len(self._wordings)

    def put(self, name: str, *wordings: str) -> None:
        """Keep wordings under a name, in place of those that it had. Empty ones are left out."""
        self.drop(name)
        kept = tuple(wording for wording in wordings if comparable(wording))
        if kept:
            self._wordings[name] = kept
            for common in set(map(_common, kept)):
                self._names.setdefault(common, set()).add(name)

    def drop(self, name: str) -> None:
        """Forget a name, if it is known."""
        for common in set(map(_common, self._wordings.pop(name, ()))):
            self._names[common].remove(name)
            if not self._names[common]:
                del self._names[common]

    def named(self, wording: str, most: int | None = None) -> list[str]:
        """The names with the same words as this wording, sorted; of more than `most` candidates the first are tried."""
        if not self._wordings or not comparable(wording):
            return []
        names = sorted(self._names.get(_common(wording), ()))[:most]
        return [name for name in names if any(same_words(one, wording) for one in self._wordings[name])]


def comparable(wording: str) -> bool:
    """Whether another wording may have the same words as this one."""
    return bool(wording) and not wording.startswith(ELLIPSIS)


def same_words(one: str, other: str) -> bool:
    """Whether two wordings have the same words."""
    if not (comparable(one) and comparable(other)):
        return False
    if one == other:
        return True
    ours, theirs = _words(one), _words(other)
    return (
        len(ours) == len(theirs)
        and all(a == b or _mistyped(a, b) for a, b in zip(ours, theirs, strict=True))
        and not disagreement(one, other)
    )


def bounds_radius(wording: str, kept: str) -> bool:
    """Whether an entry must keep clear of an input: its wording agrees, and does not have the same words anyway."""
    return agrees(wording, kept) and not same_words(wording, kept)


@lru_cache(CACHED)
def _words(wording: str) -> tuple[str, ...]:
    """What is compared: in one case, with accents as they are."""
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", wording).casefold())
    words = map(_word, plain.split())
    return tuple(word for word in words if word and word not in IGNORED)


def _word(raw: str) -> str:
    word = raw.strip(EDGES)
    plain = word.rstrip(ENDS + EDGES + "!")
    number = "!" in word[len(plain) :] and plain and not plain[-1].isalpha()
    return word.rstrip(ENDS) if number else plain


def _common(wording: str) -> int:
    """Of the same words the same number: no typo changes which letters a word has."""
    return hash(tuple(map(_letters, _words(wording))))


def _letters(word: str) -> str:
    return "".join(sorted(set(word))) if len(word) >= TYPO - 1 and _typed(word) else word


def _typed(word: str) -> bool:
    return word.isascii() and word.isalpha()


def _mistyped(one: str, other: str) -> bool:
    """Whether one of two different words may be a typo of the other."""
    short, long = sorted((one, other), key=len)
    if len(long) < TYPO or not (_typed(short) and _typed(long)):
        return False
    if {one, other} <= common_words() or tuple(sorted((one, other))) in confusable():
        return False
    start = next((place for place, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) == len(long):
        swapped = short[start : start + 2] == long[start : start + 2][::-1]
        return swapped and short[start + 2 :] == long[start + 2 :]
    doubled = start > 0 and long[start] == long[start - 1]
    return len(long) == len(short) + 1 and doubled and short[start:] == long[start + 1 :]
