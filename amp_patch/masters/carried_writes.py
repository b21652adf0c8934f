"""Arithmetic in place on a weight with a master: it acts on the master, which is then rounded into the weight.

`p.data.mul_(1 - 1e-4)` changes no element of a BF16 weight, whose numbers are 0.4 % apart. Without this file such a
write would be lost, because an edit of a weight is found by comparison with the rounded master (`settle`). For the same
reason `parameters_to_vector` and `vector_to_parameters` read and write the masters.

Other writes (`copy_`, `p.data = x`, the functions `torch._foreach_*_`) act on the weight alone.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_parameters

from amp_patch.masters.master import Master, plain_data_types
from amp_patch.masters.masters import LinkList, link_of, links_of, master_of, publish, settle
from amp_patch.masters.record import Record
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import compiled, held_names
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.tree import cast_floats, map_tensors

_ARITHMETIC = (
    *("add_", "addcdiv_", "addcmul_", "div_", "divide_", "lerp_", "mul_", "multiply_", "sub_", "subtract_"),
    *("true_divide_", "__iadd__", "__imul__", "__isub__", "__itruediv__"),
)
_DATA: Any = Tensor.data
_installation = Installation()


class WeightData(Tensor):
    """The class of `.data` of a weight with a master. Results of functions, copies and pickles are plain tensors."""

    __torch_function__ = nn.Parameter.__torch_function__  # disabled: functions see a plain tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return self.detach().__repr__(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)


plain_data_types.append(WeightData)


def install() -> None:
    """Carry arithmetic on weights to their masters, until `restore`; idempotent."""
    _installation.install(_patch)


def _patch(patches: Patches) -> None:
    for name in _ARITHMETIC:
        patches.set(nn.Parameter, name, _carried(name))
        patches.set(WeightData, name, _carried(name))
        if name != "lerp_":  # which `model/averages.py` replaces in Tensor
            patches.set(Master, name, getattr(Tensor, name))  # an optimizer's step writes masters: it must stay as fast
    patches.set(nn.Parameter, "data", property(_read_data, _write_data, None, _DATA.__doc__))
    replaced = {}
    for own, wrapper in (
        (convert_parameters.parameters_to_vector, _to_vector),
        (convert_parameters.vector_to_parameters, _from_vector),
    ):
        made = functools.wraps(own)(functools.partial(wrapper, own))
        replaced[id(own)] = own, made
        for owner in (convert_parameters, torch.nn.utils):
            patches.set(owner, own.__name__, made)
    held_names.replace_in_modules(patches, replaced)


def _read_data(param: Tensor) -> Tensor:
    data: Tensor = _DATA.__get__(param)
    record = link_of(param)
    if record is None or compiled.is_compiling() or data.dtype not in LOW_PRECISION:
        return data
    if record.host is not None:
        data = record.host.data(data)
    if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):  # modes of torch look for plain tensors
        return data
    data = data.as_subclass(WeightData)
    vars(data)["of"] = weakref.ref(record)
    return data


def _write_data(param: Tensor, value: Tensor) -> None:
    _DATA.__set__(param, value)
    record = link_of(param)
    if record is not None and record.host is not None:
        record.host.note_written()  # the new memory may have the address of the earlier one


def _carried(name: str) -> Callable[..., Any]:
    @compiled.wraps(getattr(Tensor, name))
    def write(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        own, found = getattr(Tensor, name), _target(self)
        if found is None:
            return own(self, *args, **kwargs)
        param, record = found
        settle(LinkList([found]))
        args, kwargs = cast_floats((args, kwargs), torch.float32, LOW_PRECISION)
        if record.host is not None:
            args, kwargs = map_tensors(lambda given: given.to(record.master.device), (args, kwargs))
        with torch.no_grad():
            result = own(record.master.data, *args, **kwargs)
        if result is NotImplemented:
            return result
        # As in torch, a write through `.data` does not count, also between forward and backward.
        publish(LinkList([(param if self is param else _DATA.__get__(param), record)]))
        return self

    return write


def _target(written: Tensor) -> tuple[Tensor, Record] | None:
    """Return the weight that `written` is, or whose `.data` it is, and its record; None if the write is not carried."""
    if compiled.is_compiling():
        return None
    of = vars(written).get("of")
    record: Record | None = link_of(written) if of is None else of()
    param = None if record is None else record.param()
    if record is None or param is None or link_of(param) is not record:
        return None
    if written is param:
        return None if param.requires_grad and torch.is_grad_enabled() else (param, record)  # torch refuses the write
    return (param, record) if param.dtype is written.dtype and param.is_set_to(written) else None


def _to_vector(own: Callable[..., Any], parameters: Iterable[Tensor]) -> Any:
    params = list(parameters)
    settle(links_of(params))
    return own([param if (master := master_of(param)) is None else master.to(param.device) for param in params])


def _from_vector(own: Callable[..., Any], vec: Tensor, parameters: Iterable[Tensor]) -> None:
    params = list(parameters)
    wide = isinstance(vec, Tensor) and vec.dtype not in LOW_PRECISION
    masters = [master_of(param) if wide else None for param in params]
    targets = [
        param if master is None else nn.Parameter(torch.empty_like(master, device=param.device))
        for param, master in zip(params, masters, strict=True)
    ]
    own(vec, targets)
    for param, master, target in zip(params, masters, targets, strict=True):
        if master is not None:
            with torch.no_grad():
                master.data.copy_(_DATA.__get__(target))
            publish(links_of([param]))
