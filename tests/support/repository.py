"""The folders of the repository and of the experiments' data."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DATA = Path(os.environ.get("GRACESTREAM_DATA") or ROOT.parent / "shared" / "data")
"""The experiments' data, which are not part of the project: named by the variable, or beside the repository."""
