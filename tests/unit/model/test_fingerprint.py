"""A fingerprint that is kept is that of the very files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gracestream.pipeline.model.checkpoint import load_checkpoint
from gracestream.pipeline.model.fingerprint import cached_fingerprint, compute_fingerprint
from tests.support.tiny_models import KINDS
from tests.support.tiny_models import tokenizer as tokenizer_of


def test_other_weights_of_the_same_size_and_time_have_another_fingerprint(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    for saved in (KINDS["bert"].build(), tokenizer_of(KINDS["bert"].special_tokens)):
        saved.save_pretrained(folder)
    model, tokenizer = load_checkpoint(str(folder), device="cpu")
    first = cached_fingerprint(model, tokenizer, folder, cache)
    assert cached_fingerprint(model, tokenizer, folder, cache) == first
    weights = folder / "model.safetensors"
    before = weights.stat()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    model.save_pretrained(folder)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert cached_fingerprint(model, tokenizer, folder, cache) != first


def test_a_cache_that_cannot_be_used_costs_time_alone(tmp_path: Path) -> None:
    """As under a read-only root; this one fails for root, too."""
    folder, cache = tmp_path / "model", tmp_path / "file"
    for saved in (KINDS["bert"].build(), tokenizer_of(KINDS["bert"].special_tokens)):
        saved.save_pretrained(folder)
    cache.write_text("no folder")
    model, tokenizer = load_checkpoint(str(folder), device="cpu")
    assert cached_fingerprint(model, tokenizer, folder, cache) == compute_fingerprint(model, tokenizer)


@pytest.mark.parametrize(
    "damage", [str.upper, lambda kept: "g" + kept[1:], lambda kept: "\0" * len(kept), lambda kept: kept + "\n"]
)
def test_a_kept_fingerprint_that_is_damaged_is_computed_anew(tmp_path: Path, damage: Callable[[str], str]) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    for saved in (KINDS["bert"].build(), tokenizer_of(KINDS["bert"].special_tokens)):
        saved.save_pretrained(folder)
    model, tokenizer = load_checkpoint(str(folder), device="cpu")
    whole = cached_fingerprint(model, tokenizer, folder, cache)
    (kept,) = (cache / "fingerprints").iterdir()
    kept.write_text(damage(whole))
    assert cached_fingerprint(model, tokenizer, folder, cache) == whole
    assert kept.read_text() == whole, "and replaced"
    other = "0123456789abcdef" * 4
    kept.write_text(other)
    assert cached_fingerprint(model, tokenizer, folder, cache) == other, "what could be a fingerprint is taken"
