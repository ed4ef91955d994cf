"""The editable model: a frozen Hugging Face checkpoint with one module wrapped by the adaptor.

1. Weights are never written and keep no gradient.
2. Answers leave the global random state unchanged.

Not promised: thread safety. One thread at a time may use a model. Another thread may meanwhile use its tokenizer only
(`ModelTask.tokenize` and `ModelTask.batch_key`).

Shapes: B rows, D width of a query.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from gracestream.pipeline.codebook import CodebookLookup, FoundEntry, Label
from gracestream.pipeline.model.adaptor import Adaptor, QueryToken, ReplacedTokens
from gracestream.pipeline.model.batch import Batch, LastTurn, Prompt
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

ENCODER_REQUIRED = (
    "queries come from the layer's input, which another engine does not show; set GRACESTREAM_QUERY_SOURCE=encoder for"
    " editor and replicas of a new codebook"
)
"""Why a model without weights needs an encoder."""

MAX_SUGGESTED_LAYERS = 3
"""The number of editable layers that an error message suggests."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One row's answer.

    Attributes:
        answer: The model's answer.
        served_by: The entry that served it; None if the unedited model answered.
        near_miss: An entry that might have applied but did not serve the row: the wordings disagree, its value did not
            give the entry's target, or the query is a little outside the radius.
    """

    answer: ModelAnswer
    served_by: FoundEntry | None
    near_miss: FoundEntry | None = None

    @classmethod
    def of(cls, answer: ModelAnswer, found: FoundEntry | None) -> Self:
        """The answer of a row, with the entry found for it as the serving entry or a near miss."""
        return cls(answer, None, found) if found is not None and found.reason_not_served else cls(answer, found)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The result of a pass over prompts.

    Attributes:
        logits_BC: Float32 logits of the next tokens (B, C).
        cache: Keys and values of the prompts.
        found_entries: For each row the entry that serves it or is its near miss, or None; empty without a lookup.
    """

    logits_BC: Tensor
    cache: DynamicCache
    found_entries: list[FoundEntry | None]


class EditableModel:
    """A model with its tokenizer and task, and the adaptor around one of its modules.

    Attributes:
        module: The Hugging Face model.
        layer: Path of the wrapped module, in torch's notation.
        task: The model's kind.
        adaptor: The wrapper of the module.
        reads_text: True if an encoder computes the queries.
        query_source: The origin of queries: a token or an encoder's fingerprint.
        fingerprint: SHA-256 of the checkpoint, query source and replaced tokens. Workers of one codebook share it.
        dtype: Dtype of the model.
        query_dtype: Dtype in which queries are computed.
        device: Device of the model.
        suffix_runner: Runs passes that differ in the injected value only.
    """

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
        """Wrap a module of a loaded model.

        Args:
            model: The Hugging Face model.
            tokenizer: Its tokenizer.
            layer: Path of the module to wrap.
            limits: Limits of prompts, targets and answers.
            query: The token whose input is the query; None: the task's default.
            replace: The tokens that take the value; None: the task's default.
            encoder: Computes the queries from text instead of a token of the layer's input.
            fingerprint: The checkpoint's fingerprint; None computes it.

        Raises:
            LayerError: the model has no such layer.
            ModelError: the model is of no supported kind.
            ValueError: both a query token and an encoder are given.
        """
        if query is not None and encoder is not None:
            raise ValueError(f"query={query!r} and an encoder are both given; choose one of them")
        checkpoint = fingerprint or compute_fingerprint(model, tokenizer)
        self.module = model.eval().requires_grad_(False)
        self.layer = normalize_path(layer)
        decoder_layer = model.config.is_encoder_decoder and is_in_decoder(layer)
        self.task: ModelTask = _task_class(model)(model, tokenizer, limits or Limits(), decoder_layer)
        self._encoder = encoder
        self.adaptor = Adaptor(
            find_layer(model, layer), query or self.task.query, replace or self.task.replace,
            None if encoder is None else self._encode_batch,
        )  # fmt: skip
        # Another query source makes other keys, and other replaced tokens need other values. The fingerprint covers
        # both, so that workers with different settings cannot share a codebook.
        self.reads_text = encoder is not None
        self.query_source: str = self.adaptor.query if encoder is None else f"encoder {encoder.fingerprint}"
        identity = f"{checkpoint} query={self.query_source} replace={self.adaptor.replace}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
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
        """Load a checkpoint from a local folder or a hub, and check that the layer can be edited.

        Args:
            name: Folder or hub id of a checkpoint.
            layer: Path of the module to wrap.
            device: `auto`, `cpu` or `cuda`.
            dtype: Dtype of the weights.
            cache: Folder that keeps fingerprints of local checkpoints; None computes them on every call.
            limits: Limits of prompts, targets and answers.
            query: The token whose input is the query; None: the task's default.
            replace: The tokens that take the value; None: the task's default.
            encoder: Folder or hub id of a sentence encoder for the queries; None: queries come from the layer's input.

        Raises:
            ModelError: the checkpoint, encoder or device does not exist, or the model is of no supported kind.
            LayerError: the layer does not exist or cannot be edited, or the query there depends on one token only.
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
                f"layer {model.layer!r}: the {model.query_source} token has seen no other token of a prompt there, so"
                " an edit would serve every prompt with that token; choose another query or, unless it is a causal"
                " model's first token, a later layer"
            )
        return model

    def drop_weights(self) -> None:
        """Free the weights of the model. It then only tokenises prompts, makes queries from text, and reads labels.

        Another program that runs the same checkpoint answers the prompts.

        Raises:
            ModelError: the queries come from the layer's input.
        """
        if self._encoder is None:
            raise ModelError(ENCODER_REQUIRED)
        self.module.to("meta")

    def _suggest_layers(self) -> str:
        """Up to `MAX_SUGGESTED_LAYERS` layers that passed the check of `load`, as text."""
        self.adaptor.remove()
        editable_paths: list[str] = []
        # A block's last linear layers come first: their output is added to the residual stream.
        for repeated in reversed(linear_layers(self.module)):
            path = repeated.path.replace("*", str(repeated.count // 2), 1)
            candidate = type(self)(
                self.module, self.task.tokenizer, path, limits=self.task.limits, replace=self.adaptor.replace,
                query=None if self._encoder else self.adaptor.query, encoder=self._encoder,
                fingerprint=self.fingerprint,
            )  # fmt: skip
            if layer_fault(candidate.task, candidate.adaptor) is None and not candidate.query_ignores_context():
                editable_paths.append(path)
            candidate.adaptor.remove()
            if len(editable_paths) == MAX_SUGGESTED_LAYERS:
                break
        return (
            f"layers that can: {', '.join(editable_paths)}" if editable_paths else "`gracestream layers` lists others"
        )

    def query_ignores_context(self) -> bool:
        """True if two prompts with different middle tokens have the same query."""
        try:
            prompt, second_prompt = (self.task.tokenize(text) for text in PROBE_TEXTS[:2])
        except InputError:
            return False
        tokens, middle = prompt.token_ids, len(prompt) // 2
        excluded = {tokens[middle], *self.task.tokenizer.all_special_ids}
        replacement = next(
            (
                candidate
                for candidate in (*second_prompt.token_ids, *range(self.task.vocabulary_size))
                if candidate not in excluded
            ),
            None,
        )
        if len(prompt) < 3 or replacement is None:
            return False
        changed_prompt = Prompt((*tokens[:middle], replacement, *tokens[middle + 1 :]), prompt.segments)
        return torch.equal(*(self.queries([candidate]) for candidate in (prompt, changed_prompt)))

    def queries(self, prompts: Sequence[Prompt]) -> Tensor:
        """The queries (B, D), float32, of tokenised prompts. No module after the wrapped one runs."""
        if self._encoder is not None:
            return self._encode(
                [list(prompt.token_ids) for prompt in prompts], [prompt.last_turn for prompt in prompts]
            )
        batch = self.task.batch(prompts)
        with torch.inference_mode(), self.adaptor.record_query(batch) as adaptor_pass:
            self.task.forward_prompt(batch)
        return adaptor_pass.queries_BD

    def _encode_batch(self, batch: Batch) -> Tensor:
        """The encoder's queries (B, D) of a batch."""
        prompts = batch.prompt_token_ids()
        return self._encode(prompts, batch.last_turns or [None] * len(prompts))

    def _encode(self, prompts: Sequence[Sequence[int]], turns: Sequence[LastTurn | None]) -> Tensor:
        """The encoder's queries (B, D), from each prompt's text, or from the last message of a chat."""
        assert self._encoder is not None
        texts = self.task.tokenizer.batch_decode(prompts, skip_special_tokens=True, clean_up_tokenization_spaces=False)
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
        """Answer a batch of tokenised prompts that share one `batch_key`, with the codebook's edits.

        With `check_answers`, the unedited model answers again each row that an entry serves without giving its target.
        A value is trained on its correction's prompts. On another prompt within its radius it may give any text.
        """
        batch = self.task.batch(prompts)
        serving = self.adaptor.with_codebook(batch, codebook_lookup, row_wording=self.task.wording_getter(batch))
        with torch.inference_mode(), serving as adaptor_pass:
            answers = self.task.run(batch, parameters)
        served = [
            ServedAnswer.of(answer, found) for answer, found in zip(answers, adaptor_pass.found_entries, strict=True)
        ]
        return self._fall_back_to_unedited(served, prompts, parameters, codebook_lookup) if check_answers else served

    def prefill(self, prompts: Sequence[Prompt], codebook_lookup: CodebookLookup | None) -> Prefill:
        """Run one pass over prompts of a causal language model; None: without the codebook."""
        assert isinstance(self.task, CausalGeneration)
        batch = self.task.batch(prompts)
        with torch.inference_mode():
            if codebook_lookup is None:
                return Prefill(*self.task.prefill(batch), [])
            serving = self.adaptor.with_codebook(batch, codebook_lookup, row_wording=self.task.wording_getter(batch))
            with serving as adaptor_pass:
                logits_BC, cache = self.task.prefill(batch)
            return Prefill(logits_BC, cache, adaptor_pass.found_entries)

    def _fall_back_to_unedited(
        self,
        served: list[ServedAnswer],
        prompts: Sequence[Prompt],
        parameters: Sequence[Parameters],
        codebook_lookup: CodebookLookup,
    ) -> list[ServedAnswer]:
        """The answers, with the unedited model's answer in rows where an entry did not give its target."""
        failed = {
            row: row_answer.served_by
            for row, row_answer in enumerate(served)
            if row_answer.served_by is not None
            and not self.task.matches_target(
                row_answer.answer, codebook_lookup.label(row_answer.served_by), parameters[row]
            )
        }
        if not failed:
            return served
        with torch.inference_mode():
            answers = self.task.run(
                self.task.batch([prompts[row] for row in failed]), [parameters[row] for row in failed]
            )
        for (row, failed_entry), answer in zip(failed.items(), answers, strict=True):
            served[row] = ServedAnswer(answer, None, near_miss=failed_entry)
        return served

    def prepare_correction(self, inputs: Inputs, target: str) -> tuple[Label, TargetPass]:
        """The label of a correction, and the forward pass that checks it.

        Raises:
            InputError: the model cannot take these inputs or this target.
        """
        label = self.task.encode_target(inputs, target)
        return label, self.task.make_target_pass(inputs, label)


def _task_class(model: Any) -> type[ModelTask]:
    """The task of a model's kind.

    Raises:
        ModelError: the model is of no supported kind.
    """
    if type(model).__name__.endswith("ForSequenceClassification"):
        return Classification
    if model.config.is_encoder_decoder:
        return Seq2SeqGeneration
    if model.can_generate():
        return CausalGeneration
    raise ModelError(f"{type(model).__name__} is not a classifier, encoder-decoder or causal language model")
