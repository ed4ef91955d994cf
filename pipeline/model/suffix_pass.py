"""Passes over corrections that differ in the value alone, and compute no more than what depends on it.

What runs before the edited layer does not depend on the value, nor do earlier positions; what a classifier's head does
not read need not be computed. Whether a model can be run in such parts is not taken on trust: a probe tells, whose loss
and gradient have to be those of the whole model.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import replace as replace_in
from typing import Any, Literal, Self

import torch
from torch import Tensor

from gracestream.pipeline.codebook import CodebookLookup, Label
from gracestream.pipeline.device import raise_if_broken
from gracestream.pipeline.model.adaptor import Adaptor, Session
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.cls_attention import FirstToken
from gracestream.pipeline.model.layers import Prefix
from gracestream.pipeline.model.probe_texts import TEXTS
from gracestream.pipeline.model.tasks.base import InputError, Supervised, Task
from gracestream.pipeline.model.tasks.classification import Classification


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


PASS = 32
"""Tokens that cost about as much as one more pass does by itself."""


class Passes:
    """Those of one model, with one layer wrapped by an adaptor."""

    def __init__(self, module: Any, layer: str, task: Task, adaptor: Adaptor) -> None:
        self._module, self._layer, self._task, self._adaptor = module, layer, task, adaptor
        parameter = next(module.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self._last = FirstToken.of(module, layer, adaptor.replace) if task.query == "first" else None
        self._shortcuts: Shortcuts | None = None
        self._of_rows: set[torch.nn.Module] | None = None
        """What may be kept of a pass, once a probe has told."""
        self._pads: bool | None = None

    def examine(self, supervised: Supervised, codebook: CodebookLookup) -> tuple[Verdict, Session, Rest]:
        """Whether the edited model gives the label, what the wrapped module saw, and the rest for other values."""
        if self._shortcuts is None:
            self._shortcuts = self._sound_shortcuts()
        batch = supervised.batch
        serving = self._adaptor.serving(batch, codebook, asked=self._task.asked(batch), measured=True)
        with torch.no_grad(), serving as session:
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
            rows = [self._task.supervised(TEXTS[0], label), self._task.supervised(" ".join(TEXTS[1:3]), label[:1])]
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
        return (0,) * (1 if isinstance(self._task, Classification) else 3)

    def _output(self, supervised: Supervised) -> Tensor:
        """The module's own output (V) where a value of the first row would go."""
        with torch.no_grad(), self._adaptor.watching(supervised.batch) as session:
            self._task.logits(supervised)
        return session.outputs_BV[0]

    def rest_of(self, rows: Sequence[Supervised]) -> Rest:
        """What is left for other values of one pass over several corrections."""
        supervised = self._task.together(rows)
        if self._shortcuts is None:
            self._shortcuts = self._sound_shortcuts()
        with torch.no_grad(), self._adaptor.watching(supervised.batch):
            return self._passed(supervised, self._shortcuts)[1]

    def rest_of_unequal(self, rows: Sequence[Supervised]) -> Rest:
        """The same of rows of unequal lengths: shorter and longer ones pass apart, where that saves padding enough."""
        order = sorted(range(len(rows)), key=lambda row: rows[row].tokens)
        lengths = [rows[row].tokens for row in order]
        # What a split saves: each shorter row then has less padding.
        saved, split = max((place * (lengths[-1] - lengths[place - 1]), place) for place in range(1, len(rows) + 1))
        if saved < PASS:
            return self.rest_of(rows)
        parts = [self.rest_of([rows[row] for row in some]) for some in (order[:split], order[split:])]
        supervised = self._task.joined([part.supervised for part in parts])
        prefix = parts[0].prefix.joined([part.prefix for part in parts[1:]])
        if supervised is None or prefix is None:
            return self.rest_of(rows)
        return Rest(supervised, prefix, parts[0].last).rows([order.index(row) for row in range(len(rows))])

    def _passed(self, supervised: Supervised, shortcuts: Shortcuts) -> tuple[list[Tensor], Rest]:
        """Logits of the whole pass, and what is left of it for other values."""
        if shortcuts == "none":
            return self._task.logits(supervised), Rest(supervised, Prefix())
        prefix = Prefix.of(self._module, self._layer, self._of_rows)
        with prefix.recording():
            logits, left = self._task.keeping(supervised, self._adaptor.replace)
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
            supervised = self._task.supervised(" ".join(TEXTS[:3]), self._probe_label())
        except InputError:
            return "none"
        start_V = self._output(supervised)
        wave_V = torch.cos(torch.arange(len(start_V), device=self.device)) * start_V.abs().mean()
        expected = [self._slope(Rest(supervised, Prefix()), value_V) for value_V in (start_V, wave_V)]
        choices: tuple[Shortcuts, ...] = ("all", "no narrowing")
        for shortcuts in choices:
            try:
                with torch.no_grad(), self._adaptor.watching(supervised.batch):
                    _, rest = self._passed(supervised, shortcuts)
                if self._of_rows is None:
                    self._of_rows = rest.prefix.of_rows()
                    with torch.no_grad(), self._adaptor.watching(supervised.batch):
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
        allowed = 1e-3 if self._module.dtype in (torch.float32, torch.float64) else 0.05
        pairs = (ours[:1], theirs[:1]), (ours[1:], theirs[1:])
        return all(float((a - b).abs().max()) <= allowed * float(b.abs().max()) for a, b in pairs)

    def judge(self, rest: Rest, values_BV: Tensor) -> list[tuple[Verdict, Tensor]]:
        """Of each row the verdict with its value in place, and the loss, which can be differentiated by the value."""
        return [verdict(*row) for row in zip(self._edited(rest, values_BV), rest.supervised.labels, strict=True)]

    def _edited(self, rest: Rest, values_BV: Tensor) -> list[Tensor]:
        """Of each row the logits (L, C) at its label's places with its value in place."""
        narrowed = nullcontext() if rest.last is None else rest.last.narrowed()
        with rest.prefix.skipping(), narrowed, self._adaptor.substituting(rest.supervised.batch, values_BV):
            return self._task.logits(rest.supervised)

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


def verdict(logits_LC: Tensor, label_L: Tensor) -> tuple[Verdict, Tensor]:
    """The verdict on logits, and the loss (mean cross entropy) as a tensor that can be differentiated."""
    loss = torch.nn.functional.cross_entropy(logits_LC, label_L)
    chosen_L = logits_LC.detach().gather(1, label_L[:, None])[:, 0]
    others_LC = logits_LC.detach().scatter(1, label_L[:, None], -torch.inf)
    return Verdict(margin=float((chosen_L - others_LC.amax(dim=1)).min()), loss=float(loss.detach())), loss
