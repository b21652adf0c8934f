"""Replays of a script's step: the calls of torch from a model's forward to the script's backward, as a case."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch.casts.install import places
from amp_patch.diagnose.module_error import floats
from amp_patch.diagnose.survey.calls import in_place, user_line
from amp_patch.diagnose.survey.kinds import Place
from amp_patch.diagnose.survey.steps import Case, Steps, copied, note_gradients
from amp_patch.support import tree
from amp_patch.support.compiled import in_backward


class Noted(NamedTuple):
    """One call of a script's step. Each tensor in it has a stand-in: a copy, if no noted call has made the tensor.

    Attributes:
        func: the function of torch; None for a call of the model.
        args, named: its arguments.
        made: the tensors in its result.
        line: the line of user code that makes the call.
        with_grad: whether gradients are enabled.
    """

    func: Callable[..., Any] | None
    args: Any
    named: Any
    made: list[Tensor]
    line: Place
    with_grad: bool


class Replay:
    """The part of a script's step from a call of a model to the backward that reaches its output.

    It is noted from `watch` on. Python's numbers and branches are those of the noted step.

    Args:
        options: the options of the case.

    Attributes:
        calls: the calls of torch outside of the model that take a learned tensor, and the calls of the model.
        loss: the stand-in of the tensor whose backward was called; None before that.
        complete: whether each learned tensor in `calls` was made by one of them.
        reached: whether a backward has reached an output of the model.
        grads: the index of a floating tensor in the first call's output -> its gradient, FP32.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self._model, self._options, self._watches, self._running = model, options, False, 0
        self.calls: list[Noted] = []
        self.loss: Tensor | None = None
        self.complete, self.reached = True, False
        self.grads: dict[int, Tensor] = {}
        self._stand_ins = WeakTensorKeyDictionary()
        self._params: dict[int, str] = {}  # id of the stand-in of a parameter of the model -> its name
        before, after = self._hooks()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, always_call=True),
        ]

    def watch(self) -> None:
        """Note the calls from now on. Copies of the batch are in memory."""
        self._watches = True

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def line(self) -> Place:
        """The line of the last call, which made the loss."""
        return self.calls[-1].line

    def case(self) -> Case | None:
        """Return the step as a case; None if no output has got a gradient.

        If the calls do not lead from the model to the loss, as through a function of another library, the gradients of
        the first output stand for the loss.
        """
        if not self.reached:
            return None
        first, grads = self.calls[0], self.grads
        case = Case(self._model, self, first.args, first.named, (), calls_model=True, options=self._options)
        try:
            if self.complete and self.loss is not None and Steps(case).exact().grads:
                return case
        except Exception:  # a call that cannot be repeated
            pass

        def weighed(output: Any) -> Tensor:
            made = floats(output)
            return torch.stack([(made[at].float() * grad).sum() for at, grad in grads.items()]).sum()

        return case._replace(loss_fn=weighed, calls_model=False) if grads else None

    def __call__(self, model: nn.Module, given: Any, output: Any) -> Tensor:
        """Repeat the calls that follow the model's first one, and return the loss.

        Args:
            given: the arguments of the first call, positional and by name. Gradients of it may be asked for.
            output: its result.
        """
        params, first = dict(model.named_parameters()), tree.tensors((self.calls[0].args, self.calls[0].named))
        values: dict[int, Tensor] = {key: params[name] for key, name in self._params.items()}
        values |= {id(one): own for one, own in zip(first, tree.tensors(given), strict=True) if own.requires_grad}
        # At a level the functions of torch are replaced by wrappers that cast.
        wrapped = [each for each in places() if isinstance(each.wrapped.original, Hashable)]
        wrappers = {each.wrapped.original: getattr(each.owner, each.name) for each in wrapped}

        def value(stand_in: Tensor) -> Tensor:
            if id(stand_in) not in values:
                values[id(stand_in)] = copied(stand_in)
            return values[id(stand_in)]

        for call in self.calls:
            if call is not self.calls[0]:
                args, named = tree.map_tensors(value, (call.args, call.named))
                func = model if call.func is None else wrappers.get(call.func, call.func)
                with torch.set_grad_enabled(call.with_grad):
                    output = _called_at(call.line, func, args, named)
            values |= zip(map(id, call.made), tree.tensors(output), strict=True)
        return value(self.loss)  # type: ignore[arg-type]

    def begun(self, func: Any, args: Any, named: Any) -> Noted | None:
        """Return the call, which begins now, with its stand-ins; None if it is not noted."""
        if not self._watches or self._running or self.loss is not None:
            return None
        given = tree.tensors((args, named))
        if not any(t.requires_grad or t in self._stand_ins for t in given) or getattr(func, "__self__", None) in _GRAD:
            return None
        made = [t for t in given if t.requires_grad and not t.is_leaf and t not in self._stand_ins]
        self.complete = self.complete and not made
        return self._noted(func, args, named)

    def ended(self, call: Noted, result: Any) -> None:
        """Note a call that has returned `result`."""
        if call.func is torch.Tensor.backward:
            self.loss = call.args[0] if self.reached else None
        elif made := tree.tensors(result):
            call.made.extend(map(self._made, made))
            self.calls.append(call)
        elif call.func is not None and in_place(call.func.__name__, call.args):
            self.calls.append(call)

    def _noted(self, func: Any, args: Any, named: Any) -> Noted:
        args, named = tree.map_tensors(self._stand_in, (args, named))
        return Noted(func, args, named, [], user_line(), torch.is_grad_enabled())

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if tensor not in self._stand_ins:
            name = next((name for name, param in self._model.named_parameters() if param is tensor), None)
            self._stand_ins[tensor] = copied(tensor) if name is None else tensor.new_empty(0)
            if name is not None:
                self._params[id(self._stand_ins[tensor])] = name
        return self._stand_ins[tensor]

    def _made(self, tensor: Tensor) -> Tensor:
        return self._stand_ins.setdefault(tensor, tensor.new_empty(0))

    def _hooks(self) -> tuple[Any, Any]:
        # Functions, not bound methods: a deepcopy of the model copies the object of a bound method.
        begun: list[Noted] = []

        def before(_model: nn.Module, args: Any, named: Any) -> None:
            notes = self._watches and self.loss is None and not in_backward()
            if notes and not self._running and (self.calls or torch.is_grad_enabled()):
                with torch._C.DisableTorchFunction():
                    begun.append(self._noted(None, args, named))
            self._running += 1

        def after(_model: nn.Module, _args: Any, output: Any) -> None:
            self._running -= 1
            if begun and not self._running:
                with torch._C.DisableTorchFunction():  # else the mode would note the calls of this hook
                    self.ended(begun.pop(), output)
                note_gradients(output, partial(_keep, self, len(self.calls) == 1))

        return before, after


_GRAD = (torch.Tensor.grad,)  # a gradient is no function of the tensors that the calls make


def _keep(replay: Replay, first: bool, at: int, grad: Tensor) -> None:
    replay.reached = True
    if first:
        replay.grads.setdefault(at, grad.detach().float())


def _called_at(line: Place, func: Any, args: Any, named: Any) -> Any:
    """Call `func` in a frame of the noted line, so that a search, and a traceback, find that line."""
    code = compile("func(*args, **named)", line.file, "eval").replace(co_firstlineno=line.line)
    return eval(code, {"__name__": "__main__", "func": func, "args": args, "named": named})


class Replays(TorchFunctionMode):
    """A mode that passes each call of torch to replays.

    Attributes:
        each: the replays.
        paused: whether an optimizer steps, whose calls are not noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.each: list[Replay] = []
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        passes = self.paused or in_backward()
        noted = [] if passes else [(each, call) for each in self.each if (call := each.begun(func, args, kwargs))]
        result = func(*args, **kwargs)
        for replay, call in noted:
            replay.ended(call, result)
        return result
