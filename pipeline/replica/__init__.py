"""A replica: follows the log and answers requests with its codebook."""

from gracestream.pipeline.replica.codebook_replica import Mirror
from gracestream.pipeline.replica.delta_follower import Follower
from gracestream.pipeline.replica.replica import Replica
from gracestream.pipeline.replica.request_handler import Part, Question, Record, Reply, Server, Work

__all__ = [
    "Follower",
    "Mirror",
    "Part",
    "Question",
    "Record",
    "Replica",
    "Reply",
    "Server",
    "Work",
]
