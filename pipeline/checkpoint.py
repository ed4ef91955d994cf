"""Checkpoints of Hugging Face models: loaded from a folder or a hub, and told apart by what they hold."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from pipeline.errors import UserError


class ModelError(UserError):
    """A model that cannot be loaded or edited; the text says which and why."""


def load_checkpoint(name: str, *, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """A model of one of the three kinds and its tokenizer, from a local folder or a hub id.

    Raises:
        ModelError: no such checkpoint, not of one of the three kinds, or no such device.
    """
    target = _device(device)
    with _loading("model", name):
        auto = _auto_class(AutoConfig.from_pretrained(name), name)
        model = auto.from_pretrained(name, dtype=getattr(torch, dtype)).to(target)
        return model, AutoTokenizer.from_pretrained(name)


def load_encoder(name: str, *, device: str = "auto") -> tuple[Any, Any]:
    """A model that gives each token a vector, in float32 and without heads and a pooler, and its tokenizer.

    Raises:
        ModelError: no such checkpoint, weights that it lacks, or no such device.
    """
    target = _device(device)
    with _loading("encoder", name), unreported():
        model, info = AutoModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    if lacking := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise ModelError(f"the encoder {name!r} cannot be used: its checkpoint has no {lacking[0]}")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # nothing reads it, and where a checkpoint has none it is drawn at random
    return model.to(target), tokenizer


@contextmanager
def unreported() -> Iterator[None]:
    """Without warnings of what is on purpose: a checkpoint's head that is left out, or one that is new."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _loading(kind: Literal["model", "encoder"], name: str) -> Iterator[None]:
    """What fails inside is a `ModelError` of one line."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ModelError(
            f"the {kind} {name!r} cannot be loaded: there is no such folder; set GRACESTREAM_{kind.upper()}"
        )
    transformers_logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0].rstrip(".")
        raise ModelError(f"the {kind} {name!r} cannot be loaded: {first_line}") from error


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "device 'cuda' was asked for, and torch finds no CUDA device; set GRACESTREAM_DEVICE to auto or cpu"
        )
    return wanted


def fingerprint_of(model: Any, tokenizer: Any) -> str:
    """SHA-256 over weights (as loaded, in order of name), config and tokenizer: equal models give equal keys."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    vocabulary = getattr(tokenizer, "backend_tokenizer", None)
    content = vocabulary.to_str() if vocabulary is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digest.update(content.encode())
    return digest.hexdigest()


def cached_fingerprint(model: Any, tokenizer: Any, folder: Path, cache: Path | None) -> str:
    """The fingerprint, computed once for a local folder whose files and dtype stay as they are."""
    if cache is None or not folder.is_dir():
        return fingerprint_of(model, tokenizer)
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    state = json.dumps([str(folder.resolve()), str(model.dtype), files])
    kept = cache.expanduser() / "fingerprints" / hashlib.sha256(state.encode()).hexdigest()
    if kept.exists() and len(known := kept.read_text()) == hashlib.sha256().digest_size * 2:
        return known
    fingerprint = fingerprint_of(model, tokenizer)
    kept.parent.mkdir(parents=True, exist_ok=True)
    half = kept.with_suffix(f".{id(fingerprint)}")
    half.write_text(fingerprint)
    half.replace(kept)
    return fingerprint


def _auto_class(config: Any, name: str) -> Any:
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return AutoModelForCausalLM
    raise ModelError(
        f"the model {name!r} is a {architecture or config.model_type}; gracestream edits sequence classifiers, "
        "encoder-decoders and causal language models"
    )
