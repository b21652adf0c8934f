"""Steps of an optimizer's own code on some of its parameters, and which classes of other packages that is right for.

Nobody but its author, or who has read it, knows that a class steps each parameter by itself. So a user registers it;
`initialize` tries the class on small parameters, and refuses where a parameter by itself is stepped differently.

Such a step often writes into its group (`group["step"] += 1`) or into the optimizer. Each portion begins with what was
there before the step, and what the portions have written, all of them the same, is written back once.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from amp_patch import environment
from amp_patch.support.generated_class import base_class
from amp_patch.support.random_states import random_states, restored_random_states
from amp_patch.training.step import Plain, plain_step, trusted_steps

Group = dict[str, Any]
OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

_NOT_SETTINGS = ("params",)
_NOT_ATTRIBUTES = ("param_groups", "state")

# ----------------------------------------------------------------------------------------------------------------------
# Which classes


@dataclass(frozen=True)
class _Registration:
    plain: Plain
    fp32_state: frozenset[str]


_registered: WeakKeyDictionary[type, _Registration] = WeakKeyDictionary()


def register_per_parameter_optimizer(
    optimizer_class: OptimizerClass, *, fp32_state: Sequence[str] = ()
) -> OptimizerClass:
    """Say that a class of optimizers steps each parameter by itself, so that amp_patch may step a portion at a time.

    That is so where the step of a parameter takes its own weight, gradient and state, the settings of its group and a
    count of steps, but no number made of several parameters (a common norm, an estimated learning rate). With it the
    class has what torch's own have: with masters on a CPU its steps are made in portions, its gradients wait in low
    precision; with split masters a portion of masters is FP32 at a time; `optimizer_state="8bit"` and
    `gradient_release=True` are possible.

    `initialize` checks it on small parameters with the optimizer's settings. What no short trial shows is yours to
    know: a step that looks at several parameters only now and then, say.

    Args:
        optimizer_class: a subclass of torch.optim.Optimizer; its own subclasses are not registered by it.
        fp32_state: names of state tensors that stay FP32 under `optimizer_state="8bit"`, those that hold weights or
            their average, or a running maximum.

    Returns:
        `optimizer_class`: this is a decorator, too.

    Raises:
        TypeError: it is no such class, or `fp32_state` no sequence of names.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        is_class = isinstance(optimizer_class, type)
        came = repr(optimizer_class) if is_class else f"an object of {type(optimizer_class).__name__}"
        raise TypeError(
            f"register_per_parameter_optimizer: optimizer_class is {came}; wanted a subclass of "
            "torch.optim.Optimizer (the class, not one of its objects)"
        )
    if isinstance(fp32_state, str) or not all(isinstance(name, str) for name in fp32_state):
        raise TypeError(
            f"register_per_parameter_optimizer: fp32_state is {fp32_state!r}; wanted a list of names of state tensors, "
            'as ["z"]'
        )
    plain = _own_step(optimizer_class)
    _registered[optimizer_class] = _Registration(plain, frozenset(fp32_state))
    trusted_steps.add(plain)
    return optimizer_class


def _own_step(base: Any) -> Plain:
    step: Plain = plain_step(base) or base.step  # before its first object is made torch's hooks are not around it
    return step


def is_registered(base: Any) -> bool:
    """Whether `base` is a registered class, with the step that it had then."""
    found = _registered.get(base)
    return found is not None and found.plain is _own_step(base)


def fp32_state_of(base: Any) -> frozenset[str]:
    """The names of state tensors that a registered class has in FP32 always."""
    return _registered[base].fp32_state if is_registered(base) else frozenset()


# ----------------------------------------------------------------------------------------------------------------------
# A step


def shell_of(optimizer: Any, group: Group, masters: list[Tensor]) -> Any:
    """An optimizer with the attributes and the state of `optimizer`, and of its groups `group` with these masters."""
    shell: Any = object.__new__(base_class(optimizer))
    vars(shell).update(vars(optimizer))
    shell.param_groups = [{**group, "params": masters}]
    return shell


class PortionsDisagreeError(RuntimeError):
    """Two portions of a step have written different numbers into the group or the optimizer."""


@contextmanager
def stepping(optimizer: Any, plain: Plain) -> Iterator[Callable[[Group, list[Tensor]], None]]:
    """One step in portions: gives what runs `plain` on some masters of a group.

    Raises:
        PortionsDisagreeError: two portions of a registered class have written different numbers into the group or the
            optimizer.
    """
    if not is_registered(base_class(optimizer)):
        yield lambda group, masters: plain(shell_of(optimizer, group, masters))
        return
    written = Written()

    def step_some(group: Group, masters: list[Tensor]) -> None:
        shell = shell_of(optimizer, group, masters)
        plain(shell)
        written.note(optimizer, [group], shell)

    try:
        yield step_some
        for group in optimizer.param_groups:
            if not written.has(group):
                step_some(group, group["params"])  # without gradients
    finally:
        written.write_back(optimizer)


class Written:
    """What shells have written into groups and attributes in one step: kept apart until all have begun with the same.

    False until a shell has stepped.
    """

    def __init__(self) -> None:
        self._attributes: dict[str, Any] | None = None
        self._settings: dict[int, Group] = {}  # by id(group)

    def __bool__(self) -> bool:
        return self._attributes is not None

    def has(self, group: Group) -> bool:
        """Whether a shell has stepped some of this group of the optimizer."""
        return id(group) in self._settings

    def note(self, optimizer: Any, groups: Sequence[Group], shell: Any) -> None:
        """Take note of what `shell` has written, whose groups are made of these of the optimizer.

        Raises:
            PortionsDisagreeError: another has written something else.
        """
        attributes = _changed(vars(optimizer), vars(shell), _NOT_ATTRIBUTES)
        self._refuse_if_different(optimizer, self._attributes, attributes, "optimizer")
        for group, after in zip(groups, shell.param_groups, strict=True):
            settings = _changed(group, after, _NOT_SETTINGS)
            self._refuse_if_different(optimizer, self._settings.get(id(group)), settings, "group")
            self._settings[id(group)] = settings
        self._attributes = attributes

    @staticmethod
    def _refuse_if_different(optimizer: Any, before: dict[str, Any] | None, now: dict[str, Any], where: str) -> None:
        if before is None or same(before, now):
            return
        name = next(name for name in [*before, *now] if not same(before.get(name), now.get(name)))
        kind = base_class(optimizer).__name__
        raise PortionsDisagreeError(
            f"{kind}.step: {kind} was registered by register_per_parameter_optimizer, but its step has left {name!r} "
            f"of the {where} at {before.get(name)} with some parameters and at {now.get(name)} with others: it does "
            "not step each parameter by itself. Some parameters are stepped: go back to a checkpoint, and leave the "
            "registration out"
        )

    def write_back(self, optimizer: Any) -> None:
        """Have the optimizer and its groups have what the shells have written."""
        for group in optimizer.param_groups:
            group.update(self._settings.get(id(group), {}))
        vars(optimizer).update(self._attributes or {})


def _changed(before: dict[str, Any], after: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in after.items()
        if name not in without and not (name in before and before[name] is value)
    }


def same(one: Any, other: Any) -> bool:
    """Whether two nested containers of tensors and numbers are equal, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ----------------------------------------------------------------------------------------------------------------------
# The trial

STEPS = 12  # some do more at each fifth or tenth, Lookahead's merge say
_DIFFERENT = "it steps a parameter by itself differently from the same among others; leave the registration out"
SHIFT = 64.0  # of the weights, by which a state that holds weights is shifted too


def check(optimizer: Any, keeps_codes: bool) -> None:
    """Raise if the (innermost) optimizer is of a registered class and, on small parameters, not what that wants.

    A class that ``AMP_PATCH_PER_PARAMETER`` names is registered here: for a script that is not to be edited.

    Args:
        keeps_codes: whether its state is to be in eight bits.
    """
    base = base_class(optimizer)
    named = environment.per_parameter_optimizers()
    if base.__name__ in named and not is_registered(base) and isinstance(optimizer, torch.optim.Optimizer):
        register_per_parameter_optimizer(base, fp32_state=named[base.__name__])
    if not is_registered(base):
        return
    reason = _reason_against(optimizer, _registered[base], keeps_codes)
    if reason is not None:
        raise ValueError(
            f"initialize: {base.__name__} was registered by register_per_parameter_optimizer, but tried on small "
            f"parameters {reason}"
        )


@torch.no_grad()
def _reason_against(optimizer: Any, found: _Registration, keeps_codes: bool) -> str | None:
    pair: list[Any] = []  # of the same weights, but for a shift
    try:
        with warnings.catch_warnings(), restored_random_states() as before:
            warnings.simplefilter("ignore")
            whole, portioned = _toy(optimizer), _toy(optimizer)
            if keeps_codes:  # a decay that is added to the gradient would have all state follow the weights
                pair = [_toy(optimizer, weight_decay=0.0), _toy(optimizer, SHIFT, weight_decay=0.0)]
            for step in range(STEPS):
                for toy in (whole, portioned, *pair):
                    _give_gradients(toy, step)
                    _step_toy(toy, found.plain, by_itself=toy is portioned)
                if not same(random_states(), before):
                    return "it draws random numbers, which portions would draw more of; leave the registration out"
                if not _agree(whole, portioned):
                    return _DIFFERENT
    except PortionsDisagreeError:
        return _DIFFERENT
    except Exception as error:  # the class's own code, of which nothing is known
        return f"its step fails ({type(error).__name__}: {error}); mend that, or leave the registration out"
    names = list(dict.fromkeys(name for state in whole.state.values() for name in state))
    if unknown := found.fp32_state - set(names):
        return f"its state has no {sorted(unknown)[0]!r}, which fp32_state names; it has {', '.join(names) or 'none'}"
    held = [name for name in names if pair and name not in found.fp32_state and _holds_weights(pair, name)]
    if held:
        return (
            f"its state {held[0]!r} holds weights, which eight bits are too few for; register it with "
            f"fp32_state={[*sorted(found.fp32_state), *held]}"
        )
    return None


def _toy(optimizer: Any, shift: float = 0.0, **instead: Any) -> Any:
    """An optimizer of the same class and settings, whose groups have a few small parameters of the same kinds.

    `instead` takes the place of settings that there are. They are FP64, whose last bits tell of a common number that
    FP32 would round away.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    memo = {id(param): param for param in params}  # deepcopy shares parameters: else each toy copies the model
    toy: Any = object.__new__(base_class(optimizer))
    of_torch = vars(torch.optim.SGD([nn.Parameter(_wave((1,), 1.0, 0.0))]))  # empty dicts of hooks, among others
    own = {name: value for name, value in vars(optimizer).items() if name not in of_torch or name == "defaults"}
    own = {name: value for name, value in own.items() if name != "step" and not name.startswith("_amp_")}
    vars(toy).update(of_torch | {name: copy.deepcopy(value, memo) for name, value in own.items()})
    toy.state = defaultdict(dict)
    toy.param_groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {name: copy.deepcopy(value, memo) for name, value in group.items() if name not in _NOT_SETTINGS}
        settings |= {name: value for name, value in instead.items() if name in settings}
        shapes = _small_shapes(group["params"])
        small = [nn.Parameter(_wave(shape, 0.37, place + 10.0 * index) + shift) for place, shape in enumerate(shapes)]
        toy.param_groups.append({**settings, "params": small})
    return toy


def _small_shapes(params: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Two to five shapes of as many dimensions as those of `params`."""
    shapes = list(dict.fromkeys(tuple(param.shape) for param in params))
    chosen = [tuple(min(size, 3 + place) for size in shape) for place, shape in enumerate(shapes[:5])]
    return chosen * 2 if len(chosen) == 1 else chosen


def _wave(shape: tuple[int, ...], pace: float, start: float, dtype: torch.dtype = torch.float64) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype, device="cpu").mul_(pace).add_(start).sin_().reshape(shape)


def _give_gradients(toy: Any, step: int) -> None:
    """New gradients, small and large; one parameter of each group has none in one of the steps."""
    for index, group in enumerate(toy.param_groups):
        for place, param in enumerate(group["params"]):
            grad = _wave(tuple(param.shape), 1.7, place + 3.0 * step + index, param.dtype)
            grad *= 10.0 ** (place % 5 + 2 * (step % 4) - 4)
            param.grad = None if place == step == 1 else grad


def _step_toy(toy: Any, plain: Plain, by_itself: bool) -> None:
    if not by_itself:
        plain(toy)
        return
    with stepping(toy, plain) as step_some:
        for group in toy.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    step_some(group, [param])


def _agree(one: Any, other: Any) -> bool:
    """Whether parameters, state, settings and numbers are equal to the bit, and the state is all of parameters."""
    return same(_numbers_of(one), _numbers_of(other))


def _numbers_of(toy: Any) -> list[Any]:
    params = [param for group in toy.param_groups for param in group["params"]]
    settings = [_changed({}, group, _NOT_SETTINGS) for group in toy.param_groups]
    simple = {name: value for name, value in vars(toy).items() if isinstance(value, Tensor | int | float | str)}
    beside = len(toy.state) - sum(param in toy.state for param in params)
    return [list(params), [toy.state.get(param, {}) for param in params], settings, simple, beside]


def _holds_weights(pair: Sequence[Any], name: str) -> bool:
    """Whether the state of that name follows the weights, which in the two toys are the same but for `SHIFT`.

    An average that is slow has moved by little, but everywhere by the same.
    """
    pairs = zip(*(_tensors(toy, name) for toy in pair), strict=True)
    moves = [(after - before).abs() for before, after in pairs if before.is_floating_point() and before.numel()]
    return any(
        move.max() > SHIFT / 2 or (move.min() > SHIFT / 2000 and move.min() > 0.99 * move.max()) for move in moves
    )


def _tensors(toy: Any, name: str) -> Iterator[Tensor]:
    for group in toy.param_groups:
        for param in group["params"]:
            value = toy.state.get(param, {}).get(name)
            if isinstance(value, Tensor) and value.shape == param.shape:
                yield value
