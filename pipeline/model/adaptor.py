"""The adaptor: it wraps one module, takes the query from its input and puts the value into its output (paper, 2.2).

With an encoder, a query is what that makes of the prompt's text instead; when and where a value is put stays the same.

Outside a session the module runs as it always did. A session belongs to one batch and one thread: it knows which
tokens are the prompt's, looks up once, at the first call, and in generation with a KV cache later calls pass through,
so no decode step ever queries. Where the whole sequence runs again (generation without a cache), the first decision is
applied again at the same tokens. The codebook is never written here, and no random number is drawn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gracestream.pipeline.codebook import Codebook, KeyIndex, on_host
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.layers import LayerError
from gracestream.pipeline.search import NO_SLOT
from gracestream.pipeline.wording import disagreement

QueryToken = Literal["last", "first", "mean"]
Replaced = Literal["last", "all"]

Encode = Callable[[Batch], Tensor]
"""Queries (B, D), float32, of a batch's prompts."""

Asked = Callable[[int], str]
"""The wording of a batch's row (`pipeline.wording`); empty where nothing is to be compared."""

Lookup = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Of queries (B, D): which rows take a value (B), and values (B, V) that count in those; None where no row does."""


UNCERTAIN = 1.4
"""Radii within which a prompt that names the same is a near miss: as far away lie most other requests of a subject."""

OUTSIDE = "it names the same, and lies a little outside the radius"

MOST_COMPARED = 16
"""Entries whose wordings are compared with that of one prompt, at most."""


class Observed(Exception):
    """Ends a forward pass at the wrapped module."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The entry within whose radius one row's query lies, or that has the same words: its key is `distance` away.

    It serves the row unless there is a `disagreement` of the wordings, which says why not.
    """

    slot: int
    entry_id: str
    distance: float
    radius: float
    disagreement: str = ""

    @property
    def by_words(self) -> bool:
        """Whether the query lies outside the radius, so that the words are the same."""
        return not self.distance < self.radius


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
        codebook: Codebook,
        index: KeyIndex,
        settle: Callable[[], None] = lambda: None,
        *,
        asked: Asked,
        measured: bool = False,
    ) -> Iterator[Session]:
        """Answer from the codebook, as `settle` leaves it just before the look-up, where an entry serves a row.

        `asked` tells the wording of a row that lies within the radius of an entry.
        """
        session = Session(batch, measured=measured)

        def lookup(queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
            settle()
            session.matches = matches(queries_BD, codebook, index, asked)
            return _values(session.hits, codebook)

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


def matches(queries_BD: Tensor, codebook: Codebook, index: KeyIndex, asked: Asked) -> list[Hit | None]:
    """For each query the entry that may serve it.

    If the radius of the nearest entry holds the query, the entries whose radius holds it are compared, nearest first.
    The first whose wording agrees serves. If none of the first `MOST_COMPARED` agrees, the nearest one with the same
    words serves. Else it is the nearest one, which the wording rules out, or one that the query lies a little outside
    of, which tells why. Entries from which the prompt is an exception are passed over.
    """
    found = index.covering(queries_BD)
    matched: list[Hit | None] = []
    for row, nearest in enumerate(zip(found.slots_B.tolist(), found.distances_B.tolist(), strict=True)):
        query_D, wording = queries_BD[row], cache(partial(asked, row))
        match = None
        if nearest[0] != NO_SLOT:
            match = _within(_holding(nearest, query_D, index), query_D, codebook, wording)
        if serving(match) is None:
            known = index.in_same_words(query_D, wording)
            match = match if known is None else _hit(codebook, *known)
        matched.append(match or _outside(codebook, index.about_same(query_D, wording)))
    return matched


def _holding(nearest: tuple[int, float], query_D: Tensor, index: KeyIndex) -> Iterator[tuple[int, float]]:
    """The entries whose radius holds a query, nearest first; those beyond the nearest are looked up when asked for."""
    yield nearest
    yield from index.holding(query_D, MOST_COMPARED)[1:]


def _within(
    holding: Iterable[tuple[int, float]], query_D: Tensor, codebook: Codebook, asked: Callable[[], str]
) -> Hit | None:
    """Of these entries the first that serves a prompt, or else the first that misses it by its wording."""
    missed = None
    for slot, distance in holding:
        if codebook.exceptions.exempt(codebook.entry_ids[slot], lambda: on_host(query_D), asked):
            continue
        wording = codebook.wordings[slot]
        hit = _hit(codebook, slot, distance, disagreement(wording, asked()) if wording else "")
        if serving(hit):
            return hit
        missed = missed or hit
    return missed


def _outside(codebook: Codebook, known: tuple[int, float] | None) -> Hit | None:
    """The entry that names the same, if the query lies a little outside its radius."""
    if known is None:
        return None
    hit = _hit(codebook, *known, OUTSIDE)
    return hit if hit.radius <= hit.distance < UNCERTAIN * hit.radius else None


def _hit(codebook: Codebook, slot: int, distance: float, disagreement: str = "") -> Hit:
    return Hit(slot, codebook.entry_ids[slot], distance, float(codebook.radii_N[slot]), disagreement)


def serving(match: Hit | None) -> Hit | None:
    """The match, if its entry serves the row."""
    return None if match is None or match.disagreement else match


def _values(hits: Sequence[Hit | None], codebook: Codebook) -> tuple[Tensor, Tensor] | None:
    """The rows that are served (B), and their entries' values (B, V), zeros in the others; None where none is."""
    rows = [row for row, hit in enumerate(hits) if hit is not None]
    if not rows:
        return None
    values_BV = torch.zeros(len(hits), codebook.values_NV.shape[1])
    values_BV[rows] = torch.from_numpy(codebook.values_NV[[hit.slot for hit in hits if hit is not None]])
    return torch.tensor([hit is not None for hit in hits]), values_BV
