"""Why a checkpoint cannot be loaded: one sentence with the remedy, for the cases that users bring about.

1. `missing_files_fault` judges a checkpoint by the names of its files, before anything is read.
2. `unsupported_config_fault` judges its config: quantised weights and code from elsewhere are refused.
3. `describe_load_error` turns an error of the libraries into a sentence.

It does not promise that a checkpoint without a fault here can be loaded.
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

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLED_WEIGHT_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

PROBED_FILES = (CONFIG_FILE, ADAPTER_CONFIG_FILE, *WEIGHT_FILES, *PICKLED_WEIGHT_FILES)
"""The files whose presence tells what a checkpoint is, for hubs, which are asked for one file at a time."""

VOCABULARY_FILE_PREFIXES = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "tekken", "source.")
"""What the names of the files that hold a tokenizer's vocabulary begin with."""

LFS_POINTER = b"version https://git-lfs"

MIN_VOCABULARY_TOKENS = 4
"""A vocabulary has more tokens than its special ones: at least the four letters of DNA."""

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
    """What to say of a folder, or of a file in it, that this process may not read."""
    found = next((place for place in (folder, *sorted(folder.glob("*"))) if not os.access(place, os.R_OK)), None)
    if found is None:
        return None
    return f"the user {os.geteuid()} may not read {str(found)!r}; let it: chmod -R a+rX {str(folder)!r}, where it lies"


def missing_files_fault(names: Collection[str], folder: Path | None = None) -> str | None:
    """What keeps a checkpoint with these files from being loaded; `folder` is where they are, if not on a hub."""
    if ADAPTER_CONFIG_FILE in names:
        return (
            f"it is an adapter{_adapter_base(folder)} (LoRA or the like), not a whole model; merge it into its base"
            " with"
            " peft (`merge_and_unload`), save that with `save_pretrained`, and choose the folder of the result"
        )
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    whole = any(name.endswith(".safetensors") for name in names) or WEIGHT_FILES[1] in names
    if gguf and not whole:
        return f"it holds GGUF ({gguf[0]}), {GGUF_MESSAGE}"
    if CONFIG_FILE not in names:
        return (
            "it has no config.json; choose the folder of a Hugging Face checkpoint: config, safetensors and tokenizer"
        )
    if not whole:
        pickled = sorted(
            name for name in names if name in PICKLED_WEIGHT_FILES or name.endswith((".bin", ".pt", ".pth", ".ckpt"))
        )
        if pickled:
            return (
                f"its weights are pickled ({pickled[0]}), and a pickle can run code; save them as safetensors:"
                " transformers' `from_pretrained`, then `save_pretrained`"
            )
        return "it has no weights (model.safetensors); copy or download them to it"
    return None


def broken_config_fault(folder: Path) -> str | None:
    """What to say of a folder whose config is no JSON object; transformers calls some of these a model without files.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = json.loads((folder / CONFIG_FILE).read_bytes())
    except ValueError as error:
        return f"its {CONFIG_FILE} is not JSON ({error}); copy or download it again"
    except RecursionError:
        return f"its {CONFIG_FILE} is nested too deeply; copy or download it again"
    return None if isinstance(found, dict) else f"its {CONFIG_FILE} holds no JSON object; copy or download it again"


def unsupported_config_fault(config: Any) -> str | None:
    """What a config asks for that is refused: quantised weights, or code from a hub."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        fields = quantised if isinstance(quantised, dict) else vars(quantised)
        method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
        return (
            f"its weights are quantised ({method or 'by an unknown method'}), and gracestream edits whole ones; choose"
            " the original checkpoint, with GRACESTREAM_DTYPE=bfloat16 where memory is short"
        )
    kernels = (getattr(config, f"_{part}_implementation", None) for part in ("attn", "experts"))
    if fetched := next((one for one in kernels if "/" in str(one)), None):
        return (
            f"its config asks for the code of {fetched!r}, and gracestream runs no code from a hub; delete that entry"
        )
    return None


def missing_tensors_fault(keys: Collection[str]) -> str | None:
    """What to say of weights without these tensors; transformers draws them at random, other ones in each process."""
    if not keys:
        return None
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"its weights lack {min(keys)}{more}; copy or download it again, or choose a checkpoint for this task"


def empty_tokenizer_fault(tokenizer: Any) -> str | None:
    """What to say of a tokenizer that transformers made up, for want of its files, from special tokens alone."""
    return (
        NO_TOKENIZER_MESSAGE if len(tokenizer) - len(set(tokenizer.all_special_ids)) < MIN_VOCABULARY_TOKENS else None
    )


def describe_load_error(error: Exception, folder: Path | None) -> str:
    """An error of the libraries as a sentence; `folder` is the checkpoint's, if it is not on a hub."""
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
    """Likewise, of an error while its tokenizer was loaded."""
    if "trust_remote_code" in str(error):
        return CUSTOM_CODE_MESSAGE
    if folder is not None and not any(file.name.startswith(VOCABULARY_FILE_PREFIXES) for file in folder.iterdir()):
        return NO_TOKENIZER_MESSAGE
    return (
        f"its tokenizer cannot be read ({describe_load_error(error, folder)});"
        " copy or download the tokenizer's files again"
    )


def _adapter_base(folder: Path | None) -> str:
    """The base that an adapter names, if that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        if folder is not None:
            return f" of {json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())['base_model_name_or_path']!r}"
    return ""


def _damaged_file(folder: Path | None) -> str:
    """The first of a folder's weights that cannot be opened."""
    for file in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            pointer = file.read_bytes()[: len(LFS_POINTER)] == LFS_POINTER
            return f"{file.name}, which Git LFS has not fetched yet," if pointer else file.name
    return "a file of its weights"
