"""A sentence encoder for queries: prompts are compared by the meaning of their text instead of a layer's activations.

Layer activations cluster prompts with similar continuations. A paraphrase is often farther away than an unrelated
request. A sentence encoder is trained to bring paraphrases together, at the cost of one more pass per prompt. `make
bench NAME=keyspaces` measures both.

A query is the embedding of the text, followed by a hash vector of the prompt's tokens (`prompt_hash_vectors`):

1. Prompts that the encoder cannot distinguish, such as texts that differ in capitals or an emoji, get different
   queries. So each can have its own correction.
2. The hash vector is much shorter than distances between different texts. It only makes a prompt's own key the nearest.
3. A text with a word unknown to the encoder gets a hash vector of norm 2, the largest distance between embeddings. With
   radii up to the default maximum, only its own entry can serve it.
4. Of a chat, the encoder reads the last message only. System prompts and template markup would bring different
   questions closer to each other than to the same question without them.
5. The last message of a longer chat ("And its capital?") is treated as in 3, because earlier turns determine its
   meaning.

Shapes: N texts, D width of an embedding, M width of a hash vector, P passages of at most `max_tokens` tokens, T tokens.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gracestream.pipeline.model.checkpoint import ModelError, load_encoder, resolve_device
from gracestream.pipeline.model.control_tokens import text_tokenizer
from gracestream.pipeline.model.fingerprint import cached_fingerprint
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS

PROMPT_HASH_DIM = 32
"""Width of a hash vector: random directions of this width are far apart, even among very many prompts."""

PROMPT_HASH_NORM = 0.05
"""Norm of a hash vector; embeddings have norm 1."""

UNKNOWN_PROMPT_HASH_NORM = 2.0
"""Norm of the hash vector for a text with unknown words. Random directions of this norm are about 2.8 apart; embeddings
are at most 2 apart."""

MIN_PROBE_DISTANCE = 0.1
"""The smallest acceptable distance between everyday sentences. For MiniLM all distances exceed 0.9."""

NO_TOKEN = -1
"""An id that no token has, for tokenizers without a token for unknown words."""

DEFAULT_WINDOW_TOKENS = 512
"""Tokens per pass if the checkpoint does not set a limit."""

ENCODER_DEFAULT_RADIUS = 0.6
"""Default radius of a new entry, as a multiple of the median nearest-neighbour distance of traffic. Unrelated texts are
all about equally far apart, so that median is the distance between unrelated texts."""

ENCODER_REMEDY = (
    "choose another GRACESTREAM_ENCODER, or set GRACESTREAM_QUERY_SOURCE=last to take queries from the layer"
)
"""The remedy in messages about an encoder that cannot be loaded."""

ENCODER_MAX_RADIUS = 1.0
"""Default upper bound of radii. Embeddings of unrelated texts are about the square root of 2 apart (orthogonal)."""


class SentenceEncoder:
    """Maps prompts to queries: the mean of the last layer over the text's tokens, at norm 1, with a hash vector.

    A text that exceeds one pass is read in several passes, to its end. A prompt has the same query alone and in a
    batch, apart from rounding.

    Attributes:
        fingerprint: SHA-256 of everything that determines a query.
    """

    def __init__(self, module: Any, tokenizer: Any, fingerprint: str, max_tokens: int = DEFAULT_WINDOW_TOKENS) -> None:
        """Wrap a loaded checkpoint.

        Args:
            module: The encoder, with one output vector per token.
            tokenizer: Its tokenizer.
            fingerprint: Fingerprint of module and tokenizer.
            max_tokens: Tokens that the encoder reads in one pass, at most.

        Raises:
            ModelError: the module gives no finite vector per token, or cannot read that many tokens.
        """
        if module.config.is_encoder_decoder:
            raise ModelError(f"{type(module).__name__} has a decoder")
        if not tokenizer.is_fast or tokenizer.pad_token_id is None:
            raise ModelError("its tokenizer cannot split long texts into parts, or cannot pad")
        self._module = module.eval().requires_grad_(False)
        self._tokenizer = text_tokenizer(tokenizer)
        # Some tokenizers reuse another special token for unknown words; its presence then says nothing about the text.
        other_ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, None)
        self._unknown_token_id = NO_TOKEN if tokenizer.unk_token_id in other_ids else tokenizer.unk_token_id
        max_positions = getattr(module.config, "max_position_embeddings", None) or max_tokens
        self._max_tokens = min(max_tokens, max_positions, tokenizer.model_max_length)
        identity = (
            f"{fingerprint} tokens={self._max_tokens} pooling=mean"
            f" marks={PROMPT_HASH_DIM}x{PROMPT_HASH_NORM}, {UNKNOWN_PROMPT_HASH_NORM} chats=last"
        )
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        # A text of twice the limit proves that the encoder reads full passes.
        try:
            (point_D,), _ = self.embed([" ".join(["word"] * (2 * self._max_tokens))])
        except (IndexError, RuntimeError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"it does not read {self._max_tokens} tokens at once: {error}") from error
        if not torch.isfinite(point_D).all():
            raise ModelError("its embedding of a text is not finite")

    @classmethod
    def load(cls, name: str, *, device: str = "auto", cache: Path | None = None) -> Self:
        """Load a local folder or a hub id, in float32; `cache` keeps fingerprints of local checkpoints.

        Raises:
            ModelError: the checkpoint or device does not exist, or the checkpoint is no usable sentence encoder.
            DeviceError: the environment makes the device's results inexact.
        """
        target = resolve_device(device)
        try:
            return cls._load_to_device(name, target, cache)
        except ModelError as error:
            raise ModelError(f"{error}; {ENCODER_REMEDY}") from error

    @classmethod
    def _load_to_device(cls, name: str, device: str, cache: Path | None) -> Self:
        module, tokenizer, max_tokens = load_encoder(name)
        fingerprint = cached_fingerprint(module, tokenizer, Path(name), cache)
        try:
            encoder = cls(module, tokenizer, fingerprint, max_tokens or DEFAULT_WINDOW_TOKENS)
            # The checks run on the CPU, where an index out of range is an ordinary exception. On a GPU it makes the
            # device unusable for this process.
            encoder._check_probe_distances()
        except ModelError as error:
            raise ModelError(f"the encoder {name!r} cannot be used: {error}") from error
        encoder._module.to(device)
        return encoder

    def _check_probe_distances(self) -> None:
        """Check that everyday sentences have different embeddings; with a wrong tokenizer or wrong weights they do not.

        Raises:
            ModelError: two probe texts are at most `MIN_PROBE_DISTANCE` apart.
        """
        points_ND, _ = self.embed(PROBE_TEXTS)
        if not float(torch.pdist(points_ND).min()) > MIN_PROBE_DISTANCE:  # written this way, NaN fails too
            raise ModelError("its embeddings of everyday sentences are too similar; check its tokenizer's files")

    def __call__(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str], own_entry_only: Sequence[bool] = ()
    ) -> Tensor:
        """The queries (N, D + `PROMPT_HASH_DIM`), float32. A text without tokens gets a query that is not finite.

        Args:
            prompts: Token ids of each prompt, under the model's tokenizer.
            texts: The text of each prompt.
            own_entry_only: For each prompt, True if only its own entry may serve it.
        """
        points_ND, comparable_N = self.embed(texts)
        if own_entry_only:
            comparable_N = comparable_N & ~torch.tensor(own_entry_only, device=comparable_N.device)
        norms_N = torch.where(comparable_N, PROMPT_HASH_NORM, UNKNOWN_PROMPT_HASH_NORM)
        hash_NM = (norms_N[:, None] * prompt_hash_vectors(prompts).to(norms_N.device)).to(points_ND)
        return torch.cat([points_ND, hash_NM], dim=1)

    def embed(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The embeddings (N, D), float32, and a mask (N) of texts without unknown words."""
        encoded = self._tokenizer(
            list(texts), truncation=True, max_length=self._max_tokens, return_overflowing_tokens=True, padding=True,
            return_tensors="pt",
        )  # fmt: skip
        text_index_P = encoded.pop("overflow_to_sample_mapping").to(self._module.device)
        passages = encoded.to(self._module.device)
        with torch.no_grad():
            vectors_PTD = self._module(**passages).last_hidden_state.float()
        mask_PT1 = passages["attention_mask"][..., None]
        # The mean over a text's tokens and the sum have the same direction, so the sum is normalised.
        sums_PD = (vectors_PTD * mask_PT1).sum(dim=1)
        sums_ND = sums_PD.new_zeros(len(texts), sums_PD.shape[1]).index_add_(0, text_index_P, sums_PD)
        points_ND: Tensor = sums_ND / sums_ND.norm(dim=1, keepdim=True)
        unknown_P = (passages["input_ids"] == self._unknown_token_id).any(dim=1)
        known_N = torch.ones(len(texts), dtype=torch.bool, device=text_index_P.device)
        known_N[text_index_P[unknown_P]] = False
        return points_ND, known_N


def prompt_hash_vectors(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Pseudo-random unit vectors (N, `PROMPT_HASH_DIM`), float32, derived from each prompt's token ids with SHAKE-256.

    Equal prompts have equal vectors on every machine.
    """
    hashes = b"".join(
        hashlib.shake_256(np.array(prompt, "<i8").tobytes()).digest(4 * PROMPT_HASH_DIM) for prompt in prompts
    )
    # 32-bit integers, scaled to [-1, 1).
    uniform_NM = np.frombuffer(hashes, "<u4").reshape(len(prompts), PROMPT_HASH_DIM).astype(np.float64) / 2**31 - 1
    return torch.from_numpy((uniform_NM / np.linalg.norm(uniform_NM, axis=1, keepdims=True)).astype(np.float32))
