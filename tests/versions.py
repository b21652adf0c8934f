"""The tests that are not slow, on each torch and Python of VERSIONS, each pair in an environment of its own.

    make test-versions                              # all of them: hours
    make test-versions ONLY="2.15.0@3.11 2.6.0@3.10"

By hand, before a release: PyPI's torch brings CUDA's libraries, some 5 GB. One environment at a time is made in
out/versions/, and removed when its tests are done. The extension is built without CUDA. Prints a row for each pair as
it ends; counts and the names of failed tests go to out/versions.json, where the pairs of earlier calls stay. Exits
non-zero if a test has failed, or a pair could not be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "out", "build", "*.so", "_build.py", "__pycache__", ".*_cache", "*.egg-info"
)

TOOLS = ("setuptools", "wheel", "pybind11", "ninja")


class Pair(NamedTuple):
    torch: str
    python: str

    def __str__(self) -> str:
        return f"{self.torch}@{self.python}"


def pair(name: str) -> Pair:
    torch, at, python = name.partition("@")
    if not (torch and at and python):
        raise argparse.ArgumentTypeError(f"{name!r} is no torch@python, as 2.15.0@3.11")
    return Pair(torch, python)


# Every torch that pyproject.toml declares, the newest first, on one Python; and every Python, on one torch.
VERSIONS = [pair(f"{torch}@3.11") for torch in ("2.15.0", "2.13.0", "2.11.0", "2.8.0", "2.6.0")]
VERSIONS += [pair(f"2.13.0@{python}") for python in ("3.10", "3.12", "3.13")]


class Failed(Exception):
    """Why a pair could not be tried, in a line."""


def run_logged(command: list[str], folder: Path, log: Path, **environment: str) -> int:
    with log.open("ab") as output:
        output.write(f"\n=== {' '.join(command)}\n".encode())
        output.flush()
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    return done.returncode


def make(which: Pair, folder: Path, log: Path) -> Path:
    """Make an environment in `folder`, with amp_patch built in a copy of the sources; return its Python."""
    interpreter = shutil.which(f"python{which.python}")
    if interpreter is None:
        raise Failed(f"there is no python{which.python} on PATH")
    shutil.copytree(ROOT, folder / "amp_patch", ignore=NOT_COPIED)
    python = folder / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    steps = {
        "no environment": [interpreter, "-m", "venv", str(folder / "venv")],
        f"pip cannot get torch {which.torch}": [*pip, *TOOLS, f"torch=={which.torch}"],
        "amp_patch could not be built": [*pip, "--no-build-isolation", "--editable", ".[examples,dev]"],
    }
    for why, command in steps.items():
        # No CUDA_HOME: the kernels for GPUs take a quarter of an hour to compile, and none is here.
        if run_logged(command, folder / "amp_patch", log, AMP_PATCH_REQUIRE_EXT="1", CUDA_HOME=os.devnull):
            raise Failed(f"{why}: see {log}")
    return python


def counts(report: Path) -> dict[str, Any]:
    """Return from pytest's XML report the counts of passed, failed and skipped tests, and the names of failed ones."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in failed]
    return {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped, "failures": names}


def try_pair(which: Pair, folder: Path, workers: int, tests: list[str]) -> dict[str, Any]:
    """Return the counts of one pair, or {"not_tried": the reason}."""
    place = folder / str(which)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log = folder / f"{which}.log"
    log.write_bytes(b"")
    try:
        python = make(which, place, log)
        report = place / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={report}"]
        parallel = ["-n", str(workers), "--dist", "loadfile"]
        run_logged(
            [str(python), "-m", "pytest", *options, *parallel, *tests], place / "amp_patch", log, OMP_NUM_THREADS="1"
        )
        if not report.exists():
            raise Failed(f"pytest did not end: see {log}")
        return counts(report)
    except Failed as error:
        return {"not_tried": str(error)}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def row(name: str, result: dict[str, Any]) -> str:
    if "not_tried" in result:
        return f"{name:<14} {result['not_tried']}"
    return f"{name:<14} {result['passed']:>6} passed {result['failed']:>5} failed {result['skipped']:>5} skipped"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", type=pair, default=VERSIONS, metavar="torch@python")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=[], help="files or folders of tests/; all unless given")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    options = parser.parse_args(arguments)
    figures = options.out / "versions.json"
    results: dict[str, Any] = json.loads(figures.read_text()) if figures.exists() else {}
    for which in options.pairs:
        results[str(which)] = try_pair(which, options.out / "versions", options.workers, options.tests)
        print(row(str(which), results[str(which)]), flush=True)
        figures.write_text(json.dumps(results, indent=1) + "\n")
    tried = [results[str(which)] for which in options.pairs]
    sys.exit(any("not_tried" in result or result["failed"] for result in tried))


if __name__ == "__main__":
    main()
