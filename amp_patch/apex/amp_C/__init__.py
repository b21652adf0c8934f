"""Apex's compiled module `amp_C`: its multi-tensor functions over `amp_patch.multi_tensor` and the fused optimizers.

Each takes `(chunk_size, noop_flag, tensor_lists, *arguments)` in Apex's order, called directly or by
`multi_tensor_applier`. `chunk_size` is ignored. `noop_flag` is a tensor of one element, int32
(`torch.cuda.IntTensor([0])`) or another number type. As in Apex it is set to 1 if an element is infinite or NaN; here
also if a finite element overflows in its new type. If Apex's function does nothing once the flag is set
(`multi_tensor_sgd` and the capturable Adams), nothing is written. No function syncs with the device. As in Apex, a
tensor that requires grad may be written.

Gradients are only read. Apex's `multi_tensor_lamb` writes the update into them, its capturable Adams the unscaled ones.
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
