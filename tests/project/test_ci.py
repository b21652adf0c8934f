""".ci/run, with a `make` that only records its stage and folder: it runs in the checkout, whatever its name."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from paths import ROOT

STAGES = ["lint", "cuda-compile", "sanitize", "test", "test-more"]


@pytest.mark.parametrize("failing", ["", "test"])
def test_stages_run_in_the_checkout_until_one_fails(failing, tmp_path):
    checkout, stubs, log = tmp_path / "a folder with spaces", tmp_path / "stubs", tmp_path / "log"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    stubs.mkdir()
    for name, script in (("make", f'echo "$1|$(pwd)" >>{log}\n[ "$1" != "{failing}" ]'), ("chromium", "")):
        (stubs / name).write_text(f"#!/bin/sh\n{script}\n")
        (stubs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([str(checkout / ".ci" / "run")], env=environment, capture_output=True, text=True, cwd="/")
    wanted = STAGES[: STAGES.index(failing) + 1] if failing else STAGES
    assert (done.returncode != 0) is bool(failing) and not done.stderr
    assert [line.split("|") for line in log.read_text().splitlines()] == [[stage, str(checkout)] for stage in wanted]
