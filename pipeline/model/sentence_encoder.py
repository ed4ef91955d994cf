"""A sentence encoder beside the model: queries by what a text says, and not by what a layer makes of it.

At a layer those texts lie together after which the model goes on alike; other words for a request often lie farther
from it than other requests do. A sentence encoder was trained to bring them together. It takes a pass of its own over
each prompt; what it reaches beside the layers' queries, and what it costs, `make bench NAME=keyspaces` measures.

Texts that an encoder cannot tell apart, such as those that differ in capitals or in an emoji, are one point to it, and
yet they are different prompts, of which each may have been corrected in its own way. So a query ends in a *mark* of its
prompt's tokens, far shorter than what is between texts that say different things: of all keys a prompt's own is the
nearest. Where the encoder does not know a word, and so cannot tell what a text says, the mark is longer than any
distance between texts: such a prompt is served by its own entry alone.

Of a chat the encoder reads the last message alone, which is the user's. A system prompt and the markup of a template
would lie nearer to one another than to the same question without them. What a later message means depends on those
before it ("And its capital?"), so it is served by its own entry alone, like a prompt with an unknown word.
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
"""Numbers of a mark: so many that of many long ones no two lie close together."""

PROMPT_HASH_NORM = 0.05
"""The length of a mark, beside embeddings of length one."""

UNKNOWN_PROMPT_HASH_NORM = 2.0
"""The length of a mark of a text that has words which the encoder does not know."""

MIN_PROBE_DISTANCE = 0.1
"""How far apart everyday sentences are to an encoder, at least: MiniLM has more than 0.9 between any two."""

NO_TOKEN = -1
"""No token: that of an unknown word, where a tokenizer has none of its own."""

DEFAULT_WINDOW_TOKENS = 512
"""Tokens of one pass where a checkpoint does not say how many it takes."""

ENCODER_DEFAULT_RADIUS = 0.6
"""Radius of a new entry that is used by default, in medians of the traffic's nearest neighbours: texts with nothing in
common all lie about as far apart, so that a median is what is between strangers."""

ENCODER_REMEDY = "choose another GRACESTREAM_ENCODER, or set GRACESTREAM_QUERY=last to take queries from the layer"
"""What to do where an encoder cannot be loaded."""

ENCODER_MAX_RADIUS = 1.0
"""No radius is larger by default: at the square root of two texts have nothing in common."""


class SentenceEncoder:
    """Maps prompts to queries: the mean over a text's tokens of its last layer, at a length of one, and a mark.

    Of a text that is too long for one pass all parts are read. A prompt alone and in a batch is one point, but for
    rounding. `fingerprint` is that of all that decides where a point lies.
    """

    def __init__(self, module: Any, tokenizer: Any, fingerprint: str, max_tokens: int = DEFAULT_WINDOW_TOKENS) -> None:
        """Wrap a loaded checkpoint of this fingerprint, which reads `max_tokens` tokens in one pass at most.

        Raises:
            ModelError: it is none that gives each token of a text a vector, or cannot take as many tokens.
        """
        if module.config.is_encoder_decoder:
            raise ModelError(f"{type(module).__name__} has a decoder")
        if not tokenizer.is_fast or tokenizer.pad_token_id is None:
            raise ModelError("its tokenizer cannot read long texts in parts, or not pad")
        self._module = module.eval().requires_grad_(False)
        self._tokenizer = text_tokenizer(tokenizer)
        others = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, None)
        self._unknown_token_id = NO_TOKEN if tokenizer.unk_token_id in others else tokenizer.unk_token_id
        positions = getattr(module.config, "max_position_embeddings", None) or max_tokens
        self._max_tokens = min(max_tokens, positions, tokenizer.model_max_length)
        described = (
            f"{fingerprint} tokens={self._max_tokens} pooling=mean"
            f" marks={PROMPT_HASH_DIM}x{PROMPT_HASH_NORM}, {UNKNOWN_PROMPT_HASH_NORM} chats=last"
        )
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()
        try:
            (point_D,), _ = self.embed([" ".join(["word"] * (2 * self._max_tokens))])
        except (IndexError, RuntimeError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"it does not read {self._max_tokens} tokens at once: {error}") from error
        if not torch.isfinite(point_D).all():
            raise ModelError("what it makes of a text is not finite")

    @classmethod
    def load(cls, name: str, *, device: str = "auto", cache: Path | None = None) -> Self:
        """Load a local folder or a hub id, in float32; `cache` keeps fingerprints of local checkpoints.

        Raises:
            ModelError: no such checkpoint or device, or no such encoder.
        """
        target = resolve_device(device)
        try:
            return cls._load_to_device(name, target, cache)
        except ModelError as error:
            raise ModelError(f"{error}; {ENCODER_REMEDY}") from error

    @classmethod
    def _load_to_device(cls, name: str, device: str, cache: Path | None) -> Self:
        module, tokenizer, most = load_encoder(name)
        fingerprint = cached_fingerprint(module, tokenizer, Path(name), cache)
        try:
            made = cls(module, tokenizer, fingerprint, most or DEFAULT_WINDOW_TOKENS)
            made._check_probe_distances()  # on the host, where what it cannot do is an error
        except ModelError as error:
            raise ModelError(f"the encoder {name!r} cannot be used: {error}") from error
        made._module.to(device)
        return made

    def _check_probe_distances(self) -> None:
        """That it tells everyday sentences apart, which one whose tokenizer or weights are not its own does not."""
        points_ND, _ = self.embed(PROBE_TEXTS)
        if not float(torch.pdist(points_ND).min()) > MIN_PROBE_DISTANCE:
            raise ModelError("it cannot tell everyday sentences apart; are its tokenizer's files there?")

    def __call__(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str], own_entry_only: Sequence[bool] = ()
    ) -> Tensor:
        """The queries (N, D + `PROMPT_HASH_DIM`), float32, of prompts whose tokens say these texts.

        A prompt that is `own_entry_only` is served by its own entry only.
        Of a text that has no tokens to the encoder a query is not finite.
        """
        points_ND, read_N = self.embed(texts)
        if own_entry_only:
            read_N = read_N & ~torch.tensor(own_entry_only, device=read_N.device)
        lengths_N = torch.where(read_N, PROMPT_HASH_NORM, UNKNOWN_PROMPT_HASH_NORM)
        marks_NM = (lengths_N[:, None] * prompt_hash_vectors(prompts).to(lengths_N.device)).to(points_ND)
        return torch.cat([points_ND, marks_NM], dim=1)

    def embed(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """A point (D), float32, for each text: (N, D); and whether the encoder knows all its words (N)."""
        read = self._tokenizer(
            list(texts), truncation=True, max_length=self._max_tokens, return_overflowing_tokens=True, padding=True,
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
        unknown_P = (parts["input_ids"] == self._unknown_token_id).any(dim=1)
        read_N = torch.ones(len(texts), dtype=torch.bool, device=texts_P.device)
        read_N[texts_P[unknown_P]] = False
        return points_ND, read_N


def prompt_hash_vectors(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Of each prompt's token ids a direction (N, `PROMPT_HASH_DIM`), float32, of length one; of others another."""
    drawn = b"".join(
        hashlib.shake_256(np.array(prompt, "<i8").tobytes()).digest(4 * PROMPT_HASH_DIM) for prompt in prompts
    )
    drawn_NM = np.frombuffer(drawn, "<u4").reshape(len(prompts), PROMPT_HASH_DIM).astype(np.float64) / 2**31 - 1
    return torch.from_numpy((drawn_NM / np.linalg.norm(drawn_NM, axis=1, keepdims=True)).astype(np.float32))
