"""guard.py: watched processes end when their parent ends in any way, and go on after `release`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from scripts import lives, wait_until

from amp_patch.comparison.commands import guard
from amp_patch.comparison.commands.guard import Guard

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no process groups")

# The lines printed are the numbers of the processes, the guard's first.
# Signals are reset, as nohup and shells in the background leave SIGHUP and SIGINT ignored for all that they start.
OWNER = """
import importlib.util, os, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
spec = importlib.util.spec_from_file_location("guard", sys.argv[1])
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
mine = guard.Guard()
print(mine._process.pid, flush=True)
code = sys.argv[2]
environment = {**os.environ, **mine.environment}
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], env=environment, start_new_session=True)
mine.watch(-child.pid)
if "released" in sys.argv:
    mine.release()
time.sleep(600)
"""

# One that ignores SIGTERM, a child in its group, and one without a parent in a session of its own.
CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() and os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The owner, and its guard and what is watched: their numbers."""
    command = [sys.executable, "-I", "-S", "-c", OWNER, guard.__file__, CHILD, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        pids = [int(owner.stdout.readline()) for _ in range(4)]
        try:
            yield owner, pids
        finally:
            for pid in (owner.pid, *pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="nothing tells of processes outside of the group")
def test_watched_processes_end_with_their_owner_however_it_ends():
    """At once, because each guard waits two seconds for the child that ignores SIGTERM."""
    with ExitStack() as stack:
        left = {}
        for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            owner, left[how] = stack.enter_context(started())
            owner.send_signal(how)
        wait_until(lambda: not any(lives(pid) for pids in left.values() for pid in pids))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="nothing tells of processes outside of the group")
def test_a_scheduler_may_send_its_signal_to_all_of_them():
    with started() as (owner, pids):
        for pid in (*pids, owner.pid):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(map(lives, pids)))


def test_released_processes_continue():
    with started("released") as (owner, pids):
        wait_until(lambda: sum(map(lives, pids)) == 3)
        owner.kill()
        owner.wait()
        assert sum(map(lives, pids)) == 3


def test_who_ends_the_guard_first_ends_nothing_else():
    with started() as (owner, pids):
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: not lives(pids[0]))
        assert owner.poll() is None and sum(map(lives, pids)) == 3


def test_join_waits_until_all_has_ended():
    mine = Guard()
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={**os.environ, **mine.environment}) as child:
        mine.watch(child.pid)
        mine.end()
        assert child.wait(60) == -signal.SIGTERM
        mine.join()
        mine.watch(1)  # too late to be heard
        mine.release()
