"""Support for torch's ZeroRedundancyOptimizer: each process steps its share of the parameters.

At O2 every process keeps the masters of all parameters, so gradients are clipped and models saved as with any
optimizer. Only the state (momentum, Adam's moments) is sharded: each process has that of its share. After a step torch
broadcasts the masters of each share in FP32. Split masters are materialized for the step; then each process stores all
of them in compressed form.
"""

from __future__ import annotations

from typing import Any

from amp_patch.masters.states import rekey
from amp_patch.policy import STOCHASTIC, Policy
from amp_patch.support.distributed import is_zero
from amp_patch.supported import reason


def check_zero(optimizer: Any, policy: Policy) -> None:
    """Raise ValueError if a ZeroRedundancyOptimizer cannot train under `policy`; return for any other optimizer.

    It cannot if it steps in backward and the policy checks gradients or casts the model; if masters are rounded
    stochastically; or if its parameters are views into FP32 buckets, and the policy casts the model.
    """
    if not is_zero(optimizer):
        return
    if optimizer._overlap_with_ddp and (policy.checks_gradients or policy.cast_model_type is not None):
        raise ValueError(
            "initialize: this ZeroRedundancyOptimizer has overlap_with_ddp=True: it steps during backward, with scaled "
            f"gradients, and opt_level {policy.opt_level!r} could neither unscale them nor skip an overflow; make it "
            "with overlap_with_ddp=False, or use O0 or O4 (without skip_nonfinite)"
        )
    if policy.master_weights == STOCHASTIC:
        why = reason(STOCHASTIC, "ZeRO")
        raise ValueError(f"initialize: master_weights='stochastic' is not for a ZeroRedundancyOptimizer: {why}")
    if optimizer.parameters_as_bucket_view and policy.cast_model_type is not None:
        raise ValueError(
            "initialize: this ZeroRedundancyOptimizer has parameters_as_bucket_view=True: its parameters are parts of "
            f"FP32 buffers, which the cast of opt_level {policy.opt_level!r} would leave; make it with "
            "parameters_as_bucket_view=False, or use O1 or O4"
        )


def repartition(optimizer: Any) -> None:
    """Partition a ZeroRedundancyOptimizer again, after masters have replaced parameters in its groups, or the reverse.

    The inner optimizer's groups and state then hold the new tensors. Each process keeps its share, because torch
    partitions by the order and sizes of the parameters: a parameter and its master have the same size. For any other
    optimizer do nothing.
    """
    if not is_zero(optimizer) or not hasattr(optimizer, "optim"):
        return
    optimizer._clear_cache()
    optimizer._all_params = [param for group in optimizer.param_groups for param in group["params"]]
    for group, share in zip(
        optimizer.optim.param_groups, optimizer._partition_parameters()[optimizer.rank], strict=True
    ):
        for old, new in zip(group["params"], share["params"], strict=True):
            if old is not new:
                rekey(optimizer.optim, old, new)
        group["params"] = list(share["params"])
