"""`python ...` in a process that has torch already: a fork of one that has imported it, which takes most of a start.

The child equals a new Python that has imported torch, its compiler and scikit-learn, and nothing of amp_patch. A test
of the start itself (the order of imports, warnings of torch's import, signals) starts a new Python.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# Python and torch read variables of these names once. A Python whose differ from this process's is really started.
_READ_ONCE = (
    *("ATEN", "CUDA", "DNNL", "GOMP", "KINETO", "LD_", "MKL", "OMP", "ONEDNN"),
    *("PYTHON", "PYTORCH", "TORCH"),
)
# Save these, which the child follows; torch sets the last one itself.
_TAKEN = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR"}
_SERVERS = {**os.environ, "OMP_NUM_THREADS": "1"}


def python(
    *arguments: object, cwd: object = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python [-W ...] (file | -m module | -c code) ...` to its end: its output, and its exit code."""
    command, variables = [sys.executable, *map(str, arguments)], dict(os.environ if env is None else env)
    if _read_once({"OMP_NUM_THREADS": "1", **variables}) != _read_once(_SERVERS):
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        job = {"command": command, "cwd": str(cwd or os.getcwd()), "env": variables, "folder": folder}
        code = _server(job)
        printed, errors = (Path(folder, name).read_text() for name in ("1", "2"))
    return subprocess.CompletedProcess(command, code, printed, errors)


def _read_once(variables: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k.startswith(_READ_ONCE) and k not in _TAKEN}


class _Server:
    """The process that forks: started by the first call, and ended with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __call__(self, job: dict[str, Any]) -> int:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__],
                    env={name: value for name, value in _SERVERS.items() if name not in _TAKEN},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                atexit.register(self._end, self._process)
            self._pipe(self._process.stdin).write(json.dumps(job) + "\n")
            self._pipe(self._process.stdin).flush()
            return int(self._pipe(self._process.stdout).readline())

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._pipe(process.stdin).close()
        self._pipe(process.stdout).close()
        process.wait()


_server = _Server()


def _serve() -> None:
    sys.path.pop(0)  # the tests' helpers
    import torch
    import torch._dynamo  # modules that torch's optimizers import when the first of them is made

    with suppress(ImportError):  # many scripts of tests train on its digits
        import sklearn.datasets  # noqa: F401
    assert torch.get_num_threads() == 1
    if "triton" not in sys.modules:  # it reports frozen objects as leaked, on stderr
        gc.freeze()  # as each child ends, its last collection looks at all that was imported here
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return _become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(command: list[str], cwd: str, env: dict[str, str], folder: str) -> None:
    """Run a command of Python as its interpreter does."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in 1, 2:
        os.dup2(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_WRONLY), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv[:] = command
    sys.path[:0] = list(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
    options = command[1:]
    while options[0] == "-W":
        sys.warnoptions.append(options[1])
        options = options[2:]
    if sys.warnoptions:
        # Python's own module reads the options when it is imported, and has been.
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__)
    try:
        if options[0] == "-c":
            sys.argv[:] = ["-c", *options[2:]]
            sys.path.insert(0, "")
            exec(compile(options[1], "<string>", "exec"), vars(main))
        elif options[0] == "-m":
            sys.argv[:] = options[1:]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(options[1])  # type: ignore[attr-defined]
        else:
            assert not options[0].startswith("-"), options
            sys.argv[:] = options
            sys.path.insert(0, os.path.dirname(os.path.realpath(options[0])))
            main.__file__ = options[0]
            exec(compile(Path(options[0]).read_bytes(), options[0], "exec"), vars(main))
    except Exception as error:
        shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    _serve()
