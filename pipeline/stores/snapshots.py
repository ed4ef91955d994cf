"""Snapshots: a codebook as of one delta, so that a starting replica need not fold all of history (design, section 5).

What they guarantee:

1. Snapshot and tail equal a full replay, bit for bit: the same entries in the same slots.
2. A manifest is written only after its file is complete, and only for a delta that the log holds.
3. `load_newest_snapshot` gives back only what was proven: the file has the size and SHA-256 of its manifest and says of
   itself what the manifest says, and the log holds the snapshot's digest at the manifest's offset. The chain of digests
   makes that digest stand for the whole history before it, so a topic that was lost, cut short or made anew is noticed.
4. Whatever does not fit is passed over for the next older snapshot, with a warning; without any, the log is read.

Manifests are keyed by codebook and seq, so that compaction leaves older ones alone: they are there for when a newer one
is of no use. Whoever writes one deletes, by tombstones, all but the `snapshot_keep` written last, and then their files.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import structlog
from kafka import TopicPartition
from msgspec import UNSET

from gracestream.pipeline.codebook import Codebook, CodebookFileError, parse_codebook
from gracestream.pipeline.kafka import DELTA_CONSUMER_OPTIONS, DELTAS, SNAPSHOTS, consumer, producer, read_topic
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.snapshot_files import SnapshotError, SnapshotStore, split_url_secrets
from gracestream.schemas.deltas import DIGEST_BYTES, decode_delta
from gracestream.schemas.messages import SCHEMA_VERSION, InvalidMessage, SnapshotManifest, decode, encode

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A codebook, and the offset in `deltas` of the last delta that it holds."""

    codebook: Codebook
    offset: int


def list_manifests(settings: Settings, codebook: str) -> dict[bytes | None, SnapshotManifest]:
    """Those of one codebook by their keys, in the order in which they were written.

    Raises:
        TopicError: there is no topic of them.
    """
    found: dict[bytes | None, SnapshotManifest] = {}
    for record in read_topic(settings, SNAPSHOTS):
        found.pop(record.key, None)
        if record.value is None:
            continue
        try:
            found[record.key] = decode(record.value, SnapshotManifest)
        except InvalidMessage as error:
            log.warning("manifest_unreadable", offset=record.offset, reason=str(error))
    return {key: manifest for key, manifest in found.items() if manifest.codebook == codebook}


def load_newest_snapshot(settings: Settings, model: str, layer: str, max_seq: int | None = None) -> Snapshot | None:
    """The newest good snapshot for this model and layer, of delta `max_seq` at most; None where there is none.

    Raises:
        SnapshotError: there is no such store.
        TopicError: there is no topic of manifests.
        KafkaError: Kafka does not answer.
    """
    store = SnapshotStore(settings.snapshot_url)
    known = list_manifests(settings, settings.codebook).values()
    for manifest in sorted(known, key=lambda manifest: manifest.seq, reverse=True):
        if max_seq is not None and manifest.seq > max_seq:
            continue
        started = time.perf_counter()
        try:
            snapshot = _load_snapshot(settings, store, manifest, model, layer)
        except (SnapshotError, CodebookFileError, MemoryError) as error:
            metrics.SNAPSHOTS_REFUSED.inc()
            uri = split_url_secrets(manifest.uri)[0]
            log.warning("snapshot_refused", seq=manifest.seq, uri=uri, reason=str(error) or "no memory")
        else:
            seconds = round(time.perf_counter() - started, 2)
            log.info("snapshot_loaded", seq=manifest.seq, entries=manifest.entries, uri=manifest.uri, seconds=seconds)
            return snapshot
    return None


def write_snapshot(settings: Settings, snapshot: Snapshot) -> SnapshotManifest:
    """Write a snapshot: its file, then its manifest; and then delete what is beyond `snapshot_keep`.

    Raises:
        SnapshotError: the file cannot be written.
        TopicError: there is no topic of manifests.
        KafkaError: the manifest cannot be written; the file stays and does no harm.
    """
    codebook = snapshot.codebook
    store = SnapshotStore(settings.snapshot_url)
    older = list_manifests(settings, codebook.name)
    stored = store.put(codebook, quote(settings.topic(codebook.name), safe=""))
    manifest = SnapshotManifest(
        v=SCHEMA_VERSION,
        codebook=codebook.name,
        model=codebook.model,
        layer=codebook.layer,
        seq=codebook.seq,
        term=codebook.term,
        digest=codebook.digest.hex(),
        uri=stored.uri,
        sha256=stored.sha256,
        entries=len(codebook),
        bytes=stored.size,
        offset=snapshot.offset,
    )
    key = f"{codebook.name}/{codebook.seq}".encode()
    replaced = older.pop(key, None)
    outdated = dict(list(older.items())[: max(0, len(older) + 1 - settings.snapshot_keep)])
    topic = settings.topic(SNAPSHOTS)
    client = producer(settings)
    try:
        client.send(topic, key=key, value=encode(manifest), partition=0).get(timeout=30)
        gone = [client.send(topic, key=old, value=None, partition=0) for old in outdated if old is not None]
        for sent in gone:
            sent.get(timeout=30)
    finally:
        client.close(timeout=5)
    kept = {manifest.uri} | {other.uri for other in older.values()} - {other.uri for other in outdated.values()}
    for other in (*outdated.values(), *([] if replaced is None else [replaced])):
        if other.uri not in kept:
            _delete_file(store, other)
    return manifest


def find_delta_offset(settings: Settings, codebook: Codebook) -> int:
    """Where in `deltas` the last delta of a codebook lies; the log is searched from its end.

    Raises:
        SnapshotError: the log does not hold it.
    """
    with _delta_consumer(settings) as (reader, partition):
        end = reader.end_offsets([partition])[partition]
        window = 64
        while True:
            start = max(0, end - window)
            reader.seek(partition, start)
            while reader.position(partition) < end:
                for records in reader.poll(timeout_ms=1000).values():
                    for record in records:
                        if record.value is not None and record.value[-DIGEST_BYTES:] == codebook.digest:
                            offset: int = record.offset
                            return offset
            if start == 0:
                raise SnapshotError(f"the log does not hold delta {codebook.seq}")
            window *= 8


def _load_snapshot(
    settings: Settings, store: SnapshotStore, manifest: SnapshotManifest, model: str, layer: str
) -> Snapshot:
    """What is cheap to find out comes first: the manifest, then one record of the log, then the file."""
    for what, said, ours in (("model", manifest.model, model), ("layer", manifest.layer, layer)):
        if said is not UNSET and said != ours:
            raise SnapshotError(f"it is of {what} {said!r}; this one is {ours!r}")
    if manifest.offset is UNSET:
        raise SnapshotError("its manifest does not say where in the log it lies")
    if not 0 < manifest.bytes <= _total_memory_bytes() // 2:
        raise SnapshotError(f"it has {manifest.bytes} bytes, which half of this machine's memory does not hold")
    _check_log_holds(settings, manifest, manifest.offset)
    data = store.read(manifest.uri, manifest.bytes)
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise SnapshotError("the file is not what was written: its SHA-256 is another")
    codebook = parse_codebook(data)
    held = (codebook.name, codebook.model, codebook.layer, codebook.seq, codebook.term, codebook.digest.hex())
    if held != (manifest.codebook, model, layer, manifest.seq, manifest.term, manifest.digest):
        raise SnapshotError("the file holds another codebook, or another delta, than its manifest says")
    return Snapshot(codebook, manifest.offset)


def _check_log_holds(settings: Settings, manifest: SnapshotManifest, offset: int) -> None:
    """Raises SnapshotError unless the log holds the manifest's delta at `offset`."""
    missing = SnapshotError(f"the log does not hold its delta at offset {offset}: was the topic lost, or made anew?")
    deadline = time.monotonic() + settings.startup_timeout
    with _delta_consumer(settings) as (reader, partition):
        first = reader.beginning_offsets([partition])[partition]
        if not first <= offset < reader.end_offsets([partition])[partition]:
            raise missing
        reader.seek(partition, offset)
        while reader.position(partition) <= offset and time.monotonic() < deadline:
            for record in (record for records in reader.poll(timeout_ms=500).values() for record in records):
                try:
                    delta = decode_delta(record.value)
                except InvalidMessage:
                    raise missing from None
                held = (record.offset, delta.codebook, delta.seq, delta.term, delta.digest.hex())
                if held != (offset, manifest.codebook, manifest.seq, manifest.term, manifest.digest):
                    raise missing
                return
    raise SnapshotError(f"the log could not be read at offset {offset} within {settings.startup_timeout:g} s")


@contextmanager
def _delta_consumer(settings: Settings) -> Iterator[tuple[Any, TopicPartition]]:
    partition = TopicPartition(settings.topic(DELTAS), 0)
    reader = consumer(settings, **DELTA_CONSUMER_OPTIONS)
    try:
        reader.assign([partition])
        yield reader, partition
    finally:
        reader.close()


def _delete_file(store: SnapshotStore, manifest: SnapshotManifest) -> None:
    try:
        store.delete(manifest.uri)
    except SnapshotError as error:
        log.warning("snapshot_not_deleted", uri=split_url_secrets(manifest.uri)[0], reason=str(error))


def _total_memory_bytes() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
