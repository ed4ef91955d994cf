"""The cache of rows: after any joins, leaves and steps, each row's tokens stand where the mask shows them."""

from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from gracestream.pipeline.model.engines.row_cache import MIN_FREE_COLUMNS, RowCache

HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 5


def states(tokens_RT: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values that tell token, layer, head and place; keys and values have different widths."""
    base = tokens_RT[:, None, :, None] * 100.0 + layer * 10
    head = torch.arange(HEADS)[None, :, None, None]
    return base + head + torch.arange(KEY_WIDTH) / 10, -(base + head + torch.arange(VALUE_WIDTH) / 10)


@dataclass
class Rows:
    """The cache, and beside it the plain list of each row's tokens."""

    cache: RowCache = field(default_factory=RowCache)
    expected: list[list[int]] = field(default_factory=list)
    counter: int = 0

    def join(self, lengths: list[int]) -> None:
        rows = [[self.next() for _ in range(length)] for length in lengths]
        width = max(lengths)
        padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        prefilled = DynamicCache()
        for layer in range(2):
            prefilled.update(*states(padded, layer), layer)
        self.cache.append(prefilled, lengths)
        self.expected += rows

    def leave(self, row: int) -> None:
        self.cache.remove(row)
        self.expected[row] = self.expected[-1]
        self.expected.pop()

    def step(self, *, kept: bool = True) -> None:
        """A decode step; one that failed half way is not kept."""
        tokens = [self.next() for _ in self.expected]
        self.cache.begin_step()
        mask_RT, positions_R1 = self.cache.mask_RT(), self.cache.positions_R1()
        assert positions_R1[:, 0].tolist() == [len(row) for row in self.expected]
        assert mask_RT.shape == (len(self.expected), max(map(len, self.expected)) + 1), "no column is wasted"
        for layer in range(2 if kept else 1):
            given = states(torch.tensor(tokens)[:, None], layer)
            assert self.cache.cache.get_mask_sizes(1, layer) == (mask_RT.shape[1], 0)
            for all_RHTW, sign in zip(self.cache.cache.update(*given, layer), (1, -1), strict=True):
                for row, token in enumerate(tokens):
                    found_T = all_RHTW[row, 1, mask_RT[row].bool(), 0] * sign
                    assert found_T.tolist() == [100 * each + 10 * layer + 1 for each in [*self.expected[row], token]]
                assert torch.isfinite(all_RHTW).all()
        if kept:
            self.cache.end_step()
            self.expected = [[*row, token] for row, token in zip(self.expected, tokens, strict=True)]

    def next(self) -> int:
        self.counter += 1
        return self.counter


ACTIONS = st.lists(
    st.one_of(
        st.lists(st.integers(1, 150), min_size=1, max_size=3),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("steps"), st.integers(1, 100)),
        st.tuples(st.just("failed step"), st.just(1)),
    ),
    max_size=12,
)


@given(ACTIONS)
def test_each_rows_tokens_stand_where_the_mask_shows_them(actions: list[list[int] | tuple[str, int]]) -> None:
    rows = Rows()
    for action in actions:
        if isinstance(action, list):
            rows.join(action)
        elif rows.expected and action[0] == "leave":
            rows.leave(action[1] % len(rows.expected))
        elif rows.expected:
            for _ in range(action[1]):
                rows.step(kept=action[0] == "steps")
        assert len(rows.cache.lengths) == len(rows.expected)
        assert rows.cache.lengths == [len(row) for row in rows.expected]


def test_an_empty_cache_frees_its_memory_and_a_steady_one_does_not_grow() -> None:
    rows = Rows()
    rows.join([40])
    rows.join([1000])
    rows.leave(1)
    rows.leave(0)
    assert rows.cache.cache.layers == []
    rows.join([40])
    for _ in range(1000):  # a row leaves and another joins, for ever
        rows.step()
        if len(rows.expected[0]) == 50:
            rows.join([40])
            rows.leave(0)
    assert rows.cache.cache.layers[0].capacity[1] <= 51 + 2 * MIN_FREE_COLUMNS
