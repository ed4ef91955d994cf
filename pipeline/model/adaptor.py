"""The adaptor: wraps one module, reads the query from its input and writes values into its output (GRACE, section 2.2).

With a sentence encoder, the query is the encoder's embedding of the prompt's text. Where and when a value is injected
does not change.

1. Outside a pass (`AdaptorPass`) the module runs unchanged. A pass belongs to one batch and one thread.
2. The lookup runs once per pass, at the module's first call. No decode step of generation looks anything up.
3. Generation with a KV cache: later calls see new tokens only and pass through unchanged.
4. Generation without a KV cache: each call sees the whole sequence, so the values are injected again at the same
   tokens.
5. The adaptor writes to no codebook and draws no random number.

Shapes: B rows, T tokens, D width of a query, V width of a value, X any width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gracestream.pipeline.codebook import CodebookLookup, FoundEntry, WordingGetter, if_serving
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.layers import LayerError

QueryToken = Literal["last", "first", "mean"]
"""The token whose input to the wrapped module is the query; `mean` averages over the prompt's tokens."""

ReplacedTokens = Literal["last", "all"]
"""The prompt's tokens whose output the value replaces."""

QueryEncoder = Callable[[Batch], Tensor]
"""Maps a batch to its queries (B, D), float32."""

ValueLookup = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Maps queries (B, D) to a mask (B) and values (B, V); values are used where the mask is set. None: no row matched."""


class StopForward(Exception):
    """Ends a forward pass at the wrapped module."""


@dataclass(slots=True)
class AdaptorPass:
    """The input, state and result of the adaptor for one batch. Rows are those of the batch.

    Attributes:
        batch: The arguments of the model.
        lookup: Looks values up by query; None in a pass without lookup.
        values_BV: The values to inject, given or looked up.
        stop_after_query: Ends the forward pass at the wrapped module once the queries are known.
        queries_BD: Float32 queries, set at the first call if the pass has a lookup or records queries.
        record_output: Turns the recording of `outputs_BV` on.
        outputs_BV: The module's own output, float32: the mean over the tokens that a value would replace.
        found_entries: For each row the entry that may serve it, or None; only set by a lookup in a codebook.
        inject_mask_BT: The prompt's tokens that a value replaces, in a row with a value.
        inject_mask_B: The rows with a value.
        num_tokens: Tokens of the module's first call; 0 before it.
    """

    batch: Batch
    lookup: ValueLookup | None = None
    values_BV: Tensor | None = None
    stop_after_query: bool = False
    queries_BD: Tensor = field(default_factory=lambda: torch.empty(0))
    record_output: bool = False
    outputs_BV: Tensor = field(default_factory=lambda: torch.empty(0))
    found_entries: list[FoundEntry | None] = field(default_factory=list)
    inject_mask_BT: Tensor = field(default_factory=lambda: torch.empty(0))
    inject_mask_B: Tensor | None = None
    num_tokens: int = 0

    @property
    def serving_entries(self) -> list[FoundEntry | None]:
        """For each row the entry that serves it, or None."""
        return [if_serving(found) for found in self.found_entries]


class Adaptor:
    """Hooks one module to read queries and inject values.

    Attributes:
        query: The token whose input is the query.
        replace: The tokens that take the value.
    """

    def __init__(
        self, module: nn.Module, query: QueryToken, replace: ReplacedTokens, query_encoder: QueryEncoder | None = None
    ) -> None:
        self.query, self.replace, self._query_encoder = query, replace, query_encoder
        self._active_pass: AdaptorPass | None = None
        self._handle = module.register_forward_hook(self._hook, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    @contextmanager
    def with_codebook(
        self,
        batch: Batch,
        codebook_lookup: CodebookLookup,
        *,
        row_wording: WordingGetter,
        record_output: bool = False,
    ) -> Iterator[AdaptorPass]:
        """A pass that injects the values of the entries that serve the rows.

        Args:
            batch: The arguments of the model.
            codebook_lookup: Finds entries by query.
            row_wording: Returns the wording of a row; called only for rows that may match.
            record_output: Records the module's own output as well.
        """
        adaptor_pass = AdaptorPass(batch, record_output=record_output)

        def lookup(queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
            adaptor_pass.found_entries = codebook_lookup.find_entries(queries_BD, row_wording)
            return codebook_lookup.gather_values(adaptor_pass.serving_entries)

        adaptor_pass.lookup = lookup
        with self._activate(adaptor_pass):
            yield adaptor_pass

    @contextmanager
    def with_lookup(self, batch: Batch, lookup: ValueLookup) -> Iterator[AdaptorPass]:
        """A pass that injects the values returned by `lookup`."""
        with self._activate(AdaptorPass(batch, lookup=lookup)) as adaptor_pass:
            yield adaptor_pass

    @contextmanager
    def inject(self, batch: Batch, values_BV: Tensor) -> Iterator[AdaptorPass]:
        """A pass that injects these values in every row, without a lookup, to train or check them."""
        with self._activate(AdaptorPass(batch, values_BV=values_BV)) as adaptor_pass:
            yield adaptor_pass

    @contextmanager
    def record_output(self, batch: Batch) -> Iterator[AdaptorPass]:
        """A pass that records the module's own output and changes nothing."""
        with self._activate(AdaptorPass(batch, record_output=True)) as adaptor_pass:
            yield adaptor_pass

    @contextmanager
    def record_query(self, batch: Batch) -> Iterator[AdaptorPass]:
        """A pass that records the queries and ends the forward pass at the wrapped module."""
        with self._activate(AdaptorPass(batch, stop_after_query=True)) as adaptor_pass:
            try:
                yield adaptor_pass
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
        """The module's forward hook: returns the edited output, or None to keep the module's own."""
        adaptor_pass = self._active_pass
        if adaptor_pass is None:
            return None
        # A model may pass its arguments by keyword; the first one is then taken as the hidden states.
        input_BTX = _require_hidden_states(args[0] if args else next(iter(kwargs.values())), module)
        output_BTX = _require_hidden_states(output[0] if isinstance(output, tuple) else output, module)
        is_first_call = adaptor_pass.num_tokens == 0
        if is_first_call:
            self._run_first_call(adaptor_pass, input_BTX, output_BTX)
        elif input_BTX.shape[1] <= adaptor_pass.num_tokens:
            return None  # a decode step with a KV cache; without one the sequence grows with every call
        if adaptor_pass.values_BV is None or adaptor_pass.inject_mask_B is None:
            return None
        token_mask_BT = adaptor_pass.inject_mask_BT
        # The sequence may have grown since the first call, whose tokens come first.
        inject_BT = torch.zeros(output_BTX.shape[:2], dtype=torch.bool, device=output_BTX.device)
        inject_BT[:, : token_mask_BT.shape[1]] = token_mask_BT & adaptor_pass.inject_mask_B[:, None]
        edited_BTX = torch.where(
            inject_BT[..., None], adaptor_pass.values_BV[:, None, :].to(output_BTX.dtype), output_BTX
        )
        return (edited_BTX, *output[1:]) if isinstance(output, tuple) else edited_BTX

    def _run_first_call(self, adaptor_pass: AdaptorPass, input_BTX: Tensor, output_BTX: Tensor) -> None:
        """Compute the queries, look values up, and set the tokens that take them.

        Raises:
            LayerError: the module runs for some of the prompt's tokens only.
            StopForward: the pass records the query only.
        """
        adaptor_pass.num_tokens = input_BTX.shape[1]
        mask_BT = self._prompt_mask(adaptor_pass, input_BTX)
        if mask_BT.shape[1] > min(input_BTX.shape[1], output_BTX.shape[1]):
            raise LayerError("it runs for some of a prompt's tokens only, as an LM head does")
        if adaptor_pass.lookup is not None or adaptor_pass.stop_after_query:
            adaptor_pass.queries_BD = self._queries(adaptor_pass.batch, input_BTX, mask_BT)
        if adaptor_pass.stop_after_query:
            raise StopForward
        adaptor_pass.inject_mask_BT = self._inject_mask(mask_BT)
        if adaptor_pass.record_output:
            adaptor_pass.outputs_BV = _pool_tokens(output_BTX, adaptor_pass.inject_mask_BT, "mean").float()
        if adaptor_pass.lookup is not None:
            found_values = adaptor_pass.lookup(adaptor_pass.queries_BD.detach())
            if found_values is not None:
                adaptor_pass.inject_mask_B, adaptor_pass.values_BV = (
                    part.to(output_BTX.device) for part in found_values
                )
        elif adaptor_pass.values_BV is not None:
            adaptor_pass.inject_mask_B = torch.ones(len(output_BTX), dtype=torch.bool, device=output_BTX.device)

    def _queries(self, batch: Batch, input_BTX: Tensor, mask_BT: Tensor) -> Tensor:
        return (
            _pool_tokens(input_BTX, mask_BT, self.query).float()
            if self._query_encoder is None
            else self._query_encoder(batch)
        )

    def _prompt_mask(self, adaptor_pass: AdaptorPass, input_BTX: Tensor) -> Tensor:
        if adaptor_pass.batch.mask_BT is None:  # in a decoder: its first token, before any generated one
            return torch.ones(input_BTX.shape[0], 1, dtype=torch.bool, device=input_BTX.device)
        return adaptor_pass.batch.mask_BT.bool()

    def _inject_mask(self, mask_BT: Tensor) -> Tensor:
        if self.replace == "all":
            return mask_BT
        last_BT = torch.zeros_like(mask_BT)
        last_BT[torch.arange(len(mask_BT), device=mask_BT.device), last_token_positions(mask_BT)] = True
        return last_BT


def last_token_positions(mask_BT: Tensor) -> Tensor:
    """The position (B) of each row's last unpadded token, for padding on either side."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    # The mask turns the positions of padding into 0, so the largest position is that of the last token.
    return (mask_BT.long() * positions_T).argmax(dim=1)


def _pool_tokens(hidden_BTX: Tensor, mask_BT: Tensor, token: QueryToken) -> Tensor:
    """One vector per row, (B, X): the hidden states of a token, or their mean over the tokens in the mask."""
    hidden_BTX = hidden_BTX[:, : mask_BT.shape[1]]
    rows_B = torch.arange(len(hidden_BTX), device=hidden_BTX.device)
    if token == "last":
        return hidden_BTX[rows_B, last_token_positions(mask_BT)]
    if token == "first":
        return hidden_BTX[rows_B, mask_BT.long().argmax(dim=1)]
    weights_BT1 = mask_BT[..., None].float()
    return (hidden_BTX.float() * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1)


def _require_hidden_states(candidate: Any, module: nn.Module) -> Tensor:
    """A module's input or output as hidden states (B, T, X).

    Raises:
        LayerError: it is not a tensor of three dimensions.
    """
    if not isinstance(candidate, Tensor) or candidate.dim() != 3:
        description = (
            f"of shape {tuple(candidate.shape)}" if isinstance(candidate, Tensor) else type(candidate).__name__
        )
        raise LayerError(
            f"{type(module).__name__} does not map (batch, tokens, width) to the same layout: its input or output is"
            f" {description}"
        )
    return candidate
