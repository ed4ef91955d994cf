"""A replica applies several deltas at once. The integration test of this name covers the rest on real parts."""

import pytest
import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import load_settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import Head, RedisHeadStore
from gracestream.schemas.deltas import EntryChange
from tests.support.tiny_models import LAYER, MODEL, added, sealed


@pytest.mark.parametrize("kept", [[], ["a"], ["a", "b"]])
def test_entries_that_came_and_went_between_two_batches_leave_no_trace(kept: list[str]) -> None:
    settings = load_settings()
    log, book = Codebook(settings.model.codebook, MODEL, LAYER), Codebook(settings.model.codebook, MODEL, LAYER)
    records = [sealed(log, op="lead")]
    log.apply(records[0])
    names = [*kept, "gone", "gone too"]
    changes = [[added(name, [float(len(name)), 0.0], 0.5)] for name in names]
    changes += [[EntryChange(entry_id=name, removed=True)] for name in names[len(kept) :]]
    for change in changes:
        records.append(sealed(log, *change))
        log.apply(records[-1])
    follower = DeltaFollower(settings.kafka)
    follower._buffer_records(list(enumerate(records)))
    with redis_client(settings.redis) as client:
        index = KeyIndex(book, torch.device("cpu"))
        codebook_replica = CodebookReplica(
            book,
            index,
            RedisHeadStore(client, settings.kafka.topic_prefix, settings.model.codebook),
            follower,
            settings,
        )
        codebook_replica.sync_to_head(Head(term=1, seq=log.seq, digest=log.digest.hex(), changed_radii={}))
    assert book.entry_ids == kept
    found = index.nearest_within_radius(torch.tensor([[1.0, 0.0], [4.0, 0.0]])).slots_B.tolist()
    assert found == [0 if kept else -1, -1]
