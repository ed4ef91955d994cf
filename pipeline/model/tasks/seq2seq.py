"""Encoder-decoders."""

from dataclasses import replace as replace_in

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.model.adaptor import ReplacedTokens
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.tasks.base import TargetPass
from gracestream.pipeline.model.tasks.generation import Generation, label_logits
from gracestream.schemas.messages import Inputs

ENCODER_OUTPUT = "encoded"
"""In place of the tokens of an encoder: what it made of them, (B, T, X)."""


class Seq2SeqGeneration(Generation):
    """An encoder-decoder."""

    def forward_prompt(self, batch: Batch) -> None:
        """Encoder, and the first token of the decoder."""
        start_B1 = torch.tensor(
            [self._decoder_start_ids[:1]] * len(batch.kwargs["input_ids"]), device=self.model.device
        )
        self.model(**batch.kwargs, decoder_input_ids=start_B1, use_cache=False)

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """The decoder sees the label shifted right by the tokens that it starts with."""
        batch = self.batch([self.tokenize(inputs)])
        decoder_1T = torch.tensor([[*self._decoder_start_ids, *label[:-1]]], device=self.model.device)
        kwargs = {**batch.kwargs, "decoder_input_ids": decoder_1T}
        labels = (torch.tensor(label, device=self.model.device),)
        return TargetPass(Batch(kwargs, batch.mask_BT), labels, len(label))

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """The decoder's last positions are the label's."""
        kwargs = dict(target_pass.batch.kwargs)
        if (encoded_BTX := kwargs.pop(ENCODER_OUTPUT, None)) is not None:
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded_BTX)
        return label_logits(self.model(**kwargs, use_cache=False).logits, target_pass)

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """A value in the decoder changes nothing in the encoder, whose output is kept."""
        if not self._is_decoder_layer:
            return super().logits_and_suffix(target_pass, replace)
        kwargs = dict(target_pass.batch.kwargs)
        found = self.model.get_encoder()(kwargs.pop("input_ids"), attention_mask=kwargs["attention_mask"])
        kwargs[ENCODER_OUTPUT] = found.last_hidden_state
        left = replace_in(target_pass, batch=Batch(kwargs, target_pass.batch.mask_BT))
        return self.logits(left), left

    @property
    def _decoder_start_ids(self) -> list[int]:
        """What the decoder starts with: its start token, and the one that is forced on it after that, if any."""
        forced = self._config.forced_bos_token_id
        return [self._config.decoder_start_token_id, *([] if forced is None else [forced])]

    def _num_leading_tokens(self, batch: Batch) -> int:
        del batch
        return len(self._decoder_start_ids)
