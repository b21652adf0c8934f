"""Ask `compare --quick` about public programs, check its answers, and write the second table of docs/unedited.md.

    python benchmarks/quick_programs.py --mirror folder        # all; arguments as those of public_programs.py
    python benchmarks/quick_programs.py --only trl,powerful    # those with such a word in their names
    python benchmarks/quick_programs.py --table                # the table again, from the results of earlier runs

A program is fetched and prepared by public_programs.py. `compare --quick` trains it at O0, O4 and O5 with one seed.
clock/sitecustomize.py, which is no part of amp_patch, notes the processor's time of each process after each step. The
table has the median step of O0 over that of a level, beside the range that `compare` gives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import public_programs as public
from program_list import PROGRAMS, Program

RESULTS = public.HERE / "results" / "quick_programs.json"
LEVELS = ("O4", "O5")
SAC = "--env-id Pendulum-v1 --total-timesteps 190 --learning-starts 100 --buffer-size 1000"
IMAGES = (  # an evaluation draws pictures after each epoch, in 1000 steps unless it is told otherwise
    "--train_data_dir data --resolution 32 --model_config_name_or_path small --train_batch_size 2 --num_epochs 9 "
    "--use_ema --output_dir out --cache_dir cache --save_images_epochs 99 --save_model_epochs 99 "
    "--ddpm_num_inference_steps 2"
)
# Name of a program -> the number of steps, and its arguments if it makes more steps than in public_programs.py.
# Moonlight's toy_train is left out: the logits of its 16 rows of 512 tokens have 5 GB, and fewer rows are one step.
QUICK: dict[str, tuple[int, str | None]] = {
    "cleanrl sac_continuous_action": (120, SAC),  # an episode of 200 steps would end in an error of the script
    "deepxde Burgers": (60, None),
    "powerful-gnns": (48, "--epochs 4 --batch_size 8 --iters_per_epoch 12"),
    "trl dpo": (40, None),
    "trl dpo, LoRA": (40, None),
    "trl sft, LoRA": (40, None),
    "diffusers train_unconditional": (30, IMAGES),
    "timm train.py --model-ema": (30, None),
    "torchdiffeq odenet_mnist": (30, None),
    "torchdiffeq latent_ode": (6, None),  # a step at O5 takes two minutes
    "SupContrast": (20, None),
    "crnn-pytorch": (10, None),
}
_STEPS = {"--max_steps 12": "--max_steps 44", "--epochs 1 ": "--epochs 9 "}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words, with commas between them, one of which is in a name")
    parser.add_argument("--mirror", type=Path, default=os.environ.get("PUBLIC_PROGRAMS"), help="folder of repositories")
    parser.add_argument("--out", type=Path, default=public.ROOT / "out" / "public_programs")
    parser.add_argument("--limit", type=int, default=900, help="seconds for one program")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=public.PAGE, help="where the table goes")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if not args.table:
        public.within(args.out / "venv")
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for program in PROGRAMS if not args.table else ():
        if program.name not in QUICK or not any(word in program.name for word in args.only.split(",")):
            continue
        try:
            found = asked(program, args)
        except public.Skipped as reason:
            print(f"{program.label}: skipped: {reason}", flush=True)
            continue
        results[program.label] = found
        print(f"{program.label}: {found}", flush=True)
        args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write(results, args.page)
    return 0


def asked(program: Program, args: argparse.Namespace) -> dict[str, Any]:
    """Run `compare --quick` for a program. Return its verdict, the figures of each level, and those of the clock."""
    home, path = public.prepared(program, args)
    steps, arguments = QUICK[program.name]
    if arguments is None:
        arguments = program.arguments
        for few, many in _STEPS.items():
            arguments = arguments.replace(few, many)
    out = args.out / "quick" / re.sub(r"\W+", "-", program.label)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    places = [str(public.ROOT), str(public.HERE / "clock"), *path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "STEP_CLOCK": str(out), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "amp_patch", "compare", "--quick", "--steps", str(steps)]
    command += ["--out", str(out), str(home / program.script), "--", *arguments.split()]
    with (out / "log.txt").open("w") as log:
        started = subprocess.Popen(command, cwd=home / program.folder, env=environment, stdout=log, stderr=log)
        try:
            started.wait(args.limit)
        except subprocess.TimeoutExpired:
            started.terminate()  # `compare` reports the runs that have ended
            started.wait()
    report = out / "report.json"
    if not report.exists():
        return {"steps": steps, "said": (out / "log.txt").read_text().strip().splitlines()[-1][: public.CUT]}
    return answer(json.loads(report.read_text()), out, steps)


def answer(report: dict[str, Any], clock: Path, steps: int) -> dict[str, Any]:
    """Return what is stored of a report, and the ratio of each level by the clock."""
    levels = {}
    base = step_time(clock / "O0.txt")
    for level in report["levels"]:
        if level["level"] in LEVELS:
            own = step_time(clock / f"{level['level']}.txt")
            speed = level["speedup"] or {}
            levels[level["level"]] = {
                "speed": [round(speed[end], 2) for end in ("low", "high")] if speed else None,
                "clock": round(base / own, 2) if base and own else None,
                "memory": level["memory_ratio"] and round(level["memory_ratio"], 2),
                "loss": level["gap"] and level["gap"]["mean_percent"] and round(level["gap"]["mean_percent"], 2),
            }
    return {"steps": steps, "said": report["summary"], "levels": levels}


def step_time(path: Path) -> float | None:
    """Return the median step of a file of the clock in seconds, without the first tenth of the steps."""
    if not path.exists():
        return None
    times = [float(line) for line in path.read_text().split()]
    lengths = [later - earlier for earlier, later in itertools.pairwise(times)]
    lengths = lengths[len(times) // 10 :]
    return statistics.median(lengths) if lengths else None


def write(results: dict[str, Any], page: Path) -> None:
    """Replace the table in the page."""
    lines = ["| program | steps | O4 | O5 | what `compare --quick` says |", "|---|---:|---|---|---|"]
    for program in PROGRAMS:
        if (found := results.get(program.label)) is not None:
            cells = [cell(found.get("levels", {}).get(level)) for level in LEVELS]
            said = re.split(r"(?<=[a-z)\d])\. ", found["said"])[0].rstrip(".")
            lines.append(f"| {program.name} | {found['steps']} | {' | '.join(cells)} | {said} |")
    before, _, rest = page.read_text().partition("| program | steps |")
    page.write_text(before + "\n".join(lines) + rest[rest.index("\n\n") :])


def cell(level: dict[str, Any] | None) -> str:
    """Return the figures of a level: the range of its speed, in brackets that by the clock, and its loss."""
    if level is None or level["speed"] is None:
        return "no result"
    loss = "" if level["loss"] is None else f", loss {level['loss']:+g} %"
    return f"{level['speed'][0]}x to {level['speed'][1]}x ({level['clock']}x){loss}"


if __name__ == "__main__":
    sys.exit(main())
