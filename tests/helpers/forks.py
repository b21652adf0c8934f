"""A process that has imported torch and scikit-learn, and forks a child for each job: the job starts at once.

The child is as good as new: nothing of amp_patch or of CUDA is in the process that it is a copy of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class Forks:
    """Call it with what is to be run: `forks("module.function", *arguments)`, in a new process, to its end.

    Arguments are whatever JSON carries. A context manager; leaving it ends the process that forks.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __call__(self, function: str, *arguments: Any, output: Path) -> None:
        """Run the function; stdout and stderr go to the file `output`, which the AssertionError of a failure quotes."""
        job = {"function": function, "arguments": arguments, "output": str(output)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status == 0, f"{function}{arguments}: status {status}\n{output.read_text()[-4000:]}"


def _serve() -> None:
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo  # what torch's optimizers import when the first of them is made

    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(job: dict[str, Any]) -> None:
    """Never returns: the caller's loop over stdin is the parent's."""
    status = 1
    try:
        os.dup2(os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        module, _, function = job["function"].rpartition(".")
        getattr(__import__(module, fromlist=["_"]), function)(*job["arguments"])
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
