"""A script in a folder of its own, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paths import ROOT
from python_forks import python

# `python -m amp_patch run` for each of the lists of arguments and variables that come on stdin, in a process each. They
# are forked from one that has imported torch and its compiler, which takes most of their time.
DRIVER = """
import gc, json, os, sys
import torch._dynamo
from amp_patch.__main__ import main

gc.freeze()  # as each process ends, its last collection looks at all that was imported here

results = []
for arguments, variables in json.load(sys.stdin):
    if os.fork() == 0:
        for number, name in (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.path[0] = os.getcwd()
        os.environ.update(variables)
        main(["run", *arguments])
        sys.exit()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    results.append([open("stdout").read(), open("stderr").read(), code])
print(json.dumps(results))
"""


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
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=folder, env=env, input=json.dumps(cases), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def start_script(folder: Path, script: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python [command] train.py` in `folder`, train.py being `script`, in `environment(**variables)`."""
    (folder / "train.py").write_text(script)
    return python(*command, "train.py", cwd=folder, env=environment(**variables))
