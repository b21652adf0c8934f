"""The cause of an error that a measurement has confirmed: an input, the weights, a module, and the line in it.

Each answer is an experiment, and comes with its figure. Inputs, weights and buffers are rounded alone. Modules are
followed from the step down, each with the inputs of the FP32 run, to the innermost one whose own error is still large.
In that module each line of user code is computed in FP32 alone: the line that mends the module is the cause. If none
does, each line of the FP32 module is computed in low precision alone: the first line that breaks it is the cause.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_patch.casts import regions
from amp_patch.diagnose.module_error import floats
from amp_patch.diagnose.survey.calls import line_within
from amp_patch.diagnose.survey.kinds import Place
from amp_patch.diagnose.survey.replay import Replay
from amp_patch.diagnose.survey.steps import Numbers, Root, Steps, copied, errors, grads_off, note_gradients, outputs_off
from amp_patch.diagnose.wording import percent
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS
from amp_patch.support import tree
from amp_patch.support.random_states import random_states, restored_random_states

_INPUTS = 6  # inputs that are rounded alone
_LINES = 60  # lines of a module that are tried
_RESERVED = 6  # steps for the trial of an option, with its loss scales
_ENOUGH = 0.1  # a line that leaves this share of its module's error, or less, mends it
_OF_MODEL = 0.05  # a model with a smaller error of its own is not searched: the loss function is the cause
_HELPS = 0.5  # an edit that leaves at most this share of the error is named
_ALONE = 0.5  # a line that alone gives this share of the error breaks the module
_MENDS = 0.8  # a line that leaves at most this share of its module's error is part of the cause


@dataclass
class Limit:
    """The end of a search: a time of `time.monotonic`, and a number of steps of the model."""

    time: float
    steps: int

    def allows(self, steps: Steps, reserve: int = 0) -> bool:
        """Return whether another trial may begin that leaves `reserve` steps."""
        return time.monotonic() < self.time and steps.count + reserve < self.steps


@dataclass
class Cause:
    """The cause of an error. Each error is one of `Errors`, relative to FP32.

    Attributes:
        error: the error whose cause is searched.
        alone: "input 1", "weights" or "buffers", if rounding these alone gives half of the error; else "".
        alone_error: the error by rounding these alone.
        module: the name of the innermost module with a large error of its own; "" for the model itself.
        by_loss: whether the error is of the loss function, and of no module.
        module_error: the error of this module by itself, if its inputs are FP32's.
        line: the line of user code in the module that mends it if it is computed in FP32, or the module's forward.
        line_error: the module's error with that line in FP32; None if no line mends it.
        line_alone: the module's error with that line alone in low precision, if no line mends it.
        option: the argument of `initialize` that was tried: "keep_fp32=['mix']".
        option_error: the error with that argument; None if it was refused.
    """

    error: float
    alone: str = ""
    alone_error: float = 0.0
    module: str = ""
    by_loss: bool = False
    module_error: float | None = None
    line: Place | None = None
    line_error: float | None = None
    line_alone: float | None = None
    option: str = ""
    option_error: float | None = None

    def __str__(self) -> str:
        """Return the experiments with their figures."""
        return "; ".join(self._experiments())

    def _experiments(self) -> Iterator[str]:
        if self.alone:
            yield f"{self.alone} rounded alone: {share(self.alone_error)}"
        if self.module_error is not None:
            yield f"{self._place} alone: {share(self.module_error)}"
        if self.line is not None and self.line_error is not None:
            yield f"the same with this line in FP32: {share(self.line_error)}"
        if self.line_alone is not None:
            yield f"this line alone in low precision: {share(self.line_alone)}"
        if self.option_error is not None:
            yield f"{self.option} makes {share(self.error)} into {share(self.option_error)}"

    @property
    def _place(self) -> str:
        return "the loss function" if self.by_loss else f"module {self.module!r}" if self.module else "the model"

    @property
    def edit(self) -> str:
        """The change of user code that helps, in words."""
        if self.option_error is not None and self.option_error < _HELPS * min(self.error, 1.0):
            return self.option
        mends = self.line_error is not None and self.line_error < _HELPS * min(self.module_error or 1.0, 1.0)
        if mends or (self.line_alone is not None and not self.alone.startswith("input")):
            return "compute this line in FP32, with x.float(); at O1 and O4 inside of `with amp.disable_casts():`"
        if self.by_loss:
            return "compute the loss in FP32, from output.float(); at O1 and O4 inside of `with amp.disable_casts():`"
        if self.alone.startswith("input"):
            return f"pass {self.alone} as integers, as a difference, or in other units: the level rounds it"
        return "compute this in FP32, or choose a level without this line"


def share(error: float) -> str:
    """Format an error for a sentence."""
    return "not finite" if math.isinf(error) else percent(error)


def search(steps: Steps, exact: Numbers, level: str, worst: str, error: float, limit: Limit) -> Cause:
    """Return the cause of an error, by steps of the model and calls of single modules.

    Args:
        steps: the steps of the case.
        exact: the FP32 step.
        level: the level of the step with the error.
        worst, error: the name of the error in `Errors.by_name`, and its size.
        limit: where it ends.
    """
    cause, dtype = Cause(error), OPT_LEVELS[level].dtype

    def of_worst(numbers: Numbers) -> float:
        return errors(numbers, exact).by_name().get(worst, 0.0)

    trials: dict[str, dict[str, Any]] = {"weights": {"weights": True}, "buffers": {"buffers": True}}
    trials |= {f"input {at + 1}": {"given": at} for at in range(min(len(steps.case.inputs), _INPUTS))}
    for name, chosen in trials.items():
        if limit.allows(steps):
            alone = of_worst(steps.ideal(dtype, **{"weights": False, "outputs": False, **chosen}))
            if alone > cause.alone_error and alone > 0.5 * min(error, 1.0):
                cause.alone, cause.alone_error = name, alone
    if worst in exact.changes:
        owner = worst.rpartition(".")[0]
        cause.module, cause.line = _plain(owner), _forward_of(Root(steps.case), owner)
        option: Any = "buffers"
    else:
        root = Root(steps.case)
        calls = _watched(root)
        steps.exact(root)
        types: dict[str, list[torch.dtype]] = {}

        def watch(low: Root) -> Callable[[], None]:
            types.clear()
            for name, module in low.named_modules():
                module.register_forward_pre_hook(_noting(types, name), with_kwargs=True)
            return lambda: _descend(cause, root, low, calls, types, dtype, steps, limit)

        steps.at_level(level, watch)
        option = [cause.module]
    if (cause.module or worst in exact.changes) and limit.allows(steps):
        cause.option = f"keep_fp32={option!r}"
        with suppress(TypeError, ValueError, RuntimeError):  # a level without keep_fp32, or types that mix
            cause.option_error = of_worst(steps.at_level(level, keep_fp32=option))
    return cause


def _plain(name: str) -> str:
    """Return the name of a module of `Root` in the model."""
    return name.removeprefix("model").removeprefix(".")


def _noting(types: dict[str, list[torch.dtype]], name: str) -> Callable[..., None]:
    def before(_module: nn.Module, args: Any, named: Any) -> None:
        types.setdefault(name, [each.dtype for each in floats((args, named))])

    return before


@dataclass
class FirstCall:
    """The first call of a module in the FP32 step.

    Attributes:
        args, named: copies of the arguments, which require a gradient where the arguments do.
        line: the line of user code in the model that makes the call; None without one.
        random: the states of the random generators.
        grads: index of a floating output -> its gradient.
    """

    args: Any
    named: Any
    line: Place | None
    random: list[Any] = field(default_factory=random_states)
    grads: dict[int, Tensor] = field(default_factory=dict)


def _watched(root: Root) -> dict[str, FirstCall]:
    """Let each module's first call in the next step be noted in the returned dict, by the module's name."""
    calls: dict[str, FirstCall] = {}

    def follow(name: str, module: nn.Module) -> None:
        def before(_module: nn.Module, args: Any, named: Any) -> None:
            if name not in calls:
                calls[name] = FirstCall(copied(args), copied(named), line_within(Root.forward.__code__))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            call = calls[name]
            if not call.grads:
                note_gradients(output, partial(_keep, call.grads))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    for name, module in root.named_modules():
        follow(name, module)
    return calls


def _keep(grads: dict[int, Tensor], at: int, grad: Tensor) -> None:
    grads.setdefault(at, grad.detach())


class Local:
    """The outputs and gradients of one call of a module that gets the inputs of the FP32 step.

    Attributes:
        outputs: the floating tensors of the output.
        grads: "0", "1", ... for the inputs that require a gradient, then the parameters -> the gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        call: FirstCall,
        types: list[torch.dtype] | None = None,
        mode: AbstractContextManager[Any] | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """Call the module.

        Args:
            module: the module at a level, or in FP32.
            call: its call in the FP32 step.
            types: the types of its floating inputs at the level; None: those of the FP32 step.
            mode: a context around the forward.
            wide: whether the inputs are rounded to `types`, but passed in FP32.
        """
        leaves: list[Tensor] = []
        kinds = iter(types or ())

        def leaf(tensor: Tensor) -> Tensor:
            if not floats(tensor):
                return tensor
            made = tensor.detach().to(next(kinds, tensor.dtype), copy=True)
            made = (made.to(tensor.dtype) if wide else made).requires_grad_(tensor.requires_grad)
            if not made.requires_grad:
                return made
            leaves.append(made)
            return made.clone()  # the module may write to its input

        args, named = tree.map_tensors(leaf, (call.args, call.named))
        with restored_random_states(call.random), torch.enable_grad(), mode or nullcontext():
            made = floats(module(*args, **named))
        self.outputs = [each.detach() for each in made]
        # As a loss scale does: the largest gradient of an output is 1.
        top = max((float(g.abs().max()) for g in call.grads.values() if g.numel()), default=0.0) or 1.0
        pairs = [(made[at], (g / top).to(made[at].dtype)) for at, g in call.grads.items() if made[at].requires_grad]
        wanted = leaves + [p for p in module.parameters() if p.requires_grad]
        outs = [out for out, _ in pairs]
        grads = torch.autograd.grad(outs, wanted, [g for _, g in pairs], allow_unused=True) if pairs else ()
        self.grads = {str(at): grad for at, grad in enumerate(grads) if grad is not None}

    def off(self, exact: Local) -> float:
        """Return the largest error of the outputs and the gradients beside an FP32 call."""
        each, _ = grads_off(self.grads, exact.grads)
        return max([outputs_off(self.outputs, exact.outputs), *each.values()])


def _descend(
    cause: Cause,
    exact: Root,
    low: Root,
    calls: dict[str, FirstCall],
    types: dict[str, list[torch.dtype]],
    dtype: torch.dtype,
    steps: Steps,
    limit: Limit,
) -> None:
    """Follow the largest local error from the step down, then compute each line of that module in another type.

    A call of the whole model counts as a step.
    """

    def local(of: Root, part: str, *given: Any, **named: Any) -> Local:
        steps.count += part in ("", "model")
        return Local(of.get_submodule(part), calls[part], *given, **named)

    name, error, right = "", 0.0, None
    parts = [""]
    while parts:
        best, best_error, best_right = "", -1.0, None
        for part in parts:
            if part in calls and part in types and limit.allows(steps, _RESERVED):
                with regions.region(None):
                    # With the inputs that the level gives it: a module that only magnifies their rounding is no cause.
                    truth = local(exact, part, types[part], wide=True)
                found = local(low, part, types[part]).off(truth)
                if found > best_error:
                    best, best_error, best_right = part, found, truth
        # Of the step, its model is followed first: a loss that only magnifies the model's error is not the cause.
        if best_right is None or best_error < (_OF_MODEL if best == "model" else 0.5 * min(error, 1.0)):
            break
        name, error, right = best, best_error, best_right
        parts = [f"{name}.{child}".lstrip(".") for child, _ in exact.get_submodule(name).named_children()]
    if right is None:
        return
    cause.module, cause.by_loss, cause.module_error = _plain(name), not name, error
    seen = Lines()
    local(low, name, types[name], seen)
    lines = [*seen.seen][-_LINES:]

    def tried(
        lines: Iterable[Place], off: Callable[[Place], float], enough: Callable[[float], bool]
    ) -> dict[Any, float]:
        """Return {line: error} of trials, up to the first error that is enough, without lines at which types mix."""
        found: dict[Any, float] = {}
        for line in lines:
            if limit.allows(steps, _RESERVED) and not any(map(enough, found.values())):
                with suppress(RuntimeError, TypeError):
                    found[line] = off(line)
        return found

    # Of the lines that mend the module, the last: the numbers before it need not be exact.
    whole = min(error, 1.0)
    mended = tried(
        reversed(lines),
        lambda line: local(low, name, types[name], Lines(line)).off(right),
        lambda e: e <= _ENOUGH * whole,
    )
    least = min(mended.values(), default=error)
    if least < _MENDS * min(error, 10.0):
        enough = max(min(1.5 * least, _MENDS * error), _ENOUGH * whole)
        cause.line, cause.line_error = next(each for each in mended.items() if each[1] <= enough)
        return
    with regions.region(None):
        truth = local(exact, name)
        broken = tried(
            lines, lambda line: local(exact, name, mode=Lines(line, dtype)).off(truth), lambda e: e > _ALONE * error
        )
    large = (each for each in broken.items() if each[1] > _ALONE * min(error, max(broken.values())))
    cause.line, cause.line_alone = next(large, (None, None))
    if cause.line is None:
        called = calls[name].line
        cause.line = called or (_forward_of(exact, name) if name else _first_line(exact.loss_fn))


def _forward_of(root: nn.Module, name: str) -> Place | None:
    """Return the first line of the forward of a module, or of the innermost user-defined module around it."""
    while name:
        classes: Any = type(root.get_submodule(name)).__mro__
        kind = next(each for each in classes if not each.__module__.startswith("amp_patch."))
        if kind.__module__.partition(".")[0] != "torch":
            return _first_line(kind.forward)
        name = name.rpartition(".")[0]
    return None


def _first_line(function: Any) -> Place | None:
    if isinstance(function, Replay):
        return function.line
    try:
        plain = inspect.unwrap(function.forward if isinstance(function, nn.Module) else function)
        return Place(inspect.getsourcefile(plain) or "", inspect.getsourcelines(plain)[1])
    except (OSError, TypeError):
        return None


class Lines(TorchFunctionMode):
    """Notes the lines of user code that call torch; or computes one line in another type.

    If torch refuses to mix the FP32 results of that line with low precision, they are cast there. The results of a line
    that is computed in low precision are FP32 again.

    Attributes:
        seen: the lines, in the order of their last calls.
    """

    def __init__(self, line: Place | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.line, self.dtype = line, dtype
        self.seen: dict[Place, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = line_within(Local.__init__.__code__)
        if line is None:
            return func(*args, **kwargs)
        self.seen.pop(line, None)
        self.seen[line] = None
        low = {t.dtype for t in floats((args, kwargs))} & set(LOW_PRECISION)
        if line == self.line:
            args, kwargs = tree.cast_floats((args, kwargs), self.dtype)
        try:
            result = func(*args, **kwargs)
            return (
                tree.cast_floats(result, torch.float32) if line == self.line and self.dtype in LOW_PRECISION else result
            )
        except RuntimeError:
            if self.line is None or not low:
                raise
            return func(*tree.cast_floats(args, next(iter(low))), **tree.cast_floats(kwargs, next(iter(low))))
