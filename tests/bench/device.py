"""The device that a benchmark measures: seconds spent on it, its copy rate, its memory, and what identifies it.

1. `timed` gives CPU seconds of this process on a CPU, and on a GPU wall seconds between two synchronisations.
2. `copy_rate` is measured on the same device, so that a floor on time is a number of bytes over that rate.
3. `held` counts what this process holds on the device; on a GPU that includes what libraries other than torch hold.

It needs what the engine needs.
"""

import ctypes
import functools
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch

from gracestream.pipeline.device import DeviceError, cuda_unavailable_reason, driver_version, prepare_cuda
from gracestream.pipeline.search.key_search import load_faiss

T = TypeVar("T")

COPIES = 7
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""More than any cache holds."""


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> float:
    """CPU seconds of this process, or wall seconds where the device is not the CPU."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def timed(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a call takes, with all it gives the device to do, and its result."""
    synchronise(device)
    started = clock(device)
    result = call()
    synchronise(device)
    return clock(device) - started, result


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Bytes that the device reads and writes in a second while it copies within its memory; a median, taken once."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = [timed(device, lambda: target.copy_(source))[0] for _ in range(COPIES + 1)]
    return 2 * len(source) / statistics.median(seconds[1:])  # the first one warms up


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device's memory in use: on a CPU resident memory, on a GPU all that is not free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_memory(device: torch.device) -> int:
    """Bytes of the device's memory that can still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def peak_memory_added(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that a call adds at most to what torch holds on a GPU; on a CPU, to resident memory at its end."""
    before = memory_in_use(device)
    if device.type == "cpu":
        call()
        return memory_in_use(device) - before
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def gpu_unavailable_reason() -> str:
    """Why the GPU cannot be used; empty if it can, and it is set up as a worker of the product sets it up."""
    try:
        prepare_cuda()
    except DeviceError as error:
        return str(error)
    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} can use no GPU: {cuda_unavailable_reason()}"


def gpu_facts() -> dict[str, str | int]:
    """Driver, CUDA, compute capability and memory of the first GPU, and whether FAISS can use it."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "driver": driver_version() or "none",
        "cuda": str(torch.version.cuda),
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_gib": round(properties.total_memory / 2**30),
        "faiss_gpu": "yes" if hasattr(load_faiss(), "StandardGpuResources") else "no",
    }


def version(package: str) -> str:
    """The version of an importable package, or `none`."""
    return "none" if find_spec(package) is None else str(importlib.import_module(package).__version__)
