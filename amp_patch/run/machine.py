"""The machine of a comparison: versions, processor, devices, their types, and the speed of low-precision products."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from typing import NamedTuple

import torch

from amp_patch.casts.cpu_half import has_arithmetic
from amp_patch.diagnose import wording

_SIZE, _TURNS = 256, 5  # size and count of the timed products: they take a second with the slowest kernels
_LIMITING = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_STEADY = 1.5  # if the slowest measurement takes more than this times the fastest, `_in_words` gives a range
# cpu_half="auto" chooses native or emulated arithmetic. If products in the chosen arithmetic take more than this times
# as long as in the other one, the report says so.
SLOW = 1.3
# GPUs of the capability 7.5 without tensor cores (TU116, TU117). Reports: pytorch#58123, pytorch#77955.
_WITHOUT_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(4|5|6|10|12|20)00\b|\bT550\b")


class ProductTime(NamedTuple):
    """The time of a matrix product relative to FP32's: least, median and largest of several measurements."""

    low: float
    median: float
    high: float


def machine(load: str | None = None) -> dict[str, str]:
    """Describe this process's machine in words.

    Initializes CUDA if there is a device, and times products of matrices.

    Args:
        load: a warning that other work disturbed the speeds (`OtherWork.words`).

    Returns:
        "torch", "python": the versions.
        "cpu", "threads", "gpu": the processor, the number of torch's threads, the names of the GPUs or "none".
        "bfloat16", "float16", "tensor_cores": the entries of `low_precision`.
        "lacks": the types of `lacking`, if there are any.
        "limited": the environment variables that limit torch's instructions, if one is set.
        "load": the warning, if there is one.
    """
    limited = " ".join(f"{name}={os.environ[name]}" for name in _LIMITING if os.environ.get(name))
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": processor(),
        "threads": str(torch.get_num_threads()),
        "gpu": ", ".join(accelerators().values()) or "none",
        **low_precision(),
        **({"lacks": " ".join(lacking())} if lacking() else {}),
        **({"limited": limited} if limited else {}),
        **({"load": load} if load is not None else {}),
    }


def lacking() -> list[str]:
    """Return the names of the low-precision types, such as "bfloat16", that this CPU has no arithmetic for."""
    return [name for name in ("bfloat16", "float16") if not has_arithmetic(getattr(torch, name))]


def low_precision() -> dict[str, str]:
    """Time matrix products in FP16 and BF16 on the CPU, and say in words how fast they are.

    Takes up to a second if the products are slow.

    Returns:
        "bfloat16", "float16": the result of `products_in_words` for this type.
        "tensor_cores": only with CUDA: the types that the tensor cores of the GPUs compute in, and what is emulated.
    """
    found = {"bfloat16": products_in_words(torch.bfloat16), "float16": products_in_words(torch.float16)}
    count = torch.cuda.device_count()
    told = {name: _tensor_cores(name, i) for i in range(count) if (name := torch.cuda.get_device_name(i))}
    if told:
        alike = len(set(told.values())) == 1
        found["tensor_cores"] = "; ".join(
            set(told.values()) if alike else [f"{name}: {its}" for name, its in told.items()]
        )
    return found


def _tensor_cores(name: str, index: int) -> str:
    capability = torch.cuda.get_device_capability(index)
    if capability >= (8, 0):
        return "FP16 and BF16"
    emulated = "BF16 is emulated, although torch.cuda.is_bf16_supported() is True"
    if capability < (7, 0):
        return f"none; {emulated}"
    if _WITHOUT_TENSOR_CORES.search(name):
        return f"none, and FP16 convolutions of cuDNN have given NaN on such GPUs; {emulated}"
    return f"FP16; {emulated}"


def accelerators() -> dict[str, str]:
    """Return {device: its name} of the GPUs that this torch finds, as "cuda:0", "mps" or "xpu:0"."""
    modules = {"cuda": torch.cuda, "xpu": torch.xpu}
    found = {f"{kind}:{i}": m.get_device_name(i) for kind, m in modules.items() for i in range(m.device_count())}
    return {**found, "mps": "Apple GPU"} if torch.backends.mps.is_available() else found


def time_of_products(dtype: torch.dtype, emulated: bool = False) -> ProductTime:
    """Measure (time of a matrix product of this type) / (time in FP32) several times, on one thread of this CPU.

    The product is torch's own. With `emulated` it is computed in FP32 and rounded, as in casts/cpu_half.py. Other work
    on the machine widens the range of the result.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float32, device="cpu")
    low = wide.to(dtype)
    ratios = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread would wait for a core that other work has
    try:
        for turn in range(_TURNS + 1):
            begun = time.perf_counter()
            _ = (low.float() @ low.float()).to(dtype) if emulated else low @ low
            between = time.perf_counter()
            _ = wide @ wide
            if turn > 0:  # turn 0 has cold caches, and compiles kernels
                ratios.append((between - begun) / (time.perf_counter() - between))
    finally:
        torch.set_num_threads(threads)
    return ProductTime(min(ratios), statistics.median(ratios), max(ratios))


def products_in_words(dtype: torch.dtype) -> str:
    """Say whether `cpu_half="auto"` computes a type natively or emulates it here, and the measured time of each.

    If the arithmetic that was not chosen is faster (`SLOW`), say that too.
    """
    name = wording.type_name(str(dtype).removeprefix("torch."))
    native, emulated = time_of_products(dtype), time_of_products(dtype, emulated=True)
    torchs = f"torch's own products take {_in_words(native)} FP32's time"
    ours = f"emulated ones {_in_words(emulated)}"
    if not has_arithmetic(dtype):
        said = f"auto is emulate, this CPU has no {name} arithmetic: {torchs}, {ours}"
        disagrees = emulated.median > SLOW * native.median
    else:
        said = f"auto is native, this CPU has {name} arithmetic: {torchs}, {ours}"
        disagrees = native.median > SLOW * emulated.median
    other = "native" if not has_arithmetic(dtype) else "emulate"
    return f'{said}; by this clock cpu_half="{other}" is faster' if disagrees else said


def _in_words(time: ProductTime) -> str:
    """Return "1.1x", the median; "30x to 399x" if the slowest measurement takes `_STEADY` times the fastest or more."""
    low, median, high = (f"{wording.short(value)}x" for value in time)
    return median if time.high < _STEADY * time.low else f"{low} to {high}"


def processor() -> str:
    """Return the processor's name with the vector instructions that torch uses."""
    return f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
