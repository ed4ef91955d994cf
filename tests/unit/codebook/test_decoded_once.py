"""A replica decodes and checks each delta once, however often it looks at it."""

from typing import Any

import msgspec
import pytest

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import DecodedDelta, EntryChange, decode_delta
from gracestream.schemas.messages import InvalidMessage
from tests.support.tiny_models import added, new_codebook, sealed


def test_a_delta_that_a_follower_has_read_is_decoded_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook, checked = new_codebook("model", "layer"), list[EntryChange]()
    record = DecodedDelta.from_record(sealed(codebook, added("a", [1.0], 1.0)))
    monkeypatch.setattr(msgspec.msgpack, "decode", lambda *_, **__: pytest.fail("it was decoded again"))
    check_one = Codebook._check_entry

    def counting(self: Codebook, change: EntryChange) -> Any:
        checked.append(change)
        return check_one(self, change)

    monkeypatch.setattr(Codebook, "_check_entry", counting)
    for _ in range(3):
        assert codebook.check(record) is record.delta
    applied = codebook.apply(record)
    assert applied is not None
    assert applied.delta is record.delta
    assert len(checked) == 1


def test_a_check_counts_for_the_codebook_as_it_was_then() -> None:
    codebook = new_codebook("model", "layer")
    first, second = (sealed(codebook, added(name, [1.0], 1.0)) for name in "ab")
    assert codebook.check(second) is not None
    codebook.apply(first)
    with pytest.raises(HistoryError, match="a gap"):
        codebook.apply(second)


def test_a_record_that_cannot_be_read_is_no_decoded_delta() -> None:
    with pytest.raises(InvalidMessage, match="the record has no value"):
        DecodedDelta.from_record(None)
    with pytest.raises(InvalidMessage, match="not a valid delta"):
        DecodedDelta.from_record(b"none")
    record = sealed(new_codebook("model", "layer"), op="lead")
    assert DecodedDelta.from_record(record) == record
    assert decode_delta(DecodedDelta.from_record(record)) == decode_delta(record)
