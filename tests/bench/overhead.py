"""What the codebook costs an inference, beside the unedited model and beside a textbook GRACE.

One forward pass over prompts of 20 tokens (and for generators the first token), one thread, CPU seconds of the
process; the three take turns, and medians are compared. Keys are real activations at the edited layer, or drawn at
random with their mean and spread, which leaves nothing to project on. A radius is 0.8 of the distance to the nearest of
512 others, and the median of those at most, as the editor's defaults have it.

The floor: 16 projections of each key are read once, and three numbers beside them, 76 bytes for each key.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from pipeline.codebook import Codebook
from pipeline.index import KeyIndex
from pipeline.model import EditableModel
from schemas.deltas import GENESIS
from schemas.messages import Parameters
from tests.bench.framework import Options, Row
from tests.bench.models import SUBJECTS, Subject
from tests.bench.textbook import TextbookGrace

TOKENS = 20
COUNTS = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
BATCHES = (1, 32)
REPEATS = {1: 60, 32: 8}
TEXTBOOK_MOST = 100_000
"""Keys, at most, that the textbook method is measured with."""


def run(options: Options) -> Iterator[Row]:
    """Every model with 10k, 100k and 1M keys; `--quick`: two models with 10k."""
    subjects = SUBJECTS[:1] + SUBJECTS[-1:] if options.quick else SUBJECTS
    counts = dict(list(COUNTS.items())[:1]) if options.quick else COUNTS
    for subject in subjects:
        model = subject.load()
        real = activations(subject, model, 100_000 if not options.quick else 20_000, options)
        for kind in ("real", "random"):
            for said, count in counts.items():
                codebook = _codebook(model, kind, real, count)
                index = KeyIndex(codebook, model.device)
                index.covering(torch.zeros(1, codebook.keys_ND.shape[1]))
                for batch in BATCHES:
                    name = f"overhead/{subject.name}/{kind}/{said}/batch{batch}"
                    yield from _measured(name, subject, model, codebook, index, batch)
                    options.tell(name)
                del codebook, index
                gc.collect()


def _measured(
    name: str, subject: Subject, model: EditableModel, codebook: Codebook, index: KeyIndex, batch: int
) -> Iterator[Row]:
    prompts = subject.prompts(model, batch * REPEATS[batch], TOKENS, seed=9)
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    parameters = [Parameters()] * batch
    everywhere = model.adaptor.replace == "all"
    token = {"first": 0, "last": -1}[model.adaptor.query]

    def bare(some: Sequence[Sequence[int]]) -> int:
        with torch.inference_mode():
            model.task.run(model.task.batch(some), parameters)
        return 0

    def ours(some: Sequence[Sequence[int]]) -> int:
        return sum(served.hit is not None for served in model.answer(some, parameters, codebook, index))

    ways: dict[str, Callable[[Sequence[Sequence[int]]], int]] = {"unedited": bare, "edited": ours}
    if len(codebook) <= TEXTBOOK_MOST:
        arrays = (torch.from_numpy(array) for array in (codebook.keys_ND, codebook.values_NV, codebook.radii_N))
        module = model.module.get_submodule(model.layer)
        keys_ND, values_NV, radii_N = arrays

        def textbook(some: Sequence[Sequence[int]]) -> int:
            grace = TextbookGrace(module, keys_ND, values_NV, radii_N, token=token, everywhere=everywhere)
            try:
                return bare(some)
            finally:
                grace.remove()

        ways["textbook"] = textbook
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    hits = 0
    for number, some in enumerate([batches[0], *batches]):
        for way, call in ways.items():
            started = time.process_time()
            hits += call(some)
            if number:  # the first of each warms up
                seconds[way].append(time.process_time() - started)
    medians = {way: statistics.median(some) for way, some in seconds.items()}
    against = medians["textbook"] / medians["unedited"] if "textbook" in ways else None
    yield Row(f"{name}/edited-of-unedited", medians["edited"] / medians["unedited"], "x", baseline=against)
    if against is not None:
        yield Row(f"{name}/textbook-of-unedited", against, "x")
    yield Row(f"{name}/unedited", 1000 * medians["unedited"], "ms")
    yield Row(f"{name}/lookup", 1000 * (medians["edited"] - medians["unedited"]), "ms")
    yield Row(f"{name}/hits", hits / (len(prompts) + batch), "share")


def activations(subject: Subject, model: EditableModel, count: int, options: Options) -> np.ndarray:
    """What the edited layer sees at every token of random prompts: (count, D)."""
    seen: list[torch.Tensor] = []
    module = model.module.get_submodule(model.layer)
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0].flatten(0, 1).float()))
    prompts = subject.prompts(model, -(-count // TOKENS), TOKENS, seed=1)
    with torch.inference_mode():
        for start in range(0, len(prompts), 100):
            batch = model.task.batch(prompts[start : start + 100])
            model.task.observe(batch)
    handle.remove()
    options.tell(f"{subject.name}: {count} activations")
    return torch.cat(seen)[:count].numpy()


def _codebook(model: EditableModel, kind: str, real_ND: np.ndarray, count: int) -> Codebook:
    """So many keys: real ones (beyond those that there are, each again with a tenth of its neighbour's distance)."""
    generator = np.random.default_rng(2)
    width = real_ND.shape[1]
    if kind == "random":
        keys_ND = generator.standard_normal((count, width), np.float32)
        keys_ND *= real_ND.std(axis=0)
        keys_ND += real_ND.mean(axis=0)
    else:
        keys_ND = np.resize(real_ND, (count, width))
        copies = keys_ND[len(real_ND) :]
        copies += generator.standard_normal(copies.shape, np.float32) * (0.1 * real_ND.std(axis=0))
    others_RD = keys_ND[generator.choice(count, 512, replace=False)]
    nearest_N = np.empty(count, np.float32)
    for start in range(0, count, 8192):
        distances = torch.cdist(torch.from_numpy(keys_ND[start : start + 8192]), torch.from_numpy(others_RD))
        distances[distances < 1e-2] = torch.inf  # a key among the others
        nearest_N[start : start + 8192] = distances.amin(dim=1).numpy()
    radii_N = np.minimum(0.8 * nearest_N, np.median(nearest_N)).astype(np.float32)
    values_NV = np.zeros(
        (count, model.module.get_submodule(model.layer)(torch.zeros(1, 1, width)).shape[-1]), np.float32
    )
    codebook = Codebook("default", model.fingerprint, model.layer)
    codebook.restore(
        seq=count, term=1, digest=GENESIS, entry_ids=[f"e{row}" for row in range(count)], labels=[(0,)] * count,
        keys_ND=keys_ND, values_NV=values_NV, radii_N=radii_N,
    )  # fmt: skip
    return codebook
