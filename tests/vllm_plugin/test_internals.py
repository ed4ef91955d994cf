"""The internals of vLLM that the plugin relies on, and what it refuses to serve."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import nn

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.registry import ensure_model_built
from gracestream.pipeline.settings import load_settings

pytest.importorskip("vllm", reason="tests/system/test_vllm.py runs these tests in vLLM's own environment")

import vllm
import vllm.envs
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_endpoint_plugins, load_plugins_by_group
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from gracestream.pipeline.vllm import support
from gracestream.pipeline.vllm.injection import choose_layer, wrap_layer
from gracestream.pipeline.vllm.values import carried_value, carry_value, edited_salt
from gracestream.workers.inference import engine_factory
from gracestream.workers.vllm import ServerPlugin, _create_config, register
from tests.support.repository import ROOT

LAYER = "model.layers.23.self_attn.o_proj"


def test_the_methods_that_are_wrapped_take_what_is_passed_on() -> None:
    prepare = inspect.signature(GPUModelRunner._prepare_inputs)
    assert list(prepare.parameters) == ["self", "scheduler_output", "num_scheduled_tokens"]
    assert "force_eager" in inspect.signature(GPUModelRunner._determine_batch_execution_and_padding).parameters
    assert all("load_model" in runner.__dict__ for runner in (GPUModelRunner, CPUModelRunner))
    assert "_prepare_inputs" not in CPUModelRunner.__dict__
    assert list(inspect.signature(AsyncLLM.generate).parameters)[:4] == [
        "self", "prompt", "sampling_params", "request_id",
    ]  # fmt: skip


def test_the_fields_that_are_read_exist() -> None:
    assert {"req_id", "sampling_params"} <= set(NewRequestData.__dataclass_fields__)
    assert "scheduled_new_reqs" in SchedulerOutput.__dataclass_fields__
    assert "prompt_token_ids" in CachedRequestState.__dataclass_fields__
    source = inspect.getsource(InputBatch)
    assert all(f"self.{name}" in source for name in ("req_id_to_index", "num_computed_tokens_cpu"))
    assert "num_prompt_tokens" in inspect.getsource(CachedRequestState)
    assert "self.requests" in inspect.getsource(GPUModelRunner)


def test_vllms_server_loads_both_plugins_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "VLLM_PLUGINS", ["gracestream"], raising=False)
    assert load_plugins_by_group("vllm.general_plugins") == {"gracestream": register}
    (plugin,) = load_endpoint_plugins(("generate",))
    assert type(plugin) is ServerPlugin
    monkeypatch.setattr(vllm.envs, "VLLM_PLUGINS", ["another"], raising=False)
    assert load_endpoint_plugins(("generate",)) == []


def test_a_client_cannot_bring_a_value() -> None:
    """`vllm_xargs` of the HTTP API hold texts and numbers."""
    brought = SamplingParams(extra_args={"gracestream": "AAAA", "other": 1})
    assert carried_value(brought) is None
    assert carry_value(brought, None).extra_args == {"other": 1}
    assert carried_value(carry_value(brought, b"1234")) == b"1234"
    assert brought.extra_args == {"gracestream": "AAAA", "other": 1}


def test_the_salt_tells_values_lengths_and_clients_apart() -> None:
    salts = {
        edited_salt(num_tokens, value, salt) for num_tokens in (2, 3) for value in (b"a", b"b") for salt in (None, "x")
    }
    assert len(salts) == 8


@pytest.mark.parametrize(
    ("arguments", "dtype", "layer", "fault"),
    [
        ({}, "float32", LAYER, None),
        ({}, "float32", "model.layers.23.self_attn.q_proj", "which computes it as a part of qkv_proj: set GRACESTREAM"),
        ({"dtype": "bfloat16"}, "float32", LAYER, "set --dtype or GRACESTREAM_DTYPE"),
        ({"dtype": "bfloat16"}, "bfloat16", LAYER, None),
        ({"dtype": "bfloat16", "quantization": "fp8"}, "bfloat16", LAYER, "the model is quantised (fp8"),
        ({"hf_overrides": {"rope_theta": 5.0}}, "float32", LAYER, "would be wrong with --hf-overrides: leave it out"),
        ({"load_format": "dummy"}, "float32", LAYER, "would be wrong with --load-format dummy: leave it out"),
        ({"runner": "pooling"}, "float32", LAYER, "corrections need one that generates text"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: dict[str, Any], dtype: str, layer: str, fault: str | None) -> None:
    folder = ensure_model_built("smollm2", load_settings().model.cache_dir, print)
    given = {"dtype": "float32", "max_model_len": 512, **arguments}
    found = support.config_fault(EngineArgs(model=str(folder), **given).create_engine_config(), dtype, layer)
    assert (fault in found) if fault and found else found == fault


@pytest.mark.parametrize(
    ("variables", "dtype", "sentence"),
    [
        ({"MODEL": "smollm2"}, "bfloat16", "vLLM runs the model in bfloat16, and GRACESTREAM_DTYPE is float32"),
        ({"MODEL": "intent"}, "float32", "vLLM serves the model"),
        ({"MODEL": "smollm2", "QUERY_SOURCE": "last"}, "float32", "set GRACESTREAM_QUERY_SOURCE=encoder"),
    ],
)
def test_a_configuration_that_cannot_be_served_ends_the_process_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], dtype: Any, sentence: str
) -> None:
    folder = ensure_model_built("smollm2", load_settings().model.cache_dir, print)
    for name, value in variables.items():
        monkeypatch.setenv(f"GRACESTREAM_{name}", value)
    arguments = EngineArgs(model=str(folder), dtype=dtype, max_model_len=512)
    with pytest.raises(SystemExit, match=sentence):
        _create_config(arguments.create_engine_config)


def test_the_documentation_names_every_layer_that_cannot_be_edited() -> None:
    page = (ROOT / "docs" / "how-to" / "vllm.md").read_text(encoding="utf-8")
    assert [name for name in support.OTHER_LAYERS if f"`{name}`" not in page] == []


def test_compiled_models_are_cached_by_layer() -> None:
    folder = ensure_model_built("smollm2", load_settings().model.cache_dir, print)
    config = EngineArgs(model=str(folder), dtype="float32", max_model_len=512).create_engine_config()
    hashes = [config.compute_hash()]
    for layer in (LAYER, "model.layers.7.mlp.down_proj"):
        choose_layer(config, "float32", layer)
        hashes.append(config.compute_hash())
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("model.layers.0.mlp.up_proj", "vLLM fuses up_proj into gate_up_proj"),
        ("model.layers.9.mlp.down_proj", "vLLM's Model has no such layer"),
        ("model.layers.0.norm", "it is no linear layer"),
    ],
)
def test_a_layer_that_the_loaded_model_lacks_is_refused(path: str, reason: str) -> None:
    class Model(nn.Module):
        packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList([nn.Module()])
            self.model.layers[0].norm = nn.LayerNorm(2)

    with pytest.raises(UserError, match=reason):
        wrap_layer(Model(), path)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    support.require_supported_version()
    for version in ("0.31.1", "0.33.0", "1.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(UserError, match="gracestream supports vLLM"):
            support.require_supported_version()


UNSUPPORTED = """
import sys
import vllm
{change}
from vllm.plugins import {load}
{load}({arguments})
print("vLLM serves on, without corrections")
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("vllm.__version__ = '0.33.0'", "vLLM 0.33.0 is installed, and gracestream supports vLLM 0.32"),
        ("sys.modules['vllm.exceptions'] = None", "cannot serve corrections (import of vllm.exceptions"),
    ],
    ids=["version", "internal"],
)
@pytest.mark.parametrize(
    ("load", "arguments"),
    [("load_general_plugins", ""), ("load_endpoint_plugins", "('generate',)")],
    ids=["general", "endpoint"],
)
def test_an_unsupported_vllm_ends_with_one_sentence(load: str, arguments: str, change: str, sentence: str) -> None:
    """vLLM would log an error of a plugin's import, and serve without corrections."""
    program = UNSUPPORTED.format(change=change, load=load, arguments=arguments)
    environment = os.environ | {"VLLM_PLUGINS": "gracestream"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gracestream: vLLM ")
    assert sentence in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda patch: patch.setattr(vllm, "__version__", "0.33.0"), "vLLM 0.33.0 is installed"),
        (
            lambda patch: patch.setitem(sys.modules, "gracestream.pipeline.vllm.engine", None),
            "cannot serve corrections (import of gracestream.pipeline.vllm.engine",
        ),
    ],
    ids=["version", "internal"],
)
def test_a_replica_names_an_unsupported_vllm(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], error: str
) -> None:
    change(monkeypatch)
    model: Any = None  # is not reached
    with pytest.raises(UserError, match=re.escape(error)):
        engine_factory(model, load_settings(engine="vllm"))


def test_the_second_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.RUNNER_VARIABLE, "1")
    with pytest.raises(UserError, match="unset it"):
        support.use_supported_runner()
