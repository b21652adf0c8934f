"""Apex's compiled module `amp_C`: its multi-tensor functions, made of `amp_patch.multi_tensor` and the optimizers.

Each function takes `(chunk_size, noop_flag, tensor_lists, *arguments)` in Apex's order, from `multi_tensor_applier` or
from user code. `chunk_size` is ignored. `noop_flag` is a tensor of one element, int32 (`torch.cuda.IntTensor([0])`) or
another number type. A function whose docstring says "sets the flag" writes 1 into it if an element is infinite or NaN,
as in Apex, and also if a finite element overflows in its new type. `multi_tensor_sgd` writes
nothing if the flag is set, as in Apex. No function syncs with the device. As in Apex, a tensor that requires grad may
be written.

Gradients are only read. (Apex's `multi_tensor_lamb` overwrites them with the update.)
"""

from __future__ import annotations

from amp_patch.apex.amp_C import steps, tensor_lists
from amp_patch.apex.amp_C.steps import *  # noqa: F403
from amp_patch.apex.amp_C.tensor_lists import *  # noqa: F403

__all__ = [name for module in (steps, tensor_lists) for name in module.__all__]
