"""`param.grad` of a parameter with a master: between two backward passes it is the master's unscaled FP32 gradient.

Autograd leaves scaled low-precision gradients on the parameter. After unscaling they belong to the master. Code that
then reads or writes `param.grad` (adaptive clipping, loggers, averagers, `param.grad = None`) must access the gradient
that the step will use. So the attribute redirects to `master.grad`, and both return one tensor.

Autograd and DistributedDataParallel use the C++ field beneath the attribute, which remains the parameter's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from amp_patch.masters.grad_field import GRAD, own_grad, set_own_grad
from amp_patch.masters.master import Master
from amp_patch.support import compiled
from amp_patch.support.patches import Installation

_installation = Installation()
_classes: set[type] = set()  # classes whose attribute redirects to masters


class GradRoute:
    """The choice of what a read of `param.grad` returns, for all parameters with masters of one optimizer.

    If both attributes are False, `param.grad` is the gradient of the last step.

    Attributes:
        to_masters: whether `param.grad` is the master's gradient: True from the exit that unscales gradients until the
            step, or until the gradients are cleared.
        scaled: whether `param.grad` is the parameter's own, scaled gradient: True in a body, and after a delayed exit.
    """

    __slots__ = ("scaled", "to_masters")

    def __init__(self) -> None:
        self.to_masters = self.scaled = False


class HasRoute(Protocol):
    """The fields of a parameter's link (masters.py) that decide which gradient `param.grad` is."""

    master: Tensor
    route: GradRoute


def route_through(kind: type, link_of: Callable[[Tensor], HasRoute | None]) -> None:
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


def _attribute(link_of: Callable[[Tensor], HasRoute | None]) -> property:
    def read(param: Tensor) -> Tensor | None:
        link = link_of(param)
        # Dynamo and torch.export set this gradient on a fake parameter, which takes none of another type.
        if link is None or compiled.is_compiling() or sys._getframe(1).f_code.co_name == "safe_grad":
            return own_grad(param)
        if link.route.to_masters and (grad := link.master.grad) is not None:
            return grad
        if (own := own_grad(param)) is not None or link.route.scaled:
            return own
        master = link.master
        return master.stepped_grads.read(master) if isinstance(master, Master) and master.stepped_grads else None

    def write(param: Tensor, value: Any) -> None:
        link = link_of(param)
        if link is None or link.route.scaled:
            set_own_grad(param, value)
            return
        master, route = link.master, link.route
        if route.to_masters:
            if isinstance(value, Tensor) and value.dtype is not master.dtype:
                value = value.to(master.dtype)
            master.grad = value
            set_own_grad(param, None)
            return
        stepped = master.stepped_grads if isinstance(master, Master) else None
        if stepped is not None and isinstance(value, Tensor) and value.dtype is master.dtype:
            stepped.replace(master, value)  # `Module.to` writes back the gradient that it has read
            return
        set_own_grad(param, value)
        if stepped:
            stepped.drop(master)

    return property(read, write, lambda param: write(param, None), GRAD.__doc__)
