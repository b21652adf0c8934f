"""Processes of one torch.distributed group, started once, in which many tests run their functions.

A hang or a death in one of them fails the test that caused it, by name, and the next test has new processes. Each is
a fork of a server that has imported torch, which takes a few hundredths of a second.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Imported once, by the server. torch._dynamo is what torch's optimizers import when the first of them is made.
_PRELOAD = ["pytest", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"]
_GRACE = 2.0  # seconds that the others have left when one rank has failed


class RankError(AssertionError):
    """A rank raised, died or hung. `results` has what the others returned, and None for each rank that failed."""

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(message)
        self.results = results


class Ranks:
    """Call it with a function of a test module: every rank runs it; returns the results, in the order of the ranks.

    ::

        def total(start):  # at the top of the module
            value = torch.tensor(start + dist.get_rank())
            dist.all_reduce(value)
            return value

        def test_total(ranks):
            assert ranks(total, 10) == [torch.tensor(21), torch.tensor(21)]

    The default group is of `backend`. Arguments and results are pickled, tensors by value. In the ranks warnings are
    errors, torch has one thread, and `amp.restore()` runs after every call. Start it late: nothing runs before the
    first call. A context manager; leaving it ends the processes.
    """

    def __init__(self, size: int = 2, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank. RankError if one raises, dies, or is not done in `timeout`."""
        if not self._workers:
            self._start()
        job = pickle.dumps((function, args, kwargs))
        for _, pipe in self._workers:
            pipe.send_bytes(job)
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        results: list[Any] = [None] * self.size
        failures: dict[int, str] = {}
        waiting, deadline = set(ranks), time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                waiting.discard(pipe)
                rank = ranks[pipe]
                try:
                    failed, results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join()
                    failed, results[rank] = True, f"died, exit code {process.exitcode}"
                if failed:
                    failures[rank], results[rank] = results[rank], None
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for pipe in waiting:
            failures[ranks[pipe]] = f"not done after {timeout:g} s" if len(waiting) == len(ranks) else "still waiting"
        if failures:
            self._stop()
            told = "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            raise RankError(f"{function.__name__}{args}:\n{told}", results)
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._started += 1
        store = os.path.join(self._folder.name, f"store{self._started}")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, self.backend, store), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _stop(self) -> None:
        for _, pipe in self._workers:
            pipe.close()  # ends a rank that waits for a job
        for process, _ in self._workers:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()


def _serve(pipe: Connection, rank: int, size: int, backend: str, store: str) -> None:
    """A rank's life. It ends with _exit: gloo's threads sometimes abort a process that has done all its work."""
    status = 1
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        import torch
        import torch.distributed as dist

        gc.freeze()  # imported modules are no garbage, and looking at all of it takes longer than a test
        torch.set_num_threads(1)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
        )
        _serve_jobs(pipe)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve_jobs(pipe: Connection) -> None:
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args, kwargs = pickle.loads(job)
            with _search_for(function), warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # by torch 2.8's own checkpoints
                answer = False, function(*args, **kwargs)
            sent = pickle.dumps(answer)
        except BaseException:
            sent = pickle.dumps((True, traceback.format_exc()))
        finally:
            _tidy()
        pipe.send_bytes(sent)


def _search_for(function: Callable[..., Any]) -> AbstractContextManager[None]:
    from searched import search_for

    return search_for(Path(inspect.getfile(function)))


def _tidy() -> None:
    from amp_patch import amp

    amp.restore()
    gc.collect()
