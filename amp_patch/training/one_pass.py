"""The strategy of optimizers that we know: unscale, clip, moments, master, the model's weight in one pass.

The state is torch's own, so that an optimizer may go from this way to torch's and back at any step. What the kernels do
not take (sparse gradients, capturable=True, a state that somebody has replaced) goes the optimizer's own way.
"""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters.half_gradients import can_wait
from amp_patch.masters.masters import (
    LinkList,
    add_gradients,
    materialize,
    publish_written,
    settle,
    without_materialized,
)
from amp_patch.multi_tensor import backends
from amp_patch.support.blocks import without_grad
from amp_patch.training.known_optimizers import (
    KERNELS,
    Batch,
    BatchState,
    Group,
    NotKnown,
    counts,
    kernel_of,
)
from amp_patch.training.stash import Stash
from amp_patch.training.step import Plain, Step, Whole, is_untouched

_NUMBERS = ("weight_decay", "momentum", "dampening", "eps")  # settings that the kernels do not read from the device


def knows(optimizer: Any) -> bool:
    """Whether steps of `optimizer` can be made here: exactly a class of the table, and the extension is there."""
    return kernel_of(optimizer) is not None and can_wait()


def suits_class(base: Any) -> bool:
    """Whether `base` is exactly a class of the table, whose `step` nobody has replaced."""
    return base in KERNELS and is_untouched(base.step)


class InOnePass(Whole):
    """Unscale, clip, moments, master, the model's weight: in one pass over the memory."""

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        # With the backend "torch" torch's own kernels are nearer to torch's numbers.
        return not given and stash.masters.waiting is not None and backends.active is not None

    @without_grad
    def run(self, step: Step, plain: Plain) -> None:
        optimizer = step.optimizer
        if step.links.params:
            publish_written(step.links)
        try:
            batches = _batches(optimizer, step.stash)
        except NotKnown:
            super().run(step, plain)
            return
        step.writes = True
        counted = counts(optimizer) if batches else []
        try:
            _step_all(step, batches, counted, plain)
        except BaseException:
            is_left = any(batch.state is BatchState.LEFT for batch in batches)
            if any(batch.is_stepped for batch in batches) and not is_left:
                _step_all(step, batches, counted, plain)  # all or nothing, also where somebody interrupts
            raise


IN_ONE_PASS = InOnePass()


def _step_all(step: Step, batches: list[Batch], counted: list[int], plain: Plain) -> None:
    """Step those batches that have not been: in one pass, or the optimizer's own way, which counts by itself."""
    optimizer, links = step.optimizer, step.links
    masters = (master for batch in batches for master in batch.masters)
    left = without_materialized(masters, partial(_run_kernels, step, batches))
    others = None
    if left or sum([len(batch.weights) for batch in batches]) < len(links.params):
        others = links.without({id(m) for b in batches if b.is_stepped and b.weights for m in b.masters})
        settle(others)
    if not left:
        for group, count in zip(optimizer.param_groups, counted, strict=False):
            group["step"] = count
        done(step)
        return
    by_master = step.stash.masters.by_master
    step.unpublished = LinkList(by_master[id(m)] for batch in left if batch.weights for m in batch.masters)
    _step_with_torch(optimizer, left, plain)
    done(step, others)


def done(step: Step, left: LinkList | None = None) -> None:
    """Note that the strategy has made the step, and brought all masters and weights in step but those of `left`."""
    # Set `stepped` first: after an interrupt in here `note` has erased the other sign of a finished step.
    step.stepped = True
    links = step.links if left is None else step.links.without(set(map(id, left.masters)))
    links.watch.note()


def _run_kernels(step: Step, batches: list[Batch]) -> list[Batch]:
    """Step those `batches` that have not been; returns those that the kernels do not take, in which nothing changed."""
    optimizer, flag = step.optimizer, step.overflow
    kernel, left = kernel_of(optimizer), []
    for batch in batches:
        if batch.state is not BatchState.REFUSED and not batch.is_stepped:
            try:
                if kernel is None or not _is_ordinary(optimizer, batch.group, flag):
                    raise NotKnown
                with torch._C.DisableTorchFunctionSubclass():  # split masters are asked for anything but their value
                    kernel(optimizer, batch, None if flag is None else flag.to(batch.grads[0].device))
            except (NotKnown, TypeError, ValueError):  # before the first write
                batch.state = BatchState.REFUSED
        if batch.state is BatchState.REFUSED:
            left.append(batch)
        else:
            batch.state = BatchState.STEPPED
    return left


def _is_ordinary(optimizer: Any, group: Group, flag: Tensor | None) -> bool:
    """Whether the group has no setting that the kernels do not know."""
    if group.get("capturable") or group.get("differentiable") or getattr(optimizer, "grad_scale", None) is not None:
        return False
    if flag is None and getattr(optimizer, "found_inf", None) is not None:  # a GradScaler's
        return False
    settings = (*map(group.get, _NUMBERS), *group.get("betas", ()))
    return not [setting for setting in settings if isinstance(setting, Tensor)]


def _batches(optimizer: Any, stash: Stash) -> list[Batch]:
    """The parameters that have a gradient: per group and device those whose gradient waits, with a master, without.

    Raises:
        NotKnown: a gradient is sparse.
    """
    waiting = stash.masters.waiting
    if waiting:
        add_gradients(stash.masters.links.masters)
    half = {} if waiting is None else waiting.grads
    factors = [] if waiting is None else waiting.factors
    link_of, made = stash.masters.by_master, []
    for group in optimizer.param_groups:
        keys = list(map(id, group["params"]))
        if keys and all(map(half.__contains__, keys)):  # nearly always
            grads, weights = list(map(half.__getitem__, keys)), [link_of[key][0] for key in keys]
            made += _by_age(optimizer, Batch(group, factors, list(group["params"]), grads, weights))
            continue
        batches: dict[tuple[Any, ...], Batch] = {}
        for master in group["params"]:
            linked = link_of.get(id(master))
            waits = linked is not None and id(master) in half
            grad = half[id(master)] if waits else master.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise NotKnown  # torch may refuse it, before any parameter is stepped
            kind = (waits, linked is None, grad.device)
            batch = batches.setdefault(kind, Batch(group, factors if waits else ()))
            batch.masters.append(master)
            batch.grads.append(grad)
            if linked is not None:
                batch.weights.append(linked[0])
        for batch in batches.values():
            made += _by_age(optimizer, batch)
    return made


def _by_age(optimizer: Any, batch: Batch) -> list[Batch]:
    """The batch; SGD's in two, since a first momentum is made otherwise."""
    if not batch.group.get("momentum"):
        return [batch.ready()]
    fresh = [optimizer.state[master].get("momentum_buffer") is None for master in batch.masters]
    made = []
    for first_run in set(fresh):
        chosen = [is_fresh is first_run for is_fresh in fresh]
        masters, grads = list(compress(batch.masters, chosen)), list(compress(batch.grads, chosen))
        weights = list(compress(batch.weights, chosen))
        made.append(Batch(batch.group, batch.factors, masters, grads, weights, first_run=first_run).ready())
    return made


def _step_with_torch(optimizer: Any, batches: list[Batch], plain: Plain) -> None:
    """Step the parameters of `batches` as the optimizer does it by itself."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [m for batch in batches if batch.group is group for m in batch.masters]
        for batch in batches:
            batch.state = BatchState.LEFT
            materialize(batch.masters)
        plain(optimizer)
        for batch in batches:
            for master in batch.masters:  # torch's fused kernels leave versions as they are
                torch.autograd.graph.increment_version(master)
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
