"""One `step` of an optimizer: settled before users' hooks, decided, made by a strategy and published inside of them.

The order is a contract (tests/training/test_step_order.py). Users' pre-hooks find unscaled gradients, whenever they
were registered, and what they write into masters is where the step begins. Users' post-hooks find published weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from amp_patch import supported
from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.masters.masters import Claim, LinkList, has_gradient, materialize, publish, publish_written, settle
from amp_patch.support import device_sync
from amp_patch.support.blocks import Block, when_left
from amp_patch.support.compiled import eager_only, wraps
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.patches import Installation, cell_of, is_untouched
from amp_patch.support.scripts_line import stacklevel
from amp_patch.training import joints, observers, overflow
from amp_patch.training.slips import warn_of_no_scaler_step
from amp_patch.training.stash import Stash, body_events, sharing, stash_of
from amp_patch.training.unscale import unscale_pending

Plain = Callable[..., Any]  # the `step` of an optimizer's own class


class ClosureAlreadyRun:
    """A closure whose work was done before the step that it is given to: gives what that returned."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self) -> Any:
        return self.result


class Strategy:
    """How the steps of a class of optimizers are made.

    Attributes:
        waits: whether it is for gradients that wait in low precision, and `suits` is asked only where they may.
    """

    waits = True

    def suits_class(self, base: Any) -> bool:
        """Whether this is how optimizers of the class `base` are stepped, where nothing else is chosen for one."""
        return False

    def knows(self, optimizer: Any, stash: Stash) -> bool:
        """Whether it takes gradients that wait, with the settings of now; logs why not."""
        return False

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        """Whether the coming step can be made so; `given`: it has a closure, or what Apex's once took. Logs why not."""
        raise NotImplementedError

    def run(self, step: Step, plain: Plain) -> Any:
        """Make the step, on weights and masters that are brought in step before; no sync.

        `step.unpublished` gets the masters that are still to be rounded into the weights.
        """
        raise NotImplementedError


class Whole(Strategy):
    """The strategy that suits every optimizer: its own step, on all parameters at once."""

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        return True

    def run(self, step: Step, plain: Plain) -> Any:
        if step.links.params:
            step.unpublished = step.links
            settle(step.links)
            step.writes = True
            step.materialize()
        return plain(step.optimizer, *step.args, **step.kwargs)


WHOLE = Whole()


class Step(Block):
    """What lies between users' pre-hooks and post-hooks, in the order of its methods: a `with` block around `run`.

    On leaving, the masters that the strategy has left are published and the gradients consumed. After an exception
    those masters are that were written, and the gradients are consumed if any was; else both are as before.

    Args:
        optimizer: the innermost one.
        stash: the optimizer's.
        args, kwargs: what `step` was given.

    Attributes:
        given: whether that is a closure, or what Apex's once took.
        links: the optimizer's parameters that have masters.
        skipped: whether the host knows of an overflow, so that no strategy is asked.
        overflow: FP32, shape []: the flag on the device by which the optimizer skips there; None: it does not.
        writes: whether what is written into masters from now on is the step, and not an edit of the user's.
        stepped: whether a strategy has made the whole step, and brought masters and weights in step by itself.
        unpublished: the masters that a strategy has not rounded into the weights.
    """

    def __init__(self, optimizer: Any, stash: Stash, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self.optimizer, self.stash = optimizer, stash
        self.args, self.kwargs = args, kwargs or {}
        self.given = bool(args or kwargs) and any(value is not None for value in (*args, *self.kwargs.values()))
        self.links = stash.masters.links
        self.skipped = self.writes = self.stepped = False
        self.overflow: torch.Tensor | None = None
        self.unpublished: LinkList | None = None
        self._made = self._is_consumed = self._may_skip = False
        self._no_casts: regions.region | None = None
        self._exit_watch: Any = None
        self._claim: Claim | None = Claim()
        self._claim.links, self._claim.thread = self.links, get_ident()
        with Claim.lock:
            Claim.running.add(self._claim)

    @property
    def is_running(self) -> bool:
        """Whether the block was entered, and not left."""
        return self.stash.step is self

    def __enter__(self) -> Step:
        optimizer, stash = self.optimizer, self.stash
        self._exit_watch = when_left(self, lambda _: self._leave_for_good())
        stash.step = self
        if stash.backward.body is not None or stash.backward.other_open_bodies:
            _refuse_in_body(optimizer, stash)
        if self.args or self.kwargs:
            self._check_closure()
        is_capturing = device_sync.is_capturing()
        if is_capturing:
            joints.tell(joints.captured, optimizer, stash)
        if stash.pending is not None or stash.neighbours.sharing:
            unscale_pending(optimizer)  # `prepare` has not: a method was captured, or a pre-hook has run a backward
        if not warn_of_no_scaler_step(optimizer, stash) and self.links.params:
            _warn_of_ungathered(optimizer, stash, self.links)
        if stash.device_skips:
            stash.collect_device_skips()
        self._may_skip = overflow.may_skip_on_device(optimizer, stash)
        self.skipped, self.overflow = overflow.decide(optimizer, stash, is_capturing, self._may_skip)
        if self.overflow is not None:
            optimizer.grad_scale, optimizer.found_inf = None, self.overflow
        casts_state.in_use.free_scratch()  # a backward outside of `scale_loss` has left it
        if casts_state.current() is not None:  # the casts that act here are not for the optimizer's own arithmetic
            self._no_casts = regions.region(None)
            self._no_casts.__enter__()
        return self

    def run(self, strategy: Strategy, plain: Plain) -> Any:
        """Have `strategy` make the step, if it is not skipped; returns what `step` returns."""
        if self.skipped:
            settle(self.links)
            closure = self._closure()
            return closure() if isinstance(closure, ClosureAlreadyRun) else None
        result = strategy.run(self, plain)
        self._made = True
        return result

    def __exit__(self, *raised: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """End the step; called again after an exception in here, it does the rest."""
        stash, optimizer = self.stash, self.optimizer
        if stash.step is not self:
            return
        if self._no_casts is not None:
            self._no_casts.__exit__(None, None, None)
            self._no_casts = None
        if self._made or self.skipped:
            self._finish()
        elif self.writes:
            self.stepped = self.stepped or bool(self.links.versions.written())
            publish_written(self.links)
            if self.stepped and not self._is_consumed:
                consume(stash)
                self._is_consumed = True
        if self.overflow is not None:
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
        stash.step = self._exit_watch = self._claim = None

    def _leave_for_good(self) -> None:
        """`leave`, after which the step is over whatever came of it: with `stash.step` set none would be checked."""
        try:
            self.leave()
        finally:
            if self.stash.step is self:
                self.stash.step = None

    def _finish(self) -> None:
        stash = self.stash
        if self._made and self._may_skip and self.overflow is None and not self._is_consumed:
            overflow.note_stepped(self.optimizer, stash)
        casts_state.drop_cache()  # fully_shard gathers new values into the old tensor, at the old version
        if not self._is_consumed:
            consume(stash)
            self._is_consumed = True
        if self._made and self.unpublished is not None:
            publish(self.unpublished)  # after a skip on the device these are the values that are there already
        if self._made and not stash.neighbours.has_stepped and not device_sync.is_capturing():
            stash.neighbours.has_stepped = True

    def take_closure(self) -> Any:
        """Let the step go on as one that was given no closure; returns what one that was run before has returned."""
        closure = self._closure()
        self.args, self.kwargs, self.given = (), {}, False
        return closure.result if isinstance(closure, ClosureAlreadyRun) else None

    def materialize(self) -> None:
        """Have the masters that have a gradient in their memory; no sync."""
        masters = self.links.masters
        materialize(filter(has_gradient, masters))
        if (closure := self._closure()) is None:
            return
        stepped: list[torch.Tensor] = []

        def followed(*args: Any, **kwargs: Any) -> Any:
            for master in stepped:  # without this, the forward of a second call misses what fused kernels wrote
                torch.autograd.graph.increment_version(master)
            result = closure(*args, **kwargs)
            stepped[:] = filter(has_gradient, masters)
            return result

        self._replace_closure(followed)

    def _closure(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get("closure")

    def _replace_closure(self, closure: Any) -> None:
        if self.args:
            self.args = (closure, *self.args[1:])
        else:
            self.kwargs = {**self.kwargs, "closure": closure}

    def _check_closure(self) -> None:
        """Refuse a closure that would make gradients nobody checks; have any other run with the casts of now."""
        closure = self._closure()
        if closure is None or isinstance(closure, ClosureAlreadyRun):
            return
        if self.stash.checks_gradients:
            raise RuntimeError(
                f"{base_class(self.optimizer).__name__}.step: a closure computes new gradients inside step(), after "
                "the check for overflow; under loss scaling, and with skip_nonfinite=True, call the closure's body "
                "first, then step() without it"
            )
        if (policy := self.stash.policy).closes_masters:
            raise RuntimeError(
                f"{base_class(self.optimizer).__name__}.step: a closure is not for master_weights="
                f"{policy.master_weights!r}: {supported.reason(str(policy.master_weights), 'a closure')}"
            )
        self._replace_closure(regions.as_now(closure))


# ----------------------------------------------------------------------------------------------------------------------
# The method


_installation = Installation()
_HOOKS_AROUND = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def step_of(base: Any) -> Callable[..., Any]:
    """The `step` of optimizers of the class `base` in a training, around what torch calls the hooks around."""

    @wraps(base.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        stash = stash_of(self)
        if stash is None or not stash.enabled or stash.step is not None:
            return base.step(self, *args, **kwargs)
        prepare(self, stash, args, kwargs)
        if "_optimizer_step_pre_hooks" in vars(self):
            result = base.step(self, *args, **kwargs)  # which `lead_to_step` leads to `Step`, inside of the hooks
        else:
            result = _around(base.step, self, stash, args, kwargs)
        if (links := stash.masters.links).params:
            publish_written(links)  # by users' post-hooks
        return result

    step.hooked = True  # else torch would call the hooks around this method too
    return eager_only(step)


def lead_to_step(optimizer: Any) -> None:
    """Have `step` of the optimizer's class come to `Step` for the optimizers of trainings, inside of its hooks.

    torch's function that calls the hooks keeps the class's own step in a cell of its closure. That cell is filled anew,
    until `amp.restore()`: so whoever has captured the method before `initialize` (a scheduler, a wrapper, a compiled
    step) comes to `Step` too. Optimizers that are in no training, and classes without hooks, step as before.
    """
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        return
    base: Any = base_class(optimizer)
    if not getattr(base.step, "hooked", False):  # an unpickled optimizer is the first of `base`
        base.step = torch.optim.Optimizer.profile_hook_step(base.step)
        vars(base.step)["hooked"] = True
    layer = _around_hooks(base.step)
    if layer is not None and (cell := cell_of(layer)) is not None:  # else it is filled anew already
        within = _within_hooks(layer.__wrapped__)
        _installation.add(lambda patches: patches.set_cell(cell, within))


def plain_step(base: Any) -> Plain | None:
    """The class's own step, inside of torch's hooks; None of a class without them."""
    layer = _around_hooks(base.step)
    return None if layer is None else layer.__wrapped__


def _around_hooks(step: Any) -> Any:
    """torch's function that calls the hooks around a step, of those that wrap it; None where there is none."""
    layer = step
    while layer is not None and getattr(layer, "__code__", None) is not _HOOKS_AROUND:
        layer = getattr(layer, "__wrapped__", None)
    return layer


trusted_steps: set[Plain] = set()  # the steps of other classes for which users answer


def suiting(strategy: Strategy, step: Step, *, trusted: bool) -> Strategy:
    """`strategy`, or WHOLE where it does not suit.

    Args:
        trusted: whether the class's own step is as its author wrote it.
    """
    is_asked = trusted and (step.stash.masters.waiting is not None or not strategy.waits)
    return strategy if is_asked and strategy.suits(step.optimizer, step.stash, step.given) else WHOLE


def _within_hooks(plain: Plain) -> Plain:
    """What stands in the place of the class's own step, `plain`."""
    is_untouched_step = is_untouched(plain)

    @eager_only
    def stepped(self: Any, stash: Stash, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        strategy: Strategy = stash.neighbours.strategy or type(self).strategy
        with Step(self, stash, args, kwargs) as step:
            return step.run(suiting(strategy, step, trusted=is_untouched_step or plain in trusted_steps), plain)

    @wraps(plain)
    def within(self: Any, *args: Any, **kwargs: Any) -> Any:
        stash = stash_of(self)
        if stash is None or not stash.enabled or stash.step is not None or not isinstance(self, Generated):
            return plain(self, *args, **kwargs)  # which torch.compile compiles as ever
        return stepped(self, stash, args, kwargs)

    return within


def _around(whole: Plain, optimizer: Any, stash: Stash, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A step of an optimizer that has no hooks, so that observers are told here."""
    observers.tell("step_begins", optimizer)
    with Step(optimizer, stash, args, kwargs) as step:
        result = step.run(WHOLE, whole)
    observers.tell("step_ends", optimizer)
    return result


def prepare(optimizer: Any, stash: Stash, args: Any, kwargs: Any) -> None:
    """Before users' pre-hooks: refuse a step that cannot be, and leave unscaled gradients on masters; no sync.

    Given a closure, which may be refused, this leaves gradients as they are: `Step` unscales them.
    """
    if stash.backward.body is not None or stash.backward.other_open_bodies:
        _refuse_in_body(optimizer, stash)
    for check in stash.neighbours.before_step:
        check(optimizer, stash)
    stash.masters.drop_stepped_grads()
    if (stash.pending is not None or stash.neighbours.sharing) and not (args or kwargs):
        unscale_pending(optimizer)


def consume(stash: Stash) -> None:
    """Forget the gradients that a step, taken or skipped, was for: those of its masters that nobody awaits.

    Another optimizer of the training awaits a gradient of a master that it holds too and has yet to step with.
    """
    stash.gathered, stash.backward.first_unscaled_grad = False, None
    stash.backward.strays.clear()
    stash.route_grads()
    stash.found.clear()
    masters = stash.masters.links.masters
    if stash.neighbours.sharing and (awaited := _awaited_by_others(stash)):
        masters = [master for master in masters if id(master) not in awaited]
    stash.masters.spend(masters)


def _awaited_by_others(stash: Stash) -> set[int]:
    """The masters (ids) that another optimizer of the training holds too and has yet to step with."""
    awaited: set[int] = set()
    for _, known in sharing(stash):
        if known.gathered:
            awaited.update(map(id, known.masters.links.masters))
    return awaited


def _refuse_in_body(optimizer: Any, stash: Stash) -> None:
    """Raise if a body of `scale_loss` is running that has yet to unscale, or to bring back, gradients of this step."""
    body, others = stash.backward.body, stash.backward.other_open_bodies
    pairs = stash.masters.pairs(optimizer.param_groups)
    own = any(param is master for param, master in pairs)
    if body is not None and body.checking:
        where = f"where its gradients are {'scaled and ' if stash.scales_loss else ''}unchecked"
    elif any(others.values()) and (own or stash.pending is not None):
        where = "whose backward may reach its parameters: its own gradients are away until that ends"
    elif any(p is not m and (body is not None or (own_grad(p) is not None and not has_gradient(m))) for p, m in pairs):
        where = "where its gradients are on the low-precision parameters, not on their masters"
    else:
        return
    raise RuntimeError(
        f"{base_class(optimizer).__name__}.step: called in the body of scale_loss, {where}; give scale_loss "
        "all optimizers of the loss, and call their step() after the `with` block. A step in a hook of backward "
        "(register_post_accumulate_grad_hook) is possible at O0 and O4, without skip_nonfinite"
    )


def _warn_of_ungathered(optimizer: Any, stash: Stash, links: LinkList) -> None:
    """Warn of gradients of cast parameters that no exit of `scale_loss` has brought to their masters (`links`).

    The loss of another optimizer may rightly leave such gradients (a GAN's generator loss fills the discriminator's).
    After the body of another optimizer the warning comes only if no master of this one has a gradient.
    """
    left, dropped = with_gradient(links.params), stash.backward.strays
    if not (left or dropped):
        return
    strays = {id(links.masters[index]): links.params[index] for index in left}
    strays |= {id(link.master): param for param, link in links if id(param) in dropped}
    # Whether a body of another optimizer is running, or was since the last one of this optimizer.
    others = bool(stash.backward.other_open_bodies) or stash.backward.ended != body_events.count
    if others and any(map(has_gradient, links.masters)):
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
