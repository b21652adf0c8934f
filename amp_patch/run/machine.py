"""The machine of a comparison: versions, processor, devices and their types."""

from __future__ import annotations

import os
import platform
import re

import torch

from amp_patch.casts.cpu_half import has_arithmetic
from amp_patch.diagnose import wording

_LIMITING = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
# GPUs of the capability 7.5 without tensor cores (TU116, TU117). Reports: pytorch#58123, pytorch#77955.
_WITHOUT_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(4|5|6|10|12|20)00\b|\bT550\b")


def machine(load: str | None = None) -> dict[str, str]:
    """Describe this process's machine in words.

    Initializes CUDA if there is a device.

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
    """Say in words how FP16 and BF16 are computed here.

    Returns:
        "bfloat16", "float16": whether `cpu_half="auto"` computes this type natively or emulates it on this CPU.
        "tensor_cores": only with CUDA: the types that the tensor cores of the GPUs compute in, and what is emulated.
    """
    found = {}
    for name in ("bfloat16", "float16"):
        lacks, kind = name in lacking(), wording.type_name(name)
        found[name] = f"auto is {'emulate' if lacks else 'native'}, this CPU has {'no ' * lacks}{kind} arithmetic"
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
