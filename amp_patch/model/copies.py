"""Copies of cast models: their weights are FP32, and are cast during each call.

Most scripts use a deepcopy to store an average of the weights (MoCo, BYOL, diffusion), whose updates are too small for
low precision. So the copies and pickles of a cast model have FP32 weights, with the values of the masters. While a
method of the copy runs, low-precision casts replace these weights, so that the copy computes as the model would. If the
optimizer is copied with the model, the weights of the copy are low precision again, like the model's.

Casts are made again for each call. A cast from an earlier call could be stale without notice, because scripts write
through `.data`, which does not change the version counter.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.masters.masters import link_of, links_of, settle
from amp_patch.model import incoming
from amp_patch.model.joints import Call, ForwardGuest
from amp_patch.model.tensors import was_changed
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import flat_rnn
from amp_patch.support.interrupts import whole
from amp_patch.support.tensor_content import set_data

if TYPE_CHECKING:
    from amp_patch.model.of_model import ModelState

Exact = tuple[Tensor, torch.dtype, Tensor | None]  # a parameter, its type, and its master if it has one

# Two tables that compare parameters by identity, and reference them weakly.
_trained = WeakIdKeyDictionary()  # copied parameters that a copied optimizer holds -> True
_wide = WeakIdKeyDictionary()  # parameter made FP32 -> (all such parameters of its model, types by name)

_Place = tuple[dict[str, Any], str, Any]  # a dictionary, a name in the dictionary, the value that a cast replaced


def low_weights(model: nn.Module, on_demand: bool) -> tuple[dict[str, torch.dtype], list[Exact]]:
    """Sync the weights of `model` with their masters; return the weights that become FP32 in a deepcopy or pickle.

    A weight without a master that was low precision before `initialize` stays low precision.

    Args:
        on_demand: whether no optimizer trains the model, so that only `state_dict()` makes masters. If so, only the
            weights with such a master become FP32.

    Returns:
        types: qualified name -> low-precision type; a shared weight is in it under each of its names.
        exact: one (weight, type, master) for each distinct weight. The master is None if the weight has none, or if
            user code has changed the weight's type, shape or device (`was_changed`).
    """
    types, exact = {}, {}
    for name, param in model.named_parameters(remove_duplicate=False):
        link = link_of(param)
        if param.dtype in LOW_PRECISION and (
            link is not None or not (on_demand or incoming.type_of(param) is not None)
        ):
            types[name] = param.dtype
            known = link is not None and not was_changed(param, link.master)
            exact[param] = (param, param.dtype, link.master if link is not None and known else None)
    settle(links_of(param for param, _, master in exact.values() if master is not None))
    return types, list(exact.values())


def widen(weights: Collection[Exact], types: dict[str, torch.dtype]) -> None:
    """Make a copied model's weights FP32 in place: each gets the value and memory of the copy of its master.

    If the optimizer was copied with the model, and before the model, the weights stay low precision, as a copied
    optimizer requires: `types` is cleared.
    """
    if any(param in _trained for param, _, _ in weights):
        types.clear()
        return
    model = [(weakref.ref(param), dtype) for param, dtype, _ in weights]
    for param, _, master in weights:
        if isinstance(param, nn.Parameter) and param.dtype in LOW_PRECISION:
            set_data(param, param.detach().float() if master is None else master.detach().to(param.device))
        _wide[param] = model, types


def narrow(params: Iterable[Tensor]) -> list[Tensor]:
    """Undo `widen` in place for the models that have any of `params`, the parameters of a copied optimizer.

    Returns:
        The parameters of these models that were FP32 by `widen`, and are low precision now.
    """
    narrowed = []
    for param in params:
        _trained[param] = True
        model, types = _wide.get(param, ((), {}))
        types.clear()
        for reference, dtype in model:
            known = reference()
            if known is not None and _wide.pop(known, None) is not None:
                set_data(known, known.detach().to(dtype))
                narrowed.append(known)
    return narrowed


class WideWeights(ForwardGuest):
    """The guest of a copy: during its calls, low-precision casts replace its FP32 weights.

    The casts are in `module._parameters` then, and all threads share that dictionary. So a lock lets one thread call at
    a time.

    Attributes:
        retyped: qualified name of a weight -> the type that it is cast to.
    """

    def __init__(self) -> None:
        self.retyped: dict[str, torch.dtype] = {}
        self._lock = threading.RLock()
        self._replaced: list[_Place] = []  # by the running call

    def __reduce__(self) -> Any:
        return WideWeights, (), {"retyped": self.retyped}

    def call(self, call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method` with the weights replaced by casts during the call."""
        return self._on_casts(method) if self.retyped else method

    def _on_casts(self, method: Callable[..., Any]) -> Callable[..., Any]:
        types = self.retyped

        @functools.wraps(method)
        def on_casts(model: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # it traces no lock
                replaced: list[_Place] = []
                _replace(model, types, replaced)
                try:
                    return method(model, *args, **kwargs)
                finally:
                    _put_back(replaced)
            if getattr(model, "_is_replica", False):  # DataParallel's replica exists only during this call
                _replace(model, types, [])
                return method(model, *args, **kwargs)
            with self._lock:
                is_outermost = not self._replaced
                try:
                    _replace(model, types, self._replaced)
                    return method(model, *args, **kwargs)
                finally:
                    if is_outermost:
                        _put_back(self._replaced)

        return on_casts


def copied(model: nn.Module, state: ModelState) -> tuple[Callable[[Any, Any], None], Any] | None:
    """Return what makes a copy or pickle of a cast model FP32, for `joints.copied`."""
    if state.policy.cast_model_type is None:
        return None
    types, exact = low_weights(model, state.on_demand)
    return (_arrive, (types, exact)) if types else None


def _arrive(state: ModelState, value: tuple[dict[str, torch.dtype], list[Exact]]) -> None:
    guest = next((each for each in state.guests.all if isinstance(each, WideWeights)), None)
    if guest is None:  # else it is a copy of a copy
        state.guests.add(guest := WideWeights())
    guest.retyped.update(value[0])
    widen(value[1], guest.retyped)


def _replace(model: nn.Module, types: Mapping[str, torch.dtype], replaced: list[_Place]) -> None:
    casts: dict[Any, Tensor] = {}  # shared weights stay shared
    for path, module in model.named_modules():
        replica = getattr(module, "_is_replica", False)
        params = vars(module)["_former_parameters"] if replica else module._parameters
        for name, param in params.items():
            dtype = types.get(f"{path}.{name}" if path else name)
            if dtype is None or param is None or param.dtype is not torch.float32:
                continue
            if param not in casts:
                casts[param] = param.to(dtype)
            places = vars(module) if replica else module._parameters
            replaced.append((places, name, param))
            places[name] = casts[param]
        if isinstance(module, nn.RNNBase) and any(weight in casts for weight in module._flat_weights):
            replaced.append((vars(module), "_flat_weights", module._flat_weights))
            vars(module)["_flat_weights"] = [casts.get(weight, weight) for weight in module._flat_weights]
            if not torch.is_grad_enabled():
                flat_rnn.flatten_module(module)


@whole
def _put_back(replaced: list[_Place]) -> None:
    while replaced:
        places, name, found = replaced.pop()
        places[name] = found
