"""`python -m amp_patch run train.py`: a script written for Apex runs as it is.

The script cannot tell `python -m amp_patch run train.py` from `python train.py`, save that `import apex` works and that
torch is imported already. It becomes `sys.modules["__main__"]` itself, so what it pickles is found again; a module, a
folder and a zip file go through the function of runpy that the interpreter calls for them.

Child processes: a forked one has everything. One that multiprocessing spawns (torch.multiprocessing, DataLoader
workers) imports the script anew and needs the install before that; it is told in the data that multiprocessing sends
ahead of the script's name. The alternative, PYTHONPATH with a `sitecustomize`, would reach every Python that the script
starts, other people's tools too, and hide the machine's own `sitecustomize`. A launcher names us itself: `torchrun
--nproc-per-node 2 -m amp_patch run train.py`.
"""

from __future__ import annotations

import argparse
import builtins
import multiprocessing.spawn
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

import torch

import amp_patch.apex
from amp_patch.environment import BANNED, LEVEL, METHODS, asked_level, named_level
from amp_patch.lab.commands import no_cuda
from amp_patch.lab.commands.run_summary import RunSummary, told
from amp_patch.lab.unedited.processes import tell
from amp_patch.lab.unedited.script import UneditedScript
from amp_patch.training import observers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`, also for a compared run."""
    options = "[--level LEVEL] [--device cpu] [--methods NAMES] [--allow-banned]"
    parser.usage = f"python -m amp_patch run [-h] {options} [-m] script ..."
    words = "train at this level, O2 or O5+split; sets AMP_PATCH_OPT_LEVEL for this run and what it starts"
    parser.add_argument("--level", type=_level, metavar="LEVEL", help=words)
    parser.add_argument("--device", choices=["cpu"], help="cpu: where the script says CUDA, take the CPU")
    add_cast_arguments(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module, as in python -m")
    parser.add_argument("script", help="a script, or a folder or zip file with a __main__.py, or after -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments, --help included")


def _level(name: str) -> str:
    """Return the name of a level.

    Raises:
        argparse.ArgumentTypeError: it names no level.
    """
    try:
        named_level(name).policy(torch.bfloat16)  # O2's type may be the script's
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def add_cast_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of what `initialize` is given beside the level; `environment.py` reads them."""
    words = "cast these methods of the models too, encode,decode say; sets AMP_PATCH_METHODS"
    parser.add_argument("--methods", metavar="NAMES", help=words)
    words = (
        "run functions that are refused in low precision (binary_cross_entropy) in FP32; sets AMP_PATCH_ALLOW_BANNED"
    )
    parser.add_argument("--allow-banned", action="store_true", help=words)


def set_casts(args: argparse.Namespace) -> None:
    """Have this process and those that it starts follow the flags of `add_cast_arguments`."""
    if args.methods is not None:
        os.environ[METHODS] = args.methods
    if args.allow_banned:
        os.environ[BANNED] = "1"


def run(args: argparse.Namespace, around: AbstractContextManager[Any] | None = None) -> None:
    """run a script as it is: its `import apex` finds amp_patch; --level trains it, or plain torch, at a level"""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins  # a module, as in `python train.py`; exec would set a dict
    execute: Callable[[], Any]
    if args.module:
        # `python -m` has put the working directory first in sys.path, as a module wants it.
        execute = partial(_run_module, args.script)
    elif pkgutil.get_importer(args.script) is not None:  # a folder or a zip file
        _leave_working_directory()
        sys.path.insert(0, os.path.abspath(args.script))
        execute = partial(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]
    else:
        loader = SourceFileLoader("__main__", os.path.abspath(args.script))
        try:
            source = loader.get_data(loader.path)
        except OSError as error:
            print(f"python -m amp_patch run: can't open file {loader.path!r}: {error}", file=sys.stderr)
            sys.exit(2)
        if _leave_working_directory():
            sys.path.insert(0, os.path.dirname(os.path.realpath(loader.path)))
        execute = partial(_run_file, loader, source, main)
    set_casts(args)
    if args.level is not None:
        os.environ[LEVEL] = args.level
    sys.argv = ["-m" if args.module else args.script, *args.arguments]
    begin(args.device)  # after the change of sys.path: `install` looks for a real Apex beside the script
    if args.device == "cpu":
        print("amp_patch: CUDA is the CPU for this process (--device cpu)", file=sys.stderr)
    # Spawned processes unpickle from `__mp_main__`, which multiprocessing has set to the main module of amp_patch.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        with as_asked("--level " if args.level else f"{LEVEL}=") if around is None else around:
            execute()
    except BaseException:
        sys.excepthook = partial(_report, sys.excepthook, main.__dict__)
        raise


@contextmanager
def as_asked(by: str) -> Iterator[None]:
    """`at_asked_level`, and at the end a line of what was trained."""
    with told(), at_asked_level(by):
        yield


@contextmanager
def at_asked_level(by: str = f"{LEVEL}=") -> Iterator[None]:
    """Train what torch alone would train in the body at AMP_PATCH_OPT_LEVEL, if that is set; say so if nothing was.

    Args:
        by: what stands before the level where the user has given it.
    """
    try:
        script = None if (level := asked_level()) is None else UneditedScript(level)
    except ValueError as error:
        print(f"python -m amp_patch run: {error}", file=sys.stderr)
        sys.exit(2)
    if script is None:
        yield
        return
    with script:
        yield
    missing, asked = script.missing(), f"amp_patch: {by}{level}"
    if missing is not None and script.processes.started:
        others = f"each of the {script.processes.started} that it has started says what it trained"
        tell(f"{asked}: this process trained nothing; {others}")
    elif missing is not None:
        tell(f"{asked} has changed nothing: {missing.why}{missing.way_out}")


def begin(device: str | None) -> None:
    """Install amp_patch's apex in this process and in those that multiprocessing will start from it.

    With `device="cpu"`, what the script does on CUDA happens on the CPU (the folder no_cuda).
    """
    amp_patch.apex.install()
    if device == "cpu":
        no_cuda.install()
    original = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = partial(_preparation_data, original, device)


def _begin_spawned(device: str | None) -> None:
    """`begin`, and train this process at AMP_PATCH_OPT_LEVEL, if that is set, until it ends."""
    begin(device)
    observers.add(RunSummary())
    if (level := asked_level()) is not None:
        UneditedScript(level).__enter__()


def _leave_working_directory() -> bool:
    """Take from sys.path what `python -m` put first; False if it was told to put nothing there (`python -P`)."""
    if getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        return False
    del sys.path[0]
    return True


def _run_module(name: str) -> None:
    """As `python -m name`."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is not None and spec.name != name:  # a module of our apex: runpy finds it by its name in amp_patch only
        name = spec.name
        del sys.modules[name]  # runpy warns of a module that is imported already
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_file(loader: SourceFileLoader, source: bytes, main: ModuleType) -> None:
    main.__dict__.update(__loader__=loader, __file__=loader.path, __cached__=None)
    exec(loader.source_to_code(source, loader.path), main.__dict__)


def wanted_cuda(error: str) -> bool:
    """Whether an error's words say that there is no CUDA here; the last is what a CPU's torch says to set_device."""
    words = ("not compiled with CUDA", "Found no NVIDIA driver", "module 'torch._C' has no attribute '_cuda_")
    return any(each in error for each in words)


def _report(
    hook: Callable[..., Any],
    namespace: dict[str, Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Call `hook` with the part of the traceback that the script would have had without `run`."""
    found = traceback
    while found is not None and found.tb_frame.f_globals is not namespace:
        found = found.tb_next
    if found is not None or isinstance(error, SyntaxError):  # a SyntaxError has no frame of the script
        error.__traceback__ = traceback = found  # Python's hook prints `error.__traceback__`, not its argument
    hook(kind, error, traceback)
    if wanted_cuda(str(error)):
        print("amp_patch: to try this script on the CPU: python -m amp_patch run --device cpu ...", file=sys.stderr)


class _Call:
    """Unpickled, it is the result of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def _preparation_data(original: Callable[[str], dict[str, Any]], device: str | None, name: str) -> dict[str, Any]:
    """multiprocessing's data for a new process, with calls in it that do there what `run` does, before the import."""
    data = original(name)
    if name == "ignore":
        # A fork server gets only the script's path, and would import it without Apex. Its children get all of the data,
        # and import the script themselves.
        return {key: value for key, value in data.items() if not key.startswith("init_main")}
    # The child unpickles this with its first sys.path, on which amp_patch need not be: `prepare` extends it now, and
    # sets it again from the rest of the data.
    ours = os.path.dirname(os.path.dirname(os.path.abspath(amp_patch.apex.__path__[0])))
    data["amp_patch"] = (
        _Call(multiprocessing.spawn.prepare, {"sys_path": [*data["sys_path"], ours]}),
        _Call(_begin_spawned, device),
    )
    return data
