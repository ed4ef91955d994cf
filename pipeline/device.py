"""Faults of the device that runs the model, as against faults of one input.

After most CUDA errors the context is dead: every later call fails, whatever the input, and only a new process mends
it. Such a fault must become neither an answer nor an outcome. Memory that ran out is another matter: the context
lives, and a smaller batch may fit.
"""

import torch

_SIGNS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "CUSPARSE_STATUS_", "NCCL error")
"""What torch's messages say where a library of CUDA failed and torch has no class for it."""


class DeviceFault(Exception):
    """The device can no longer be used by this process; what it was at must be done anew by another one."""


def raise_if_broken(error: Exception) -> None:
    """To be asked about every failure of a model before it is blamed on the input.

    Raises:
        DeviceFault: the device is broken.
    """
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return
    if isinstance(error, torch.AcceleratorError) or any(sign in str(error) for sign in _SIGNS):
        first_line = str(error).strip().split("\n")[0]
        raise DeviceFault(f"the device failed: {first_line}") from error
