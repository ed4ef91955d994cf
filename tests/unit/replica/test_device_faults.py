"""A fault of the device is distinguished from a fault of one input: only the second becomes an answer."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gracestream.pipeline import device
from gracestream.pipeline.device import (
    CUDA_ENVIRONMENT_DEFAULTS,
    TF32_OVERRIDES,
    DeviceError,
    DeviceLostError,
    prepare_cuda,
    raise_if_device_lost,
)
from gracestream.pipeline.model.checkpoint import ModelError, resolve_device
from gracestream.pipeline.search.key_search import retry_on_memory_error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("Error in void runL2Norm() at L2Norm.cu:230: Error: 'err == cudaSuccess' failed: CUDA error 700"),
    ],
    ids=repr,
)
def test_an_error_that_leaves_a_dead_context_is_a_fault_of_the_device(error: RuntimeError) -> None:
    with pytest.raises(DeviceLostError, match=r"^the device failed: ") as raised:
        raise_if_device_lost(error)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("a tensor of no shape"),
        ValueError("CUDA error: as a prompt may say"),
        MemoryError(),
    ],
    ids=repr,
)
def test_an_error_of_an_input_is_none(error: Exception) -> None:
    raise_if_device_lost(error)


def test_a_fault_of_the_device_stays_one() -> None:
    with pytest.raises(DeviceLostError, match="no memory left for FAISS"):
        raise_if_device_lost(DeviceLostError("the device has no memory left for FAISS"))


FULL = (
    "Error in virtual void* allocMemory(): StandardGpuResources: alloc fail type TemporaryMemoryOverflow\n(cudaMalloc"
)


def faults(*errors: Exception | None) -> Any:
    """Raises these errors in turn; gives 1 where there is none."""
    left = list(errors)

    def search() -> int:
        if (error := left.pop(0)) is not None:
            raise error
        return 1

    return search


def test_a_search_without_memory_runs_again_once_torch_has_given_back_its_cache() -> None:
    assert retry_on_memory_error(faults(RuntimeError(FULL), None)) == 1
    with pytest.raises(DeviceLostError, match=r"^the device has no memory left for FAISS: Error in virtual") as raised:
        retry_on_memory_error(faults(RuntimeError(FULL), RuntimeError(FULL)))
    assert "\n" not in str(raised.value)
    with pytest.raises(RuntimeError, match="of no shape"):
        retry_on_memory_error(faults(RuntimeError("a tensor of no shape")))
    with pytest.raises(RuntimeError, match="of no shape"):
        retry_on_memory_error(faults(RuntimeError(FULL), RuntimeError("a tensor of no shape")))


@pytest.fixture
def precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's precision, and the variables that CUDA reads, as they are by default; and put back."""
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for name in (*TF32_OVERRIDES, *CUDA_ENVIRONMENT_DEFAULTS):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "0")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    yield
    torch.set_float32_matmul_precision(was[0])
    torch.backends.cudnn.allow_tf32 = was[1]


@pytest.mark.usefixtures("precision")
class TestFullFloat32:
    def test_tf32_is_off_and_the_workspace_is_fixed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_float32_matmul_precision("high")
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
        prepare_cuda()
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"

    @pytest.mark.parametrize("name", TF32_OVERRIDES)
    def test_an_environment_that_forces_tf32_is_rejected(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, "1")
        with pytest.raises(DeviceError, match=f"^{name}=1 turns TF32 on, .*; unset it, or set it to 0$"):
            prepare_cuda()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that torch can use")
class TestWithoutCuda:
    @pytest.mark.parametrize(
        ("driver", "expected"),
        [
            (None, r"no NVIDIA driver is loaded here; torch's CUDA [\d.]+ needs NVIDIA driver \d+ or newer"),
            ("Kernel Module  470.57.02  Tue Jul 13", r"NVIDIA driver 470.57.02 is too old; torch's CUDA"),
            ("Open Kernel Module for x86_64  999.65.06  Release", r"NVIDIA driver 999.65.06 is loaded, but no GPU is"),
        ],
        ids=["none", "old", "no GPU"],
    )
    def test_a_gpu_that_was_asked_for_is_missed_with_the_driver_that_it_needs(
        self, driver: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if torch.version.cuda is None:
            expected = "this torch was built without CUDA"
        monkeypatch.setattr(device, "DRIVER_FILE", tmp_path / "version")
        if driver is not None:
            (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {driver}\nGCC version: gcc version 12.2.0\n")
        with pytest.raises(ModelError, match=f"^GRACESTREAM_DEVICE is cuda, but .*{expected}"):
            resolve_device("cuda")
        assert resolve_device("auto") == "cpu"
