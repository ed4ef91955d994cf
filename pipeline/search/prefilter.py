"""The sieve: which points lie near a query, nearly without a look at the others (design, section 4, Lookup).

It looks through the keys of a codebook, whose radii are their reach, and through whatever else is to be found by place.
Here a point with its reach is a key with its ball.

Most queries lie in no ball, and to know that, one need not find the nearest key: it is enough that no ball reaches the
query. Each key is mapped to a point of few numbers: its projections on some orthonormal directions, and the length of
what is left of it beside them. Such a map never lengthens, so what is farther than a ball's radius there is farther in
truth. The points are kept as codes of one byte a number. A query reads the codes in the first `COARSE_DIMENSIONS`
directions of every key, and of the few keys that are left the codes in all directions. Where they are not few, it takes
the product with all of these codes, and where those too rule little out, with the keys.

What it guarantees: no key that covers a query is ever left out. Which directions were chosen cannot be seen in any
answer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gracestream.pipeline.search.projection import PROJECTION_CHUNK_ROWS, OrthonormalProjection
from gracestream.pipeline.search.quantized_bounds import BoundQuery, InnerProducts, Int8Codes, KeyNorms

COARSE_DIMENSIONS = 63
"""Directions that every key is looked at in: with the length beside them 64 bytes, a line of the cache."""

SMALL_SET_SIZE = 16
"""Keys are few where there are so many times as many in all; so many are worth no further code."""

SURVIVOR_LIMIT_DIVISOR = 4
"""Codes that leave more than one key in so many tell too little."""

MIN_RADIUS_QUANTILE = 0.1
"""Share of keys whose radius is raised to that of the next. With more, queries amid many small balls find too many keys
that might be nearest though no ball holds them; with less, each hit needs a second look."""

MAX_FIT_SAMPLE = 2048
"""Keys that the directions are fitted to, at most."""

REFIT_GROWTH_FACTOR = 4
"""Directions are fitted anew where there are so many times as many keys as when they were."""


DistanceFunction = Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]]
"""The exact distances from queries, by their places among those asked about, to the keys of some slots."""


class Prefilter:
    """A sieve over keys. Call `mark_stale` with the slots that hold something new; the work is done at the next query.

    Args:
        get_keys_and_radii: Gives the keys (N, D) and their radii (N), float32, as they are now.
    """

    def __init__(self, get_keys_and_radii: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        self._get_keys_and_radii = get_keys_and_radii
        self._projection = OrthonormalProjection(np.empty((0, 1)))
        self._fitted_count = 0
        self._codes_by_dimensions: dict[int, Int8Codes] = {}
        """By the number of directions, fewest first."""
        self._key_norms = KeyNorms()
        self.min_radius = 0.0
        """A distance: keys so near to a query count as if their balls held it, whatever their radii."""
        self._stale_slots: set[int] | None = None
        """Slots that hold something new; None: all of them."""

    def mark_stale(self, slots: Collection[int] | None) -> None:
        """Slots that hold something new; None: everything is new."""
        if slots is None:
            self._stale_slots = None
        elif self._stale_slots is not None:
            self._stale_slots.update(slots)

    def sync(self) -> None:
        """Take in what changed."""
        count = len(self._get_keys_and_radii()[0])
        with np.errstate(all="ignore"):
            if self._stale_slots is None or count >= REFIT_GROWTH_FACTOR * self._fitted_count:
                self._fit()
            elif stale := [slot for slot in self._stale_slots if slot < count]:
                self._encode(np.array(stale))
        self._stale_slots = set()

    def candidates_containing(self, queries_BD: np.ndarray, slack: float = 0.0) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which every one whose ball holds it is one.

        `slack` is added to every radius.
        """
        return self._survivors(queries_BD, BoundQuery(np.full(len(queries_BD), slack, np.float32)))

    def few_candidates_containing(self, query_D: np.ndarray, limit: int) -> np.ndarray | None:
        """As `candidates_containing`, by the codes alone; None where they leave more than `limit` slots."""
        (found,) = self._survivors_by_codes(self._project(query_D[None]), BoundQuery(np.zeros(1, np.float32)))
        return None if found is None or len(found) > limit else found

    def candidates_for_match(
        self, queries_BD: np.ndarray, get_distances: DistanceFunction
    ) -> tuple[list[np.ndarray], set[int]]:
        """For each query, in ascending order, slots of which the nearest key's is one if its ball holds the query.

        And likewise if it lies no farther than `min_radius`; and, of the queries named besides, in any case. Where many
        balls hold a query, `get_distances` is asked how far some of their keys are.
        """
        points = self._project(queries_BD)
        found = self._survivors_by_codes(points, BoundQuery(np.zeros(len(queries_BD), np.float32)))
        if many := {row: slots for row, slots in enumerate(found) if slots is not None and len(slots) > SMALL_SET_SIZE}:
            _replace_slots(
                found, list(many), self._narrow_survivors(points.select_rows(list(many)), many, get_distances)
            )
        return self._nearest_survivors(queries_BD, found)

    def candidates_within(self, queries_BD: np.ndarray, max_distances_B: np.ndarray) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which every one whose key lies within its distance is one."""
        return self._survivors(
            queries_BD, BoundQuery(np.zeros(len(queries_BD), np.float32), max_distances_B.astype(np.float32))
        )

    def candidates_nearest(self, queries_BD: np.ndarray, max_distances_B: np.ndarray) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which the nearest key's is one if it lies within a distance."""
        asked = BoundQuery(np.zeros(len(queries_BD), np.float32), max_distances_B.astype(np.float32))
        return self._nearest_survivors(queries_BD, self._survivors_by_codes(self._project(queries_BD), asked))[0]

    def approximate_nearest(self, query_D: np.ndarray, count: int) -> np.ndarray:
        """So many slots whose keys look nearest in a few directions, or all of few; nothing is said of the others."""
        self.sync()
        slots = np.arange(len(self._get_keys_and_radii()[0]))
        if len(slots) <= max(count, SMALL_SET_SIZE):
            return slots
        few, codes = next(iter(self._codes_by_dimensions.items()))
        with np.errstate(all="ignore"):
            return codes.top_k_by_bound([slots], self._project(query_D[None]).truncate(few), count)[0]

    def _fit(self) -> None:
        """Choose directions, and map every key."""
        keys_ND, radii_N = self._get_keys_and_radii()
        self._fitted_count = count = len(keys_ND)
        if not count:
            return
        sample_MD = keys_ND[:: -(-count // MAX_FIT_SAMPLE)]
        self._projection = OrthonormalProjection(sample_MD)
        self.min_radius = float(np.quantile(radii_N, MIN_RADIUS_QUANTILE)) if np.isfinite(radii_N).all() else 0.0
        self._codes_by_dimensions = {
            few: Int8Codes() for few in sorted({min(COARSE_DIMENSIONS, len(self._projection)), len(self._projection)})
        }
        for few, codes in self._codes_by_dimensions.items():
            codes.fit(self._projection.project(sample_MD, few)[0])
        for start in range(0, count, PROJECTION_CHUNK_ROWS):
            self._encode(np.arange(start, min(start + PROJECTION_CHUNK_ROWS, count)))

    def _encode(self, slots_M: np.ndarray) -> None:
        keys_ND, radii_N = self._get_keys_and_radii()
        keys_MD, radii_M = keys_ND[slots_M], np.maximum(radii_N[slots_M], np.float32(self.min_radius))
        mapped_MP, slack_M = self._projection.project(keys_MD, len(self._projection))
        for few, codes in self._codes_by_dimensions.items():
            codes.write(slots_M, OrthonormalProjection.truncate(mapped_MP, few), slack_M, radii_M)
        self._key_norms.write(slots_M, keys_MD, self._projection.center_D)

    def _survivors(self, queries_BD: np.ndarray, bound_query: BoundQuery) -> list[np.ndarray]:
        """Every slot that cannot be ruled out."""
        found = self._survivors_by_codes(self._project(queries_BD), bound_query)
        keys_ND, radii_N = self._get_keys_and_radii()
        if some := _undecided_rows(found, len(keys_ND)):
            with np.errstate(all="ignore"):
                products = InnerProducts(keys_ND, self._projection.center_D, queries_BD[some])
                _replace_slots(
                    found,
                    some,
                    self._key_norms.find_survivors(
                        products, radii_N, bound_query.select_rows(some), len(keys_ND) // SURVIVOR_LIMIT_DIVISOR
                    ),
                )
        return [np.arange(len(keys_ND)) if slots is None else slots for slots in found]

    def _nearest_survivors(
        self, queries_BD: np.ndarray, found: list[np.ndarray | None]
    ) -> tuple[list[np.ndarray], set[int]]:
        """Where the codes tell too little, the slots that may be those of the nearest keys; and where that was."""
        keys_ND = self._get_keys_and_radii()[0]
        if some := _undecided_rows(found, len(keys_ND)):
            with np.errstate(all="ignore"):
                products = InnerProducts(keys_ND, self._projection.center_D, queries_BD[some])
                _replace_slots(
                    found, some, self._key_norms.nearest_candidates(products, len(keys_ND) // SURVIVOR_LIMIT_DIVISOR)
                )
        return [np.arange(len(keys_ND)) if slots is None else slots for slots in found], set(some)

    def _project(self, queries_BD: np.ndarray) -> "_ProjectedQueries":
        """The queries as points, in all directions; in none where keys are so few that no codes are asked."""
        self.sync()
        if len(self._get_keys_and_radii()[0]) <= SMALL_SET_SIZE:
            return _ProjectedQueries(np.empty((len(queries_BD), 0), np.float32), np.zeros(len(queries_BD), np.float32))
        with np.errstate(all="ignore"):
            return _ProjectedQueries(*self._projection.project(queries_BD, len(self._projection)))

    def _survivors_by_codes(self, points: "_ProjectedQueries", bound_query: BoundQuery) -> list[np.ndarray | None]:
        """The slots that the codes leave; None: too many."""
        count = len(self._get_keys_and_radii()[0])
        found: list[np.ndarray | None] = [None] * len(points.slack_B)
        with np.errstate(all="ignore"):
            for few, codes in self._codes_by_dimensions.items() if count > SMALL_SET_SIZE else ():
                if some := [row for row, slots in enumerate(found) if slots is None or len(slots) > SMALL_SET_SIZE]:
                    left = points.select_rows(some)
                    self._apply_codes(
                        codes, left.truncate(few), bound_query.select_rows(some).widen(left.slack_B), found, some
                    )
        return found

    def _narrow_survivors(
        self, points: "_ProjectedQueries", slots: dict[int, np.ndarray], get_distances: DistanceFunction
    ) -> list[np.ndarray]:
        """For each query those of its slots whose key may be no farther than the nearest of some of them."""
        few, codes = next(reversed(self._codes_by_dimensions.items()))
        points_BP = points.truncate(few)
        with np.errstate(all="ignore"):
            closest = codes.top_k_by_bound(list(slots.values()), points_BP, SMALL_SET_SIZE)
            far = get_distances(dict(zip(slots, closest, strict=True)))
            least_B = np.array([far[row].min() for row in slots])
            return codes.filter_slots(list(slots.values()), points_BP, BoundQuery(points.slack_B, least_B))

    def _apply_codes(
        self,
        codes: Int8Codes,
        points_BP: np.ndarray,
        bound_query: BoundQuery,
        found: list[np.ndarray | None],
        rows: list[int],
    ) -> None:
        """Keep of what was found in these rows what codes leave: of a few slots these alone are looked at."""
        count = len(self._get_keys_and_radii()[0])
        few = {place: slots for place, row in enumerate(rows) if (slots := found[row]) is not None}
        few = {place: slots for place, slots in few.items() if len(slots) * SMALL_SET_SIZE <= count}
        if every := [place for place in range(len(rows)) if place not in few]:
            left = codes.find_survivors(
                points_BP[every],
                bound_query.select_rows(every),
                count,
                max(SMALL_SET_SIZE, count // SURVIVOR_LIMIT_DIVISOR),
            )
            _replace_slots(found, [rows[place] for place in every], left)
        if some := list(few):
            kept = codes.filter_slots(list(few.values()), points_BP[some], bound_query.select_rows(some))
            _replace_slots(found, [rows[place] for place in some], kept)


@dataclass(frozen=True, slots=True)
class _ProjectedQueries:
    """B queries as points in all directions, and how far each may lie from the truth."""

    points_BP: np.ndarray
    slack_B: np.ndarray

    def select_rows(self, indices: list[int]) -> "_ProjectedQueries":
        return _ProjectedQueries(self.points_BP[indices], self.slack_B[indices])

    def truncate(self, dimensions: int) -> np.ndarray:
        """The points in so many directions."""
        return OrthonormalProjection.truncate(self.points_BP, dimensions)


def _undecided_rows(found: Sequence[np.ndarray | None], key_count: int) -> list[int]:
    """The rows of which the codes tell too little; of so few keys that nobody asked them, none."""
    return [row for row, slots in enumerate(found) if slots is None] if key_count > SMALL_SET_SIZE else []


def _replace_slots(found: list[np.ndarray | None], rows: list[int], survivors: Sequence[np.ndarray | None]) -> None:
    for row, slots in zip(rows, survivors, strict=True):
        found[row] = slots
