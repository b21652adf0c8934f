"""`python -m amp_patch run train.py`: run a script that was written for Apex, unedited.

For the script, this differs from `python train.py` in two points: `import apex` works, and torch is imported already.
The script itself becomes `sys.modules["__main__"]`, so that objects of its classes can be unpickled. A module, a folder
or a zip file is run by the function of runpy that the interpreter uses for it.

Child processes: a forked process inherits amp_patch's apex. A spawned one (torch.multiprocessing, DataLoader workers)
imports the script again, and needs this apex before that. So `run` adds calls to the data that multiprocessing sends to
the new process. The process makes them as it unpickles the data, before it imports the script. A `sitecustomize` on
PYTHONPATH was rejected: it would reach every Python process that the script starts, and would hide the machine's own
`sitecustomize`. Under a launcher, name this module: `torchrun --nproc-per-node 2 -m amp_patch run train.py`.
"""

from __future__ import annotations

import argparse
import builtins
import multiprocessing.spawn
import os
import pkgutil
import runpy
import shlex
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
from amp_patch.run import no_cuda
from amp_patch.run.run_summary import RunSummary, told
from amp_patch.run.unedited.processes import tell
from amp_patch.run.unedited.script import UneditedScript
from amp_patch.training import observers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`; the process of each run of `compare` parses the same ones."""
    options = "[--level LEVEL] [--device DEVICE] [--methods NAMES] [--allow-banned]"
    parser.usage = f"python -m amp_patch run [-h] {options} [-m] script ..."
    words = "train at this level, for example O2 or O5+split; sets AMP_PATCH_OPT_LEVEL for it and its children"
    parser.add_argument("--level", type=_level, metavar="LEVEL", help=words)
    words = "cpu, mps or xpu: use this device wherever the script asks for CUDA"
    parser.add_argument("--device", type=no_cuda.here, help=words)
    add_cast_arguments(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", help="a script, a folder or zip file with a __main__.py, or after -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments, --help included")


def _level(name: str) -> str:
    """Return `name` if it is the name of a level.

    Raises:
        argparse.ArgumentTypeError: there is no level of this name.
    """
    try:
        named_level(name).policy(torch.bfloat16)  # any type: the script may choose that of O2 later
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def add_cast_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags for arguments of `initialize` other than the level; `environment.py` reads their variables."""
    words = "comma-separated methods of the models to cast too, for example encode,decode; sets AMP_PATCH_METHODS"
    parser.add_argument("--methods", metavar="NAMES", help=words)
    words = "run banned functions (binary_cross_entropy) in FP32, not refuse them; sets AMP_PATCH_ALLOW_BANNED"
    parser.add_argument("--allow-banned", action="store_true", help=words)


def set_casts(args: argparse.Namespace) -> None:
    """Set the environment variables of the flags of `add_cast_arguments`, for this process and its children."""
    if args.methods is not None:
        os.environ[METHODS] = args.methods
    if args.allow_banned:
        os.environ[BANNED] = "1"


def run(args: argparse.Namespace, around: AbstractContextManager[Any] | None = None) -> None:
    """run a script unedited: `import apex` imports amp_patch; --level trains it at a level, with Apex or without"""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins  # the module, as in `python train.py`; exec would set the module's dict
    execute: Callable[[], Any]
    if args.module:
        # sys.path is as a module needs it: `python -m` has put the working directory first.
        execute = partial(_run_module, args.script)
    elif pkgutil.get_importer(args.script) is not None:  # a folder or a zip file
        _leave_working_directory()
        sys.path.insert(0, os.path.abspath(args.script))
        execute = partial(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]
    else:
        if advice := notebook_advice(args.script):
            print(f"python -m amp_patch run: {advice}", file=sys.stderr)
            sys.exit(2)
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
    begin(args.device)  # after the change of sys.path: `install` looks there for a real Apex
    if args.device is not None:
        meant = "the CPU" if args.device == "cpu" else args.device
        print(f"amp_patch: CUDA is {meant} for this process (--device {args.device})", file=sys.stderr)
    # Spawned processes unpickle from `__mp_main__`. Without this line it is the main module of amp_patch.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        with as_asked("--level " if args.level else f"{LEVEL}=") if around is None else around:
            execute()
    except BaseException:
        sys.excepthook = partial(_report, sys.excepthook, main.__dict__)
        raise


@contextmanager
def as_asked(by: str) -> Iterator[None]:
    """Train the models and optimizers of the body by `at_asked_level`, and then print the line of `RunSummary`."""
    with told(), at_asked_level(by):
        yield


@contextmanager
def at_asked_level(by: str = f"{LEVEL}=") -> Iterator[None]:
    """Train the torch models and optimizers of the body at AMP_PATCH_OPT_LEVEL, if that is set.

    If the body trains nothing, a message says so.

    Args:
        by: the option or variable by which the user gave the level, for example "--level "; it starts the message.
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
        others = f"each of the {script.processes.started} that it started reports its own training"
        tell(f"{asked}: this process trained nothing; {others}")
    elif missing is not None:
        tell(f"{asked} has changed nothing: {missing.why}{missing.way_out}")
    elif not (script.has_begun or script.processes.started):
        why = "the script names casts of amp_patch or Apex, and has begun no training by initialize"
        tell(f"{asked} has changed nothing: {why}")


def begin(device: str | None) -> None:
    """Install amp_patch's apex, here and in all processes that multiprocessing starts here.

    With a `device`, calls for CUDA use it (the folder no_cuda).
    """
    amp_patch.apex.install()
    if device is not None:
        no_cuda.install(device)
    original = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = partial(_preparation_data, original, device)


def _begin_spawned(device: str | None) -> None:
    """Call `begin` in a spawned process; if AMP_PATCH_OPT_LEVEL is set, train at that level until the process ends."""
    begin(device)
    observers.add(RunSummary())
    if (level := asked_level()) is not None:
        UneditedScript(level).__enter__()


def _leave_working_directory() -> bool:
    """Remove the working directory, which `python -m` put first in sys.path; return False after `python -P`."""
    if getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        return False
    del sys.path[0]
    return True


def notebook_advice(script: str) -> str:
    """Return the way to a script if `script` names a notebook, which no command can run; "" otherwise."""
    if not script.endswith(".ipynb"):
        return ""
    made = shlex.quote(f"{script.removesuffix('.ipynb')}.py")
    return f"{script} is a notebook: convert it, jupyter nbconvert --to script {shlex.quote(script)}, and give {made}"


def _run_module(name: str) -> None:
    """Run a module as `python -m name` does."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is not None and spec.name != name:  # a module of amp_patch's apex: runpy finds it by its real name only
        name = spec.name
        del sys.modules[name]  # runpy warns of a module that is imported already
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_file(loader: SourceFileLoader, source: bytes, main: ModuleType) -> None:
    main.__dict__.update(__loader__=loader, __file__=loader.path, __cached__=None)
    exec(loader.source_to_code(source, loader.path), main.__dict__)


def wanted_cuda(error: str) -> bool:
    """Return whether the message of an error means that this machine has no CUDA."""
    # The last is the error of torch.cuda.set_device in a build for the CPU.
    words = ("not compiled with CUDA", "Found no NVIDIA driver", "module 'torch._C' has no attribute '_cuda_")
    return any(each in error for each in words)


def _report(
    hook: Callable[..., Any],
    namespace: dict[str, Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Call `hook` with a traceback that begins in the script, without the frames of amp_patch that called it."""
    found = traceback
    while found is not None and found.tb_frame.f_globals is not namespace:
        found = found.tb_next
    if found is not None or isinstance(error, SyntaxError):  # a SyntaxError has no frame of the script
        error.__traceback__ = traceback = found  # Python's hook prints `error.__traceback__`, not its argument
    hook(kind, error, traceback)
    if wanted_cuda(str(error)):
        print("amp_patch: to try this script on the CPU: python -m amp_patch run --device cpu ...", file=sys.stderr)
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("intel_extension_for_pytorch"):
        way_out = "leave its lines out and run the script with --level O5+split (BF16), or O2 (FP16)"
        print(f"amp_patch: Intel archived IPEX, and amp_patch does not replace it: {way_out}", file=sys.stderr)


class _Call:
    """An object that calls `function(*arguments)` when it is unpickled, and becomes the result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def _preparation_data(original: Callable[[str], dict[str, Any]], device: str | None, name: str) -> dict[str, Any]:
    """Return the data that multiprocessing sends to a new process, with two calls (`_Call`) added.

    The process makes the calls as it unpickles the data, before it imports the script: one extends sys.path, the other
    is `_begin_spawned`.
    """
    data = original(name)
    if name == "ignore":
        # A fork server uses only the path of the script, and would import the script without Apex. If the path is
        # removed, it imports nothing. Its children receive all of the data, and import the script themselves.
        return {key: value for key, value in data.items() if not key.startswith("init_main")}
    # The child unpickles this before it sets sys.path from the data, so amp_patch may not be importable yet. `prepare`
    # extends sys.path first; the child then sets it again from the rest of the data.
    ours = os.path.dirname(os.path.dirname(os.path.abspath(amp_patch.apex.__path__[0])))
    data["amp_patch"] = (
        _Call(multiprocessing.spawn.prepare, {"sys_path": [*data["sys_path"], ours]}),
        _Call(_begin_spawned, device),
    )
    return data
