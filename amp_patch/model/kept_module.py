"""`KeptModule`, the class of modules that stay FP32 inside a training's model, and the values that they get.

The cast of a model's inputs rounds them. A module that stays FP32 gets the values from before the cast, if it receives
an input of the model itself, or a view of one.
"""

from __future__ import annotations

import threading
import weakref
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import regions
from amp_patch.model.joints import Call, Entry, FirstCalls
from amp_patch.model.keep_fp32 import forbid_fast_path, is_batch_norm
from amp_patch.model.kept_result import round_result
from amp_patch.model.of_model import ModelState, followed_policy, running
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS
from amp_patch.support import fsdp, generated_class, tree
from amp_patch.support.compiled import in_backward, wraps
from amp_patch.support.generated_class import Generated

_NO_CASTS = OPT_LEVELS["O0"]


class InnerModule(Generated):
    """Base of `KeptModule` and `HighModule`: modules inside a model that run under another policy than the model."""


class KeptModule(InnerModule):
    """The `forward` of a module that stays FP32: inputs become FP32; in a cast model outputs get the inputs' type."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        takes_low = base.forward is nn.BatchNorm1d.forward  # type: ignore[attr-defined]

        @wraps(base.forward)  # type: ignore[attr-defined]
        def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
            forward, policy = self._amp_base.forward, followed_policy(self)
            if policy is None:
                return forward(self, *args, **kwargs)
            came, given = None, (args, kwargs)
            if policy.cast_model_type is not None:  # a cast model's next layer takes only that type; at O1 it takes any
                inside = running.policy is not None or in_backward()
                low = low_precision_of(given)
                came = low or (policy.cast_model_type if inside else None)
                if received.inputs or in_backward():
                    given = tree.map_tensors(_from_before, given)
                if takes_low and low is low_precision_of(given):  # it received no input of the model
                    return forward(self, *args, **kwargs)
            args, kwargs = tree.cast_floats(given, torch.float32, LOW_PRECISION)
            # At O0 nothing is cast, and the script's own torch.autocast must act in modules of `keep_fp32` too.
            disables_torch_autocast = policy.patch_torch_functions or policy.cast_model_type is not None
            with regions.region(_NO_CASTS, disables_torch_autocast):
                output = forward(self, *args, **kwargs)
            to = Tensor.to if running.policy is None else round_result
            return output if came is None else tree.cast_floats(output, came, (torch.float32,), to)

        return {"forward": kept}


class _Input:
    """The value of an input from before its cast, for the backward pass too, which may run a part of a forward again.

    Attributes:
        low: the cast input, referenced weakly.
        value: the input from before the cast.
        version: the version of `low` after the cast; another one means that `low` was written.
        taken: whether a module that stays FP32 has received `value`.
    """

    def __init__(self, low: Tensor, value: Tensor) -> None:
        self.value, self.version, self.taken = value, _version_of(low), False
        if not _has_memory(low):
            self.low = weakref.ref(low)
            return
        key = _address(low)
        _inputs[key] = self
        self.low = weakref.ref(low, lambda _: _inputs.pop(key) if _inputs.get(key) is self else None)

    def from_before(self, x: Tensor) -> Tensor:
        """Return `x`, the cast input or a view of it, as it was before the cast; `x` itself if it was written since."""
        low = self.low()
        if low is None or x.dtype is not low.dtype or _version_of(x) != self.version:
            return x
        self.taken, value = True, self.value.float()
        if x is low or (x.shape == low.shape and x.stride() == low.stride()):
            return value
        if value.stride() != low.stride():
            value = value.clone()  # has the strides that the cast gave `low`
        return value.as_strided(x.shape, x.stride(), x.storage_offset() + value.storage_offset())


class _Received(threading.local):
    """The cast inputs of the forward that runs on this thread, with their values from before."""

    def __init__(self) -> None:
        self.inputs: tuple[tuple[Tensor, Any], ...] = ()


received = _Received()
_OUTER = "inputs of the call around"  # in `Call.notes`

_inputs: dict[int, _Input] = {}  # address of a cast input's memory -> that input, as long as its tensor lives


def pairs_of(given: Any, passed: Any) -> tuple[tuple[Tensor, Any], ...]:
    """Return pairs of cast inputs of a call, and their values from before: an `_Input`, in compiled code a tensor.

    Args:
        given: the arguments of the call.
        passed: the same arguments after the cast.
    """
    if not is_dynamo_compiling() and all(map(is_, given, passed)):
        return ()
    found = [
        (low, value)
        for value, low in zip(tree.tensors(given), tree.tensors(passed), strict=True)
        if low is not value and value.dtype not in LOW_PRECISION
    ]
    return tuple(found if is_dynamo_compiling() else [(low, _Input(low, value)) for low, value in found])


def _from_before(x: Tensor) -> Tensor:
    """Return `x` as it was before the cast of the model's inputs; `x` itself if it is none, or was written since."""
    if x.dtype not in LOW_PRECISION:
        return x
    for low, value in received.inputs:
        if x is low:
            return value.float() if is_dynamo_compiling() else value.from_before(x)
    found = None if is_dynamo_compiling() or not _has_memory(x) else _inputs.get(_address(x))
    return x if found is None else found.from_before(x)


def _has_memory(x: Tensor) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and _address(x) != 0
    )


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


class KeptInputs(FirstCalls):
    """Gives modules that stay FP32 the inputs of their model unrounded; `stays` if there are such modules.

    torch's kernel of batch norms takes a low-precision input with FP32 weights. So a batch norm gets the class
    `KeptModule` only if one of the first calls has an input of its width.

    Attributes:
        fast_path_off: whether torch's fused encoder layers are disabled, because some of their modules stay FP32.
    """

    def __init__(self, stays: bool, fast_path_off: bool) -> None:
        super().__init__()
        self.__setstate__({"stays": stays, "fast_path_off": fast_path_off})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["fast_path_off"]:
            forbid_fast_path()

    def look(self, call: Call) -> None:
        """Give batch norms of the inputs' widths the class `KeptModule`."""
        if fsdp.is_fsdp(call.model) or vars(call.model).get("_is_replica"):
            return
        given = tree.tensors(call.given)
        widths = {x.shape[1] for x in given if x.dim() > 1 and x.is_floating_point() and not x.is_nested}
        for module in filter(is_batch_norm, call.model.modules()) if widths else ():
            takes_low = type(module).forward is nn.BatchNorm1d.forward
            tensors = chain(module.parameters(), module.buffers())
            if takes_low and module.num_features in widths and not any(x.dtype in LOW_PRECISION for x in tensors):
                generated_class.give(module, KeptModule, ())
                vars(module)["_amp"] = ModelState(call.state.policy)
                call.state.guests.stay(self)

    def cast_in(self, call: Call) -> None:
        """Store the inputs from before the cast."""
        if self.stays:
            call.notes[_OUTER] = received.inputs
            received.inputs = pairs_of(call.given, (call.args, call.kwargs))

    def leave(self, call: Call) -> None:
        """Restore the inputs of the call around this one."""
        if _OUTER in call.notes:
            received.inputs = call.notes[_OUTER]


def choose(model: nn.Module, entry: Entry) -> KeptInputs | None:
    """Return a guest if inputs of `model` may reach modules that stay FP32, in it or in other models."""
    if entry.policy.cast_model_type is None:
        return None
    stay, inside = set(entry.kept), [*model.modules()]
    layers = (module for module in inside if isinstance(module, nn.TransformerEncoderLayer))
    fused = any(module in stay for layer in layers for module in layer.modules())
    keeps = any(isinstance(module, KeptModule) for module in entry.kept)
    return KeptInputs(keeps, fused) if keeps or fused or any(map(is_batch_norm, inside)) else None


def low_precision_of(value: Any) -> torch.dtype | None:
    """Return the type of the first low-precision tensor in `value`; None if it has none."""
    # A loop: Dynamo of torch 2.6 cannot trace `next` with a default.
    for tensor in tree.tensors(value):
        if tensor.dtype in LOW_PRECISION:
            return tensor.dtype
    return None
