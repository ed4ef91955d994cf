"""Requests in the same words as a correction: a prompt that asks them is served, however far its query lies.

A line break at the end, capitals, a typo or a greeting in front move a query, and at some layers out of any radius that
keeps other requests out. But such a prompt asks for the same. So where no entry serves a prompt by distance, one whose
wording has the same words does.

1. Two wordings have the same words where their words are the same in order, but for articles and typos, and nothing
   else tells them apart (`pipeline.wording.disagreement`).
2. A typo swaps two neighbouring letters, or doubles one or leaves one of two out, in a word of at least `TYPO` letters.
   Two words of which requests commonly consist are no typos of each other: "form" and "from".
3. A wording with `ELLIPSIS` in front has the same words as none: what stands around its request may change it.

Not promised: that a typo that leaves out a letter is found. "Johnson" and "Johnston" are different names.
"""

from pipeline.wording import ELLIPSIS, TYPO, agrees, common_words, disagreement, parsed

ARTICLES = frozenset({"a", "an", "the"})


class SameWords:
    """Wordings under names, found by another wording that has the same words."""

    def __init__(self) -> None:
        self._wordings: dict[str, tuple[str, ...]] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        """By the hash of what wordings with the same words have in common."""

    def __len__(self) -> int:
        return len(self._wordings)

    def put(self, name: str, *wordings: str) -> None:
        """Keep wordings under a name, in place of those that it had. Empty ones are left out."""
        self.drop(name)
        kept = tuple(wording for wording in wordings if comparable(wording))
        if kept:
            self._wordings[name] = kept
            for common in {_common(wording) for wording in kept}:
                self._names[common] = (*self._names.get(common, ()), name)

    def drop(self, name: str) -> None:
        """Forget a name, if it is known."""
        for common in {_common(wording) for wording in self._wordings.pop(name, ())}:
            others = tuple(other for other in self._names[common] if other != name)
            if others:
                self._names[common] = others
            else:
                del self._names[common]

    def named(self, wording: str) -> list[str]:
        """The names with the same words as this wording, sorted."""
        if not self._wordings or not comparable(wording):
            return []
        names = self._names.get(_common(wording), ())
        return sorted(name for name in names if any(same_words(one, wording) for one in self._wordings[name]))


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


def _words(wording: str) -> list[str]:
    return [word for word in parsed(wording).words if word not in ARTICLES]


def _common(wording: str) -> int:
    """Of the same words the same number: no typo changes which letters a word has."""
    return hash(tuple(map(_letters, _words(wording))))


def _letters(word: str) -> str:
    return "".join(sorted(set(word))) if len(word) >= TYPO - 1 and word.isalpha() else word


def _mistyped(one: str, other: str) -> bool:
    """Whether one of two different words may be a typo of the other."""
    short, long = sorted((one, other), key=len)
    if len(long) < TYPO or not (short.isalpha() and long.isalpha()) or {one, other} <= common_words():
        return False
    start = next((place for place, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) == len(long):
        swapped = short[start : start + 2] == long[start : start + 2][::-1]
        return swapped and short[start + 2 :] == long[start + 2 :]
    return len(long) == len(short) + 1 and short[start:] == long[start + 1 :] and long[start] == long[start - 1]
