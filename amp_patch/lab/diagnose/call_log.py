"""CallLog: the calls of torch's functions while a model runs, each with the module in whose forward it is made."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_patch.support.compiled import eagerly


@dataclass
class Frame:
    """A module whose forward runs.

    Attributes:
        inputs: the tensors it was given, each with its version counter then; a subclass fills it.
        calls_others: whether another module was called inside.
    """

    name: str
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    calls_others: bool = False


class CallLog(TorchFunctionMode):
    """A mode, and hooks around forwards. A subclass overrides `log`, and what else it wants to be told.

    Attributes:
        running: the modules whose forward runs, innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Frame] = []

    def is_logging(self) -> bool:
        """Whether calls and forwards count now; False while the log itself computes."""
        raise NotImplementedError

    def itself(self, func: Any) -> Any:
        """The function, where `func` is something that was put in its place."""
        return func

    def passes_over(self, func: Any) -> bool:
        """Whether calls of this function are left out of the log."""
        return False

    def log(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the function, and give what it returns."""
        raise NotImplementedError

    def forward_begins(self, frame: Frame, args: Any, kwargs: Any) -> None:
        """`frame` is about to be the innermost of `running`."""

    def forward_ends(self, frame: Frame, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """`frame` is about to leave `running`; `output` is None after an exception."""

    def module_name(self) -> str | None:
        """Of the innermost module whose forward runs; None outside of them all."""
        return self.running[-1].name if self.running else None

    def hook(self, modules: Iterable[tuple[str, nn.Module]], stack: ExitStack) -> None:
        """Hook the forwards of these modules, and run compiled code eagerly, until `stack` closes.

        A compiled graph hides its functions from a mode, and would trace the hooks into itself, or not call them.
        """
        stack.enter_context(eagerly())
        for name, module in modules:
            before, after = self._hooks_of(name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _hooks_of(self, name: str) -> tuple[Any, Any]:
        # Functions, not bound methods or partials: a deepcopy of the model would copy the log along with those.
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
