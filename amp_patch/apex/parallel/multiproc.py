"""Apex's launcher of 2018, which starts one process of a script for each GPU (one process without a GPU)::

    python -m amp_patch run -m apex.parallel.multiproc train.py --its --arguments

Each process gets the arguments `--world-size` and `--rank`. The output of all but the first goes to `GPU_<rank>.log`.
New scripts should use `torchrun`.
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
    """Run the script that `arguments` (by default the command line's) begin with.

    Returns:
        The first exit status that is not 0, in the order of the ranks; 0 if there is none.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    world_size = world_size or max(1, torch.cuda.device_count())
    guard, workers = Guard(), []  # if this process ends first, by any signal, the guard ends the workers
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
        except KeyboardInterrupt:  # the terminal has also interrupted the workers
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
