"""Do public programs train as they are? Each is compared at every level, unedited: the table of docs/compare.md.

    python benchmarks/public_programs.py                     # all, some minutes each; needs a network
    python benchmarks/public_programs.py --only gcn,vae      # those with such a word in their names
    python benchmarks/public_programs.py --mirror folder     # repositories from folder/owner+name, no network
    python benchmarks/public_programs.py --table             # the table again, from the results of earlier runs

A program's source is fetched from its repository at a given commit, into out/public_programs, and never copied into
ours. Data of a few hundred kilobytes are generated in its format. Packages go into a virtual environment there, above
that of this Python. A program that cannot be fetched, or whose packages cannot be had, is skipped, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from program_data import clean
from program_list import COMMITS, PROGRAMS, Program

import amp_patch

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
LEVELS = ("O0", "O1", "O2", "O4", "O5")
RESULTS = HERE / "results" / "public_programs.json"
PAGE = ROOT / "docs" / "compare.md"
SOURCES = (".py", ".json", ".yaml")  # data are generated


class Skipped(Exception):
    """Why a program is not tried here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="words, with commas between them, one of which is in a program's name")
    parser.add_argument("--mirror", type=Path, default=os.environ.get("PUBLIC_PROGRAMS"), help="folder of repositories")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "public_programs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=int, default=300, help="seconds for one program")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    words = args.only.split(",") if args.only else [""]
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for program in PROGRAMS if not args.table else ():
        if not any(word in label(program) for word in words):
            continue
        try:
            became = tried(program, args)
        except Skipped as reason:
            print(f"{label(program)}: skipped: {reason}", flush=True)
            continue
        results[label(program)] = with_version(became, results.get(label(program)))
        print(f"{label(program)}: {became}", flush=True)
        args.results.parent.mkdir(exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write(results)
    return 0


def label(program: Program) -> str:
    return f"{program.name} ({program.kind})"


def tried(program: Program, args: argparse.Namespace) -> dict[str, str]:
    """Level -> "" if it trained, else what was said."""
    python = environment(program, args.out / "venv")
    home = source(program, args.out / "sources", args.mirror)
    folder = home / program.folder
    report = args.out / "reports" / re.sub(r"\W+", "-", label(program))
    clean(report)
    command = [python, "-m", "amp_patch", "compare", "--levels", ",".join(LEVELS), "--seeds", "1"]
    command += ["--steps", str(args.steps), *program.settings, "--out", str(report)]
    command += [str(home / program.script), "--", *program.arguments.split()]
    path = [str(ROOT), *(str(home / each) for each in program.path), *([str(HERE / "stand_ins")] * program.offline)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "WANDB_MODE": "offline", "MPLBACKEND": "agg"}
    program.prepare(folder)
    if program.before:
        run([python, program.before], folder, env, args.limit)
    said = run(command, folder, env, args.limit)
    (report / "said.log").write_text(said)
    return outcome(report / "report.json", said)


def run(command: list[str], folder: Path, env: dict[str, str], limit: int) -> str:
    """What the command prints; after so many seconds it gets a Ctrl-C, upon which `compare` reports what it has."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.communicate()[0] + f"\nstopped after {limit} seconds"


def outcome(report: Path, said: str) -> dict[str, str]:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    found = dict.fromkeys(LEVELS, " ".join(lines[-8:])[-600:] or "said nothing")
    for run in json.loads(report.read_text())["runs"] if report.exists() else ():
        if run["level"] in found and not run["native"]:
            found[run["level"]] = run["error"] or ("" if run["loss"] else "no step was recorded")
    return found


# What it is run with ---------------------------------------------------------------------------------------------------


def environment(program: Program, venv: Path) -> str:
    """A Python that has the packages of `program`, and those of this one."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        site = Path(asked(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
        (site / "above.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    wanted = [release(package) for package in program.packages]
    if wanted:
        constraint = venv / "constraint.txt"
        constraint.write_text(f"torch=={torch.__version__}\n")
        alone = ["--no-deps", *wanted, "pillow"] if "torchvision" in program.packages else []
        for packages in (alone, [each for each in wanted if not each.startswith("torchvision")]):
            if not packages:
                continue
            command = [str(python), "-m", "pip", "install", "-q", "-c", str(constraint), *packages]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Skipped(f"pip install {' '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
        if "torchvision" in program.packages:
            without_cuda(Path(asked(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])")))
    return str(python)


def release(package: str) -> str:
    """torchvision's release for this torch; what else pip finds."""
    minor = int(torch.__version__.split(".")[1])
    return f"torchvision==0.{minor + 15}.0" if package == "torchvision" else package


def without_cuda(site: Path) -> None:
    """PyPI's torchvision is built for CUDA's torch: beside the CPU's its own operators are missing, of which two are
    asked for when it is imported."""
    path, line = site / "torchvision" / "_meta_registrations.py", "# the CPU's torch"
    if line not in path.read_text():
        declared = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        made = f"import torch.library {line}\n_own = torch.library.Library('torchvision', 'FRAGMENT')\n"
        made += "".join(f"_own.define({name + declared!r})\n" for name in ("nms", "qnms"))
        path.write_text(made + path.read_text())


def asked(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def source(program: Program, folder: Path, mirror: Path | None) -> Path:
    """The program's repository at its commit, without pictures and data."""
    if not program.repository:
        home = folder / "library_scripts"
        home.mkdir(parents=True, exist_ok=True)
        (home / program.script).write_text((HERE / "library_scripts" / program.script).read_text())
        return home
    name = program.repository.replace("/", "+")
    home, commit = folder / name, COMMITS[program.repository]
    if (home / program.script).exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    found = [
        path for path in ((mirror / name / "repo" / ".git", mirror / name / "repo") if mirror else ()) if path.exists()
    ]
    store = found[0] if found else folder / f"{name}.git"
    if not store.exists():
        address = f"https://github.com/{program.repository}"
        git("clone", "--quiet", "--bare", "--filter=blob:none", address, str(store))
    store, index = f"--git-dir={store}", folder / f"{name}.index"
    files = [path for path in git(store, "ls-tree", "-r", "--name-only", commit).splitlines() if path.endswith(SOURCES)]
    git(store, f"--work-tree={home}", "checkout", "-q", commit, "--", *files, index=index)
    return home


def git(*arguments: str, index: Path | None = None) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", **({"GIT_INDEX_FILE": str(index)} if index else {})}
    done = subprocess.run(["git", *arguments], env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Skipped(f"git {arguments[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout


# The table -------------------------------------------------------------------------------------------------------------


def with_version(became: dict[str, str], before: dict[str, str] | None) -> dict[str, str]:
    """The outcome, with the version since which it is that."""
    same = before is not None and {k: bool(v) for k, v in before.items() if k != "since"} == {
        k: bool(v) for k, v in became.items()
    }
    return {**became, "since": before["since"] if same and before else amp_patch.__version__}


def write(results: dict[str, dict[str, str]]) -> None:
    lines = ["| program | kind | " + " | ".join(LEVELS) + " | since |", "|---|---|" + "---|" * (len(LEVELS) + 1)]
    for program in PROGRAMS:
        if (became := results.get(label(program))) is not None:
            cells = ["trains" if became.get(level) == "" else "fails" for level in LEVELS]
            lines.append(f"| {program.name} | {program.kind} | " + " | ".join(cells) + f" | {became['since']} |")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
