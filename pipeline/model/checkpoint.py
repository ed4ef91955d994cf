"""Checkpoints of Hugging Face models: loaded from a folder or a hub, and told apart by what they hold."""

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


class ModelError(UserError):
    """A model that cannot be loaded or edited; the text says which and why."""


def load_checkpoint(name: str, *, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """A model of one of the three kinds and its tokenizer, from a local folder, a hub id or `id@revision`.

    Raises:
        ModelError: no such checkpoint, not of one of the three kinds, or no such device.
    """
    target = resolve_device(device)
    with _as_model_error("model", name):
        place, pinned = _split_revision(name)
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, **pinned)
        auto = _auto_class(config, name)
        _raise_if_fault(unsupported_config_fault(config))
        tokenizer = _load_tokenizer(name)
        with suppress_load_warnings():
            model, info = auto.from_pretrained(
                place, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
                output_loading_info=True, **pinned,
            )  # fmt: skip
        _raise_if_fault(missing_tensors_fault(info["missing_keys"]))
        return model.to(target), tokenizer


def is_causal(name: str) -> bool:
    """Whether a checkpoint is a causal language model. Its config says so; no weights are read.

    Raises:
        ModelError: no such checkpoint, or not of one of the three kinds.
    """
    with _as_model_error("model", name):
        place, pinned = _split_revision(name)
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, **pinned)
        return _auto_class(config, name) is AutoModelForCausalLM


def load_encoder(name: str) -> tuple[Any, Any, int | None]:
    """A sentence encoder on the CPU, its tokenizer, and the tokens that it reads at once, where its files say so.

    It gives each token a vector, in float32; heads and a pooler are left out. The files beside a checkpoint that tell
    how its tokens become one vector are sentence-transformers' own.

    Raises:
        ModelError: no such checkpoint, weights that it lacks, or one whose embedding is not the mean of its tokens.
    """
    with _as_model_error("encoder", name), suppress_load_warnings():
        place, pinned = _split_revision(name)
        _raise_if_fault(unsupported_config_fault(AutoConfig.from_pretrained(place, trust_remote_code=False, **pinned)))
        tokenizer = _load_tokenizer(name)
        model, info = AutoModel.from_pretrained(
            place, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            **pinned,
        )  # fmt: skip
        pooling = _read_sidecar(name, "1_Pooling/config.json", dict[str, Any])
        modules = _read_sidecar(name, "modules.json", list[_EmbeddingStep]) or []
        sizes = _read_sidecar(name, "sentence_bert_config.json", _EncoderLimits) or _EncoderLimits()
    if lacking := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise ModelError(f"the encoder {name!r} cannot be used: its checkpoint has no {lacking[0]}")
    others = {key for key, on in (pooling or {}).items() if key.startswith("pooling_mode") and on is True}
    others |= {module.type for module in modules if module.type.endswith(".Dense")}
    if others - {"pooling_mode_mean_tokens"}:
        raise ModelError(
            f"the encoder {name!r} cannot be used: its embedding is not the mean of its tokens, but {sorted(others)}"
        )
    if pooling is None and any(kind.endswith("ForCausalLM") for kind in model.config.architectures or ()):
        raise ModelError(f"the encoder {name!r} cannot be used: it is a language model, no sentence encoder")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # nothing reads it, and where a checkpoint has none it is drawn at random
    return model, tokenizer, sizes.max_seq_length


class _EmbeddingStep(Struct, frozen=True):
    """A step of sentence-transformers, from tokens to an embedding."""

    type: str = ""


class _EncoderLimits(Struct, frozen=True):
    """Tokens that are read at once."""

    max_seq_length: Annotated[int, Meta(ge=8)] | None = None


def _read_sidecar(name: str, file: str, schema: type[T]) -> T | None:
    """What a JSON file of a checkpoint says; None where there is none."""
    place, pinned = _split_revision(name)
    path = cached_file(place, file, _raise_exceptions_for_missing_entries=False, **pinned)
    return None if path is None else msgspec.json.decode(Path(path).read_bytes(), type=schema)


@contextmanager
def suppress_load_warnings() -> Iterator[None]:
    """Without warnings of what is on purpose: a checkpoint's head that is left out, or one that is new."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _load_tokenizer(name: str) -> Any:
    place, pinned = _split_revision(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **pinned)
    except Exception as error:
        if _is_hub_unreachable(error):
            raise
        raise _CheckpointFault(describe_tokenizer_error(error, _local_folder(name))) from error
    _raise_if_fault(empty_tokenizer_fault(tokenizer))
    return tokenizer


class _CheckpointFault(Exception):
    """Why a checkpoint cannot be used, as a sentence."""


def _raise_if_fault(fault: str | None) -> None:
    if fault is not None:
        raise _CheckpointFault(fault)


@contextmanager
def _as_model_error(kind: Literal["model", "encoder"], name: str) -> Iterator[None]:
    """What fails inside is a `ModelError` of one sentence."""
    folder = _local_folder(name)
    cannot = f"the {kind} {name!r} cannot be loaded: "
    if folder is None and name.endswith(".gguf") and Path(name).is_file():
        raise ModelError(f"{cannot}it is GGUF, {GGUF_MESSAGE}")
    if folder is None and name.startswith(("/", ".", "~")):
        there = "it is a file, not a folder" if Path(name).exists() else "there is no such folder"
        raise ModelError(f"{cannot}{there}" + ("; choose another GRACESTREAM_MODEL" if kind == "model" else ""))
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
        raise ModelError(f"{cannot}{fault}") from fault
    except Exception as error:  # the libraries raise errors of any kind for the files of a checkpoint
        raise ModelError(f"{cannot}{_failure_reason(error, name)}") from error


def _failure_reason(error: Exception, name: str) -> str:
    folder = _local_folder(name)
    if folder is not None:
        return describe_load_error(error, folder)
    if _is_hub_unreachable(error):
        return "there is no such folder, it was not loaded from a hub before, and the hub cannot be reached"
    place, pinned = _split_revision(name)
    with suppress(OSError, ValueError):  # such as a hub id that is none
        there = [file for file in PROBED_FILES if has_file(place, file, **pinned)]
        if there and (fault := missing_files_fault(there)) is not None:
            return fault
    return describe_load_error(error, None)


def _split_revision(name: str) -> tuple[str, dict[str, str]]:
    """A folder or hub id, and the revision of a hub id that stands behind an `@`: a branch, a tag or a commit."""
    place, found, revision = name.rpartition("@")
    return (place, {"revision": revision}) if found and not _is_folder(name) else (name, {})


def _local_folder(name: str) -> Path | None:
    return Path(name) if _is_folder(name) else None


def _is_folder(name: str) -> bool:
    with suppress(OSError):  # such as for a name that is too long
        return Path(name).is_dir()
    return False


def _is_hub_unreachable(error: BaseException | None) -> bool:
    """Whether a loading failed for want of a network: the hub's client names that only in what lies behind the error.

    Its second try after a failed connection ends in a closed client, for which it has a bare `RuntimeError`.
    """
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError) or "client has been closed" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def resolve_device(requested: str) -> str:
    """The device that `auto`, `cpu` or `cuda` stands for.

    Raises:
        ModelError: there is none such.
        DeviceError: the environment makes its results inexact.
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ModelError(
            f"GRACESTREAM_DEVICE is cuda, but torch can use no CUDA device: {cuda_unavailable_reason()}. Give this"
            " process a GPU"
            " with such a driver, or set GRACESTREAM_DEVICE to cpu or auto"
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
