"""Search over keys: exact distances, and prefilters that limit the exact distances to a few candidates."""

from gracestream.pipeline.search.distance import exact_distance, exact_distances
from gracestream.pipeline.search.key_search import NO_SLOT, KeySearch, load_faiss, search_class_for, set_threads
from gracestream.pipeline.search.point_set import PointSet
from gracestream.pipeline.search.prefilter import Prefilter

__all__ = [
    "NO_SLOT",
    "KeySearch",
    "PointSet",
    "Prefilter",
    "exact_distance",
    "exact_distances",
    "load_faiss",
    "search_class_for",
    "set_threads",
]
