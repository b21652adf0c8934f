"""Run tests in several pytest processes at once, without pytest plugins. `make gpu-check` runs those with CUDA cases.

    python benchmarks/gpu_tests.py [--processes N] [--limit S] [--test-limit S] [--by-test] [--cuda] [--list PATH]
        [--json PATH] [FILE...]

Each process has a list of files, or of tests with --by-test, the longest first. It writes a note when a test begins and
ends. If a process crashes, hangs or is stopped, its notes name the test, and a new process continues after the entry of
the list that has this test. If no FILE is given, the files are those with a case of the device "cuda" among the
collected tests, and those that name DEVICES of conftest.py. The output of the processes is in out/gpu-check/, or in the
log folder of gpu_check.py.

Warnings fail no test here. Warnings of the CPU's cases fail in `make test` already, so the others come from the GPU.
Each warning is reported once, with the number of tests that gave it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOGS = Path(os.environ.get("AMP_PATCH_GPU_LOGS") or ROOT / "out" / "gpu-check")
NOTES = "AMP_PATCH_TEST_NOTES"  # environment variable of a process: the file of its notes
# torch is imported before pytest turns warnings into errors, because packages that torch imports give warnings.
PYTEST = ["-c", "import sys, torch, pytest; sys.exit(pytest.main())", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
PYTEST += ["--continue-on-collection-errors"]
ENDED = (0, 1, 5)  # exit statuses of a pytest that ran to its end; 5 means that there was no test


# --- in a process of pytest, which loads this file as a plugin ---


def pytest_configure(config: Any) -> None:
    """Make pytest record the warnings that pyproject.toml turns into errors. Ignored warnings stay ignored."""
    filters = config.getini("filterwarnings")  # the list that pytest itself reads
    filters[:] = ["default" if line == "error" else line for line in filters]


def pytest_warning_recorded(warning_message: Any, nodeid: str) -> None:
    lines = str(warning_message.message).strip().splitlines()
    place = f"{Path(warning_message.filename).name}, line {warning_message.lineno}"
    said = f"{warning_message.category.__name__}: {(lines or [''])[0][:300]} ({place})"
    note(test=nodeid or "collection", outcome="warned", why=said)


def note(**what: Any) -> None:
    with open(os.environ[NOTES], "a") as notes:
        notes.write(json.dumps(what) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    note(test=nodeid, outcome="began")


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed or report.skipped or report.when == "call":
        note(test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=reason(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    note(test=nodeid, outcome="ended")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        note(test=report.nodeid, outcome="failed", why=reason(report))
        note(test=report.nodeid, outcome="ended")


def reason(report: Any) -> str:
    """Return the reason of a failure in one line; "" if the test did not fail."""
    if not report.failed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return (lines[0] if crash else lines[-1])[:300] if lines else ""


# --- in the process that starts them ---


def has_cuda(test: str) -> bool:
    """Tell whether the name of a test, or of its file, has "cuda" as a word: test_cuda.py, f[cuda], f[O2-cuda-adam]."""
    return "cuda" in re.split(r"[^a-z0-9]+", f"{test.partition('::')[0]} {test.partition('[')[2]}")


def with_cuda_cases(tests: Path, collected: Iterable[str]) -> list[str]:
    """Return the test files in the folder `tests` with cases for a GPU, as paths from the repository's root.

    These are the files of the `collected` tests with "cuda" among their parameters. (Many have the device from a
    fixture of tests/helpers.) Files that name DEVICES come too: a test may take its device in its body.
    """
    named = [path for path in tests.rglob("test_*.py") if re.search(r"\bDEVICES\b", path.read_text())]
    files = {test.partition("::")[0] for test in collected if has_cuda(test)}
    return sorted(files | {str(path.relative_to(ROOT)) for path in named})


def listed(path: Path) -> list[str]:
    """Return the names in a file of --list."""
    return [name for line in path.read_text().splitlines() if (name := line.partition("#")[0].strip())]


def shared(weights: dict[str, float], count: int) -> list[list[str]]:
    """Distribute the names to at most `count` lists of about the same weight, each with the heaviest name first."""
    lists: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        lightest = loads.index(min(loads))
        lists[lightest].append(name)
        loads[lightest] += weights[name]
    return [names for names in lists if names]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a pytest process, which finds amp_patch and this plugin, and loads no other plugin."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **plain, **more}


def tests_of(files: Sequence[str], *options: str) -> list[str]:
    """Return the names of the tests in the files, as arguments for pytest. `options` are more arguments."""
    command = [sys.executable, *PYTEST, "--collect-only", *options, *files]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if run.returncode not in ENDED:
        raise SystemExit(f"pytest could not collect {' '.join(files)}:\n{run.stdout[-4000:]}{run.stderr[-4000:]}")
    return [line for line in run.stdout.splitlines() if "::" in line and (ROOT / line.partition("::")[0]).is_file()]


def notes_in(path: Path) -> list[dict[str, Any]]:
    """Return the notes of a process. A line that a crash has cut off is skipped."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def unended(notes: Iterable[dict[str, Any]]) -> str | None:
    """Return the test that was running when its process ended; None if there was none."""
    running = None
    for entry in notes:
        running = {"began": entry["test"], "ended": None}.get(entry["outcome"], running)
    return running


def run_all(names: Sequence[str], label: str, ends: float, test_limit: float) -> list[dict[str, Any]]:
    """Run all tests of `names`, and return their notes. After a crash, a new pytest process runs the rest.

    Args:
        ends: the time (`time.monotonic()`) at which a running process is stopped.
        test_limit: the seconds after which a test is stopped, with its process.
    """
    left, everything, attempt = list(names), [], 0
    while left and time.monotonic() < ends:
        path = LOGS / f"{label}-{attempt}.notes"
        path.unlink(missing_ok=True)
        path.touch()
        why = run_one(left, path, ends, test_limit)
        notes = notes_in(path)
        everything += notes
        if not why:
            return everything
        test = unended(notes)
        if test is None:
            why = ": ".join([why, *path.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:]])
        dead = test or f"process {label}"
        everything.append({"test": dead, "outcome": "failed", "why": why})
        everything.append({"test": dead, "outcome": "ended"})
        if test is None:  # the process ended before its first test or after its last: a new one would end likewise
            begun = {part for entry in notes for part in (entry["test"], entry["test"].partition("::")[0])}
            left = [name for name in left if name not in begun]
            break
        own = (i for i, name in enumerate(left) if test == name or test.startswith(f"{name}::"))
        left = left[next(own, len(left)) + 1 :]
        attempt += 1
    return everything + [{"test": name, "outcome": "not run"} for name in left]


def run_one(names: Sequence[str], path: Path, ends: float, test_limit: float) -> str:
    """Run one pytest process, which writes its notes into `path`. Return what stopped it; "" if it ran to its end."""
    timeout = ["-o", f"faulthandler_timeout={max(test_limit - 5, 1)}"]  # prints the stack of a test that hangs
    command = [sys.executable, *PYTEST, "-p", "gpu_tests", *timeout, *names]
    with path.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(**{NOTES: str(path)}), stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() > ends:
                    return "stopped: the time for all tests is over"
                if time.time() - path.stat().st_mtime > test_limit:
                    return f"stopped after {test_limit:g} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return "" if process.returncode in ENDED else f"its process ended with {process.returncode}"


def summed(notes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the notes of all processes.

    The result has the numbers of passed, failed and skipped tests; a line for each failure; for each warning the number
    of tests and the first test; the tests that were not run for lack of time; and the seconds of the slowest files.
    """
    outcomes: dict[str, str] = {}
    failures: dict[str, str] = {}
    seconds: Counter[str] = Counter()
    not_run: list[str] = []
    warned: dict[str, list[str]] = {}
    for entry in notes:
        test, outcome = entry["test"], entry["outcome"]
        if outcome == "failed":
            failures.setdefault(test, entry.get("why", ""))
        if outcome in ("passed", "failed", "skipped") and outcomes.get(test) != "failed":
            outcomes[test] = outcome  # the teardown of a test that passed may fail
        if outcome == "warned" and test not in (tests := warned.setdefault(entry["why"], [])):
            tests.append(test)
        seconds[test.partition("::")[0]] += entry.get("seconds", 0.0)
        if outcome == "not run":
            not_run.append(test)
    counts = Counter(outcomes.values())
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": failures,
        "warnings": {why: {"tests": len(tests), "first": tests[0]} for why, tests in warned.items()},
        "not_run": not_run,
        "slowest": {file: round(took, 1) for file, took in seconds.most_common(10)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=float, default=170, help="seconds for all: %(default)s")
    parser.add_argument(
        "--test-limit", type=float, default=90, help="seconds for a test, torch's import too: %(default)s"
    )
    parser.add_argument("--by-test", action="store_true", help="the tests of one file in several processes")
    parser.add_argument("--cuda", action="store_true", help="of files, only cases of the device cuda; with --by-test")
    parser.add_argument("--list", type=Path, help="a file with the name of a file or of a test in each line")
    parser.add_argument("--except", dest="left_out", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.limit
    files = [*options.files, *(listed(options.list) if options.list else ())]
    files = files or with_cuda_cases(ROOT / "tests", tests_of(["tests"]))
    files = [file for file in files if file not in options.left_out]
    if options.by_test or options.cuda:
        left = [t for t in tests_of(files) if not options.cuda or has_cuda(t) or t.partition("[")[0] in files]
        weights = dict.fromkeys(left, 1.0)
    else:
        weights = {file: float((ROOT / file).stat().st_size) for file in files}
    lists = shared(weights, options.processes)
    with ThreadPoolExecutor(max(len(lists), 1)) as pool:
        label = "by-test" if options.by_test or options.cuda else "files"
        jobs = [pool.submit(run_all, names, f"{label}-{i}", ends, options.test_limit) for i, names in enumerate(lists)]
        result = summed(entry for job in jobs for entry in job.result())
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for test, why in result["failures"].items():
        print(f"FAILED {test}: {why}")
    for why, given in result["warnings"].items():
        print(f"warned: {why}: {given['tests']} tests, first {given['first']}")
    if result["not_run"]:
        print(f"not run: {' '.join(result['not_run'])}")
    print(
        f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped, "
        f"{len(result['warnings'])} warnings"
    )
    if result["failures"] or result["not_run"] or not result["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
