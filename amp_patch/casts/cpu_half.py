"""Emulation of FP16 and BF16 products on a CPU without instructions for the type: products are computed in FP32.

On such a CPU torch's kernels for the type are four to a hundred times slower than its FP32 kernels. So this file
registers other kernels for sums of products (GEMMs, convolutions, attention). They upcast their operands, call torch's
FP32 kernel and round its result once, as a GPU does. A result beyond FP16's range becomes infinite.

The kernels are registered at the dispatch key `BackendSelect`, which is below autograd. So autograd saves the low
operands and differentiates with torch's own formulas, whose products dispatch to these kernels again. The key is also
below function transforms and torch.compile: their graphs call the kernels too.

A kernel emulates inside the regions of a policy that emulates (`region.emulated`): in models' forwards and in the body
of `scale_loss`, also on autograd's own threads. Outside of all regions it emulates in backward passes while any
training of the process emulates, because the kernel cannot tell which training the backward pass belongs to. Otherwise
it calls torch's kernel. The kernels exist in C++ (csrc/casts/emulation.cpp), and here for processes without the
extension.

Unless the user chose "native", ops of low_sums.py that add many numbers have kernels too, and these act everywhere.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from amp_patch import multi_tensor
from amp_patch.casts import low_sums
from amp_patch.casts import state as casts_state
from amp_patch.casts.low_sums import ADDERS, BELOW, SUMS
from amp_patch.casts.thread_state import this_thread
from amp_patch.policy import EMULATING, LOW_PRECISION, Policy
from amp_patch.support.compiled import constant_in_traces
from amp_patch.support.patches import Installation, Patches

# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic of this CPU

# Linux's names for CPU features with arithmetic of a type. Features that only convert (f16c) are not in the table.
_FLAGS = {
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
}
# Values of ONEDNN_MAX_CPU_ISA that keep torch's products from using arithmetic that the CPU has.
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_CAPS = {torch.bfloat16: _WITHOUT_BF16, torch.float16: {*_WITHOUT_BF16, "AVX512_CORE_BF16"}}


@functools.cache
def has_arithmetic(dtype: torch.dtype) -> bool:
    """Tell whether torch computes products of this type with instructions for the type on this CPU.

    For FP16 these are AVX512-FP16, AMX-FP16 or ARM's FP16 vectors; for BF16 AVX512-BF16, AMX-BF16 or ARM's BF16
    extension. False if the environment variable ONEDNN_MAX_CPU_ISA keeps torch from using them. The answer depends on
    names only, never on a timing: results of a training may depend on the machine, but not on its load.
    """
    named = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    if named.upper() in _CAPS[dtype]:
        return False
    try:
        return importlib.import_module("amp_patch._C").cpu_has(dtype)
    except (ImportError, AttributeError):  # the extension is absent, or built from older sources
        pass
    try:
        return not _FLAGS[dtype].isdisjoint(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        # macOS's name of aarch64: every Apple processor has FP16 arithmetic, and torch uses no BF16 arithmetic there.
        return dtype is torch.float16 and platform.machine() == "arm64"


@constant_in_traces
def _machine_has(dtype: torch.dtype) -> bool:
    return has_arithmetic(dtype)


def resolve_cpu_half(policy: Policy, on_cpu: bool) -> Policy:
    """Return `policy` with its `cpu_half` decided for this machine.

    The result is "native" (nothing is emulated) if the policy makes no low-precision tensors or `on_cpu` is False.
    """
    return replace(policy, cpu_half=decide_cpu_half(policy.cpu_half, policy.dtype, on_cpu and policy.makes_low_tensors))


def decide_cpu_half(wanted: str, dtype: torch.dtype, makes_some: bool) -> str:
    """Return `wanted`, with "auto" decided for this machine and type.

    "auto" becomes "emulate" if the CPU has no arithmetic for the type. Otherwise it becomes "convolutions" for FP16 and
    "sums" for BF16, with which only the sums of gradients have kernels. If `makes_some` is False (the casts make no
    tensors of `dtype` on a CPU), the result is "native". Separate from `resolve_cpu_half`, because torch 2.6 cannot
    compile a call of `dataclasses.replace`.
    """
    if not makes_some:
        return "native"
    if wanted != "auto":
        return wanted
    if not _machine_has(dtype):
        return "emulate"
    # oneDNN's backward of an FP16 convolution takes 30 times FP32's time on AVX512-FP16.
    return "convolutions" if dtype is torch.float16 else "sums"


# ---------------------------------------------------------------------------------------------------------------------
# The ops


class Product(NamedTuple):
    """An op of aten that is emulated.

    Attributes:
        name: the op's name, with its overload.
        fp32_results: the indices of results that are FP32 for low operands too.
        mixes: FP32 arguments may be mixed with the low ones (masks and statistics of attention, statistics of norms).
        writes_out: the op has an overload "out"; C++ writes the FP32 result into its scratch memory with it.
        anywhere: the op is computed in FP32 also outside of the regions that emulate.
    """

    name: str
    fp32_results: tuple[int, ...] = ()
    mixes: bool = False
    writes_out: bool = False
    anywhere: bool = False


_CONVOLUTIONS = (Product("convolution"), Product("_convolution"), Product("convolution_backward"))
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS = (
    *(Product(name, writes_out=True) for name in ("mm", "addmm", "bmm", "baddbmm")),
    *(Product(f"{name}.out") for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")),
    *(Product(name) for name in ("mv", "addmv", "addr", "dot", "vdot", "_addmm_activation")),
    *(Product(f"{name}_") for name in ("addmm", "baddbmm", "addmv", "addr")),
    *(Product(name) for name in ("_trilinear", "conv_tbc", "slow_conv_transpose3d")),
    *(Product(name) for name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")),
    Product(_ATTENTION, fp32_results=(1,), mixes=True),
    Product(f"{_ATTENTION}_backward", mixes=True),
    *_CONVOLUTIONS,
)
# These ops are not products: their FP16 kernels take 3 to 25 times as long as casts to FP32 and back, or are missing.
# Measured on torch 2.13.
_SLOW_IN_FP16 = (
    *(Product(name) for name in ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "linalg_vector_norm")),
    *(Product(name) for name in ("norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.Scalar")),
    *(Product(name) for name in ("_cdist_forward", "_cdist_backward", "im2col")),
)
_SUMS = tuple(Product(name, anywhere=True) for name in ADDERS.split())


def products(dtype: torch.dtype, cpu_half: str) -> tuple[Product, ...]:
    """Return the ops to compute in FP32 for `dtype`. `cpu_half` is a result of `decide_cpu_half`, never "auto"."""
    if cpu_half == "convolutions":
        return (*_CONVOLUTIONS, *_SUMS)
    if cpu_half not in EMULATING:
        return _SUMS
    return (*_PRODUCTS, *(_SLOW_IN_FP16 if dtype is torch.float16 else ()), *_SUMS)


# ---------------------------------------------------------------------------------------------------------------------
# Registration

_installation = Installation()
_served: set[tuple[bool, torch.dtype, str]] = set()  # (in C++, type, decided cpu_half) that have kernels
_types: dict[str, set[torch.dtype]] = {}  # op -> types that its kernel in Python emulates
_library: torch.library.Library | None = None  # registers the kernels in Python


def emulate(policy: Policy) -> None:
    """Register the kernels that a policy needs, until `amp.restore()`. Idempotent; does nothing for "native"."""
    if policy.cpu_half in ("auto", "native"):
        return
    wanted = (not isinstance(casts_state.in_use, casts_state.PythonState), policy.dtype, policy.cpu_half)
    if wanted not in _served:
        _installation.add(functools.partial(_register, wanted=wanted))


def _register(patches: Patches, wanted: tuple[bool, torch.dtype, str]) -> None:
    global _library
    in_cpp, dtype, cpu_half = wanted
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for name, kernel in SUMS.items():
            _library.impl(name, kernel, "BackendSelect", with_keyset=True)
        patches.on_remove(_stop)
        low_sums.in_use = True
    for product in products(dtype, cpu_half):
        if in_cpp:
            name, _, overload = product.name.partition(".")
            rest = (list(product.fp32_results), product.mixes, product.writes_out, product.anywhere, dtype)
            casts_state.in_use.emulate(name, overload, *rest)
            continue
        types = _types.setdefault(product.name, set())
        if not types and (op := _op_of(product.name)) is not None:
            _library.impl(product.name, _Kernel(op, product, types), "BackendSelect", with_keyset=True)
        types.add(dtype)
    _served.add(wanted)


def _stop() -> None:
    """Unregister all kernels."""
    global _library
    _served.clear()
    _types.clear()
    if (extension := multi_tensor.extension()) is not None:
        extension.casts.stop_emulating()
    if _library is not None:
        _library._destroy()
        _library = None
        low_sums.in_use = False


def _op_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


class _Kernel:
    """A kernel in Python: the counterpart of `Product` in csrc/casts/emulation.cpp."""

    def __init__(self, op: Any, product: Product, types: set[torch.dtype]) -> None:
        self.op, self.product, self.types = op, product, types
        self.arguments = op._schema.arguments

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        op = functools.partial(self.op.redispatch, keys & BELOW)
        given = {**dict(zip((argument.name for argument in self.arguments), args, strict=False)), **kwargs}
        low = self._type_of(given)
        if low is None:
            return op(*args, **kwargs)
        this_thread.emulated_calls += 1
        wide = {name: value.float() for name, value in given.items() if _is(value, low)}
        args = tuple(wide.get(argument.name, value) for argument, value in zip(self.arguments, args, strict=False))
        with torch._C._AutoDispatchBelowAutograd(), record_function("amp_patch::emulated"):
            result = op(*args, **{**kwargs, **{name: wide[name] for name in kwargs if name in wide}})
            written = [argument.name for argument in self.arguments if argument.is_write and argument.name in wide]
            for name in written:
                if given[name].shape != wide[name].shape:
                    given[name].resize_(wide[name].shape)
                given[name].copy_(wide[name])
        if written:
            return given[written[0]]
        if isinstance(result, Tensor):
            return result.to(low)
        kept = self.product.fp32_results
        return tuple(
            value.to(low) if _is(value, torch.float32) and index not in kept else value
            for index, value in enumerate(result)
        )

    def _type_of(self, given: dict[str, Any]) -> torch.dtype | None:
        """Return the type in which a call with the arguments `given` is emulated; None: torch's kernel makes the call.

        The call is emulated if all floating arguments are dense CPU tensors of one low-precision type (some ops may mix
        FP32 ones in, `Product.mixes`), and the type is emulated in the thread's region, or outside regions in backward.
        """
        low: torch.dtype | None = None
        for name, value in given.items():
            if name == "dtype" and value is not None:  # the user chose the type
                return None
            if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
                continue
            if value.dtype in LOW_PRECISION and low in (None, value.dtype):
                if value.device.type != "cpu" or value.layout is not torch.strided:
                    return None
                low = value.dtype
            elif not (self.product.mixes and low is not None and value.dtype is torch.float32):
                return None  # torch refuses mixed types, or has a kernel for them
        if low not in self.types:
            return None
        if self.product.anywhere:
            return low
        emulated = casts_state.in_use.emulated()
        if not this_thread.inside and emulated is None:
            return low if torch._C._current_graph_task_id() != -1 else None
        return low if emulated is low else None


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype is dtype
