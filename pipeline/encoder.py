"""A sentence encoder beside the model: queries by what a text says, and not by what a layer makes of it.

At a layer those texts lie together after which the model goes on alike; other words for a request often lie farther
from it than other requests do. A sentence encoder was trained to bring them together. It takes a pass of its own over
each prompt; what it reaches beside the layers' queries, and what it costs, `make bench NAME=keyspaces` measures.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pipeline.checkpoint import ModelError, cached_fingerprint, load_encoder


class Encoder:
    """Maps texts to points of length one: the mean over a text's tokens of what the encoder's last layer gives them.

    Of a text that is too long for one pass all parts are read. A text alone and in a batch are one point, but for
    rounding. `fingerprint` is that of the weights and the tokenizer.
    """

    def __init__(self, module: Any, tokenizer: Any, fingerprint: str) -> None:
        """Wrap a loaded checkpoint.

        Raises:
            ModelError: it is none that gives each token of a text a vector.
        """
        if module.config.is_encoder_decoder:
            raise ModelError(f"{type(module).__name__} is no sentence encoder: it has a decoder")
        if not tokenizer.is_fast or tokenizer.pad_token_id is None:
            raise ModelError(f"the tokenizer of {type(module).__name__} cannot read long texts in parts, or not pad")
        self._module = module.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        positions = getattr(module.config, "max_position_embeddings", None) or tokenizer.model_max_length
        self._most = min(positions, tokenizer.model_max_length)
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, name: str, *, device: str = "auto", cache: Path | None = None) -> Self:
        """Load a local folder or a hub id, in float32; `cache` keeps fingerprints of local checkpoints.

        Raises:
            ModelError: no such checkpoint or device, or no such encoder.
        """
        module, tokenizer = load_encoder(name, device=device)
        return cls(module, tokenizer, cached_fingerprint(module, tokenizer, Path(name), cache))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """A point (D), float32, for each text: (N, D). Of a text without tokens it is not finite."""
        read = self._tokenizer(
            list(texts), truncation=True, max_length=self._most, return_overflowing_tokens=True, padding=True,
            return_tensors="pt",
        )  # fmt: skip
        texts_P = read.pop("overflow_to_sample_mapping").to(self._module.device)
        parts = read.to(self._module.device)
        with torch.no_grad():
            vectors_PTD = self._module(**parts).last_hidden_state.float()
        mask_PT1 = parts["attention_mask"][..., None]
        sums_PD = (vectors_PTD * mask_PT1).sum(dim=1)
        sums_ND = sums_PD.new_zeros(len(texts), sums_PD.shape[1]).index_add_(0, texts_P, sums_PD)
        points_ND: Tensor = sums_ND / sums_ND.norm(dim=1, keepdim=True)  # the mean's direction is the sum's
        return points_ND
