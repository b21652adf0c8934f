"""Reads of device values by the host: which of them sync, and whether a CUDA graph capture forbids them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_capturing() -> bool:
    """Tell whether the current stream captures a CUDA graph. Work that is queued now is repeated by each replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def waits(device: torch.device) -> bool:
    """Tell whether a read of a value on `device` syncs: the host waits for all work that was queued before."""
    return device.type != "cpu"


class DeviceNumbers:
    """An asynchronous copy of a tensor to the host.

    Args:
        values: shape [n], any dtype. On CUDA it is copied into pinned memory on the current stream, without a sync.
            On a CPU it is referenced, not copied: the caller must not write it afterwards.
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
        """Tell whether `read` can return without a sync."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> list[Any]:
        """Return the values as Python numbers; syncs with the device if the copy has not arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
