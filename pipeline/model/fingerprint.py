"""Fingerprints: SHA-256 digests by which workers check that they run the same model."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

FINGERPRINT_VERSION = 2
"""What a fingerprint covers, as a number: one that was cached under another number counts no more."""


def compute_fingerprint(model: Any, tokenizer: Any) -> str:
    """SHA-256 over weights (as loaded, in order of name), config, tokenizer and chat template.

    Equal models give equal keys.
    """
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
    if tokenizer.chat_template is not None:  # another template gives the same chat another prompt, and another query
        names = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
        template = [tokenizer.chat_template, names]  # without padding, which a task sets where there is none
        digest.update(json.dumps(template, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def cached_fingerprint(model: Any, tokenizer: Any, folder: Path, cache: Path | None) -> str:
    """The fingerprint, computed once for a local folder whose files and dtype stay as they are.

    Where the cache cannot be used, as under a read-only root or on a full disk, it is computed at each start.
    """
    if cache is None or not folder.is_dir():
        return compute_fingerprint(model, tokenizer)
    # Not the time of its content alone, which a copy or an image may keep: other weights of a model have its very size.
    marks = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
    files = [(file.name, *(getattr(file.stat(), mark) for mark in marks)) for file in sorted(folder.iterdir())]
    state = json.dumps([FINGERPRINT_VERSION, str(folder.resolve()), type(model).__name__, str(model.dtype), files])
    kept = cache.expanduser() / "fingerprints" / hashlib.sha256(state.encode()).hexdigest()
    with suppress(OSError):
        if len(known := kept.read_text(errors="replace")) == hashlib.sha256().digest_size * 2:
            return known
    fingerprint = compute_fingerprint(model, tokenizer)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(fingerprint)
        half.replace(kept)
    return fingerprint
