"""What gracestream supports of vLLM, checked before a model is loaded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from packaging.version import Version

from gracestream.pipeline.errors import UserError

SUPPORTED = ((0, 32), (0, 33))
"""The first supported version, and the first one after it that has not been tested."""

OTHER_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "as a part of qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "as a part of gate_up_proj"),
    "query_key_value": "in another order",
}
"""How vLLM computes layers that it does not have as the editor's model has them, in most families."""

LAYER_REMEDY = (
    "set GRACESTREAM_LAYER to an o_proj or a down_proj, for editor and replicas of a new codebook, or serve with"
    " `gracestream infer --engine continuous`"
)
"""What to do about a layer that vLLM does not have as the editor's model has it."""

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable that chooses its model runner."""


def require_supported_version() -> None:
    """Check vLLM's version.

    Raises:
        UserError: gracestream was not tested with it.
    """
    if not SUPPORTED[0] <= Version(vllm.__version__).release[:2] < SUPPORTED[1]:
        raise UserError(
            f"vLLM {vllm.__version__} is installed, and gracestream supports vLLM 0.32: pip install 'vllm>=0.32,<0.33'"
        )


@contextmanager
def explain_import_errors() -> Iterator[None]:
    """Report an import in the context that fails, such as that of an internal of vLLM, with the remedy.

    Raises:
        UserError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"vLLM {vllm.__version__} cannot serve corrections ({error}): install vLLM and gracestream as"
            " docs/how-to/vllm.md says"
        ) from error


def use_supported_runner() -> None:
    """Choose the model runner that takes values.

    Raises:
        UserError: the environment asks for the other one.
    """
    if os.environ.get(RUNNER_VARIABLE, "0").lower() not in ("0", "false"):
        raise UserError(f"{RUNNER_VARIABLE} is set, but corrections need vLLM's first model runner: unset it")
    os.environ[RUNNER_VARIABLE] = "0"


def config_fault(config: Any, dtype: str, layer: str) -> str | None:
    """Why vLLM cannot serve corrections under a configuration, with the remedy; None if it can.

    Args:
        config: A `VllmConfig`.
        dtype: The dtype of the editor's model, as `GRACESTREAM_DTYPE` has it.
        layer: Path of the edited layer.
    """
    model = config.model_config
    name = layer.rpartition(".")[2]
    if model.runner_type != "generate":
        return f"vLLM runs {model.model!r} as a {model.runner_type} model; corrections need one that generates text"
    if name in OTHER_LAYERS:
        return f"layer {layer!r} cannot be edited in vLLM, which computes it {OTHER_LAYERS[name]}: {LAYER_REMEDY}"
    if model.quantization is not None:
        return (
            f"the model is quantised ({model.quantization}), and values are trained on the unquantised one: serve it"
            " without quantisation"
        )
    if model.dtype != getattr(torch, dtype):
        return (
            f"vLLM runs the model in {str(model.dtype).removeprefix('torch.')}, and GRACESTREAM_DTYPE is {dtype}: set"
            f" --dtype or GRACESTREAM_DTYPE, so that they agree with the editor's"
        )
    wrong = {
        "--revision": model.revision,
        "--tokenizer": model.tokenizer != model.model,
        "--hf-overrides": model.hf_overrides,
        "--load-format dummy": config.load_config.load_format == "dummy",
        "--enable-dbo or --ubatch-size": config.parallel_config.use_ubatching,
        "--pipeline-parallel-size": config.parallel_config.pipeline_parallel_size > 1,
        "--kv-sharing-fast-prefill": config.cache_config.kv_sharing_fast_prefill,
    }
    given = [name for name, is_given in wrong.items() if is_given]
    return f"corrections would be wrong with {', '.join(given)}: leave it out" if given else None
