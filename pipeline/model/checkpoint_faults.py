"""Explains why a checkpoint cannot be loaded: one sentence with the remedy for each common cause.

1. `missing_files_fault` checks the names of a checkpoint's files before any content is read.
2. `unsupported_config_fault` checks the config: quantised weights and code from a hub are rejected.
3. `describe_load_error` turns a library's exception into a sentence.

Not promised: a checkpoint without a fault here may still fail to load.
"""

import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CONFIG_FILE, ADAPTER_CONFIG_FILE = "config.json", "adapter_config.json"
"""The files that describe a whole model and an adapter (LoRA or similar)."""

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
"""A checkpoint's weights as one file, and the index of weights in several files."""

PICKLED_WEIGHT_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The same as pickles, which are never loaded because a pickle can run code."""

PROBED_FILES = (CONFIG_FILE, ADAPTER_CONFIG_FILE, *WEIGHT_FILES, *PICKLED_WEIGHT_FILES)
"""The files whose presence shows the kind of a checkpoint. A hub is queried for each file by name."""

VOCABULARY_FILE_PREFIXES = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "tekken", "source.")
"""Prefixes of the names of files with a tokenizer's vocabulary."""

LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the text file that stands for a file which Git LFS has not downloaded."""

MIN_VOCABULARY_TOKENS = 4
"""The smallest plausible vocabulary without special tokens: the four letters of DNA."""

CUSTOM_CODE_MESSAGE = (
    "it needs code of its own (auto_map), and gracestream runs no code of a checkpoint; choose a checkpoint of an"
    " architecture that transformers has"
)
GGUF_MESSAGE = (
    "which is quantised; choose the original checkpoint, or convert it: transformers' `from_pretrained` takes"
    " `gguf_file`, and `save_pretrained` writes a checkpoint"
)
NO_TOKENIZER_MESSAGE = (
    "it has no tokenizer; copy the tokenizer's files (such as tokenizer.json) of the original checkpoint to it"
)


def unreadable_fault(folder: Path) -> str | None:
    """The fault of a folder if this process may not read it or a file in it."""
    unreadable = next((path for path in (folder, *sorted(folder.glob("*"))) if not os.access(path, os.R_OK)), None)
    if unreadable is None:
        return None
    return (
        f"the user {os.geteuid()} may not read {str(unreadable)!r}; run `chmod -R a+rX {str(folder)!r}` on the machine"
        " that holds it"
    )


def missing_files_fault(names: Collection[str], folder: Path | None = None) -> str | None:
    """The fault of a checkpoint with these file names, or None; `folder` is None for a checkpoint on a hub."""
    if ADAPTER_CONFIG_FILE in names:
        return (
            f"it is an adapter{_adapter_base(folder)} (LoRA or the like), not a whole model; merge it into its base"
            " with peft (`merge_and_unload`), save that with `save_pretrained`, and choose the folder of the result"
        )
    gguf_files = sorted(name for name in names if name.endswith(".gguf"))
    has_weights = any(name.endswith(".safetensors") for name in names) or WEIGHT_FILES[1] in names
    if gguf_files and not has_weights:
        return f"it holds GGUF ({gguf_files[0]}), {GGUF_MESSAGE}"
    if CONFIG_FILE not in names:
        return (
            "it has no config.json; choose the folder of a Hugging Face checkpoint: config, safetensors and tokenizer"
        )
    if not has_weights:
        pickled_files = sorted(
            name for name in names if name in PICKLED_WEIGHT_FILES or name.endswith((".bin", ".pt", ".pth", ".ckpt"))
        )
        if pickled_files:
            return (
                f"its weights are pickled ({pickled_files[0]}), and a pickle can run code; save them as safetensors:"
                " transformers' `from_pretrained`, then `save_pretrained`"
            )
        return "it has no weights (model.safetensors); copy or download them to it"
    return None


def broken_config_fault(folder: Path) -> str | None:
    """The fault of a folder whose config is not a JSON object, for which transformers may report missing files instead.

    Raises:
        OSError: the config cannot be read.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except ValueError as error:
        return f"its {CONFIG_FILE} is not JSON ({error}); copy or download it again"
    except RecursionError:
        return f"its {CONFIG_FILE} is nested too deeply; copy or download it again"
    return None if isinstance(config, dict) else f"its {CONFIG_FILE} holds no JSON object; copy or download it again"


def unsupported_config_fault(config: Any) -> str | None:
    """The fault of a config that asks for quantised weights or for code from a hub, or None."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        fields = quantization if isinstance(quantization, dict) else vars(quantization)
        method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
        return (
            f"its weights are quantised ({method or 'by an unknown method'}), and gracestream edits unquantised ones;"
            " choose the original checkpoint, with GRACESTREAM_DTYPE=bfloat16 where memory is short"
        )
    implementations = (getattr(config, f"_{kind}_implementation", None) for kind in ("attn", "experts"))
    if hub_code := next((name for name in implementations if "/" in str(name)), None):
        return (
            f"its config asks for the code of {hub_code!r}, and gracestream runs no code from a hub; delete that entry"
        )
    return None


def missing_tensors_fault(keys: Collection[str]) -> str | None:
    """The fault of weights without these tensors, or None.

    transformers would initialise them at random, with other values in each process.
    """
    if not keys:
        return None
    others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"its weights lack {min(keys)}{others}; copy or download it again, or choose a checkpoint for this task"


def empty_tokenizer_fault(tokenizer: Any) -> str | None:
    """The fault of a tokenizer with special tokens only, which transformers creates if its files are missing."""
    return (
        NO_TOKENIZER_MESSAGE if len(tokenizer) - len(set(tokenizer.all_special_ids)) < MIN_VOCABULARY_TOKENS else None
    )


def describe_load_error(error: Exception, folder: Path | None) -> str:
    """A library's exception as a sentence; `folder` is None for a checkpoint on a hub."""
    # The first sentence of the first line: transformers appends long advice.
    text = re.split(r"\.\s", str(error).strip())[0].split("\n")[0].rstrip(".")
    if "trust_remote_code" in str(error):
        return CUSTOM_CODE_MESSAGE
    if isinstance(error, SafetensorError):
        return f"{_damaged_file(folder)} is incomplete or damaged ({text}); copy or download it again"
    if isinstance(error, FileNotFoundError):
        return f"a part of its weights is missing ({text}); copy or download it again"
    if isinstance(error, ImportError):
        return f"it needs a package that is not installed ({text})"
    return text or type(error).__name__


def describe_tokenizer_error(error: Exception, folder: Path | None) -> str:
    """An exception from loading a tokenizer as a sentence; `folder` is None for a checkpoint on a hub."""
    if "trust_remote_code" in str(error):
        return CUSTOM_CODE_MESSAGE
    if folder is not None and not any(file.name.startswith(VOCABULARY_FILE_PREFIXES) for file in folder.iterdir()):
        return NO_TOKENIZER_MESSAGE
    return (
        f"its tokenizer cannot be read ({describe_load_error(error, folder)});"
        " copy or download the tokenizer's files again"
    )


def _adapter_base(folder: Path | None) -> str:
    """The base model that an adapter names, as " of 'name'"; empty if that cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        if folder is not None:
            return f" of {json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())['base_model_name_or_path']!r}"
    return ""


def _damaged_file(folder: Path | None) -> str:
    """The name of the folder's first weight file that cannot be opened."""
    for file in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            pointer = file.read_bytes()[: len(LFS_POINTER)] == LFS_POINTER
            return f"{file.name}, which Git LFS has not fetched yet," if pointer else file.name
    return "a file of its weights"
