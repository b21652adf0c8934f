"""`param.grad` of a parameter with a master: the master's gradient, FP32 and unscaled, between two backward passes.

Autograd leaves scaled low-precision gradients on the parameter. Once they are unscaled they belong to its master, and
what reads or writes `param.grad` then (adaptive clipping, loggers, averagers, `param.grad = None`) must meet what the
step will take. So the attribute leads to `master.grad`: one tensor, whichever of the two is asked.

Autograd and DistributedDataParallel use the C++ field beneath the attribute, which stays the parameter's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from amp_patch.masters.grad_field import GRAD, own_grad, set_own_grad
from amp_patch.masters.master import Master
from amp_patch.support import compiled
from amp_patch.support.patches import Installation

_installation = Installation()
_classes: set[type] = set()  # whose attribute leads to masters


class GradRoute:
    """Whose the attribute `grad` of one optimizer's parameters is.

    Attributes:
        to_masters: from the exit that unscales gradients to the step, or to what clears them: the masters'.
        scaled: in a body, and after a delayed exit: the parameters' own. In neither case it is what was left of a step.
    """

    __slots__ = ("scaled", "to_masters")

    def __init__(self) -> None:
        self.to_masters = self.scaled = False


class HasRoute(Protocol):
    """What is known of a parameter with a master."""

    master: Tensor
    route: GradRoute


def route_through(kind: type, link_of: Callable[[Tensor], HasRoute | None]) -> None:
    """Let `grad` of parameters of the class `kind` lead to their masters, of which `link_of` tells; idempotent.

    Parameters without a master, and all others, answer as before. `amp_patch.restore()` undoes it.
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
        if link is None or compiled.is_compiling():  # Dynamo gives this gradient to a stand-in of the parameter
            return own_grad(param)
        if link.route.to_masters and (grad := link.master.grad) is not None:
            return grad
        if (own := own_grad(param)) is not None:
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

    def delete(param: Tensor) -> None:
        write(param, None)

    return property(read, write, delete, GRAD.__doc__)
