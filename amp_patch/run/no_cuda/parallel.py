"""Parallel training on the CPU: DataParallel has one replica, DistributedDataParallel no devices, NCCL becomes gloo."""

from __future__ import annotations

import atexit
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.support.patches import Patches


def redirect_parallel(patches: Patches) -> None:
    """Replace the backend NCCL by gloo; make DataParallel and DistributedDataParallel ignore CUDA device ids."""
    parallel = torch.nn.DataParallel
    make = parallel.__init__

    @functools.wraps(make)
    def one_replica(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        make(self, module, device_ids=[0])
        self.device_ids = []  # without device ids its forward calls the module itself

    patches.set(parallel, "__init__", one_replica)
    if not torch.distributed.is_available():
        return
    distributed = torch.nn.parallel.DistributedDataParallel
    spread = distributed.__init__

    @functools.wraps(spread)
    def no_devices(
        self: Any, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        spread(self, module, None, None, *args, **kwargs)

    patches.set(distributed, "__init__", no_devices)
    for name in "init_process_group", "new_group":
        patches.set(torch.distributed, name, _over_gloo(getattr(torch.distributed, name)))


@functools.cache
def _wait_for_gloo_at_exit() -> None:
    """Sleep at exit, so that gloo's threads can free the gradients of the last reduction: they need the GIL for it.

    Without this, a thread that is still freeing when the interpreter ends aborts the process, and torchrun reports a
    failure. Up to a quarter of the runs of scripts that end with a backward pass did so, also with plain torch. The
    sleep releases the GIL for longer than the threads need.
    """
    atexit.register(time.sleep, 0.1)


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    def over_gloo(value: Any) -> Any:
        return "gloo" if isinstance(value, str) and re.fullmatch("nccl|.*cuda:nccl.*", value.lower()) else value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _wait_for_gloo_at_exit()
        kwargs.pop("device_id", None)
        return function(*map(over_gloo, args), **{name: over_gloo(value) for name, value in kwargs.items()})

    return call
