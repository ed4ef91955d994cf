"""Commands forked from a server that has imported everything."""

import gc
import sys
from pathlib import Path

from tests.support.forked_commands import Command


def check_that_everything_is_imported() -> None:
    needed = {"torch", "transformers", "faust.tables.manager", "gracestream.workers.inference", "pytest"}
    assert needed <= sys.modules.keys()
    assert gc.get_freeze_count() > 0


def test_a_command_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    command = Command("version", ["--version"], tmp_path, sabotage=check_that_everything_is_imported)
    assert command.run() == 0, command.stderr()
    assert command.stdout().startswith("gracestream ")
