"""Workers as processes of their own, for the benchmarks that measure whole workers."""

import sys
from pathlib import Path
from typing import Literal

from gracestream.deploy.local.processes import Child
from gracestream.pipeline.settings import Settings, as_environment
from tests.bench.framework import ROOT


def worker(command: Literal["infer", "edit"], settings: Settings, folder: Path) -> Child:
    """A worker that is not started yet, under the settings that were made on purpose; its log is in the folder."""
    given = as_environment({name: getattr(settings, name) for name in settings.model_fields_set})
    argv = [sys.executable, "-m", "gracestream.workers.cli", command]
    return Child(command, argv, log=folder / f"{command}.log", env=given, cwd=ROOT)
