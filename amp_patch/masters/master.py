"""`Master`, the class of FP32 masters: edits through `.data` are counted, FP32 gradients are made on demand.

No master is made here. `Masters.attach` (of_optimizer.py) creates the FP32 tensor: it is the parameter's own memory if
`initialize` casts an FP32 parameter, and an FP32 copy if the parameter was low precision before. `connect` (masters.py)
then gives the tensor this class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.grad_field import GRAD, own_grad, set_own_grad
from amp_patch.masters.record import Record
from amp_patch.support.interrupts import whole
from amp_patch.support.patches import Installation

_constructor = Installation()
plain_data_types: list[type[Tensor]] = []  # subclasses of Tensor of which `nn.Parameter(x)` is an ordinary parameter


class Master(nn.Parameter):
    """The class of masters: parameters that count edits through `.data`, and make their FP32 gradients on demand.

    Torch gives the tensor of `.data` a separate version counter, so that writes there (Lookahead, loaders of
    checkpoints) would never reach the model. Here `.data` is `.detach()`, which shares the master's counter, and an
    assignment to `.data` counts.

    A gradient may be deferred: stored in low precision (`Record.half`) and materialized in FP32 when `.grad` is read.
    After a step `.grad` returns the gradient of that step (`Record.last`).

    `connect` of masters.py gives a parameter this class, and `disconnect` removes it. Copies keep it; pickles contain
    plain parameters.
    """

    record: Callable[[], Record | None] = staticmethod(lambda: None)  # a weak reference, because records hold masters

    @property
    def grad(self) -> Tensor | None:
        record = self.record()
        if record is None:
            return own_grad(self)
        if record.lent is not None:
            return record.lent
        if record.half is not None:
            record.materialize()
        grad = own_grad(self)
        return record.kept() if grad is None else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def waits_alone(self) -> bool:
        """Tell whether a deferred gradient exists, and no other gradient is to be added to it."""
        record = self.record()
        return record is not None and record.half is not None and GRAD.__get__(self) is None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "record"}

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(self)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)!r}"


plain_data_types.append(Master)


@whole
def _set_grad(master: Master, value: Tensor | None) -> None:
    set_own_grad(master, value)  # torch refuses a value of another shape: the other gradients stay
    if (record := master.record()) is not None:
        record.drop()


def take_masters() -> None:
    """Patch `nn.Parameter`: `nn.Parameter(master)` is an ordinary FP32 parameter in the master's memory; idempotent.

    Without this torch raises: it requires of a subclass that `detach()` returns that subclass.
    """
    _constructor.install(lambda patches: patches.set(nn.Parameter, "__new__", staticmethod(_of_tensor(nn.Parameter))))


def _of_tensor(kind: Any) -> Callable[..., Any]:
    own = kind.__new__

    @functools.wraps(own)
    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        kinds: Any = tuple(plain_data_types)
        return own(cls, data.detach() if isinstance(data, kinds) else data, *args, **kwargs)

    return new
