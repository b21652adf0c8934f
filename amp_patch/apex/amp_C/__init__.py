"""Apex's compiled module `amp_C`: its multi-tensor functions over `amp_patch.multi_tensor` and the fused optimizers.

Each takes `(chunk_size, noop_flag, tensor_lists, *arguments)`, as `multi_tensor_applier` calls it and as callers do by
themselves, in Apex's order. `chunk_size` is ignored. `noop_flag` is a tensor of one element, int32
(`torch.cuda.IntTensor([0])`) or another number type: it is set to 1 where Apex sets it, on what is not finite, and also
where a finite element overflows in its new type. Where Apex's function does nothing once the flag is set
(`multi_tensor_sgd` and the capturable Adams), nothing is written. No function syncs with the device; all of them write
to tensors that require grad, as Apex's do.

Gradients are only read: Apex's `multi_tensor_lamb` puts the update into them, its capturable Adams what they unscale.
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
