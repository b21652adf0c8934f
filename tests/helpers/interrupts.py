"""Ctrl-C at the n-th call of an iteration, and the state that must be restored after it."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.casts import state as casts_state
from amp_patch.casts import thread_state
from amp_patch.model import of_model as model_state
from amp_patch.support import interrupts
from amp_patch.support.interrupts import WholeFirst

INPUTS = {
    "first": torch.tensor([[1.0, 2.0, 0.0], [3.0, -1.0, 1.0]]),
    "second": torch.tensor([[2.0, -1.0, 1.0], [1.0, 1.0, -2.0]]),
    "overflows": torch.full((2, 3), 60000.0),
}
TARGETS = {
    "first": torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]]),
    "second": torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 3.0]]),
    "overflows": torch.full((2, 3), -60000.0),
}


class Interrupt:
    """Calls a function, and sends SIGINT at its `at`-th call of a Python function, whoever's that is.

    "call" is where CPython notices a signal on entry; "c_return", the other event, where it does after a call into C.
    While it waits for the end of a function of ours, it is sent again at each of these moments, not after a time.

    The garbage collector is disabled until then. It would close generators of earlier interrupts at calls that are
    counted. If one of these raises, CPython 3.11 calls a profile function that it has freed.
    """

    def __init__(self, at: int = 0, event: str = "call") -> None:
        self.at, self.event = at, event
        self.count = 0
        self.first: tuple[CodeType, ...] = ()  # where the signal came first, innermost first
        self.place: tuple[CodeType, ...] = ()  # where it raised
        self.raised: BaseException | None = None

    def __call__(self, run: Callable[[], Any]) -> Interrupt:
        unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None  # of generators
        collects = gc.isenabled()
        gc.disable()
        try:
            with sent_again_by_the_test():
                try:
                    sys.setprofile(self._look)
                    run()
                finally:
                    sys.setprofile(None)
        except KeyboardInterrupt as raised:
            self.raised = raised
        finally:
            sys.unraisablehook = unraisable
            if collects:
                gc.enable()
        return self

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event != self.event or frame.f_code is Interrupt.__call__.__code__:
            return
        self.count += 1
        if self.at and self.count >= self.at and (self.count == self.at or is_waiting()):
            self.place = tuple(frame.f_code for frame in _outwards(frame))
            self.first = self.first or self.place
            send()


def is_waiting() -> bool:
    """Tell whether a SIGINT waits for the end of a function of amp_patch."""
    handler = interrupts.sigint_handler()
    return isinstance(handler, WholeFirst) and handler.is_waiting


def send() -> None:
    """Send SIGINT, or the one that waits again."""
    handler = interrupts.sigint_handler()
    if isinstance(handler, WholeFirst):
        handler.is_again = handler.is_waiting
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def sent_again_by_the_test() -> Iterator[None]:
    """`send` alone sends a waiting signal again, and none waits afterwards."""
    own, interrupts.start_new_thread = interrupts.start_new_thread, lambda *_: None
    try:
        yield
    finally:
        interrupts.start_new_thread = own
        if is_waiting():
            send()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def topmost_hooks() -> Any:
    """Return the innermost saved-tensors hooks; None if there are none, and before torch 2.8."""
    topmost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if topmost is None else topmost(False)


def surroundings() -> dict[str, Any]:
    """Return the state of torch and amp_patch that an iteration changes while it runs."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "torch.autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "torch.autocast's depth": thread_state.native_depth(),
        "saved-tensor hooks": topmost_hooks(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default type": torch.get_default_dtype(),
        "regions": [entry.region for entry in thread_state.this_thread.stack],
        "uncastable entries": len(thread_state.this_thread.uncastable_entries),
        "overrides": len(casts_state.overrides),
        "running model": model_state.running.policy,
        "casts": casts_state.current(),
    }


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.5, 0.0], [0.25, -1.0, 2.0], [1.0, 1.0, 1.0]]))
    return model


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    """Return an SGD whose step changes all weights in one call into C, so that no interrupt can divide it."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum, foreach=True)


class Training:
    """A model and its optimizer at a level."""

    def __init__(self, level: str, **options: Any) -> None:
        self.model = network()
        self.optimizer = sgd(self.model, 0.5 if "optimizer_state" in options else 0.0)
        if level not in ("O0", "O3"):
            options["keep_fp32"] = nn.LayerNorm  # at O3 torch's step would be one call for each type
        if level in ("O1", "O2", "O3"):
            options.setdefault("loss_scale", 128.0)
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)

    def loss(self, batch: str) -> Tensor:
        return nn.functional.mse_loss(self.model(INPUTS[batch]), TARGETS[batch])

    def backward(self, batch: str, **options: Any) -> None:
        with amp.scale_loss(self.loss(batch), self.optimizer, **options) as scaled_loss:
            scaled_loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 1e4)
        self.optimizer.step()

    def iteration(self, batch: str) -> None:
        self.optimizer.zero_grad()
        self.backward(batch)
        self.step()

    def weights(self) -> list[Tensor]:
        """Return the weights that the optimizer updates, and the model's weights."""
        params = [*amp.master_params(self.optimizer), *self.model.parameters()]
        return [param.detach().clone() for param in params]
