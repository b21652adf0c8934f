"""`CallLog`: the base class of logs of torch's function calls, each with the module whose forward makes the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass
class Frame:
    """A running forward of a module.

    Attributes:
        inputs: the tensors passed in, each with its version counter at that time. Filled by subclasses of `CallLog`.
        calls_others: whether the forward has called another module.
    """

    name: str
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    calls_others: bool = False


def eagerly() -> AbstractContextManager[Any]:
    """Return a context manager in which compiled code runs as plain Python."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def on_gradient(tensor: Tensor, then: Callable[[Tensor], None]) -> Any:
    """Call `then` with each gradient of `tensor` during backward; return the handle of the hook.

    If the loss depends on another result of the operator that made `tensor`, but not on `tensor` (the last state of
    cuDNN's LSTM), autograd calls hooks with None. Then `then` is not called.
    """
    return tensor.register_hook(lambda grad: None if grad is None else then(grad))


class CallLog(TorchFunctionMode):
    """A torch function mode with hooks around the forwards of modules.

    A subclass overrides `is_logging` and `log`, and the other callbacks that it needs.

    Attributes:
        running: the forwards that are running, innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Frame] = []

    def is_logging(self) -> bool:
        """Return whether calls and forwards are logged now; False while the log itself computes."""
        raise NotImplementedError

    def itself(self, func: Any) -> Any:
        """Return the function of torch that `func` replaces during the log; `func` itself if it replaces none."""
        return func

    def passes_over(self, func: Any) -> bool:
        """Return whether the call of `func` that begins now is left out of the log."""
        return False

    def log(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func(*args, **kwargs)`, log the call, and return its result."""
        raise NotImplementedError

    def forward_begins(self, frame: Frame, args: Any, kwargs: Any) -> None:
        """Receive `frame` before it is appended to `running`."""

    def forward_ends(self, frame: Frame, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Receive the `frame` of a forward that ends, before it is removed from `running`.

        If the forward raised an exception, `output` is None.
        """

    def module_name(self) -> str | None:
        """Return the name of the module whose forward is innermost; None outside of all forwards."""
        return self.running[-1].name if self.running else None

    def hook(self, modules: Iterable[tuple[str, nn.Module]], stack: ExitStack) -> None:
        """Hook the forwards of these modules, and make compiled code run eagerly, until `stack` closes.

        In a compiled graph, a mode does not see the functions, and hooks are traced into the graph or not called.
        """
        stack.enter_context(eagerly())
        for name, module in modules:
            before, after = self._hooks_of(name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _hooks_of(self, name: str) -> tuple[Any, Any]:
        # Plain functions: a deepcopy of the model would copy the log with a bound method or a partial.
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_logging():
                frame = Frame(name)
                self.forward_begins(frame, args, kwargs)
                self.running.append(frame)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.is_logging() and self.running:
                try:
                    self.forward_ends(self.running[-1], module, args, kwargs, output)
                finally:
                    self.running.pop()

        return before, after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = self.itself(func)
        if not self.is_logging() or self.passes_over(func):
            return func(*args, **(kwargs or {}))
        return self.log(func, args, kwargs or {})
