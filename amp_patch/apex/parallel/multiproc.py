"""`python -m amp_patch run -m apex.parallel.multiproc train.py --its --arguments`: one process of a script per GPU.

As Apex's launcher of 2018, each gets `--world-size` and `--rank`; the output of all but the first goes to
`GPU_<rank>.log`. One process without a GPU. New scripts use `torchrun`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import torch

from amp_patch.support.guard import Guard

__all__ = ["main"]

_PATIENCE = 5.0  # seconds for interrupted workers to end without a signal


def main(arguments: list[str] | None = None, world_size: int | None = None) -> int:
    """Run the script that `arguments` (by default the command line's) begin with; the first failure's exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    world_size = world_size or max(1, torch.cuda.device_count())
    guard, workers = Guard(), []  # the guard ends the workers when this process ends, however that comes
    environment = {**os.environ, **guard.environment}
    with contextlib.ExitStack() as files:
        files.callback(guard.join)
        for rank in range(world_size):
            command = [sys.executable, "-m", "amp_patch", "run", *arguments]
            for option, value in (("--world-size", world_size), ("--rank", rank)):
                command = _with_option(command, option, str(value))
            output = None if rank == 0 else files.enter_context(open(f"GPU_{rank}.log", "w"))
            workers.append(subprocess.Popen(command, stdout=output, env=environment))
            guard.watch(workers[-1].pid)
        try:
            codes = [worker.wait() for worker in workers]
        except KeyboardInterrupt:  # the terminal has sent it to the workers too
            until = time.monotonic() + _PATIENCE
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, until - time.monotonic()))
            raise
        guard.release()
        return next((code for code in codes if code), 0)


def _with_option(command: list[str], option: str, value: str) -> list[str]:
    if option not in command:
        return [*command, option, value]
    place = command.index(option) + 1
    return [*command[:place], value, *command[place + 1 :]]


if __name__ == "__main__":
    sys.exit(main())
