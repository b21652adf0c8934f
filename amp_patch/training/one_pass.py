"""The strategy of optimizers that we know: unscale, clip, moments, master, the model's weight in one pass.

The state is torch's own, so that an optimizer may go from this way to torch's and back at any step. What the kernels do
not take (sparse gradients, capturable=True, a state that somebody has replaced) goes the optimizer's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters import split_master
from amp_patch.masters.half_gradients import can_wait
from amp_patch.masters.masters import LinkList, add_gradients, publish_written, settle
from amp_patch.support.blocks import without_grad
from amp_patch.training.known_optimizers import KERNELS, Group, NotKnown, Part, counts, kernel_of, version_of
from amp_patch.training.stash import Stash
from amp_patch.training.step import Plain, Step, Whole

_NUMBERS = ("weight_decay", "momentum", "dampening", "eps")  # settings that the kernels do not read from the device


def knows(optimizer: Any) -> bool:
    """Whether steps of `optimizer` can be made here: exactly a class of the table, and the extension is there."""
    return kernel_of(optimizer) is not None and can_wait()


def suits_class(base: Any) -> bool:
    """Whether `base` is exactly a class of the table, whose `step` nobody has replaced."""
    return base in KERNELS and is_untouched(base)


def is_untouched(base: Any) -> bool:
    """Whether `step` of the class is what torch, or we, have written: somebody may have put another in its place."""
    layers = [base.step]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(inner)
    modules = [getattr(layer, "__globals__", {}).get("__name__", "") for layer in layers]
    return all(module.partition(".")[0] in ("torch", "amp_patch") for module in modules)


class InOnePass(Whole):
    """Unscale, clip, moments, master, the model's weight: in one pass over the memory."""

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        # With the backend "torch" torch's own kernels are nearer to torch's numbers.
        return not given and stash.masters.waiting is not None and multi_tensor.backend() != "torch"

    @without_grad
    def run(self, step: Step, plain: Plain) -> None:
        optimizer, stash = step.optimizer, step.stash
        publish_written(step.links)
        try:
            parts = list(_parts(optimizer, stash))
        except NotKnown:
            super().run(step, plain)
            return
        step.writes = True
        counted = counts(optimizer) if parts else []
        try:
            _step_all(step, parts, counted, plain)
        except BaseException:
            if any(part.is_made for part in parts) and not any(part.is_left for part in parts):
                _step_all(step, parts, counted, plain)  # all or nothing, also where somebody interrupts
            raise


IN_ONE_PASS = InOnePass()


def _step_all(step: Step, parts: list[Part], counted: list[int], plain: Plain) -> None:
    """Step those parts that have not been: in one pass, or the optimizer's own way, which counts by itself."""
    optimizer = step.optimizer
    held = split_master.release(master for part in parts for master in part.masters)
    try:
        left = [part for part in parts if not _run(step, part)]
    finally:
        for master in held:  # a graph may have saved a view of it
            torch.autograd.graph.increment_version(master)
        split_master.follow(held)
    stepped = {id(link.master) for part in parts if part.is_made for _, link in part.links}
    if len(stepped) < len(step.links):
        settle(step.links.without(stepped))
    if not left:
        for group, count in zip(optimizer.param_groups, counted, strict=False):
            group["step"] = count
        done(step)
        return
    step.unpublished = LinkList(pair for part in left for pair in part.links)
    _step_with_torch(optimizer, left, plain)
    done(step, step.links.without(stepped))


def done(step: Step, left: LinkList | None = None) -> None:
    """Note that the strategy has made the step, and brought all masters and weights in step but those of `left`."""
    # Set `stepped` first: after an interrupt in here `note` has erased the other sign of a finished step.
    step.stepped = True
    links = step.links if left is None else step.links.without(set(map(id, left.masters)))
    links.watch.note()


def _run(step: Step, part: Part) -> bool:
    """Step the parameters of `part`, if they have not been; returns whether the kernels took them."""
    optimizer, flag = step.optimizer, step.overflow
    kernel = kernel_of(optimizer)
    part.refused = part.refused or kernel is None or not _is_ordinary(optimizer, part.group, flag)
    if part.refused or kernel is None:
        return False
    if not part.is_made:
        try:
            with torch._C.DisableTorchFunctionSubclass():  # split masters are asked for anything but their value
                kernel(optimizer, part, None if flag is None else flag.to(part.grads[0].device))
        except (NotKnown, TypeError, ValueError):  # before the first write
            part.refused = True
            return False
    return True


def _is_ordinary(optimizer: Any, group: Group, flag: Tensor | None) -> bool:
    """Whether the group has no setting that the kernels do not know."""
    if group.get("capturable") or group.get("differentiable") or getattr(optimizer, "grad_scale", None) is not None:
        return False
    if flag is None and getattr(optimizer, "found_inf", None) is not None:  # a GradScaler's
        return False
    settings = (*map(group.get, _NUMBERS), *group.get("betas", ()))
    return not [setting for setting in settings if isinstance(setting, Tensor)]


def _parts(optimizer: Any, stash: Stash) -> Iterator[Part]:
    """The parameters that have a gradient: per group and device those whose gradient waits, with a master, without.

    Raises:
        NotKnown: a gradient is sparse.
    """
    waiting = stash.masters.waiting
    if waiting:
        add_gradients(stash.masters.links.masters)
    half = {} if waiting is None else waiting.grads
    factors = [] if waiting is None else waiting.factors
    link_of = stash.masters.by_master
    for group in optimizer.param_groups:
        keys = list(map(id, group["params"]))
        if keys and all(map(half.__contains__, keys)):  # nearly always
            grads, links = [half[key] for key in keys], [link_of[key] for key in keys]
            yield from _by_age(optimizer, Part(group, factors, list(group["params"]), grads, links))
            continue
        parts: dict[tuple[Any, ...], Part] = {}  # one for each call of a kernel
        for master in group["params"]:
            linked = link_of.get(id(master))
            waits = linked is not None and id(master) in half
            grad = half[id(master)] if waits else master.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise NotKnown  # torch may refuse it, before any parameter is stepped
            kind = (waits, linked is None, grad.device)
            part = parts.setdefault(kind, Part(group, factors if waits else ()))
            part.masters.append(master)
            part.grads.append(grad)
            if linked is not None:
                part.links.append(linked)
        for part in parts.values():
            yield from _by_age(optimizer, part)


def _by_age(optimizer: Any, part: Part) -> Iterator[Part]:
    """The part; SGD's in two, since a first momentum is made otherwise."""
    part.version = version_of(part.masters[0])
    if not part.group.get("momentum"):
        yield part
        return
    fresh = [optimizer.state[master].get("momentum_buffer") is None for master in part.masters]
    for first_run in set(fresh):
        chosen = [is_fresh is first_run for is_fresh in fresh]
        masters, grads = list(compress(part.masters, chosen)), list(compress(part.grads, chosen))
        links = list(compress(part.links, chosen))
        yield Part(part.group, part.factors, masters, grads, links, first_run=first_run, version=version_of(masters[0]))


def _step_with_torch(optimizer: Any, parts: list[Part], plain: Plain) -> None:
    """Step the parameters of `parts` as the optimizer does it by itself."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [m for part in parts if part.group is group for m in part.masters]
        for part in parts:
            part.is_left = True
            split_master.materialize(part.masters)
        plain(optimizer)
        for part in parts:
            for master in part.masters:  # torch's fused kernels leave versions as they are
                torch.autograd.graph.increment_version(master)
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
