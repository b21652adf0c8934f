"""CUDA-only scripts on the CPU, for one process: `python -m amp_patch run --device cpu train.py`.

With `--device mps` or `--device xpu`, that device takes the place of the CPU in what follows, and FP16 is not emulated.

Three rules hold while it is installed:

1. *A device of type CUDA that is passed to torch means the CPU.* This covers the `device=` of functions and methods
   whose operator has one (torch's schemas list them), `.to()`, `.cuda()`, default devices, generators and checkpoints.
   Each gets a thin wrapper. A TorchFunctionMode would cost microseconds at each call of torch, and each thread would
   need its own. `torch.device` is not replaced: it is a final C type that scripts pass to isinstance, and it can
   describe "cuda" on any machine.
2. *`torch.cuda` describes a machine with one GPU*, a Volta (7.0). `is_available()` is True, so that a script runs its
   code for GPUs. Memory statistics are the growth of this process. Streams and events never have to wait. If this CPU
   has no FP16 arithmetic, FP16 is emulated under torch's autocast and amp_patch's.
3. *A tensor reports its real device*: `is_cuda` is False, `device` is cpu and `get_device()` is -1. Torch, amp_patch
   and the script's own extensions choose their kernels by these. The exception is `type()`: the name that it returns
   equals both "torch.HalfTensor" and "torch.cuda.HalfTensor". Old loops sort gradients by the latter, and would skip
   them all.

If a tensor requires no gradient, `.cuda()` and `.to("cuda")` copy it, as a real move does: the script may then edit the
result in place without changing the original. A tensor that requires a gradient is returned as it is.

Files:

- `devices.py`: devices that are passed to torch
- `machine.py`: functions of `torch.cuda` that describe a machine
- `autocast.py`: autocast regions
- `parallel.py`: DataParallel, DistributedDataParallel and NCCL
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from amp_patch.run.machine import accelerators
from amp_patch.run.no_cuda import devices, machine
from amp_patch.run.no_cuda.autocast import redirect_autocast
from amp_patch.run.no_cuda.devices import (
    redirect_checkpoints,
    redirect_devices,
    redirect_moves,
    redirect_types,
)
from amp_patch.run.no_cuda.parallel import redirect_parallel
from amp_patch.support.patches import Installation, Patches

_REDIRECTIONS = (
    redirect_devices,
    redirect_moves,
    redirect_checkpoints,
    redirect_types,
    machine.redirect_machine,
    redirect_autocast,
    redirect_parallel,
)

_installation = Installation(of_process=True)


def here(kind: str) -> str:
    """Return `kind`, a type of device that CUDA can become, if this machine has a device of this type.

    Raises:
        argparse.ArgumentTypeError: it has none; the message lists the types that it has.
    """
    found = ["cpu", *sorted({name.partition(":")[0] for name in accelerators()} - {"cuda"})]
    if kind not in found:
        missing = f"torch {torch.__version__} finds no device {kind!r} here to replace CUDA by"
        raise argparse.ArgumentTypeError(f"{missing}; wanted {' or '.join(found)}")
    return kind


def install(target: str = "cpu") -> None:
    """Redirect CUDA to `target` in this process, until `uninstall`. Idempotent. Call it before the script's imports."""
    _installation.install(partial(_redirect, target))


def _redirect(target: str, patches: Patches) -> None:
    patches.set(devices, "target", target)
    for redirect in _REDIRECTIONS:
        redirect(patches)


def uninstall() -> None:
    """Undo `install`. Tensors made since then are on its target and stay there."""
    _installation.uninstall()
