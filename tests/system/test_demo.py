"""The demo."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.running import own_environment

pytestmark = [pytest.mark.kafka, pytest.mark.model]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["smollm2", pytest.param("intent", marks=pytest.mark.slow)])
def test_all_claims_of_the_demo_hold(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    everything = ["--all"] if request.config.getoption("--chaos") else []
    command = [sys.executable, "-m", "gracestream.workers.cli", "demo", "--model", model, "--data", str(tmp_path)]
    done = subprocess.run(
        [*command, *everything],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1780,
        env=own_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 of 13 claims held" in done.stdout
