"""A sentence encoder with random weights, and chats."""

from collections.abc import Sequence

import torch
from transformers import BertConfig, BertModel

from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.schemas.messages import ChatMessage
from tests.support.tiny_models import SIZE, tokenizer

ROOM = 16
"""Token limit of the encoder, including its two special tokens."""


class Counted(SentenceEncoder):
    """Counts its calls."""

    calls = 0

    def __call__(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str], alone: Sequence[bool] = ()
    ) -> torch.Tensor:
        self.calls += 1
        return super().__call__(prompts, texts, alone)


def module(seed: int = 0, *, pooler: bool = True) -> BertModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=ROOM, initializer_range=0.3, pad_token_id=0,
        )  # fmt: skip
        return BertModel(config, add_pooling_layer=pooler)


def encoder(seed: int = 0) -> Counted:
    return Counted(module(seed), tokenizer("bert"), f"encoder-{seed}")


def chat(*contents: str, system: str | None = None) -> tuple[ChatMessage, ...]:
    turns = tuple(ChatMessage(("user", "assistant")[place % 2], text) for place, text in enumerate(contents))
    return turns if system is None else (ChatMessage("system", system), *turns)
