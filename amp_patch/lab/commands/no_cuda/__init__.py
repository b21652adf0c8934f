"""CUDA-only scripts on the CPU, for one process: `python -m amp_patch run --device cpu train.py`.

Three rules, each in the few places that everything of its kind goes through:

1. *Wherever a device goes into torch, CUDA means the CPU*: the `device=` of the functions and methods whose operators
   have one (torch's own schemas say which), `.to()`, `.cuda()`, default devices, generators, checkpoints. Thin
   functions in their place, not a TorchFunctionMode: a mode costs microseconds at every call of torch, and each thread
   would need its own. `torch.device` itself stays: it is a final C type that scripts give to isinstance, and describes
   "cuda" on any machine.
2. *`torch.cuda` plays a machine with one GPU*, a Volta (7.0): `is_available()` is True, so that a script takes the path
   that it was written for; memory statistics are what this process has grown by, streams and events are in order
   already. FP16 under torch's autocast or amp_patch's is emulated where this CPU has no arithmetic for it.
3. *A tensor tells the truth*: it lies on the CPU, `is_cuda` is False, `device` is cpu and `get_device()` is -1. Torch,
   amp_patch and the scripts' own extensions choose their kernels by these. Only `type()` returns a name that equals
   "torch.cuda.HalfTensor" as well as "torch.HalfTensor": old loops sort gradients by it and would skip them all.

`.cuda()` and `.to("cuda")` copy a tensor that needs no gradient, as a real move does: the script may edit the result in
place and still has the original. Parameters and what was computed from them stay what they are.
"""

from __future__ import annotations

from amp_patch.lab.commands.no_cuda import machine
from amp_patch.lab.commands.no_cuda.autocast import redirect_autocast
from amp_patch.lab.commands.no_cuda.devices import (
    redirect_checkpoints,
    redirect_devices,
    redirect_moves,
    redirect_types,
)
from amp_patch.lab.commands.no_cuda.parallel import redirect_parallel
from amp_patch.lab.recording.peak_memory import PeakMemory
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


def install() -> None:
    """Let CUDA be the CPU for this process, until `uninstall`. Idempotent. Call it before the script's own imports."""
    _installation.install(_redirect)


def _redirect(patches: Patches) -> None:
    patches.set(machine, "peak", PeakMemory())
    for redirect in _REDIRECTIONS:
        redirect(patches)


def uninstall() -> None:
    """Undo `install`. What was made meanwhile lies on the CPU and stays there."""
    _installation.uninstall()
