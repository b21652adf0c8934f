"""One `step` of an optimizer that went through `initialize`: skipped after an overflow, or made by a strategy.

The order is a contract (tests/training/test_step_order.py), no matter when a hook was registered. Users' pre-hooks find
unscaled gradients, and the step starts from the values that they write into masters. Users' post-hooks find weights
that the step has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from amp_patch import supported
from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.masters.masters import Claim, LinkList, has_gradient, materialize, publish, publish_written, settle
from amp_patch.masters.record import Record
from amp_patch.support import device_sync
from amp_patch.support.compiled import eager_only, wraps
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.interrupts import whole
from amp_patch.support.patches import Installation, cell_of, is_untouched
from amp_patch.training import joints, observers, overflow
from amp_patch.training.arguments import ClosureAlreadyRun
from amp_patch.training.joints import Optimizer
from amp_patch.training.stash import Stash, sharing, stash_of
from amp_patch.training.unscale import unscale_pending

Plain = Callable[..., Any]  # the type of the `step` that an optimizer's own class defines


class Whole(joints.Strategy):
    """The strategy that suits every optimizer: one call of the optimizer's own `step`, on all parameters."""

    def suits(self, optimizer: Optimizer, stash: Stash, given: bool) -> bool:
        return True

    def run(self, step: Step, plain: Plain) -> Any:
        if step.links.params:
            step.unpublished = step.links
            settle(step.links)
            step.writes = True
            step.materialize()
        return plain(step.optimizer, *step.args, **step.kwargs)


WHOLE = Whole()


class Step:
    """One step of one optimizer, between users' pre-hooks and post-hooks: a context manager around a call of `run`.

    The entry decides whether the step is skipped, and `run` makes it. The exit rounds the masters in `unpublished` into
    their weights, and clears the gradients of the step.

    If an exception ends the block, the exit rounds the masters that the step has written by then, and clears the
    gradients if there are any such masters. Otherwise weights, masters and gradients stay as they were. Ctrl-C waits
    for the end of the entry, of `run` and of the exit.

    Args:
        optimizer: the innermost optimizer.
        stash: the optimizer's stash.
        args, kwargs: the arguments of the call of `step`.

    Attributes:
        given: whether `step` was called with an argument that is not None: a closure, or one from Apex's old `step`.
        links: the optimizer's parameters that have masters.
        skipped: whether the host knows of an overflow. If so, no strategy runs.
        overflow: the flag by which the optimizer skips on the device, FP32, shape []; None if the host decides.
        writes: whether writes to masters belong to the step. Until a strategy sets this, they are edits by user code.
        stepped: whether a strategy has made the whole step, and has rounded the masters into their weights already.
        unpublished: the masters that the strategy has not rounded into their weights; None if there are none.
    """

    def __init__(self, optimizer: Optimizer, stash: Stash, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self.optimizer, self.stash = optimizer, stash
        self.args, self.kwargs = args, kwargs or {}
        self.given = bool(args or kwargs) and any(value is not None for value in (*args, *self.kwargs.values()))
        self.links = stash.masters.links
        self.skipped = self.writes = self.stepped = False
        self.overflow: Tensor | None = None
        self.unpublished: LinkList | None = None
        self._made = self._may_skip = False
        self._no_casts: regions.region | None = None
        self._claim: Claim | None = Claim()
        self._claim.links, self._claim.thread = self.links, get_ident()
        with Claim.lock:
            Claim.running.add(self._claim)

    @whole
    def __enter__(self) -> Step:
        self.stash.step = self
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        optimizer, stash = self.optimizer, self.stash
        if stash.neighbours.body() is not None or stash.neighbours.other_bodies:
            _refuse_in_body(optimizer, stash)
        if self.args or self.kwargs:
            self._check_closure()
        is_capturing = device_sync.is_capturing()
        if is_capturing:
            joints.tell(joints.captured, optimizer, stash)
        if stash.pending is not None or stash.neighbours.sharing:
            unscale_pending(optimizer)  # `prepare` did not run (a captured method), or a pre-hook ran a backward
        weights = self.links.params
        if not stash.bodies or stash.masters.strays or (weights and with_gradient(weights)):
            joints.tell(joints.doubtful_step, optimizer, stash, self.links)
        if stash.device_skips:
            stash.collect_device_skips()
        self._may_skip = overflow.may_skip_on_device(optimizer, stash)
        self.skipped, self.overflow = overflow.decide(optimizer, stash, is_capturing, self._may_skip)
        if self.overflow is not None:
            vars(optimizer).update(grad_scale=None, found_inf=self.overflow)
        casts_state.in_use.free_scratch()  # a backward outside of `scale_loss` does not free its scratch memory
        if casts_state.current() is not None:  # casts must not change the optimizer's own arithmetic
            self._no_casts = regions.region(None)
            self._no_casts.__enter__()

    @whole
    def run(self, strategy: joints.Strategy, plain: Plain) -> Any:
        """Make the step with `strategy`, unless the step is skipped; return the result of `step`."""
        if self.skipped:
            settle(self.links)
            closure = self._closure()
            return closure() if isinstance(closure, ClosureAlreadyRun) else None
        result = strategy.run(self, plain)
        self._made = True
        return result

    @whole
    def __exit__(self, *raised: Any) -> None:
        stash, optimizer = self.stash, self.optimizer
        try:
            if self._no_casts is not None:
                self._no_casts.__exit__()
            if self._made and self._may_skip and self.overflow is None:
                overflow.note_stepped(optimizer, stash)
            if self._made or self.skipped:
                casts_state.drop_cache()  # casts may be stale: fully_shard gathers new values under the old version
                consume(stash)
                if self._made and self.unpublished is not None:
                    publish(self.unpublished)  # if the device has skipped the step, this writes the same values again
                if self._made and not (stash.neighbours.has_stepped or device_sync.is_capturing()):
                    stash.neighbours.has_stepped = True
            elif self.writes:
                is_stepped = self.stepped or bool(self.links.versions.written())
                publish_written(self.links)
                if is_stepped:
                    consume(stash)
        finally:
            if self.overflow is not None:
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
            stash.step = self._claim = None

    def materialize(self) -> None:
        """Allocate the FP32 values of compressed masters that have a gradient; no sync."""
        masters = self.links.masters
        materialize(filter(has_gradient, masters))
        if (closure := self._closure()) is None:
            return

        def followed(*args: Any, **kwargs: Any) -> Any:
            for master in filter(has_gradient, masters):  # fused kernels count no writes: a second call needs this
                torch.autograd.graph.increment_version(master)
            return closure(*args, **kwargs)

        self._replace_closure(followed)

    def _closure(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get("closure")

    def _replace_closure(self, closure: Any) -> None:
        if self.args:
            self.args = (closure, *self.args[1:])
        else:
            self.kwargs = {**self.kwargs, "closure": closure}

    def _check_closure(self) -> None:
        """Raise if the level takes no closure; else wrap the closure so that it runs with the casts that act now."""
        closure = self._closure()
        if closure is None or isinstance(closure, ClosureAlreadyRun):
            return
        if self.stash.checks_gradients:
            raise RuntimeError(
                f"{base_class(self.optimizer).__name__}.step: a closure computes new gradients inside step(), after "
                "the check for overflow; under loss scaling, and with skip_nonfinite=True, call the closure's body "
                "first, then step() without it"
            )
        if (policy := self.stash.policy).closes_masters or policy.master_device is not None:
            option = f"master_weights={policy.master_weights!r}" if policy.closes_masters else "master_device='cpu'"
            named = str(policy.master_weights) if policy.closes_masters else "offload"
            raise RuntimeError(
                f"{base_class(self.optimizer).__name__}.step: a closure is not for {option}: "
                f"{supported.reason(named, 'a closure')}"
            )
        self._replace_closure(regions.as_now(closure))


# ----------------------------------------------------------------------------------------------------------------------
# The method


_installation = Installation()
_HOOKS_AROUND = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def step_of(base: Any) -> Callable[..., Any]:
    """Return the `step` of the generated class over `base`: it runs around the `step` of `base` and torch's hooks."""

    @wraps(base.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        stash = stash_of(self)
        if stash is None or not stash.scalers or stash.step is not None:
            return base.step(self, *args, **kwargs)
        prepare(self, stash, args, kwargs)
        if "_optimizer_step_pre_hooks" in vars(self):
            result = base.step(self, *args, **kwargs)  # calls `Step` inside the hooks (`lead_to_step`)
        else:
            result = _around(base.step, self, stash, args, kwargs)
        if (links := stash.masters.links).params:
            publish_written(links)  # users' post-hooks may have written masters
        return result

    step.hooked = True  # without this, torch would call the hooks around this method too
    return eager_only(step)


def lead_to_step(optimizer: Optimizer) -> None:
    """Replace the `step` inside torch's hooks, for all optimizers of the class, by one that runs `Step`.

    torch's function that calls the hooks stores the class's own `step` in a cell of its closure. This replaces the
    content of the cell until `amp.restore()`. Without this, code that captured the method before `initialize` (a
    scheduler, a wrapper, a compiled step) would bypass `Step`. Optimizers that are in no training still run the class's
    own `step`. Classes without hooks are not changed.
    """
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        return
    base: Any = base_class(optimizer)
    if not getattr(base.step, "hooked", False):  # no constructor has run: the optimizer was unpickled
        base.step = torch.optim.Optimizer.profile_hook_step(base.step)
        vars(base.step)["hooked"] = True
    layer = _around_hooks(base.step)
    if layer is not None and (cell := cell_of(layer)) is not None:  # None if the content was replaced before
        within = _within_hooks(layer.__wrapped__)
        _installation.add(lambda patches: patches.set_cell(cell, within))


def plain_step(base: Any) -> Plain | None:
    """Return the class's own step, without torch's hooks around it; None if the class has no hooks."""
    layer = _around_hooks(base.step)
    return None if layer is None else layer.__wrapped__


def _around_hooks(step: Any) -> Any:
    """Return the wrapper of `step` that calls torch's hooks; None if no wrapper does."""
    layer = step
    while layer is not None and getattr(layer, "__code__", None) is not _HOOKS_AROUND:
        layer = getattr(layer, "__wrapped__", None)
    return layer


trusted_steps: set[Plain] = set()  # filled by `register_per_parameter_optimizer`


def suiting(strategy: joints.Strategy, step: Step, *, trusted: bool) -> joints.Strategy:
    """Return `strategy`, or WHOLE if it cannot make the step or the class's own step was patched (not `trusted`)."""
    is_asked = trusted and (step.stash.masters.waiting is not None or not strategy.waits)
    return strategy if is_asked and strategy.suits(step.optimizer, step.stash, step.given) else WHOLE


def _within_hooks(plain: Plain) -> Plain:
    """Return the function that replaces `plain`, the class's own step: it runs `Step` for optimizers of trainings."""
    is_untouched_step = is_untouched(plain)

    @eager_only
    def stepped(self: Any, stash: Stash, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        strategy: joints.Strategy = stash.neighbours.strategy or type(self).strategy
        with Step(self, stash, args, kwargs) as step:
            return step.run(suiting(strategy, step, trusted=is_untouched_step or plain in trusted_steps), plain)

    @wraps(plain)
    def within(self: Any, *args: Any, **kwargs: Any) -> Any:
        stash = stash_of(self)
        if stash is None or not stash.scalers or stash.step is not None or not isinstance(self, Generated):
            return plain(self, *args, **kwargs)  # torch.compile can trace it
        return stepped(self, stash, args, kwargs)

    return within


def _around(whole: Plain, optimizer: Optimizer, stash: Stash, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `Step` for an optimizer without hooks, and notify observers, which otherwise torch's global hooks do."""
    if observers.present:
        observers.tell("step_begins", optimizer)
    with Step(optimizer, stash, args, kwargs) as step:
        result = step.run(WHOLE, whole)
    if observers.present:
        observers.tell("step_ends", optimizer)
    return result


@whole
def prepare(optimizer: Optimizer, stash: Stash, args: Any, kwargs: Any) -> None:
    """Check that a step is possible, and unscale gradients of delayed exits, before users' pre-hooks run; no sync.

    If `step` was called with a closure, which `Step` may refuse, gradients stay scaled until `Step` unscales them.
    """
    if stash.neighbours.body() is not None or stash.neighbours.other_bodies:
        _refuse_in_body(optimizer, stash)
    for check in stash.neighbours.before_step:
        check(optimizer, stash)
    stash.masters.drop_last()
    if (stash.pending is not None or stash.neighbours.sharing) and not (args or kwargs):
        unscale_pending(optimizer)


def consume(stash: Stash) -> None:
    """Clear the gradients of a step that was taken or skipped.

    If another optimizer of the training holds a master too, and has yet to step with its gradient, that gradient stays.
    """
    stash.unscaled = None
    stash.masters.strays.clear()
    stash.route_grads()
    stash.found.clear()
    records = stash.masters.links.records
    for _, other in sharing(stash) if stash.neighbours.sharing else ():
        if other.unscaled is not None:
            awaited = set(other.masters.links.records)
            records = [record for record in records if record not in awaited]
    stash.masters.spend(records)


def _refuse_in_body(optimizer: Optimizer, stash: Stash) -> None:
    """Raise if this step's gradients are scaled, unchecked or set aside until a running body of `scale_loss` ends."""
    body, held = stash.neighbours.body(), stash.masters.of_groups(optimizer.param_groups)
    if body is not None and body.checking:
        where = f"where its gradients are {'scaled and ' if stash.scales_loss else ''}unchecked"
    elif stash.neighbours.checking_body() and (held.own or stash.pending is not None):
        where = "whose backward may reach its parameters: its own gradients are away until that ends"
    elif (body is not None and held.linked) or any(map(_is_left, held.low, held.linked)):
        where = "where its gradients are on the low-precision parameters, not on their masters"
    else:
        stash.masters.end_direct()
        return
    raise RuntimeError(
        f"{base_class(optimizer).__name__}.step: called in the body of scale_loss, {where}; give scale_loss "
        "all optimizers of the loss, and call their step() after the `with` block. A step in a hook of backward "
        "(register_post_accumulate_grad_hook) is possible at O0 and O4, without skip_nonfinite"
    )


def _is_left(param: Tensor, record: Record) -> bool:
    """Tell whether the parameter has a gradient, and its master has none."""
    return own_grad(param) is not None and not (has_gradient(record.master) or record.earlier is not None)
