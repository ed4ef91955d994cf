"""Keys and values of rows that begin and end at different times.

Shapes: R rows, H heads, T columns, W width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

MIN_FREE_COLUMNS = 64
"""Columns that are free after a buffer was compacted or has grown."""


class RowCache:
    """The keys and values of every active row, for decode steps of one token per row.

    The rows end in the same column, so that one step writes one column. Row r has the columns
    `[end - lengths[r], end)`; what lies before them is hidden by the mask:

        column     start             end
        row 0      . . . . a b c d e |
        row 1      . . a b c d e f g |
        row 2      a b c d e f g h i |

    1. A row joins at `end`. Rows before it move to the right if its prompt is longer than all of them.
    2. If a row leaves, the last row moves to its place.
    3. A buffer that is full is copied without unused columns, with room for more. It is freed once no row is left.

    Attributes:
        lengths: The number of tokens of each row.
        cache: The cache to pass to the model in a decode step.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.cache = DynamicCache()
        self._columns = _Columns()

    def append(self, prefilled: DynamicCache, lengths: Sequence[int]) -> None:
        """Add rows after a pass over their prompts, which were padded on the left."""
        width, columns = int(prefilled.get_seq_length()), self._columns
        num_rows = len(self.lengths) + len(lengths)
        if not self.lengths:
            self.cache.layers = [_BufferLayer(layer, columns) for layer in prefilled.layers]
            columns.start = columns.end = 0
        self._make_room(num_rows, width)
        for buffer, layer in zip(self.cache.layers, prefilled.layers, strict=True):
            buffer.write_rows(slice(len(self.lengths), num_rows), slice(columns.end - width, columns.end), layer)
        self.lengths += lengths
        self._update_columns()

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for buffer in self.cache.layers:
                buffer.copy_row(last, row)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self.cache.layers = []
        self._update_columns()

    def begin_step(self) -> None:
        """Make room for the next column."""
        self._make_room(len(self.lengths), self._columns.end - self._columns.start)

    def end_step(self) -> None:
        """Count the column that the model has written."""
        self._columns.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def mask_RT(self) -> Tensor:
        """The attention mask of the next step: each row's tokens and its new one."""
        columns_T = torch.arange(self._columns.start, self._columns.end + 1)
        starts_R = self._columns.end - torch.tensor(self.lengths)
        return (columns_T[None, :] >= starts_R[:, None]).long()

    def positions_R1(self) -> Tensor:
        """The position of each row's new token."""
        return torch.tensor(self.lengths)[:, None]

    def _make_room(self, num_rows: int, min_end: int) -> None:
        """Make room for a number of rows and for one more column, where the rows end at `min_end` or later."""
        columns, capacity = self._columns, self.cache.layers[0].capacity
        if num_rows <= capacity[0] and min_end <= columns.end < capacity[1]:
            return
        end = max(min_end, columns.end - columns.start)
        rows = capacity[0] if num_rows <= capacity[0] else num_rows + num_rows // 2
        grown = (rows, max(capacity[1], end + max(MIN_FREE_COLUMNS, end // 4)))
        for buffer in self.cache.layers:
            buffer.move(slice(columns.start, columns.end), end, grown)
        columns.start, columns.end = end - (columns.end - columns.start), end

    def _update_columns(self) -> None:
        self._columns.num_rows = len(self.lengths)
        self._columns.start = self._columns.end - max(self.lengths, default=0)


@dataclass(slots=True)
class _Columns:
    """The part of every buffer that is in use: `num_rows` rows of the columns `[start, end)`."""

    num_rows: int = 0
    start: int = 0
    end: int = 0


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one block. The model appends one column; it is kept once `RowCache.end_step` counts it.

    Attributes:
        capacity: Rows and columns of the buffers.
    """

    def __init__(self, like: DynamicLayer, columns: _Columns) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
        self._columns = columns
        self._buffers = tuple(states.new_empty(0, states.shape[1], 0, states.shape[3]) for states in _states(like))
        self.capacity = (0, 0)

    def write_rows(self, rows: slice, columns: slice, layer: DynamicLayer) -> None:
        """Copy the keys and values of a pass over prompts."""
        for buffer_RHTW, states_RHTW in zip(self._buffers, _states(layer), strict=True):
            buffer_RHTW[rows, :, columns] = states_RHTW

    def copy_row(self, source: int, target: int) -> None:
        """Copy one row over another."""
        columns = slice(self._columns.start, self._columns.end)
        for buffer_RHTW in self._buffers:
            buffer_RHTW[target, :, columns] = buffer_RHTW[source, :, columns]

    def move(self, columns: slice, end: int, capacity: tuple[int, int]) -> None:
        """Move the columns in use, so that they end at `end`, in buffers of a capacity."""
        used = slice(end - (columns.stop - columns.start), end)
        buffers = []
        for buffer_RHTW in self._buffers:
            # Zeros: what the mask hides must be finite, because the attention multiplies it by zero.
            moved_RHTW = buffer_RHTW.new_zeros(capacity[0], buffer_RHTW.shape[1], capacity[1], buffer_RHTW.shape[3])
            moved_RHTW[: self._columns.num_rows, :, used] = buffer_RHTW[: self._columns.num_rows, :, columns]
            buffers.append(moved_RHTW)
        self._buffers, self.capacity = tuple(buffers), capacity

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one new token per row; returns those of all tokens in use."""
        columns = self._columns
        keys, values = (buffer_RHTW[: columns.num_rows, :, : columns.end + 1] for buffer_RHTW in self._buffers)
        keys[:, :, columns.end :], values[:, :, columns.end :] = key_states, value_states
        return keys[:, :, columns.start :], values[:, :, columns.start :]

    def get_seq_length(self) -> int:
        """The number of columns in use."""
        return self._columns.end - self._columns.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of columns after the step, and the first of them."""
        return self.get_seq_length() + query_length, 0


def _states(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values (R, H, T, W) of a block."""
    return layer.keys, layer.values
