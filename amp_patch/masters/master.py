"""The class of FP32 masters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.grad_field import GRAD, own_grad, set_own_grad
from amp_patch.masters.held_gradients import HalfGradients, SteppedGradients
from amp_patch.support.patches import Installation

_constructor = Installation()


class Master(nn.Parameter):
    """The class of masters: parameters that count edits through `.data`, and make their gradients when they are asked.

    Torch gives the tensor of `.data` a version counter of its own, so that what Lookahead or a checkpoint writes there
    would never reach the model. Here `.data` is `.detach()`, which shares the master's counter, and an assignment to
    `.data` counts.

    A gradient may wait in low precision (`HalfGradients`). Who reads `.grad` finds the FP32 one; after a step that of
    the step (`SteppedGradients`).

    `connect` gives a parameter this class and `disconnect` takes it away. Copies keep it; pickles are plain parameters.
    """

    waiting: HalfGradients | None = None  # of the optimizer; None: its gradients are FP32 at once
    stepped_grads: SteppedGradients | None = None  # of the optimizer: gradients of its last step

    @property
    def grad(self) -> Tensor | None:
        waiting = self.waiting
        if waiting and (lent := waiting.lent.get(id(self))) is not None:
            return lent
        self.materialize_grad()
        grad = own_grad(self)
        return self.stepped_grads.read(self) if grad is None and self.stepped_grads else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.waiting:
            self.waiting.replace(self, GRAD, value)
        else:
            set_own_grad(self, value)
        if self.stepped_grads:
            self.stepped_grads.drop(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def materialize_grad(self) -> None:
        """Make the gradient that waits in low precision the FP32 one of this master; no sync.

        It is added to one that a backward pass through the master itself has left.
        """
        if self.waiting:
            self.waiting.give(self, GRAD)

    def waits_alone(self) -> bool:
        """Whether a gradient waits in low precision, and nothing was added to it since."""
        waiting = self.waiting
        return waiting is not None and id(self) in waiting.grads and GRAD.__get__(self) is None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("waiting", "stepped_grads")}

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(self)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)!r}"


def take_masters() -> None:
    """Let `nn.Parameter(master)` be an ordinary FP32 parameter in the master's memory, as of any tensor; idempotent.

    Torch wants a subclass whose `detach()` gives that subclass, and refuses any other.
    """
    _constructor.install(lambda patches: patches.set(nn.Parameter, "__new__", staticmethod(_of_tensor(nn.Parameter))))


def _of_tensor(kind: Any) -> Callable[..., Any]:
    own = kind.__new__

    @functools.wraps(own)
    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return own(cls, data.detach() if isinstance(data, Master) else data, *args, **kwargs)

    return new
