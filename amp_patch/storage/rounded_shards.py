"""Parameters that `fully_shard` has sharded in BF16, and that each step rounds by chance (master_weights="stochastic").

The groups keep the shards, which checkpoints find by identity. The step is that of any training, on the masters of the
parts that are here: each is rounded by its place in the whole parameter, so that no bit depends on how many processes
there are. The optimizer's state is FP32, and whoever reads it finds DTensors laid out as the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_patch.around import fsdp
from amp_patch.masters.grad_field import set_own_grad
from amp_patch.masters.masters import has_gradient
from amp_patch.policy import STOCHASTIC, Policy
from amp_patch.storage import coded_shards, coded_steps
from amp_patch.storage.coded_state import Coder
from amp_patch.storage.stand_ins import with_stand_ins
from amp_patch.support.compiled import wraps
from amp_patch.support.distributed import is_dtensor, local
from amp_patch.support.generated_class import base_class
from amp_patch.training.stash import Stash, known_stash, stash_of
from amp_patch.training.step import Plain, Step
from amp_patch.ways.partial_step import PartialStep

KEY = ("rounded_shards",)  # of the generated classes


def check(optimizer: Any, policy: Policy) -> None:
    """Raise unless the (innermost) optimizer can step the parts of the shards that `policy` has rounded by chance.

    Those that are frozen count: they may be trained later. Where the state is kept in codes, `coded_steps.check` has
    made the same trial.
    """
    if policy.optimizer_state is None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        _check("initialize", optimizer, policy, params)


def check_group(optimizer: Any, stash: Stash, params: list[Tensor]) -> None:
    """Raise as `check`, of the parameters of a group that comes later; and where these are not sharded by rows."""
    policy = stash.policy
    _check("add_param_group", optimizer, policy, params)
    for index, param in enumerate(params):
        if policy.master_weights == STOCHASTIC and _is_low_shard(param):
            fsdp.check_place(f"add_param_group: parameter {index}", param)


def _check(caller: str, optimizer: Any, policy: Policy, params: list[Tensor]) -> None:
    if policy.master_weights != STOCHASTIC or not any(map(_is_low_shard, params)):
        return
    reason = coded_shards.reason_against(optimizer) or coded_steps.reason_against(optimizer)
    if reason is not None:
        raise ValueError(
            f"{caller}: master_weights='stochastic' is not for this {base_class(optimizer).__name__}, whose parameters "
            f"fully_shard has sharded, so that each process steps a part of each: {reason}; leave master_weights at "
            "None and shard the model in FP32, or use an optimizer that steps each element by itself"
        )


def _is_low_shard(param: Tensor) -> bool:
    return is_dtensor(param) and param.dtype is torch.bfloat16


class InFp32(Coder):
    """Keeps the state of a parameter that is sharded as FP32 tensors of what is here."""

    def _codes_of(self, name: str, beside: Iterable[str]) -> torch.dtype | None:
        return None

    def report(self, optimizer: Any) -> None:
        """Log nothing: no state was to be in codes."""


class OnMasters(coded_steps.InCodes):
    """On the masters of the parts of shards."""

    def run(self, step: Step, plain: Plain) -> Any:
        stash = step.stash
        if (form := stash.master_form) is not None:
            form.check_step()
        result = step.take_closure()
        try:
            super().run(step, plain)
        finally:
            _take_gradients(stash)
        return result

    def steppable(self, optimizer: Any, coder: Coder) -> PartialStep:
        stash = known_stash(optimizer)
        masters = stash.masters
        grads: dict[int, Tensor] = {}

        def stand_in(param: Tensor) -> Tensor:
            if (master := masters.master_of_part(param)) is None:
                return coded_shards.part_of(param)
            if has_gradient(param):
                grads[id(master)] = _gradient(optimizer, stash, param)
            return master

        partial = with_stand_ins(optimizer, coder, stand_in)
        _give_gradients(stash, grads)
        return partial


ON_MASTERS = OnMasters()


def _gradient(optimizer: Any, stash: Stash, shard: Any) -> Tensor:
    if not coded_shards.are_alike(shard.grad, shard):
        name = stash.neighbours.names.get(id(shard), "a shard")
        raise RuntimeError(
            f"{base_class(optimizer).__name__}.step: the gradient of {name!r} is laid out as "
            f"{getattr(shard.grad, 'placements', None)}, the parameter as {shard.placements}, and "
            "master_weights='stochastic' steps what is here of both: give it grad.redistribute(placements="
            "param.placements)"
        )
    return local(shard.grad)


def _give_gradients(stash: Stash, grads: dict[int, Tensor]) -> None:
    """Have these wait for their masters; FP32 ones where none can, or where others wait that are to be multiplied."""
    waiting = stash.masters.waiting
    if waiting is not None and not waiting:
        waiting.hold(grads)
        return
    for part in stash.masters.parts.values():
        if (grad := grads.get(id(part.master))) is not None:
            set_own_grad(part.master, grad.float())


def _take_gradients(stash: Stash) -> None:
    """Forget them: the shards have them."""
    for part in stash.masters.parts.values():
        if stash.masters.waiting is not None:
            stash.masters.waiting.drop(part.master)
        set_own_grad(part.master, None)


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer


def is_for(stash: Stash) -> bool:
    """Whether the optimizer of this stash has shards that are rounded, or may come to have some."""
    return stash.master_form is not None and bool(stash.neighbours.sharded or stash.masters.parts)


def enter(optimizer: Any, stash: Stash) -> None:
    """Have the state of an optimizer of rounded shards kept for their parts; of a copy make these anew."""
    if (form := stash.master_form) is None:
        return
    for group in optimizer.param_groups:
        if any(map(_is_low_shard, group["params"])):
            stash.masters.attach(optimizer, group, form=form)
    if getattr(type(optimizer), "strategy", None) is ON_MASTERS and stash.neighbours.coder is None:
        coded_steps.keep_state(optimizer, stash, InFp32)


def overrides(base: Any) -> dict[str, Any]:
    """The methods of optimizers of the class `base` with rounded shards."""

    @wraps(base.load_state_dict)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        stash = stash_of(self)
        if stash is None:
            base.load_state_dict(self, state_dict)
            return
        try:
            stash.masters.exchange(self, shards=False)  # torch casts the state to the type of the parameter
            base.load_state_dict(self, state_dict)
        finally:
            stash.masters.exchange(self, shards=True)
        stash.neighbours.coder.adopt(self, list(self.state), is_lent=True)

    return coded_steps.overrides(base) | {"strategy": ON_MASTERS, "load_state_dict": load_state_dict}
