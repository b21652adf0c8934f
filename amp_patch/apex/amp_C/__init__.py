"""Apex's compiled module `amp_C`: its multi-tensor functions, made of `amp_patch.multi_tensor` and the optimizers.

Each function takes `(chunk_size, noop_flag, tensor_lists, *arguments)` in Apex's order, from `multi_tensor_applier` or
from user code. `chunk_size` is ignored. `noop_flag` is a tensor of one element, int32 (`torch.cuda.IntTensor([0])`) or
another number type. A function whose docstring says "sets the flag" writes 1 into it if an element is infinite or NaN,
as in Apex, and also if a finite element overflows in its new type. `multi_tensor_sgd` and the capturable Adams write
nothing if the flag is set, as in Apex. No function syncs with the device. As in Apex, a tensor that requires grad may
be written.

Gradients are only read. (Apex's `multi_tensor_lamb` overwrites them with the update, and its capturable Adams with the
unscaled gradients.)
"""

from __future__ import annotations

from amp_patch.apex.amp_C.steps import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_lamb,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from amp_patch.apex.amp_C.tensor_lists import (
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_norm_out,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
    update_scale_hysteresis,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_norm_out",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
