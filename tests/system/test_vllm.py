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


@pytest.mark.parametrize(
    ("variables", "arguments", "sentence"),
    [
        (
            {"layer": "model.layers.23.mlp.gate_proj"},
            (),
            "which computes it as a part of gate_up_proj: set GRACESTREAM_LAYER",
        ),
        ({}, ("--dtype", "bfloat16"), "vLLM runs the model in bfloat16, and GRACESTREAM_DTYPE is float32"),
        ({"model": "intent"}, (), "vLLM serves the model"),
        ({"query_source": "last"}, (), "set GRACESTREAM_QUERY_SOURCE=encoder"),
    ],
)
def test_what_vllm_cannot_serve_is_one_sentence_at_the_start(
    tmp_path: Path,
    variables: dict[str, str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    checkpoint = ensure_model_built("smollm2", load_settings().model.cache_dir, print)
    server = VllmServer(load_settings(**{"model": "smollm2", **variables}), checkpoint, tmp_path, *arguments)
    server.start()
    try:
        assert server.process.wait(300) == 1
    finally:
        server.kill()
    text = server.log.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("gracestream: "))
    assert sentence in line
    assert "Traceback" not in text
