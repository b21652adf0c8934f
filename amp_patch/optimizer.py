"""The optimizer's side of a training: masters in its groups, gradients gathered, steps skipped on overflow.

`step` is reached through torch's own hooks, because a scheduler built before `initialize` has captured the method; the
other methods are overridden in a generated subclass.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from amp_patch import replicas, zero
from amp_patch.casts import regions, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.masters import clipping, stalled_averages
from amp_patch.masters.gradients import Earlier, gather
from amp_patch.masters.masters import Master, disconnect, publish, publish_written, reconcile
from amp_patch.masters.of_optimizer import Masters
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.scaler import LossScaler, inverse_of
from amp_patch.support import distributed, generated_class
from amp_patch.support.compiled import not_traced
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.patches import Attempts

_TRANSIENT = (
    "brought",
    "earlier",
    "handles",
    "models",
    "names",
    "owner",
    "prepared",
    "process_group",
    "quiet",
    "set_aside",
    "sharded",
    "sharing",
    "siblings",
    "spent",
    "step_frame",
    "stepped",
    "unowned",
    "wrappers",
)


class Pending:
    """Gradients that a delayed exit of `scale_loss` left scaled: by which scaler, and how much."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scaling = scaler.scales
        self.updates, self.edits = scaler.updates, scaler.edits
        # Where nothing is multiplied the scaler may have been loaded with a scale from a level that does.
        self.scale = scaler.scale_tensor.clone() if scaler.scales else torch.ones_like(scaler.scale_tensor)
        self.held_back = False  # whether some of them are inside of FSDP modules, out of reach
        self.local = False  # whether they wait for a DDP to reduce them, with later ones

    def has_scale_of(self, scaler: LossScaler) -> bool:
        """Whether `scaler` surely has this scale still; told on the host, without a sync."""
        moved = scaler.dynamic and self.updates != scaler.updates
        return self.scaler is scaler and not moved and self.edits == scaler.edits


@dataclass
class SetAside:
    """What a skipped step must find again afterwards."""

    grads: list[tuple[Tensor, Tensor]]
    group_values: list[dict[str, Any]]


class Verdict:
    """What a step whose optimizer skipped on the device, or not, found; on its way to the host, without a sync."""

    def __init__(self, found: list[tuple[LossScaler, Tensor]]) -> None:
        self.scalers = [scaler for scaler, _ in found]
        flags = torch.stack([found_inf.reshape(()) for _, found_inf in found])
        self.overflow = flags.amax()
        self._arrived: Any = None
        if flags.is_cuda:
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flags.device))
        else:
            self._flags = flags

    def here(self) -> bool:
        """Whether `read` needs no wait."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> list[LossScaler]:
        """The scalers whose losses overflowed; waits for the device if it must. Tells the others that they stepped."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return _overflowed(self.scalers, self._flags.tolist())


@dataclass
class Stash:
    """Everything amp_patch knows of one optimizer: `optimizer._amp_stash`.

    Attributes:
        policy: of the training that the optimizer belongs to.
        scalers: one `LossScaler` for each `loss_id` of that training, shared by its optimizers.
        enabled: False after `initialize(enabled=False)`: every call passes through.
        masters: the pairs of parameters and masters.
        pending: set while the model's gradients are still scaled (`delay_unscale=True`).
        earlier: by id the unscaled gradients of parameters that are their own master, taken away while a body runs;
            where the exit was delayed, what of them no scaled gradient can hold.
        keeps_scaled_gradients: whether low-precision gradients stay on the model, scaled, when masters have got them.
    """

    keeps_scaled_gradients: ClassVar[bool] = False
    turns: ClassVar[int] = 0  # how often a body of any optimizer of the process has begun or ended

    policy: Policy
    scalers: list[LossScaler]
    enabled: bool = True
    masters: Masters = field(default_factory=Masters)
    pending: Pending | None = None
    earlier: dict[int, Earlier] = field(default_factory=dict)
    last_skipped: bool = False  # of the last step that is no verdict
    # Of steps that skipped on the device or did not: the newest last.
    verdicts: list[Verdict] = field(default_factory=list)
    # id of a master -> how much state the optimizer had of it after a step that the host knows was taken.
    stepped: dict[int, int] = field(default_factory=dict)
    # Per scaler what its backward passes found since the last step, on the device.
    found: list[tuple[LossScaler, Tensor]] = field(default_factory=list)
    told: bool = False  # whether the optimizer has the overflow flag of the step that is running
    step_depth: int = 0
    prepared: bool = False  # whether the pre-hook has done its part: what moves a master from then on is the step
    step_frame: FrameType | None = None  # the call of `step` that is running, if it has not been left by an exception
    open: bool = False  # whether a `scale_loss` body of this optimizer is running
    scale: Tensor | None = None  # that body's
    scaling: bool = False  # whether that body's loss is multiplied
    # Which bodies of the training's other optimizers are running; whether their losses are multiplied.
    beside: dict[int, bool] = field(default_factory=dict)
    bodies: int = 0  # how many were begun
    ended: int = -1  # `turns` when the last has ended
    cleared: int = 0  # how often `zero_grad` was called
    wrapped: bool = False  # whether something around the optimizer may look at gradients after its step
    spent: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # masters, and gradients left for the wrapper
    two_passes: bool = False  # whether weights are moved between backward and step, by a wrapper such as SAM
    wrappers: list[weakref.ref[Any]] = field(default_factory=list)  # those that were given a class
    left: set[int] = field(default_factory=set)  # ids of the parameters whose gradients were kept on the model
    gathered: bool = False  # whether a backward has brought gradients since the last step
    brought: TensorWeakRef | None = None  # the first gradient that `scale_loss` has left unscaled for the next step
    unowned: list[Tensor] = field(default_factory=list)  # the models' trainable parameters that no optimizer holds
    set_aside: SetAside | None = None
    names: dict[int, str] = field(default_factory=dict)  # id(param) -> qualified name, for messages
    siblings: list[Any] = field(default_factory=list)  # weak references to the training's optimizers
    sharing: list[Any] = field(default_factory=list)  # to those others that hold parameters of this one
    models: list[weakref.ref[nn.Module]] = field(default_factory=list)  # those that have parameters of this optimizer
    process_group: Any = None
    sharded: list[Any] = field(default_factory=list)  # weak references to the FSDP modules of its parameters
    handles: list[Any] = field(default_factory=list)
    owner: weakref.ref[Any] | None = None  # the optimizer
    quiet: regions.region | None = None  # the region without casts that a running step is in

    @property
    def step_skipped(self) -> bool:
        """Whether the last `optimizer.step()` was skipped because of an overflow.

        Syncs with the device where the optimizer skips there (`skips_on_device`), else not.
        """
        self.hear(wait=True)
        return self.last_skipped

    @step_skipped.setter
    def step_skipped(self, skipped: bool) -> None:
        self.hear(wait=True)
        self.last_skipped = skipped

    def hear(self, *, wait: bool = False) -> None:
        """Take note of the verdicts that have arrived; of all of them if `wait`, which syncs."""
        while self.verdicts and (wait or self.verdicts[0].here()):
            overflowed = self.verdicts.pop(0).read()
            self.last_skipped = bool(overflowed)
            for scaler in overflowed:
                scaler.skipped(lambda: "not known, the step was skipped on the device")

    @property
    def scales_loss(self) -> bool:
        """Whether any loss of the training is multiplied."""
        return any(scaler.scales for scaler in self.scalers)

    def __getstate__(self) -> dict[str, Any]:
        self.hear(wait=True)
        return {name: value for name, value in vars(self).items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            state,
            handles=[],
            owner=None,
            quiet=None,
            brought=None,
            siblings=[],
            models=[],
            sharded=[],
            sharing=[],
            unowned=[],
            wrappers=[],
            spent=[],
            process_group=None,
            names={},
            set_aside=None,
            left=set(),  # ids of another process
            earlier={},
            ended=-1,
            stepped={},
            told=False,
            step_depth=0,
            prepared=False,
            step_frame=None,
            open=False,
            scale=None,
            scaling=False,
            beside={},
        )
        if self.policy.master_weights:
            clipping.install()  # this may be another process
            replicas.install()

    def forget_cleared(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Of gradients that a delayed exit left scaled, those that were set to None since take their rest with them."""
        if self.earlier:
            there = {id(param) for param, _ in pairs if param.grad is not None}
            self.earlier = {key: earlier for key, earlier in self.earlier.items() if key in there}

    def clear_found(self) -> None:
        """The gradients that overflowed are gone: forget it, unless weights were moved by them, for the next ones."""
        if not self.two_passes:
            self.found.clear()

    def note_found(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Remember, on the device, that gradients of `scaler`'s loss went into the next step."""
        for index, (known, earlier) in enumerate(self.found):
            if known is scaler:
                self.found[index] = (scaler, torch.maximum(earlier, found_inf.to(earlier.device)))
                return
        self.found.append((scaler, found_inf))


class AmpOptimizer(Generated):
    """Overrides of an optimizer that went through `initialize`."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        # torch's optimizers, and ours, do nothing at all where there is no gradient.
        if issubclass(base, torch.optim.Optimizer) and base.__module__.partition(".")[0] in ("torch", "amp_patch"):
            return {}

        @functools.wraps(base.step)  # type: ignore[attr-defined]
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            return guarded_step(base, self, args, kwargs)

        step.hooked = True  # type: ignore[attr-defined]  # or torch calls the hooks around it, as it does around base's
        return {"step": step}

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """torch's, and the low-precision gradients of the model's parameters with it."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        stash = _stash(self)
        if stash is not None:
            recover(self, stash)
            for param, _ in stash.masters.linked():
                param.grad = None
            stash.pending = stash.brought = None
            stash.cleared += 1
            stash.earlier.clear()
            stash.spent = []
            stash.clear_found()
            stash.left.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; float16 and bfloat16 parameters of the group get masters where the policy has them."""
        stash = _stash(self)
        if stash is not None and stash.enabled:
            _refuse_known(self, stash, param_group)
            if stash.policy.master_weights:
                zero.check_new_group(self)
        super().add_param_group(param_group)  # type: ignore[misc]
        if stash is None or not stash.enabled:
            return
        group = self.param_groups[-1]  # type: ignore[attr-defined]
        if stash.scales_loss:
            for param in group["params"]:
                param.grad = None  # scaled, by whichever backward passes reached it before it had an optimizer
        if stash.policy.master_weights:
            stash.masters.attach(self, group)
            zero.repartition(self)
        note_sharing([other for ref in stash.siblings if (other := ref()) is not None])

    def __getstate__(self) -> dict[str, Any]:
        parent = getattr(super(), "__getstate__", None)  # object has one since Python 3.11
        state = dict(vars(self)) if parent is None else parent()
        stash = _stash(self)
        return state if stash is None else {**state, "_amp_stash": stash}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parent = getattr(super(), "__setstate__", None)
        if parent is None:
            vars(self).update(state)
        else:
            parent(state)
        stash = _stash(self)
        if stash is not None:
            stash.stepped.clear()  # the state is another one now
            if not stash.handles:
                register_hooks(self, stash)


def check(optimizer: Any, policy: Policy) -> None:
    """Raise unless `initialize` can take this (innermost) optimizer."""
    name = type(optimizer).__name__
    if not (callable(getattr(optimizer, "step", None)) and isinstance(getattr(optimizer, "param_groups", None), list)):
        raise TypeError(
            f"initialize: optimizers holds a {name}; wanted a torch.optim.Optimizer, or an object with a list "
            "`param_groups` and a method `step`"
        )
    if not hasattr(optimizer, "__dict__"):
        raise TypeError(
            f"initialize: optimizers holds a {name}, whose __slots__ leave its instances no __dict__ for masters and "
            "loss scale; add '__dict__' and '__weakref__' to its __slots__, or leave these out"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and (policy.scales_loss or policy.master_weights):
        raise ValueError(
            f"initialize: LBFGS evaluates the loss inside step(), which opt_level {policy.opt_level!r} cannot scale or "
            "gather; use it at O0, or at O4 (bfloat16 casts, no loss scaling)"
        )
    zero.check(optimizer, policy)


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that keep it as `.optim` or `.optimizer` (LARC), or `.base_optimizer` (SAM)."""
    if "_amp_stash" in getattr(optimizer, "__dict__", ()):  # `initialize` has found it to be that
        return optimizer
    *_, last = _layers(optimizer)
    return last


def _layers(optimizer: Any) -> Iterator[Any]:
    """`optimizer`, what it wraps, what that wraps, down to the optimizer that steps."""
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        inner = next(
            (i for name in ("optim", "optimizer", "base_optimizer") if (i := getattr(optimizer, name, None))), None
        )
        if inner is None or isinstance(inner, type) or not callable(getattr(inner, "step", None)):
            break
        # Some wrappers are Optimizers too, for the sake of schedulers. They say so on their class (LARC), were put
        # around an optimizer of ours afterwards (Accelerate), step by calling the one inside (SAM), or have no hooks,
        # because they never called Optimizer's __init__ (Lookahead).
        wraps = getattr(type(optimizer), "wraps_an_optimizer", False) or makes_two_passes(optimizer)
        later = hasattr(inner, "_amp_stash") and not hasattr(optimizer, "_amp_stash")
        hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
        if isinstance(optimizer, torch.optim.Optimizer) and hooked and not (wraps or later):
            break
        optimizer = inner


def makes_two_passes(wrapper: Any) -> bool:
    """Whether `wrapper` moves the weights after one backward pass, for the gradients of another, as SAM does."""
    base = getattr(wrapper, "base_optimizer", None)
    return callable(getattr(base, "step", None)) and not isinstance(base, type)


class AmpWrapper(Generated):
    """Overrides of a wrapper that makes two passes around an optimizer that went through `initialize`."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_closure(self, (self, *args), kwargs)
            return base.step(self, *args, **kwargs)  # type: ignore[attr-defined]

        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            base.zero_grad(self, *args, **kwargs)  # type: ignore[attr-defined]
            innermost(self).zero_grad(*args, **kwargs)  # which knows of the model's gradients too

        def first_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            settle(innermost(self))
            result = base.first_step(self, *args, **kwargs)  # type: ignore[attr-defined]
            # The forward would do so, but not a compiled one, nor that of a part of the model.
            publish_written(innermost(self)._amp_stash.masters.linked())
            return result

        def second_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            settle(innermost(self))  # what has no gradient is not moved back
            return base.second_step(self, *args, **kwargs)  # type: ignore[attr-defined]

        hooked = issubclass(base, torch.optim.Optimizer)  # a scheduler may have captured its step
        made = [zero_grad, first_step, second_step] if hooked else [step, zero_grad, first_step, second_step]
        return {method.__name__: method for method in made if hasattr(base, method.__name__)}


def enter_wrappers(optimizer: Any) -> None:
    """Let the optimizer inside of `optimizer`, which may be any, know what is around it; idempotent."""
    *wrappers, target = _layers(optimizer)
    stash = _stash(target)
    if stash is None or not stash.enabled:
        return
    stash.wrapped = stash.wrapped or bool(wrappers)
    for wrapper in filter(makes_two_passes, wrappers):
        stash.two_passes = True
        if isinstance(wrapper, AmpWrapper):
            continue
        stash.masters.follow(wrapper)
        generated_class.give(wrapper, AmpWrapper)
        stash.wrappers.append(weakref.ref(wrapper))
        if isinstance(wrapper, torch.optim.Optimizer):
            stash.handles.append(wrapper.register_step_pre_hook(refuse_closure))


def refuse_closure(wrapper: Any, args: Any, kwargs: Any) -> None:
    """Pre-hook of a wrapper's `step`: its closure would run backward without the scale."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    stash = _stash(innermost(wrapper))
    if closure is not None and stash is not None and stash.scales_loss:
        name = base_class(wrapper).__name__
        raise RuntimeError(
            f"{name}.step: a closure computes the gradients of the second pass inside step(); under loss scaling make "
            f"the two passes yourself, each with its own scale_loss: backward, {name}.first_step(zero_grad=True), "
            f"backward again, {name}.second_step(zero_grad=True) (examples/recipes/sam.py)"
        )


def enter_training(
    optimizer: Any, stash: Stash, about_to_be_cast: Collection[int], mixin: type[AmpOptimizer] = AmpOptimizer
) -> None:
    """Give `optimizer` its class (the subclass for `mixin`), stash, hooks, and the masters of its parameters."""
    if stash.policy.master_weights:
        for group in optimizer.param_groups:
            stash.masters.attach(optimizer, group, about_to_be_cast)
        zero.repartition(optimizer)
    optimizer._amp_stash = stash
    generated_class.give(optimizer, mixin)
    _lead_scheduler(optimizer)
    register_hooks(optimizer, stash)


def _lead_scheduler(optimizer: Any) -> None:
    """Have the step that a scheduler captured, and put into the instance, call that of the class of now."""
    captured = vars(optimizer).get("step")
    if getattr(captured, "_wrapped_by_lr_sched", False) and "func" in captured.__code__.co_freevars:
        captured.__closure__[captured.__code__.co_freevars.index("func")].cell_contents = type(optimizer).step


def register_hooks(optimizer: Any, stash: Stash) -> None:
    """Be called around every `step`."""
    stash.owner = weakref.ref(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        stash.handles = [
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_step_post_hook(after_step),
        ]


def restore(optimizer: Any, *, recast_state: bool = True) -> None:
    """Undo `enter_training`. With `recast_state` the state takes the type that the parameters have now."""
    stash = _stash(optimizer)
    if stash is None:
        return
    attempt = Attempts()
    attempt(recover, optimizer, stash)
    attempt(settle, optimizer)
    for handle in stash.handles:
        attempt(handle.remove)
    wrappers = [wrapper for ref in stash.wrappers if isinstance(wrapper := ref(), Generated)]
    for wrapper in wrappers:
        attempt(generated_class.take, wrapper)
        attempt(stash.masters.unfollow, wrapper)
    linked = stash.masters.linked()
    attempt(stash.masters.detach, optimizer)
    attempt(zero.repartition, optimizer)
    if isinstance(optimizer, Generated):
        attempt(generated_class.take, optimizer)
        attempt(_lead_scheduler, optimizer)
    del optimizer._amp_stash
    if recast_state:
        for param, _ in linked:
            disconnect(param)
        attempt(state_follows_params, optimizer)
    attempt.finish()


def state_follows_params(optimizer: Any) -> None:
    """Cast the optimizer's state to its parameters' dtypes, by torch's own rules for loading a state."""
    optimizer = zero.stateful(optimizer)
    if getattr(optimizer, "state", None) and any(
        isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0 and value.dtype is not param.dtype
        for param, state in optimizer.state.items()
        if isinstance(param, Tensor) and isinstance(state, dict)
        for value in state.values()
    ):
        optimizer.load_state_dict(optimizer.state_dict())


def warn_of_small_eps(optimizer: Any) -> None:
    """Warn where a group's `eps` is 0 in the dtype of its low-precision parameters: Adam then divides by 0.

    Not of an optimizer that says of itself that it `computes_in_fp32`.
    """
    if getattr(optimizer, "computes_in_fp32", False):
        return
    for index, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        dtypes = {p.dtype for p in group["params"] if p.dtype in LOW_PRECISION}
        for dtype in dtypes:
            if isinstance(eps, float) and eps > 0 and torch.tensor(eps, dtype=dtype).item() == 0:
                warnings.warn(
                    f"initialize: eps={eps:g} of {base_class(optimizer).__name__}'s group {index} is 0 in "
                    f"{dtype}, the type that its parameters have without masters: a first step can give NaN. Use "
                    "eps=1e-4, or opt_level='O2'",
                    stacklevel=4,
                )


def distinct_pairs(optimizers: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """(param, master) of all the optimizers' parameters, one that several of them share once."""
    return list(
        {
            id(param): (param, master)
            for optimizer in optimizers
            for param, master in optimizer._amp_stash.masters.pairs(optimizer.param_groups)
        }.values()
    )


def first_gradient(optimizer: Any) -> Tensor | None:
    """A gradient that the optimizer would step with; of the model's where its masters have none yet."""
    stash = _stash(innermost(optimizer))
    for group in innermost(optimizer).param_groups:
        pairs = [(p, p) for p in group["params"]] if stash is None else stash.masters.pairs([group])
        for param, master in pairs:
            grad = param.grad if master.grad is None else master.grad
            if grad is not None:
                return grad
    return None


def note_sharing(optimizers: Sequence[Any]) -> None:
    """Let the optimizers of a training know which others hold parameters of theirs."""
    held = [
        (optimizer, stash, {id(param) for param, _ in stash.masters.pairs(optimizer.param_groups)})
        for optimizer in optimizers
        if (stash := _stash(optimizer)) is not None
    ]
    for optimizer, stash, own in held:
        stash.sharing = [weakref.ref(o) for o, _, params in held if o is not optimizer and not own.isdisjoint(params)]


def sharing(stash: Stash) -> list[tuple[Any, Stash]]:
    """The other optimizers of the training that hold parameters of this one, which are still in it."""
    alive = [other for ref in stash.sharing if (other := ref()) is not None]
    return [(other, known) for other in alive if (known := _stash(other)) is not None]


def unscale(optimizers: Sequence[Any], scaler: LossScaler, inverse: Tensor | None) -> None:
    """Turn scaled gradients of the model into unscaled ones of the masters; record overflow on the device; no sync.

    `inverse` is of the scale that the loss was multiplied by; None where it was not, and nothing is checked. After an
    exception there are no gradients: none that is half unscaled, and none whose overflow nobody has noted.
    """
    pairs = distinct_pairs(optimizers)
    try:
        _unscale(optimizers, pairs, scaler, inverse)
    except BaseException:
        drop(pairs)
        for optimizer in optimizers:
            optimizer._amp_stash.pending, optimizer._amp_stash.earlier = None, {}
        raise


def drop(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Drop the gradients of parameters and masters."""
    for param, master in pairs:
        param.grad = master.grad = None


def _unscale(
    optimizers: Sequence[Any], pairs: list[tuple[Tensor, Tensor]], scaler: LossScaler, inverse: Tensor | None
) -> None:
    stashes: list[Stash] = [optimizer._amp_stash for optimizer in optimizers]
    for stash in stashes:
        drop_spent(stash)
    earlier: dict[int, Earlier] = {}
    for stash in stashes:
        if stash.pending is not None:
            stash.forget_cleared(pairs)
        earlier.update(stash.earlier)
    found = gather(pairs, inverse, keep=any(stash.keeps_scaled_gradients for stash in stashes), earlier=earlier)
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        stash.pending = None
        stash.earlier.clear()
        stash.gathered = True
        first = first_gradient(optimizer)
        stash.brought = None if first is None else TensorWeakRef(first)
        if stash.keeps_scaled_gradients:
            own = stash.masters.pairs(optimizer.param_groups)
            stash.left = {id(param) for param, master in own if param is not master and param.grad is not None}
    if inverse is None:
        return
    found = distributed.agree(found, [param for param, _ in pairs])
    overall = torch.zeros_like(scaler.scale_tensor)
    for found_inf in found.values():
        overall = torch.maximum(overall, found_inf.to(overall.device))
    for group in {id(s.process_group): s.process_group for s in stashes if s.process_group is not None}.values():
        torch.distributed.all_reduce(overall, torch.distributed.ReduceOp.MAX, group=group)
    # One overflow skips the step, whatever follows: only a loss's first before a step moves its scale.
    known = [f.to(overall.device) for stash in stashes for s, f in stash.found if s is scaler]
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        stash.note_found(scaler, overall)
        if stash.two_passes:
            _move_nothing(optimizer, stash)
    here = set(map(id, stashes))
    others = {id(other): other for stash in stashes for _, other in sharing(stash) if id(other) not in here}
    for other in others.values():  # what overflowed may be in gradients that they would step with
        other.note_found(scaler, overall)
    scaler.record(overall * (1 - torch.stack(known).amax()) if known else overall)


@torch.no_grad()
def _move_nothing(optimizer: Any, stash: Stash) -> None:
    """Make the gradients 0 where one overflowed: weights moved by them would be NaN in the second pass; no sync.

    Running statistics of batch norms would never recover from that. The step will be skipped.
    """
    overflow = torch.stack([found_inf.to(stash.found[0][1].device) for _, found_inf in stash.found]).amax() > 0
    for _, master in stash.masters.pairs(optimizer.param_groups):
        if master.grad is not None:
            grad = master.grad._values() if master.grad.is_sparse else distributed.local(master.grad)
            grad.masked_fill_(overflow.to(grad.device), 0)


def settle(optimizer: Any) -> None:
    """Unscale gradients that a delayed exit of `scale_loss` left scaled; no sync.

    Those of all optimizers of that exit: they may share parameters, and one that overflowed holds the others up. And
    those that were left for others that share parameters with this one.
    """
    stash = _stash(optimizer)
    if stash is None:
        return
    for holder, known in ((optimizer, stash), *sharing(stash)):
        if (pending := known.pending) is None:
            continue
        others = [other for ref in known.siblings if (other := ref()) is not None and other is not holder]
        left = [o for o in others if (its := _stash(o)) is not None and its.pending is pending]
        unscale([holder, *left], pending.scaler, inverse_of(pending.scale) if pending.scaling else None)
        if pending.updates == pending.scaler.updates:  # else this loss moved its scale since, with another optimizer
            pending.scaler.update()


@not_traced
def before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Pre-hook of `step`; `args` begins with the optimizer. Returns other arguments, or None to keep these.

    Where the loss is scaled, one sync with the device: did a gradient overflow? None if the optimizer skips there.
    """
    stash = _stash(optimizer)
    if stash is None or not stash.enabled:
        return None
    recover(optimizer, stash)
    if stash.open or stash.beside:
        _refuse_in_body(optimizer, stash)
    stash.step_depth += 1
    if stash.step_depth > 1:  # a subclass's step that calls super().step() fires the hooks twice
        return None
    stash.step_frame = sys._getframe(1)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None and stash.scales_loss:
        recover(optimizer, stash, running=False)
        raise RuntimeError(
            f"{base_class(optimizer).__name__}.step: a closure computes new gradients inside step(), after "
            "the check for overflow; under loss scaling call the closure's body first, then step() without it"
        )
    drop_spent(stash)
    stalled_averages.compare(stash.models)
    settle(optimizer)
    reconcile(stash.masters.linked())
    _warn_of_ungathered(optimizer, stash)
    _drop_removed(optimizer, stash)
    stash.hear()
    if skips_on_device(optimizer, stash):
        stash.verdicts.append(Verdict(stash.found))
        optimizer.grad_scale, optimizer.found_inf = None, stash.verdicts[-1].overflow
        stash.told = True
    else:
        overflowed = _read_found(stash)
        stash.step_skipped = bool(overflowed)
        for scaler in overflowed:
            scaler.skipped(lambda: culprits(optimizer))
        if overflowed:
            # An optimizer does nothing where there is no gradient; what some count per group is put back afterwards.
            grads = [(m, m.grad) for _, m in stash.masters.pairs(optimizer.param_groups) if m.grad is not None]
            values = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            stash.set_aside = SetAside(grads, values)
            for master, _ in grads:
                master.grad = None
    watched = None if closure is None else regions.as_now(closure)
    if casts_state.current() is not None:  # what an optimizer computes is computed in the types of what it updates
        stash.quiet = regions.region(None)
        stash.quiet.call = stash.step_frame
        stash.quiet.__enter__()
    stash.prepared = True
    if watched is None:
        return None
    return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})


@not_traced
def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Post-hook of `step`: publish the masters, or put back what a skipped step must not have changed."""
    stash = _stash(optimizer)
    if stash is None or not stash.enabled or stash.step_depth == 0:
        return
    stash.step_depth -= 1
    if stash.step_depth > 0:
        return
    skipped = stash.set_aside is not None
    if stash.set_aside is not None:
        for master, grad in stash.set_aside.grads:
            master.grad = grad
    elif not stash.told and _may_skip_on_device(optimizer, stash):
        _note_stepped(optimizer, stash)
    casts_state.drop_cache()  # fully_shard gathers new values into the old tensor, at the old version
    consume(optimizer, stash)
    if not skipped:  # of a step that the device skipped, the values that are there already
        publish(stash.masters.linked())
    stalled_averages.remember(stash.models)
    # Last, and publish behind consume: `recover` asks after an exception whether these were done.
    recover(optimizer, stash, running=False)


def guarded_step(base: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """The step of an optimizer whose class `base` is not torch's, with the two calls that hooks make for torch's.

    It may have no hooks; it may divide by the number of gradients, or count its steps wherever it likes: skipped means
    not called.
    """
    stash = _stash(optimizer)
    if stash is not None:
        recover(optimizer, stash)
    if stash is None or not stash.enabled or stash.step_depth > 0:
        return base.step(optimizer, *args, **kwargs)
    called, kwargs = before_step(optimizer, (optimizer, *args), kwargs) or ((optimizer, *args), kwargs)
    skipped = stash.set_aside is not None
    result = None if skipped else base.step(*called, **kwargs)
    after_step(optimizer, called, kwargs)
    return result


def consume(optimizer: Any, stash: Stash) -> None:
    """Forget the gradients that a step, taken or skipped, was for: the masters' that nobody waits for."""
    stash.gathered, stash.brought = False, None
    stash.left.clear()
    stash.found.clear()
    awaited = _awaited_by_others(optimizer, stash)
    masters = [link.master for _, link in stash.masters.linked() if id(link.master) not in awaited]
    if stash.wrapped:  # Lookahead moves what has a gradient, after the step
        stash.spent = [(master, master.grad) for master in masters if master.grad is not None]
        return
    for master in masters:
        master.grad = None  # consumed: scripts that clear only the model's gradients never see it


def drop_spent(stash: Stash) -> None:
    """Set the gradients to None that `consume` left for a wrapper, where they are still there.

    Those that it left to others which share masters too: this optimizer would add to them, or step with them.
    """
    for holder in (stash, *(known for _, known in sharing(stash))):
        for master, grad in holder.spent:
            if master.grad is grad:
                master.grad = None
        holder.spent = []


def culprits(optimizer: Any) -> str:
    """The parameters whose gradients are not finite, by name. Syncs with the device."""
    stash: Stash = optimizer._amp_stash
    lines = []
    sharded = False
    for index, group in enumerate(optimizer.param_groups):
        for position, master in enumerate(group["params"]):
            if master.grad is None:
                continue
            sharded = sharded or distributed.is_dtensor(master.grad)
            # Of a sharded one this process's part: it may be the only process to ask.
            grad = master.grad._values() if master.grad.is_sparse else distributed.local(master.grad)
            if bool(torch.isfinite(grad).all()):
                continue
            param = next(p for p, m in stash.masters.pairs([{"params": [master]}]))
            name = stash.names.get(id(param), f"group {index}, parameter {position}")
            lines.append(f"{name} ({'NaN' if bool(torch.isnan(grad).any()) else 'Inf'})")
    shown = ", ".join(lines[:8]) or f"no gradient {'in the shards of this process' if sharded else 'any more'}"
    return shown + (f" and {len(lines) - 8} more" if len(lines) > 8 else "")


def _awaited_by_others(optimizer: Any, stash: Stash) -> set[int]:
    """The masters (ids) that another optimizer of the training holds too and has yet to step with."""
    awaited: set[int] = set()
    for ref in stash.siblings:
        other = ref()
        other_stash = None if other is None or other is optimizer else _stash(other)
        if other_stash is not None and other_stash.gathered:
            awaited.update(id(link.master) for _, link in other_stash.masters.linked())
    return awaited


def _read_found(stash: Stash) -> list[LossScaler]:
    if not stash.found:
        return []
    flags = torch.stack([found_inf.to(stash.found[0][1].device) for _, found_inf in stash.found])
    return _overflowed([scaler for scaler, _ in stash.found], flags.tolist())


def _overflowed(scalers: list[LossScaler], flags: list[float]) -> list[LossScaler]:
    """Those of the scalers whose flag is up; the others are told that the step was taken."""
    for scaler, flag in zip(scalers, flags, strict=True):
        if not flag:
            scaler.stepped()
    return [scaler for scaler, flag in zip(scalers, flags, strict=True) if flag]


def waits(device: torch.device) -> bool:
    """Whether reading a value of `device` makes the host wait for all that was asked of it before."""
    return device.type != "cpu"


def skips_on_device(optimizer: Any, stash: Stash) -> bool:
    """Whether the coming step can be given its overflow flag on the device, as torch.amp.GradScaler gives it.

    Then nothing waits: the host learns later what happened. The first step of a parameter is not one of these, because
    torch's fused SGD fills its momentum by host knowledge that it was the first; nor is the one after a skip, so that
    messages about several skips in a row can name the parameters.
    """
    if not _may_skip_on_device(optimizer, stash) or stash.last_skipped:
        return False
    state, stepped = optimizer.state, stash.stepped
    return all(
        type(master) in (Tensor, nn.Parameter, Master) and stepped.get(id(master)) == len(state.get(master, ()))
        for _, master in stash.masters.pairs(optimizer.param_groups)
        if master.grad is not None
    )


def _may_skip_on_device(optimizer: Any, stash: Stash) -> bool:
    able = getattr(optimizer, "skips_on_device", getattr(optimizer, "_step_supports_amp_scaling", False))
    devices = {found_inf.device for _, found_inf in stash.found} if able else set()
    return len(devices) == 1 and waits(devices.pop())


def _note_stepped(optimizer: Any, stash: Stash) -> None:
    for _, master in stash.masters.pairs(optimizer.param_groups):
        if master.grad is not None:
            stash.stepped[id(master)] = len(optimizer.state.get(master, ()))


def _put_back(optimizer: Any, stash: Stash) -> None:
    if stash.set_aside is None:
        return
    for group, values in zip(optimizer.param_groups, stash.set_aside.group_values, strict=False):
        for added in group.keys() - values.keys() - {"params"}:
            del group[added]
        group.update(values)
    stash.set_aside = None


def recover(optimizer: Any, stash: Stash, running: bool | None = None) -> None:
    """After an exception in `step`, which kept the post-hook from running: put back what the pre-hook changed.

    Nothing while the step is running: a closure is, or a subclass's step that calls its parent's. `running` says so, if
    the caller knows. Gradients that overflowed stay away: they may have been cleared since. What the step has written
    into masters is published. After an exception in here the next call does the rest.
    """
    if stash.step_depth == 0 and stash.step_frame is None:
        return
    left = running is None
    if thread_state.is_running(stash.step_frame) if running is None else running:
        return
    if stash.told:
        optimizer.grad_scale = optimizer.found_inf = None
        del optimizer.grad_scale, optimizer.found_inf
        stash.told = False
    if stash.quiet is not None:
        stash.quiet.__exit__(None, None, None)
        stash.quiet = None
    _put_back(optimizer, stash)
    if left and publish_written(stash.masters.linked()) and stash.prepared:
        consume(optimizer, stash)
    stash.step_depth, stash.step_frame, stash.prepared = 0, None, False


def _drop_removed(optimizer: Any, stash: Stash) -> None:
    """Where a script has set some gradients of the model to None since they were gathered, drop their masters' too.

    It wants those parameters left alone (frozen for a while), as happens where they are the optimizer's own. All of
    them None is a script that has done with the model's gradients: the masters' are there to step with.
    """
    if not stash.left:
        return
    kept = [pair for pair in stash.masters.pairs(optimizer.param_groups) if id(pair[0]) in stash.left]
    removed = [master for param, master in kept if param.grad is None]
    if len(removed) < len(kept):
        for master in removed:
            master.grad = None


def _refuse_in_body(optimizer: Any, stash: Stash) -> None:
    """Raise if the running body of a `scale_loss` has the gradients of this step, or has them to unscale yet."""
    pairs = stash.masters.pairs(optimizer.param_groups)
    own = any(param is master for param, master in pairs)
    if stash.open and stash.scaling:
        where = "where its gradients are scaled and unchecked"
    elif any(stash.beside.values()) and (own or stash.pending is not None):
        where = "whose scaled backward may reach its parameters: its own gradients are away until that ends"
    elif any(p is not master and (stash.open or (p.grad is not None and master.grad is None)) for p, master in pairs):
        where = "where its gradients are on the low-precision parameters, not on their masters"
    else:
        return
    raise RuntimeError(
        f"{base_class(optimizer).__name__}.step: called in the body of scale_loss, {where}; give scale_loss "
        "all optimizers of the loss, and call their step() after the `with` block. A step in a hook of backward "
        "(register_post_accumulate_grad_hook) is possible at O0 and O4"
    )


def _warn_of_ungathered(optimizer: Any, stash: Stash) -> None:
    """Warn of gradients of cast parameters that no exit of `scale_loss` has brought to their masters.

    Other optimizers' bodies may leave such gradients on the model, and rightly so (a GAN's generator loss fills the
    discriminator's): after one of those only an optimizer none of whose masters has a gradient is warned about.
    """
    linked = stash.masters.linked()
    strays = {id(link.master): param for param, link in linked if param.grad is not None}
    if not strays or (stash.keeps_scaled_gradients and stash.bodies > 0):  # those may have been gathered
        return
    others = bool(stash.beside) or stash.ended != Stash.turns  # whether another body is running, or was since
    if others and any(link.master.grad is not None for _, link in linked):
        return
    named = [
        stash.names.get(id(strays[id(master)]), f"group {index}, parameter {position}")
        for index, group in enumerate(optimizer.param_groups)
        for position, master in enumerate(group["params"])
        if id(master) in strays
    ]
    if named:
        warnings.warn(
            f"{base_class(optimizer).__name__}.step: {named[0]} has a gradient on the model that was never "
            f"gathered for this optimizer{f', and so have {len(named) - 1} more' if len(named) > 1 else ''}: the step "
            "does without; call backward() inside `with amp.scale_loss(loss, optimizer)`",
            stacklevel=4,
        )


def _refuse_known(optimizer: Any, stash: Stash, param_group: Any) -> None:
    params = param_group.get("params") if isinstance(param_group, dict) else None
    if params is None:
        return  # torch's own error says what is wrong
    params = [params] if isinstance(params, Tensor) else params
    if not isinstance(params, list | tuple):
        return
    known = {id(param) for param, _ in stash.masters.pairs(optimizer.param_groups)}
    if any(isinstance(p, Tensor) and id(p) in known for p in params):
        raise ValueError("add_param_group: some parameters appear in more than one parameter group")


def _stash(optimizer: Any) -> Stash | None:
    return getattr(optimizer, "_amp_stash", None)


def name_parameters(stash: Stash, models: list[nn.Module]) -> None:
    """Give the stash the qualified names of the models' parameters, for its messages."""
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            stash.names.setdefault(id(param), prefix + name)
