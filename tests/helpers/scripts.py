"""Scripts in new folders, started as a user starts them; scripts of benchmarks/ as modules; their processes."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paths import BENCHMARKS, ROOT, TESTS
from python_forks import python

from amp_patch.run import no_cuda


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a script that finds this amp_patch: one thread, only the given variables of ours."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {name: value for name, value in os.environ.items() if not name.startswith("AMP_PATCH_")}
    return {**found, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def run_each(
    folder: Path, cases: Sequence[tuple[Sequence[str], Mapping[str, str]]], env: Mapping[str, str]
) -> list[list[str | int]]:
    """What `python -m amp_patch run` prints to stdout and stderr in `folder`, and its exit code, for each case.

    A case is the arguments and the variables that are set beside `env`.
    """
    ended = [python("-m", "amp_patch", "run", *args, cwd=folder, env={**env, **more}) for args, more in cases]
    return [[ran.stdout, ran.stderr, ran.returncode] for ran in ended]


def report_of(script: str, folder: Path) -> Any:
    """Run a script of this folder with `folder` as its argument; return the JSON that it prints last."""
    ran = python(TESTS / "helpers" / script, str(folder), cwd=folder, env=environment())
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def start_script(folder: Path, script: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python [command] train.py` in `folder`, train.py being `script`, in `environment(**variables)`."""
    (folder / "train.py").write_text(script)
    return python(*command, "train.py", cwd=folder, env=environment(**variables))


def load(name: str) -> ModuleType:
    """Import `benchmarks/name.py` as a new module that can import the scripts in its folder."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(module)
    return module


def run_source(script: str, **names: Any) -> dict[str, Any]:
    """Run a script, which need not import torch, nn, F, copy and math; return its namespace."""
    known = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "copy": copy, "math": math}
    namespace = {"__name__": "__main__", **known, **names}
    exec(compile(textwrap.dedent(script), "train.py", "exec"), namespace)
    return namespace


def edited(script: str) -> str:
    """Return the script with the lines of amp_patch that its comments contain."""
    lines = []
    for line in script.splitlines():
        code, _, comment = line.partition("#")
        indent = code[: len(code) - len(code.lstrip())]
        if code.strip() == "loss.backward()":
            line = f"{indent}with amp.scale_loss(loss, {comment}) as scaled: scaled.backward()"
        elif comment:
            line = indent + comment
        lines.append(line)
    return "\n".join(lines)


@pytest.fixture(name="cpu")
def cpu_fixture(request):
    no_cuda.install()
    yield
    no_cuda.uninstall()


def on_cpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


_PROC = Path("/proc")
SECONDS = 90.0  # until a test gives up: the machine may have other work


def lives(pid: int) -> bool:
    """Tell whether the process runs; False for a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return not _PROC.is_dir()


def in_folder(folder: Path) -> list[int]:
    """Return the processes whose working directory is `folder` (Linux)."""
    found = []
    for entry in _PROC.iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder and lives(int(entry.name)):
                found.append(int(entry.name))
    return found


def described(pid: int) -> str:
    """The command line, state and parent of a process, for messages."""
    with suppress(OSError):
        line = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return f"{pid} ({state[0]}, of {state[1]}): {line[:200]}"
    return f"{pid}: gone"


def wait_until(
    happens: Callable[[], object], seconds: float = SECONDS, instead: Callable[[], str] = lambda: "it has not happened"
) -> None:
    """Wait; `instead` describes the state when the time is over."""
    until = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until, f"{instead()}, in {seconds:g} s"
        time.sleep(0.05)


def wait_until_left(folder: Path) -> None:
    """Wait until no process has this working directory."""
    wait_until(lambda: not in_folder(folder), instead=lambda: f"left: {'; '.join(map(described, in_folder(folder)))}")
