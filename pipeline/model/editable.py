"""The editable model: a frozen Hugging Face checkpoint with one module wrapped by the adaptor.

It is used by one thread at a time, but for its tokenizer (`ModelTask.tokenize` and `admit`), which another thread may
use meanwhile. Weights are never written, no gradient is kept on them, and answering leaves the global random state as
it was.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gracestream.pipeline.codebook import CodebookLookup, Hit, Label
from gracestream.pipeline.model.adaptor import Adaptor, QueryToken, ReplacedTokens
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.checkpoint import ModelError, load_checkpoint
from gracestream.pipeline.model.fingerprint import cached_fingerprint, compute_fingerprint
from gracestream.pipeline.model.layers import LayerError, find_layer, is_in_decoder, linear_layers, normalize_path
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.pipeline.model.suffix_pass import SuffixRunner
from gracestream.pipeline.model.tasks.base import InputError, Limits, ModelAnswer, ModelTask, TargetPass
from gracestream.pipeline.model.tasks.causal import CausalGeneration
from gracestream.pipeline.model.tasks.classification import Classification
from gracestream.pipeline.model.tasks.seq2seq import Seq2SeqGeneration
from gracestream.pipeline.model.trial import layer_fault
from gracestream.schemas.messages import Inputs, Parameters

MAX_SUGGESTED_LAYERS = 3
"""Layers that can be edited, which are named where one cannot."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One row's answer.

    Attributes:
        answer: What the model gives.
        hit: The entry that gave it; None: the unedited model did.
        near_miss: The entry within whose radius the row lies, and that did not serve it: the wordings disagree, or with
            its value the answer was not the entry's target.
    """

    answer: ModelAnswer
    hit: Hit | None
    near_miss: Hit | None = None


class EditableModel:
    """A model, its tokenizer and task, and the adaptor around one of its modules."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        layer: str,
        *,
        limits: Limits | None = None,
        query: QueryToken | None = None,
        replace: ReplacedTokens | None = None,
        encoder: SentenceEncoder | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Wrap a loaded model; with an encoder, that makes the queries, and not a token of the layer's input.

        Raises:
            LayerError: the model has no such layer.
            ModelError: it is none of the three kinds.
            ValueError: a token and an encoder are to be queried.
        """
        if query is not None and encoder is not None:
            raise ValueError(f"the query is the {query} token's or the encoder's")
        checkpoint = fingerprint or compute_fingerprint(model, tokenizer)
        self.module = model.eval().requires_grad_(False)
        self.layer = normalize_path(layer)
        decoder_layer = model.config.is_encoder_decoder and is_in_decoder(layer)
        self.task: ModelTask = _task_class(model)(model, tokenizer, limits or Limits(), decoder_layer)
        self._encoder = encoder
        self.adaptor = Adaptor(
            find_layer(model, layer), query or self.task.query, replace or self.task.replace,
            None if encoder is None else self._encode_queries,
        )  # fmt: skip
        # Where another token is queried, keys are other ones: replicas set up in another way must not share a codebook.
        self.reads_text = encoder is not None
        self.query_source: str = self.adaptor.query if encoder is None else f"encoder {encoder.fingerprint}"
        served = f"{checkpoint} query={self.query_source} replace={self.adaptor.replace}"
        self.fingerprint = hashlib.sha256(served.encode()).hexdigest()
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.query_dtype = self.dtype if encoder is None else "float32"
        self.device: torch.device = model.device
        self.suffix_runner = SuffixRunner(self.module, self.layer, self.task, self.adaptor)

    @classmethod
    def load(
        cls,
        name: str,
        layer: str,
        *,
        device: str = "auto",
        dtype: str = "float32",
        cache: Path | None = None,
        limits: Limits | None = None,
        query: QueryToken | None = None,
        replace: ReplacedTokens | None = None,
        encoder: str | None = None,
    ) -> Self:
        """Load a local folder or a hub id.

        Args:
            name: Folder or hub id of a checkpoint.
            layer: The module to wrap.
            device: `auto`, `cpu` or `cuda`.
            dtype: Of the weights.
            cache: Folder that keeps fingerprints of local checkpoints; None computes them anew.
            limits: Of prompts, targets and answers.
            query: The query's token; None: the task's own.
            replace: The tokens that take the value; None: the task's own.
            encoder: Folder or hub id of a sentence encoder that makes the queries; None: the layer's input does.

        Raises:
            ModelError: no such checkpoint, not of one of the three kinds, no such encoder, or no such device.
            LayerError: the model has no such layer, it cannot be edited, or the query there tells nothing of a prompt
                but one token.
        """
        module, tokenizer = load_checkpoint(name, device=device, dtype=dtype)
        fingerprint = cached_fingerprint(module, tokenizer, Path(name), cache)
        model = cls(
            module, tokenizer, layer, limits=limits, query=query, replace=replace, fingerprint=fingerprint,
            encoder=None if encoder is None else SentenceEncoder.load(encoder, device=device, cache=cache),
        )  # fmt: skip
        if (fault := layer_fault(model.task, model.adaptor)) is not None:
            raise LayerError(f"layer {model.layer!r} cannot be edited: {fault}; {model._suggest_layers()}")
        if model.query_ignores_context():
            raise LayerError(
                f"layer {model.layer!r}: the {model.query_source} token has seen no other token of a prompt there,"
                " so that"
                " an edit would reach every prompt which has that token: choose another query or, unless it is a causal"
                " model's first token, a later layer"
            )
        return model

    def _suggest_layers(self) -> str:
        """Some layers that can be edited, each tried."""
        self.adaptor.remove()
        found: list[str] = []
        for layers in reversed(linear_layers(self.module)):  # the last of a block put their output into its sum
            path = layers.path.replace("*", str(layers.count // 2), 1)
            other = type(self)(
                self.module, self.task.tokenizer, path, limits=self.task.limits, replace=self.adaptor.replace,
                query=None if self._encoder else self.adaptor.query, encoder=self._encoder,
                fingerprint=self.fingerprint,
            )  # fmt: skip
            if layer_fault(other.task, other.adaptor) is None and not other.query_ignores_context():
                found.append(path)
            other.adaptor.remove()
            if len(found) == MAX_SUGGESTED_LAYERS:
                break
        return f"layers that can: {', '.join(found)}" if found else "`gracestream layers` lists others"

    def query_ignores_context(self) -> bool:
        """Whether two prompts that differ in the middle alone have the very same query."""
        try:
            prompt, words = (self.task.tokenize(text) for text in PROBE_TEXTS[:2])
        except InputError:
            return False
        tokens, middle = prompt.token_ids, len(prompt) // 2
        not_these = {tokens[middle], *self.task.tokenizer.all_special_ids}
        other = next(
            (one for one in (*words.token_ids, *range(self.task.vocabulary_size)) if one not in not_these), None
        )
        if len(prompt) < 3 or other is None:
            return False
        changed = Prompt((*tokens[:middle], other, *tokens[middle + 1 :]), prompt.segments)
        return torch.equal(*(self.queries([one]) for one in (prompt, changed)))

    def queries(self, prompts: Sequence[Prompt]) -> Tensor:
        """The queries (B, D), float32, of tokenised prompts; nothing after the wrapped module runs."""
        batch = self.task.batch(prompts)
        if self._encoder is not None:
            return self._encode_queries(batch)
        with torch.inference_mode(), self.adaptor.capture_query(batch) as session:
            self.task.forward_prompt(batch)
        return session.queries_BD

    def _encode_queries(self, batch: Batch) -> Tensor:
        assert self._encoder is not None
        prompts = batch.prompt_token_ids()
        texts = self.task.tokenizer.batch_decode(prompts, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        turns = batch.last_turns or [None] * len(prompts)
        texts = [text if turn is None else turn.text for text, turn in zip(texts, turns, strict=True)]
        return self._encoder(prompts, texts, [turn is not None and turn.has_earlier_turns for turn in turns])

    def answer(
        self,
        prompts: Sequence[Prompt],
        parameters: Sequence[Parameters],
        codebook_lookup: CodebookLookup,
        *,
        check_answers: bool = False,
    ) -> list[ServedAnswer]:
        """Answer a batch of tokenised prompts of one group from the edited model.

        With `check_answers`, rows that an entry serves without giving its target are answered again by the unedited
        model. A value was trained on its correction's prompts, and may give any text on another prompt within its
        radius.
        """
        batch = self.task.batch(prompts)
        serving = self.adaptor.with_codebook(batch, codebook_lookup, row_wording=self.task.wording_getter(batch))
        with torch.inference_mode(), serving as session:
            answers = self.task.run(batch, parameters)
        served = [
            ServedAnswer(answer, None, match)
            if match is not None and match.disagreement
            else ServedAnswer(answer, match)
            for answer, match in zip(answers, session.matches, strict=True)
        ]
        return self._fall_back_to_unedited(served, prompts, parameters, codebook_lookup) if check_answers else served

    def _fall_back_to_unedited(
        self,
        served: list[ServedAnswer],
        prompts: Sequence[Prompt],
        parameters: Sequence[Parameters],
        codebook_lookup: CodebookLookup,
    ) -> list[ServedAnswer]:
        """The same, with the unedited model's answer where an entry did not give its target."""
        failed = {
            row: one.hit
            for row, one in enumerate(served)
            if one.hit is not None
            and not self.task.matches_target(one.answer, codebook_lookup.label(one.hit), parameters[row])
        }
        if not failed:
            return served
        with torch.inference_mode():
            answers = self.task.run(
                self.task.batch([prompts[row] for row in failed]), [parameters[row] for row in failed]
            )
        for (row, hit), answer in zip(failed.items(), answers, strict=True):
            served[row] = ServedAnswer(answer, None, near_miss=hit)
        return served

    def prepare_correction(self, inputs: Inputs, target: str) -> tuple[Label, TargetPass]:
        """A correction as a label and the forward pass that checks it.

        Raises:
            InputError: the model cannot take these inputs or this target.
        """
        label = self.task.encode_target(inputs, target)
        return label, self.task.make_target_pass(inputs, label)


def _task_class(model: Any) -> type[ModelTask]:
    if type(model).__name__.endswith("ForSequenceClassification"):
        return Classification
    if model.config.is_encoder_decoder:
        return Seq2SeqGeneration
    if model.can_generate():
        return CausalGeneration
    raise ModelError(f"{type(model).__name__} is no classifier, encoder-decoder or causal language model")
