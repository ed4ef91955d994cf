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

from gracestream.pipeline.codebook import Asked, CodebookLookup, Hit, serving
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.layers import LayerError

QueryToken = Literal["last", "first", "mean"]
Replaced = Literal["last", "all"]

Encode = Callable[[Batch], Tensor]
"""Queries (B, D), float32, of a batch's prompts."""

Lookup = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Of queries (B, D): which rows take a value (B), and values (B, V) that count in those; None where no row does."""


class Observed(Exception):
    """Ends a forward pass at the wrapped module."""


@dataclass(slots=True)
class Session:
    """What one batch saw and did. Rows are those of the batch.

    Attributes:
        batch: What goes through the model.
        queries_BD: Float32 queries, after the first call, of a session that looks up or takes them.
        outputs_BV: The module's own output where a value would go, float32: the mean over the tokens that it would
            replace. Only of a session that is `measured`.
        matches: For each row the entry that may serve it, or None; of a session that serves from a codebook.
        replaced_BT: The prompt's tokens that a value replaces, in a row that has one.
        replaced_B: The rows that have one.
    """

    batch: Batch
    lookup: Lookup | None = None
    values_BV: Tensor | None = None
    stop: bool = False
    queries_BD: Tensor = field(default_factory=lambda: torch.empty(0))
    measured: bool = False
    outputs_BV: Tensor = field(default_factory=lambda: torch.empty(0))
    matches: list[Hit | None] = field(default_factory=list)
    replaced_BT: Tensor = field(default_factory=lambda: torch.empty(0))
    replaced_B: Tensor | None = None
    tokens_T: int = 0

    @property
    def hits(self) -> list[Hit | None]:
        """For each row the entry that serves it, or None."""
        return [serving(match) for match in self.matches]


class Adaptor:
    """Hooks one module. `query` names the token whose input is the query, `replace` the tokens that take the value.

    With `encode` the query is what that gives, of no token.
    """

    def __init__(self, module: nn.Module, query: QueryToken, replace: Replaced, encode: Encode | None = None) -> None:
        self.query, self.replace, self._encode = query, replace, encode
        self._session: Session | None = None
        self._handle = module.register_forward_hook(self._hook, with_kwargs=True)

    def remove(self) -> None:
        """Unwrap the module."""
        self._handle.remove()

    @contextmanager
    def serving(
        self,
        batch: Batch,
        codebook: CodebookLookup,
        *,
        asked: Asked,
        measured: bool = False,
    ) -> Iterator[Session]:
        """Put the value of the entry that serves a row in place, where one does.

        `asked` tells the wording of a row that lies within the radius of an entry.
        """
        session = Session(batch, measured=measured)

        def lookup(queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
            session.matches = codebook.matches(queries_BD, asked)
            return codebook.values(session.hits)

        session.lookup = lookup
        with self._open(session):
            yield session

    @contextmanager
    def predicting(self, batch: Batch, lookup: Lookup) -> Iterator[Session]:
        """Put in place what `lookup` makes of the queries, where it says so."""
        with self._open(Session(batch, lookup=lookup)) as session:
            yield session

    @contextmanager
    def substituting(self, batch: Batch, values_BV: Tensor) -> Iterator[Session]:
        """Put these values in place in every row, without a lookup: for training a value and for checking one."""
        with self._open(Session(batch, values_BV=values_BV)) as session:
            yield session

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[Session]:
        """See what the module sees and puts out, and change nothing."""
        with self._open(Session(batch, measured=True)) as session:
            yield session

    @contextmanager
    def observing(self, batch: Batch) -> Iterator[Session]:
        """Take the queries and end the forward pass at the wrapped module; nothing after it runs."""
        with self._open(Session(batch, stop=True)) as session:
            try:
                yield session
            except Observed:
                return

    @contextmanager
    def _open(self, session: Session) -> Iterator[Session]:
        if self._session is not None:
            raise RuntimeError("the adaptor is in use: one batch at a time")
        self._session = session
        try:
            yield session
        finally:
            self._session = None

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        session = self._session
        if session is None:
            return None
        tokens = _hidden(args[0] if args else next(iter(kwargs.values())), module)
        hidden = _hidden(output[0] if isinstance(output, tuple) else output, module)
        first = session.tokens_T == 0
        if first:
            self._decide(session, tokens, hidden)
        elif tokens.shape[1] <= session.tokens_T:
            return None
        if session.values_BV is None or session.replaced_B is None:
            return None
        prompt_BT = session.replaced_BT
        where_BT = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        where_BT[:, : prompt_BT.shape[1]] = prompt_BT & session.replaced_B[:, None]
        edited = torch.where(where_BT[..., None], session.values_BV[:, None, :].to(hidden.dtype), hidden)
        return (edited, *output[1:]) if isinstance(output, tuple) else edited

    def _decide(self, session: Session, tokens: Tensor, hidden: Tensor) -> None:
        session.tokens_T = tokens.shape[1]
        mask_BT = self._mask(session, tokens)
        if mask_BT.shape[1] > min(tokens.shape[1], hidden.shape[1]):
            raise LayerError("it runs for some of a prompt's tokens only, as a language model's head does")
        if session.lookup is not None or session.stop:
            session.queries_BD = self._queries(session.batch, tokens, mask_BT)
        if session.stop:
            raise Observed
        session.replaced_BT = self._replaced_tokens(mask_BT)
        if session.measured:
            session.outputs_BV = _pick(hidden, session.replaced_BT, "mean").float()
        if session.lookup is not None:
            found = session.lookup(session.queries_BD.detach())
            if found is not None:
                session.replaced_B, session.values_BV = (part.to(hidden.device) for part in found)
        elif session.values_BV is not None:
            session.replaced_B = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)

    def _queries(self, batch: Batch, tokens: Tensor, mask_BT: Tensor) -> Tensor:
        return _pick(tokens, mask_BT, self.query).float() if self._encode is None else self._encode(batch)

    def _mask(self, session: Session, tokens: Tensor) -> Tensor:
        if session.batch.mask_BT is None:
            return torch.ones(tokens.shape[0], 1, dtype=torch.bool, device=tokens.device)
        return session.batch.mask_BT.bool()

    def _replaced_tokens(self, mask_BT: Tensor) -> Tensor:
        if self.replace == "all":
            return mask_BT
        last_BT = torch.zeros_like(mask_BT)
        last_BT[torch.arange(len(mask_BT), device=mask_BT.device), last_token(mask_BT)] = True
        return last_BT


def last_token(mask_BT: Tensor) -> Tensor:
    """The position of each row's last real token, wherever the padding is."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (mask_BT.long() * positions_T).argmax(dim=1)


def _pick(hidden_BTX: Tensor, mask_BT: Tensor, token: QueryToken) -> Tensor:
    hidden_BTX = hidden_BTX[:, : mask_BT.shape[1]]
    rows_B = torch.arange(len(hidden_BTX), device=hidden_BTX.device)
    if token == "last":
        return hidden_BTX[rows_B, last_token(mask_BT)]
    if token == "first":
        return hidden_BTX[rows_B, mask_BT.long().argmax(dim=1)]
    weights_BT1 = mask_BT[..., None].float()
    return (hidden_BTX.float() * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1)


def _hidden(candidate: Any, module: nn.Module) -> Tensor:
    if not isinstance(candidate, Tensor) or candidate.dim() != 3:
        found = f"of shape {tuple(candidate.shape)}" if isinstance(candidate, Tensor) else type(candidate).__name__
        raise LayerError(
            f"{type(module).__name__} does not map (batch, tokens, width) to the like: its input or output is {found}"
        )
    return candidate
