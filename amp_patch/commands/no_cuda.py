"""CUDA-only scripts on the CPU, for one process: `python -m amp_patch run --device cpu train.py`.

Three rules, each in the few places that everything of its kind goes through:

1. *Wherever a device goes into torch, CUDA means the CPU*: the `device=` of the functions and methods whose operators
   have one (torch's own schemas say which), `.to()`, `.cuda()`, default devices, generators, checkpoints. Thin
   functions in their place, not a TorchFunctionMode: a mode costs microseconds at every call of torch, and each thread
   would need its own. `torch.device` itself stays: it is a final C type that scripts give to isinstance, and describes
   "cuda" on any machine.
2. *`torch.cuda` plays a machine with one GPU*, a Volta (7.0): `is_available()` is True, so that a script takes the path
   that it was written for; memory statistics are what this process has grown by, streams and events are in order
   already. FP16 under torch's autocast or amp_patch's is emulated where this CPU has no arithmetic for it.
3. *A tensor tells the truth*: it lies on the CPU, `is_cuda` is False, `device` is cpu and `get_device()` is -1. Torch,
   amp_patch and the scripts' own extensions choose their kernels by these. Only `type()` returns a name that equals
   "torch.cuda.HalfTensor" as well as "torch.HalfTensor": old loops sort gradients by it and would skip them all.

`.cuda()` and `.to("cuda")` copy a tensor that needs no gradient, as a real move does: the script may edit the result in
place and still has the original. Parameters and what was computed from them stay what they are.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_fp16 import resolve_cpu_fp16
from amp_patch.casts.wrappers import register_with_jit
from amp_patch.policy import Policy
from amp_patch.recording.peak_memory import PeakMemory
from amp_patch.support.compiled import constant_in_traces
from amp_patch.support.patches import Installation, Patches

CAPABILITY = (7, 0)  # the first with FP16 tensor cores, and the oldest that the kernels here serve

_installation = Installation(of_process=True)
_peak: PeakMemory | None = None  # since the install


def install() -> None:
    """Let CUDA be the CPU for this process, until `uninstall`. Idempotent. Call it before the script's own imports."""
    _installation.install(_redirect)


def _redirect(patches: Patches) -> None:
    patches.set(sys.modules[__name__], "_peak", PeakMemory())
    for redirect in (_devices, _moves, _checkpoints, _types, _machine, _autocast, _parallel):
        redirect(patches)


def uninstall() -> None:
    """Undo `install`. What was made meanwhile lies on the CPU and stays there."""
    _installation.uninstall()


# ---------------------------------------------------------------------------------------------------------------------
# Devices that go into torch


def _is_cuda(device: Any) -> bool:
    """Whether `device` names CUDA: "cuda:1", torch.device("cuda"), or a bare number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the CPU for CUDA in its keyword argument `device`, and without pinned memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    register_with_jit(call, function)
    return call


def _takes_device(operator: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    return any(argument.name == "device" for schema in schemas for argument in schema.arguments)


def _devices(patches: Patches) -> None:
    defaults = importlib.import_module("torch.utils._device")
    context = defaults.DeviceContext
    defaults._device_constructors()  # torch's functions, not ours: it makes this set once
    special = ("to", "pin_memory", "is_pinned")
    for owner, prefix in (torch, ""), (torch.fft, "fft_"), (Tensor, ""):
        for name in dir(owner):
            function = getattr(owner, name)
            if name[0] == "_" or name in special or isinstance(function, type) or not callable(function):
                continue
            if _takes_device(prefix + name) or name in ("asarray", "new_tensor", "new"):
                patches.set(owner, name, _on_cpu(function))

    # `with torch.device("cuda")` and torch.set_default_device
    original = context.__init__
    patches.set(context, "__init__", lambda self, device: original(self, "cpu" if _is_cuda(device) else device))

    class GeneratorType(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

        def __call__(cls, device: Any = "cpu") -> Any:
            return generator("cpu" if _is_cuda(device) else device)

    generator = torch.Generator
    body = {"__module__": "torch", "__doc__": generator.__doc__}
    patches.set(torch, "Generator", GeneratorType("Generator", (), body))


def _first_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (("cpu", *args[1:]), kwargs) if args else (args, {**kwargs, "device": "cpu"})


def _moves(patches: Patches) -> None:
    move, parse = Tensor.to, torch._C._nn._parse_to

    @functools.wraps(move)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _is_cuda(args[0] if args else kwargs.get("device")):
            return move(self, *args, **kwargs)
        args, kwargs = _first_on_cpu(args, kwargs)
        if len(args) < 4 and not self.requires_grad:  # the fourth is `copy`
            kwargs["copy"] = True
        return move(self, *args, **kwargs)

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(args[0] if args else kwargs.get("device")):
            args, kwargs = _first_on_cpu(args, kwargs)
        return parse(*args, **kwargs)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return to(self, "cuda", **kwargs)

    patches.set(Tensor, "to", to)
    patches.set(torch._C._nn, "_parse_to", parse_to)  # of modules' and packed sequences' `to`
    patches.set(Tensor, "cuda", cuda)
    patches.set(Tensor, "pin_memory", lambda self, device=None: self)
    patches.set(Tensor, "record_stream", lambda self, stream: None)
    sequence = torch.nn.utils.rnn.PackedSequence  # asks where its tensors have come to
    patches.set(sequence, "cuda", lambda self, *args, **kwargs: self.to("cuda"))

    # What pins batches warns, or starts a thread that asks for a device.
    loader = torch.utils.data.DataLoader
    make = loader.__init__

    @functools.wraps(make)
    def without_pins(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.pin_memory = False

    patches.set(loader, "__init__", without_pins)


def _checkpoints(patches: Patches) -> None:
    """Whatever a checkpoint says, and whatever `map_location` says, CUDA is the CPU."""
    for storage in importlib.import_module("torch.storage")._StorageBase, torch.storage.TypedStorage:
        patches.set(storage, "cuda", lambda self, device=None, non_blocking=False: self)
        patches.set(storage, "to", _on_cpu(storage.to))

    def restore(storage: Any, location: str) -> Any:
        return storage if _is_cuda(location) else None

    registry = importlib.import_module("torch.serialization")._package_registry
    entry = (0, lambda storage: None, restore)  # before torch's own, which begin at 10
    patches.apply(lambda: registry.insert(0, entry), lambda: registry.remove(entry))


# ---------------------------------------------------------------------------------------------------------------------
# torch.cuda


class Stream:
    """A CUDA stream on a CPU: everything given to it is done already."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class Event:
    """A CUDA event on a CPU: a point in wall-clock time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self._seconds: float | None = None

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of wall-clock time between the two records."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("Event.elapsed_time: both events must have been recorded")
        return 1e3 * (end_event._seconds - self._seconds)

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


class DeviceBlock:
    """torch.cuda.device(...), device_of(...) and stream(...): a block of code that changes nothing."""

    def __init__(self, place: Any = None) -> None:
        self.stream = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


class Nothing:
    """torch.cuda.cudart(): whatever is called, nothing happens and it went well."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


def _memory() -> int:
    """Bytes of memory of this machine."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not Unix
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 16 << 30


def _free_memory() -> int:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return _memory()


def _held(*_: Any, **__: Any) -> int:
    """Bytes by which this process has grown since `install`."""
    return _or_say_why(None if _peak is None else _peak.held())


def _most_held(*_: Any, **__: Any) -> int:
    """The most of them at any time since `install`, or since the script's last reset."""
    return _or_say_why(None if _peak is None else _peak.read("cpu"))


def _reset_peak(*_: Any, **__: Any) -> None:
    if _peak is not None:
        _peak.restart()


def _or_say_why(number: int | None) -> int:
    if number is None:
        _say_that_nothing_tells()
    return number or 0


@functools.cache
def _say_that_nothing_tells() -> None:
    print("amp_patch: torch.cuda's memory is 0: this system does not tell what a process holds", file=sys.stderr)


def _memory_stats(*_: Any, **__: Any) -> Counter[str]:
    """Of every other statistic 0."""
    told = Counter[str]()
    for kind in ("allocated", "active", "reserved"):
        told[f"{kind}_bytes.all.current"], told[f"{kind}_bytes.all.peak"] = _held(), _most_held()
    return told


def _memory_summary(*_: Any, **__: Any) -> str:
    mib = 2**20
    return f"{NAME}: the process has grown by {_held() // mib} MiB, at most by {_most_held() // mib} MiB"


def _properties(device: Any = None) -> Any:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME, major=major, minor=minor, total_memory=_memory(), multi_processor_count=os.cpu_count() or 1
    )


@contextlib.contextmanager
def _block(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


NAME = "CPU as CUDA (amp_patch)"

# What a function of torch.cuda, or of one of its modules, returns: a value, or a function that makes it.
_ANSWERS: tuple[tuple[Any, str], ...] = (
    (True, "is_available is_initialized is_bf16_supported"),
    (False, "is_current_stream_capturing is_tf32_supported can_device_access_peer"),
    (1, "device_count"),
    (
        0,
        "current_device current_blas_handle get_sync_debug_mode initial_seed "
        "memory_usage utilization temperature power_draw clock_rate "
        "nvtx.range_push nvtx.range_pop nvtx.range_start",
    ),
    (
        None,
        "init set_device synchronize empty_cache ipc_collect set_stream set_sync_debug_mode "
        "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all reset_accumulated_memory_stats "
        "set_per_process_memory_fraction nvtx.mark nvtx.range_end profiler.init profiler.start profiler.stop",
    ),
    ("", "list_gpu_processes"),
    (_held, "memory_allocated memory_reserved memory_cached device_memory_used"),
    (_most_held, "max_memory_allocated max_memory_reserved max_memory_cached"),
    (_reset_peak, "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached"),
    (1.0, "get_per_process_memory_fraction"),
    (NAME, "get_device_name"),
    (CAPABILITY, "get_device_capability"),
    (_properties, "get_device_properties"),
    (lambda *_: (_free_memory(), _memory()), "mem_get_info"),
    (_memory_stats, "memory_stats"),
    (_memory_summary, "memory_summary"),
    (lambda *_: [], "get_arch_list memory_snapshot"),
    (lambda *_: torch.zeros(16, dtype=torch.uint8), "get_rng_state"),  # as many bytes as CUDA's
    (lambda *_: [torch.zeros(16, dtype=torch.uint8)], "get_rng_state_all"),
    (lambda *_: Stream(), "current_stream default_stream"),
    (lambda *_: Nothing(), "cudart"),
    (_block, "nvtx.range profiler.profile"),
)
_CLASSES: tuple[tuple[type, str], ...] = (
    (Stream, "Stream ExternalStream"),
    (Event, "Event"),
    (DeviceBlock, "device device_of stream StreamContext"),
)


def _machine(patches: Patches) -> None:
    for answer, names in (*_ANSWERS, *_CLASSES):
        for path in names.split():
            owner, name = _find(torch.cuda, path)
            if name not in vars(owner):
                continue  # torch's versions differ
            stand_in = answer if callable(answer) else _answering(answer)
            # Where it is defined too: torch.cuda.memory, random and streams are used by their own names.
            home = importlib.import_module(getattr(vars(owner)[name], "__module__", owner.__name__))
            for place in {owner, home}:
                patches.set(place, name, stand_in)


def _find(module: ModuleType, path: str) -> tuple[Any, str]:
    inner, _, name = path.rpartition(".")
    return (getattr(module, inner) if inner else module), name


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# ---------------------------------------------------------------------------------------------------------------------
# Types by name, and what asks for a backend


class TypeName(str):
    """The name "torch.HalfTensor", equal to "torch.cuda.HalfTensor" as well. It hashes as the first."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) == _without_cuda(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _without_cuda(name: str) -> str:
    return str(name).replace("torch.cuda.", "torch.")


def _types(patches: Patches) -> None:
    """torch.cuda.HalfTensor is torch.HalfTensor: constructor, argument of `.type()` and of isinstance."""
    for name in dir(torch.cuda):
        if name.endswith(("Tensor", "Storage")) and hasattr(torch, name):
            patches.set(torch.cuda, name, getattr(torch, name))
    original = Tensor.type

    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = original(self, _without_cuda(dtype) if isinstance(dtype, str) else dtype, *args, **kwargs)
        return TypeName(found) if isinstance(found, str) else found

    patches.set(Tensor, "type", type_)


def _autocast(patches: Patches) -> None:
    """torch's autocast of CUDA, and amp_patch's, is that of the CPU, in FP16 as there."""
    autocast = torch.amp.autocast_mode.autocast
    make, asked, told = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @functools.wraps(make)
    def cast_on_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if _is_cuda(device_type):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        make(self, device_type, dtype, *args, **kwargs)
        self._amp_area = _instead(self)

    patches.set(autocast, "__init__", cast_on_cpu)
    _enter_instead(patches, autocast)
    for name in "custom_fwd", "custom_bwd":
        patches.set(torch.amp, name, _cuda_type_is_cpu(getattr(torch.amp, name)))

    def is_enabled(device_type: Any = "cuda") -> bool:
        kind = "cpu" if _is_cuda(device_type) else device_type
        return asked(kind) or (kind == "cpu" and _emulates())

    def dtype_of(device_type: str) -> torch.dtype:
        if not (_is_cuda(device_type) or device_type == "cpu") or not is_enabled(device_type):
            return told(device_type)
        return torch.float16 if _emulates() else told("cpu")

    for function, asked_for in ((is_enabled, "is_autocast_enabled"), (dtype_of, "get_autocast_dtype")):
        constant_in_traces(function)
        patches.set(torch, asked_for, function)
    policy_of = casts_autocast._autocast_policy

    def of_cpu(device_type: Any, dtype: Any, enabled: bool) -> Policy | None:
        if device_type is None or (isinstance(device_type, str) and _is_cuda(device_type)):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        return policy_of(device_type, dtype, enabled)

    patches.set(casts_autocast, "_autocast_policy", of_cpu)


# Torch's FP16 kernels are ten to a hundred times slower than FP32's on a CPU without FP16 arithmetic (cpu_fp16.py), and
# its autocast leads to them: there a torch.autocast in FP16 is entered as one of amp_patch.


class _Torchs(threading.local):
    """The torch.autocasts of a thread: what was entered in their place, innermost last."""

    def __init__(self) -> None:
        self.areas: list[casts_autocast.autocast] = []
        self.compiled = False  # whether compiled code makes one, whose functions nobody casts but torch's own


_torchs = _Torchs()


def _instead(autocast: Any) -> casts_autocast.autocast | None:
    """What to enter in place of a torch.autocast; None where FP16 is not emulated, or is not the type."""
    fp16 = Policy("O1", dtype=torch.float16, patch_torch_functions=True)
    if (
        _torchs.compiled
        or (autocast.device, autocast.fast_dtype) != ("cpu", torch.float16)
        or not resolve_cpu_fp16(fp16, on_cpu=True).emulates
    ):
        return None
    return casts_autocast.autocast("cpu", torch.float16, autocast._enabled, autocast._cache_enabled)


def _enter_instead(patches: Patches, autocast: type) -> None:
    enter, leave = autocast.__enter__, autocast.__exit__  # type: ignore[attr-defined]

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        area = vars(self).get("_amp_area")
        if area is None:
            return enter(self)
        area.__enter__()
        _torchs.areas.append(area)
        return self

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        area = vars(self).get("_amp_area")
        if area is None:
            return leave(self, *error)
        _torchs.areas.pop()
        return area.__exit__(*error)

    patches.set(autocast, "__enter__", __enter__)
    patches.set(autocast, "__exit__", __exit__)
    in_graphs = torch.amp.autocast_mode._enter_autocast

    @functools.wraps(in_graphs)
    def compiled(*args: Any) -> Any:
        _torchs.compiled = True
        try:
            return in_graphs(*args)
        finally:
            _torchs.compiled = False

    for owner in torch.amp, torch.amp.autocast_mode:
        patches.set(owner, "_enter_autocast", compiled)


def _emulates() -> bool:
    """Whether a torch.autocast acts here that was entered as one of amp_patch."""
    areas = _torchs.areas
    return bool(areas) and areas[-1].acting is not None and casts_state.current() is areas[-1].acting


def _cuda_type_is_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return function(*args, device_type="cpu" if _is_cuda(device_type) else device_type, **kwargs)

    return call


def _parallel(patches: Patches) -> None:
    parallel = torch.nn.DataParallel
    make = parallel.__init__

    @functools.wraps(make)
    def one_replica(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        make(self, module, device_ids=[0])
        self.device_ids = []  # torch's own way where there is no device: calls the module

    patches.set(parallel, "__init__", one_replica)
    if not torch.distributed.is_available():
        return
    distributed = torch.nn.parallel.DistributedDataParallel
    spread = distributed.__init__

    @functools.wraps(spread)
    def no_devices(
        self: Any, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        spread(self, module, None, None, *args, **kwargs)

    patches.set(distributed, "__init__", no_devices)
    for name in "init_process_group", "new_group":
        patches.set(torch.distributed, name, _over_gloo(getattr(torch.distributed, name)))


@functools.cache
def _wait_for_gloo_at_exit() -> None:
    """NCCL has no threads that need the interpreter; gloo's drop the last gradients' reduction when it is done.

    One that is not yet through when the interpreter ends aborts the process (seen in up to a quarter of the runs of
    scripts that end with a backward, with plain torch too), and torchrun then tells of a failure. Sleeping lets go of
    the interpreter, for longer than they ever need.
    """
    atexit.register(time.sleep, 0.1)


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    def over_gloo(value: Any) -> Any:
        return "gloo" if isinstance(value, str) and re.fullmatch("nccl|.*cuda:nccl.*", value.lower()) else value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _wait_for_gloo_at_exit()
        kwargs.pop("device_id", None)
        return function(*map(over_gloo, args), **{name: over_gloo(value) for name, value in kwargs.items()})

    return call
