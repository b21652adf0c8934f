"""Around one step of an optimizer: all gradients unscaled before it, skipped on overflow, published after it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from amp_patch.casts import regions, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.masters import split_master
from amp_patch.masters.master import own_grad
from amp_patch.masters.masters import Linked, has_gradient, publish, reconcile
from amp_patch.model import came
from amp_patch.multi_tensor.bulk import with_gradient
from amp_patch.support import capture
from amp_patch.support.compiled import not_traced
from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import stacklevel
from amp_patch.training import captured, observers
from amp_patch.training.overflow import may_skip_on_device, note_stepped, put_back, skip_if_overflowed
from amp_patch.training.stash import BackwardState, Stash, sharing, stash_of
from amp_patch.training.unscale import unscale_pending


class ClosureAlreadyRun:
    """A closure whose work was done before the step that it is given to: gives what that returned."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self) -> Any:
        return self.result


@not_traced
def before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Pre-hook of `step`; `args` begins with the optimizer. Returns other arguments, or None to keep these.

    Where gradients are checked, the host asks the device whether one was not finite, which is one sync. There is none
    with an optimizer that skips on the device, and such a step can be captured in a CUDA graph.
    """
    stash = stash_of(optimizer)
    if stash is None or not stash.enabled:
        return None
    clean_up_interrupted_step(optimizer, stash)
    if stash.backward.open or stash.backward.other_open_bodies:
        _refuse_in_body(optimizer, stash)
    step = stash.step
    step.depth += 1
    if step.depth > 1:  # a subclass's step that calls super().step() fires the hooks twice
        return None
    step.frame = sys._getframe(1)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None and stash.checks_gradients and not isinstance(closure, ClosureAlreadyRun):
        clean_up_interrupted_step(optimizer, stash, running=False)
        raise RuntimeError(
            f"{base_class(optimizer).__name__}.step: a closure computes new gradients inside step(), after "
            "the check for overflow; under loss scaling, and with skip_nonfinite=True, call the closure's body first, "
            "then step() without it"
        )
    refuse_thawed(optimizer, stash)
    stash.masters.drop_stepped_grads()
    if capture.is_capturing():
        captured.check(optimizer, stash)
    unscale_pending(optimizer)
    linked = stash.masters.links.linked
    if step.in_one_pass:  # edits of weights are adopted on the way
        stash.masters.links.publish_written()
    else:
        reconcile(linked)
    _warn_of_ungathered(optimizer, stash, linked)
    stash.collect_device_skips()
    skip_if_overflowed(optimizer, stash)
    if not step.in_one_pass and step.set_aside is None:
        split_master.materialize(link.master for _, link in linked if has_gradient(link.master))
    watched = None if closure is None else regions.as_now(closure)
    if casts_state.current() is not None:  # the casts that act here are not for the optimizer's own arithmetic
        step.no_casts_region = regions.region(None)
        step.no_casts_region.call = step.frame
        step.no_casts_region.__enter__()
    step.prepared = True
    if watched is None:
        return None
    return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})


@not_traced
def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Post-hook of `step`: publish the masters, or put back what a skipped step must not have changed."""
    stash = stash_of(optimizer)
    if stash is None or not stash.enabled or stash.step.depth == 0:
        return
    step = stash.step
    step.depth -= 1
    if step.depth > 0:
        return
    skipped = step.set_aside is not None
    if step.set_aside is not None:
        for master, grad in step.set_aside.grads:
            master.grad = grad
        if step.set_aside.half is not None and stash.masters.waiting is not None:
            stash.masters.waiting.take_back(step.set_aside.half)
    elif not step.flag_on_optimizer and may_skip_on_device(optimizer, stash):
        note_stepped(optimizer, stash)
    casts_state.drop_cache()  # fully_shard gathers new values into the old tensor, at the old version
    linked = stash.masters.links.linked
    # Keep this order: the clean-up reads "master newer than its weight" as "gradients not cleared yet".
    consume(optimizer, stash)
    if not skipped:  # a step that the device skipped publishes the values that are there already
        if unpublished := step.unpublished if step.in_one_pass else linked:
            publish(unpublished)
        if step.in_one_pass:
            stash.masters.links.publish_written()  # written by a post-hook that ran before this one
    if not capture.is_capturing():
        stash.neighbours.has_stepped = stash.neighbours.has_stepped or not skipped
    clean_up_interrupted_step(optimizer, stash, running=False)


def guarded_step(base: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """The step of an optimizer whose class `base` is not torch's, with what the hooks do for torch's around it.

    Such an optimizer may have no hooks. Without gradients it may divide by their number, or count a step wherever it
    likes; so its step is not called at all where it is skipped. Observers are told here: of the other optimizers'
    steps torch's global hooks tell them.
    """
    observers.tell("step_begins", optimizer)
    result = _guarded_step(base, optimizer, args, kwargs)
    observers.tell("step_ends", optimizer)
    return result


def _guarded_step(base: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    stash = stash_of(optimizer)
    if stash is not None:
        clean_up_interrupted_step(optimizer, stash)
    if stash is None or not stash.enabled or stash.step.depth > 0:
        return base.step(optimizer, *args, **kwargs)
    called, kwargs = before_step(optimizer, (optimizer, *args), kwargs) or ((optimizer, *args), kwargs)
    skipped = stash.step.set_aside is not None
    result = None if skipped else base.step(*called, **kwargs)
    after_step(optimizer, called, kwargs)
    return result


def consume(optimizer: Any, stash: Stash) -> None:
    """Forget the gradients that a step, taken or skipped, was for: those of its masters that nobody awaits.

    Another optimizer of the training awaits a gradient of a master that it holds too and has yet to step with.
    """
    stash.gathered, stash.backward.first_unscaled_grad = False, None
    stash.backward.strays.clear()
    stash.route_grads()
    stash.found.clear()
    awaited = _awaited_by_others(stash)
    masters = stash.masters.links.masters
    if awaited:
        masters = [master for master in masters if id(master) not in awaited]
    stash.masters.spend(masters)
    stash.step.stepped = False


def _awaited_by_others(stash: Stash) -> set[int]:
    """The masters (ids) that another optimizer of the training holds too and has yet to step with."""
    awaited: set[int] = set()
    for _, known in sharing(stash):
        if known.gathered:
            awaited.update(id(link.master) for _, link in known.masters.links.linked)
    return awaited


def clean_up_interrupted_step(optimizer: Any, stash: Stash, running: bool | None = None) -> None:
    """Put back what the pre-hook changed for a step that is over; an exception in it kept the post-hook from running.

    Does nothing while the step is running: this may be called in its closure, or in the step of its parent class.
    Gradients that overflowed stay away: they may have been cleared since. What the step has written into masters is
    published. After an exception in here the next call does the rest.

    Args:
        running: whether the step is running, if the caller knows; None: its frame tells.
    """
    step = stash.step
    if step.depth == 0 and step.frame is None:
        return
    left = running is None
    if thread_state.is_running(step.frame) if running is None else running:
        return
    if step.flag_on_optimizer:
        optimizer.grad_scale = optimizer.found_inf = None
        del optimizer.grad_scale, optimizer.found_inf
        step.flag_on_optimizer = False
    if step.no_casts_region is not None:
        step.no_casts_region.__exit__(None, None, None)
        step.no_casts_region = None
    put_back(optimizer, stash)
    if left and (stash.masters.links.publish_written() or step.stepped) and step.prepared:
        consume(optimizer, stash)
    if (waiting := stash.masters.waiting) is not None:
        waiting.lent = {}
    step.unpublished, step.stepped = [], False
    step.depth, step.frame, step.prepared = 0, None, False


def _refuse_in_body(optimizer: Any, stash: Stash) -> None:
    """Raise if a body of `scale_loss` is running that has yet to unscale, or to bring back, gradients of this step."""
    body = stash.backward
    pairs = stash.masters.pairs(optimizer.param_groups)
    own = any(param is master for param, master in pairs)
    if body.open and body.checking:
        where = f"where its gradients are {'scaled and ' if stash.scales_loss else ''}unchecked"
    elif any(body.other_open_bodies.values()) and (own or stash.pending is not None):
        where = "whose backward may reach its parameters: its own gradients are away until that ends"
    elif any(p is not m and (body.open or (own_grad(p) is not None and not has_gradient(m))) for p, m in pairs):
        where = "where its gradients are on the low-precision parameters, not on their masters"
    else:
        return
    raise RuntimeError(
        f"{base_class(optimizer).__name__}.step: called in the body of scale_loss, {where}; give scale_loss "
        "all optimizers of the loss, and call their step() after the `with` block. A step in a hook of backward "
        "(register_post_accumulate_grad_hook) is possible at O0 and O4, without skip_nonfinite"
    )


def refuse_thawed(optimizer: Any, stash: Stash) -> None:
    """Raise if a parameter came frozen in low precision, and is trained by now without the FP32 values of its level."""
    policy = stash.policy
    if not (policy.master_weights or policy.patch_torch_functions):
        return
    bare = stash.masters.of_groups(optimizer.param_groups).bare
    thawed = next((p for p in bare if p.requires_grad and came.type_of(p) is not None), None)
    if thawed is None:
        return
    clean_up_interrupted_step(optimizer, stash, running=False)
    way = "call scale_loss for its loss" if policy.master_weights else "call initialize() again, then step"
    name = stash.neighbours.names.get(id(thawed), "of a later group")
    raise RuntimeError(
        f"{base_class(optimizer).__name__}: parameter {name!r} came "
        f"frozen in {thawed.dtype} and requires a gradient since; opt_level {policy.opt_level!r} trains FP32 values, "
        f"of which it has none: {way}"
    )


def _warn_of_ungathered(optimizer: Any, stash: Stash, linked: Sequence[Linked]) -> None:
    """Warn of gradients of cast parameters that no exit of `scale_loss` has brought to their masters (`linked`).

    The loss of another optimizer may rightly leave such gradients (a GAN's generator loss fills the discriminator's).
    After the body of another optimizer the warning comes only if no master of this one has a gradient.
    """
    strays = {id(linked[i][1].master): linked[i][0] for i in with_gradient(stash.masters.links.params)}
    dropped = stash.backward.strays
    strays |= {id(link.master): param for param, link in linked if id(param) in dropped} if dropped else {}
    if not strays:
        return
    # Whether a body of another optimizer is running, or was since the last one of this optimizer.
    others = bool(stash.backward.other_open_bodies) or stash.backward.ended != BackwardState.body_events
    if others and any(has_gradient(link.master) for _, link in linked):
        return
    named = [
        stash.neighbours.names.get(id(strays[id(master)]), f"group {index}, parameter {position}")
        for index, group in enumerate(optimizer.param_groups)
        for position, master in enumerate(group["params"])
        if id(master) in strays
    ]
    if named:
        warnings.warn(
            f"{base_class(optimizer).__name__}.step: {named[0]} has a gradient on the model that was never "
            f"gathered for this optimizer{f', and so have {len(named) - 1} more' if len(named) > 1 else ''}: the step "
            "does without; call backward() inside `with amp.scale_loss(loss, optimizer)`",
            stacklevel=stacklevel(),
        )
