"""Stochastic rounding (master_weights="stochastic") of BF16 parameters that are sharded by `fully_shard`.

The groups keep the DTensors, because checkpoints find parameters by identity. The step runs on the masters of the local
shards. The random bits of an element depend on its index in the whole parameter, so the results are the same for any
number of processes. The optimizer's state is FP32; a read returns DTensors with the placements of the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch.around import fsdp
from amp_patch.masters.grad_field import set_own_grad
from amp_patch.masters.masters import has_gradient
from amp_patch.policy import STOCHASTIC, Policy
from amp_patch.storage import coded_steps
from amp_patch.storage.coder import Coder, Parts, are_alike, check_shards, part_of
from amp_patch.support.compiled import wraps
from amp_patch.support.distributed import is_dtensor, local
from amp_patch.support.generated_class import base_class
from amp_patch.training.stash import Stash, known_stash, stash_of
from amp_patch.training.step import Plain, Step

KEY = ("rounded_shards",)  # key of the generated optimizer classes


def check(optimizer: Any, policy: Policy) -> None:
    """Raise if `policy` asks for stochastic rounding of shards and the (innermost) optimizer is not elementwise.

    Frozen parameters are checked too, because they may be trained later. With 8-bit state nothing is checked here:
    `coded_steps.check` has already made the same check.
    """
    if policy.optimizer_state is None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        _check("initialize", optimizer, policy, params)


def check_group(optimizer: Any, stash: Stash, params: list[Tensor]) -> None:
    """Check the parameters of an added group as `check` does; also raise if a rounded one is sharded in another way."""
    policy = stash.policy
    _check("add_param_group", optimizer, policy, params)
    for index, param in enumerate(params):
        if policy.master_weights == STOCHASTIC and _is_low_shard(param):
            fsdp.check_place(f"add_param_group: parameter {index}", param)


def _check(caller: str, optimizer: Any, policy: Policy, params: list[Tensor]) -> None:
    if policy.master_weights != STOCHASTIC or not any(map(_is_low_shard, params)):
        return
    way_out = "leave master_weights at None and shard the model in FP32"
    wanted, against = f"{caller}: master_weights='stochastic'", coded_steps.reason_against(optimizer)
    check_shards(wanted, optimizer, way_out, against)


def _is_low_shard(param: Tensor) -> bool:
    return is_dtensor(param) and param.dtype is torch.bfloat16


class OnMasters(coded_steps.InCodes):
    """The strategy for rounded shards: the optimizer's code steps the local shards' masters instead of the DTensors."""

    def run(self, step: Step, plain: Plain) -> Any:
        stash = step.stash
        if (form := stash.master_form) is not None:
            form.check_step()
        result = step.take_closure()
        try:
            super().run(step, plain)
        finally:
            for part in stash.masters.parts.values():  # the DTensors keep their gradients
                part.master.grad = None
        return result

    def parts(self, optimizer: Any) -> Parts:
        stash = known_stash(optimizer)
        masters = stash.masters
        grads: dict[Tensor, Tensor] = {}

        def part(param: Tensor) -> Tensor:
            if (master := masters.master_of_part(param)) is None:
                return part_of(param)
            if has_gradient(param):
                grads[master] = _gradient(optimizer, stash, param)
            return master

        parts = Parts(optimizer, part)
        _give_gradients(stash, grads)
        return parts


ON_MASTERS = OnMasters()


def _gradient(optimizer: Any, stash: Stash, shard: Any) -> Tensor:
    if not are_alike(shard.grad, shard):
        name = stash.names().get(shard, "a shard")
        raise RuntimeError(
            f"{base_class(optimizer).__name__}.step: the gradient of {name!r} is laid out as "
            f"{getattr(shard.grad, 'placements', None)}, the parameter as {shard.placements}, and "
            "master_weights='stochastic' steps what is here of both: give it grad.redistribute(placements="
            "param.placements)"
        )
    return local(shard.grad)


def _give_gradients(stash: Stash, grads: dict[Tensor, Tensor]) -> None:
    """Defer the BF16 gradients `grads` of masters until the step, or set FP32 `.grad` if none can be deferred."""
    waiting = stash.masters.waiting
    if waiting is not None and not waiting:
        records = [record for record in stash.masters.links.records if record.master in grads]
        waiting.hold(records, [grads[record.master] for record in records])
        return
    for master, grad in grads.items():
        set_own_grad(master, grad.float())


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer


def is_for(stash: Stash) -> bool:
    """Return whether the optimizer of this stash has rounded shards, or may get some in a later group."""
    return stash.master_form is not None and bool(stash.neighbours.sharded or stash.masters.parts)


def enter(optimizer: Any, stash: Stash) -> None:
    """Give an optimizer of rounded shards a coder, which stores the state of the local shards.

    A copied optimizer gets new masters first. An optimizer without rounded shards is not changed.
    """
    if (form := stash.master_form) is None:
        return
    for group in optimizer.param_groups:
        if any(map(_is_low_shard, group["params"])):
            stash.masters.attach(optimizer, group, form=form)
    if getattr(type(optimizer), "strategy", None) is ON_MASTERS and stash.neighbours not in coded_steps.coders:
        coded_steps.coders[stash.neighbours] = Coder(None)


def overrides(base: Any) -> dict[str, Any]:
    """Return {name: value} of what a generated class over `base` gets for rounded shards: a method and the strategy."""

    @wraps(base.load_state_dict)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        stash = stash_of(self)
        if stash is None:
            base.load_state_dict(self, state_dict)
            return
        try:
            stash.masters.exchange(self, shards=False)  # for the BF16 shards torch would cast the state to BF16
            base.load_state_dict(self, state_dict)
        finally:
            stash.masters.exchange(self, shards=True)
        coded_steps.coder_of(self).encode(self, self.state, in_place=False)

    return coded_steps.overrides(base) | {"strategy": ON_MASTERS, "load_state_dict": load_state_dict}
