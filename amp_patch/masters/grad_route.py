"""`param.grad` of a parameter with a master: between two backward passes it is the master's unscaled FP32 gradient.

Autograd leaves scaled low-precision gradients on the parameter. After unscaling they belong to the master. Code that
then reads or writes `param.grad` (adaptive clipping, loggers, averagers, `param.grad = None`) must access the gradient
that the step will use. So the attribute redirects to `master.grad`, and both return one tensor.

Autograd and DistributedDataParallel use the C++ field beneath the attribute, which remains the parameter's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from amp_patch.masters.grad_field import GRAD, own_grad, set_own_grad
from amp_patch.masters.record import Record
from amp_patch.support import compiled
from amp_patch.support.patches import Installation

_installation = Installation()
_classes: set[type] = set()  # classes whose attribute redirects to masters


def route_through(kind: type, link_of: Callable[[Tensor], Record | None]) -> None:
    """Redirect `grad` of parameters of the class `kind` to their masters, which `link_of` finds; idempotent.

    All other parameters keep their attribute. `amp_patch.restore()` undoes this.
    """
    owner = nn.Parameter if issubclass(kind, nn.Parameter) else kind
    if owner in _classes:
        return
    attribute = _attribute(link_of)

    def replace(patches: Any) -> None:
        patches.apply(lambda: _classes.add(owner), lambda: _classes.discard(owner))
        patches.set(owner, "grad", attribute)

    _installation.add(replace)


def _attribute(link_of: Callable[[Tensor], Record | None]) -> property:
    def read(param: Tensor) -> Tensor | None:
        record = link_of(param)
        # Dynamo and torch.export set this gradient on a fake parameter, which takes none of another type.
        if record is None or compiled.is_compiling() or sys._getframe(1).f_code.co_name == "safe_grad":
            return own_grad(param)
        if record.route.to_masters and (grad := record.master.grad) is not None:
            return grad
        if record.host is not None:
            record.host.give_back(param)
        own = own_grad(param)
        return own if own is not None or record.route.scaled else record.kept()

    def write(param: Tensor, value: Any) -> None:
        record = link_of(param)
        if record is not None and record.host is not None:
            record.host.forget()
        if record is None or record.route.scaled:
            set_own_grad(param, value)
            return
        master = record.master
        if record.route.to_masters:
            if isinstance(value, Tensor) and value.dtype is not master.dtype:
                value = value.to(master.dtype)
            master.grad = value
            set_own_grad(param, None)
        elif isinstance(value, Tensor) and value.dtype is master.dtype:
            record.last = value  # `Module.to` writes back the gradient that it has read
        else:
            set_own_grad(param, value)
            record.last = None

    return property(read, write, lambda param: write(param, None), GRAD.__doc__)
