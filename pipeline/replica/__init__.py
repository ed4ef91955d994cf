"""The replica: follows `deltas`, keeps the codebook at the published head, and answers requests."""

from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.replica.live_codebook import LiveCodebook
from gracestream.pipeline.replica.replica import Replica
from gracestream.pipeline.replica.request_handler import (
    EngineFactory,
    PreparedBatch,
    PreparedRequest,
    Reply,
    ReplyChunk,
    RequestHandler,
    RequestRecord,
    TimedLookup,
    near_miss_reason,
)

__all__ = [
    "CodebookReplica",
    "DeltaFollower",
    "EngineFactory",
    "LiveCodebook",
    "PreparedBatch",
    "PreparedRequest",
    "Replica",
    "Reply",
    "ReplyChunk",
    "RequestHandler",
    "RequestRecord",
    "TimedLookup",
    "near_miss_reason",
]
