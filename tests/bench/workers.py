"""Workers in processes of their own, for benchmarks of whole workers."""

import sys
from pathlib import Path
from typing import Literal

from gracestream.deploy.local.processes import ChildProcess
from gracestream.pipeline.settings import Settings, to_environment_variables
from tests.support.repository import ROOT


def worker(command: Literal["infer", "edit"], settings: Settings, folder: Path) -> ChildProcess:
    """A worker process, not started yet, with all explicitly set settings. Its log is in the folder."""
    variables = to_environment_variables({"http_port": 0, **settings.explicit_values()})
    argv = [sys.executable, "-m", "gracestream.workers.cli", command]
    return ChildProcess(command, argv, log_file=folder / f"{command}.log", env=variables, cwd=ROOT)
