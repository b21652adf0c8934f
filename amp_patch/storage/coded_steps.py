"""The step strategy of optimizers whose state is stored as codes (coded_state.py).

The one-pass kernels read and write codes directly. Any other optimizer runs its own step in portions: the states of one
portion at a time are decoded to FP32. If neither is possible, for example in a step with a closure, all states are
decoded to FP32 for the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.masters import has_gradient
from amp_patch.model.keep_fp32 import params_matching
from amp_patch.multi_tensor import backends
from amp_patch.optimizers.adam import FusedAdam
from amp_patch.policy import Policy
from amp_patch.storage.coded_state import Coded
from amp_patch.storage.coder import Coder, coded_entries, in_fp32
from amp_patch.support import device_sync, tree
from amp_patch.support.compiled import wraps
from amp_patch.support.distributed import is_dtensor, is_zero
from amp_patch.support.generated_class import base_class
from amp_patch.supported import reason
from amp_patch.training.joints import Strategy
from amp_patch.training.stash import Neighbours, Stash, known_stash, stash_of
from amp_patch.training.step import WHOLE, Plain, Step
from amp_patch.ways import one_pass, per_parameter, portions
from amp_patch.ways.batch import Batch

coders = weakref.WeakKeyDictionary[Neighbours, Coder]()  # by the stash of the optimizer whose state they store


# ----------------------------------------------------------------------------------------------------------------------
# Which optimizers


def check(optimizer: Any, policy: Policy) -> None:
    """Raise if `policy` asks for 8-bit state and the (innermost) optimizer's class or settings do not allow it."""
    if policy.optimizer_state is None:
        return
    wanted = f"initialize: optimizer_state={policy.optimizer_state!r}"
    name = base_class(optimizer).__name__
    if is_zero(optimizer):
        raise ValueError(f"{wanted} is not for a ZeroRedundancyOptimizer: {reason('8bit', 'ZeRO')}")
    if any(is_dtensor(param) for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(f"{wanted} is not for sharded parameters: {reason('8bit', 'FSDP2')}")
    if (against := reason_against(optimizer)) is not None:
        raise ValueError(
            f"{wanted} is not for this {name}, whose step takes the state of all parameters in FP32 at once: "
            f"{against}; leave optimizer_state at None, or use an optimizer of torch.optim without that"
        )


def reason_against(optimizer: Any) -> str | None:
    """Return why the optimizer's step needs all state in FP32 at once, so that codes save no memory; else None."""
    if one_pass.IN_ONE_PASS.suits_class(base_class(optimizer)):
        for group in optimizer.param_groups:
            for setting in ("capturable", "differentiable"):
                if group.get(setting):
                    return f"{setting}=True"
        return None
    return portions.reason_against(optimizer)


# ----------------------------------------------------------------------------------------------------------------------
# The step


@dataclass
class CodedBatch(Batch):
    """A batch whose kernel takes states as codes.

    Attributes:
        scales: name of the state tensor -> for each master the scales of its codes, or an empty tensor if it is FP32.
    """

    scales: dict[str, list[Tensor]] = field(default_factory=dict)

    def getter(self, name: str) -> Callable[[Any], Any]:  # type: ignore[override]
        """Return a function that returns a state's tensor `name`, as codes if it has codes.

        Each call appends the scales of the codes, or an empty tensor, to `self.scales[name]`.
        """
        scales: list[Tensor] = []
        self.scales[name] = scales
        nothing = torch.empty(0, dtype=torch.float32, device=self.masters[0].device)

        def get(state: Any) -> Any:
            value = state[name]
            scales.append(value.scales if type(value) is Coded else nothing)
            return value.codes if type(value) is Coded else value

        return get

    def made(self, optimizer: Any, name: str) -> list[Tensor]:
        """Return the state tensor `name` of each master; missing ones are made, and encoded, one at a time."""
        states = [optimizer.state[master] for master in self.masters]
        for master, state in zip(self.masters, states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(master, requires_grad=False)
                coder_of(optimizer).encode(optimizer, [master], in_place=False)
        return list(map(self.getter(name), states))

    averages = made

    @property
    def extra(self) -> dict[str, Any]:
        names = ("momentum_buffer",) if "momentum_buffer" in self.scales else ("exp_avg", "exp_avg_sq")
        return {"scales": [self.scales[name] for name in names if name in self.scales]}


class CodedOnePass(one_pass.InOnePass):
    """A step in one pass whose kernels read and write codes instead of FP32 state."""

    batch = CodedBatch

    def run(self, step: Step, plain: Plain) -> Any:
        if not isinstance(step.optimizer, FusedAdam):
            with suppress(one_pass.NotKnown), torch._C.DisableTorchFunctionSubclass():
                _make_states(step.optimizer)
        return super().run(step, plain)


def _make_states(optimizer: Any) -> None:
    """Create missing Adam states and encode them one parameter at a time, so that they are never all in FP32."""
    get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
    for group in optimizer.param_groups:
        for master in group["params"] if "betas" in group else ():
            if not get(master) and has_gradient(master):
                one_pass.make_state(optimizer, group, [master])
                coder_of(optimizer).encode(optimizer, [master], in_place=False)


class CodedPortions(portions.InPortions):
    """Steps in portions, on any device: only the states of one portion are FP32 at a time."""

    devices = ("cpu", "cuda")


CODED_ONE_PASS, CODED_PORTIONS = CodedOnePass(), CodedPortions()


class InCodes(Strategy):
    """A step on states stored as codes: in one pass, in portions, or with all states in FP32."""

    waits = False

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        return True

    def run(self, step: Step, plain: Plain) -> Any:
        optimizer = step.optimizer
        coder = coder_of(optimizer)
        if device_sync.is_capturing():
            why = reason("8bit", "CUDA graphs")
            raise RuntimeError(f"a step with optimizer_state='8bit' cannot be captured in a CUDA graph: {why}")

        def decoding(target: Any, *args: Any, **kwargs: Any) -> Any:
            params = [p for group in target.param_groups for p in group["params"] if args or kwargs or has_gradient(p)]
            with coder.in_fp32(target, params):
                return plain(target, *args, **kwargs)

        params = [param for group in optimizer.param_groups for param in group["params"]]
        coder.encode_changed(optimizer, params)
        coder.has_stepped = coder.has_stepped or any(map(has_gradient, params))
        result = _strategy(step).run(step, decoding)
        if step.stash.step is step:  # not in gradient release, which steps only some parameters here
            coder.report(optimizer)
        return result


IN_CODES = InCodes()


def _strategy(step: Step) -> Strategy:
    optimizer, stash = step.optimizer, step.stash
    if step.given:
        return WHOLE
    params = [param for group in optimizer.param_groups for param in group["params"]]
    devices = () if backends.active is None else backends.active.devices
    in_kernels = all(param.device.type in devices and not is_dtensor(param) for param in params)
    if one_pass.kernel_of(optimizer) is not None and in_kernels:
        return CODED_ONE_PASS
    if portions.is_sound(optimizer) and (stash.masters.waiting is None or stash.unobserved):
        return CODED_PORTIONS
    return WHOLE


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer


def coder_of(optimizer: Any) -> Coder:
    """Return the coder that stores the state of `optimizer`."""
    return coders[known_stash(optimizer).neighbours]


def enter(optimizer: Any, stash: Stash) -> None:
    """If the policy asks for state in eight bits, attach a `Coder` to `optimizer`."""
    if stash.policy.optimizer_state is not None and stash.neighbours not in coders:
        kind = base_class(optimizer)
        registered = per_parameter.registration_of(kind)
        coders[stash.neighbours] = Coder(kind.__name__, () if registered is None else registered.fp32_state)
        stash.neighbours.before_backward.append(_encode_pending)


def named_params(named: Any, models: list[nn.Module], *_: Any) -> list[Tensor]:
    """Return the parameters of `models` that `named`, the argument `fp32_state` of `initialize`, selects."""
    return params_matching(models, () if named is None else named, "fp32_state")


def leave_in_fp32(targets: Sequence[Any], params: list[Tensor]) -> None:
    """List in each optimizer's stash the parameters of `params`, whose state stays FP32 (`Stash.fp32_state`).
    A stash lists the parameters that its optimizer holds, and the parameters that no optimizer holds yet: a later
    `add_param_group` may add them to any of the optimizers.
    """
    stashes = list(map(known_stash, targets))
    held = [{p for p, _ in s.masters.pairs(o.param_groups)} for o, s in zip(targets, stashes, strict=True)]
    for own, stash in zip(held, stashes, strict=True):
        stash.fp32_state = [p for p in params if p in own or not any(p in other for other in held)]


def _encode_pending(optimizer: Any, stash: Stash) -> None:
    """Encode FP32 state from before `initialize` or from a checkpoint: in a backward it would be in the way."""
    coder = coders[stash.neighbours]
    if coder.is_pending:
        coder.encode(optimizer, optimizer.state, in_place=True)
        coder.is_pending = False


def overrides(base: Any) -> dict[str, Any]:
    """Return {name: value} of what a generated class over `base` gets if state is codes: methods and the strategy."""

    @wraps(base.state_dict)
    def state_dict(self: Any) -> dict[str, Any]:
        found: dict[str, Any] = base.state_dict(self)
        return {**found, "state": tree.map_tensors(in_fp32, found["state"])}

    @wraps(base.load_state_dict)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        base.load_state_dict(self, state_dict)
        if (stash := stash_of(self)) is not None:
            for param, state in list(self.state.items()):  # else the checkpoint's own tensors would become codes
                self.state[param] = tree.map_tensors(Tensor.detach, state)
            coder = coders[stash.neighbours]
            coder.is_pending, coder.seen = True, ([], [])

    return {"state_dict": state_dict, "load_state_dict": load_state_dict, "strategy": IN_CODES}


def make_whole(optimizer: Any, stash: Stash) -> None:
    """Decode the state of `optimizer` into FP32 tensors."""
    if stash.neighbours in coders:
        for state, name, value in coded_entries(optimizer.state.values()):
            state[name] = in_fp32(value)
