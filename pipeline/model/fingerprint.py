"""Fingerprints of models: SHA-256 digests by which workers check that they share one model.

1. Equal weights, config, tokenizer and chat template give equal fingerprints under equal library versions.
2. A change of any of them gives another fingerprint.
3. A cached fingerprint is used only while the files of the checkpoint and the dtype are unchanged. A cache file that
   does not hold 64 lower-case hexadecimal digits is computed anew and replaced.

Not promised: equal fingerprints under different versions of transformers, which may add fields to a config.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

FINGERPRINT_VERSION = 2
"""The version of the fingerprint's definition. Fingerprints cached under another version are ignored."""

_FINGERPRINT = re.compile("[0-9a-f]{64}")


def compute_fingerprint(model: Any, tokenizer: Any) -> str:
    """SHA-256, in hexadecimal, over weights as loaded (sorted by name), config, tokenizer and chat template."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):  # these differ between copies of the same model
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    vocabulary = getattr(tokenizer, "backend_tokenizer", None)
    content = vocabulary.to_str() if vocabulary is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digest.update(content.encode())
    if tokenizer.chat_template is not None:  # another template turns the same chat into another prompt and query
        # Without the padding token: `ModelTask` sets one if the tokenizer has none, so it may vary for one checkpoint.
        special_tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
        template = [tokenizer.chat_template, special_tokens]
        digest.update(json.dumps(template, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def cached_fingerprint(model: Any, tokenizer: Any, folder: Path, cache: Path | None) -> str:
    """The fingerprint; for a local folder it is read from the cache while its files and the dtype are unchanged.

    Without a usable cache (None, a read-only file system, a full disk) the fingerprint is computed on every call.
    """
    if cache is None or not folder.is_dir():
        return compute_fingerprint(model, tokenizer)
    # The modification time does not suffice: copies and images may preserve it, and other weights of the same model
    # have the same size.
    attributes = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
    files = [(file.name, *(getattr(file.stat(), name) for name in attributes)) for file in sorted(folder.iterdir())]
    state = json.dumps([FINGERPRINT_VERSION, str(folder.resolve()), type(model).__name__, str(model.dtype), files])
    cache_file = cache.expanduser() / "fingerprints" / hashlib.sha256(state.encode()).hexdigest()
    with suppress(OSError):
        # Anything else is damaged, such as a file that a full disk or a lost power supply has left.
        if _FINGERPRINT.fullmatch(cached := cache_file.read_text(errors="replace")):
            return cached
    fingerprint = compute_fingerprint(model, tokenizer)
    with suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        partial = cache_file.with_suffix(f".{os.getpid()}")
        partial.write_text(fingerprint)
        partial.replace(cache_file)  # atomic: another process never reads a part of a fingerprint
    return fingerprint
