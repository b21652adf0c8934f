""".ci/run, with a `make` that only records its working directory: stages run in a folder of the package's name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import ROOT

STAGES = ["lint", "cuda-compile", "sanitize", "test", "test-more"]


class Ran(NamedTuple):
    """What a run of .ci/run did: its exit status, its last line, and (stage, folder, files in there) of each stage."""

    status: int
    last: str
    stages: list[tuple[str, Path, set[str]]]


def run_in(checkout: Path, failing: str = "") -> Ran:
    """Run .ci/run in `checkout` with stubs of `make`, which fails at the stage `failing`, and of `chromium`."""
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    for name in ("amp_patch/casts/deep.py", "amp_patch/_C.so", "amp_patch/_build.py", "Makefile", ".gitignore"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    for name in (".venv/bin/python", "out/old.json", "build/old.o", ".git/HEAD", "tests/out/kept.py"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).touch()
    stubs, log, temporary = (checkout.parent / name for name in ("stubs", "log", "temporary"))
    stubs.mkdir()
    temporary.mkdir()
    (stubs / "make").write_text(
        f'#!/bin/sh\necho "$1|$(pwd)|$(echo $(find . -type f))" >>{log}\necho "ran $1"\n[ "$1" != "{failing}" ]\n'
    )
    (stubs / "chromium").write_text("#!/bin/sh\n")
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(temporary)}
    done = subprocess.run([str(checkout / ".ci" / "run")], env=environment, capture_output=True, text=True, cwd="/")
    assert not done.stderr and not any(temporary.iterdir()), "the copy is removed, and nothing is said of it"
    lines = [line.split("|") for line in log.read_text().splitlines()]
    stages = [(stage, Path(folder), set(found.split())) for stage, folder, found in lines]
    return Ran(done.returncode, done.stdout.splitlines()[-1], stages)


@pytest.mark.parametrize("name", ["checkout", "amp_patch_2", "a folder with spaces"])
def test_a_checkout_of_another_name_is_checked_in_a_folder_called_amp_patch(name, tmp_path):
    ran = run_in(tmp_path / name)
    assert (ran.status, ran.last) == (0, "ran test-more") and [stage for stage, *_ in ran.stages] == STAGES
    assert len({folder for _, folder, _ in ran.stages}) == 1
    _, folder, found = ran.stages[0]
    assert folder.name == "amp_patch" and folder.parent.parent == tmp_path / "temporary"
    sources = {"./amp_patch/casts/deep.py", "./Makefile", "./.gitignore", "./.ci/run", "./tests/out/kept.py"}
    assert found == sources, "sources alone: what was built belongs to the other folder"


def test_a_checkout_called_amp_patch_is_checked_in_place(tmp_path):
    ran = run_in(tmp_path / "amp_patch")
    assert (ran.status, ran.last) == (0, "ran test-more") and [stage for stage, *_ in ran.stages] == STAGES
    assert {folder for _, folder, _ in ran.stages} == {tmp_path / "amp_patch"}
    assert "./.venv/bin/python" in ran.stages[0][2]


@pytest.mark.parametrize("name", ["amp_patch", "checkout"])
def test_a_stage_that_fails_ends_the_run_and_fails_it(name, tmp_path):
    ran = run_in(tmp_path / name, failing="test")
    assert ran.status != 0 and [stage for stage, *_ in ran.stages] == STAGES[:4] and ran.last == "ran test"


@pytest.mark.skipif(shutil.which("ruff", path=Path(sys.executable).parent) is None, reason="needs ruff")
def test_ruff_ignores_generated_files_in_a_folder_without_git(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("amp_patch/_build.py", "out/sanitize/setup.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("import os\n")
    command = [str(Path(sys.executable).parent / "ruff"), "check", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
