"""Numbers on a device, read on the host without making it wait: they travel while the training goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
