"""Generation by encoder-decoders, such as T5: the encoder reads the prompt and the decoder generates the answer.

Shapes: B rows, T tokens, X hidden width.
"""

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
"""The argument with the encoder's output (B, T, X), in place of the encoder's tokens."""


class Seq2SeqGeneration(Generation):
    """An encoder-decoder."""

    def forward_prompt(self, batch: Batch) -> None:
        """Run the encoder on the prompts and the decoder on its first token."""
        start_B1 = torch.tensor(
            [self._decoder_start_ids[:1]] * len(batch.kwargs["input_ids"]), device=self.model.device
        )
        self.model(**batch.kwargs, decoder_input_ids=start_B1, use_cache=False)

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """A pass whose decoder input is the label, shifted right by the decoder's start tokens."""
        batch = self.batch([self.tokenize(inputs)])
        decoder_1T = torch.tensor([[*self._decoder_start_ids, *label[:-1]]], device=self.model.device)
        kwargs = {**batch.kwargs, "decoder_input_ids": decoder_1T}
        labels = (torch.tensor(label, device=self.model.device),)
        return TargetPass(Batch(kwargs, batch.mask_BT), labels, len(label))

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """The labels' logits, which are the decoder's last positions."""
        kwargs = dict(target_pass.batch.kwargs)
        if (encoded_BTX := kwargs.pop(ENCODER_OUTPUT, None)) is not None:
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded_BTX)
        return label_logits(self.model(**kwargs, use_cache=False).logits, target_pass)

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """The logits, and a suffix pass of the decoder alone if the edited layer is in the decoder.

        A value in the decoder does not affect the encoder, whose output is cached.
        """
        if not self._is_decoder_layer:
            return super().logits_and_suffix(target_pass, replace)
        kwargs = dict(target_pass.batch.kwargs)
        encoder_output = self.model.get_encoder()(kwargs.pop("input_ids"), attention_mask=kwargs["attention_mask"])
        kwargs[ENCODER_OUTPUT] = encoder_output.last_hidden_state
        suffix = replace_in(target_pass, batch=Batch(kwargs, target_pass.batch.mask_BT))
        return self.logits(suffix), suffix

    @property
    def _decoder_start_ids(self) -> list[int]:
        """The decoder's start token, and the token that generation forces after it, if any."""
        forced = self._config.forced_bos_token_id
        return [self._config.decoder_start_token_id, *([] if forced is None else [forced])]

    def _num_leading_tokens(self, batch: Batch) -> int:
        del batch
        return len(self._decoder_start_ids)
