"""`python -m amp_patch info`: what is in use here."""

from __future__ import annotations

import argparse
import platform

import torch

import amp_patch
from amp_patch import multi_tensor
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.casts.cpu_fp16 import has_fp16_arithmetic


def info(_: argparse.Namespace) -> None:
    """versions, what runs the kernels and why, what runs the casts of O1, devices, how FP16 runs on this CPU"""
    devices = [f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    auto = "native" if has_fp16_arithmetic() else "emulate"
    rows = {
        "amp_patch": amp_patch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": f"{multi_tensor.backend()}: {multi_tensor.backend_reason()}",
        "casts": {"cpp": "cpp: C callables", "python": "python: Python wrappers"}[cast_wrappers.backend()],
        "devices": ", ".join(devices),
        "cpu_fp16": f"auto is {auto}: this CPU has {'' if has_fp16_arithmetic() else 'no '}FP16 arithmetic",
    }
    for name, value in rows.items():
        print(f"{name:<10} {value}")
