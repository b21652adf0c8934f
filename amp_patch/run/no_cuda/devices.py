"""Devices that are passed to torch: CUDA becomes `target`. Types such as torch.cuda.HalfTensor become the CPU's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts.wrappers import register_with_jit
from amp_patch.support.patches import Patches

target = "cpu"  # the type of device that CUDA becomes; set between install and uninstall


def is_cuda(device: Any) -> bool:
    """Return whether `device` means CUDA: as "cuda:1", torch.device("cuda"), or an index such as 0."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int)


def on_target(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`: the keyword argument `device` becomes `target` if it is CUDA, and memory is never pinned."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = target
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    register_with_jit(call, function)
    return call


def _takes_device(operator: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    return any(argument.name == "device" for schema in schemas for argument in schema.arguments)


def redirect_devices(patches: Patches) -> None:
    """Replace CUDA by `target` in the arguments of every function of torch that takes a device."""
    context = importlib.import_module("torch.utils._device").DeviceContext
    special = ("to", "pin_memory", "is_pinned")
    for owner, prefix in (torch, ""), (torch.fft, "fft_"), (Tensor, ""):
        for name in dir(owner):
            function = getattr(owner, name)
            if name[0] == "_" or name in special or isinstance(function, type) or not callable(function):
                continue
            if _takes_device(prefix + name) or name in ("asarray", "new_tensor", "new"):
                patches.set(owner, name, on_target(function))

    # `with torch.device("cuda")` and torch.set_default_device construct a DeviceContext.
    original = context.__init__
    patches.set(context, "__init__", lambda self, device: original(self, target if is_cuda(device) else device))

    class GeneratorType(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

        def __call__(cls, device: Any = "cpu") -> Any:
            return generator(target if is_cuda(device) else device)

    generator = torch.Generator
    body = {"__module__": "torch", "__doc__": generator.__doc__}
    patches.set(torch, "Generator", GeneratorType("Generator", (), body))


def _first_on_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((target, *args[1:]), kwargs) if args else (args, {**kwargs, "device": target})


def redirect_moves(patches: Patches) -> None:
    """Make `cuda()`, `to` and related methods accept CUDA devices and move to `target`."""
    move, parse = Tensor.to, torch._C._nn._parse_to

    @functools.wraps(move)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_cuda(args[0] if args else kwargs.get("device")):
            return move(self, *args, **kwargs)
        args, kwargs = _first_on_target(args, kwargs)
        if target == "cpu" and len(args) < 4 and not self.requires_grad:  # argument 4 is `copy`
            kwargs["copy"] = True
        return move(self, *args, **kwargs)

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(args[0] if args else kwargs.get("device")):
            args, kwargs = _first_on_target(args, kwargs)
        return parse(*args, **kwargs)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return to(self, "cuda", **kwargs)

    patches.set(Tensor, "to", to)
    patches.set(torch._C._nn, "_parse_to", parse_to)  # `to` of modules and of packed sequences calls it
    patches.set(Tensor, "cuda", cuda)
    patches.set(Tensor, "pin_memory", lambda self, device=None: self)
    patches.set(Tensor, "record_stream", lambda self, stream: None)
    sequence = torch.nn.utils.rnn.PackedSequence  # torch's method would read `is_cuda` of the moved data
    patches.set(sequence, "cuda", lambda self, *args, **kwargs: self.to("cuda"))

    # A DataLoader that pins memory would warn that there is no device, or start a thread that needs one.
    loader = torch.utils.data.DataLoader
    make = loader.__init__

    @functools.wraps(make)
    def without_pins(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.pin_memory = False

    patches.set(loader, "__init__", without_pins)


def redirect_checkpoints(patches: Patches) -> None:
    """Load a checkpoint on `target` if its own locations, or `map_location`, name CUDA."""
    serialization = importlib.import_module("torch.serialization")

    def moved(storage: Any, *_: Any, **__: Any) -> Any:
        return serialization.default_restore_location(storage, target)

    for storage in importlib.import_module("torch.storage")._StorageBase, torch.storage.TypedStorage:
        patches.set(storage, "cuda", moved)
        patches.set(storage, "to", on_target(storage.to))

    def restore(storage: Any, location: str) -> Any:
        return moved(storage) if is_cuda(location) else None

    registry = serialization._package_registry
    entry = (0, lambda storage: None, restore)  # priority 0: torch's own restore functions begin at 10
    patches.apply(lambda: registry.insert(0, entry), lambda: registry.remove(entry))


class TypeName(str):
    """A type name that equals both "torch.HalfTensor" and "torch.cuda.HalfTensor". Its hash is that of the first."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) == _without_cuda(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _without_cuda(name: str) -> str:
    return str(name).replace("torch.cuda.", "torch.")


def redirect_types(patches: Patches) -> None:
    """Replace torch.cuda.HalfTensor and its siblings by the CPU's types, also in `.type()` and in isinstance."""
    for name in dir(torch.cuda):
        if name.endswith(("Tensor", "Storage")) and hasattr(torch, name):
            patches.set(torch.cuda, name, getattr(torch, name))
    original = Tensor.type

    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = original(self, _without_cuda(dtype) if isinstance(dtype, str) else dtype, *args, **kwargs)
        return TypeName(found) if isinstance(found, str) else found

    patches.set(Tensor, "type", type_)
