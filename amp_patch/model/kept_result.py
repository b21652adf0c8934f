"""`KeptResult`, the result of a module that stays FP32: the next layer gets it rounded, the model's caller in FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.support import tree

_of: Any = Tensor  # its attributes, as functions
_VIEWS = """
    __getitem__ chunk contiguous detach diagonal expand expand_as flatten movedim narrow permute reshape reshape_as
    select split squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view view_as
"""
# Functions that leave each number as it is. In compiled code these must be all views: a write through another view
# would not be seen there.
_OF_VIEWS = {getattr(owner, name) for owner in (torch, Tensor) for name in _VIEWS.split() if hasattr(owner, name)}
_OF_VIEWS |= {_of.T.__get__, _of.mT.__get__}
# Casts, with the type of those that take none.
_CASTS = {_of.float: torch.float32, _of.double: torch.float64, _of.to: None, _of.type: None, _of.type_as: None}
_OF_GRADIENTS = {_of.register_hook, _of.retain_grad, _of.retains_grad.__get__, _of.grad.__get__}
_NODE = _of.grad_fn.__get__
# Functions that change their first argument, by their names: `add_`, `__iadd__`, `__setitem__`; and `data`.
_WRITES = {_of.data.__get__, _of.data.__set__} | {
    getattr(Tensor, name)
    for name in dir(Tensor)
    if name.startswith(("__i", "__setitem")) or (name.endswith("_") and not name.endswith("__"))
}
# Whether Dynamo traces this class, which is tried with torch 2.13. Else compiled code rounds results for good.
TRACED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class _Shared:
    """The state that a result and its views share.

    Attributes:
        ended: whether user code has called a function that writes.
        given: whether user code has the FP32 tensor, and may write it: later casts return copies.
    """

    ended = given = False


class KeptResult(Tensor):
    """A rounded result, whose casts to FP32 and FP64 return the numbers from before the rounding.

    Views of it are of this class too. All other functions receive and return plain tensors, so that autograd saves no
    object that references the FP32 tensor: in the middle of a model that tensor is freed after the next layer.

    Attributes:
        exact: the result in FP32.
        plain: the rounded result, which has the memory of this tensor.
        state: the versions of both, where others mean that one was written, and the node of this tensor in the graph.
        shared: the state that views share.
    """

    exact: Tensor
    plain: Tensor
    state: tuple[Any, ...] | None = None
    shared: _Shared

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`: a wide cast on the FP32 tensor, a view on both tensors, any other on plain tensors."""
        if function == _NODE:
            return _node_of(args[0])  # module hooks of backward look for the node that they have put behind a result
        kwargs, first = kwargs or {}, args[0] if args else None
        exact = first.unrounded() if isinstance(first, KeptResult) else None
        args, kwargs = tree.map_tensors(plain, (args, kwargs))
        if first is None or exact is None:
            return function(*args, **kwargs)
        shared, rest = first.shared, args[1:]
        if function in _OF_VIEWS:
            wide, low = function(exact, *rest, **kwargs), function(*args, **kwargs)
            if isinstance(wide, Tensor):
                return _join(wide, low, shared)
            return tuple([_join(*pair, shared) for pair in zip(wide, low, strict=True)])
        if function in _CASTS and any(_is_wide(value) for value in (_CASTS[function], *rest, *kwargs.values())):
            copied, shared.given = shared.given, True
            return function(exact.clone() if copied else exact, *rest, **kwargs)
        if function in _OF_GRADIENTS:
            return function(exact, *rest, **kwargs)
        shared.ended = shared.ended or function in _WRITES
        return function(*args, **kwargs)

    def unrounded(self) -> Tensor | None:
        """Return the FP32 tensor; None if user code has written, or an autograd function has passed the result on."""
        if self.shared.ended:
            return None
        if is_dynamo_compiling():
            return self.exact
        now = self.exact._version, self.plain._version, _node_of(self)
        self.state = self.state or now  # compiled code has made it without
        return self.exact if self.state == now else None

    def rounded(self) -> Tensor:
        """Return this tensor as a plain one."""
        if is_dynamo_compiling() or self.state is None or self.state[-1] is _node_of(self):
            return self.plain
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)  # an autograd function has put itself behind this tensor (a checkpoint)


def round_result(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `exact`, a result of a module that stays FP32, rounded to `dtype`."""
    if type(exact) is not Tensor or (is_dynamo_compiling() and not TRACED):
        return exact.to(dtype)
    if is_dynamo_compiling() or not exact.is_inference():
        return _join(exact, exact.to(dtype), _Shared())
    with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count writes
        return _join(exact.clone(), exact.to(dtype), _Shared())


def plain(x: Tensor) -> Tensor:
    """Return `x`, which may be a `KeptResult`, as a plain tensor."""
    return x.rounded() if isinstance(x, KeptResult) else x


def _join(exact: Tensor, low: Tensor, shared: _Shared) -> KeptResult:
    result = low.as_subclass(KeptResult)
    result.exact, result.plain, result.shared = exact, low, shared
    if not is_dynamo_compiling():
        result.state = exact._version, low._version, _node_of(result)
    return result


def _is_wide(value: Any) -> bool:
    """Tell whether `value`, an argument of a cast, is a type of more precision or a tensor of one."""
    return getattr(value, "dtype", value) in (torch.float32, torch.float64)


def _node_of(x: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return x.grad_fn
