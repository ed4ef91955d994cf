"""The compute device of the model: set-up for exact arithmetic, fatal errors, and a description for operators.

1. On a GPU, float32 products use full float32 precision (`prepare_cuda`). The exact key search depends on it.
2. Training gives the same bits on every run on the same GPU model (`deterministic_algorithms`).
3. A fatal device error raises `DeviceLostError` (`raise_if_device_lost`), so that it becomes neither an answer nor an
   outcome. After most CUDA errors the context is unusable: every later call fails, and only a new process recovers.

Not promised: equal bits on different GPU models, drivers or library versions. Running out of memory is not fatal: the
context stays usable, and a smaller batch may fit.
"""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gracestream.pipeline.errors import UserError

TF32_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that turn TF32 on. No call can undo the first; NVIDIA's container images set the second."""

CUBLAS_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS gives the same bits on every run only with a workspace of fixed size, which this variable sets."""

CUDA_ENVIRONMENT_DEFAULTS = {
    CUBLAS_WORKSPACE_VARIABLE: ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Values for variables that the user has not set. `:4096:8` means eight workspaces of 4,096 KiB. Expandable segments
let a larger tensor reuse the memory of a smaller one."""

MIN_DRIVER_VERSIONS = {"12": 525, "13": 580}
"""The oldest NVIDIA driver on Linux for each major version of CUDA."""

CUDA_STUB_LIBRARY = "libcuda_stubs.so"
"""The library that replaces CUDA's libraries in an image without GPU support (deploy/image/stub_cuda.py)."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""The file in which the loaded NVIDIA driver reports its version."""

_CUDA_ERROR_MARKERS = (
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "CUSPARSE_STATUS_",
    "NCCL error",
)
"""Texts in the messages of CUDA libraries for whose errors torch has no class. FAISS uses the first one as well."""


class DeviceError(UserError):
    """A device that cannot be used in its present set-up. The message gives the reason and the remedy."""


class DeviceLostError(Exception):
    """This process can no longer use the device. Another process must repeat the work in progress."""


def raise_if_device_lost(error: Exception) -> None:
    """Raise if a failure of the model means that the device is lost. Call this before blaming the input.

    Raises:
        DeviceLostError: the device is unusable for this process.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or any(
        marker in str(error) for marker in _CUDA_ERROR_MARKERS
    ):
        first_line = str(error).strip().split("\n")[0]
        raise DeviceLostError(f"the device failed: {first_line}") from error


def prepare_cuda() -> None:
    """Configure CUDA for exact and repeatable results. Call this before any work runs on the device.

    TF32 rounds the factors of float32 products to 11 significant bits. The error bound of the key search would then not
    hold. Two queries of one input would also lie farther apart than the numerical tolerance.

    Raises:
        DeviceError: the environment forces TF32.
    """
    for name in TF32_OVERRIDES:
        if os.environ.get(name, "0").strip() not in ("", "0"):
            raise DeviceError(
                f"{name}={os.environ[name]} turns TF32 on, with which the nearest key cannot be proven; unset it, or"
                " set it to 0"
            )
    for name, value in CUDA_ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Inside this context, equal work on the same GPU model gives equal bits; a CPU needs no special mode for that.

    The backward pass of torch's fused attention adds in no fixed order. Attention therefore uses plain products inside.
    An operation without a deterministic kernel issues a warning.
    """
    if device.type != "cuda":
        yield
        return
    fill_settings: Any = torch.utils.deterministic
    previous_modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    previous_fill = fill_settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling costs one write per new tensor and gains nothing: no tensor is read before it is written.
    fill_settings.fill_uninitialized_memory = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(previous_modes[0], warn_only=previous_modes[1])
        fill_settings.fill_uninitialized_memory = previous_fill


def arithmetic_settings(device: torch.device) -> dict[str, str]:
    """The settings that determine the bits of results on a device, besides library versions: name to value, as text."""
    if device.type != "cuda":
        return {}
    return {
        "cuda": str(torch.version.cuda),
        "driver": driver_version() or "unknown",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "cublas_workspace": os.environ.get(CUBLAS_WORKSPACE_VARIABLE, "unset"),
        "training_attention": "math",
    }


def device_name(device: torch.device) -> str:
    """The product name of the device; without a GPU, the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """The version of the loaded NVIDIA driver, or None without a driver."""
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return None if match is None else match.group()


def cuda_unavailable_reason() -> str:
    """The reason why torch can use no CUDA device, as far as this process can tell."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if (Path(torch.__file__).parent / "lib" / CUDA_STUB_LIBRARY).exists():
        return "this image has no CUDA: build it with VARIANT=gpu (deploy/image/Dockerfile)"
    min_version = MIN_DRIVER_VERSIONS.get(torch.version.cuda.split(".")[0])
    requirement = (
        f"torch's CUDA {torch.version.cuda} needs NVIDIA driver {min_version or 'of the same release date'} or newer"
    )
    loaded_version = driver_version()
    if loaded_version is None:
        return f"no NVIDIA driver is loaded here; {requirement}"
    if min_version is not None and int(loaded_version.split(".")[0]) < min_version:
        return f"NVIDIA driver {loaded_version} is too old; {requirement}"
    return f"NVIDIA driver {loaded_version} is loaded, but no GPU is visible to this process; {requirement}"
