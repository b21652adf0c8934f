"""The command line `python -m amp_patch`.

`info` prints the installation, `run` runs scripts written for Apex, `check` reads them, `compare` runs them at several
opt levels, `search` finds the modules that a level must keep in FP32, and `report` shows a comparison again.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from amp_patch import __version__, multi_tensor
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.comparison.commands import compare, compare_arguments, report, search
from amp_patch.run import check, installation, run
from amp_patch.run.machine import accelerators, low_precision
from amp_patch.support.devices import widest


def info(_: argparse.Namespace) -> None:
    """print versions, the amp_patch in use, backends of kernels and casts and why, devices, BF16 and FP16 support"""
    devices = [f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"]
    devices += [f"{device} ({name}{_lacks(device)})" for device, name in accelerators().items()]
    rows = {
        "amp_patch": __version__,
        "package": installation.package_in_words(),
        "extension": installation.extension_in_words(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": f"{multi_tensor.backend()}: {multi_tensor.backend_reason()}",
        "casts": {"cpp": "cpp: C callables", "python": "python: Python wrappers"}[cast_wrappers.backend()],
        "devices": ", ".join(devices),
        **low_precision(),
    }
    for name, value in rows.items():
        print(f"{name:<12} {value}")


def _lacks(device: str) -> str:
    return "" if device.startswith("cuda") or widest(torch.device(device)) is torch.float64 else ", no FP64"


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        run: runs the command; the docstring of this function is the command's help.
        add_arguments: adds the command's arguments to a parser.
        split: splits the command line into the command's arguments and the arguments of the script that it runs, which
            become `arguments`. None if the command runs no script, or argparse can tell the two apart.
    """

    run: Callable[[argparse.Namespace], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    split: Callable[[list[str]], tuple[list[str], list[str]]] | None = None


# To add a subcommand, add a file to comparison/commands/ or run/, and a line here.
COMMANDS = {
    "info": Command(info),
    "run": Command(run.run, run.add_arguments),
    "check": Command(check.check, check.add_arguments),
    "compare": Command(compare.compare, compare_arguments.add_arguments, compare_arguments.split),
    "search": Command(search.search, search.add_arguments, compare_arguments.split),
    "report": Command(report.report, report.add_arguments),
}


def main(arguments: list[str] | None = None) -> None:
    # No abbreviations: argparse would also find them among the arguments of the script that `run` runs.
    parser = argparse.ArgumentParser(
        prog="python -m amp_patch", description="The opt-level switch for PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"amp_patch {__version__}, torch {torch.__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="command")
    parsers = {}
    for name, command in COMMANDS.items():
        words = command.run.__doc__
        parsers[name] = subcommands.add_parser(name, help=words, description=words, allow_abbrev=False)
        command.add_arguments(parsers[name])
    given, scripts = sys.argv[1:] if arguments is None else arguments, None
    if given and given[0] in COMMANDS and (split := COMMANDS[given[0]].split) is not None:
        given, scripts = split(given)
    args, unknown = parser.parse_known_args(given)
    if unknown:
        hint = "" if scripts is None else "; the script's own go after --, and levels are given as O0,O2"
        parsers[args.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if scripts is not None:
        args.arguments = scripts
    COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
