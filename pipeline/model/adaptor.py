"""The adaptor: it wraps one module, takes the query from its input and puts the value into its output (paper, 2.2).

With an encoder, a query is what that makes of the prompt's text instead; when and where a value is put stays the same.

Outside a session the module runs as it always did. A session belongs to one batch and one thread: it knows which
tokens are the prompt's, looks up once, at the first call, and in generation with a KV cache later calls pass through,
so no decode step ever queries. Where the whole sequence runs again (generation without a cache), the first decision is
applied again at the same tokens. The codebook is never written here, and no random number is drawn.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gracestream.pipeline.codebook import CodebookLookup, Hit, WordingGetter, serving_hit
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.layers import LayerError

QueryToken = Literal["last", "first", "mean"]
ReplacedTokens = Literal["last", "all"]

QueryEncoder = Callable[[Batch], Tensor]
"""Queries (B, D), float32, of a batch's prompts."""

ValueLookup = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Of queries (B, D): which rows take a value (B), and values (B, V) that count in those; None where no row does."""


class StopForward(Exception):
    """Ends a forward pass at the wrapped module."""


@dataclass(slots=True)
class AdaptorPass:
    """What one batch saw and did. Rows are those of the batch.

    Attributes:
        batch: What goes through the model.
        queries_BD: Float32 queries, after the first call, of a session that looks up or takes them.
        outputs_BV: The module's own output where a value would go, float32: the mean over the tokens that it would
            replace. Only of a session that is `capture_output`.
        matches: For each row the entry that may serve it, or None; of a session that serves from a codebook.
        inject_mask_BT: The prompt's tokens that a value replaces, in a row that has one.
        inject_mask_B: The rows that have one.
    """

    batch: Batch
    lookup: ValueLookup | None = None
    values_BV: Tensor | None = None
    stop_after_query: bool = False
    queries_BD: Tensor = field(default_factory=lambda: torch.empty(0))
    capture_output: bool = False
    outputs_BV: Tensor = field(default_factory=lambda: torch.empty(0))
    matches: list[Hit | None] = field(default_factory=list)
    inject_mask_BT: Tensor = field(default_factory=lambda: torch.empty(0))
    inject_mask_B: Tensor | None = None
    num_tokens: int = 0

    @property
    def hits(self) -> list[Hit | None]:
        """For each row the entry that serves it, or None."""
        return [serving_hit(match) for match in self.matches]


class Adaptor:
    """Hooks one module. `query` names the token whose input is the query, `replace` the tokens that take the value.

    With `query_encoder` the query is what that gives, of no token.
    """

    def __init__(
        self, module: nn.Module, query: QueryToken, replace: ReplacedTokens, query_encoder: QueryEncoder | None = None
    ) -> None:
        self.query, self.replace, self._query_encoder = query, replace, query_encoder
        self._active_pass: AdaptorPass | None = None
        self._handle = module.register_forward_hook(self._hook, with_kwargs=True)

    def remove(self) -> None:
        """Unwrap the module."""
        self._handle.remove()

    @contextmanager
    def with_codebook(
        self,
        batch: Batch,
        codebook_lookup: CodebookLookup,
        *,
        row_wording: WordingGetter,
        capture_output: bool = False,
    ) -> Iterator[AdaptorPass]:
        """Put the value of the entry that serves a row in place, where one does.

        `row_wording` tells the wording of a row that lies within the radius of an entry.
        """
        session = AdaptorPass(batch, capture_output=capture_output)

        def lookup(queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
            session.matches = codebook_lookup.find_hits(queries_BD, row_wording)
            return codebook_lookup.gather_values(session.hits)

        session.lookup = lookup
        with self._activate(session):
            yield session

    @contextmanager
    def with_lookup(self, batch: Batch, lookup: ValueLookup) -> Iterator[AdaptorPass]:
        """Put in place what `lookup` makes of the queries, where it says so."""
        with self._activate(AdaptorPass(batch, lookup=lookup)) as session:
            yield session

    @contextmanager
    def inject(self, batch: Batch, values_BV: Tensor) -> Iterator[AdaptorPass]:
        """Put these values in place in every row, without a lookup: for training a value and for checking one."""
        with self._activate(AdaptorPass(batch, values_BV=values_BV)) as session:
            yield session

    @contextmanager
    def capture_output(self, batch: Batch) -> Iterator[AdaptorPass]:
        """See what the module sees and puts out, and change nothing."""
        with self._activate(AdaptorPass(batch, capture_output=True)) as session:
            yield session

    @contextmanager
    def capture_query(self, batch: Batch) -> Iterator[AdaptorPass]:
        """Take the queries and end the forward pass at the wrapped module; nothing after it runs."""
        with self._activate(AdaptorPass(batch, stop_after_query=True)) as session:
            try:
                yield session
            except StopForward:
                return

    @contextmanager
    def _activate(self, adaptor_pass: AdaptorPass) -> Iterator[AdaptorPass]:
        if self._active_pass is not None:
            raise RuntimeError("the adaptor is in use: one batch at a time")
        self._active_pass = adaptor_pass
        try:
            yield adaptor_pass
        finally:
            self._active_pass = None

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        session = self._active_pass
        if session is None:
            return None
        tokens = _require_hidden_states(args[0] if args else next(iter(kwargs.values())), module)
        hidden = _require_hidden_states(output[0] if isinstance(output, tuple) else output, module)
        first = session.num_tokens == 0
        if first:
            self._run_first_call(session, tokens, hidden)
        elif tokens.shape[1] <= session.num_tokens:
            return None
        if session.values_BV is None or session.inject_mask_B is None:
            return None
        prompt_BT = session.inject_mask_BT
        where_BT = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        where_BT[:, : prompt_BT.shape[1]] = prompt_BT & session.inject_mask_B[:, None]
        edited = torch.where(where_BT[..., None], session.values_BV[:, None, :].to(hidden.dtype), hidden)
        return (edited, *output[1:]) if isinstance(output, tuple) else edited

    def _run_first_call(self, adaptor_pass: AdaptorPass, tokens: Tensor, hidden: Tensor) -> None:
        adaptor_pass.num_tokens = tokens.shape[1]
        mask_BT = self._prompt_mask(adaptor_pass, tokens)
        if mask_BT.shape[1] > min(tokens.shape[1], hidden.shape[1]):
            raise LayerError("it runs for some of a prompt's tokens only, as a language model's head does")
        if adaptor_pass.lookup is not None or adaptor_pass.stop_after_query:
            adaptor_pass.queries_BD = self._queries(adaptor_pass.batch, tokens, mask_BT)
        if adaptor_pass.stop_after_query:
            raise StopForward
        adaptor_pass.inject_mask_BT = self._inject_mask(mask_BT)
        if adaptor_pass.capture_output:
            adaptor_pass.outputs_BV = _pool_tokens(hidden, adaptor_pass.inject_mask_BT, "mean").float()
        if adaptor_pass.lookup is not None:
            found = adaptor_pass.lookup(adaptor_pass.queries_BD.detach())
            if found is not None:
                adaptor_pass.inject_mask_B, adaptor_pass.values_BV = (part.to(hidden.device) for part in found)
        elif adaptor_pass.values_BV is not None:
            adaptor_pass.inject_mask_B = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)

    def _queries(self, batch: Batch, tokens: Tensor, mask_BT: Tensor) -> Tensor:
        return (
            _pool_tokens(tokens, mask_BT, self.query).float()
            if self._query_encoder is None
            else self._query_encoder(batch)
        )

    def _prompt_mask(self, adaptor_pass: AdaptorPass, tokens: Tensor) -> Tensor:
        if adaptor_pass.batch.mask_BT is None:
            return torch.ones(tokens.shape[0], 1, dtype=torch.bool, device=tokens.device)
        return adaptor_pass.batch.mask_BT.bool()

    def _inject_mask(self, mask_BT: Tensor) -> Tensor:
        if self.replace == "all":
            return mask_BT
        last_BT = torch.zeros_like(mask_BT)
        last_BT[torch.arange(len(mask_BT), device=mask_BT.device), last_token_positions(mask_BT)] = True
        return last_BT


def last_token_positions(mask_BT: Tensor) -> Tensor:
    """The position of each row's last real token, wherever the padding is."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (mask_BT.long() * positions_T).argmax(dim=1)


def _pool_tokens(hidden_BTX: Tensor, mask_BT: Tensor, token: QueryToken) -> Tensor:
    hidden_BTX = hidden_BTX[:, : mask_BT.shape[1]]
    rows_B = torch.arange(len(hidden_BTX), device=hidden_BTX.device)
    if token == "last":
        return hidden_BTX[rows_B, last_token_positions(mask_BT)]
    if token == "first":
        return hidden_BTX[rows_B, mask_BT.long().argmax(dim=1)]
    weights_BT1 = mask_BT[..., None].float()
    return (hidden_BTX.float() * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1)


def _require_hidden_states(candidate: Any, module: nn.Module) -> Tensor:
    if not isinstance(candidate, Tensor) or candidate.dim() != 3:
        found = f"of shape {tuple(candidate.shape)}" if isinstance(candidate, Tensor) else type(candidate).__name__
        raise LayerError(
            f"{type(module).__name__} does not map (batch, tokens, width) to the like: its input or output is {found}"
        )
    return candidate
