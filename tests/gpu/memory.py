"""Memory on the device, compared with the bytes of keys and weights."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.schemas.messages import Parameters
from tests.bench.codebooks import filled
from tests.bench.device import memory_in_use, peak_memory_added
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel, prompts
from tests.gpu.corrections import edit_all, new_engine, wrong_corrections
from tests.gpu.lookup import KEY_COPIES
from tests.gpu.rig import Case, Rig

REAL = ((100_000, 768), (1_000_000, 768))
SMALL = ((20_000, 64),)
BATCH, TOKENS, WAITING = 32, 20, 16


def cases(rig: Rig) -> Iterator[Case]:
    """Indexes of growing size, then each model."""
    for count, width in REAL if rig.real else SMALL:
        key_bytes = 4 * count * width
        run = partial(_index, rig, count, width)
        yield Case(
            f"index/{count // 1000}k-x-{width}", run, host_bytes=2 * key_bytes, device_bytes=KEY_COPIES * key_bytes
        )
    for shape in rig.models():
        yield Case(shape.name, partial(_model, rig, shape))


def _index(rig: Rig, count: int, width: int) -> Iterator[Row]:
    generator = np.random.default_rng(0)
    keys_ND = generator.standard_normal((count, width), np.float32)
    codebook = filled("0" * 64, "layer", keys_ND, np.ones(count, np.float32), 1)
    queries_BD = torch.from_numpy(keys_ND[:BATCH].copy()).to(rig.device)
    before = memory_in_use(rig.device)
    index = KeyIndex(codebook, rig.device)
    index.nearest_within_radius(queries_BD)
    taken = memory_in_use(rig.device) - before
    path = f"memory/index/{count // 1000}k-x-{width}"
    yield Row(f"{path}/megabytes", taken / 1e6, "MB", keys_ND.nbytes / 1e6)
    added = peak_memory_added(rig.device, partial(index.nearest_within_radius, queries_BD))
    yield Row(f"{path}/look-up-adds", added / 1e6, "MB")


def _model(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    before = memory_in_use(rig.device)
    model = shape.load(rig.device)
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    path = f"memory/{shape.name}"
    yield Row(f"{path}/model", (memory_in_use(rig.device) - before) / 1e6, "MB", weights / 1e6)
    inputs = prompts(model, BATCH, TOKENS)
    empty = Codebook("default", model.fingerprint, model.layer)
    index = KeyIndex(empty, model.device)
    added = peak_memory_added(
        rig.device, partial(model.answer, inputs, [Parameters()] * BATCH, CodebookLookup(empty, index))
    )
    yield Row(f"{path}/batch{BATCH}-adds", added / 1e6, "MB")
    corrections = wrong_corrections(shape, model, rig.count(WAITING))
    added = peak_memory_added(rig.device, partial(edit_all, new_engine(model), corrections, batched=True))
    yield Row(f"{path}/{len(corrections)}-edits-add", added / 1e6, "MB")
