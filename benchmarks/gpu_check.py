"""Check amp_patch on a machine with a GPU: build with CUDA, run the tests, time kernels and steps, store the figures.

    python benchmarks/gpu_check.py [--only look,kernels,...] [--out PATH]
    make gpu-check [ONLY=build,look,first,offload,wide,new] [OUT=figures.json]

If a command may take at most ten minutes, run the check in three parts: ONLY=build,look,first,offload,wide,new has what
no GPU has run; then ONLY=compare,tests,formats and ONLY=kernels,step,capture. The build runs first if it is named, or
if the extension is missing or does not match the sources. So the other parts do not build again, even on another
machine to which the build was copied.

First the script prints which requirements the machine has and lacks. A stage whose requirement is missing is left out,
by name. Each stage has a time limit: a stage that exceeds it is killed, and the next one begins. After each stage two
files are written: the figures, by default into benchmarks/results/<GPU>.json, and all output, into <GPU>-logs.tar.gz
next to it. Results of stages that were not run stay in both. At the end the script prints a table of the stages and
goals, the first failures, and the warnings, in less than 10,000 characters. The exit status is non-zero if a stage
failed or was left out, but not if a goal was missed. Everything runs in the Python that runs this script; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_preflight import preflight, to_bring

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "gpu-check.built"  # the fingerprint of the last build by the build stage
TAIL = 20  # last lines of output of a failed command, stored with the figures
# Limits of the final report, which keep it below 10,000 characters: width of a line, failures, warnings.
WIDTH, FAILURES, WARNINGS = 180, 20, 8

GRAPHS = "tests/around/test_cuda_graphs.py"
SCRIPT = ("examples/legacy/language_model.py", "--", "--steps", "30")  # unedited, and with an LSTM
HAS_CUDA = "import sys; from amp_patch import _C; sys.exit('cuda' not in _C.devices and 'built without CUDA')"


class Stage(NamedTuple):
    limit: float  # seconds
    commands: dict[str, list[str]]  # name of the figures -> arguments of this Python
    writes_json: bool = True  # each command takes --json PATH


def step(dtype: str, batch: int = 8) -> list[str]:
    rivals = ["fp32", "autocast", "autocast+scaler", "O1", "O2", "O2 foreach"]
    if batch > 8:  # a size at which the device is the limit, not the host
        rivals = ["autocast+scaler", "O1", "O2"]
    what = ["--dtype", dtype, "--size", "100m", "--models", "gpt", "--batches", str(batch), "--repeats", "11"]
    return ["benchmarks/step.py", "--device", "cuda", *what, "--rivals", *rivals]


def cases_on_a_gpu(name: str, limit: int) -> list[str]:
    """Return the command for the cases with a GPU of a list of tests in this folder."""
    return ["benchmarks/gpu_tests.py", "--cuda", "--limit", str(limit), "--list", f"benchmarks/gpu_{name}_tests.txt"]


STAGES = {
    "build": Stage(
        180,
        {
            "extension": ["setup.py", "build_ext", "--inplace"],
            "devices": ["-c", HAS_CUDA],
            "info": ["-m", "amp_patch", "info"],
        },
        writes_json=False,
    ),
    # What no GPU has run, what tells most first. A stage each, because results are written after a stage.
    "look": Stage(60, {"look": ["benchmarks/first_look.py", "--device", "cuda"]}),
    "first": Stage(70, {"counts": cases_on_a_gpu("first", 60)}),
    "offload": Stage(40, {"offload": ["benchmarks/offload.py", "--device", "cuda", "--size", "100m"]}),
    "wide": Stage(60, {"fp16": step("fp16", 32), "bf16": step("bf16", 32)}),
    "new": Stage(
        100,
        {
            "counts": cases_on_a_gpu("new", 60),
            "loss": ["benchmarks/loss.py", "--device", "cuda", "--repeats", "5"],
            "saved": ["benchmarks/saved_activations.py", "--device", "cuda", "--repeats", "3"],
        },
    ),
    "compare": Stage(
        60,
        {"quick": ["-m", "amp_patch", "compare", "--quick", "--dtype=float16", "--out=out/gpu-check/compare", *SCRIPT]},
        writes_json=False,
    ),
    "tests": Stage(170, {"counts": ["benchmarks/gpu_tests.py", "--limit", "160", "--except", GRAPHS]}),
    "kernels": Stage(
        100,
        {
            "kernels": ["benchmarks/kernels.py", "--device", "cuda", "--elements", str(2**28)],  # 1 GB in FP32
            "launches": ["benchmarks/launches.py"],
        },
    ),
    "step": Stage(
        150,
        {
            "fp16": step("fp16"),
            "bf16": step("bf16"),
            "optimizer": ["benchmarks/optimizer.py", "--device", "cuda", "--repeats", "7", "--only", "gpt AdamW"],
        },
    ),
    "capture": Stage(70, {"counts": ["benchmarks/gpu_tests.py", "--by-test", "--limit", "65", GRAPHS]}),
    "formats": Stage(30, {"formats": ["benchmarks/low_bit.py", "--device", "cuda"]}),
}

# The parts of a check if a command may take at most ten minutes: each takes less than 540 s, with the build.
PARTS = (
    ("build", "look", "first", "offload", "wide", "new"),
    ("compare", "tests", "formats"),
    ("kernels", "step", "capture"),
)

# Requirement of preflight() -> the stages that need it. All stages need a requirement that is not listed.
NEEDED_BY = {
    **dict.fromkeys(("setuptools", "ninja", "pybind11", "compiler", "nvcc", "Python.h"), ("build",)),
    "pytest": ("first", "new", "tests", "capture"),
}

Figure = tuple[float, str]  # value, and the row that it comes from


class Goal(NamedTuple):
    stage: str
    text: str
    most: bool  # whether `bound` is an upper bound; else it is a lower one
    bound: float
    figure: Callable[[Mapping[str, Any]], Figure | None]  # returns the worst figure among a stage's results

    def met(self, value: float) -> bool:
        return value <= self.bound if self.most else value >= self.bound


def kernel_figure(kind: str, column: str, worst: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Figure | None]:
    def figure(results: Mapping[str, Any]) -> Figure | None:
        rows = [row for row in results.get("kernels", {}).get("rows", ()) if row["tensors"] == kind]
        figures = [(row[column], f"{row['kernel']} {row['dtype']}") for row in rows if row[column] is not None]
        return worst(figures, default=None)

    return figure


def step_figure(rivals: tuple[str, ...], column: str) -> Callable[[Mapping[str, Any]], Figure | None]:
    def figure(results: Mapping[str, Any]) -> Figure | None:
        rows = [(row, dtype) for dtype in ("fp16", "bf16") for row in results.get(dtype, {}).get("rows", ())]
        rows = [(row, dtype) for row, dtype in rows if row["rival"] in rivals and row[column] is not None]
        return max(((row[column], f"{row['rival']} {dtype}") for row, dtype in rows), default=None)

    return figure


GOALS = [
    Goal("kernels", "of a device copy's speed, 1 GB", False, 0.9, kernel_figure("one", "of copy", min)),
    Goal("kernels", "of torch's foreach, 4,000 tensors", True, 0.6, kernel_figure("4,000 of 256", "of torch", max)),
    Goal("wide", "O2 at batch 32, of autocast + GradScaler", True, 0.9, step_figure(("O2",), "ratio")),
    Goal("step", "O1, of autocast + GradScaler", True, 1.0, step_figure(("O1",), "ratio")),
    Goal("step", "O2, of autocast + GradScaler", True, 0.9, step_figure(("O2",), "ratio")),
    Goal("step", "syncs a step, AdamW(fused=True)", True, 0, step_figure(("O1", "O2"), "syncs")),
    Goal("step", "syncs a step, AdamW(foreach=True)", True, 1, step_figure(("O2 foreach",), "syncs")),
]


def environment() -> dict[str, str]:
    """Return the environment of the stages.

    The sources come before an installed amp_patch, and the programs of this Python (ninja) are on PATH.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PATH": os.pathsep.join(path for path in programs if path),
        "AMP_PATCH_REQUIRE_EXT": "1",
        "PYTHONUNBUFFERED": "1",
        "KINETO_LOG_LEVEL": "99",  # without this, torch's profiler logs each of its starts and stops
    }


def fingerprint() -> str:
    """Return a digest of the contents of the extension and its sources; "" if there is no extension.

    Times of files would not do: sources that are copied to a machine again are newer than the extension.
    """
    built = sorted((ROOT / "amp_patch").glob("_C.*"))
    sources = [ROOT / "setup.py", *sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    digest = hashlib.sha256()
    for path in [*sources, *built]:
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest() if built else ""


def is_built() -> bool:
    """Return whether the build stage has built these sources, and this Python loads the extension with CUDA."""
    if not BUILT.exists() or BUILT.read_text() != fingerprint():
        return False
    asked = subprocess.run([sys.executable, "-c", HAS_CUDA], cwd=ROOT, env=environment(), capture_output=True)
    return asked.returncode == 0


def note_build() -> None:
    BUILT.parent.mkdir(exist_ok=True)
    BUILT.write_text(fingerprint())


def plan(asked: list[str], lacking: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the stages to run, in order, and for each stage that is left out the missing requirements.

    If the asked stages need a build that does not exist, the build stage is added in front.

    Args:
        asked: names of stages, in order.
        lacking: the requirements that preflight() did not find.
    """
    left_out = {name: [w for w in lacking if name in NEEDED_BY.get(w, STAGES)] for name in STAGES}
    stages = asked
    if not (all(left_out[name] for name in asked) or is_built()):
        stages = ["build", *(name for name in asked if name != "build")]
        if left_out["build"]:  # all other stages need the build
            left_out = {name: left_out["build"] + left_out[name] for name in STAGES}
    return [n for n in stages if not left_out[n]], {n: list(dict.fromkeys(left_out[n])) for n in stages if left_out[n]}


def run(arguments: list[str], limit: float, log: Path) -> tuple[str, list[str]]:
    """Run this Python with the arguments. Return the reason for a failure ("" without one), and its last lines.

    Its output is printed, and written into `log`.
    """
    print(f"\n=== python {' '.join(arguments)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment() | {"AMP_PATCH_GPU_LOGS": str(log.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    tail: collections.deque[str] = collections.deque(maxlen=TAIL)

    def show() -> None:
        with process.stdout as lines, log.open("w") as file:
            for text in lines:
                print(text, end="", flush=True)
                file.write(text)
                file.flush()
                tail.append(text.rstrip())

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        status = process.wait(max(limit, 0.0))
        why = f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        why = "killed"
    finally:  # also after an interrupt of this process: kill the command and all processes of its group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shower.join(5)  # a process that has left the group may hold the pipe open
    return why, list(tail)


def run_stage(name: str, stage: Stage, logs: Path) -> dict[str, Any]:
    """Run the commands of a stage. Return "passed", "why", "seconds", and the figures that each command has written.

    A command that failed or was killed may have written figures too. The output of the commands is written into the
    folder `logs`/`name`, a file for each command.
    """
    start = time.monotonic()
    shutil.rmtree(logs / name, ignore_errors=True)
    (logs / name).mkdir(parents=True)
    result: dict[str, Any] = {"passed": True, "why": "", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for figures, arguments in stage.commands.items():
            path = Path(folder) / f"{figures}.json"
            target = ["--json", str(path)] if stage.writes_json else []
            left = start + stage.limit - time.monotonic()
            why, tail = run([*arguments, *target], left, logs / name / f"{figures}.log")
            if path.exists():
                result[figures] = json.loads(path.read_text())
            if why == "killed":
                why = f"killed after {stage.limit:g} s"
            if why:
                result |= {"passed": False, "why": result["why"] or f"{figures}: {why}"}
                result.setdefault("tails", {})[figures] = tail
            if why.startswith("killed"):
                break
    return result | {"seconds": round(time.monotonic() - start, 1)}


def keep(out: Path, stages: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Write the stages' results into the file `out`, and return all of its results. Those of other stages stay."""
    kept = json.loads(out.read_text()).get("stages", {}) if out.exists() else {}
    about = {"torch": machine["torch"], "cuda": machine["cuda"], "day": datetime.date.today().isoformat()}
    kept |= {name: about | result for name, result in stages.items()}
    gpu = {name: machine[name] for name in ("gpu", "compute_capability", "gigabytes")}
    ordered = {name: kept[name] for name in STAGES if name in kept}
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(out) as written:
        written.write_text(json.dumps({**gpu, "stages": ordered}, indent=1) + "\n")
    return ordered


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a new file to write, which replaces `path` at the end of the body, but not after an error.

    So `path` is complete even if the process is stopped at any time.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def unpack(archive: Path, logs: Path) -> None:
    """Unpack the logs of earlier stages into the folder `logs`."""
    if archive.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(logs, filter="data")


def pack(logs: Path, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(archive) as written, tarfile.open(written, "w:gz") as packed:
        for folder in sorted(logs.iterdir()):
            packed.add(folder, folder.name)


def table(stages: Mapping[str, Any], left_out: Mapping[str, list[str]]) -> list[str]:
    """Return a line for each stage that was run, followed by its goals, and last a line for each that was left out."""
    lines = [f"{'stage':<9}{'s':>6}  result"]
    for name, result in stages.items():
        text = "passed" if result["passed"] else result["why"]
        if counts := result.get("counts"):
            text += f" ({counts['passed']} passed, {counts['failed']} failed)"
        lines.append(f"{name:<9}{result['seconds']:>6.0f}  {text}")
        for goal in (goal for goal in GOALS if goal.stage == name):
            wanted = f"{'<=' if goal.most else '>='} {goal.bound:.2f}"
            value = goal.figure(result)
            said = f"{value[0]:.2f} {'met' if goal.met(value[0]) else 'MISSED'} ({value[1]})" if value else "no figure"
            lines.append(f"{'':<17}{goal.text:<42}{wanted:<9}{said}")
    return lines + [f"{name:<15}  left out; missing: {', '.join(missing)}" for name, missing in left_out.items()]


def failures(stages: Mapping[str, Any]) -> list[str]:
    """Return a line for each failed test. For a command that failed without one, return its last line of output."""
    lines = []
    for name, result in stages.items():
        counts = result.get("counts", {})
        lines += [f"FAILED {test}: {why}" for test, why in counts.get("failures", {}).items()]
        if not_run := counts.get("not_run"):
            lines.append(f"{name}: no time was left for {len(not_run)}: {' '.join(not_run)}")
        for figures, tail in result.get("tails", {}).items():
            if not counts.get("failures") and not counts.get("not_run"):
                lines.append(f"{name}, {figures}: {next((line for line in reversed(tail) if line.strip()), 'no word')}")
    return lines


def warned(stages: Mapping[str, Any]) -> list[str]:
    """Return a line for each warning of the tests."""
    given = [item for result in stages.values() for item in result.get("counts", {}).get("warnings", {}).items()]
    return [f"warned in {each['tests']} tests, first {each['first']}: {why}" for why, each in given]


def report(stages: Mapping[str, Any], left_out: Mapping[str, list[str]]) -> list[str]:
    """Return the lines of the final report."""
    lines = table(stages, left_out)
    for what, found, most in (("failures", failures(stages), FAILURES), ("warnings", warned(stages), WARNINGS)):
        if found:
            first = f", the first {most}" if len(found) > most else ""
            lines += ["", f"{len(found)} {what}{first}:", *found[:most]]
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]


def names(text: str) -> list[str]:
    """Parse --only into names of stages, in the order in which they run."""
    asked = text.split(",")
    if unknown := [name for name in asked if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(STAGES)}")
    return [name for name in STAGES if name in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=list(STAGES), metavar="STAGES", help=f"of {','.join(STAGES)}")
    parser.add_argument("--out", type=Path, help="file, or folder of <GPU>.json; default: benchmarks/results")
    options = parser.parse_args()
    os.environ["PATH"] = environment()["PATH"]
    findings, machine = preflight()
    print("gpu-check: this machine has", *findings, *to_bring(findings), sep="\n", flush=True)
    stages, left_out = plan(options.only, [finding.what for finding in findings if not finding.there])
    if not stages:
        missing = dict.fromkeys(what for lacks in left_out.values() for what in lacks)
        sys.exit(f"gpu-check: nothing was run; missing: {', '.join(missing)}")
    print(f"gpu-check: {', '.join(stages)}: {sum(STAGES[name].limit for name in stages):g} s at most", flush=True)

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ".".join(map(str, machine["compute_capability"])))
    slug = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    out = options.out or ROOT / "benchmarks" / "results" / f"{slug}.json"
    if out.is_dir():
        out = out / f"{slug}.json"
    archive = out.with_name(f"{out.stem}-logs.tar.gz")
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        unpack(archive, logs)
        for name in stages:
            try:
                done[name] = run_stage(name, STAGES[name], logs)
            finally:  # also if this process is stopped
                pack(logs, archive)
            keep(out, done, machine)
            if name == "build" and done[name]["passed"]:
                note_build()
    print("", *report(done, left_out), sep="\n")
    print(f"gpu-check on {machine['gpu']}: the figures are in {out}, the logs in {archive}", flush=True)
    failed = [name for name, result in done.items() if not result["passed"]]
    if said := [f"{what}: {', '.join(names)}" for what, names in (("failed", failed), ("left out", left_out)) if names]:
        sys.exit(f"gpu-check: {'; '.join(said)}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu-check: stopped"))  # an exit stops the stage too
    main()
