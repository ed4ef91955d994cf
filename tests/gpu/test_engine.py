"""The engine on an NVIDIA GPU gives the results of the CPU, with one synchronisation per lookup.

Each test also runs on the CPU with the GPU's code: torch searches all keys, without the prefilter.
"""

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from gracestream.pipeline.codebook import key_index
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import INITIAL_CANDIDATES, MAX_CANDIDATES, KeyIndex
from gracestream.pipeline.device import CUDA_ENVIRONMENT_DEFAULTS, arithmetic_settings, prepare_cuda
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.tolerance import measure_query_noise
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.pipeline.search import key_search
from gracestream.pipeline.search.distance import exact_distances
from gracestream.pipeline.search.key_search import (
    FAISS_GPU_BYTES,
    MAX_FAISS_GPU_KEYS,
    FaissOnGpu,
    KeySearch,
    KeySearchResult,
    TorchSearch,
    _load_faiss_gpu,
    load_faiss,
    max_queries_per_call,
    search_class_for,
)
from gracestream.schemas.deltas import EntryChange, decode_delta
from gracestream.schemas.messages import Feedback, Parameters
from tests.support.editing_stories import Story
from tests.support.tiny_models import (
    KINDS,
    LIMITS,
    MODEL,
    SIZE,
    added,
    changed,
    editable,
    filled,
    new_codebook,
    sealed,
    tokenizer,
)

HALVES = [torch.float16, torch.bfloat16]


@dataclass(frozen=True, slots=True)
class Backend:
    """A device, and the search of all keys on it. None is the product's own choice."""

    device: str
    search: type[KeySearch] | None

    def index(self, codebook: Codebook) -> KeyIndex:
        return KeyIndex(codebook, torch.device(self.device), self.search)

    def story(self, model: EditableModel) -> Story:
        """A new engine and its history, in the first term."""
        engine = EditEngine(model, "default", EditConfig())
        engine.index = self.index(engine.codebook)
        story = Story(engine)
        story.lead(engine.config)
        return story

    def engine(self, model: EditableModel) -> EditEngine:
        """A new engine in its first term."""
        return self.story(model).engine


BACKENDS = [
    pytest.param(Backend("cpu", TorchSearch), id="cpu"),
    pytest.param(Backend("cuda", TorchSearch), id="cuda", marks=pytest.mark.gpu),
    pytest.param(Backend("cuda", FaissOnGpu), id="cuda-faiss", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    if found.search is FaissOnGpu and not hasattr(load_faiss(), "StandardGpuResources"):
        pytest.skip("faiss-gpu is not installed")
    if found.device == "cuda":
        prepare_cuda()
    return found


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the settings that a search for CUDA changes."""
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for name, value in CUDA_ENVIRONMENT_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    yield
    torch.set_float32_matmul_precision(was[0])
    torch.backends.cudnn.allow_tf32 = was[1]


def scene(seed: int, norm: float, spread: float, count: int = 3000, clusters: int = 4) -> tuple[np.ndarray, Codebook]:
    """Queries within, near and far from radii; keys in clusters off the origin, many of them twice."""
    generator = np.random.default_rng(seed)
    centers = norm * generator.standard_normal((clusters, 48))
    keys_ND = centers[generator.integers(0, clusters, count)] + spread * generator.standard_normal((count, 48))
    keys_ND = keys_ND[generator.integers(0, count, count)].astype(np.float32)
    near_BD = keys_ND[:60] + spread * generator.uniform(0, 2, (60, 1)) * generator.standard_normal((60, 48))
    queries_BD = np.concatenate([near_BD, keys_ND[:8], centers]).astype(np.float32)
    return queries_BD, filled(keys_ND, spread * 48**0.5 * generator.random(count))


def brute_force(queries_BD: np.ndarray, codebook: Codebook) -> tuple[list[int], np.ndarray]:
    """The slot of the nearest key of each query, and its distance."""
    distances_BN = exact_distances(torch.from_numpy(queries_BD), torch.from_numpy(codebook.keys_ND)[None]).numpy()
    slots = [
        min(np.flatnonzero(distances_N == distances_N.min()), key=codebook.entry_ids.__getitem__)
        for distances_N in distances_BN
    ]
    return list(map(int, slots)), distances_BN.min(axis=1)


@pytest.mark.parametrize(("norm", "spread"), [(0.0, 1.0), (100.0, 1.0), (1e4, 0.05), (1e4, 100.0)])
def test_lookups_equal_those_of_brute_force(backend: Backend, norm: float, spread: float) -> None:
    queries_BD, codebook = scene(1, norm, spread)
    index, on_host = backend.index(codebook), KeyIndex(codebook, torch.device("cpu"))
    device_BD = torch.from_numpy(queries_BD).to(backend.device)
    slots, distances_B = brute_force(queries_BD, codebook)
    nearest, covering = index.nearest(device_BD), index.nearest_within_radius(device_BD)
    assert nearest.slots_B.tolist() == slots
    np.testing.assert_allclose(nearest.distances_B.numpy(), distances_B, rtol=2e-7)
    expected = on_host.nearest_within_radius(torch.from_numpy(queries_BD))
    assert covering.slots_B.tolist() == expected.slots_B.tolist()
    torch.testing.assert_close(covering.distances_B, expected.distances_B)
    assert 0 < sum(slot >= 0 for slot in covering.slots_B.tolist()) < len(queries_BD)


@pytest.mark.gpu
def test_torch_searches_more_keys_than_faiss_may(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(load_faiss(), "StandardGpuResources"):
        pytest.skip("faiss-gpu is not installed")
    queries_BD, codebook = scene(1, 100.0, 1.0)
    index = Backend("cuda", FaissOnGpu).index(codebook)
    monkeypatch.setattr(key_search, "MAX_FAISS_GPU_KEYS", len(codebook) - 1)
    monkeypatch.setattr(FaissOnGpu, "_knn", lambda *_: pytest.fail("FAISS searched"))
    found = index.nearest(torch.from_numpy(queries_BD).to("cuda"))
    assert found.slots_B.tolist() == brute_force(queries_BD, codebook)[0]


def test_all_keys_are_compared_only_if_candidates_do_not_decide(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also far from the origin, where products of uncentred keys cannot distinguish them."""
    queries_BD, codebook = scene(7, 1e3, 1.0, clusters=1)
    index = backend.index(codebook)
    monkeypatch.setattr(key_index, "_squared_distances", lambda *_: pytest.fail("all keys were compared"))
    index.nearest_within_radius(torch.from_numpy(queries_BD).to(backend.device))


def test_a_lookup_is_one_search_and_one_synchronisation(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronisations are counted on a GPU, except those inside FAISS."""
    generator = np.random.default_rng(5)
    index = backend.index(filled(generator.standard_normal((3000, 48), np.float32), 6.0))
    device_BD = torch.from_numpy(generator.standard_normal((32, 48), np.float32)).to(backend.device)
    index.nearest_within_radius(device_BD[:1])  # copies the keys to the device
    searches, search = [], index._search.search

    def counting(queries_BD: torch.Tensor, count: int) -> KeySearchResult:
        searches.append(count)
        return search(queries_BD, count)

    monkeypatch.setattr(index._search, "search", counting)
    with warnings.catch_warnings(record=True) as caught, warn_on_sync(backend.device):
        warnings.simplefilter("always")
        index.nearest_within_radius(device_BD)
    assert searches == [INITIAL_CANDIDATES]
    if backend.search is TorchSearch:
        synchronisations = [one for one in caught if "called a synchronizing" in str(one.message)]
        assert len(synchronisations) == (backend.device == "cuda")


@contextmanager
def warn_on_sync(device: str) -> Iterator[None]:
    """Torch warns of each operation that synchronises with the GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("copies", [2, INITIAL_CANDIDATES + 1, MAX_CANDIDATES + 100])
def test_the_first_id_wins_among_equal_distances(backend: Backend, copies: int) -> None:
    """Also with more ties than candidates of one search: then all keys are compared."""
    generator = np.random.default_rng(2)
    far_ND = 1000 + generator.standard_normal((300, 8))
    keys_ND = np.concatenate([far_ND, np.tile(generator.standard_normal(8), (copies, 1))]).astype(np.float32)
    codebook = filled(keys_ND)
    first = min(range(300, 300 + copies), key=codebook.entry_ids.__getitem__)
    found = backend.index(codebook).nearest(torch.zeros(2, 8, device=backend.device))
    assert found.slots_B.tolist() == [first, first]


def test_nan_queries_and_an_empty_codebook_have_no_nearest_key(backend: Backend) -> None:
    queries_BD = torch.zeros(3, 4, device=backend.device)
    queries_BD[1, 2] = torch.nan
    assert backend.index(filled(np.ones((50, 4)))).nearest(queries_BD).slots_B.tolist() == [0, -1, 0]
    assert backend.index(new_codebook()).nearest_within_radius(queries_BD).slots_B.tolist() == [-1, -1, -1]
    huge = np.full((40, 4), 1e25) * np.arange(1, 41)[:, None]
    found = backend.index(filled(huge)).nearest(torch.full((1, 4), 3e25, device=backend.device))
    assert found.slots_B.tolist() == [2]


def test_an_index_follows_added_and_removed_entries(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracestream.pipeline.search.key_search.INITIAL_KEY_CAPACITY", 8)
    generator = np.random.default_rng(3)
    codebook = new_codebook()
    index = backend.index(codebook)
    for step in range(120):
        removed = [EntryChange(entry_id=f"e{step - 20}", removed=True)] if f"e{step - 20}" in codebook else []
        index.refresh(changed(codebook, added(f"e{step}", generator.normal(size=3), 1.0), *removed, op="undo"))
        if step % 7 == 0:
            queries_BD = generator.normal(size=(4, 3)).astype(np.float32)
            found = index.nearest(torch.from_numpy(queries_BD).to(backend.device))
            assert found.slots_B.tolist() == brute_force(queries_BD, codebook)[0]


def targets(kind: str) -> list[str]:
    labels = ["right", "wrong", "both"] if kind == "bert" else ["train", "river", "bridge"]
    return [labels[number % 3] for number in range(12)]


def corrections(kind: str) -> list[tuple[Feedback, int]]:
    """Twelve corrections with their offsets."""
    return [
        (make_correction(f"f{number}", text, target), number)
        for number, (text, target) in enumerate(zip(PROBE_TEXTS, targets(kind), strict=False))
    ]


def corrected(engine: EditEngine, kind: str) -> tuple[list[str], list[bytes]]:
    """Apply twelve corrections; the first six are trained together. Returns statuses and deltas."""
    numbered = corrections(kind)
    drafts = engine.draft_values(numbered[:6])
    statuses: list[str] = []
    records = []
    for feedback, offset in numbered:
        result = engine.edit(feedback, offset, draft=drafts.get(offset))
        assert result.outcome is not None
        statuses.append(result.outcome.status)
        if result.delta_record is not None:
            engine.apply(result.delta_record)
            records.append(result.delta_record)
    return statuses, records


def answers(engine: EditEngine, batch: int = 5) -> list[tuple[str, str | None]]:
    """The answer to each input, and the serving entry."""
    found = []
    prompts = [engine.model.task.tokenize(text) for text in PROBE_TEXTS[:20]]
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        served = engine.model.answer(some, [Parameters()] * len(some), engine.lookup)
        for one in served:
            outputs = one.answer.outputs
            text = outputs.text if isinstance(outputs.text, str) else outputs.label
            found.append((str(text), None if one.served_by is None else one.served_by.entry_id))
    return found


@functools.cache
def streamed(backend: Backend, kind: str) -> tuple[EditEngine, list[str], list[bytes]]:
    """An engine after twelve corrections, their statuses and deltas. Tests do not change it."""
    engine = backend.engine(editable(kind, device=backend.device))
    return engine, *corrected(engine, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_stream_of_edits_has_the_decisions_and_answers_of_the_cpu(backend: Backend, kind: str) -> None:
    engine, statuses, _ = streamed(backend, kind)
    on_cpu = EditEngine(editable(kind), "default", EditConfig())
    on_cpu.apply(on_cpu.lead_delta({}))
    assert statuses == corrected(on_cpu, kind)[0]
    found = answers(engine)
    assert found == answers(on_cpu)
    accepted = [row for row, status in enumerate(statuses) if status != "rejected"]
    assert len(accepted) > 4
    assert [found[row][0] for row in accepted] == [targets(kind)[row] for row in accepted]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_stream_gives_the_same_deltas_byte_for_byte(backend: Backend, kind: str) -> None:
    _, _, first = streamed(backend, kind)
    _, second = corrected(backend.engine(editable(kind, device=backend.device)), kind)
    assert first == second
    assert first


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_reproduced_history_gives_its_deltas_byte_for_byte(backend: Backend, kind: str) -> None:
    """As in `replay --reproduce`, with another copy of the model; decisions repeated by an undo, too."""
    reproduce = pytest.importorskip(
        "gracestream.pipeline.reproduction.reproduce",
        reason="retraining needs the packages of a worker: `pip install .`",
    )
    story = backend.story(editable(kind, device=backend.device))
    statuses, records = corrected(story.engine, kind)
    story.deltas += records
    story.feedback += [feedback for feedback, _ in corrections(kind)]
    assert story.undo("u", f"f{statuses.index('added')}").status == "undone"
    model = editable(kind, device=backend.device)
    second = reproduce.ReproductionRun(
        model, dict(enumerate(story.feedback)), lambda plan: describe_environment(model, plan)
    )
    assert all(map(second.reproduce, story.deltas)), second.report
    assert second.records == story.deltas
    assert second.report.decisions == second.report.same_records == len(story.deltas) - 1
    assert (second.report.value_difference, second.report.other_environment) == (0.0, {})
    values = [change for record in story.deltas for change in decode_delta(record).entries if change.value is not UNSET]
    assert len(values) > 4


def replaced(backend: Backend, others: int) -> Story:
    """`others` entries far from all queries, then two corrections of the same input."""
    story = backend.story(editable("bert", device=backend.device))
    model, book = story.engine.model, story.engine.codebook
    width = model.queries([model.task.tokenize(PROBE_TEXTS[0])]).shape[1]
    keys_ND = 1e3 + np.random.default_rng(8).standard_normal((others, width), np.float32)
    value_V = np.zeros(model.module.config.hidden_size)
    story.apply(sealed(book, *(added(f"other{row}", key_D, 1.0, value=value_V) for row, key_D in enumerate(keys_ND))))
    for name, target in (("first", "wrong"), ("second", "both")):
        assert story.take(make_correction(name, PROBE_TEXTS[0], target)).status in ("added", "replaced")
    return story


def test_an_undo_has_the_decisions_of_the_cpu(backend: Backend) -> None:
    story, on_cpu = replaced(backend, 300), replaced(Backend("cpu", None), 300)
    for one in (story, on_cpu):
        assert one.undo("u", "first").status == "undone"
        assert set(decode_delta(one.deltas[-1]).decided) == {"second"}
    assert story.engine.codebook.entry_ids == on_cpu.engine.codebook.entry_ids
    assert answers(story.engine) == answers(on_cpu.engine)
    assert answers(story.engine)[0] == ("both", "second")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5-decoder", "bert"])
def test_edits_of_a_model_in_half_precision_are_served(backend: Backend, kind: str, dtype: torch.dtype) -> None:
    engine = backend.engine(editable(kind, device=backend.device, dtype=dtype))
    engine.config = EditConfig(recipe=ValueTrainingConfig(learning_rate=0.5))
    statuses, _ = corrected(engine, kind)
    accepted = [row for row, status in enumerate(statuses) if status != "rejected"]
    assert len(accepted) > 6
    for batch in (1, 20):
        found = answers(engine, batch)
        assert [found[row][0] for row in accepted] == [targets(kind)[row] for row in accepted]


def encoder(device: str) -> SentenceEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=24, initializer_range=0.3, pad_token_id=0,
        )  # fmt: skip
        module = BertModel(config)
    return SentenceEncoder(module.to(device), tokenizer("bert"), "encoder")


def test_queries_and_edits_with_an_encoder_equal_those_of_the_cpu(backend: Backend) -> None:
    engine = backend.engine(editable("llama", device=backend.device, encoder=encoder(backend.device)))
    on_cpu = EditEngine(editable("llama", encoder=encoder("cpu")), "default", EditConfig())
    on_cpu.apply(on_cpu.lead_delta({}))
    ours_BD, theirs_BD = (
        one.model.queries([one.model.task.tokenize(text) for text in PROBE_TEXTS[:12]]).cpu()
        for one in (engine, on_cpu)
    )
    torch.testing.assert_close(ours_BD, theirs_BD, atol=1e-5, rtol=1e-5)
    assert corrected(engine, "llama")[0] == corrected(on_cpu, "llama")[0]
    assert answers(engine) == answers(on_cpu)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5-encoder", "bert"])
def test_the_tolerance_covers_the_noise_of_queries(backend: Backend, kind: str, dtype: torch.dtype) -> None:
    """On the device, and between the device and a CPU."""
    model = editable(kind, device=backend.device, dtype=dtype)
    alone, between = measure_query_noise(model), measure_query_noise(model, editable(kind, dtype=dtype))
    assert alone.of_tolerance <= 1, alone
    assert between.of_tolerance <= 1, between


def test_keys_on_a_gpu_are_never_searched_on_the_host() -> None:
    """Not even with faiss-cpu installed, which takes only numpy arrays."""
    on_gpu = FaissOnGpu if hasattr(load_faiss(), "StandardGpuResources") else TorchSearch
    assert search_class_for(torch.device("cuda")) is on_gpu


class FaissRehearsed(FaissOnGpu):
    """FAISS on the host answers its calls, and their sizes are recorded."""

    calls: list[int]

    def _knn(self, points_BD: torch.Tensor, points_ND: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls = [*getattr(self, "calls", []), len(points_BD)]
        faiss: Any = load_faiss()
        squares_BK, slots_BK = faiss.knn(points_BD.numpy(), points_ND.numpy(), count)
        return torch.from_numpy(squares_BK), torch.from_numpy(slots_BK)


def test_a_batch_beyond_the_memory_of_faiss_is_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    queries_BD, codebook = scene(1, 100.0, 1.0)
    index = KeyIndex(codebook, torch.device("cpu"), FaissRehearsed)
    search = index._search
    assert isinstance(search, FaissRehearsed)
    monkeypatch.setattr("gracestream.pipeline.search.key_search.FAISS_GPU_BYTES", 2**19)
    index._sync_search()
    search.calls = []
    search.search(torch.from_numpy(queries_BD), INITIAL_CANDIDATES)
    assert len(search.calls) > 2
    assert sum(search.calls) == len(queries_BD)
    assert max(search.calls) == max_queries_per_call(len(codebook), INITIAL_CANDIDATES)
    assert index.nearest(torch.from_numpy(queries_BD)).slots_B.tolist() == brute_force(queries_BD, codebook)[0]


@pytest.mark.parametrize("count", [INITIAL_CANDIDATES, MAX_CANDIDATES])
@pytest.mark.parametrize("keys", [1000, MAX_FAISS_GPU_KEYS])
def test_a_call_of_faiss_stays_within_its_memory(keys: int, count: int) -> None:
    """Sums the rounded-up arrays that FAISS's `runDistance` allocates. A normal batch is one call."""
    queries = max_queries_per_call(keys, count)
    numbers = [queries * keys, queries * count, 2 * queries * count]
    arrays = [4 * number for number in (keys, queries, *numbers, *numbers)]
    assert sum(256 * math.ceil(size / 256) for size in arrays) <= FAISS_GPU_BYTES
    assert queries >= 64


class Transfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.device.type == "cpu":
            given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Tensor)]
            self.count += any(one.device.type != "cpu" for one in given)
        return found


@pytest.mark.usefixtures("prepared")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on the GPU cover this")
class TestWithFakeCudaTensors:
    """Fake tensors have no data: mixing devices raises an error, and so does reading a number."""

    @pytest.fixture(autouse=True)
    def modelled(self) -> Iterator[None]:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - slow to import

        with FakeTensorMode(allow_non_fake_inputs=True):
            yield

    def test_nothing_comes_to_the_host_before_the_end_of_a_search(self) -> None:
        held = np.ones((40, 6), np.float32)
        search = TorchSearch(torch.device("cuda"), lambda: held)
        search.sync(None)
        search.sync([3, 5])
        with Transfers() as transfers:  # type: ignore[no-untyped-call]
            compared = search._compare(torch.empty(7, 6, device="cuda"), INITIAL_CANDIDATES)
        assert transfers.count == 0
        assert (compared.device.type, compared.shape) == ("cuda", (7, 4 + 2 * INITIAL_CANDIDATES))

    @pytest.mark.parametrize("kind", list(KINDS))
    def test_passes_through_a_model_do_not_mix_devices(self, kind: str) -> None:
        with torch.device("cuda"):
            module = KINDS[kind].build()
        model = EditableModel(
            module, tokenizer(KINDS[kind].special_tokens), KINDS[kind].layer, limits=LIMITS, fingerprint=MODEL
        )
        prompts = [model.task.tokenize(text) for text in PROBE_TEXTS[:3]]
        assert model.queries(prompts).device.type == "cuda"
        supervised = model.prepare_correction(PROBE_TEXTS[0], targets(kind)[0])[1]
        causal = kind in ("llama", "gpt2")  # its cached prefix depends on a number: the end of the prompt
        with torch.no_grad():
            with model.adaptor.record_output(supervised.batch) as session:
                logits, rest = model.suffix_runner._run_whole_pass(supervised, "none" if causal else "all")
            edited = model.suffix_runner._edited_logits(rest, session.outputs_BV)
        assert {one.device.type for one in (*logits, *edited, session.outputs_BV)} == {"cuda"}
        batch, values_BV = model.task.batch(prompts), torch.zeros(3, session.outputs_BV.shape[1], device="cpu")
        on_host = torch.tensor([True, False, True]), values_BV
        with torch.inference_mode(), model.adaptor.with_lookup(batch, lambda _: on_host) as session:
            model.task.forward_prompt(batch)
        assert session.inject_mask_B is not None
        assert {session.queries_BD.device.type, session.inject_mask_B.device.type} == {"cuda"}


@pytest.mark.gpu
class TestOnGpu:
    """Checks that need a GPU."""

    def test_keys_need_twice_their_memory_and_a_search_little_more(self) -> None:
        count, width = 50_000, 512
        keys_ND = np.random.default_rng(6).standard_normal((count, width), np.float32)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        search = TorchSearch(torch.device("cuda"), lambda: keys_ND)
        search.sync(None)
        held = torch.cuda.memory_allocated() - before
        assert held < 1.3 * 2 * keys_ND.nbytes
        torch.cuda.reset_peak_memory_stats()
        search.search(torch.zeros(32, width, device="cuda"), MAX_CANDIDATES)
        assert torch.cuda.max_memory_allocated() - before - held < 500 * 2**20

    def test_an_undo_does_not_copy_the_keys(self) -> None:
        story = replaced(Backend("cuda", TorchSearch), 30_000)
        keys_bytes = story.engine.codebook.keys_ND.nbytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert story.undo("u", "first").status == "undone"
        assert set(decode_delta(story.deltas[-1]).decided) == {"second"}
        assert torch.cuda.max_memory_allocated() - before < keys_bytes / 2

    def test_a_large_batch_fits_the_reserved_memory_of_faiss(self, capfd: pytest.CaptureFixture[str]) -> None:
        if not hasattr(load_faiss(), "StandardGpuResources"):
            pytest.skip("faiss-gpu is not installed")
        keys_ND = np.random.default_rng(6).standard_normal((MAX_FAISS_GPU_KEYS, 64), np.float32)
        search = FaissOnGpu(torch.device("cuda"), lambda: keys_ND)
        search.sync(None)
        _, resources = _load_faiss_gpu()
        resources.setLogMemoryAllocations(True)
        try:
            search.search(torch.zeros(512, 64, device="cuda"), MAX_CANDIDATES)
        finally:
            resources.setLogMemoryAllocations(False)
        output = capfd.readouterr().out
        assert "alloc ok" in output
        assert "no temp space" not in output

    def test_the_environment_has_the_settings_that_change_results(self) -> None:
        prepare_cuda()
        settings = arithmetic_settings(torch.device("cuda"))
        assert settings["tf32"] == "False"
        assert settings["cublas_workspace"] == ":4096:8"
        assert settings["driver"] != "unknown"
        assert settings["cuda"] == torch.version.cuda
