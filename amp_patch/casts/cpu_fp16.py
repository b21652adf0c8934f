"""FP16 on a CPU that has no FP16 arithmetic: values in FP16, sums of products in FP32, as on a tensor core.

torch's own half kernels on such a CPU convert number by number, ten to a hundred times slower than FP32. So functions
made of sums of products (GEMMs, convolutions, attention, recurrent networks) take their FP16 operands upcast, run as
torch's FP32 kernels, and round the result to FP16 once; beyond FP16's range it is infinite. The casts are ordinary
nodes of the graph, so each GEMM of a backward and of a double backward does the same by itself. The op lists say which
functions these are; their rules (rules.py) call what stands here.
"""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casts.state import is_plain_eager
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support.blocks import saving_through
from amp_patch.support.compiled import constant_in_traces

_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}  # Linux's names for FP16 arithmetic, which amx_bf16 and f16c lack


@functools.cache
def has_fp16_arithmetic() -> bool:
    """Whether this CPU computes in FP16 (AVX512-FP16, AMX-FP16, ARM's FP16 vectors), not only converts (F16C)."""
    try:
        return importlib.import_module("amp_patch._C").cpu_has_fp16()
    except (ImportError, AttributeError):  # the extension is absent, or built from older sources
        pass
    try:
        return not _FLAGS.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return platform.machine() == "arm64"  # macOS's name of aarch64: every Apple processor has FP16 arithmetic


@constant_in_traces
def _machine_has_fp16() -> bool:
    return has_fp16_arithmetic()


_is_autocast_enabled = torch.is_autocast_enabled  # bound now: lab/commands/no_cuda replaces torch's attribute


@constant_in_traces
def _in_torchs_autocast() -> bool:
    return _is_autocast_enabled("cpu")


def resolve_cpu_fp16(policy: Policy, on_cpu: bool) -> Policy:
    """`policy` with its `cpu_fp16` decided for this machine: "emulate" or "native".

    It is "native", and nothing is patched for it, where the policy makes no FP16 tensors or `on_cpu` is False.
    """
    return replace(policy, cpu_fp16=decide_cpu_fp16(policy.cpu_fp16, on_cpu and policy.uses_fp16))


def decide_cpu_fp16(wanted: str, makes_some: bool) -> str:
    """What "auto", "emulate" or "native" becomes on this machine, for casts that make FP16 tensors on a CPU or do not.

    Apart from `resolve_cpu_fp16`, because torch 2.6 cannot compile a call of `dataclasses.replace`.
    """
    if wanted == "auto":
        wanted = "native" if _machine_has_fp16() else "emulate"
    return wanted if makes_some else "native"


def takes(operands: Iterable[Tensor]) -> bool:
    """Whether a call on these tensors is computed here: each floating one of them is dense FP16 on a CPU.

    Mixed types go to torch, which refuses them by name. Inside `torch.autocast` torch chooses the types.
    """
    found = False
    for operand in operands:
        dtype = operand.dtype
        if dtype is torch.float16:
            if operand.device.type != "cpu" or operand.layout is not torch.strided or operand.is_nested:
                return False
            found = True
        elif dtype.is_floating_point or dtype.is_complex:
            return False
    return found and not _in_torchs_autocast()


def rounded(result: Any, dtype: torch.dtype = torch.float16) -> Any:
    """`result` with its FP32 tensors, also those in a tuple or list, rounded to `dtype`."""
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    if isinstance(result, (tuple, list)):
        return type(result)(rounded(item, dtype) for item in result)
    return result


class _Kept(NamedTuple):
    """A tensor saved for backward: the tensor itself, or a low operand in place of (a view of) its upcast."""

    tensor: Tensor
    version: int  # of `tensor`: of packed tensors autograd checks no version counter, so `unpack` compares
    view: tuple[torch.Size, tuple[int, ...], Any] | None = None  # of the upcast: size, stride, offset


class Upcast:
    """Upcasts the operands of one call; in `run`, autograd keeps the low ones instead of their FP32 copies.

    The layer that made an operand keeps it already; FP32 copies beside it would make the activations of a training
    larger than FP32's own.
    """

    def __init__(self, saves_low: bool) -> None:
        self._exchanges = saves_low and _may_exchange_saved()
        self._operands: dict[int, Tensor] = {}  # address of an upcast storage -> the low operand

    def __call__(self, operand: Tensor, dtype: torch.dtype) -> Tensor:
        if operand.dtype not in LOW_PRECISION:
            return operand
        wide = operand.to(dtype)
        # Tensor subclasses may have no storage of their own, and inference tensors have no version counter.
        if self._exchanges and type(operand) in (Tensor, nn.Parameter) and not operand.is_inference():
            self._operands[wide.untyped_storage()._cdata] = operand.detach()
        return wide

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call."""
        if not self._operands:
            return function(*args, **kwargs)
        return saving_through(self._pack, _unpack, functools.partial(function, *args, **kwargs))

    def _pack(self, saved: Tensor) -> _Kept:
        operand = self._operands.get(saved.untyped_storage()._cdata) if type(saved) is Tensor else None
        if operand is None:
            # `detach`: a function that saves its own result would make a reference cycle of tensor and graph.
            # Autograd attaches unpacked tensors to the graph again.
            return _Kept(saved.detach(), saved._version)
        return _Kept(operand, operand._version, (saved.size(), saved.stride(), saved.storage_offset()))


def _unpack(kept: _Kept) -> Tensor:
    tensor, version, view = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead (an operand of a function computed in FP32, see cpu_fp16)"
        )
    return tensor if view is None else tensor.float().as_strided(*view)


def _may_exchange_saved() -> bool:
    """Whether `Upcast` may push saved-tensors hooks.

    Not under transforms, modes and traces, whose tensors have no storage. Not inside of hooks of checkpointing or the
    user, from which ours would hide the tensors; a recording's hooks only count, and do not matter.
    """
    topmost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8 and newer
    return (
        torch.is_grad_enabled()
        and is_plain_eager()
        and not torch.compiler.is_compiling()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and topmost is not None
        and ((top := topmost(False)) is None or getattr(top[0], "_amp_counts", False))
    )
