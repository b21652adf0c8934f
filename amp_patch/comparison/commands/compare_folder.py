"""The folder of a comparison: its arguments, and the record of each run.

`compare.json` has the arguments and the surroundings that all runs must share: the script, torch, the processor. Each
run has a file of events in `runs/`. `compare` appends the last event, the "outcome", after the end of the run. A
comparison that was cut, even by kill -9 or a power cut, can therefore be resumed, and its runs can be reported.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from amp_patch.casts.cpu_half import has_arithmetic
from amp_patch.comparison.outcome import interrupted
from amp_patch.comparison.plan import SEEDS, SMALL, SPEED, Plan, levels_for, name_as_asked
from amp_patch.diagnose.recording.run import INTERRUPTED, KILLED, NATIVE, Event, Run, dumps, loads
from amp_patch.policy import OPT_LEVELS
from amp_patch.run.machine import processor
from amp_patch.support.files import fresh, write_whole

_ASKED = "compare.json"
_SURVEY = "survey.json"
_RUN = re.compile(r"(O\d[\w+.-]*|native)-seed\d+\.(jsonl|log)")
# Arguments that do not change the runs: they are not stored, and may differ at --resume.
_OF_THE_CALL = ("command", "out", "resume", "trials", "baseline")


class NoComparison(ValueError):
    """The folder has no comparison, or none that can be resumed; the message says why."""


def prepare(out: Path) -> None:
    """Create the folder `runs` in `out`, for the records and logs of the runs.

    Raises:
        OSError: the folder cannot be made.
    """
    folder = out / "runs"
    if folder.is_symlink():  # never write through a link: its target is not ours
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def begin(args: argparse.Namespace) -> None:
    """Store the arguments, and remove the records of an earlier comparison in the folder."""
    for path in (args.out / "runs").iterdir():
        if _RUN.fullmatch(path.name):
            fresh(path)
    fresh(survey_path(args.out))
    asked = {name: value for name, value in vars(args).items() if name not in _OF_THE_CALL}
    write_whole(args.out / _ASKED, dumps({"asked": asked, "with": _surroundings(args)}, indent=1) + "\n")


def resumed(args: argparse.Namespace, defaults: dict[str, Any]) -> argparse.Namespace:
    """Return the arguments of the comparison in the folder `args.resume`.

    Args:
        defaults: the default of each argument. An argument with another value was given next to --resume, and must
            equal the folder's. The exception is a larger number of seeds, which is stored in the folder.

    Raises:
        NoComparison: the folder has none, or it was made with other arguments, another script, torch or processor.
        OSError: the larger number of seeds cannot be stored.
    """
    if args.out not in (defaults["out"], args.resume):
        raise NoComparison(
            f"compare: --resume {args.resume} goes on there, and --out {args.out} contradicts it; give one"
        )
    told = _told(args.resume)
    asked = _with_more_seeds(told["asked"], args.seeds)
    for name, value in vars(args).items():
        if name in _OF_THE_CALL or value == defaults.get(name) or value == asked.get(name):
            continue
        raise NoComparison(
            f"compare: {args.resume} was begun with {_named(name, asked.get(name))}, and now there is "
            f"{_named(name, value)}; give the same or nothing next to --resume, or begin again in another --out"
        )
    of_call = {"out": args.resume, "resume": args.resume, "baseline": vars(args).get("baseline")}
    found = argparse.Namespace(**{**defaults, **asked, **of_call})
    for name, value in _surroundings(found).items():
        before = told["with"].get(name)
        if value != before:
            raise NoComparison(
                f"compare: {args.resume} cannot be continued: {name} was {before}, and is {value} now; runs of the "
                "two cannot be compared: begin again in another --out"
            )
    if asked != told["asked"]:
        write_whole(args.resume / _ASKED, dumps({**told, "asked": asked}, indent=1) + "\n")
    return found


def _with_more_seeds(asked: dict[str, Any], seeds: int | None) -> dict[str, Any]:
    """Return a copy of the arguments `asked` with `seeds` seeds; `asked` itself if it has that many seeds, or more.

    --quick means one seed, so it is replaced by --levels with the levels of --quick.
    """
    quick, before = asked.get("quick"), asked.get("seeds")
    if seeds is None or seeds <= (1 if quick else SEEDS if before is None else before):
        return asked
    levels = levels_for(asked.get("for", SPEED), asked.get("dtype"), True)
    return {**asked, **({"quick": False, "levels": ",".join(levels)} if quick else {}), "seeds": seeds}


def asked_in(folder: Path, defaults: dict[str, Any]) -> argparse.Namespace:
    """Return the arguments of the comparison in the folder.

    Raises:
        NoComparison: the folder has no comparison.
    """
    return argparse.Namespace(**{**defaults, **_told(folder)["asked"], "out": folder, "resume": folder})


def keep_machine(folder: Path, told: dict[str, str]) -> dict[str, str]:
    """Store `told`, the result of `machine()`, in the folder of a comparison, and return the dict.

    "load" is a warning about other work on the machine. If `told` has none, and an earlier call has stored one in the
    folder, the dict gets the earlier warning. If the folder cannot be read or written, nothing is stored.
    """
    try:
        kept = _told(folder)
        load = kept.get("machine", {}).get("load")
        told = {**({} if load is None else {"load": load}), **told}
        write_whole(folder / _ASKED, dumps({**kept, "machine": told}, indent=1) + "\n")
    except (OSError, ValueError):  # the folder is gone, or full
        pass
    return told


def machine_in(folder: Path) -> dict[str, str] | None:
    """Return the description that `keep_machine` stored; None if the comparison has not ended yet."""
    return _told(folder).get("machine")


def runs_in(folder: Path, plan: Plan) -> list[Run]:
    """Return the runs that have a record in the folder, sorted by seed: runs of the plan, and of levels added to it."""
    more = [level for level in (NATIVE, *OPT_LEVELS, *SMALL) if level not in plan.levels]
    runs = [*plan.runs(), *(Run(level, seed) for level in more for seed in range(plan.seeds))]
    found = [run for run in runs if _read(run, record_of(folder, run))]
    return sorted(found, key=lambda run: run.seed)


def record_of(folder: Path, run: Run) -> Path:
    """Return the path of the run's events."""
    return folder / "runs" / f"{run.level}-seed{run.seed}.jsonl"


def survey_path(folder: Path) -> Path:
    """Return the path of the survey of the script's first step."""
    return folder / _SURVEY


def survey_in(folder: Path) -> dict[str, Any] | None:
    """Return the survey of the script's first step (`named_lines.Survey`); None if the folder has no survey."""
    try:
        found: dict[str, Any] = loads(survey_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def is_finished(run: Run) -> bool:
    """Return whether the run needs no repetition: it ended well, or failed by an error of the script."""
    return run.error_kind not in (INTERRUPTED, KILLED)


def keep_outcome(record: Path, run: Run) -> None:
    """Append the "outcome" event of a run, which says how it ended, to the events that the run has recorded.

    Raises:
        OSError: the record cannot be written.
    """
    names = ("level", "seed", "error", "error_kind", "error_where", "log", "refused", "notes", "caught", "other_work")
    event: Event = {"event": "outcome", **{name: getattr(run, name) for name in names}}
    with record.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"\n{dumps(event)}\n")  # the line before may be cut off


def add_events(run: Run, recorded: bytes) -> bytes:
    """Add the events in the complete lines of `recorded`, bytes of a record, to the run.

    Return the bytes of an incomplete last line, for the start of the next call's `recorded`; else b"".
    """
    *lines, rest = recorded.split(b"\n")
    for line in filter(None, lines):
        with suppress(json.JSONDecodeError):  # a line that a full disk has cut off
            run.add(loads(line.decode()))
    return rest


def _read(run: Run, record: Path) -> bool:
    """Fill `run` with the events of its record, and return whether the record could be read."""
    try:
        recorded = record.read_bytes()
    except OSError:
        return False
    asked = Run(run.level, run.seed)
    add_events(run, recorded + b"\n")
    if run.log:  # the record has the path relative to the working directory of that `compare`
        run.log = str(record.with_suffix(".log"))
    if b'\n{"event": "outcome"' not in recorded:
        name_as_asked(run, asked)
        run.error, run.error_kind, run.error_where = interrupted(run)
    return True


def _told(folder: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = loads((folder / _ASKED).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoComparison(f"{folder} has no comparison that `compare` has begun: {error}") from error
    return told


def _surroundings(args: argparse.Namespace) -> dict[str, str]:
    """Return {name: value}, in words, of versions and settings that all runs must share: {"torch": "2.9.0", ...}."""
    arithmetic = [name for name in ("bfloat16", "float16") if has_arithmetic(getattr(torch, name))]
    return {
        "the script": f"{args.script} (sha256 {_digest(args)[:12]})",
        "torch": str(torch.__version__),
        "the processor": processor(),
        "its arithmetic below FP32": " and ".join(arithmetic) or "none",
        "the number of threads": str(torch.get_num_threads()),
        "the working directory": os.getcwd(),
    }


def _digest(args: argparse.Namespace) -> str:
    """Return the SHA-256 of the script, or of all Python files in it if it is a folder; "unknown" if it is not found.

    Modules that the script imports are not part of it.
    """
    path = _path(args)
    if path is None:
        return "unknown"
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def _path(args: argparse.Namespace) -> Path | None:
    if not args.module:
        return Path(args.script)
    try:
        spec = importlib.util.find_spec(args.script)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None or not os.path.exists(spec.origin) else Path(spec.origin)


def _named(name: str, value: Any) -> str:
    """Return "--seeds 3", or "no --seeds" without a value."""
    if name == "script":
        return str(value)
    if name == "arguments":
        return f"the script's arguments {' '.join(value)}" if value else "no arguments of the script's"
    option = "-m" if name == "module" else f"--{name.replace('_', '-')}"
    if value is True:
        return option
    shown = ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
    return f"no {option}" if value in (None, False) else f"{option} {shown}"
