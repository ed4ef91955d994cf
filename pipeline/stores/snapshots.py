"""Snapshots of a codebook, so that a starting replica need not replay the whole log (docs/explanation/consistency.md).

Guarantees:

1. A snapshot and the deltas after it give the same codebook as a full replay, bit for bit: the same entries in the same
   slots.
2. A manifest is written only after its file is complete. The caller passes the offset of a committed delta.
3. `load_newest_snapshot` returns only a verified snapshot. The file has the size, SHA-256 and contents of its manifest.
   The log has the digest of the snapshot at the offset of the manifest. A digest stands for the whole history before
   it, so a lost, truncated or recreated topic is detected.
4. A snapshot that fails a check is skipped with a warning, and the next older one is tried. Without a valid snapshot,
   replicas read the whole log.

The key of a manifest is codebook and seq, so compaction keeps older manifests as a fallback. A writer deletes all but
the last `keep` manifests with tombstones, and then their files.

Not promised: that every snapshot file has a manifest. A writer may fail between the two; the file then does no harm.
"""

import hashlib
import os
import time
from dataclasses import dataclass
from urllib.parse import quote

import structlog
from msgspec import UNSET

from gracestream.pipeline.codebook import Codebook, CodebookFileError, parse_codebook
from gracestream.pipeline.kafka import DELTA_CONSUMER_OPTIONS, DELTAS, SNAPSHOTS, TopicReader, producer, read_topic
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.settings import KafkaSettings
from gracestream.pipeline.stores.snapshot_files import SnapshotError, SnapshotStore, split_url_secrets
from gracestream.schemas.deltas import DIGEST_BYTES, decode_delta
from gracestream.schemas.messages import SCHEMA_VERSION, InvalidMessage, SnapshotManifest, decode, encode

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A codebook, and the offset in `deltas` of the last delta that it has applied."""

    codebook: Codebook
    offset: int


def list_manifests(settings: KafkaSettings, codebook: str) -> dict[bytes | None, SnapshotManifest]:
    """The manifests of a codebook by record key, in the order in which they were written.

    Raises:
        TopicError: the topic of manifests does not exist.
    """
    manifests: dict[bytes | None, SnapshotManifest] = {}
    for record in read_topic(settings, SNAPSHOTS):
        manifests.pop(record.key, None)  # so that a rewritten manifest moves to the end of the order
        if record.value is None:
            continue
        try:
            manifests[record.key] = decode(record.value, SnapshotManifest)
        except InvalidMessage as error:
            log.warning(
                "manifest_skipped",
                offset=record.offset,
                reason=str(error),
                consequence="no worker uses the snapshot that this record names",
            )
    return {key: manifest for key, manifest in manifests.items() if manifest.codebook == codebook}


def load_newest_snapshot(
    settings: KafkaSettings, url: str, codebook: Codebook, max_seq: int | None = None
) -> Snapshot | None:
    """The newest valid snapshot in the store `url`, of delta `max_seq` at most; None if there is none.

    It has the name, the model and the layer of `codebook`.

    Raises:
        SnapshotError: the store cannot be used.
        TopicError: the topic of manifests does not exist.
        KafkaError: Kafka does not answer.
    """
    store = SnapshotStore(url)
    manifests = list_manifests(settings, codebook.name).values()
    for manifest in sorted(manifests, key=lambda manifest: manifest.seq, reverse=True):
        if max_seq is not None and manifest.seq > max_seq:
            continue
        started = time.perf_counter()
        try:
            snapshot = _load_snapshot(settings, store, manifest, codebook.model, codebook.layer)
        except (SnapshotError, CodebookFileError, MemoryError) as error:
            metrics.SNAPSHOTS_REJECTED.inc()
            uri = split_url_secrets(manifest.uri)[0]
            log.warning(
                "snapshot_rejected",
                seq=manifest.seq,
                uri=uri,
                reason=str(error) or "no memory",
                consequence="an older snapshot or the log is read instead, so the start takes longer",
            )
        else:
            seconds = round(time.perf_counter() - started, 2)
            log.info("snapshot_loaded", seq=manifest.seq, entries=manifest.entries, uri=manifest.uri, seconds=seconds)
            return snapshot
    return None


def write_snapshot(settings: KafkaSettings, snapshot: Snapshot, url: str, keep: int) -> SnapshotManifest:
    """Write a snapshot into the store `url`, return its manifest, and delete all but the last `keep` snapshots.

    Raises:
        SnapshotError: the file cannot be written.
        TopicError: the topic of manifests does not exist.
        KafkaError: the manifest cannot be written; the file stays and does no harm.
    """
    codebook = snapshot.codebook
    store = SnapshotStore(url)
    older = list_manifests(settings, codebook.name)
    # 1. Write the file.
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
    outdated = dict(list(older.items())[: max(0, len(older) + 1 - keep)])
    topic = settings.topic(SNAPSHOTS)
    client = producer(settings)
    try:
        # 2. Write the manifest to its topic, now that its file is complete.
        client.send(topic, key=key, value=encode(manifest), partition=0).get(timeout=30)
        # 3. Delete outdated manifests. Their files still exist, so no replica finds a manifest without its file.
        tombstones = [client.send(topic, key=old, value=None, partition=0) for old in outdated if old is not None]
        for tombstone in tombstones:
            tombstone.get(timeout=30)
    finally:
        client.close(timeout=5)
    # 4. Delete their files, and the file of a replaced manifest of the same delta, unless another manifest names it.
    needed = {manifest.uri} | {other.uri for other in older.values()} - {other.uri for other in outdated.values()}
    for other in (*outdated.values(), *([] if replaced is None else [replaced])):
        if other.uri not in needed:
            _delete_file(store, other)
    return manifest


def find_delta_offset(settings: KafkaSettings, codebook: Codebook) -> int:
    """The offset in `deltas` of the last delta of a codebook. The log is searched from its end.

    Raises:
        SnapshotError: the log does not have this delta.
        KafkaError: Kafka does not answer.
    """
    with TopicReader(settings, DELTAS, **DELTA_CONSUMER_OPTIONS) as reader:
        record = reader.find_last(
            lambda record: record.value is not None and record.value[-DIGEST_BYTES:] == codebook.digest
        )
    if record is None:
        raise SnapshotError(f"the log does not hold delta {codebook.seq}")
    return int(record.offset)


def _load_snapshot(
    settings: KafkaSettings, store: SnapshotStore, manifest: SnapshotManifest, model: str, layer: str
) -> Snapshot:
    """Load and verify a snapshot. Cheap checks come first: of the manifest, of one record of the log, of the file.

    Raises:
        SnapshotError, CodebookFileError: a check failed.
        MemoryError: the file does not fit into memory.
        KafkaError: Kafka does not answer.
    """
    for part, stated, expected in (("model", manifest.model, model), ("layer", manifest.layer, layer)):
        if stated is not UNSET and stated != expected:
            raise SnapshotError(f"it is of {part} {stated!r}; this worker has {expected!r}")
    if manifest.offset is UNSET:
        raise SnapshotError("its manifest does not say where in the log it lies")
    if not 0 < manifest.bytes <= _total_memory_bytes() // 2:
        raise SnapshotError(f"it has {manifest.bytes} bytes, and must fit into half of this machine's memory")
    _check_log_holds(settings, manifest, manifest.offset)
    data = store.read(manifest.uri, manifest.bytes)
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise SnapshotError("the file is not what was written: its SHA-256 differs")
    codebook = parse_codebook(data)
    contents = (codebook.name, codebook.model, codebook.layer, codebook.seq, codebook.term, codebook.digest.hex())
    if contents != (manifest.codebook, model, layer, manifest.seq, manifest.term, manifest.digest):
        raise SnapshotError("the file holds another codebook, or another delta, than its manifest says")
    return Snapshot(codebook, manifest.offset)


def _check_log_holds(settings: KafkaSettings, manifest: SnapshotManifest, offset: int) -> None:
    """Check that the log has the delta of a manifest at `offset`.

    Raises:
        SnapshotError: it has not.
        KafkaError: Kafka does not answer.
    """
    with TopicReader(settings, DELTAS, **DELTA_CONSUMER_OPTIONS) as reader:
        record = reader.at(offset)
    try:
        delta = None if record is None else decode_delta(record.value)
    except InvalidMessage:
        delta = None
    expected = (manifest.codebook, manifest.seq, manifest.term, manifest.digest)
    if delta is None or (delta.codebook, delta.seq, delta.term, delta.digest.hex()) != expected:
        raise SnapshotError(f"the log does not hold its delta at offset {offset}: was the topic lost, or made anew?")


def _delete_file(store: SnapshotStore, manifest: SnapshotManifest) -> None:
    try:
        store.delete(manifest.uri)
    except SnapshotError as error:
        log.warning(
            "snapshot_not_deleted",
            uri=split_url_secrets(manifest.uri)[0],
            reason=str(error),
            consequence="the old file stays in the store, and no worker uses it",
            remedy="delete the file",
        )


def _total_memory_bytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
