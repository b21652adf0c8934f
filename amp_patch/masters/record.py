"""`Record`: what is known of one parameter of an optimizer. Each optimizer has a list of them (of_optimizer.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters.on_host import OnHost
from amp_patch.masters.recycled_memory import Recycled
from amp_patch.multi_tensor.checks import Number
from amp_patch.support.blocks import without_grad


class PlainSavedVersion:
    """A tensor, and its version counter at the last `save`. In C++: csrc/masters/versions.cpp."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.save()

    def written(self) -> bool:
        """Tell whether the tensor was written since the last `save`."""
        return self.version is not None and self.tensor._version != self.version

    def save(self) -> None:
        self.version = None if self.tensor.is_inference() else self.tensor._version  # inference tensors have no counter


class PlainSavedVersions:
    """Several `SavedVersion`s, compared in one call; in C++ too."""

    def __init__(self, versions: list[PlainSavedVersion]) -> None:
        self.versions = versions

    def written(self) -> list[int]:
        """Return the indices of the tensors that were written."""
        return [index for index, saved in enumerate(self.versions) if saved.written()]

    def save(self) -> None:
        """Save the version of every tensor."""
        for saved in self.versions:
            saved.save()


_C: Any = multi_tensor.extension()
SavedVersion: Any = getattr(_C, "SavedVersion", PlainSavedVersion)
SavedVersions: Any = getattr(_C, "SavedVersions", PlainSavedVersions)


class Route:
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


class Deferring(Protocol):
    """The parts of `HalfGradients` (held_gradients.py) that a record uses."""

    spent: Sequence[Number]

    def grads(self) -> list[Tensor]: ...
    def make(self) -> None: ...
    def drop(self, record: Record) -> None: ...


class Record:
    """What is known of one parameter. Two optimizers that update a parameter with a master have one record of it.

    The record does not reference its parameter, except through `master` if that is the parameter itself.

    Attributes:
        master: FP32, with the parameter's shape; the parameter itself if it has no separate master.
        param: returns the parameter of a separate master, or None if it was freed.
        version: a separate master's version when its value was last copied back to the parameter.
        host: the transport between a separate master on the host and a parameter on a device; None otherwise.
        memory: the memory for the master's FP32 gradients.
        route: decides whether `param.grad` is the gradient of the master or of the parameter.
        is_routed: whether `route` is the one that an optimizer's parameters share; False: `route` is this record's.
        waiting: the optimizer's deferred gradients, if the master's gradients are deferred.
        half: the deferred gradient: in low precision, scaled, as backward has left it.
        lent: the FP32 form of `half`, while a portion of masters is stepped.
        earlier: the master's gradient while a body runs whose backward may leave a scaled one on the master itself.
        last: the gradient of the last step; in low precision and scaled if that step took it so, until it is read.
        aside: the gradient of a parameter without a master that a body has set aside (`Aside` of gradients.py). After a
            delayed exit it has only the elements that scaling would make infinite or NaN; they are added after the sum
            is unscaled.
        entries: the number of entries of the optimizer's state after the last step that the host knows was taken.
    """

    __slots__ = (
        *("__weakref__", "aside", "earlier", "entries", "half", "host", "is_routed", "last", "lent", "master"),
        *("memory", "param", "route", "version", "waiting"),
    )

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.param: Callable[[], Tensor | None] = type(None)
        self.version: Any = None
        self.host: OnHost | None = None
        self.memory = Recycled()
        self.route, self.is_routed = Route(), False
        self.waiting: Deferring | None = None
        self.half: Tensor | None = None
        self.lent: Tensor | None = None
        self.earlier: Tensor | None = None
        self.last: Tensor | None = None
        self.aside: Any = None
        self.entries: int | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a master has no record

    def kept(self) -> Tensor | None:
        """Return the gradient that reads find where autograd's field is empty: an earlier one, or the last step's."""
        if self.earlier is not None or self.last is None:
            return self.earlier
        if self.last.dtype is not torch.float32:
            assert self.waiting is not None
            self.last = product(self.last, self.waiting.spent)
        return self.last

    def materialize(self) -> None:
        """Make the deferred gradient, if there is one, the FP32 gradient of the master; no sync.

        If a backward pass through the master itself has left a gradient too, the FP32 gradient is the sum of the two.
        """
        if self.half is not None and self.waiting is not None:
            self.waiting.make()

    def drop(self) -> None:
        """Free the gradients that are outside of autograd's field."""
        if self.half is not None and self.waiting is not None:
            self.waiting.drop(self)
        self.earlier = self.last = None

    def stop_waiting(self) -> None:
        """Make the deferred gradients FP32; no more are deferred."""
        self.materialize()
        self.kept()
        self.waiting = None


def multiply(grads: list[Tensor], results: list[Tensor], factors: Sequence[Number]) -> None:
    """Write `grads` times all `factors` into `results` (FP32), each product rounded; no sync."""
    first, *others = factors or [1.0]
    multi_tensor.multi_tensor_scale(grads, results, first)
    for factor in others:
        multi_tensor.multi_tensor_scale(results, results, factor)


@without_grad
def product(grad: Tensor, factors: Sequence[Number]) -> Tensor:
    """Return `grad` times all `factors` in FP32; no sync."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return product(grad, factors)
    result = torch.empty_like(grad, dtype=torch.float32)
    multiply([grad], [result], factors)
    return result
