"""OptimWrapper, which adds a method `scale_loss` to an optimizer (the API before `amp.initialize`)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from amp_patch.support.blocks import block
from amp_patch.training.scale_loss import scale_loss

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """The result of `handle.wrap_optimizer(optimizer, num_loss)`::

        with optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Each of the `num_loss` losses of an iteration has its own scale. A loss is identified by its position in the
    iteration, so the order must not change. Gradients of the losses add up. All other attributes are the optimizer's.
    """

    # False even if the wrapped optimizer's is True: torch's GradScaler would set `found_inf` on this object.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0

    @block
    def scale_loss(self, loss: Tensor) -> Generator[Tensor, None, None]:
        """Yield the next loss of the iteration, scaled; unscale its gradients on exit."""
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"OptimWrapper.scale_loss: loss number {self._loss_idx + 1} since the last step, of num_loss="
                f"{self._num_loss}; call handle.wrap_optimizer(optimizer, num_loss={self._loss_idx + 1})"
            )
        with scale_loss(loss, self._optimizer, loss_id=self._loss_idx) as scaled_loss:
            yield scaled_loss
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Make the optimizer's step, or skip it if the gradients of a loss overflowed."""
        self._loss_idx = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not set yet in an instance that is being unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
