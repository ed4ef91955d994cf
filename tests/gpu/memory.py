"""Memory on the device, against the bytes that have to be there."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.schemas.messages import Parameters
from tests.bench.codebooks import filled
from tests.bench.device import held, peak
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel, prompts
from tests.gpu.corrections import edit_all, engine_of, wrong_ones
from tests.gpu.lookup import COPIES
from tests.gpu.rig import Case, Rig

REAL = ((100_000, 768), (1_000_000, 768))
SMALL = ((20_000, 64),)
BATCH, TOKENS, WAITING = 32, 20, 16


def cases(rig: Rig) -> Iterator[Case]:
    """Indexes of growing size, and each model."""
    for count, width in REAL if rig.real else SMALL:
        copy = 4 * count * width
        run = partial(_index, rig, count, width)
        yield Case(f"index/{count // 1000}k-x-{width}", run, host_bytes=2 * copy, device_bytes=COPIES * copy)
    for shape in rig.models():
        yield Case(shape.name, partial(_model, rig, shape))


def _index(rig: Rig, count: int, width: int) -> Iterator[Row]:
    generator = np.random.default_rng(0)
    keys_ND = generator.standard_normal((count, width), np.float32)
    codebook = filled("0" * 64, "layer", keys_ND, np.ones(count, np.float32), 1)
    queries_BD = torch.from_numpy(keys_ND[:BATCH].copy()).to(rig.device)
    before = held(rig.device)
    index = KeyIndex(codebook, rig.device)
    index.nearest_within_radius(queries_BD)
    taken = held(rig.device) - before
    path = f"memory/index/{count // 1000}k-x-{width}"
    yield Row(f"{path}/megabytes", taken / 1e6, "MB", keys_ND.nbytes / 1e6)
    added = peak(rig.device, partial(index.nearest_within_radius, queries_BD))
    yield Row(f"{path}/look-up-adds", added / 1e6, "MB")


def _model(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    before = held(rig.device)
    model = shape.load(rig.device)
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    path = f"memory/{shape.name}"
    yield Row(f"{path}/model", (held(rig.device) - before) / 1e6, "MB", weights / 1e6)
    asked = prompts(model, BATCH, TOKENS)
    empty = Codebook("default", model.fingerprint, model.layer)
    index = KeyIndex(empty, model.device)
    added = peak(rig.device, partial(model.answer, asked, [Parameters()] * BATCH, CodebookLookup(empty, index)))
    yield Row(f"{path}/batch{BATCH}-adds", added / 1e6, "MB")
    given = wrong_ones(shape, model, rig.some(WAITING))
    added = peak(rig.device, partial(edit_all, engine_of(model), given, together=True))
    yield Row(f"{path}/{len(given)}-edits-add", added / 1e6, "MB")
