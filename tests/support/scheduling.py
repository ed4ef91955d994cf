"""The order of the tests, and the pieces of work that `pytest -n --dist loadfile` hands out.

Two kinds of tests share a run: some start processes and mostly wait, the others compute. So:

1. A file is one piece of work: its tests share their fixtures and keep their order.
2. Each test of `LONG_FILES` is a piece of work, since one of these files would take longer than all others.
3. The pieces of both kinds alternate evenly, so that at any time some tests wait while others compute.
"""

from typing import Any

import pytest

WAITING = tuple(f"tests/{name}/" for name in ("chaos", "contract", "gpu", "integration", "system"))
"""Folders of tests that start processes or servers."""

LONG_FILES = (
    "tests/system/test_demo.py",
    "tests/system/test_vllm.py",
    "tests/chaos/test_chaos.py",
    "tests/chaos/test_network.py",
    "tests/gpu/test_gpu_command.py",
    "tests/system/test_dead_letters.py",
    "tests/system/test_editor_log.py",
    "tests/system/test_exceptions.py",
    "tests/system/test_experiment.py",
    "tests/system/test_memory.py",
    "tests/system/test_poison.py",
    "tests/system/test_shutdown.py",
    "tests/system/test_untrusted_redis.py",
)
"""Files of long tests without expensive shared fixtures. They begin first, in this order."""

LONG_STORIES = (
    "tests/system/test_vllm_server.py",
    "tests/system/test_up.py",
    "tests/system/test_models.py",
    "tests/system/test_acls.py",
    "tests/system/test_pipeline.py",
    "tests/system/test_cli.py",
    "tests/system/test_history.py",
    "tests/system/test_security.py",
    "tests/system/test_history_faults.py",
    "tests/contract/test_editor_log.py",
)
"""Files whose tests share an expensive fixture and take long together. They begin before all others."""


def piece_of(nodeid: str) -> str:
    """The piece of work that a test belongs to."""
    file = nodeid.split("::", maxsplit=1)[0]
    return nodeid if file in LONG_FILES else file


def arrange(items: list[pytest.Item]) -> None:
    """Sort the pieces of work; the order within each piece is kept."""
    pieces: dict[str, list[pytest.Item]] = {}
    for item in items:
        pieces.setdefault(piece_of(item.nodeid), []).append(item)
    waiting = [piece for piece in pieces.values() if piece[0].nodeid.startswith(WAITING)]
    waiting.sort(key=_rank_of_long_file)
    computing = [piece for piece in pieces.values() if not piece[0].nodeid.startswith(WAITING)]
    placed = [((number + 0.5) / len(kind), piece) for kind in (waiting, computing) for number, piece in enumerate(kind)]
    items[:] = [item for _, piece in sorted(placed, key=lambda one: one[0]) for item in piece]


def _rank_of_long_file(piece: list[pytest.Item]) -> int:
    """The index of the piece's file among the long ones; other files come after them."""
    file, order = piece[0].nodeid.split("::", maxsplit=1)[0], (*LONG_STORIES, *LONG_FILES)
    return order.index(file) if file in order else len(order)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler that hands out pieces of work for `--dist loadfile`; None for another distribution."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - a run without xdist needs none

    made = LoadFileScheduling(config, log)
    made._split_scope = piece_of
    return made
