"""The editable model: a frozen Hugging Face checkpoint with one module wrapped by the adaptor.

It is used by one thread at a time, but for its tokenizer (`Task.tokenize` and `admit`), which another thread may use
meanwhile. Weights are never written, no gradient is kept on them, and answering leaves the global random state as it
was.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import replace as replace_in
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from pipeline.adaptor import Adaptor, Hit, QueryToken, Replaced, Session
from pipeline.batch import Batch
from pipeline.checkpoint import ModelError, cached_fingerprint, fingerprint_of, load_checkpoint
from pipeline.classification import Classification
from pipeline.codebook import Codebook, Label
from pipeline.device import raise_if_broken
from pipeline.encoder import Encoder
from pipeline.generation import CausalGeneration, Seq2SeqGeneration
from pipeline.index import KeyIndex
from pipeline.layers import LayerError, Prefix, find_layer, in_decoder, normal_path
from pipeline.narrowing import FirstToken
from pipeline.probe import TEXTS
from pipeline.tasks import Answer, InputError, Limits, Supervised, Task
from schemas.messages import Inputs, Parameters


@dataclass(frozen=True, slots=True)
class Served:
    """One row's answer, and the entry that gave it."""

    answer: Answer
    hit: Hit | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the model gives a label: `margin` is the least lead (logits) of a label's token, `loss` the mean CE."""

    margin: float
    loss: float

    @property
    def right(self) -> bool:
        """Every token of the label is the model's choice."""
        return self.margin > 0


Shortcuts = Literal["all", "no narrowing", "none"]
"""What is left out of a pass that differs from an earlier one in the value alone: all that can be, all but what a
classifier's head does not read, or nothing."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What of a forward pass over corrections, a row each, depends on the value and counts.

    What runs before the layer does not depend on it, nor do earlier positions; `last` leaves out what a classifier's
    head never reads.
    """

    supervised: Supervised
    prefix: Prefix
    last: FirstToken | None = None

    def rows(self, kept: Sequence[int]) -> Self:
        """What is left of it for some of its rows."""
        return replace_in(self, supervised=self.supervised.rows(kept), prefix=self.prefix.rows(kept))


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
        replace: Replaced | None = None,
        encoder: Encoder | None = None,
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
        checkpoint = fingerprint or fingerprint_of(model, tokenizer)
        self.module = model.eval().requires_grad_(False)
        self.layer = normal_path(layer)
        decoder_layer = model.config.is_encoder_decoder and in_decoder(layer)
        self.task: Task = _task_class(model)(model, tokenizer, limits or Limits(), decoder_layer)
        self._encoder = encoder
        self.adaptor = Adaptor(
            find_layer(model, layer), query or self.task.query, replace or self.task.replace,
            None if encoder is None else self._encoded,
        )  # fmt: skip
        # Where another token is queried, keys are other ones: replicas set up in another way must not share a codebook.
        self.queried: str = self.adaptor.query if encoder is None else f"encoder {encoder.fingerprint}"
        served = f"{checkpoint} query={self.queried} replace={self.adaptor.replace}"
        self.fingerprint = hashlib.sha256(served.encode()).hexdigest()
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.query_dtype = self.dtype if encoder is None else "float32"
        self.device: torch.device = model.device
        self._last = None
        if self.task.query == "first":
            self._last = FirstToken.of(model, self.layer, self.adaptor.replace)
        self._shortcuts: Shortcuts | None = None
        self._of_rows: set[torch.nn.Module] | None = None
        """What may be kept of a pass, once a probe has told."""
        self._pads: bool | None = None

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
        replace: Replaced | None = None,
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
            LayerError: the model has no such layer, or the query tells nothing of a prompt there but one token.
        """
        module, tokenizer = load_checkpoint(name, device=device, dtype=dtype)
        fingerprint = cached_fingerprint(module, tokenizer, Path(name), cache)
        model = cls(
            module, tokenizer, layer, limits=limits, query=query, replace=replace, fingerprint=fingerprint,
            encoder=None if encoder is None else Encoder.load(encoder, device=device, cache=cache),
        )  # fmt: skip
        if model._is_blind():
            raise LayerError(
                f"layer {model.layer!r}: the {model.queried} token has seen no other token of a prompt there, so that"
                " an edit would reach every prompt which has that token: choose another query or, unless it is a causal"
                " model's first token, a later layer"
            )
        return model

    def _is_blind(self) -> bool:
        """Whether two prompts that differ in the middle alone have the very same query."""
        try:
            prompt, words = (self.task.tokenize(text) for text in TEXTS[:2])
        except InputError:
            return False
        middle = len(prompt) // 2
        not_these = {prompt[middle], *self.task.tokenizer.all_special_ids}
        other = next((one for one in (*words, *range(self.task.vocabulary)) if one not in not_these), None)
        if len(prompt) < 3 or other is None:
            return False
        changed = [*prompt[:middle], other, *prompt[middle + 1 :]]
        return torch.equal(*(self.queries([tokens]) for tokens in (prompt, changed)))

    def queries(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """The queries (B, D), float32, of tokenised prompts; nothing after the wrapped module runs."""
        batch = self.task.batch(prompts)
        if self._encoder is not None:
            return self._encoded(batch)
        with torch.inference_mode(), self.adaptor.observing(batch) as session:
            self.task.observe(batch)
        return session.queries_BD

    def _encoded(self, batch: Batch) -> Tensor:
        assert self._encoder is not None
        prompts = batch.prompts()
        texts = self.task.tokenizer.batch_decode(prompts, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._encoder(prompts, texts)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: Sequence[Parameters],
        codebook: Codebook,
        index: KeyIndex,
        settle: Callable[[], None] = lambda: None,
    ) -> list[Served]:
        """Answer a batch of tokenised prompts of one group from the edited model.

        `settle` is called once the layers before the edited one have run, and may bring codebook and index up to date.
        """
        batch = self.task.batch(prompts)

        def settle_first() -> None:
            with torch.inference_mode(mode=False):  # what it puts into the index may be changed outside
                settle()

        with torch.inference_mode(), self.adaptor.serving(batch, codebook, index, settle_first) as session:
            answers = self.task.run(batch, parameters)
        return [Served(answer, hit) for answer, hit in zip(answers, session.hits, strict=True)]

    def examine(self, supervised: Supervised, codebook: Codebook, index: KeyIndex) -> tuple[Verdict, Session, Rest]:
        """Whether the edited model gives the label, what the wrapped module saw, and the rest for other values."""
        if self._shortcuts is None:
            self._shortcuts = self._sound_shortcuts()
        with torch.no_grad(), self.adaptor.serving(supervised.batch, codebook, index, measured=True) as session:
            logits, rest = self._passed(supervised, self._shortcuts)
        return verdict(logits[0], supervised.labels[0])[0], session, rest

    def pads(self) -> bool:
        """Whether rows of different lengths are trained in one pass as each is alone, rounding apart, on a probe.

        They are not where padding reaches what is not padding, as in a convolution, or counts as a position.
        """
        if self._pads is None:
            self._pads = self._pads_on_probe()
        return self._pads

    def _pads_on_probe(self) -> bool:
        label = self._probe_label()
        try:
            rows = [self.task.supervised(TEXTS[0], label), self.task.supervised(" ".join(TEXTS[1:3]), label[:1])]
        except InputError:
            return False
        starts = [self._output(row) for row in rows]
        expected = [self._slope(self.rest_of([row]), start_V) for row, start_V in zip(rows, starts, strict=True)]
        try:
            both = self.rest_of(rows)
            found = self._slopes(both, torch.stack(starts))
            found += [self._slope(both.rows([place]), starts[place]) for place in range(len(rows))]
        except Exception as error:  # noqa: BLE001  (a model that takes no padding fails anyhow)
            raise_if_broken(error)
            return False
        return all(self._agree(ours, theirs) for ours, theirs in zip(found, expected * 2, strict=True))

    def _probe_label(self) -> Label:
        """A class, or a few tokens."""
        return (0,) * (1 if isinstance(self.task, Classification) else 3)

    def _output(self, supervised: Supervised) -> Tensor:
        """The module's own output (V) where a value of the first row would go."""
        with torch.no_grad(), self.adaptor.watching(supervised.batch) as session:
            self.task.logits(supervised)
        return session.outputs_BV[0]

    def rest_of(self, rows: Sequence[Supervised]) -> Rest:
        """What is left for other values of one pass over several corrections."""
        supervised = self.task.together(rows)
        if self._shortcuts is None:
            self._shortcuts = self._sound_shortcuts()
        with torch.no_grad(), self.adaptor.watching(supervised.batch):
            return self._passed(supervised, self._shortcuts)[1]

    def _passed(self, supervised: Supervised, shortcuts: Shortcuts) -> tuple[list[Tensor], Rest]:
        """Logits of the whole pass, and what is left of it for other values."""
        if shortcuts == "none":
            return self.task.logits(supervised), Rest(supervised, Prefix())
        prefix = Prefix.of(self.module, self.layer, self._of_rows)
        with prefix.recording():
            logits, left = self.task.keeping(supervised, self.adaptor.replace)
        last = self._last if shortcuts == "all" else None
        if left.earlier:
            prefix.cut(slice(-left.batch.kwargs["input_ids"].shape[1], None))
        elif last is not None and last.inside:
            if prefix.holds(last.attention) and left.batch.mask_BT is not None:
                prefix.cut(slice(1))  # then the block is over the first token from the start
                left = replace_in(left, batch=Batch(left.batch.kwargs, left.batch.mask_BT[:, :1]))
            last = None
        return logits, Rest(left, prefix, last)

    def _sound_shortcuts(self) -> Shortcuts:
        """The most of them under which loss and gradient are those of the whole model, rounding apart, on a probe."""
        try:
            supervised = self.task.supervised(" ".join(TEXTS[:3]), self._probe_label())
        except InputError:
            return "none"
        start_V = self._output(supervised)
        wave_V = torch.cos(torch.arange(len(start_V), device=self.device)) * start_V.abs().mean()
        expected = [self._slope(Rest(supervised, Prefix()), value_V) for value_V in (start_V, wave_V)]
        choices: tuple[Shortcuts, ...] = ("all", "no narrowing")
        for shortcuts in choices:
            try:
                with torch.no_grad(), self.adaptor.watching(supervised.batch):
                    _, rest = self._passed(supervised, shortcuts)
                if self._of_rows is None:
                    self._of_rows = rest.prefix.of_rows()
                    with torch.no_grad(), self.adaptor.watching(supervised.batch):
                        _, rest = self._passed(supervised, shortcuts)
                found = [self._slope(rest, value_V) for value_V in (start_V, wave_V)]
            except Exception as error:  # noqa: BLE001  (a model that is built in another way fails anyhow)
                raise_if_broken(error)
                continue
            if all(self._agree(ours, theirs) for ours, theirs in zip(found, expected, strict=True)):
                return shortcuts
        return "none"

    def _slope(self, rest: Rest, value_V: Tensor) -> Tensor:
        """The loss with a value in place, and its derivative by each of the value's numbers: (1 + V)."""
        return self._slopes(rest, value_V[None])[0]

    def _slopes(self, rest: Rest, values_BV: Tensor) -> list[Tensor]:
        """Likewise, of each row."""
        values_BV = values_BV.clone().requires_grad_()
        with torch.enable_grad():
            losses_B = torch.stack([loss for _, loss in self.judge(rest, values_BV)])
        (slopes_BV,) = torch.autograd.grad(losses_B.sum(), values_BV)
        return list(torch.cat([losses_B.detach()[:, None], slopes_BV], dim=1))

    def _agree(self, ours: Tensor, theirs: Tensor) -> bool:
        allowed = 1e-3 if self.module.dtype in (torch.float32, torch.float64) else 0.05
        pairs = (ours[:1], theirs[:1]), (ours[1:], theirs[1:])
        return all(float((a - b).abs().max()) <= allowed * float(b.abs().max()) for a, b in pairs)

    def judge(self, rest: Rest, values_BV: Tensor) -> list[tuple[Verdict, Tensor]]:
        """Of each row the verdict with its value in place, and the loss, which can be differentiated by the value."""
        return [verdict(*row) for row in zip(self._edited(rest, values_BV), rest.supervised.labels, strict=True)]

    def _edited(self, rest: Rest, values_BV: Tensor) -> list[Tensor]:
        """Of each row the logits (L, C) at its label's places with its value in place."""
        narrowed = nullcontext() if rest.last is None else rest.last.narrowed()
        with rest.prefix.skipping(), narrowed, self.adaptor.substituting(rest.supervised.batch, values_BV):
            return self.task.logits(rest.supervised)

    def gives(self, rest: Rest, value_V: Tensor) -> Verdict:
        """Whether a value in place makes the model give the label."""
        with torch.no_grad():
            return self.judge(rest, value_V.to(self.device)[None])[0][0]

    def reach(self, rest: Rest, value_V: Tensor) -> int:
        """How many tokens of the label, from its first, a value has a say in: in a last block no more than one."""
        value_V = value_V.to(self.device)
        with torch.no_grad():
            ours_LC, others_LC = (self._edited(rest, one_V[None])[0] for one_V in (value_V, torch.zeros_like(value_V)))
        told = (ours_LC != others_LC).any(dim=1).nonzero()
        return int(told.max()) + 1 if len(told) else 0

    def supervised(self, inputs: Inputs, target: str) -> tuple[Label, Supervised]:
        """A correction as a label and the forward pass that checks it.

        Raises:
            InputError: the model cannot take these inputs or this target.
        """
        label = self.task.label(inputs, target)
        return label, self.task.supervised(inputs, label)


def verdict(logits_LC: Tensor, label_L: Tensor) -> tuple[Verdict, Tensor]:
    """The verdict on logits, and the loss (mean cross entropy) as a tensor that can be differentiated."""
    loss = torch.nn.functional.cross_entropy(logits_LC, label_L)
    chosen_L = logits_LC.detach().gather(1, label_L[:, None])[:, 0]
    others_LC = logits_LC.detach().scatter(1, label_L[:, None], -torch.inf)
    return Verdict(margin=float((chosen_L - others_LC.amax(dim=1)).min()), loss=float(loss.detach())), loss


def _task_class(model: Any) -> type[Task]:
    if type(model).__name__.endswith("ForSequenceClassification"):
        return Classification
    if model.config.is_encoder_decoder:
        return Seq2SeqGeneration
    if model.can_generate():
        return CausalGeneration
    raise ModelError(f"{type(model).__name__} is no classifier, encoder-decoder or causal language model")
