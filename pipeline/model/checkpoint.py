"""Loads Hugging Face checkpoints from a local folder or a hub, without running code from them.

1. `load_checkpoint` returns a sequence classifier, an encoder-decoder or a causal language model, with its tokenizer.
2. No code of a checkpoint runs: weights are safetensors, and `trust_remote_code` is off.
3. Every failure is a `ModelError` of one sentence with the remedy (`checkpoint_faults`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from msgspec import Meta, Struct
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.utils import cached_file, has_file
from transformers.utils import logging as transformers_logging

from gracestream.pipeline.device import cuda_unavailable_reason, prepare_cuda
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.checkpoint_faults import (
    GGUF_MESSAGE,
    PROBED_FILES,
    broken_config_fault,
    describe_load_error,
    describe_tokenizer_error,
    empty_tokenizer_fault,
    missing_files_fault,
    missing_tensors_fault,
    unreadable_fault,
    unsupported_config_fault,
)

T = TypeVar("T")
"""The type that a sidecar file decodes to."""


class ModelError(UserError):
    """A model that cannot be loaded or edited. The message names the model and the reason."""


def load_checkpoint(name: str, *, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """A model of a supported kind and its tokenizer, from a local folder, a hub id, or `id@revision`.

    Raises:
        ModelError: the checkpoint or the device does not exist, or the model is of no supported kind.
        DeviceError: the environment makes the device's results inexact.
    """
    target = resolve_device(device)
    with _as_model_error("model", name):
        location, revision = _split_revision(name)
        config = AutoConfig.from_pretrained(location, trust_remote_code=False, **revision)
        auto_class = _auto_class(config, name)
        _raise_if_fault(unsupported_config_fault(config))
        tokenizer = _load_tokenizer(name)
        with suppress_load_warnings():
            model, info = auto_class.from_pretrained(
                location, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
                output_loading_info=True, **revision,
            )  # fmt: skip
        _raise_if_fault(missing_tensors_fault(info["missing_keys"]))
        return model.to(target), tokenizer


def is_causal(name: str) -> bool:
    """True if a checkpoint is a causal language model. Only its config is read, no weights.

    Raises:
        ModelError: the checkpoint does not exist or is of no supported kind.
    """
    with _as_model_error("model", name):
        location, revision = _split_revision(name)
        config = AutoConfig.from_pretrained(location, trust_remote_code=False, **revision)
        return _auto_class(config, name) is AutoModelForCausalLM


def load_encoder(name: str) -> tuple[Any, Any, int | None]:
    """A sentence encoder on the CPU, its tokenizer, and its token limit if sentence-transformers' files set one.

    The model gives one float32 vector per token, without LM head, classification head and pooler. The files of
    sentence-transformers beside the checkpoint say how these vectors become one embedding; only their mean is
    supported.

    Raises:
        ModelError: the checkpoint does not exist, lacks weights, or its embedding is not the mean of its tokens.
    """
    with _as_model_error("encoder", name), suppress_load_warnings():
        location, revision = _split_revision(name)
        _raise_if_fault(
            unsupported_config_fault(AutoConfig.from_pretrained(location, trust_remote_code=False, **revision))
        )
        tokenizer = _load_tokenizer(name)
        model, info = AutoModel.from_pretrained(
            location, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            **revision,
        )  # fmt: skip
        pooling = _read_sidecar(name, "1_Pooling/config.json", dict[str, Any])
        modules = _read_sidecar(name, "modules.json", list[_EmbeddingStep]) or []
        limits = _read_sidecar(name, "sentence_bert_config.json", _EncoderLimits) or _EncoderLimits()
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise ModelError(f"the encoder {name!r} cannot be used: its checkpoint has no {missing[0]}")
    pooling_steps = {key for key, on in (pooling or {}).items() if key.startswith("pooling_mode") and on is True}
    pooling_steps |= {module.type for module in modules if module.type.endswith(".Dense")}
    if pooling_steps - {"pooling_mode_mean_tokens"}:
        raise ModelError(
            f"the encoder {name!r} cannot be used: its embedding is not the mean of its tokens, but"
            f" {sorted(pooling_steps)}"
        )
    # Without sentence-transformers' files, the mean is assumed, except for a language model.
    if pooling is None and any(
        architecture.endswith("ForCausalLM") for architecture in model.config.architectures or ()
    ):
        raise ModelError(f"the encoder {name!r} cannot be used: it is a language model, not a sentence encoder")
    if getattr(model, "pooler", None) is not None:
        # Nothing reads the pooler, and transformers initialises it at random if the checkpoint has none.
        model.pooler = None
    return model, tokenizer, limits.max_seq_length


class _EmbeddingStep(Struct, frozen=True):
    """One step of sentence-transformers' pipeline from tokens to an embedding (`modules.json`)."""

    type: str = ""


class _EncoderLimits(Struct, frozen=True):
    """The number of tokens that the encoder reads in one pass (`sentence_bert_config.json`)."""

    max_seq_length: Annotated[int, Meta(ge=8)] | None = None


def _read_sidecar(name: str, file: str, schema: type[T]) -> T | None:
    """The decoded content of a JSON file of a checkpoint, or None without such a file."""
    location, revision = _split_revision(name)
    path = cached_file(location, file, _raise_exceptions_for_missing_entries=False, **revision)
    return None if path is None else msgspec.json.decode(Path(path).read_bytes(), type=schema)


@contextmanager
def suppress_load_warnings() -> Iterator[None]:
    """Inside this context, transformers does not warn about an LM or classification head that is dropped or new."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _load_tokenizer(name: str) -> Any:
    location, revision = _split_revision(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False, **revision)
    except Exception as error:
        if _is_hub_unreachable(error):
            raise
        raise _CheckpointFault(describe_tokenizer_error(error, _local_folder(name))) from error
    _raise_if_fault(empty_tokenizer_fault(tokenizer))
    return tokenizer


class _CheckpointFault(Exception):
    """The reason why a checkpoint cannot be used, as one sentence."""


def _raise_if_fault(fault: str | None) -> None:
    if fault is not None:
        raise _CheckpointFault(fault)


@contextmanager
def _as_model_error(kind: Literal["model", "encoder"], name: str) -> Iterator[None]:
    """Turn every failure inside this context into a `ModelError` of one sentence."""
    folder = _local_folder(name)
    prefix = f"the {kind} {name!r} cannot be loaded: "
    if folder is None and name.endswith(".gguf") and Path(name).is_file():
        raise ModelError(f"{prefix}it is GGUF, {GGUF_MESSAGE}")
    if folder is None and name.startswith(("/", ".", "~")):
        reason = "it is a file, not a folder" if Path(name).exists() else "there is no such folder"
        raise ModelError(f"{prefix}{reason}" + ("; choose another GRACESTREAM_MODEL" if kind == "model" else ""))
    transformers_logging.disable_progress_bar()
    try:
        if folder is not None:
            _raise_if_fault(unreadable_fault(folder))
            _raise_if_fault(missing_files_fault([file.name for file in folder.iterdir()], folder))
            _raise_if_fault(broken_config_fault(folder))
        yield
    except ModelError:
        raise
    except _CheckpointFault as fault:
        raise ModelError(f"{prefix}{fault}") from fault
    except Exception as error:  # for damaged files, the libraries raise exceptions of any class
        raise ModelError(f"{prefix}{_failure_reason(error, name)}") from error


def _failure_reason(error: Exception, name: str) -> str:
    folder = _local_folder(name)
    if folder is not None:
        return describe_load_error(error, folder)
    if _is_hub_unreachable(error):
        return "there is no such folder, it was not loaded from a hub before, and the hub cannot be reached"
    location, revision = _split_revision(name)
    with suppress(OSError, ValueError):  # such as a malformed hub id
        present_files = [file for file in PROBED_FILES if has_file(location, file, **revision)]
        if present_files and (fault := missing_files_fault(present_files)) is not None:
            return fault
    return describe_load_error(error, None)


def _split_revision(name: str) -> tuple[str, dict[str, str]]:
    """A folder or hub id, and the keyword argument for the revision behind `@`: a branch, a tag or a commit."""
    location, separator, revision = name.rpartition("@")
    return (location, {"revision": revision}) if separator and not _is_folder(name) else (name, {})


def _local_folder(name: str) -> Path | None:
    return Path(name) if _is_folder(name) else None


def _is_folder(name: str) -> bool:
    with suppress(OSError):  # such as a name that is too long
        return Path(name).is_dir()
    return False


def _is_hub_unreachable(error: BaseException | None) -> bool:
    """True if loading failed because the hub could not be reached.

    The hub's client reports that only in an exception in the chain of causes. Its retry after a failed connection uses
    a closed client and raises a plain `RuntimeError`.
    """
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError) or "client has been closed" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def resolve_device(requested: str) -> str:
    """The torch device for `auto`, `cpu` or `cuda`.

    Raises:
        ModelError: `cuda` is requested and torch can use no CUDA device.
        DeviceError: the environment makes the device's results inexact.
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ModelError(
            f"GRACESTREAM_DEVICE is cuda, but torch can use no CUDA device: {cuda_unavailable_reason()}. Give this"
            " process a GPU with such a driver, or set GRACESTREAM_DEVICE to cpu or auto"
        )
    prepare_cuda()
    return "cuda"


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
