"""One step of a model and its loss: at a level, in FP32, or as an ideal run; and the errors between two such steps.

An *ideal run* is an FP32 step in which the weights, and the outputs of the model and of each leaf module and their
gradients, are rounded once to a low-precision type. Each model has an error of this size at a level, whatever its lines
do.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amp_patch.diagnose.call_log import on_gradient
from amp_patch.diagnose.module_error import floats
from amp_patch.diagnose.output_distance import squares
from amp_patch.environment import DTYPE, LEVEL
from amp_patch.frontend import initialize, restored
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.policy import OPT_LEVELS
from amp_patch.support import tree
from amp_patch.support.devices import widest
from amp_patch.support.patches import Patches
from amp_patch.support.random_states import random_states, restored_random_states
from amp_patch.training.scale_loss import scale_loss

FLOOR = 0.01  # a parameter's gradient below this share of the mean one counts as this share
_SPREAD = 1e-6  # rows of an output that differ by less than this share of its size count as differing by this share
_LARGEST = 2.0**16  # a loss scale of FP16
_ROOM = 2.0**14  # the first loss scale that is tried makes this of the largest gradient
_SMALLER = (1.0, 2.0**-4, 2.0**-12, 2.0**-20, 2.0**-36)  # then these parts of it, until all gradients are finite


class Case(NamedTuple):
    """A training step that can be repeated.

    Attributes:
        model: in FP32. It is copied for each step, and never called.
        loss_fn: takes the model's output and `targets`, and returns the loss.
        args, named: the arguments of the model.
        targets: the further arguments of the loss.
        calls_model: whether `loss_fn` takes the model and its arguments first, because it calls the model again.
        options: arguments of `initialize`; `keep_fp32` is for the levels that cast the model.
    """

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    targets: tuple[Any, ...]
    calls_model: bool = False
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def inputs(self) -> list[Tensor]:
        """The floating tensors among the model's arguments."""
        return floats((self.args, dict(self.named)))


def in_force(function: Any) -> Any:
    """Return the wrapper that now replaces `function` in its module; if there is none, `function` itself.

    For code that has stored the function before the casts were installed.
    """
    owner = sys.modules.get(getattr(function, "__module__", None) or "")
    found = getattr(owner, getattr(function, "__name__", ""), None)
    original = getattr(found, "__wrapped__", None) or getattr(getattr(found, "__self__", None), "__wrapped__", None)
    return found if original is function else function


class Root(nn.Module):
    """A copy of a case's model and its loss, as one module: the root of a search through the modules."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.loss_fn, self.case = fp32_copy(case.model), case.loss_fn, case
        self.outputs: list[Tensor] = []

    def forward(self, *args: Any, **named: Any) -> Any:
        output = self.model(*args, **named)
        self.outputs = [each.detach() for each in floats(output)]
        first = (self.model, (args, named)) if self.case.calls_model else ()
        return in_force(self.loss_fn)(*first, output, *self.case.targets)


@dataclass
class Numbers:
    """The numbers of one step.

    Attributes:
        outputs: the floating tensors of the model's output.
        grads: name of a trained parameter -> its gradient, unscaled.
        changes: name of a buffer, or of a parameter that is not trained -> the change by the step, FP32.
    """

    outputs: list[Tensor]
    grads: dict[str, Tensor]
    changes: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether each gradient is finite. Syncs with the device."""
        return all(bool(grad.to_dense().isfinite().all()) for grad in self.grads.values())


@dataclass
class Errors:
    """Relative errors of one step beside the FP32 step.

    Attributes:
        outputs: the largest error of an output, relative to what the rows of the batch differ by.
        grads: name of a parameter -> the error of its gradient.
        gradient: the error of all gradients together.
        changes: name of a buffer, or of a parameter that is not trained -> the error of its change.
    """

    outputs: float = 0.0
    grads: dict[str, float] = field(default_factory=dict)
    gradient: float = 0.0
    changes: dict[str, float] = field(default_factory=dict)

    def by_name(self) -> dict[str, float]:
        """Return all errors: "output", and the names of `grads` and `changes`."""
        return {"output": self.outputs} | self.grads | self.changes


Watch = Callable[["Root"], Callable[[], None]]


class Steps:
    """The steps of one case, all from the same weights and the same random states.

    Attributes:
        case: the step that is repeated.
        count: the number of steps that were made.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.count = case, 0
        self._random = random_states()
        self._scale = _LARGEST  # the loss scale that FP16 starts with

    def exact(self, root: Root | None = None) -> Numbers:
        """Make the step in FP32, without casts, on `root` or a new copy."""
        found = self._numbers(root or Root(self.case), self.case.args, self.case.named)
        largest = max(
            (float(grad.to_dense().abs().max()) for grad in found.grads.values() if grad.numel()), default=0.0
        )
        if 0 < largest < math.inf:
            self._scale = min(_LARGEST, 2.0 ** math.floor(math.log2(_ROOM / largest)))
        return found

    def ideal(
        self, dtype: torch.dtype, *, weights: bool = True, buffers: bool = False, outputs: bool = True, given: int = -1
    ) -> Numbers:
        """Make an FP32 step in which some numbers are rounded to the bits of `dtype`, at any range.

        Args:
            dtype: a low-precision type.
            weights, buffers: whether the parameters, or the buffers, are rounded before the step.
            outputs: whether the outputs of each leaf module and of the model, and their gradients, are rounded.
            given: the index of a floating input that is rounded; -1: none.
        """
        root = Root(self.case)
        chosen = [*(root.parameters() if weights else ()), *(root.buffers() if buffers else ())]
        before = {name: value.clone() for name, value in _untrained(root)}
        with torch.no_grad():
            for tensor in floats(chosen):
                tensor.copy_(rounded(tensor, dtype))
        for module in root.modules():
            if outputs and (is_leaf(module) or module is root.model):
                module.register_forward_hook(lambda _m, _i, out: _mapped(lambda t: Rounding.apply(t, dtype), out))
        count = iter(range(10**6))
        args, named = _mapped(
            lambda t: rounded(t, dtype) if next(count) == given else t, (self.case.args, dict(self.case.named))
        )
        return self._numbers(root, args, named, before if buffers else None)

    def at_level(self, level: str, watch: Watch | None = None, **options: Any) -> Numbers:
        """Make the step at a level, with a loss scale at which the gradients are finite if there is one.

        Args:
            level: the name of a level.
            watch: is called with the root before each trial of a loss scale. The function that it returns is called
                after the last one, while the training at the level lives.
            options: further arguments of `initialize`.
        """
        found, casts = Numbers([], {}, {}), OPT_LEVELS[level].cast_model_type is not None
        options = {name: value for name, value in self.case.options.items() if casts or name != "keep_fp32"} | options
        fp16 = OPT_LEVELS[level].dtype is torch.float16
        scales = [self._scale * part for part in _SMALLER] if fp16 else [None]
        for scale in scales:
            root = Root(self.case)
            trained = [p for p in root.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.0)
            with restored(), _as_asked():
                given: dict[str, Any] = options if scale is None else {"loss_scale": scale, **options}
                root.model, optimizer = initialize(root.model, optimizer, opt_level=level, verbosity=0, **given)
                then = watch(root) if watch else None
                found = self._numbers(root, self.case.args, self.case.named, optimizer=optimizer)
                if found.finite or scale is scales[-1]:
                    self._scale = self._scale if scale is None else scale
                    if then is not None:
                        then()
                    break
        return found

    def nearby(self, dtype: torch.dtype, seed: int) -> Steps:
        """Return the steps of a copy of the model whose weights are moved by two units of `dtype`, at random."""
        model, draw = fp32_copy(self.case.model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in floats([p for p in model.parameters() if p.dim() > 1]):
                moves = torch.randn(param.shape, generator=draw, dtype=torch.float32, device="cpu").to(param)
                param.mul_(1 + 2 * torch.finfo(dtype).eps * moves)
        return Steps(self.case._replace(model=model))

    def _numbers(
        self,
        root: Root,
        args: Any,
        named: Mapping[str, Any],
        before: dict[str, Tensor] | None = None,
        optimizer: Any = None,
    ) -> Numbers:
        self.count += 1
        before = before or {name: value.clone() for name, value in _untrained(root)}
        names = [name for name, param in root.named_parameters() if param.requires_grad]
        with restored_random_states(self._random):
            loss = root(*copied(args), **copied(dict(named)))
            with nullcontext(loss) if optimizer is None else scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        params = [p for p in root.parameters() if p.requires_grad]
        held = params if optimizer is None else optimizer.param_groups[0]["params"]
        grads = {name: p.grad.detach() for name, p in zip(names, held, strict=True) if p.grad is not None}
        after = dict(_untrained(root))
        changes = {name: after[name].float() - value.float() for name, value in before.items() if name in after}
        return Numbers(root.outputs, grads, changes)


@contextmanager
def _as_asked() -> Iterator[None]:
    """Let no environment variable replace the level in the body, as AMP_PATCH_OPT_LEVEL does for a surveyed script."""
    patches = Patches()
    try:
        for name in (LEVEL, DTYPE):
            patches.set_item(os.environ, name, "")
        yield
    finally:
        patches.remove()


def _untrained(root: Root) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p.detach()) for name, p in root.named_parameters() if not p.requires_grad and floats(p))
    yield from ((name, buffer.detach()) for name, buffer in root.named_buffers() if floats(buffer))


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module computes by itself: it has no modules in it, or is torch's attention or parametrized."""
    if isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
        return True
    return next(module.children(), None) is None and not isinstance(module, nn.Identity | nn.Flatten)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to the bits of `dtype`. Its range is not applied: nothing becomes 0 or infinite."""
    mantissa, exponent = torch.frexp(tensor)
    bits = 2 / torch.finfo(dtype).eps
    return torch.ldexp((mantissa * bits).round() / bits, exponent)


class Rounding(torch.autograd.Function):
    """Rounds a tensor to the bits of a type in the forward, and its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return rounded(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rounded(grad, ctx.dtype), None


def _mapped(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tree.map_tensors(lambda t: fn(t) if floats(t) else t, value)


def copied(value: Any) -> Any:
    """Return `value` with copies of its tensors, so that a forward that writes to its input changes no later step.

    A copy is a leaf, and requires a gradient if the tensor does.
    """
    return tree.map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)


def note_gradients(output: Any, then: Callable[[int, Tensor], None]) -> None:
    """Call `then` with the index of each floating tensor in `output` and its gradient, during backward."""
    for at, tensor in enumerate(floats(output)):
        if tensor.requires_grad:
            on_gradient(tensor, partial(then, at))


# Errors.


def errors(low: Numbers, exact: Numbers) -> Errors:
    """Return the errors of the step `low` beside the FP32 step `exact`. Syncs with the device."""
    grads, gradient = grads_off(low.grads, exact.grads)
    changes = {
        name: off(low.changes[name], change)
        for name, change in exact.changes.items()
        if name in low.changes and norm(change) > 0
    }
    return Errors(outputs_off(low.outputs, exact.outputs), grads, gradient, changes)


def grads_off(low: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """Return ({name of a parameter: the error of its gradient}, the error of all gradients together)."""
    sizes = {name: norm(grad) for name, grad in exact.items()}
    elements = sum(grad.numel() for grad in exact.values())
    total = math.hypot(*sizes.values())
    mean = {name: total * math.sqrt(grad.numel() / elements) for name, grad in exact.items() if elements}
    # A gradient that is 0 but for roundings, as of a bias before a batch norm, counts as the mean one.
    least = {name: size * (1.0 if sizes[name] < FLOOR**2 * size else FLOOR) for name, size in mean.items()}
    each = {
        name: off(low[name], grad, least.get(name, 0.0)) if name in low else math.inf for name, grad in exact.items()
    }
    gap = math.hypot(*(error * max(sizes[name], least.get(name, 0.0)) for name, error in each.items()))
    return each, gap / (total or 1.0)


def outputs_off(low: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error of an output, relative to what the rows of the batch differ by."""
    if len(low) != len(exact):
        return math.inf
    return max((spread_off(one, other) for one, other in zip(low, exact, strict=True)), default=0.0)


def spread_off(low: Tensor, exact: Tensor) -> float:
    """Return the error of `low`, relative to what the rows of `exact` differ by. inf if the shapes differ."""
    if low.shape != exact.shape:
        return math.inf
    if exact.dim() == 0 or len(exact) < 2:
        return off(low, exact)
    wide = widest(exact.device)
    least = _SPREAD * norm(exact)
    low, exact = low.to(wide), exact.to(wide)
    return off(low - low.mean(0), exact - exact.mean(0), least)


def offset(outputs: Sequence[Tensor]) -> float:
    """Return the size of the outputs over what the rows of a batch differ by, the largest of all outputs."""
    batches = [each for each in outputs if each.dim() and len(each) > 1]
    return max((1 / max(norm(each - each.mean(0)) / (norm(each) or 1.0), _SPREAD) for each in batches), default=1.0)


def off(low: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference over the norm of `exact`, or over `least` if that is larger.

    Elements that are equal, infinities too, do not count. inf if another element is not finite.
    """
    gap, size = squares([exact.detach().to_dense()], [low.detach().to_dense()]).sqrt().tolist()
    if not gap < math.inf:
        return math.inf
    size = max(size, least)
    return gap / size if size else float(gap > 0) and math.inf


def norm(tensor: Tensor) -> float:
    return float(tensor.detach().to_dense().to(widest(tensor.device)).norm())
