"""The sieve: which points lie near a query, nearly without a look at the others (design, section 4, Lookup).

It looks through the keys of a codebook, whose radii are their reach, and through whatever else is to be found by place.
Here a point with its reach is a key with its ball.

Most queries lie in no ball, and to know that, one need not find the nearest key: it is enough that no ball reaches the
query. Each key is mapped to a point of few numbers: its projections on some orthonormal directions, and the length of
what is left of it beside them. Such a map never lengthens, so what is farther than a ball's radius there is farther in
truth. The points are kept as codes of one byte a number. A query reads the codes in the first `FIRST` directions of
every key, and of the few keys that are left the codes in all directions. Where they are not few, it takes the product
with all of these codes, and where those too rule little out, with the keys.

What it guarantees: no key that covers a query is ever left out. Which directions were chosen cannot be seen in any
answer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gracestream.pipeline.search.projection import CHUNK, Directions
from gracestream.pipeline.search.quantized_bounds import Asked, Codes, Keys, Products

FIRST = 63
"""Directions that every key is looked at in: with the length beside them 64 bytes, a line of the cache."""

FEW = 16
"""Keys are few where there are so many times as many in all; so many are worth no further code."""

MOST = 4
"""Codes that leave more than one key in so many tell too little."""

NEAR = 0.1
"""Share of keys whose radius is raised to that of the next. With more, queries amid many small balls find too many keys
that might be nearest though no ball holds them; with less, each hit needs a second look."""

SAMPLE = 2048
"""Keys that the directions are fitted to, at most."""

REFIT = 4
"""Directions are fitted anew where there are so many times as many keys as when they were."""


Distances = Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]]
"""The exact distances from queries, by their places among those asked about, to the keys of some slots."""


class Sieve:
    """A sieve over keys. Call `changed` with the slots that hold something new; the work is done at the next query.

    Args:
        held: Gives the keys (N, D) and their radii (N), float32, as they are now.
    """

    def __init__(self, held: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        self._held = held
        self._directions = Directions(np.empty((0, 1)))
        self._fitted = 0
        self._levels: dict[int, Codes] = {}
        """By the number of directions, fewest first."""
        self._keys = Keys()
        self.near = 0.0
        """A distance: keys so near to a query count as if their balls held it, whatever their radii."""
        self._stale: set[int] | None = None
        """Slots that hold something new; None: all of them."""

    def changed(self, slots: Collection[int] | None) -> None:
        """Slots that hold something new; None: everything is new."""
        if slots is None:
            self._stale = None
        elif self._stale is not None:
            self._stale.update(slots)

    def settle(self) -> None:
        """Take in what changed."""
        count = len(self._held()[0])
        with np.errstate(all="ignore"):
            if self._stale is None or count >= REFIT * self._fitted:
                self._fit()
            elif stale := [slot for slot in self._stale if slot < count]:
                self._write(np.array(stale))
        self._stale = set()

    def covering(self, queries_BD: np.ndarray, slack: float = 0.0) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which every one whose ball holds it is one.

        `slack` is added to every radius.
        """
        return self._left(queries_BD, Asked(np.full(len(queries_BD), slack, np.float32)))

    def few_covering(self, query_D: np.ndarray, most: int) -> np.ndarray | None:
        """As `covering`, by the codes alone; None where they leave more than `most` slots."""
        (found,) = self._by_codes(self._mapped(query_D[None]), Asked(np.zeros(1, np.float32)))
        return None if found is None or len(found) > most else found

    def serving(self, queries_BD: np.ndarray, distances: Distances) -> tuple[list[np.ndarray], set[int]]:
        """For each query, in ascending order, slots of which the nearest key's is one if its ball holds the query.

        And likewise if it lies no farther than `near`; and, of the queries named besides, in any case. Where many balls
        hold a query, `distances` is asked how far some of their keys are.
        """
        points = self._mapped(queries_BD)
        found = self._by_codes(points, Asked(np.zeros(len(queries_BD), np.float32)))
        if many := {row: slots for row, slots in enumerate(found) if slots is not None and len(slots) > FEW}:
            _put(found, list(many), self._nearer(points.rows(list(many)), many, distances))
        return self._nearest(queries_BD, found)

    def within(self, queries_BD: np.ndarray, distances_B: np.ndarray) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which every one whose key lies within its distance is one."""
        return self._left(queries_BD, Asked(np.zeros(len(queries_BD), np.float32), distances_B.astype(np.float32)))

    def nearest(self, queries_BD: np.ndarray, distances_B: np.ndarray) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which the nearest key's is one if it lies within a distance."""
        asked = Asked(np.zeros(len(queries_BD), np.float32), distances_B.astype(np.float32))
        return self._nearest(queries_BD, self._by_codes(self._mapped(queries_BD), asked))[0]

    def close(self, query_D: np.ndarray, count: int) -> np.ndarray:
        """So many slots whose keys look nearest in a few directions, or all of few; nothing is said of the others."""
        self.settle()
        slots = np.arange(len(self._held()[0]))
        if len(slots) <= max(count, FEW):
            return slots
        few, codes = next(iter(self._levels.items()))
        with np.errstate(all="ignore"):
            return codes.closest([slots], self._mapped(query_D[None]).in_few(few), count)[0]

    def _fit(self) -> None:
        """Choose directions, and map every key."""
        keys_ND, radii_N = self._held()
        self._fitted = count = len(keys_ND)
        if not count:
            return
        sample_MD = keys_ND[:: -(-count // SAMPLE)]
        self._directions = Directions(sample_MD)
        self.near = float(np.quantile(radii_N, NEAR)) if np.isfinite(radii_N).all() else 0.0
        self._levels = {few: Codes() for few in sorted({min(FIRST, len(self._directions)), len(self._directions)})}
        for few, codes in self._levels.items():
            codes.fit(self._directions.project(sample_MD, few)[0])
        for start in range(0, count, CHUNK):
            self._write(np.arange(start, min(start + CHUNK, count)))

    def _write(self, slots_M: np.ndarray) -> None:
        keys_ND, radii_N = self._held()
        keys_MD, radii_M = keys_ND[slots_M], np.maximum(radii_N[slots_M], np.float32(self.near))
        mapped_MP, slack_M = self._directions.project(keys_MD, len(self._directions))
        for few, codes in self._levels.items():
            codes.write(slots_M, Directions.fewer(mapped_MP, few), slack_M, radii_M)
        self._keys.write(slots_M, keys_MD, self._directions.center_D)

    def _left(self, queries_BD: np.ndarray, asked: Asked) -> list[np.ndarray]:
        """Every slot that cannot be ruled out."""
        found = self._by_codes(self._mapped(queries_BD), asked)
        keys_ND, radii_N = self._held()
        if some := _unknown(found, len(keys_ND)):
            with np.errstate(all="ignore"):
                products = Products(keys_ND, self._directions.center_D, queries_BD[some])
                _put(found, some, self._keys.reaching(products, radii_N, asked.rows(some), len(keys_ND) // MOST))
        return [np.arange(len(keys_ND)) if slots is None else slots for slots in found]

    def _nearest(self, queries_BD: np.ndarray, found: list[np.ndarray | None]) -> tuple[list[np.ndarray], set[int]]:
        """Where the codes tell too little, the slots that may be those of the nearest keys; and where that was."""
        keys_ND = self._held()[0]
        if some := _unknown(found, len(keys_ND)):
            with np.errstate(all="ignore"):
                products = Products(keys_ND, self._directions.center_D, queries_BD[some])
                _put(found, some, self._keys.nearest(products, len(keys_ND) // MOST))
        return [np.arange(len(keys_ND)) if slots is None else slots for slots in found], set(some)

    def _mapped(self, queries_BD: np.ndarray) -> "_Points":
        """The queries as points, in all directions; in none where keys are so few that no codes are asked."""
        self.settle()
        if len(self._held()[0]) <= FEW:
            return _Points(np.empty((len(queries_BD), 0), np.float32), np.zeros(len(queries_BD), np.float32))
        with np.errstate(all="ignore"):
            return _Points(*self._directions.project(queries_BD, len(self._directions)))

    def _by_codes(self, points: "_Points", asked: Asked) -> list[np.ndarray | None]:
        """The slots that the codes leave; None: too many."""
        count = len(self._held()[0])
        found: list[np.ndarray | None] = [None] * len(points.slack_B)
        with np.errstate(all="ignore"):
            for few, codes in self._levels.items() if count > FEW else ():
                if some := [row for row, slots in enumerate(found) if slots is None or len(slots) > FEW]:
                    left = points.rows(some)
                    self._ask(codes, left.in_few(few), asked.rows(some).looser(left.slack_B), found, some)
        return found

    def _nearer(self, points: "_Points", slots: dict[int, np.ndarray], distances: Distances) -> list[np.ndarray]:
        """For each query those of its slots whose key may be no farther than the nearest of some of them."""
        few, codes = next(reversed(self._levels.items()))
        points_BP = points.in_few(few)
        with np.errstate(all="ignore"):
            closest = codes.closest(list(slots.values()), points_BP, FEW)
            far = distances(dict(zip(slots, closest, strict=True)))
            least_B = np.array([far[row].min() for row in slots])
            return codes.left(list(slots.values()), points_BP, Asked(points.slack_B, least_B))

    def _ask(
        self, codes: Codes, points_BP: np.ndarray, asked: Asked, found: list[np.ndarray | None], rows: list[int]
    ) -> None:
        """Keep of what was found in these rows what codes leave: of a few slots these alone are looked at."""
        count = len(self._held()[0])
        few = {place: slots for place, row in enumerate(rows) if (slots := found[row]) is not None}
        few = {place: slots for place, slots in few.items() if len(slots) * FEW <= count}
        if every := [place for place in range(len(rows)) if place not in few]:
            left = codes.reaching(points_BP[every], asked.rows(every), count, max(FEW, count // MOST))
            _put(found, [rows[place] for place in every], left)
        if some := list(few):
            kept = codes.left(list(few.values()), points_BP[some], asked.rows(some))
            _put(found, [rows[place] for place in some], kept)


@dataclass(frozen=True, slots=True)
class _Points:
    """B queries as points in all directions, and how far each may lie from the truth."""

    mapped_BP: np.ndarray
    slack_B: np.ndarray

    def rows(self, kept: list[int]) -> "_Points":
        return _Points(self.mapped_BP[kept], self.slack_B[kept])

    def in_few(self, few: int) -> np.ndarray:
        """The points in so many directions."""
        return Directions.fewer(self.mapped_BP, few)


def _unknown(found: Sequence[np.ndarray | None], count: int) -> list[int]:
    """The rows of which the codes tell too little; of so few keys that nobody asked them, none."""
    return [row for row, slots in enumerate(found) if slots is None] if count > FEW else []


def _put(found: list[np.ndarray | None], rows: list[int], left: Sequence[np.ndarray | None]) -> None:
    for row, slots in zip(rows, left, strict=True):
        found[row] = slots
