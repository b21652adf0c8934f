"""Decides whether a step is skipped after an overflow, and names the parameters whose gradients overflowed.

The backward passes before a step record the overflow flag (`unscale.py`) and lower the scale (`loss_scaler.py`). `Step`
calls `decide`: either the host calls or skips the optimizer's own step, or the optimizer gets the flag and skips on the
device. Under DDP all ranks decide alike, because gradients are averaged before they are checked. Other reductions need
`initialize(process_group=)`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters import on_host
from amp_patch.masters.grad_field import with_gradient
from amp_patch.masters.gradients import held
from amp_patch.masters.masters import PLAIN_TYPES, has_gradient
from amp_patch.policy import STOCHASTIC
from amp_patch.support import device_sync, distributed
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.training import joints
from amp_patch.training.joints import Optimizer
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import DeviceSkip, Stash, has_unscaled, known_stash, overflowed, stash_of


def decide(optimizer: Optimizer, stash: Stash, is_capturing: bool, may_skip: bool) -> tuple[bool, Tensor | None]:
    """Decide whether the coming step is skipped, or leave that to the optimizer on the device.

    If the optimizer can skip on the device (`may_skip`, from `may_skip_on_device`), the result has the flag for it.
    Otherwise the host reads the flag, which costs one sync if the gradients are checked. The host also reads it in the
    step after a skip: then the message about several skips in a row can name the parameters. If weights are rounded
    stochastically, the host always reads it: the random bits depend on the count of steps, skipped ones excluded.

    Returns:
        (skipped, flag). `skipped`: whether the host skips the step. `flag`: the overflow flag that the optimizer reads
        on the device, FP32, shape []; None if the host has decided.

    Raises:
        RuntimeError: a CUDA graph is being captured, where the host cannot read, and the optimizer cannot skip on the
            device.
    """
    on_device = may_skip and (is_capturing or not (stash.last_skipped or stash.policy.master_weights == STOCHASTIC))
    if on_device and _knows_of_each(optimizer, stash):
        if len(stash.found) == 1:  # nearly always; without a launch
            flags = stash.found[0][1].reshape(1)
            overflow = flags[0]
        else:
            flags = torch.stack([found_inf.reshape(()) for _, found_inf in stash.found])
            overflow = flags.amax()
        if not is_capturing:
            stash.device_skips.append(
                DeviceSkip([s for s, _ in stash.found], device_sync.DeviceNumbers(flags), overflow)
            )
        return False, overflow
    if is_capturing and any(device_sync.waits(found_inf.device) for _, found_inf in stash.found):
        _refuse_in_capture(optimizer, may_skip)
    scalers = read_found(stash) if stash.found else []
    if not (stash.found or stash.bodies or stash.unscaled):
        joints.tell(joints.no_body, optimizer, stash)
    if stash.device_skips:
        stash.collect_device_skips(wait=True)
    stash.last_skipped = bool(scalers)
    for scaler in scalers:
        scaler.skipped(lambda: culprits(optimizer))
    return bool(scalers), None


def drop_overflowed(optimizer: Optimizer, stash: Stash) -> None:
    """Drop the gradients of an optimizer that leaves its training, if they overflowed since its last step. May sync.

    Without this, the optimizer's own step would use them. If no gradient overflowed, all gradients stay.
    """
    scalers = read_found(stash)
    for scaler in scalers:
        scaler.skipped(lambda: culprits(optimizer))
    for group in optimizer.param_groups if scalers else ():
        for master in group["params"]:
            master.grad = None


def _refuse_in_capture(optimizer: Optimizer, may_skip: bool) -> None:
    """Raise RuntimeError with the way out: during a capture of a CUDA graph the host cannot read an overflow flag.

    `may_skip`: whether the optimizer can skip on the device. If so, it only cannot skip this step, because the step is
    the first of a parameter.
    """
    name = base_class(optimizer).__name__
    if may_skip:
        way_out = "let it take a step that is not skipped, of all its parameters, before the capture"
    else:
        way_out = (
            "choose one that skips on the device, and all parameters on one: torch's with fused=True, capturable=True, "
            "or FusedSGD"
        )
    raise RuntimeError(
        f"{name}.step: a CUDA graph is being captured, in which the host cannot ask whether a gradient overflowed, and "
        f"this {name} cannot skip a step by itself; {way_out}"
    )


def culprits(optimizer: Optimizer) -> str:
    """Return a text with the names of the parameters whose gradients are not finite, at most eight. Syncs."""
    stash = known_stash(optimizer)
    lines = []
    sharded = False
    for name, _, record in stash.named(optimizer.param_groups):
        if record.master.grad is None:
            continue
        sharded = sharded or distributed.is_dtensor(record.master.grad)
        grad = held(record.master.grad)  # this rank's shard: others may not get here, and a collective would hang
        if not bool(torch.isfinite(grad).all()):
            lines.append(f"{name} ({'NaN' if bool(torch.isnan(grad).any()) else 'Inf'})")
    shown = ", ".join(lines[:8]) or f"no gradient {'in the shards of this process' if sharded else 'any more'}"
    return shown + (f" and {len(lines) - 8} more" if len(lines) > 8 else "")


def read_found(stash: Stash) -> list[LossScaler]:
    """Return the scalers whose losses overflowed since the last step; call `stepped` of all other scalers. Syncs."""
    if on_host.used:
        on_host.arrive()
    flags = [found_inf for _, found_inf in stash.found]
    if len(flags) > 1:  # one sync for all
        flags = torch.stack([found_inf.to(flags[0].device) for found_inf in flags]).tolist()
    return overflowed([scaler for scaler, _ in stash.found], list(map(float, flags)))


def _knows_of_each(optimizer: Optimizer, stash: Stash) -> bool:
    """Tell whether, as far as the host knows, each parameter with a gradient has taken a step before.

    The host tells torch's fused SGD that a step is the first, and the kernel then initializes the momentum. If the
    device skipped that step, the host would still treat the momentum as initialized.
    """
    get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
    return all(
        type(record.master) in PLAIN_TYPES and record.entries == len(get(record.master, ()))
        for record in stash.masters.of_groups(optimizer.param_groups).records
        if has_gradient(record.master)
    )


def may_skip_on_device(optimizer: Optimizer, stash: Stash) -> bool:
    """Tell whether the optimizer can skip on the device, and all overflow flags are on one asynchronous device.

    If so, the optimizer gets the flag as torch.amp.GradScaler passes it, and the host reads the outcome later.
    Otherwise the host reads the flags before the step. If masters are on the host, the host steps, and reads the flags.
    """
    if stash.masters.links.on_host:
        return False
    able = getattr(optimizer, "skips_on_device", None)
    if able is None:
        able = supports_scaling(optimizer)
    devices = {found_inf.device for _, found_inf in stash.found} if able else set()
    return len(devices) == 1 and device_sync.waits(devices.pop())


def note_stepped(optimizer: Optimizer, stash: Stash) -> None:
    """Store for each stepped master the number of its state entries: `_knows_of_each` finds by it that it stepped."""
    get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
    for record in stash.masters.of_groups(optimizer.param_groups).records:
        if has_gradient(record.master):
            record.entries = len(get(record.master, ()))


_SCALERS_FILE = torch.amp.GradScaler.step.__code__.co_filename
SCALING = "_step_supports_amp_scaling"


def supports_scaling(optimizer: Any) -> Any:
    """Return whether the optimizer's own step unscales, and skips after an overflow, as torch's fused optimizers say.

    The inner optimizer of a ZeroRedundancyOptimizer has a stash, but no generated class.
    """
    given = vars(optimizer).get(SCALING)
    if given is None:
        given = getattr(super(Generated, optimizer) if isinstance(optimizer, Generated) else optimizer, SCALING, False)
    return given


def read_by_scaler(optimizer: Optimizer) -> Any:
    """Return `supports_scaling(optimizer)`, False for masters on the host: `GradScaler.step` reads it before all else.

    Raise if the GradScaler would unscale gradients that `scale_loss` has unscaled, or would leave gradients on a cast
    model's weights, where the step on the masters does not find them.
    """
    asking = sys._getframe(1)
    if asking.f_code.co_filename == _SCALERS_FILE:
        _check_scaler(optimizer, asking.f_locals.get("self"))
    if (stash := stash_of(optimizer)) is not None and stash.masters.links.on_host:
        return False  # torch's fused kernels would read the copy of a flag that is on its way to the host
    return supports_scaling(optimizer)


def _check_scaler(optimizer: Optimizer, scaler: object) -> None:
    """Raise if torch's own `scaler.step(optimizer)` would unscale gradients twice, or not move them to masters.

    Return if `scaler` is of a class of amp_patch, or if the optimizer is in no training.
    """
    stash = stash_of(optimizer)
    if stash is None or not stash.enabled or any(c.__module__.startswith("amp_patch") for c in type(scaler).__mro__):
        return
    name = base_class(optimizer).__name__
    if stash.pending is not None or has_unscaled(stash):
        if stash.scales_loss:
            raise RuntimeError(
                f"GradScaler.step: the gradients of this {name} came through amp.scale_loss, which scales the loss and "
                "unscales them, so that the loss is scaled twice; leave the GradScaler out: "
                "`scaled_loss.backward()` and `optimizer.step()`"
            )
    elif with_gradient(stash.masters.links.params):
        raise RuntimeError(
            f"GradScaler.step: the gradients of this {name} are on the {stash.policy.opt_level} model's low-precision "
            "parameters, and torch's GradScaler does not bring them to the FP32 masters; use amp.GradScaler() in its "
            f"place, or amp.scale_loss without a GradScaler: write `with amp.scale_loss(loss, "
            "optimizer) as scaled_loss: scaled_loss.backward()`"
        )
