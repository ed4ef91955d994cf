"""Measurements on a device: time, copy rate, memory, and a description of the GPU.

1. `timed` returns CPU seconds of this process on a CPU. On a GPU it returns wall time between two synchronisations.
2. `copy_rate` is measured on the same device. So bytes divided by it are a floor (lower bound) of time on that device.
3. `memory_in_use` on a GPU includes memory that libraries other than torch allocated.

This module needs only the packages of the engine.
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
"""Larger than any cache."""


def synchronise(device: torch.device) -> None:
    """Wait for all queued work of the device. A CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> float:
    """CPU seconds of this process for a CPU, wall seconds for another device."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def timed(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of a call, including its work on the device, and the result of the call."""
    synchronise(device)
    started = clock(device)
    result = call()
    synchronise(device)
    return clock(device) - started, result


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second while the device copies within its memory: a median, measured once."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = [timed(device, lambda: target.copy_(source))[0] for _ in range(COPIES + 1)]
    return 2 * len(source) / statistics.median(seconds[1:])  # the first copy warms up


def memory_in_use(device: torch.device) -> int:
    """Bytes of memory in use: resident memory of this process on a CPU, all memory that is not free on a GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_memory(device: torch.device) -> int:
    """Bytes of free memory on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def peak_memory_added(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that a call adds: to torch's peak allocation on a GPU, to resident memory after the call on a CPU."""
    before = memory_in_use(device)
    if device.type == "cpu":
        call()
        return memory_in_use(device) - before
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def gpu_unavailable_reason() -> str:
    """Set up the GPU as a worker does. Returns the reason if it cannot be used, and an empty string if it can."""
    try:
        prepare_cuda()
    except DeviceError as error:
        return str(error)
    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} cannot use a GPU: {cuda_unavailable_reason()}"


def gpu_facts() -> dict[str, str | int]:
    """Driver, CUDA version, compute capability and memory of the first GPU, and whether FAISS supports it."""
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
