"""The tests in vLLM's own environment, and starts of its server that end with one sentence."""

import subprocess
from pathlib import Path

import pytest

from gracestream.pipeline.model.registry import ensure_model_built
from gracestream.pipeline.settings import load_settings
from tests.support.repository import ROOT
from tests.support.vllm_environment import vllm_python
from tests.support.vllm_server import VllmServer, vllm_variables

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]


@pytest.mark.slow
def test_the_tests_of_vllms_environment_pass() -> None:
    done = subprocess.run(
        [str(vllm_python()), "-m", "pytest", "tests/vllm_plugin", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=vllm_variables(),
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_a_server_that_cannot_serve_ends_with_one_sentence(tmp_path: Path) -> None:
    """tests/vllm_plugin/test_internals.py has the other reasons, without a process."""
    checkpoint = ensure_model_built("smollm2", load_settings().model.cache_dir, print)
    settings = load_settings(model="smollm2", layer="model.layers.23.mlp.gate_proj")
    server = VllmServer(settings, checkpoint, tmp_path)
    server.start()
    try:
        assert server.process.wait(300) == 1
    finally:
        server.kill()
    text = server.log.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("gracestream: "))
    assert "which computes it as a part of gate_up_proj: set GRACESTREAM_LAYER" in line
    assert "Traceback" not in text
