"""The engine on an NVIDIA GPU gives what it gives on the CPU."""

import numpy as np
import pytest
import torch

from pipeline.editing import EditEngine
from pipeline.index import KeyIndex
from pipeline.model import EditableModel
from pipeline.plan import Plan
from pipeline.probe import TEXTS
from schemas.deltas import EntryChange, Tensor
from schemas.messages import Parameters
from tests.unit.engine.tiny import KINDS, LIMITS, MODEL, added, changed, correct, filled, new_codebook, tokenizer

pytestmark = pytest.mark.gpu


def on(kind: str, device: str) -> EditableModel:
    """A model of a kind, on a device; everywhere with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = KINDS[kind].build().to(device)
    return EditableModel(
        module, tokenizer(KINDS[kind].special_tokens), KINDS[kind].layer, limits=LIMITS, fingerprint=MODEL
    )


def test_lookup_on_the_gpu_equals_lookup_on_the_cpu() -> None:
    generator = np.random.default_rng(0)
    codebook = filled(generator.normal(size=(5000, 64)).astype(np.float32) * 100)
    queries_BD = torch.from_numpy(
        np.concatenate([codebook.keys_ND[::50] + 1e-3, generator.normal(size=(100, 64)) * 100]).astype(np.float32)
    )
    on_cpu = KeyIndex(codebook, torch.device("cpu")).nearest(queries_BD)
    on_gpu = KeyIndex(codebook, torch.device("cuda")).nearest(queries_BD.cuda())
    assert on_gpu.slots_B.cpu().tolist() == on_cpu.slots_B.tolist()
    torch.testing.assert_close(on_gpu.distances_B.cpu(), on_cpu.distances_B)


def test_an_index_on_the_gpu_follows_what_a_codebook_adds_and_removes() -> None:
    codebook = new_codebook()
    index = KeyIndex(codebook, torch.device("cuda"))
    for row in range(5):
        index.refresh(changed(codebook, added(f"e{row}", [float(row), 0.0], 1.0)))
    index.refresh(changed(codebook, EntryChange(entry_id="e2", removed=True), op="undo"))
    found = index.nearest(torch.tensor([[2.1, 0.0], [4.0, 0.0]], device="cuda"))
    assert [codebook.entry_ids[slot] for slot in found.slots_B.tolist()] == ["e3", "e4"]


def test_what_became_live_during_an_answer_can_be_changed_after_it() -> None:
    model = on("llama", "cuda")
    codebook = new_codebook(model.fingerprint, model.layer)
    index = KeyIndex(codebook, model.device)
    prompt = model.task.tokenize(TEXTS[0])
    (query_D,) = model.queries([prompt]).cpu().numpy()

    def settle() -> None:
        index.refresh(changed(codebook, added("e0", query_D, 0.01, value=np.ones(model.module.config.hidden_size))))

    (served,) = model.answer([prompt], [Parameters()], codebook, index, settle)
    assert served.hit is not None
    grown = EntryChange(entry_id="e0", key=Tensor.of(query_D + 1))
    index.refresh(changed(codebook, grown, op="expand"))
    (served,) = model.answer([prompt], [Parameters()], codebook, index)
    assert served.hit is None


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_stream_of_edits_is_decided_on_the_gpu_as_on_the_cpu(kind: str) -> None:
    outcomes = {}
    for device in ("cpu", "cuda"):
        engine = EditEngine(on(kind, device), "default", Plan())
        engine.apply(engine.lead({}))
        targets = ["right", "wrong", "both"] if kind == "bert" else ["train", "water", "bridge"]
        outcomes[device] = [
            correct(engine, f"f{number}", text, targets[number % 3], number)[0].status
            for number, text in enumerate(TEXTS[:12])
        ]
    assert outcomes["cuda"] == outcomes["cpu"]
