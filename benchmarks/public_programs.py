"""Run public programs unedited at each level, and write the table of docs/unedited.md.

    python benchmarks/public_programs.py                     # all; needs a network
    python benchmarks/public_programs.py --only gcn,vae      # those with such a word in their names
    python benchmarks/public_programs.py --mirror folder     # repositories from folder/owner+name/repo, no network
    python benchmarks/public_programs.py --table             # the table again, from the results of earlier runs

A program's source is fetched from its repository at a given commit into out/public_programs, and is never copied into
this repository. Data of a few hundred kilobytes are generated in its format. Packages are installed into a virtual
environment in that folder, which also has the packages of this Python. If a program cannot be fetched, or its packages
cannot be installed, it is skipped with a message.

Each level runs as a worker of `python -m amp_patch compare --steps 10`, in a fork of this process, so that
torch is imported once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from pathlib import Path

import torch
from program_list import COMMITS, PROGRAMS, Program

import amp_patch
from amp_patch.comparison.commands import compare_worker

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
LEVELS = ("O0", "O1", "O2", "O4", "O5")
RESULTS = HERE / "results" / "public_programs.json"
PAGE = ROOT / "docs" / "unedited.md"
SOURCES = (".py", ".json", ".yaml", ".jinja")  # files that are fetched from a repository; data are generated
ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "DDE_BACKEND": "pytorch",
    "TORCHDYNAMO_DISABLE": "1",  # the compilation of ten steps takes longer than they do
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",  # for tensorboard-logger, whose protocols are of an old protoc
}
REFUSED = "cannot be taken unedited"  # a part of the message of each refusal
CUT = 300  # an error is cut after this number of characters


class Skipped(Exception):
    """Reason why a program cannot be run here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="words, with commas between them, one of which is in a program's name")
    parser.add_argument("--mirror", type=Path, default=os.environ.get("PUBLIC_PROGRAMS"), help="folder of repositories")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "public_programs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one level")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if not args.table:
        within(args.out / "venv")
    words = args.only.split(",") if args.only else [""]
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for program in PROGRAMS if not args.table else ():
        if not any(word in program.label for word in words):
            continue
        try:
            became = tried(program, args)
        except Skipped as reason:
            print(f"{program.label}: skipped: {reason}", flush=True)
            continue
        results[program.label] = with_version(became, results.get(program.label))
        said = {level: words for level, words in became.items() if words}
        print(f"{program.label}: {said or 'trains at every level'}", flush=True)
        args.results.parent.mkdir(exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write(results, args.page)
    return 0


def tried(program: Program, args: argparse.Namespace) -> dict[str, str]:
    """Run a program at each level. Return level -> the error, or "" if it trained."""
    home, path = prepared(program, args)
    logs = args.out / "logs" / re.sub(r"\W+", "-", program.label)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    became: dict[str, str] = {}
    for level in LEVELS:  # if the program fails or is refused at O0, the other levels get the same outcome
        became[level] = became.get("O0") or at_level(level, program, home, path, logs, args)
    return became


def prepared(program: Program, args: argparse.Namespace) -> tuple[Path, list[str]]:
    """Fetch a program, its packages and data. Return the folder of its sources, and its import path."""
    install(program, args.out / "venv")
    home = source(program, args.out / "sources", args.mirror)
    folder = home / program.folder
    program.prepare(folder)
    os.environ.update(ENVIRONMENT)
    path = [*(str(home / each) for each in program.path), *([str(HERE / "stand_ins")] * program.offline)]
    os.environ.update(PYTHONPATH=os.pathsep.join([str(ROOT), *path]), MPLBACKEND="agg")
    if program.before:
        subprocess.run([sys.executable, program.before], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return home, path


def at_level(level: str, program: Program, home: Path, path: list[str], logs: Path, args: argparse.Namespace) -> str:
    """Run a program at a level. Return its error, or "" if it trained."""
    record, log = logs / f"{level}.jsonl", logs / f"{level}.log"
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(log, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(AMP_PATCH_OPT_LEVEL=level, AMP_PATCH_SEED="0")
        os.chdir(home / program.folder)
        sys.path[1:1] = path
        sys.argv = ["compare_worker", "--record", str(record), "--steps", str(args.steps), str(home / program.script)]
        sys.argv += ["--", *program.arguments.split()]
        status = 0
        try:
            compare_worker.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else bool(end.code)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    over = time.monotonic() + args.limit
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > over:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"not at an end after {args.limit} seconds"
        time.sleep(0.1)
    return outcome(record)


def outcome(record: Path) -> str:
    events = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for event in events:
        if event.get("event") == "end" and event.get("error"):
            return re.sub(r"\s+", " ", str(event["error"]))[:CUT]
    steps = [event for event in events if event.get("event") == "step"]
    if all(event.get("skipped") for event in steps):
        return "each step was skipped, because its gradients overflowed" if steps else "no step was recorded"
    return ""


# Packages and sources -------------------------------------------------------------------------------------------------


def within(venv: Path) -> None:
    """Restart this script in the virtual environment `venv`, which also has the packages of this Python."""
    if Path(sys.prefix) == venv:
        return
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "above.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    os.execve(python, [str(python), *sys.argv], {**os.environ, "PYTHONPATH": str(ROOT)})


def install(program: Program, venv: Path) -> None:
    """Install the packages of a program by pip, without changing torch."""
    constraint = venv / "constraint.txt"
    constraint.write_text(f"torch=={torch.__version__}\n")
    vision = "torchvision" in program.packages
    # --no-deps, because torchvision requires a torch that is not the CPU build.
    alone = ["--no-deps", f"torchvision==0.{int(torch.__version__.split('.')[1]) + 15}.0"] if vision else []
    others = [package for package in program.packages if package != "torchvision"] + ["pillow"] * vision
    for packages in filter(None, (alone, others)):
        command = [sys.executable, "-m", "pip", "install", "-q", "-c", str(constraint), *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"pip install {' '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
    if vision:
        without_cuda(Path(sysconfig.get_paths()["purelib"]))


def without_cuda(site: Path) -> None:
    """Declare the two operators that torchvision looks up when it is imported.

    PyPI's torchvision is built for a CUDA build of torch. With a CPU build, its operators are missing.
    """
    path, line = site / "torchvision" / "_meta_registrations.py", "# the CPU's torch"
    if line not in path.read_text():
        declared = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        made = f"import torch.library {line}\n_own = torch.library.Library('torchvision', 'FRAGMENT')\n"
        made += "".join(f"_own.define({name + declared!r})\n" for name in ("nms", "qnms"))
        path.write_text(made + path.read_text())


def source(program: Program, folder: Path, mirror: Path | None) -> Path:
    """Return the folder with the program's sources at its commit, which are fetched if needed."""
    if not program.repository:
        return HERE / "library_scripts"
    name = program.repository.replace("/", "+")
    home, commit = folder / name, COMMITS[program.repository]
    if (home / program.script).exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    stores = (mirror / name / "repo" / ".git", mirror / name / "repo") if mirror else ()
    store = next((path for path in stores if path.exists()), folder / f"{name}.git")
    if not store.exists():
        address = f"https://github.com/{program.repository}"
        git("clone", "--quiet", "--bare", "--filter=blob:none", address, str(store))
    there = f"--git-dir={store}"
    files = [path for path in git(there, "ls-tree", "-r", "--name-only", commit).splitlines() if path.endswith(SOURCES)]
    git(there, f"--work-tree={home}", "checkout", "-q", commit, "--", *files, index=folder / f"{name}.index")
    return home


def git(*arguments: str, index: Path | None = None) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", **({"GIT_INDEX_FILE": str(index)} if index else {})}
    done = subprocess.run(["git", *arguments], env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Skipped(f"git: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout


# The table ------------------------------------------------------------------------------------------------------------


def with_version(became: dict[str, str], before: dict[str, str] | None) -> dict[str, str]:
    """Return the outcome with "since": the version of amp_patch from which on the same levels have trained."""
    same = before is not None and all(bool(before[level]) == bool(became[level]) for level in LEVELS)
    return {**became, "since": before["since"] if same and before else amp_patch.__version__}


def write(results: dict[str, dict[str, str]], page: Path) -> None:
    """Replace the table in the page."""
    lines = ["| program | kind | " + " | ".join(LEVELS) + " | since |", "|---|---|" + "---|" * (len(LEVELS) + 1)]
    for program in PROGRAMS:
        if (became := results.get(program.label)) is not None:
            cells = [cell(became[level]) for level in LEVELS]
            lines.append(f"| {program.name} | {program.kind} | {' | '.join(cells)} | {became['since']} |")
    before, _, rest = page.read_text().partition("| program | kind |")
    after = rest[rest.index("\n\n") :]
    page.write_text(before + "\n".join(lines) + after)


def cell(said: str) -> str:
    """Return the outcome of a level in a word."""
    if not said:
        return "trains"
    return "refused" if REFUSED in said else "fails"


if __name__ == "__main__":
    sys.exit(main())
