"""Scripts in new folders, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from paths import ROOT
from python_forks import python


def environment(**variables: str) -> dict[str, str]:
    """That of a script which finds this amp_patch: one thread, and of our variables those that are given."""
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


def start_script(folder: Path, script: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python [command] train.py` in `folder`, train.py being `script`, in `environment(**variables)`."""
    (folder / "train.py").write_text(script)
    return python(*command, "train.py", cwd=folder, env=environment(**variables))
