"""Gradient release: backward steps each parameter once its gradient is complete, and frees the gradient.

The gradients of the whole model never exist at once, which saves 2 bytes per parameter at O5 and 4 at O4. One call of
the step costs the same for a bias as for a large weight. Therefore small parameters are queued until they have
`TOGETHER` elements, or the backward ends, and are stepped in one call.

The `optimizer.step()` after backward finds no gradients left. It ends the iteration: it calls the hooks, and schedulers
count it. The results equal a step after backward, bit for bit, if the optimizer steps each parameter independently and
no code needs several gradients, or one gradient twice. Other cases are refused by name.

Gradients are released only in the body of a `scale_loss`, and only if its loss reaches the parameter. Gradients of any
other backward are left to `optimizer.step()`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from amp_patch import supported
from amp_patch.casts import regions
from amp_patch.masters import clipping
from amp_patch.masters.grad_field import drop_gradients, own_grad
from amp_patch.masters.gradients import gather
from amp_patch.masters.held_gradients import HalfGradients
from amp_patch.masters.masters import LinkList, has_gradient, link_of, links_of, publish
from amp_patch.masters.record import Record
from amp_patch.policy import Policy, boolean
from amp_patch.support import device_sync
from amp_patch.support.blocks import without_grad
from amp_patch.support.distributed import has_other_processes, is_dtensor, is_zero
from amp_patch.support.generated_class import base_class
from amp_patch.support.interrupts import whole
from amp_patch.support.patches import is_untouched
from amp_patch.support.words import of_class
from amp_patch.training.joints import Strategy
from amp_patch.training.stash import Body, Stash, known_stash, stash_of
from amp_patch.training.step import Plain, Step, plain_step, suiting
from amp_patch.ways import portions
from amp_patch.ways.partial_step import PartialStep

_WHOLE_WITH = ("capturable", "differentiable")
_BACKWARD_OF_FUNCTION = BackwardCFunction.apply.__code__

# Parameters are queued until they have this many elements. So the queue has fewer gradient elements than this, apart
# from the parameter that fills it.
TOGETHER = 2**16

_releases: weakref.WeakSet[_Release] = weakref.WeakSet()  # all that have not ended; an optimizer's may outlive it


def check(wanted: Any, _: Any, optimizers: Sequence[Any], targets: Sequence[Any], policy: Policy) -> bool:
    """Return whether `wanted` asks for steps in backward; raise if an optimizer cannot step there.

    Args:
        wanted: the argument `gradient_release` of `initialize`: True, False, None, or one of these as a string.
        optimizers: the optimizers that `initialize` was called with, with their wrappers.
        targets: the innermost optimizer of each of `optimizers`.

    Raises:
        ValueError: an optimizer, a parameter or the policy does not allow steps in backward.
        TypeError: another value of `wanted`.
    """
    if not boolean("gradient_release", wanted):
        return False
    if policy.changes_nothing or policy.checks_gradients:
        why = "is the script as it is" if policy.changes_nothing else "checks gradients for overflow before a step"
        raise ValueError(
            f"initialize: gradient_release=True contradicts opt_level {policy.opt_level!r} with loss_scale="
            f"{policy.loss_scale} and skip_nonfinite={policy.skip_nonfinite}, which {why}; use O4 or O5 without these"
        )
    held: set[Tensor] = set()
    for optimizer, target in zip(optimizers, targets, strict=True):
        name = type(target).__name__
        if optimizer is not target:
            raise ValueError(
                f"initialize: gradient_release=True is not for {of_class(optimizer)} around another optimizer: "
                + supported.reason("gradient_release", "wrappers")
            )
        params = [param for group in target.param_groups for param in group["params"]]
        if any(map(is_dtensor, params)) or is_zero(target) or has_other_processes():
            why = supported.reason("gradient_release", "DDP")
            raise ValueError(f"initialize: gradient_release=True is not for DDP, ZeRO and FSDP2: {why}")
        if not portions.is_torchs(base_class(target)):
            why = supported.reason("gradient_release", "registered classes")
            raise ValueError(f"initialize: gradient_release=True is not for this {name}: {why}")
        if (reason := portions.reason_against(target, _WHOLE_WITH)) is not None:
            raise ValueError(
                f"initialize: gradient_release=True is not for this {name}, which cannot step one parameter without "
                f"the others: {reason}; leave gradient_release out"
            )
        if not held.isdisjoint(params):
            raise ValueError(
                "initialize: gradient_release=True is not for parameters of two optimizers, which both want the "
                "gradient; leave it out"
            )
        held.update(params)
    return True


def _supersede(targets: Sequence[Any]) -> None:
    """End the releases of earlier optimizers, alive or freed, whose parameters `targets` hold."""
    held = {param for target in targets for param in known_stash(target).masters.of_groups(target.param_groups).params}
    for release in list(_releases):
        if not held.isdisjoint(release.alive()):
            release.remove()


def enter(targets: Sequence[Any], wanted: bool) -> None:
    """End earlier releases of the parameters of `targets`. If `wanted`, register hooks that step them in backward."""
    _supersede(targets)
    if not wanted or not targets:
        return
    clipping.install()
    if _refuse_clipping not in clipping.before_clipping:
        clipping.before_clipping.append(_refuse_clipping)
    for optimizer in targets:
        if (masters := known_stash(optimizer).masters).links.on_host:  # they step on the host, when all are there
            masters.frees = True
            continue
        release = _Release(optimizer)
        around = known_stash(optimizer).neighbours
        around.strategy = release
        around.before_backward.append(release.begin)
        around.undo += [optimizer.register_step_post_hook(release.drop).remove, release.remove]


class _Place:
    """What a release notes of one parameter, without a reference to it.

    Attributes:
        group: the index of its group at the beginning of the body; None if it is in no group any more.
        reached: whether its gradient came since the last `step()`.
    """

    __slots__ = ("group", "reached")

    def __init__(self) -> None:
        self.group: int | None = None
        self.reached = False


class _Release(Strategy):
    """Gradient release of one optimizer: its steps in backward, and the strategy of `step()`. `remove` ends it."""

    waits = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._ready: list[tuple[int, Tensor]] = []  # the queue: (index of the group, parameter)
        self._elements = 0  # number of elements in `_ready`
        self._task = -1  # autograd's id of the backward whose end is to call `_step_ready`
        self._handles: list[Any] = []
        self._places: list[tuple[weakref.ref[Tensor], _Place]] = []  # of the parameters that are stepped in backward
        _releases.add(self)
        for param in known_stash(optimizer).masters.of_groups(optimizer.param_groups).distinct_params:
            if param.requires_grad:
                place = _Place()
                hook = functools.partial(self._gradient_is_whole, place)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
                self._places.append((weakref.ref(param), place))

    def alive(self) -> list[Tensor]:
        """Return the parameters that are stepped in backward."""
        return [param for ref, _ in self._places if (param := ref()) is not None]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        _releases.discard(self)
        optimizer = self._optimizer()
        stash = None if optimizer is None else stash_of(optimizer)
        if stash is not None:
            stash.neighbours.strategy = None
            if self.begin in stash.neighbours.before_backward:
                stash.neighbours.before_backward.remove(self.begin)

    def begin(self, optimizer: Any, stash: Stash) -> None:
        """Before a `scale_loss`: save the groups, and raise if the loss would add to gradients already stepped."""
        if reached := sum(place.reached for _, place in self._places):
            raise RuntimeError(
                f"scale_loss: gradient_release=True has stepped {reached} parameters of this "
                f"{base_class(optimizer).__name__} in a backward since its last step(): gradients of several losses, "
                "or micro-batches, cannot add up; call optimizer.step() after each backward, or leave "
                "gradient_release out"
            )
        params = iter(stash.masters.of_groups(optimizer.param_groups).params)
        groups: dict[Any, int] = {
            next(params): index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]
        }
        for ref, place in self._places:
            place.group = groups.get(ref())

    def drop(self, *of_hook: Any) -> None:
        """Forget which parameters this iteration has stepped; called after `step()`, too."""
        self._ready, self._elements = [], 0
        for _, place in self._places:
            place.reached = False

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        return True

    def run(self, step: Step, plain: Plain) -> Any:
        """Step the parameters that no backward has stepped, and sync only their masters with edits by user code.

        A sync of the stepped masters too would cost a pass over all weights.
        """
        reached = links_of(param for ref, place in self._places if place.reached and (param := ref()) is not None)
        step.links = step.links.without({record for record in reached.records if not has_gradient(record.master)})
        kind: Any = type(step.optimizer)
        return suiting(kind.strategy, step, trusted=is_untouched(plain)).run(step, plain)

    @whole
    def _gradient_is_whole(self, place: _Place, param: Tensor) -> None:
        """Queue `param`, whose gradient autograd has just completed; step the queue if it has `TOGETHER` elements."""
        optimizer = self._optimizer()
        stash = None if optimizer is None else stash_of(optimizer)
        if stash is None or (body := stash.neighbours.body()) is None or (grad := own_grad(param)) is None:
            return
        if place.group is None:
            return  # user code has removed the parameter from the groups
        self._refuse(stash, body, param, grad, place)
        place.reached = True
        self._ready.append((place.group, param))
        self._elements += param.numel()
        if self._elements >= TOGETHER or (task := torch._C._current_graph_task_id()) < 0:
            self._step_ready()
        elif task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._step_ready)

    @whole
    def _step_ready(self) -> None:
        optimizer = self._optimizer()
        stash = None if optimizer is None else stash_of(optimizer)
        ready = [(index, param) for index, param in self._ready if own_grad(param) is not None]
        self._ready, self._elements = [], 0
        if ready and optimizer is not None and stash is not None:
            step_some(optimizer, stash, ready)

    def _refuse(self, stash: Stash, body: Body, param: Tensor, grad: Tensor, place: _Place) -> None:
        """Raise, before any write, if the gradient may be incomplete or is not usable for a step."""
        if _is_nested():
            why = (
                "gets a gradient in a backward within backward, which may be a part of its gradient (a checkpoint with "
                "use_reentrant=True): call checkpoint with use_reentrant=False"
            )
        elif place.reached:
            why = "has had a gradient in this backward before, which is stepped already (two passes of one graph)"
        elif stash.step is not None:
            why = f"gets a gradient in a closure of step(): {supported.reason('gradient_release', 'a closure')}"
        elif body.delay_unscale:
            why = "gets a gradient that delay_unscale=True leaves for the next micro-batch to add to"
        elif grad.requires_grad:
            why = "gets a gradient that is part of a graph (create_graph=True)"
        elif grad.layout is not torch.strided:
            why = "gets a sparse gradient"
        elif device_sync.is_capturing():
            cause = supported.reason("gradient_release", "CUDA graphs")
            why = f"gets a gradient in the capture of a CUDA graph: {cause}"
        elif has_other_processes():
            why = "gets a gradient that other processes add theirs to"
        else:
            return
        name = stash.names().get(param, "a parameter")
        raise RuntimeError(
            f"backward: with gradient_release=True {name} {why}; leave gradient_release out of initialize()"
        )


def _is_nested() -> bool:
    """Return whether an autograd.Function's backward started this backward: its gradients may be incomplete."""
    frame = sys._getframe(1)
    while frame.f_code is not _BACKWARD_OF_FUNCTION:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


@without_grad
def step_some(optimizer: Any, stash: Stash, ready: list[tuple[int, Tensor]]) -> None:
    """Step parameters as `optimizer.step` does, and free their gradients. No sync with the device.

    `ready` has (index of the group, parameter) for each parameter to step. All of them have a gradient. After an
    exception each parameter is either stepped, weight and master, or unchanged.
    """
    waiting = stash.masters.waiting
    pairs: list[tuple[Tensor, Tensor]] = []
    linked: list[tuple[Tensor, Record]] = []
    by_group: dict[int, list[Tensor]] = {}
    for index, param in ready:
        if (record := link_of(param)) is not None:
            linked.append((param, record))
        master = param if record is None else record.master
        pairs.append((param, master))
        by_group.setdefault(index, []).append(master)
    partial = PartialStep(optimizer, [(optimizer.param_groups[index], masters) for index, masters in by_group.items()])
    plain = plain_step(base_class(optimizer))
    assert plain is not None
    step = Step(partial.shell, stash)
    step.links = LinkList(linked)
    try:
        if others := _let_wait(linked, waiting):
            gather(others, None)
        with regions.region(None):
            suiting(type(optimizer).strategy, step, trusted=is_untouched(plain)).run(step, plain)
        if step.unpublished is not None:
            publish(step.unpublished)
    finally:
        if waiting is not None:
            waiting.clear([record for _, record in linked])
        drop_gradients([tensor for pair in pairs for tensor in pair])


def _let_wait(linked: list[tuple[Tensor, Record]], waiting: HalfGradients | None) -> list[tuple[Tensor, Tensor]]:
    """Defer the low-precision gradients that can be deferred; return the pairs (param, master) of all others.

    `HalfGradients.take` is not used, because it refuses a gradient that is referenced elsewhere. In a hook autograd
    references each gradient too, but does not write it.
    """
    if waiting is None or waiting:
        return [(param, record.master) for param, record in linked]
    records, grads, others = list[Record](), list[Tensor](), []
    for param, record in linked:
        grad = own_grad(param)
        if grad is not None and grad.dtype is param.dtype and grad.stride() == param.stride():
            records.append(record)
            grads.append(grad)
        else:
            others.append((param, record.master))
    waiting.hold(records, grads)
    return others


def _refuse_clipping(params: list[Tensor]) -> None:
    clipped = set(params)
    for release in _releases:
        released = release.alive()
        if not (clipped.isdisjoint(released) and clipped.isdisjoint(links_of(released).masters)):
            raise RuntimeError(
                "clip_grad: with gradient_release=True parameters are stepped in backward, before all gradients are "
                "there to be clipped; leave gradient_release out of initialize()"
            )
