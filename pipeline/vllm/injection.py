"""Injects values into one layer of a model that vLLM runs. This is the part in vLLM's workers.

1. A request that an entry serves carries the entry's value in its sampling parameters (`values.carry_value`).
2. `install` changes vLLM's model runner: it wraps the layer after it has loaded the model (`InjectedLayer`).
3. Before a forward pass, `StepValues` finds the row of each value in the packed batch. A value belongs to the last
   token of its prompt. It is injected whenever that token is computed: in a chunk of the prompt, after cached tokens,
   and again after a preemption.
4. The wrapped layer calls an operator of its own, which `torch.compile` does not look into. It writes the values into
   the layer's output.
5. A step with values runs without CUDA graphs, because a graph would skip the operator. All other steps run as they
   do without gracestream.

Shapes: T tokens of a step, K values, V width of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.vllm.support import LAYER_REMEDY, config_fault
from gracestream.pipeline.vllm.values import carried_value, value_array

Method = Callable[..., Any]

CONFIG_KEY = "gracestream_layer"
"""The key of the edited layer's path in vLLM's additional configuration."""


@dataclass(slots=True)
class StepValues:
    """The values of active requests, and where they belong in the next forward pass.

    Attributes:
        values: The value (V), float32, of each request that has one, by vLLM's id of the request.
        rows_K: Rows of the packed batch that take a value in the next pass.
        values_KV: Their values.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    rows_K: list[int] = field(default_factory=list)
    values_KV: list[Tensor] = field(default_factory=list)

    def prepare(self, runner: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> None:
        """Find the rows for a step. Call it when the runner's batch has its final order."""
        self.take()
        for request in scheduler_output.scheduled_new_reqs:
            if (value := carried_value(request.sampling_params)) is not None:
                self.values[request.req_id] = torch.from_numpy(value_array(value))
        batch = runner.input_batch
        for request_id in list(self.values):
            if request_id not in runner.requests:
                del self.values[request_id]
                continue
            index = batch.req_id_to_index.get(request_id)
            if index is None:
                continue
            # Tokens of this request in the step, as a range of positions.
            start = int(batch.num_computed_tokens_cpu[index])
            last = runner.requests[request_id].num_prompt_tokens - 1
            if start <= last < start + int(num_scheduled_tokens[index]):
                self.rows_K.append(int(num_scheduled_tokens[:index].sum()) + last - start)
                self.values_KV.append(self.values[request_id])

    def take(self) -> tuple[list[int], list[Tensor]]:
        """Rows and values of the step. They are forgotten, so that no later pass injects them again."""
        taken = self.rows_K, self.values_KV
        self.rows_K, self.values_KV = [], []
        return taken


_step = StepValues()
"""The state of this process, which has one model runner."""

_library: Any = torch.library.Library("gracestream", "DEF")  # type: ignore[no-untyped-call]
_library.define("inject(Tensor(a!) output_TV) -> ()")


def _inject(output_TV: Tensor) -> None:
    rows_K, values_KV = _step.take()
    if rows_K:
        values = torch.stack(values_KV).to(output_TV.device, output_TV.dtype)
        rows = torch.tensor(rows_K, device=output_TV.device)
        output_TV.view(-1, output_TV.shape[-1]).index_copy_(0, rows, values)  # some models have (1, T, V)


_library.impl("inject", _inject, "CPU")
_library.impl("inject", _inject, "CUDA")
_library.impl("inject", lambda _output_TV: None, "Meta")


class InjectedLayer(nn.Module):
    """A linear layer whose output takes the step's values."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output (T, V), with values."""
        output = self.layer(*args, **kwargs)
        torch.ops.gracestream.inject(output[0] if isinstance(output, tuple) else output)
        return output


def wrap_layer(model: nn.Module, path: str) -> None:
    """Put an `InjectedLayer` around one layer of a loaded model.

    Raises:
        UserError: vLLM's model has no such layer, or no process has the layer's whole output.
    """
    parent_path, _, name = path.rpartition(".")
    modules = dict(model.named_modules())
    layer = modules.get(path)
    if layer is None:
        fused = next(
            (whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() if name in parts), None
        )
        reason = f"vLLM fuses {name} into {fused}" if fused else f"vLLM's {type(model).__name__} has no such layer"
        raise UserError(f"layer {path!r} cannot be edited in vLLM: {reason}; {LAYER_REMEDY}")
    linear = getattr(layer, "base_layer", layer)  # of LoRA
    if not isinstance(linear, LinearBase):
        raise UserError(f"layer {path!r} cannot be edited in vLLM: it is no linear layer; {LAYER_REMEDY}")
    if getattr(linear, "skip_bias_add", False) and linear.bias is not None:
        raise UserError(f"layer {path!r} cannot be edited in vLLM: its bias is added after it; {LAYER_REMEDY}")
    is_sharded = isinstance(linear, ColumnParallelLinear) and not linear.gather_output
    is_partial = isinstance(linear, RowParallelLinear) and not linear.reduce_results
    if linear.tp_size > 1 and (is_sharded or is_partial):
        raise UserError(
            f"layer {path!r} cannot be edited in vLLM: each of {linear.tp_size} processes has a part of its output;"
            f" {LAYER_REMEDY}"
        )
    setattr(modules[parent_path], name, InjectedLayer(layer))


def choose_layer(config: Any, dtype: str, path: str) -> None:
    """Write the layer into a `VllmConfig`: all processes read it there, and compiled models are cached by it.

    Args:
        config: The configuration.
        dtype: As for `config_fault`.
        path: Of the layer.

    Raises:
        UserError: vLLM cannot serve corrections under this configuration.
    """
    if (fault := config_fault(config, dtype, path)) is not None:
        raise UserError(fault)
    config.additional_config = {**config.additional_config, CONFIG_KEY: path}


def install() -> None:
    """Change vLLM's model runners in this process, so that they inject values. Later calls have no effect."""

    def load_model(method: Method, self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        wrap_layer(self.model, self.vllm_config.additional_config[CONFIG_KEY])

    def prepare_inputs(method: Method, self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = method(self, scheduler_output, num_scheduled_tokens)
        _step.prepare(self, scheduler_output, num_scheduled_tokens)
        return prepared

    def determine_execution(method: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **(kwargs | {"force_eager": True} if _step.rows_K else kwargs))

    replace_method(GPUModelRunner, "load_model", load_model)
    replace_method(CPUModelRunner, "load_model", load_model)
    replace_method(GPUModelRunner, "_prepare_inputs", prepare_inputs)
    replace_method(GPUModelRunner, "_determine_batch_execution_and_padding", determine_execution)


def replace_method(owner: type, name: str, replacement: Method) -> None:
    """Replace a method, once. `replacement` takes the method as its first argument."""
    method = owner.__dict__[name]
    if getattr(method, "is_from_gracestream", False):
        return

    @wraps(method)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(method, *args, **kwargs)

    replaced.is_from_gracestream = True  # type: ignore[attr-defined]
    setattr(owner, name, replaced)
