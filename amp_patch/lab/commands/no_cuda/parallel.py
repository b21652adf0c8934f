"""DataParallel calls its module, DistributedDataParallel has no devices, and NCCL is gloo."""

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
    """Make NCCL gloo, and let DataParallel and DistributedDataParallel take CUDA's device ids."""
    parallel = torch.nn.DataParallel
    make = parallel.__init__

    @functools.wraps(make)
    def one_replica(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        make(self, module, device_ids=[0])
        self.device_ids = []  # without device ids torch's forward calls the module

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
    """Wait for gloo's threads, which free the last reduction's gradients: at exit that needs the interpreter.

    One that is not yet through when the interpreter ends aborts the process (seen in up to a quarter of the runs of
    scripts that end with a backward, with plain torch too), and torchrun then tells of a failure. Sleeping lets go of
    the interpreter, for longer than they ever need.
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
