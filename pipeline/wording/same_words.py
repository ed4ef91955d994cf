"""An index of wordings by their words: a prompt in the same words as a correction matches at any distance.

A line break at the end, capitals, a typo or a greeting in front move a query. At some layers they move it out of every
radius that excludes other requests, although the prompt asks for the same. So if no entry serves a prompt by distance,
an entry with the same words does.

Definitions:

1. Two wordings have the same words if the same words and signs occur in the same order. Capitals, "the", quotation
   marks, commas, marks at the end of a word, and typos make no difference.
2. A typo swaps two neighbouring letters, doubles a letter, or drops one of a double letter. The longer word must have
   at least `MIN_TYPO_LETTERS` ASCII letters. Two common words, and pairs in `words/confusable.txt` such as "form" and
   "from", are not typos of each other.
3. A wording that begins with `ELLIPSIS` has the same words as no other: text around its request may change its meaning.

Not promised:

- A typo that drops a single letter is not recognised: "Johnson" and "Johnston" are different names.
- Words that differ only in a capital count as the same, even with different meanings: "Turkey" and "turkey".
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
"""Words that make no difference."""

EDGE_PUNCTUATION = "\"'\u201c\u201d\u2018\u2019\u00ab\u00bb,;:\u00bf\u00a1"
"""Signs at the beginning or end of a word that make no difference."""

FINAL_PUNCTUATION = ".?\u2026\u3002\uff1f\uff01"
"""Marks at the end of a word that make no difference. Neither does "!", except after a number: 5! is 120."""


class SameWordsIndex:
    """Named wordings, found by another wording with the same words."""

    def __init__(self) -> None:
        self._wordings: dict[str, tuple[str, ...]] = {}
        self._names_by_hash: dict[int, set[str]] = {}
        """Names by the hash of their wordings (`_words_hash`)."""

    def __len__(self) -> int:
        return len(self._wordings)

    def upsert(self, name: str, *wordings: str) -> None:
        """Set the wordings of a name. Wordings that cannot be compared are skipped."""
        self.remove(name)
        comparable = tuple(wording for wording in wordings if is_comparable(wording))
        if comparable:
            self._wordings[name] = comparable
            for words_hash in set(map(_words_hash, comparable)):
                self._names_by_hash.setdefault(words_hash, set()).add(name)

    def remove(self, name: str) -> None:
        """Remove a name, if it is indexed."""
        for words_hash in set(map(_words_hash, self._wordings.pop(name, ()))):
            self._names_by_hash[words_hash].remove(name)
            if not self._names_by_hash[words_hash]:
                del self._names_by_hash[words_hash]

    def find(self, wording: str, limit: int | None = None) -> list[str]:
        """The sorted names with the same words as this wording; tries at most `limit` candidates."""
        if not self._wordings or not is_comparable(wording):
            return []
        names = sorted(self._names_by_hash.get(_words_hash(wording), ()))[:limit]
        return [
            name for name in names if any(have_same_words(candidate, wording) for candidate in self._wordings[name])
        ]


def is_comparable(wording: str) -> bool:
    """True if another wording can have the same words: it is not empty and has no `ELLIPSIS` in front."""
    return bool(wording) and not wording.startswith(ELLIPSIS)


def have_same_words(one: str, other: str) -> bool:
    """True if two wordings have the same words (module docstring) and do not disagree."""
    if not (is_comparable(one) and is_comparable(other)):
        return False
    if one == other:
        return True
    words, other_words = _normalize_words(one), _normalize_words(other)
    return (
        len(words) == len(other_words)
        and all(
            word == other_word or _is_typo(word, other_word)
            for word, other_word in zip(words, other_words, strict=True)
        )
        and not find_disagreement(one, other)
    )


def limits_radius(entry_wording: str, input_wording: str) -> bool:
    """True if an input limits an entry's radius: its wording agrees with the entry's, but not in the same words.

    If the wording disagrees, the wording check excludes the input. If it has the same words, the input asks for the
    same.
    """
    return wordings_agree(entry_wording, input_wording) and not have_same_words(entry_wording, input_wording)


@lru_cache(WORDING_CACHE_SIZE)
def _normalize_words(wording: str) -> tuple[str, ...]:
    """The words of a wording as they are compared: casefolded, accents composed, without ignored words and signs."""
    # Composed before casefolding, so that both forms of a letter fold alike, and after it, since folding may decompose.
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", wording).casefold())
    words = map(_normalize_word, plain.split())
    return tuple(word for word in words if word and word not in IGNORED_WORDS)


def _normalize_word(raw: str) -> str:
    """A word without signs at its edges and marks at its end; "!" stays after a number."""
    word = raw.strip(EDGE_PUNCTUATION)
    plain = word.rstrip(FINAL_PUNCTUATION + EDGE_PUNCTUATION + "!")
    marks_factorial = "!" in word[len(plain) :] and plain and not plain[-1].isalpha()
    return word.rstrip(FINAL_PUNCTUATION) if marks_factorial else plain


def _words_hash(wording: str) -> int:
    """A hash that is equal for wordings with the same words: no typo changes the set of letters of a word."""
    return hash(tuple(map(_letter_signature, _normalize_words(wording))))


def _letter_signature(word: str) -> str:
    """The sorted set of letters of a word that may contain a typo; another word itself.

    A word may be one letter shorter than `MIN_TYPO_LETTERS`, as a typo of a longer one.
    """
    return "".join(sorted(set(word))) if len(word) >= MIN_TYPO_LETTERS - 1 and _is_ascii_word(word) else word


def _is_ascii_word(word: str) -> bool:
    return word.isascii() and word.isalpha()


def _is_typo(one: str, other: str) -> bool:
    """True if one of two different words may be a typo of the other."""
    shorter, longer = sorted((one, other), key=len)
    if len(longer) < MIN_TYPO_LETTERS or not (_is_ascii_word(shorter) and _is_ascii_word(longer)):
        return False
    if {one, other} <= common_words() or tuple(sorted((one, other))) in confusable_pairs():
        return False
    first_difference = next(
        (index for index, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter)
    )
    if len(shorter) == len(longer):
        is_swap = (
            shorter[first_difference : first_difference + 2] == longer[first_difference : first_difference + 2][::-1]
        )
        return is_swap and shorter[first_difference + 2 :] == longer[first_difference + 2 :]
    repeats_letter = first_difference > 0 and longer[first_difference] == longer[first_difference - 1]
    return (
        len(longer) == len(shorter) + 1
        and repeats_letter
        and shorter[first_difference:] == longer[first_difference + 1 :]
    )
