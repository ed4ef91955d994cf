"""The device that runs the model: its faults, and the arithmetic that exact look-ups and equal replays rest on.

After most CUDA errors the context is dead: every later call fails, whatever the input, and only a new process mends
it. Such a fault must become neither an answer nor an outcome. Memory that ran out is another matter: the context
lives, and a smaller batch may fit.

On a GPU float32 products are full float32 (`prepare_cuda`), and training gives the same bits each time
(`deterministic_algorithms`).
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
"""Variables that turn TF32 on. Nothing can turn it off again under the first, and NVIDIA's images set the second."""

CUBLAS_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""With a workspace of fixed size, cuBLAS gives the same bits each time."""

CUDA_ENVIRONMENT_DEFAULTS = {
    CUBLAS_WORKSPACE_VARIABLE: ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""What is set where the user has not set it. Expandable segments let a larger array reuse the room of a smaller one."""

MIN_DRIVER_VERSIONS = {"12": 525, "13": 580}
"""The oldest NVIDIA driver on Linux for each major version of CUDA."""

CUDA_STUB_LIBRARY = "libcuda_stubs.so"
"""The library that replaces CUDA's in an image without a GPU (deploy/image/stub_cuda.py)."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")

_CUDA_ERROR_MARKERS = (
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "CUSPARSE_STATUS_",
    "NCCL error",
)
"""What messages say where a library of CUDA failed and torch has no class for it; FAISS says it too."""


class DeviceError(UserError):
    """A device that cannot be used as it is set up; the text says why and what to do."""


class DeviceLostError(Exception):
    """The device can no longer be used by this process; what it was at must be done anew by another one."""


def raise_if_device_lost(error: Exception) -> None:
    """To be asked about every failure of a model before it is blamed on the input.

    Raises:
        DeviceLostError: the device is broken.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or any(
        sign in str(error) for sign in _CUDA_ERROR_MARKERS
    ):
        first_line = str(error).strip().split("\n")[0]
        raise DeviceLostError(f"the device failed: {first_line}") from error


def prepare_cuda() -> None:
    """Set up CUDA for exact and repeatable results; before anything runs on it.

    TF32 rounds the factors of float32 products to 11 bits. The error bound of the key search would not hold then, and
    queries of one input would lie farther apart than the tolerance.

    Raises:
        DeviceError: the environment forces TF32.
    """
    for name in TF32_OVERRIDES:
        if os.environ.get(name, "0").strip() not in ("", "0"):
            raise DeviceError(
                f"{name}={os.environ[name]} turns TF32 on, under which no nearest key can be proven; unset it, or set"
                " it to 0"
            )
    for name, value in CUDA_ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Inside, the same work on the same GPU model gives the same bits each time, as on a CPU it does anyhow.

    The backward pass of torch's fused attention adds in no fixed order, so attention is by plain products here. An
    operation that has no deterministic kernel warns.
    """
    if device.type != "cuda":
        yield
        return
    fill: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill.fill_uninitialized_memory = False  # it costs a write of each new tensor, and none is read before it is written
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        fill.fill_uninitialized_memory = filled


def arithmetic_settings(device: torch.device) -> dict[str, str]:
    """What decides the bits of results on a device, beside the versions of libraries: names and values, all texts."""
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
    """The device as a person knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where none is loaded."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return None if found is None else found.group()


def cuda_unavailable_reason() -> str:
    """Why torch can use no CUDA device, as far as this process can see."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if (Path(torch.__file__).parent / "lib" / CUDA_STUB_LIBRARY).exists():
        return "this image has no CUDA: build it with VARIANT=gpu (deploy/image/Dockerfile)"
    oldest = MIN_DRIVER_VERSIONS.get(torch.version.cuda.split(".")[0])
    needed = f"torch's CUDA {torch.version.cuda} needs NVIDIA driver {oldest or 'of its time'} or newer"
    driver = driver_version()
    if driver is None:
        return f"no NVIDIA driver is loaded here; {needed}"
    if oldest is not None and int(driver.split(".")[0]) < oldest:
        return f"NVIDIA driver {driver} is too old; {needed}"
    return f"NVIDIA driver {driver} is loaded, but no GPU is visible to this process; {needed}"
