"""explain: for each function of torch in one forward, its types (received, computed in, returned) and their reason."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casts import install
from amp_patch.casts import state as casts_state
from amp_patch.casts.rules import PRODUCT, Rule
from amp_patch.diagnose.call_log import CallLog
from amp_patch.diagnose.explanation import EMULATED, UNDECIDED, Explanation, OpCall, Types
from amp_patch.diagnose.trial_forward import state_restored
from amp_patch.diagnose.wording import type_name
from amp_patch.model import buffers, forward
from amp_patch.model.forward import policy_of
from amp_patch.model.kept_module import KeptModule
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import distributed, tree
from amp_patch.support.compiled import uncompiled
from amp_patch.support.patches import Patches


def explain(model: nn.Module, *inputs: Any, **kwargs: Any) -> Explanation:
    """Report the resolved policy of `model` and, for one forward, each function with its types::

        print(amp.explain(model, images))

    `model(*inputs, **kwargs)` runs once without gradients, in the model's present mode (train or eval), and the result
    is an `Explanation`. Compiled code runs eagerly. Hooks of the model are called. Buffers and the states of the random
    generators are restored.

    The forward computes the same bits as any other. It takes longer, and does not sync. While it runs, torch's
    functions are replaced in the whole process. A function that the script imported by name after `initialize` (`from
    torch import exp`), or that runs in a decorator such as `amp.half_function`, is shown with types after its casts.

    Args:
        model: the model that `initialize` returned, at any level, or any other module.
        inputs, kwargs: the arguments of its forward.

    Raises:
        ValueError: the model is sharded.
        RuntimeError: called within a forward that is being explained.
    """
    distributed.refuse(model, "explain")
    model = uncompiled(model)
    if _of_thread.explains:
        raise RuntimeError("explain: called within a forward that is being explained; call it outside of the model")
    with torch.no_grad(), state_restored(model), _one_at_a_time, ExitStack() as stack:
        log = _TypeLog(model, stack)
        model(*inputs, **kwargs)
    return log.explanation


# ---------------------------------------------------------------------------------------------------------------------
# Logging a forward


_one_at_a_time = threading.Lock()  # held while torch's functions are replaced, which affects the whole process


class _OfThread(threading.local):
    explains = False  # whether a forward of this thread is being explained


_of_thread = _OfThread()


class _TypeLog(CallLog):
    """Logs the calls of one forward on this thread, with their types.

    A function on the op lists is replaced by a "frame". The frame logs the call and applies the function's rule to a
    "spy", which records the types after the casts and calls the function. Every other function is logged by
    `__torch_function__`. torch does not call `__torch_function__` again for the calls that such a function makes. Among
    these inner calls, only those of functions with a frame are logged.
    """

    def __init__(self, model: nn.Module, stack: ExitStack) -> None:
        """Replace torch's functions until `stack` closes."""
        super().__init__()
        # A wrapper (DistributedDataParallel) has no policy: take that of the first module inside that has one.
        policy = next((found for inner in model.modules() if (found := policy_of(inner)) is not None), None)
        self.explanation = Explanation(policy, _kept(model, policy))
        self.calls = self.explanation.calls
        self.emulated_before: dict[int, int] = {}  # index of a call -> `emulated_calls()` when it began
        self.inside = False  # whether a function runs whose inner calls are not logged
        self.expected: Any = None  # the function that a spy is about to call: the mode must not log it a second time
        self.originals: dict[int, Any] = {}  # id of a frame -> the function that it replaces
        self.hook(((name, module) for name, module in model.named_modules() if module is not model), stack)
        patches = Patches()
        stack.callback(patches.remove)
        patches.set(tree, "cast_floats", self._casting(tree.cast_floats))
        patches.set(forward, "cast_one", self._casting(forward.cast_one))
        # Hides the mode from torch's encoder layers. If they saw it, they would not take their fused path, and their
        # results would differ in the last bits.
        patches.set(torch.overrides, "has_torch_function", _has_subclass)
        for place in install.places():
            patches.set(place.owner, place.name, self._frame(place))
        stack.enter_context(self)
        stack.callback(setattr, _of_thread, "explains", False)
        _of_thread.explains = True

    def is_logging(self) -> bool:
        return _of_thread.explains

    def passes_over(self, func: Any) -> bool:
        expected, self.expected = self.expected, None
        return self.inside or (expected is not None and func == expected)

    def itself(self, func: Any) -> Any:
        return self.originals.get(id(func), func)

    def log(self, func: Any, args: Any, kwargs: Any) -> Any:
        index = self._begin(_address(func), (args, kwargs))
        result = func(*args, **kwargs)
        self._end(index, args[0] if func is Tensor.__setitem__ else result)
        return result

    def _frame(self, place: install.Place) -> Any:
        """Return the frame that replaces O1's wrapper at `place`; a static or class method if the wrapper is one."""
        wrapper, original = place.wrapper, place.wrapped.original
        call = wrapper.__func__ if isinstance(wrapper, (staticmethod, classmethod)) else wrapper
        function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original

        @functools.wraps(function)
        def frame(*args: Any, **kwargs: Any) -> Any:
            if self.inside or not _of_thread.explains or kwargs.get("out") is not None:
                return call(*args, **kwargs)
            policy = casts_state.current()
            rule = place.wrapped.rule_of(policy)
            if policy is None or rule is None:
                return call(*args, **kwargs)
            if rule.shown is None:  # a function with such a rule computes nothing
                with self._unseen():
                    return call(*args, **kwargs)
            return self._follow(place, rule, policy, function, args, kwargs)

        self.originals[id(frame)] = function
        if isinstance(wrapper, classmethod):
            return classmethod(frame)
        return staticmethod(frame) if isinstance(wrapper, staticmethod) else frame

    def _follow(self, place: install.Place, rule: Rule, policy: Policy, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `function` by its rule, as the wrapper that the frame replaces does (see rules.py), and log the call."""
        index = self._begin(_address_at(place), (args, kwargs))

        @functools.wraps(function)
        def spy(*args: Any, **kwargs: Any) -> Any:
            self.calls[index] = replace(self.calls[index], ran=_types((args, kwargs)))
            self.inside, self.expected = False, function
            try:
                return function(*args, **kwargs)
            finally:
                self.inside, self.expected = True, None

        with self._unseen():
            result = rule.apply(spy, args, kwargs, policy)
        keeps_type = policy.low_precision_norms and rule.name == "norm"
        decided = f"your {rule.registered_by}" if place.registered else str(rule.shown)
        why = "low_precision_norms" if keeps_type else decided
        call = self.calls[index]
        if rule.name == PRODUCT and call.ran is call.got:  # a low-bit product never calls the function itself
            why = f"{rule.shown} ({policy.product_format})"
            ran = tuple(policy.dtype if dtype.is_floating_point else dtype for dtype in call.got)
            self.calls[index] = replace(call, ran=ran)
        given = args[0] if place.name == "__setitem__" else result
        self._end(index, given, why, parts_count=rule.for_users)
        return result

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def _casting(self, cast_floats: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(cast_floats)
        def casting(value: Any, dtype: torch.dtype, *args: Any) -> Any:
            if self.inside or not _of_thread.explains:
                return cast_floats(value, dtype, *args)
            with self._unseen():
                result = cast_floats(value, dtype, *args)
            got, gave = _types(value), _types(result)
            policy = self.explanation.policy
            is_input = policy is not None and dtype is policy.cast_model_type
            decided = self._kept_by() or ("cast_model_type" if is_input else "cast_model_outputs")
            if got != gave:
                self.calls.append(OpCall(self.module_name() or "", "cast", got, got, gave, decided))
            return result

        return casting

    def _kept_by(self) -> str | None:
        """Return why the module whose forward is running stays FP32 ("keep_fp32"); None if it does not stay FP32."""
        names = ["", *(frame.name for frame in self.running)]
        return next((why for name in names if (why := self.explanation.kept.get(name)) is not None), None)

    def _begin(self, op: str, given: Any) -> int:
        types = _types(given)
        self.calls.append(OpCall(self.module_name() or "", op, types, types, (), self._kept_by() or UNDECIDED))
        self.emulated_before[len(self.calls) - 1] = casts_state.in_use.emulated_calls()
        return len(self.calls) - 1

    def _end(self, index: int, result: Any, decided: str | None = None, parts_count: bool = False) -> None:
        """Log the types of the result of call `index`, and drop logged calls that would show the same work twice.

        A logged function may call other logged functions. If a rule decided the types of such an inner call, but none
        decided those of the outer call, the outer call is dropped; otherwise the inner calls are dropped. With
        `parts_count` (for a function that user code registered) the outer and the inner calls stay. A call without
        floating tensors is dropped in any case.
        """
        by_none = (UNDECIDED, *self.explanation.kept.values())
        if not parts_count and decided is None and any(p.decided not in by_none for p in self.calls[index + 1 :]):
            del self.calls[index]
            return
        gave = _types(result)
        if casts_state.in_use.emulated_calls() > self.emulated_before[index]:
            low = next((str(dtype) for dtype in gave if dtype in LOW_PRECISION), "").removeprefix("torch.")
            decided = ", ".join(filter(None, (decided, f"{EMULATED} {type_name(low)}".rstrip())))
        call = self.calls[index]
        call = self.calls[index] = replace(call, gave=gave, decided=decided or call.decided)
        if not parts_count:
            del self.calls[index + 1 :]
        if not call.gave or not any(dtype.is_floating_point for dtype in (*call.got, *call.gave)):
            del self.calls[index]


def _has_subclass(values: Any) -> bool:
    """Replacement of torch.overrides.has_torch_function that ignores torch function modes."""
    return any(isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) for value in values)


def _types(value: Any) -> Types:
    """Return the dtypes of the tensors in a value, nested containers included."""
    with torch._C.DisableTorchFunction():  # without this the mode would log each `tensor.dtype`
        return tuple(tensor.dtype for tensor in tree.tensors(value))


def _address_at(place: install.Place) -> str:
    owner = place.owner
    home = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{home}.{place.name}"


def _address(function: Any) -> str:
    """Return the path that user code writes for a function that `__torch_function__` receives."""
    name = getattr(function, "__name__", str(function))
    module = getattr(function, "__module__", None)
    if module in ("torch.nn.functional", "torch._C._nn"):
        return f"torch.nn.functional.{name}"
    if hasattr(function, "__objclass__") or module == "torch._tensor":
        return f"torch.Tensor.{name}"
    return f"torch.{name}"


def _kept(model: nn.Module, policy: Policy | None) -> dict[str, str]:
    """Return {name: reason, such as "keep_fp32"} of the outermost modules that stay FP32."""
    found: dict[str, str] = {}
    inner: set[int] = set()
    for name, module in model.named_modules():
        # torch's batch norms accept low-precision inputs with FP32 weights: `initialize` does not change their class.
        cast = policy is not None and policy.cast_model_type is not None
        is_norm = cast and isinstance(module, nn.modules.batchnorm._BatchNorm)
        is_kept = isinstance(module, KeptModule) or (
            is_norm and not any(t.dtype in LOW_PRECISION for t in (*module.parameters(), *module.buffers()))
        )
        if is_kept and id(module) not in inner:
            by_level = is_norm and policy is not None and policy.keep_batchnorm_fp32
            by_rule = cast and buffers.are_all_that(module) and not is_norm
            found[name] = "keep_batchnorm_fp32" if by_level else "buffers alone" if by_rule else "keep_fp32"
            inner.update(map(id, module.modules()))
    return found
