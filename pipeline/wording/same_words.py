"""Requests in the same words as a correction: a prompt that asks them is served, however far its query lies.

A line break at the end, capitals, a typo or a greeting in front move a query. At some layers they move it out of any
radius that keeps other requests out, though the prompt asks for the same. So where no entry serves a prompt by
distance, one whose wording has the same words does.

1. Two wordings have the same words where the same words and signs stand in the same order. Capitals, "the", quotation
   marks, commas and marks at a word's end make no difference, and neither do typos.
2. A typo swaps two neighbouring letters, or doubles one or leaves one of two out, in a word of at least
   `MIN_TYPO_LETTERS` ASCII letters. Two words that are both known are no typos of each other (`words/confusable.txt`):
   "form" and "from".
3. A wording with `ELLIPSIS` in front has the same words as none: what stands around its request may change it.

Not promised: that a typo that leaves out a letter is found. "Johnson" and "Johnston" are different names. Nor that
words of which only a capital tells two meanings apart, "Turkey" and "turkey", are different ones.
"""

import unicodedata
from functools import lru_cache

from gracestream.pipeline.wording.comparison import (
    ELLIPSIS,
    MIN_TYPO_LETTERS,
    WORDING_CACHE_SIZE,
    common_words,
    confusable_pairs,
    find_disagreement,
    wordings_agree,
)

IGNORED_WORDS = frozenset({"the"})
EDGE_PUNCTUATION = "\"'\u201c\u201d\u2018\u2019\u00ab\u00bb,;:\u00bf\u00a1"
"""Signs at the edges of a word that make no difference."""
FINAL_PUNCTUATION = ".?\u2026\u3002\uff1f\uff01"
"""Marks at the end of a word that make no difference; "!" does not either, except after a number."""


class SameWordsIndex:
    """Wordings under names, found by another wording that has the same words."""

    def __init__(self) -> None:
        self._wordings: dict[str, tuple[str, ...]] = {}
        self._names_by_hash: dict[int, set[str]] = {}
        """By the hash of what wordings with the same words have in common."""

    def __len__(self) -> int:
        return len(self._wordings)

    def upsert(self, name: str, *wordings: str) -> None:
        """Keep wordings under a name, in place of those that it had. Empty ones are left out."""
        self.remove(name)
        kept = tuple(wording for wording in wordings if is_comparable(wording))
        if kept:
            self._wordings[name] = kept
            for common in set(map(_words_hash, kept)):
                self._names_by_hash.setdefault(common, set()).add(name)

    def remove(self, name: str) -> None:
        """Forget a name, if it is known."""
        for common in set(map(_words_hash, self._wordings.pop(name, ()))):
            self._names_by_hash[common].remove(name)
            if not self._names_by_hash[common]:
                del self._names_by_hash[common]

    def find(self, wording: str, limit: int | None = None) -> list[str]:
        """The sorted names with the same words as this wording; tries at most `limit` candidates."""
        if not self._wordings or not is_comparable(wording):
            return []
        names = sorted(self._names_by_hash.get(_words_hash(wording), ()))[:limit]
        return [name for name in names if any(have_same_words(one, wording) for one in self._wordings[name])]


def is_comparable(wording: str) -> bool:
    """Whether another wording may have the same words as this one."""
    return bool(wording) and not wording.startswith(ELLIPSIS)


def have_same_words(one: str, other: str) -> bool:
    """Whether two wordings have the same words."""
    if not (is_comparable(one) and is_comparable(other)):
        return False
    if one == other:
        return True
    ours, theirs = _normalize_words(one), _normalize_words(other)
    return (
        len(ours) == len(theirs)
        and all(a == b or _is_typo(a, b) for a, b in zip(ours, theirs, strict=True))
        and not find_disagreement(one, other)
    )


def limits_radius(entry_wording: str, input_wording: str) -> bool:
    """Whether an entry must keep clear of an input: its wording agrees, and does not have the same words anyway."""
    return wordings_agree(entry_wording, input_wording) and not have_same_words(entry_wording, input_wording)


@lru_cache(WORDING_CACHE_SIZE)
def _normalize_words(wording: str) -> tuple[str, ...]:
    """What is compared: in one case, with accents as they are."""
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", wording).casefold())
    words = map(_normalize_word, plain.split())
    return tuple(word for word in words if word and word not in IGNORED_WORDS)


def _normalize_word(raw: str) -> str:
    word = raw.strip(EDGE_PUNCTUATION)
    plain = word.rstrip(FINAL_PUNCTUATION + EDGE_PUNCTUATION + "!")
    number = "!" in word[len(plain) :] and plain and not plain[-1].isalpha()
    return word.rstrip(FINAL_PUNCTUATION) if number else plain


def _words_hash(wording: str) -> int:
    """Of the same words the same number: no typo changes which letters a word has."""
    return hash(tuple(map(_letter_signature, _normalize_words(wording))))


def _letter_signature(word: str) -> str:
    return "".join(sorted(set(word))) if len(word) >= MIN_TYPO_LETTERS - 1 and _is_ascii_word(word) else word


def _is_ascii_word(word: str) -> bool:
    return word.isascii() and word.isalpha()


def _is_typo(one: str, other: str) -> bool:
    """Whether one of two different words may be a typo of the other."""
    short, long = sorted((one, other), key=len)
    if len(long) < MIN_TYPO_LETTERS or not (_is_ascii_word(short) and _is_ascii_word(long)):
        return False
    if {one, other} <= common_words() or tuple(sorted((one, other))) in confusable_pairs():
        return False
    start = next((place for place, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) == len(long):
        swapped = short[start : start + 2] == long[start : start + 2][::-1]
        return swapped and short[start + 2 :] == long[start + 2 :]
    doubled = start > 0 and long[start] == long[start - 1]
    return len(long) == len(short) + 1 and doubled and short[start:] == long[start + 1 :]
