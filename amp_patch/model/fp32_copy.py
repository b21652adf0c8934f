"""FP32 copies of models, for EMA, export or evaluation."""

from __future__ import annotations

import copy

import torch
from torch import nn

from amp_patch.casts import state as casts_state
from amp_patch.masters.masters import links_of, master_of, settle
from amp_patch.model import forward as model_forward
from amp_patch.model import shielded_copies


def fp32_copy(model: nn.Module) -> nn.Module:
    """An FP32 deep copy of `model`, without any trace of amp_patch, for EMA, export or evaluation.

    Weights are the masters' values where there are masters, else the low-precision ones, upcast. Buffers are those from
    before the cast, where nothing has written them since.

    The casts of an O1 or O4 training act in all that is called outside of models, but not in the copy: it and its parts
    run, trace and export in FP32 (save torch's own layers inside it, where they are called by themselves). As long as
    such a training lives, the copy and its parts have generated classes for that, and so have copies by `deepcopy`.
    Pickles are always of the plain classes. What the caller enters around the copy, `amp.autocast` or the forward of a
    model, acts in it as in any module.
    """
    settle(links_of(set(model.parameters())))
    plain = copy.deepcopy(model)
    model_forward.to_plain_fp32(plain)
    with torch.no_grad():
        # `model` may be a submodule of a training's model, which alone gives FP32 values to its copies.
        for copied, param in zip(plain.parameters(), model.parameters(), strict=True):
            master = master_of(param)
            if master is not None:
                copied.copy_(master)
    shielded_copies.note(plain, shielded=casts_state.default() is not None)
    return plain
