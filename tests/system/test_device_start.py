"""A worker logs the device of its model, and warns if it runs on the CPU although there is a GPU."""

from functools import partial
from pathlib import Path

import pytest
import torch

from gracestream.pipeline import device
from gracestream.pipeline.device import device_name
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Forked, sentence

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that torch can use")


def load_driver(file: Path) -> None:
    """Pretend that an NVIDIA driver is loaded without a GPU, as in a container without a GPU."""
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  999.65.06  Release Build\n")
    device.DRIVER_FILE = file


def test_a_worker_logs_its_device_and_warns_of_a_gpu_that_it_cannot_use(deployment: Settings, folder: Path) -> None:
    driver = partial(load_driver, folder / "version")
    with Forked("replica", "infer", deployment, folder, device="auto", sabotage=driver) as replica:
        replica.wait_ready(90)
        events = {event["event"]: event for event in replica.events()}
    loaded, warned = events["model_loaded"], events["gpu_not_used"]
    assert (loaded["device"], loaded["dtype"]) == (device_name(torch.device("cpu")), "float32")
    assert (warned["level"], warned["driver"]) == ("warning", "999.65.06")


def test_an_editor_with_the_device_cuda_ends_without_a_gpu(deployment: Settings, folder: Path) -> None:
    driver = partial(load_driver, folder / "version")
    editor = Forked("editor", "edit", deployment, folder, device="cuda", sabotage=driver)
    assert editor.run() == 1
    expected = "GRACESTREAM_DEVICE is cuda, but torch can use no CUDA device: NVIDIA driver 999.65.06 is loaded, but"
    assert sentence(editor).startswith(expected)
