"""`python -m amp_patch info`: which versions, kernels and devices are in use, and why."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import torch

from amp_patch import __version__, casts, multi_tensor
from amp_patch.cpu_fp16 import has_fp16_arithmetic


def info(_: argparse.Namespace) -> None:
    """versions, what runs the kernels and why, what runs the casts of O1, devices, how FP16 runs on this CPU"""
    devices = [f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    auto = "native" if has_fp16_arithmetic() else "emulate"
    rows = {
        "amp_patch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": f"{multi_tensor.backend()}: {multi_tensor.backend_reason()}",
        "casts": {"cpp": "cpp: C callables", "python": "python: Python wrappers"}[casts.backend()],
        "devices": ", ".join(devices),
        "cpu_fp16": f"auto is {auto}: this CPU has {'' if has_fp16_arithmetic() else 'no '}FP16 arithmetic",
    }
    for name, value in rows.items():
        print(f"{name:<10} {value}")


# A subcommand is a line here and a function above; its docstring is its help.
COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"info": info}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m amp_patch", description="The opt-level switch for PyTorch.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        subcommands.add_parser(name, help=command.__doc__, description=command.__doc__)
    args = parser.parse_args(arguments)
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
