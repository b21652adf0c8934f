"""`Call`: one call of a torch function in a surveyed step, as the rules receive it; and `Finding`, which they yield."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.casts.mixed_operands import MixedOperands
from amp_patch.diagnose.survey.kinds import KINDS, NONE, Facts, Kind, Kinds, Place
from amp_patch.model.type_errors import is_about_types
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS
from amp_patch.support.scripts_line import INSTALLED, frames, frames_of

_NOT_THE_USERS = ("torch", "amp_patch", "contextlib", "functools", "runpy")
LOWERING = ("lower", "product", "sparse", "einsum", "fused", "rnn")  # rules of the op lists
_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "subtract": "sub", "multiply": "mul",
    "arccosh": "acosh", "arccos": "acos", "arcsin": "asin",
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "idiv": "div",
    "clip": "clamp", "not_equal": "ne", "greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le",
}  # fmt: skip
_REFLECTED = {"radd": "add", "rsub": "sub", "rmul": "mul", "rdiv": "div", "rtruediv": "div", "rpow": "pow"}
_RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "gumbel", "exponential", "poisson")
_UNSAFE = ("grid_sample",)  # a CPU's kernel for low precision reads outside of large images


def op_of(func: Any) -> tuple[str, bool]:
    """Return (plain name, whether the operands are swapped) of a function: ("div", True) for `Tensor.__rtruediv__`."""
    name = getattr(func, "__name__", "").strip("_")
    if name in _REFLECTED:
        return _REFLECTED[name], True
    return _SAME.get(name, name), False


def user_line() -> Place:
    """Return the running line of user code: the innermost one outside of torch and amp_patch."""
    return _innermost((frame, frame.f_lineno) for frame in frames())


def line_within(function: CodeType) -> Place | None:
    """Return the running line of user code that a call of `function` runs; None if the call runs no user code."""
    running = ((frame, frame.f_lineno) for frame in takewhile(lambda each: each.f_code is not function, frames()))
    found = _innermost(running)
    return found if found.file else None


def line_of(error: BaseException) -> Place | None:
    """Return the line of user code that raised an exception; None if code of torch raised it by itself."""
    found = _innermost(reversed([*frames_of(error)]))
    return found if found.file else None


@cache
def _is_installed(path: str) -> bool:
    return not INSTALLED.isdisjoint(Path(path).parts)


def _innermost(running: Iterable[tuple[FrameType, int]]) -> Place:
    """Return the first line outside of torch and amp_patch.

    Args:
        running: frames with their lines, the innermost frame first.
    """
    found = None
    for frame, line in running:
        path = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS or path.startswith("<frozen")
        if not ours:
            if found is None:
                found = Place(path, line)
            if not _is_installed(path):
                return found._replace(called=f"{os.path.basename(path)}:{line}" if path != found.file else "")
    return found or Place("", 0)


def running_module(names: Mapping[int, str]) -> str:
    """Return the name of the innermost module whose method runs; "" without one.

    Args:
        names: id of a module -> its name.
    """
    known = (names.get(id(frame.f_locals.get("self"))) for frame in frames())
    return next((name for name in known if name is not None), "")


def running_optimizer() -> torch.optim.Optimizer | None:
    """Return the innermost optimizer whose method runs; None without one."""
    selves = (frame.f_locals.get("self") for frame in frames())
    return next((each for each in selves if isinstance(each, torch.optim.Optimizer)), None)


def in_place(name: str, args: Any) -> bool:
    """Return whether a function writes into its first argument."""
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return writes and bool(args) and isinstance(args[0], Tensor)


def only_once(op: str) -> bool:
    """Return whether a function must not be called a second time in low precision."""
    return any(word in op for word in _RANDOM + _UNSAFE)


@dataclass
class Call:
    """One call of a torch function.

    Attributes:
        func: the function. `op` is its plain name; `swapped` is True if its operands are swapped, as in `2 / x`.
        rule: the name of its rule at O1 and O4, as in casts/oplists.py ("lower", "fp32"); None if it has none.
        inputs: its floating tensors in order, each with its facts before the call.
        result: the value that it returned.
        outputs: the floating tensors in `result`, or the tensor that was written in place, each with its facts after
            the call.
        inside: whether a model's forward is running.
        plain: whether the call is in a region in which O1 and O4 cast nothing.
        asked: the line of user code of the torch.autocast around the call, if it asks for FP32; else None.
        errors: kind of levels -> the error that torch raises if the arguments have the types of that kind.
        limits: if FP32's smallest or largest number is among its Python numbers (`has_limits`), the kinds of levels at
            which user code reads that of low precision there, as in `torch.finfo(x.dtype).min`.
        served: the kinds of levels at which `run` serves the call: it mends the error, or what is written stays FP32.
        in_place: whether it writes into its first argument.
        written: if it writes into a tensor of the model: the name of that tensor, and a copy of its numbers before the
            call.
        trained: whether an optimizer trains that tensor.
    """

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rule: str | None = None
    inputs: list[tuple[Tensor, Facts]] = field(default_factory=list)
    result: Any = None
    outputs: list[tuple[Tensor, Facts]] = field(default_factory=list)
    inside: bool = False
    plain: bool = False
    asked: Place | None = None
    errors: dict[Kind, Exception] = field(default_factory=dict)
    limits: Kinds = NONE
    served: Kinds = NONE
    in_place: bool = False
    written: tuple[str, Tensor] | None = None
    trained: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        op, self.swapped = op_of(self.func)
        self.op = self.name or op
        self._ranges: dict[int, tuple[float, float]] = {}

    @cached_property
    def line(self) -> Place:
        """The line of user code that makes the call."""
        return user_line()

    @property
    def lowers(self) -> bool:
        """Whether O1 and O4 cast its inputs to low precision."""
        return self.rule in LOWERING and not self.plain

    @cached_property
    def learned(self) -> bool:
        return any(facts.learned for _, facts in self.inputs)

    def scalars(self) -> Iterator[float]:
        """Yield the finite Python numbers among its arguments. Integers up to 2**16 are left out, as axes or sizes."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, float) and math.isfinite(value):
                yield value
            elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**16:
                yield float(value)

    @property
    def has_limits(self) -> bool:
        """Whether FP32's smallest or largest number is among its Python numbers."""
        return any(abs(number) == torch.finfo(torch.float32).max for number in self.scalars())

    def low(self, at: int = 0) -> Kinds:
        """Return the kinds of levels at which `inputs[at]` is low precision; `NONE` if there is no such input."""
        return self.inputs[at][1].low if at < len(self.inputs) else frozenset()

    def range(self, tensor: Tensor) -> tuple[float, float]:
        """Return `finite_range`, (lowest, highest), of a tensor of this call. Computed once: several rules need it."""
        if id(tensor) not in self._ranges:
            self._ranges[id(tensor)] = finite_range(tensor)
        return self._ranges[id(tensor)]


def finite_range(tensor: Tensor) -> tuple[float, float]:
    """Return (lowest, highest) of the finite numbers of a tensor; (0.0, 0.0) if no number is finite. Syncs."""
    tensor = tensor.detach()
    if not tensor.numel():
        return 0.0, 0.0
    low, high = (float(each) for each in torch.aminmax(tensor))
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    finite = tensor[tensor.isfinite()]
    return finite_range(finite) if finite.numel() else (0.0, 0.0)


def mends(call: Call, kind: Kind, error: Exception, args: Any, kwargs: Any) -> bool:
    """Return whether `run` mends the `error` of a call with the arguments of `kind`.

    It does so in forwards of cast models, if types mix: it repeats the forward, in which such calls are cast as at O1.
    """
    if not (call.inside and kind.casts and isinstance(error, RuntimeError) and is_about_types(error)):
        return False
    if call.in_place and kind not in call.low():
        return False  # the arguments share memory with the script's own
    try:
        with torch.no_grad(), torch._C._EnableTorchFunction(), MixedOperands(OPT_LEVELS[kind.levels[0]]):
            call.func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False
    return True


class Finding(NamedTuple):
    """One problem that levels would cause at a call.

    Attributes:
        kinds: the kinds of levels that would cause the problem.
        what: the problem, in words.
        edit: a change of user code that avoids the problem.
        line: the line of user code at fault, if it is not the line of the call; else None.
        op: the operation at fault, if it is not the function of the call; else "".
        raises: whether the problem is an error, which a level without that error does not have.
        served: whether `run` and `compare` train an unedited script without the problem.
    """

    kinds: Kinds
    what: str
    edit: str
    line: Place | None = None
    op: str = ""
    raises: bool = False
    served: bool = False


Rule = Callable[[Call], Iterator[Finding]]


def type_names(kinds: Iterable[Kind]) -> str:
    return " and ".join(dict.fromkeys(kind.type_name for kind in sorted(kinds, key=KINDS.index)))


def where(kinds: Kinds, happens: Callable[[torch.dtype], bool]) -> Kinds:
    """Return the members of `kinds` for whose type `happens` returns True. Calls `happens` once for each type."""
    types = [dtype for dtype in LOW_PRECISION if any(kind.dtype is dtype for kind in kinds) and happens(dtype)]
    return frozenset(kind for kind in kinds if kind.dtype in types)


def name_of(call: Call, at: int) -> str:
    return call.inputs[at][1].name or f"an operand of {call.op}"


def is_view(call: Call) -> bool:
    """Return whether a call returns a view of its first input, and so computes no numbers."""
    made, given = call.outputs, call.inputs
    if not made or not given or call.func is None:
        return False
    one, other = made[0][0], given[0][0]
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one is not other
