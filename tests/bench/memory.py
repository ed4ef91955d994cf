"""Memory of stored entries: `make bench NAME=memory`.

The process fills a codebook and its index with random keys and values, as in a replica. Its resident memory is read
before and after. The floor is the size of the numbers: key, value and radius in float32, four bytes each. Entry ids,
labels and the index's codes for excluding keys come on top.

- `memory/replica`: codebook and index.
- `memory/editor`: the same, and the edit memory, with one edit per entry.
- `of-floor`: memory divided by the floor; the baseline is a goal. `bytes_an_entry`, `gigabytes`: memory; the baseline
  is the floor.
- `device-of-floor`, `device-gigabytes`: on a GPU, the memory of its copy of the keys, compared with the keys alone.
"""

from collections.abc import Iterator

import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import EditMemory
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.schemas.deltas import GENESIS_DIGEST, Cause, Delta, EntryChange, Tensor, seal_delta
from tests.bench.device import memory_in_use
from tests.bench.framework import Options, Row
from tests.bench.replay import HistoryShape

ENTRIES, QUICK_ENTRIES = 1_000_000, 50_000
ENTRIES_PER_DELTA = 1000
MAX_RATIO = 1.2
CPU = torch.device("cpu")


def run(options: Options) -> Iterator[Row]:
    """The rows of a replica and of an editor. `--quick` stores a twentieth of the entries."""
    count = QUICK_ENTRIES if options.quick else ENTRIES
    shape, device = HistoryShape(), torch.device(options.device)
    floor = count * 4 * (shape.width_D + shape.width_V + 1)
    for worker in ("replica", "editor"):
        options.report(f"{worker}: {count} entries of {shape.width_D} and {shape.width_V} numbers")
        before, before_on_device = memory_in_use(CPU), memory_in_use(device)
        stored_codebook = _filled(shape, count, device, with_edits=worker == "editor")
        taken, taken_on_device = memory_in_use(CPU) - before, memory_in_use(device) - before_on_device
        name = f"memory/{worker}/{count}"
        yield Row(f"{name}/of-floor", taken / floor, "x", MAX_RATIO)
        yield Row(f"{name}/bytes_an_entry", taken / count, "B", floor / count)
        yield Row(f"{name}/gigabytes", taken / 1e9, "GB", floor / 1e9)
        if device != CPU:
            keys = count * 4 * shape.width_D
            yield Row(f"{name}/device-of-floor", taken_on_device / keys, "x", MAX_RATIO)
            yield Row(f"{name}/device-gigabytes", taken_on_device / 1e9, "GB", keys / 1e9)
        del stored_codebook


def _filled(
    shape: HistoryShape, count: int, device: torch.device, *, with_edits: bool
) -> tuple[Codebook, KeyIndex, EditMemory]:
    codebook, memory = Codebook("default", shape.model, shape.layer), EditMemory()
    index = KeyIndex(codebook, device)
    lead = Delta(
        v=1, codebook="default", model=shape.model, layer=shape.layer, term=1, seq=1, op="lead",
        environment={"device": "none"}, digest=b"",
    )  # fmt: skip
    record, sealed = seal_delta(lead, GENESIS_DIGEST)
    codebook.apply(record)
    generator = np.random.default_rng(0)
    for seq in range(2, count // ENTRIES_PER_DELTA + 2):
        entries = tuple(
            _entry(shape, f"feedback-{seq:06d}-{number:04d}", generator) for number in range(ENTRIES_PER_DELTA)
        )
        add = replace(lead, seq=seq, op="add", environment=UNSET, entries=entries)
        record, sealed = seal_delta(add, sealed.digest)
        applied = codebook.apply(record)
        assert applied is not None
        index.refresh(applied)
        for change in entries if with_edits else ():
            cause = Cause(feedback_id=change.entry_id, offset=seq, entry_id=change.entry_id)
            memory.apply_delta(replace(add, entries=(change,), cause=cause), codebook)
    index.nearest_within_radius(torch.from_numpy(codebook.keys_ND[:1].copy()))
    return codebook, index, memory


def _entry(shape: HistoryShape, name: str, generator: np.random.Generator) -> EntryChange:
    return EntryChange(
        entry_id=name,
        key=Tensor.from_array(generator.standard_normal(shape.width_D, np.float32)),
        value=Tensor.from_array(generator.standard_normal(shape.width_V, np.float32)),
        radius=float(generator.random()),
        label=(int(generator.integers(1000)), 17, 2),
    )
