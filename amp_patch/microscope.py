"""inspect: what the numbers of a model look like while it trains, and where the first of them stops being finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch import links, optimizer, regions, shards, tree
from amp_patch.histogram import Histogram

_TENSOR: Any = Tensor
_GRAD = _TENSOR.grad.__get__
_CASTS = ("to", "half", "bfloat16", "float", "type", "type_as")


@dataclass(frozen=True)
class NotFinite:
    """Where the first number that is not finite appeared.

    Attributes:
        module: qualified name of the module whose op it was; "" is the model itself, None outside of its forward.
        op: name of torch's function: "linear", "pow".
        direction: "forward"; "backward" if the op's backward made it.
        step: how many optimizer steps the block had seen before.
        largest_input: the largest absolute value that went in: into the op, or as a gradient into its backward.
    """

    module: str | None
    op: str
    direction: str
    step: int
    largest_input: float

    def __str__(self) -> str:
        where = "outside of the model" if self.module is None else f"in {self.module or 'the model itself'}"
        return (
            f"{self.direction} of {self.op} {where}, step {self.step}: the largest input was {self.largest_input:.3g}, "
            "the output is not finite"
        )


@dataclass
class Inspection:
    """What `inspect` saw. Reading a histogram syncs with the device.

    Attributes:
        weights: name of a parameter -> its values when the block began.
        activations: name of a module -> what it returned.
        gradients: name of a parameter -> its gradients, the loss scale divided out.
        activation_gradients: name of a module -> the gradients of what it returned, as they flowed, multiplied by the
            loss scale.
        errors: name of a module without children -> how much its output differs from what it gives in FP32 on the same
            input: the 2-norm of the difference over that of the FP32 output, the largest of all calls. Modules that
            draw random numbers, write to their input, or cannot be computed in FP32, are left out.
        not_finite: where the first number that is not finite appeared; None if all were finite. Infinities that are
            asked for, as in `masked_fill(mask, -inf)`, do not count, nor do those that come in from outside.
        scale: the loss scale, when the block ended.
        step: how many optimizer steps it saw.
    """

    weights: dict[str, Histogram] = field(default_factory=dict)
    activations: dict[str, Histogram] = field(default_factory=dict)
    gradients: dict[str, Histogram] = field(default_factory=dict)
    activation_gradients: dict[str, Histogram] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    not_finite: NotFinite | None = None
    scale: float = 1.0
    step: int = 0

    def keep_fp32(self, error: float = 0.05, flushed: float = 0.5) -> list[str]:
        """The modules that `initialize(keep_fp32=...)` would best keep in FP32, by name, the first one first.

        The one where a number stopped being finite; those whose output in FP16 differs from FP32's by more than
        `error`, relatively; those with a parameter of whose gradients FP16 loses more than the share `flushed`, even at
        the best loss scale.
        """
        found = [] if self.not_finite is None or not self.not_finite.module else [self.not_finite.module]
        worst = sorted((-e if e == e else -math.inf, name) for name, e in self.errors.items() if not e <= error)
        found += [name for _, name in worst]
        best = self.best_scale()
        found += [name.rpartition(".")[0] for name, seen in self.gradients.items() if seen.flushed(best) > flushed]
        return list(dict.fromkeys(name for name in found if name))

    def best_scale(self) -> float:
        """The largest power of two by which the loss can be multiplied before a parameter's gradient overflows FP16."""
        return min((seen.best_scale() for seen in self.gradients.values() if seen.counts), default=1.0)


@contextmanager
def inspect(model: nn.Module, optimizers: Any = None) -> Iterator[Inspection]:
    """Look at the numbers of `model` in the training steps that run in the block::

        with amp.inspect(model, optimizer) as seen:
            train_step()
        print(seen.not_finite, seen.keep_fp32())

    Works at any level, and without `initialize` (the gradients of a GradScaler's loss keep its scale then). At O0
    the gradients are FP32's own: `seen.gradients[name].flushed(s)` is what FP16 would lose of them at the loss
    scale s. Each step costs about one pass over all activations, gradients and (for `errors`) one FP32 forward of
    every module without children; and one sync. What is compiled runs eagerly in the block, because a compiled
    graph hides its functions. Nothing is left in the model, and nothing in the process, after the block.

    Args:
        model: what `initialize` returned, or any module.
        optimizers: its optimizer, or several: their loss scale is divided out of the gradients, their steps counted.

    Raises:
        ValueError: the model is sharded.
    """
    shards.refuse(model, "inspect")
    one_or_many = optimizers if isinstance(optimizers, list | tuple) else [] if optimizers is None else [optimizers]
    targets = [optimizer.innermost(each) for each in one_or_many]
    seen = Inspection()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code would hold what looks, or not be seen
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        watch = _Watch(model, targets, seen, stack)
        try:
            with watch:
                yield seen
        finally:
            watch.conclude()
            stashes = [
                stash for t in targets if (stash := getattr(t, "_amp_stash", None)) is not None and stash.scalers
            ]
            seen.scale = stashes[0].scalers[0].loss_scale() if stashes else 1.0


@dataclass
class _Call:
    """One call of a function of torch's: the keys of the tensors that went in and came out."""

    module: str | None
    op: str
    given: list[int]
    made: list[int]
    casts: bool
    harmless: bool  # what is not finite was asked for (a mask's -inf), or is memory that nobody has written yet


class _Watch(TorchFunctionMode):
    """Keeps a log of calls, and of each tensor in it, and of its gradient, the largest absolute value; no sync."""

    def __init__(self, model: nn.Module, targets: list[Any], seen: Inspection, stack: ExitStack) -> None:
        super().__init__()
        self.seen, self.targets = seen, targets
        self.model = model
        self.running: list[str] = []  # the modules whose forward runs, innermost last
        self.came: list[list[tuple[Tensor, int]]] = []  # what came into each of them, with its version
        self.busy = False  # computing for itself
        self.stepping = False  # inside of an optimizer's step, unless an exception has left it
        self.handles: list[Any] = []
        self.forget()
        for name, param in model.named_parameters():
            name = _plain(name)
            seen.weights.setdefault(name, Histogram()).add(param)
            if param.requires_grad:
                stack.callback(param.register_hook(self._gradient_of(name)).remove)
        for name, module in model.named_modules():
            before, after = self._around(_plain(name), module)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
        for target in targets:
            if isinstance(target, torch.optim.Optimizer):
                # What the optimizer computes is no part of the model: the log ends before.
                stack.callback(target.register_step_pre_hook(self._conclude_step).remove)
                stack.callback(target.register_step_post_hook(self._stepped).remove)

    def forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.calls: list[_Call] = []
        self.keys = WeakTensorKeyDictionary()  # tensor -> (its key, its version then)
        self.outside: set[int] = set()  # of tensors that no call made: not the model's, nor a cast's that is not seen
        self.values: list[Tensor] = []  # by key
        self.gradients: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy or self.stepping or self.seen.not_finite is not None:
            return func(*args, **kwargs)
        given = [self._key(t) for t in _floats((args, kwargs))]
        result = func(*args, **kwargs)
        op = getattr(func, "__name__", str(func))
        outputs = _floats(args[0] if op == "__setitem__" else result)
        if outputs and not _is_attribute(func):
            made = [self._key(t, new=True) for t in outputs]
            constants = (*args, *kwargs.values())
            call = _Call(
                module=self.running[-1] if self.running else None,
                op=op,
                given=given,
                made=made,
                casts=op in _CASTS,
                harmless=not given or "empty" in op or any(isinstance(c, float) and math.isinf(c) for c in constants),
            )
            self.calls.append(call)
        elif func == _GRAD:  # what backward made is none of what computes with it
            self.outside.update(self._key(grad) for grad in outputs)
        return result

    def _key(self, tensor: Tensor, new: bool = False) -> int:
        """The tensor's place in the log; another one once it was written to (`new`)."""
        key, version = self.keys.get(tensor, (None, 0))
        changed = key is not None and version != _version(tensor)  # through a view, say
        if new or changed or key is None:
            key = len(self.values)
            self.keys[tensor] = key, _version(tensor)
            self.values.append(_largest(tensor))
            # O1's casts are not seen; of types, they make FP16's infinities.
            if not new and (changed or tensor.dtype is not torch.float16) and not isinstance(tensor, nn.Parameter):
                self.outside.add(key)
            if tensor.requires_grad:
                gradients = self.gradients  # a graph can outlive the log
                handle = tensor.register_hook(lambda grad: gradients.__setitem__(key, _largest(grad)))
                if tensor.is_leaf:
                    self.handles.append(handle)
        return key

    def _gradient_of(self, name: str) -> Any:
        def hook(grad: Tensor) -> None:
            stashes = (getattr(target, "_amp_stash", None) for target in self.targets)
            # Of several optimizers those of another loss are in no `scale_loss` now.
            scale = next((stash.scale for stash in stashes if stash is not None and stash.scale is not None), None)
            factor = 1.0 if scale is None else scale.double().reciprocal()
            self.seen.gradients.setdefault(name, Histogram()).add(_values(grad), factor)

        return hook

    def _around(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        seen = self.seen

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.busy:
                return
            self.stepping = False
            if not self.running:
                self._note_outside(args, kwargs)
            self.running.append(name)
            self.came.append([(tensor, _version(tensor)) for tensor in _floats((args, kwargs))])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.busy:
                return
            if self.running:
                self.running.pop()
            # Computed again on what it has written already, it would write that once more.
            in_place = self.came and any(_version(tensor) != version for tensor, version in self.came.pop())
            outputs = _floats(output)
            self.busy = True
            try:
                for tensor in outputs:
                    seen.activations.setdefault(name, Histogram()).add(tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(seen.activation_gradients.setdefault(name, Histogram()).add)
                if outputs and not any(module.children()) and not _is_random(module) and not in_place:
                    error = _error(module, args, kwargs, outputs)
                    if error is not None:
                        seen.errors[name] = max(
                            seen.errors.get(name, 0.0), error, key=lambda e: math.inf if e != e else e
                        )
            finally:
                self.busy = False

        return before, after

    def _note_outside(self, args: Any, kwargs: Any) -> None:
        """A mask's -inf among the model's buffers, or handed to it, is none of its doing."""
        self.busy = True
        try:
            for tensor in _floats((args, kwargs, [*self.model.buffers()])):
                self.outside.add(self._key(tensor))
        finally:
            self.busy = False

    def _conclude_step(self, *_: Any) -> None:
        self.conclude()
        self.stepping = True

    def _stepped(self, *_: Any) -> None:
        self.stepping = False
        self.seen.step += 1

    def conclude(self) -> None:
        """Look for the first number of this step that is not finite. One sync."""
        if self.seen.not_finite is None and self.values:
            self.busy = True
            try:
                self.seen.not_finite = self._culprit()
            finally:
                self.busy = False
        self.forget()

    def _culprit(self) -> NotFinite | None:
        keys = list(self.gradients)
        every = torch.stack([t.to(self.values[0].device) for t in (*self.values, *self.gradients.values())]).tolist()
        values, gradients = every[: len(self.values)], dict(zip(keys, every[len(self.values) :], strict=True))
        call = self._forward_culprit(values)
        if call is not None:
            return self._report(call, "forward", [values[key] for key in call.given])
        call = self._backward_culprit(gradients)
        if call is None:
            return None
        return self._report(call, "backward", [gradients[key] for key in call.made if key in gradients])

    def _backward_culprit(self, gradients: dict[int, float]) -> _Call | None:
        """The last call whose backward made what is not finite of what was; a cast's, its user's."""
        user_of: dict[int, _Call] = {}
        for call in reversed(self.calls):
            came = [gradients[key] for key in call.made if key in gradients]
            left = [gradients[key] for key in call.given if key in gradients]
            if came and all(map(math.isfinite, came)) and not all(map(math.isfinite, left)):
                user = user_of.get(call.made[0]) if call.casts else None
                return user if user is not None and user.module == call.module else call
            user_of.update(dict.fromkeys(call.given, call))
        return None

    def _forward_culprit(self, values: list[float]) -> _Call | None:
        """The first call that made what is not finite of what was. A number that overflows in a cast is its maker's."""
        made_by: dict[int, _Call] = {}
        for call in self.calls:
            bad = not (call.harmless or all(math.isfinite(values[key]) for key in call.made))
            # What no call made, a cast made that is not seen here: O1's.
            if bad and all(
                math.isfinite(values[key]) or not (key in made_by or key in self.outside) for key in call.given
            ):
                maker = made_by.get(call.given[0]) if call.casts else None
                return maker if maker is not None and maker.module == call.module else call
            made_by.update(dict.fromkeys(call.made, call))
        return None

    def _report(self, call: _Call, direction: str, given: list[float]) -> NotFinite:
        return NotFinite(call.module, call.op, direction, self.seen.step, max(given, default=0.0))


def _plain(name: str) -> str:
    """A qualified name without what torch.compile's wrapper adds: as `keep_fp32` wants it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _floats(value: Any) -> list[Tensor]:
    """The floating tensors in a value, in all its containers; complex ones are left out."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            found.append(tensor)
        return tensor

    tree.map_tensors(note, value)
    return found


@torch.no_grad()
def _largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, NaN if there is one; FP64, shape []."""
    values = _values(tensor.detach())
    return values.abs().amax().double() if values.numel() else values.new_zeros((), dtype=torch.float64)


def _version(tensor: Tensor) -> int:
    """How often it was written to, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _is_attribute(func: Any) -> bool:
    """Whether this reads an attribute (`x.data`, `x.grad`) rather than computing something."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__", "backward")


def _is_random(module: nn.Module) -> bool:
    rates = (getattr(module, name, 0.0) for name in ("p", "dropout"))
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


class _Forward(nn.Module):
    """A module without its hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


@torch.no_grad()
def _error(module: nn.Module, args: Any, kwargs: Any, outputs: list[Tensor]) -> float | None:
    """The relative distance of `outputs` from what `module` gives in FP32, which leaves its state alone.

    None if there is no such number: it draws random numbers, or cannot be computed in FP32.
    """
    tensors: dict[str, Tensor] = {}
    for name, param in _Forward(module).named_parameters():
        master = links.master_of(param)
        tensors[name] = (param if master is None else master).detach()
    tensors.update((name, buffer.clone()) for name, buffer in _Forward(module).named_buffers())
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    args, kwargs = tree.cast_floats((args, kwargs), torch.float32)
    attributes = dict(vars(module))
    vars(module).pop("_amp", None)  # its forward would cast
    devices = sorted({t.device.index for t in outputs if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices), regions.region(None):
            before = _random_states(devices)
            exact = _floats(torch.func.functional_call(_Forward(module), tensors, args, kwargs))
            if not all(map(torch.equal, before, _random_states(devices))):
                return None
    except Exception:  # a hook of the module's may make a weight of its parameters, in their type
        return None
    finally:
        vars(module).clear()
        vars(module).update(attributes)
    if [a.shape for a in outputs] != [b.shape for b in exact]:
        return None
    size = math.sqrt(sum(float(t.double().square().sum()) for t in exact))
    distance = math.sqrt(
        sum(float((a.double() - b.double()).square().sum()) for a, b in zip(outputs, exact, strict=True))
    )
    return distance / size if size else (0.0 if distance == 0 else math.inf)


def _random_states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
