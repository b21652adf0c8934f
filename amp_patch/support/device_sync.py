"""What the host may ask a device: nothing while a CUDA graph is captured, and when it must wait for the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream. What is done now is done again at each replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def waits(device: torch.device) -> bool:
    """Whether reading a value of `device` makes the host wait for all that was asked of it before."""
    return device.type != "cpu"


class DeviceNumbers:
    """The values of a tensor on their way to the host.

    Args:
        values: of one dimension. On CUDA it is copied into pinned memory, behind what its device does now; on a CPU it
            is taken as it is, and must not be written afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._arrived: Any = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def here(self) -> bool:
        """Whether `read` needs no wait."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> list[Any]:
        """The numbers; waits for the device if it must."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
