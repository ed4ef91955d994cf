"""Search over keys: exact distances, and the prefilters that keep them few."""

from gracestream.pipeline.search.distance import exact_distance, exact_distances
from gracestream.pipeline.search.key_search import NO_SLOT, KeySearch, faiss_library, search_for, set_threads
from gracestream.pipeline.search.point_set import Points
from gracestream.pipeline.search.prefilter import Sieve

__all__ = [
    "NO_SLOT",
    "KeySearch",
    "Points",
    "Sieve",
    "exact_distance",
    "exact_distances",
    "faiss_library",
    "search_for",
    "set_threads",
]
