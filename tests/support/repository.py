"""Where the repository lies, and the data of experiments on a developer's machine."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DATA = Path(os.environ.get("GRACESTREAM_DATA") or ROOT.parent / "shared" / "data")
"""The experiments' data, which are not part of the project: where the variable says, or beside the repository."""
