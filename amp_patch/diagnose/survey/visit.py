"""The visitor: a mode that follows each tensor of an FP32 step through all kinds of levels at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch.casts.install import rule_of
from amp_patch.diagnose.call_log import eagerly
from amp_patch.diagnose.survey.calls import LOWERING, Call, finite_range, in_place, mends, only_once
from amp_patch.diagnose.survey.kinds import CASTING, KINDS, NONE, NOTHING, STORED, Facts, Kind, Kinds, cast, uncast
from amp_patch.diagnose.survey.masks import adds_mask, mask_at
from amp_patch.model.keep_fp32 import has_forward, is_batch_norm, kept_modules
from amp_patch.model.masks import saturate
from amp_patch.policy import OPT_LEVELS
from amp_patch.support.compiled import in_backward
from amp_patch.support.tree import batch_tensors, map_tensors, tensors
from amp_patch.watch.averages import averages_in

_RAISING = ("fp32", "loss", "norm", "direction", "inexact")
_SERVED = (
    "direction",
    "inexact",
    "loss",
    "banned",
)  # rules of functions that run in FP32 in cast models too, or are refused
_CONVERTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as")
_SAME_NUMBERS = (*_CONVERTS, "clamp", "clamp_min", "clamp_max", "clone", "contiguous")
_OF_FIRST = ("batch_norm", "instance_norm", "view_as", "reshape_as", "expand_as")  # return the type of their input
_PASSED = ("backward", "grad", "__set__", "__delete__", "requires_grad_", "register_hook")
_UNTRIED = ("numpy", "array", "item", "tolist", "get", "requires_grad", "retain_grad")
_ATTRIBUTES = ("data", "T", "mT", "H", "mH", "real")
_FLOAT32 = torch.finfo(torch.float32)
# Patterns of source lines that name FP32, as `x.to(torch.float32)`. Other lines, as `x.to(y.dtype)`, take the dtype of
# a tensor: FP32 in this step, but not at each level.
_NAMES_FLOAT32 = {
    "to": re.compile(r"\.to\([^()]*(float32|torch\.float\b)"),
    "type": re.compile(r"\.type\([^()]*(float32|torch\.float\b)"),
    "finfo": re.compile(r"finfo\(\s*(torch\.)?float(32)?\b"),
    "": re.compile(r"dtype\s*=\s*(torch\.)?float(32)?\b"),
}

Look = Callable[[Call], None]


class Visitor(TorchFunctionMode):
    """A torch function mode that passes each call in the models' training to `look`, with the facts of its tensors.

    User code computes in FP32, and no number changes. Tensors that depend on no parameter (masks, positions, times) are
    computed once more in each low-precision type.

    Args:
        look: receives each call.
        take: receives each tensor that no seen call has made, when a call outside of the models' forwards takes it.
    """

    def __init__(self, look: Look, take: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.look, self.take = look, take
        self.facts = WeakTensorKeyDictionary()
        self.models: list[nn.Module] = []
        self.untrained: dict[int, str] = {}  # address of a model's float tensor that no optimizer trains -> its name
        self.trained: dict[int, str] = {}  # address of a cast weight that an optimizer trains -> its name
        self.averages: set[str] = set()  # names of such tensors in modules that `run` keeps in FP32
        self.asked: list[Any] = []  # the lines (`Place`) of the entered torch.autocasts that ask for FP32
        self.plain = 0  # the number of entered regions in which O1 casts nothing
        self.depth = 0
        self.active = True
        self.stack = ExitStack()
        self._read: Facts | None = None  # the facts of the tensor whose dtype was read last
        self._before: list[tuple[Tensor, Facts]] = []
        self._tried: dict[Any, tuple[Exception, bool] | None] = {}  # None: no error
        self._buffers: list[tuple[nn.Module, str, str]] = []

    # Models.

    def follow(self, model: nn.Module, trained: Iterable[Tensor]) -> None:
        """Follow the forwards of a model. `trained` has the parameters that an optimizer trains."""
        self.models.append(model)
        self.stack.enter_context(eagerly())
        # Calls that read buffers of a module without a forward are cast, so that no line is named for them.
        kept = [m for m in kept_modules([model], OPT_LEVELS["O2"], ()) if has_forward(m)]
        stays = {id(inner) for module in kept for inner in module.modules()}
        held = {id(param) for param in trained}
        averages = averages_in([model], held).items()
        self.averages |= {f"{path}.{name}" for average, path in averages for name in average.state_dict()}
        for path, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                if _floats(param):
                    low = NONE if id(module) in stays else CASTING
                    self.facts[param] = Facts(low, learned=True)
                    if low:
                        known = self.trained if id(param) in held else self.untrained
                        known[param.untyped_storage().data_ptr()] = f"{path}.{name}".strip(".")
            if id(module) not in stays:
                names = (name for name, _ in module.named_buffers(recurse=False))
                self._buffers += [(module, name, f"{path}.{name}".strip(".")) for name in names]
        for module in kept:
            if not is_batch_norm(module) and module is not model:
                self._hook(module, self._kept_begins, self._kept_ends)
        self._hook(model, self._forward_begins, self._forward_ends)

    def _hook(self, module: nn.Module, begins: Any, ends: Any) -> None:
        # Functions, not bound methods: a deepcopy of the model copies the object of a bound method, here the visitor.
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.active and not in_backward():
                begins((args, kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.active and not in_backward():
                ends((args, kwargs), output)

        self.stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self.stack.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _forward_begins(self, given: Any) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        with torch._C.DisableTorchFunction():
            self._read = None
            self._before = [(tensor, self.of(tensor)) for tensor in _floats(batch_tensors(given))]
            for number, (tensor, facts) in enumerate(self._before):
                self.facts[tensor] = facts = cast(tensor, facts, f"input {number + 1} of the model", is_input=True)
                self._show("input", tensor, facts)
            for module, name, path in self._buffers:
                buffer = getattr(module, name, None)
                if isinstance(buffer, Tensor) and _floats(buffer) and buffer.dtype is torch.float32:
                    new = buffer not in self.facts
                    self.facts[buffer] = facts = cast(buffer, Facts(), f"buffer {path!r}")
                    self.untrained[buffer.untyped_storage().data_ptr()] = path
                    if new:
                        self._show("buffer", buffer, facts)

    def _forward_ends(self, given: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        with torch._C.DisableTorchFunction():
            for tensor in _floats(output):
                self.facts[tensor] = uncast(self.of(tensor))
            for tensor, facts in self._before:
                self.facts[tensor] = facts
            self._before = []

    def _kept_begins(self, given: Any) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in _floats(given):
                self.facts[tensor] = uncast(self.of(tensor))

    def _kept_ends(self, given: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in _floats((given, output)):
                self.facts[tensor] = cast(tensor, self.of(tensor), "")

    def _show(self, op: str, tensor: Tensor, facts: Facts) -> None:
        self.look(Call(None, inputs=[(tensor, facts)], outputs=[(tensor, facts)], inside=True, name=op))

    def of(self, tensor: Tensor) -> Facts:
        """Return the facts of a tensor."""
        known: Facts | None = self.facts.get(tensor)
        if known is not None:
            return known
        if tensor.grad_fn is not None:  # made where no mode sees it, by a compiled function
            low = CASTING if self.depth else NONE
            return Facts(low, learned=True)
        return NOTHING

    def has_learned(self, result: Any) -> None:
        """Follow the result of an autograd function with learned arguments: it may have written into given memory."""
        for tensor in _floats(result):
            if (known := self.facts.get(tensor)) is not None and not known.learned:
                self.facts[tensor] = Facts(known.low, learned=True)

    # Calls.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or not self.models or in_backward():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__" and owner == "data":
            self._data_is_set(func, *args)
            return None
        if name == "__get__":
            if owner == "dtype" and args[0].is_floating_point():
                self._read = self.of(args[0])
            if owner not in _ATTRIBUTES:
                return func(*args, **kwargs)
        elif name == "__set__" and owner == "grad" and isinstance(args[1], Tensor):
            self.look(Call(None, args, inputs=[(args[1], self.of(args[1]))], name="grad"))
            return func(*args, **kwargs)
        elif name in _PASSED or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs, inside=self.depth > 0, asked=self.asked[-1] if self.asked else None)
        call.rule, call.plain = rule_of(func), self.plain > 0
        given = _floats((args, kwargs))
        for tensor in () if call.inside else [t for t in given if self.of(t) is NOTHING or self.of(t) is STORED]:
            self.take(tensor)
        call.inputs = [(tensor, self.of(tensor)) for tensor in given]
        call.limits = self._low_as_read(call, "finfo") if call.has_limits else NONE
        call.in_place = in_place(name, args)
        if call.in_place and _floats(args[0]):
            self.note_write(call, args[0])
        result = func(*args, **kwargs)
        if call.inside and call.op in _CONVERTS and result is args[0]:
            result = result.view_as(result)  # without this, result and input would share their facts
        if call.op == "empty" and not result.numel():
            return result  # it gets memory where no mode sees it, as a tensor that a DataLoader's process has sent
        call.result = result
        made = _floats(args[0] if call.in_place else result)
        if not (call.inputs or made):
            return result
        with torch._C.DisableTorchFunction():
            for tensor, facts in zip(made, self._follow(call, made), strict=True):
                self.facts[tensor] = facts
                call.outputs.append((tensor, facts))
            if call.inside and call.learned:
                self._try(call)
                for _, facts in call.outputs if call.errors else ():
                    facts.finite |= call.errors.keys() - call.served  # the call never returns there: one line is enough
            self.look(call)
        return result

    def note_write(self, call: Call, tensor: Tensor) -> None:
        """Store in a call the name and numbers of `tensor`, into which it will write, if it belongs to a model."""
        address = tensor.untyped_storage().data_ptr()
        path = self.untrained.get(address) or self.trained.get(address)
        call.trained = address in self.trained
        if path is not None:
            call.written, call.served = (path, tensor.detach().clone()), CASTING if path in self.averages else NONE

    def _data_is_set(self, func: Any, tensor: Tensor, value: Tensor) -> None:
        """Follow the assignment `tensor.data = value`, which may be a write into an average of weights."""
        call = Call(None, (tensor,), inputs=[(tensor, self.of(tensor))], name="data")
        if _floats(tensor):
            self.note_write(call, tensor)
        func(tensor, value)
        if call.written is not None:
            known = self.trained if call.trained else self.untrained
            known[tensor.untyped_storage().data_ptr()] = call.written[0]
            with torch._C.DisableTorchFunction():
                call.outputs = call.inputs
                self.look(call)

    def _follow(self, call: Call, made: list[Tensor]) -> list[Facts]:
        """Return the facts of each tensor in `made`, the results of a call."""
        given = [facts for _, facts in call.inputs]
        low = self._low(call)
        if all(tensor.dtype is not torch.float32 for tensor in made):
            low = NONE
        if call.learned:
            one = Facts(low, learned=True)
            one.raised = any(facts.raised for facts in given) or (bool(call.low()) and self._raises(call))
            one.masked = any(facts.masked for facts in given) or adds_mask(call)
            finite, infinite = mask_at(call)
            one.finite = (finite | call.limits).union(*(facts.finite for facts in given))
            one.infinite = infinite.union(*(facts.infinite for facts in given))
            if one.masked and low:  # without this, `x.float()` would hide a mask that became infinite in `x`
                lowest = finite_range(made[0])[0]
                one.infinite |= frozenset(kind for kind in low - one.finite if not kind.holds(lowest))
            if "softmax" in call.op:
                one.masked, one.finite, one.infinite = False, NONE, NONE
            if len(given) == 1:
                one.guard = given[0].guard
                source = call.inputs[0][0].untyped_storage().data_ptr()
                if call.op in _SAME_NUMBERS or any(each.untyped_storage().data_ptr() == source for each in made):
                    one.widened = (given[0].low | given[0].widened) - low
                if call.rule == "sigmoid" and not call.plain:
                    one.permitted = low - CASTING
                elif not call.lowers:
                    one.permitted = low & given[0].permitted
            return [one] * len(made)
        values = self._values(call, made, low)
        found = []
        for at in range(len(made)):
            own = {kind: each[at] for kind, each in values.items()}
            kinds = frozenset(kind for kind, value in own.items() if value.dtype is kind.dtype)
            named = given[0].name if len(given) == 1 else ""
            guard = given[0].guard if len(given) == 1 else None
            found.append(Facts(kinds, values=own, name=named, guard=guard))
        return found

    def _low(self, call: Call) -> Kinds:
        """Return the kinds of levels at which the result of the call has the low-precision type of the kind."""
        if call.op in _CONVERTS or isinstance(call.kwargs.get("dtype"), torch.dtype):
            return self._converted(call)
        return frozenset(kind for kind in KINDS if self._is_low(call, kind))

    def _is_low(self, call: Call, kind: Kind) -> bool:
        floats = [(tensor.dim() > 0, kind in facts.low) for tensor, facts in call.inputs]
        if not floats:
            return False
        if call.in_place:
            return floats[0][1]
        if not kind.casts and call.lowers:
            return True
        if not kind.casts and call.rule in _RAISING and not call.plain:
            return False
        if call.op in _OF_FIRST:
            return floats[0][1]
        if call.rule in LOWERING:
            return any(low for _, low in floats)
        voters = [low for large, low in floats if large] or [low for _, low in floats]
        return all(voters)

    def _converted(self, call: Call) -> Kinds:
        """Return the result of `_low` for a conversion such as `x.to(...)`, or for a call with a `dtype=` argument."""
        given = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.dtype)]
        if call.op == "type_as" or (call.op == "to" and len(call.inputs) > 1):
            return call.low(1)
        if call.op == "to" and not given:
            return call.low()
        if call.op in ("to", "type") or call.op not in _CONVERTS:
            return self._low_as_read(call, call.op) if torch.float32 in given else NONE
        return NONE

    def _raises(self, call: Call) -> bool:
        """Return whether user code asks for an FP32 result in this call, by a conversion or by `dtype=`."""
        return (call.op in _CONVERTS or "dtype" in call.kwargs) and not self._converted(call)

    def _low_as_read(self, call: Call, asks: str) -> Kinds:
        """Return the kinds at which the call's dtype is low, because it is read from a tensor, as in `x.to(y.dtype)`.

        If the call's text names FP32, the dtype is not read from a tensor. Numbers of `torch.finfo(x.dtype)` are those
        of the type of x, which may differ from the type of the tensor that the call takes.
        """
        names = _NAMES_FLOAT32.get(asks, _NAMES_FLOAT32[""])
        return NONE if self._read is None or names.search(call.line.text()) else self._read.low

    def _at(self, call: Call, kind: Kind, low: Kinds) -> tuple[Any, Any, bool]:
        """Return (args, kwargs, changed): the arguments at `kind`, detached; whether one differs from FP32's."""
        changed = False

        def one(tensor: Tensor) -> Tensor:
            nonlocal changed
            if not tensor.is_floating_point():
                return tensor
            facts = self.of(tensor)
            value = facts.values.get(kind)
            if value is None and kind in facts.low:
                value = tensor.detach().to(kind.dtype)
            changed = changed or value is not None
            value = tensor.detach() if value is None else value
            if not kind.casts and value.dtype in (torch.float32, kind.dtype):
                if call.lowers:
                    changed, value = True, value.to(kind.dtype)
                elif call.rule in _RAISING and not call.plain:
                    value = value.float()
            return value

        args, kwargs = map_tensors(one, (call.args, call.kwargs))
        if kind in call.limits:
            changed = True
            args = tuple(_of_kind(kind, each) for each in args)
            kwargs = {key: _of_kind(kind, each) for key, each in kwargs.items()}
        if call.op in _CONVERTS or "dtype" in kwargs:
            dtype = kind.dtype if kind in low else torch.float32
            args = tuple(dtype if each is torch.float32 else each for each in args)
            kwargs = {key: dtype if each is torch.float32 else each for key, each in kwargs.items()}
            changed = changed or kind in low
        return args, kwargs, changed

    def _values(self, call: Call, made: list[Tensor], low: Kinds) -> dict[Kind, list[Tensor]]:
        """Return {kind: results} of a call without learned inputs, for each kind with other arguments than FP32's."""
        found: dict[Kind, list[Tensor]] = {}
        is_complex = isinstance(call.result, Tensor) and call.result.is_complex()  # of an FFT, which may raise errors
        for kind in KINDS:
            args, kwargs, changed = self._at(call, kind, low)
            if not changed:
                continue
            if not (made or is_complex) or (call.in_place and args[0].data_ptr() == made[0].data_ptr()):
                # The tensor is FP32 at these levels, and the script's in-place call has overwritten it. A second call
                # would start from the wrong numbers, and change the script's own tensor.
                continue
            if not only_once(call.op):
                try:
                    with torch.no_grad():
                        result = call.func(*args, **kwargs)
                    found[kind] = [args[0]] if call.in_place else _floats(result)
                except (RuntimeError, TypeError) as error:
                    call.errors[kind] = error
                    if mends(call, kind, error, args, kwargs):
                        call.served |= {kind}
            if len(found.get(kind, ())) != len(made):
                found[kind] = [saturate(tensor, kind.dtype) if kind in low else tensor for tensor in made]
        return found

    def _try(self, call: Call) -> None:
        """Call the function again for each kind of levels, with arguments in that kind's types, and store errors."""
        if call.rule in _SERVED or call.op in _UNTRIED or only_once(call.op) or (call.in_place and not call.low()):
            return
        for kind in KINDS:
            pattern = tuple(kind in facts.low for _, facts in call.inputs)
            mixed = not all(pattern)
            if not any(pattern) or (not kind.casts and call.rule is not None and (mixed or call.rule != "widest")):
                continue
            if not mixed and call.rule in LOWERING:
                continue
            large = tuple(not kind.holds(number) for number in call.scalars())
            key = (call.func, kind, pattern, large)
            if key not in self._tried:
                self._tried[key] = None
                args, kwargs, _ = self._at(call, kind, call.low())
                try:
                    with torch.no_grad():
                        call.func(*args, **kwargs)
                except (RuntimeError, TypeError) as error:
                    self._tried[key] = error, mends(call, kind, error, args, kwargs)
            # torch's error does not count if the script has raised an input to FP32, and reads dtypes: it may test the
            # incoming type, and convert back in a branch that this FP32 run did not take.
            raised = any(facts.raised and kind not in facts.low for _, facts in call.inputs)
            on_purpose = raised and self._read is not None
            if (known := self._tried[key]) is not None and not on_purpose:
                call.errors[kind], served = known
                call.served |= {kind} if served else NONE


def _of_kind(kind: Kind, value: Any) -> Any:
    """Return `kind`'s smallest or largest number if `value` is that of FP32; else `value`."""
    own = torch.finfo(kind.dtype)
    known = {_FLOAT32.min: own.min, _FLOAT32.max: own.max}
    return known.get(value, value) if isinstance(value, float) else value


def _floats(value: Any) -> list[Tensor]:
    """Return the floating tensors in a value whose numbers can be read: no sparse ones, and none inside of a `vmap`."""
    return [
        tensor
        for tensor in tensors(value)
        if tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ]
