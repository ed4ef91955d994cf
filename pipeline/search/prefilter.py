"""Candidate keys for a query, without the exact distance to every key (docs/explanation/method.md, lookup).

Most queries are within the radius of no key. To establish this, it suffices to exclude every key by a lower bound on
its distance. Each key is projected on a few orthonormal directions, with the norm of its remainder as one more number
(`OrthonormalProjection`). A projected distance is a lower bound on the true one. Projected keys are stored as int8
codes (`Int8Codes`).

1. Stage 1 bounds every key with codes of `COARSE_DIMENSIONS` directions. It is skipped while it settles few queries.
2. Stage 2 checks the survivors with codes of all directions. If stage 1 leaves too many, stage 2 checks every key.
3. If stage 2 leaves too many as well, stage 3 computes inner products with all keys (`KeyNorms`).

A `PointSet` uses the same prefilter for its points, with their radii.

Guarantees:

1. The candidates include every key within the radius, within the given distance, or nearest, as each method states.
2. The choice of directions, codes and stages affects only the time and the superfluous candidates.

Not promised: that a candidate is within the radius. The caller computes exact distances.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gracestream.pipeline.search.projection import PROJECTION_CHUNK_ROWS, OrthonormalProjection
from gracestream.pipeline.search.quantized_bounds import BoundQuery, InnerProducts, Int8Codes, KeyNorms

COARSE_DIMENSIONS = 63
"""Directions of the first codes. With the remainder's norm a code has 64 bytes, one cache line."""

SMALL_SET_SIZE = 16
"""Up to so many candidates get no further stage: their exact distances cost less."""

SHORT_LIST_DIVISOR = 16
"""A list of at most 1 key in 16 is checked by itself. A longer list costs more than a check of every key."""

SURVIVOR_LIMIT_DIVISOR = 4
"""A stage that leaves more than 1 key in 4 counts as undecided, and the next stage starts from all keys."""

MIN_SETTLED_SHARE, MIN_SETTLED_SHARE_OF_BATCH = 0.5, 0.9
"""Least share of queries that stage 1 must settle to be worth its time: for one query, and for several at once.

Stage 1 reads half as much as stage 2. For one query the reading takes most of the time, for many the products do.
"""

SETTLED_SHARE_DECAY = 0.05
"""Weight of a new query in the moving average of settled queries."""

STAGE_1_TRIAL_INTERVAL = 64
"""While stage 1 is skipped, one search in so many runs it, to learn whether it has become worth its time."""

MIN_RADIUS_QUANTILE = 0.1
"""Quantile of the radii that becomes `Prefilter.min_radius`.

A higher one gives queries among many small radii too many candidates that match nothing. With a lower one more matches
need a second search for the nearest key.
"""

MAX_FIT_SAMPLE = 2048
"""Most keys to which the directions are fitted."""

REFIT_GROWTH_FACTOR = 4
"""Directions are fitted again when the number of keys has grown by this factor."""


class Prefilter:
    """A prefilter over keys. `mark_stale` names changed slots; the next query updates their codes.

    Args:
        get_keys_and_radii: Returns the current keys (N, D) and radii (N), float32.
    """

    def __init__(self, get_keys_and_radii: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        self._get_keys_and_radii = get_keys_and_radii
        self._projection = OrthonormalProjection(np.empty((0, 1)))
        self._fitted_count = 0
        self._codes_by_dimensions: dict[int, Int8Codes] = {}
        """Codes by number of directions, fewest first."""
        self._key_norms = KeyNorms()
        self.min_radius = 0.0
        """A distance. Smaller radii count as this one, so `candidates_for_match` finds every nearest key this close."""
        self._stale_slots: set[int] | None = None
        """Slots with outdated codes; None: all slots."""
        self._settled_shares = [_SettledShare(), _SettledShare()]
        """The use of stage 1, by `BoundQuery.constants_index`: for radii and for distances. It affects time alone."""

    def mark_stale(self, slots: Collection[int] | None) -> None:
        """Mark slots with a changed key or radius; None: all slots."""
        if slots is None:
            self._stale_slots = None
        elif self._stale_slots is not None:
            self._stale_slots.update(slots)

    def sync(self) -> None:
        """Update the codes of the stale slots. Fit new directions where the keys have multiplied."""
        count = len(self._get_keys_and_radii()[0])
        with np.errstate(all="ignore"):
            if self._stale_slots is None or count >= REFIT_GROWTH_FACTOR * self._fitted_count:
                self._fit()
            elif stale := [slot for slot in self._stale_slots if slot < count]:
                self._encode(np.array(stale))
        self._stale_slots = set()

    def candidates_containing(self, queries_BD: np.ndarray, slack: float = 0.0) -> list[np.ndarray]:
        """Sorted candidate slots per query: a superset of all keys whose radius plus `slack` contains the query."""
        return self._survivors(queries_BD, BoundQuery(np.full(len(queries_BD), slack, np.float32)))

    def few_candidates_containing(self, query_D: np.ndarray, limit: int) -> np.ndarray | None:
        """The result of `candidates_containing` for one query, by codes alone; None if over `limit` slots remain."""
        (survivors,) = self._survivors_by_codes(self._project(query_D[None]), BoundQuery(np.zeros(1, np.float32)))
        return None if survivors is None or len(survivors) > limit else survivors

    def candidates_for_match(self, queries_BD: np.ndarray) -> tuple[list[np.ndarray], set[int]]:
        """Sorted candidate slots per query, for the search of the nearest key within its radius.

        The candidates include the nearest key if (a) the query lies within its radius, or (b) it is at most
        `min_radius` away. The second result lists the rows for which the nearest key is always included.
        """
        bound_query = BoundQuery(np.zeros(len(queries_BD), np.float32))
        return self._nearest_survivors(queries_BD, self._survivors_by_codes(self._project(queries_BD), bound_query))

    def candidates_within(self, queries_BD: np.ndarray, max_distances_B: np.ndarray) -> list[np.ndarray]:
        """Sorted candidate slots per query: a superset of all keys at most its distance (B) away."""
        return self._survivors(
            queries_BD, BoundQuery(np.zeros(len(queries_BD), np.float32), max_distances_B.astype(np.float32))
        )

    def candidates_nearest(self, queries_BD: np.ndarray, max_distances_B: np.ndarray) -> list[np.ndarray]:
        """Sorted candidate slots per query. They include the nearest key if it is at most the query's distance away."""
        bound_query = BoundQuery(np.zeros(len(queries_BD), np.float32), max_distances_B.astype(np.float32))
        return self._nearest_survivors(queries_BD, self._survivors_by_codes(self._project(queries_BD), bound_query))[0]

    def approximate_nearest(self, query_D: np.ndarray, count: int) -> np.ndarray:
        """The `count` slots that seem nearest by the first codes, or all slots if there are few.

        Other keys may be nearer.
        """
        self.sync()
        slots = np.arange(len(self._get_keys_and_radii()[0]))
        if len(slots) <= max(count, SMALL_SET_SIZE):
            return slots
        dimensions, codes = next(iter(self._codes_by_dimensions.items()))
        with np.errstate(all="ignore"):
            return codes.top_k_by_bound([slots], self._project(query_D[None]).truncate(dimensions), count)[0]

    def _fit(self) -> None:
        """Choose directions, scales and the minimum radius from a sample, and encode every key."""
        keys_ND, radii_N = self._get_keys_and_radii()
        self._fitted_count = count = len(keys_ND)
        if not count:
            return
        sample_MD = keys_ND[:: -(-count // MAX_FIT_SAMPLE)]
        self._projection = OrthonormalProjection(sample_MD)
        self.min_radius = float(np.quantile(radii_N, MIN_RADIUS_QUANTILE)) if np.isfinite(radii_N).all() else 0.0
        self._codes_by_dimensions = {
            dimensions: Int8Codes()
            for dimensions in sorted({min(COARSE_DIMENSIONS, len(self._projection)), len(self._projection)})
        }
        for dimensions, codes in self._codes_by_dimensions.items():
            codes.fit(self._projection.project(sample_MD, dimensions)[0])
        for start in range(0, count, PROJECTION_CHUNK_ROWS):
            self._encode(np.arange(start, min(start + PROJECTION_CHUNK_ROWS, count)))

    def _encode(self, slots_M: np.ndarray) -> None:
        """Compute the codes and norms of these slots."""
        keys_ND, radii_N = self._get_keys_and_radii()
        keys_MD, radii_M = keys_ND[slots_M], np.maximum(radii_N[slots_M], np.float32(self.min_radius))
        mapped_MP, slack_M = self._projection.project(keys_MD, len(self._projection))
        for dimensions, codes in self._codes_by_dimensions.items():
            codes.write(slots_M, OrthonormalProjection.truncate(mapped_MP, dimensions), slack_M, radii_M)
        self._key_norms.write(slots_M, keys_MD, self._projection.center_D)

    def _survivors(self, queries_BD: np.ndarray, bound_query: BoundQuery) -> list[np.ndarray]:
        """Sorted slots that no stage excludes, per query."""
        survivors = self._survivors_by_codes(self._project(queries_BD), bound_query)
        keys_ND, radii_N = self._get_keys_and_radii()
        if undecided := _undecided_rows(survivors, len(keys_ND)):
            with np.errstate(all="ignore"):
                products = InnerProducts(keys_ND, self._projection.center_D, queries_BD[undecided])
                _replace_slots(
                    survivors,
                    undecided,
                    self._key_norms.find_survivors(
                        products, radii_N, bound_query.select_rows(undecided), len(keys_ND) // SURVIVOR_LIMIT_DIVISOR
                    ),
                )
        return [np.arange(len(keys_ND)) if slots is None else slots for slots in survivors]

    def _nearest_survivors(
        self, queries_BD: np.ndarray, found: list[np.ndarray | None]
    ) -> tuple[list[np.ndarray], set[int]]:
        """Complete the survivors of undecided rows with candidates for the nearest key; also return these rows."""
        keys_ND = self._get_keys_and_radii()[0]
        if undecided := _undecided_rows(found, len(keys_ND)):
            with np.errstate(all="ignore"):
                products = InnerProducts(keys_ND, self._projection.center_D, queries_BD[undecided])
                _replace_slots(
                    found,
                    undecided,
                    self._key_norms.nearest_candidates(products, len(keys_ND) // SURVIVOR_LIMIT_DIVISOR),
                )
        return [np.arange(len(keys_ND)) if slots is None else slots for slots in found], set(undecided)

    def _project(self, queries_BD: np.ndarray) -> "_ProjectedQueries":
        """The queries projected on all directions; on none where the keys are too few to use codes."""
        self.sync()
        if len(self._get_keys_and_radii()[0]) <= SMALL_SET_SIZE:
            return _ProjectedQueries(np.empty((len(queries_BD), 0), np.float32), np.zeros(len(queries_BD), np.float32))
        with np.errstate(all="ignore"):
            return _ProjectedQueries(*self._projection.project(queries_BD, len(self._projection)))

    def _survivors_by_codes(self, points: "_ProjectedQueries", bound_query: BoundQuery) -> list[np.ndarray | None]:
        """Sorted slots that stages 1 and 2 leave, per query; None: too many."""
        count = len(self._get_keys_and_radii()[0])
        survivors: list[np.ndarray | None] = [None] * len(points.slack_B)
        levels = list(self._codes_by_dimensions.items()) if count > SMALL_SET_SIZE else []
        settled_share = self._settled_shares[bound_query.constants_index]
        skips_stage_1 = len(levels) > 1 and not settled_share.begin_search(len(survivors))
        with np.errstate(all="ignore"):
            for level, (dimensions, codes) in enumerate(levels[1:] if skips_stage_1 else levels):
                if remaining := [
                    row for row, slots in enumerate(survivors) if slots is None or len(slots) > SMALL_SET_SIZE
                ]:
                    remaining_points = points.select_rows(remaining)
                    self._apply_codes(
                        codes,
                        remaining_points.truncate(dimensions),
                        bound_query.select_rows(remaining).widen(remaining_points.slack_B),
                        survivors,
                        remaining,
                    )
                if level == 0 and len(levels) > 1 and not skips_stage_1:
                    settled_share.record([_is_short_list(slots, count) for slots in survivors])
        return survivors

    def _apply_codes(
        self,
        codes: Int8Codes,
        points_BP: np.ndarray,
        bound_query: BoundQuery,
        found: list[np.ndarray | None],
        rows: list[int],
    ) -> None:
        """Reduce `found` in these rows to the slots that the codes leave.

        A row with a short list checks only its slots. Another row checks every key, which costs less than a long list.
        """
        count = len(self._get_keys_and_radii()[0])
        short_lists = {place: slots for place, row in enumerate(rows) if (slots := found[row]) is not None}
        short_lists = {place: slots for place, slots in short_lists.items() if _is_short_list(slots, count)}
        if full_scan := [place for place in range(len(rows)) if place not in short_lists]:
            survivors = codes.find_survivors(
                points_BP[full_scan],
                bound_query.select_rows(full_scan),
                count,
                max(SMALL_SET_SIZE, count // SURVIVOR_LIMIT_DIVISOR),
            )
            _replace_slots(found, [rows[place] for place in full_scan], survivors)
        if short_list_places := list(short_lists):
            survivors_of_lists = codes.filter_slots(
                list(short_lists.values()), points_BP[short_list_places], bound_query.select_rows(short_list_places)
            )
            _replace_slots(found, [rows[place] for place in short_list_places], survivors_of_lists)


@dataclass(frozen=True, slots=True)
class _ProjectedQueries:
    """B queries projected on all directions, with bounds (B) on their rounding errors."""

    points_BP: np.ndarray
    slack_B: np.ndarray

    def select_rows(self, indices: list[int]) -> "_ProjectedQueries":
        return _ProjectedQueries(self.points_BP[indices], self.slack_B[indices])

    def truncate(self, dimensions: int) -> np.ndarray:
        """The points in the first `dimensions` directions."""
        return OrthonormalProjection.truncate(self.points_BP, dimensions)


class _SettledShare:
    """The share of recent queries that stage 1 settled: it left a list so short that stage 2 need not scan all keys."""

    def __init__(self) -> None:
        self._share = 1.0
        self._skipped_count = 0

    def begin_search(self, query_count: int) -> bool:
        """Count a search for so many queries. Returns True if it should run stage 1, perhaps as a trial."""
        if self._share >= (MIN_SETTLED_SHARE_OF_BATCH if query_count > 1 else MIN_SETTLED_SHARE):
            return True
        self._skipped_count += 1
        return self._skipped_count % STAGE_1_TRIAL_INTERVAL == 0

    def record(self, settled_B: Sequence[bool]) -> None:
        """Add the queries of one search to the average."""
        for is_settled in settled_B:
            self._share += SETTLED_SHARE_DECAY * (is_settled - self._share)


def _is_short_list(slots: np.ndarray | None, key_count: int) -> bool:
    """True if a check of these slots alone costs less than a check of every key."""
    return slots is not None and (len(slots) <= SMALL_SET_SIZE or len(slots) * SHORT_LIST_DIVISOR <= key_count)


def _undecided_rows(found: Sequence[np.ndarray | None], key_count: int) -> list[int]:
    """Rows with None as candidates; no rows where the keys are too few to use codes."""
    return [row for row, slots in enumerate(found) if slots is None] if key_count > SMALL_SET_SIZE else []


def _replace_slots(found: list[np.ndarray | None], rows: list[int], survivors: Sequence[np.ndarray | None]) -> None:
    for row, slots in zip(rows, survivors, strict=True):
        found[row] = slots
