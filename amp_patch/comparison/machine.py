"""What a comparison ran on."""

from __future__ import annotations

import platform

import torch


def machine() -> dict[str, str]:
    """What this process runs on. Asks CUDA for its devices' names, which starts it where there is one."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": str(torch.get_num_threads()),
        "gpu": ", ".join(devices) or "none",
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
