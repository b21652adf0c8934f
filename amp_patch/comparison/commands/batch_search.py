"""`python -m amp_patch compare --batch-search 8GiB`: the largest batch that fits at each level, found by doubling."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from typing import Any

from amp_patch.comparison import measures
from amp_patch.comparison.commands.compare_child import Child
from amp_patch.comparison.commands.interrupts import Ended, Interrupts
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose import wording
from amp_patch.diagnose.recording.run import KILLED, OUT_OF_MEMORY, Run, dumps
from amp_patch.diagnose.text_table import in_columns
from amp_patch.support.files import write_whole

_STEPS = 4  # of a trial: step 1 warms up, 2 and 4 are timed, 3 counts the activations
_FIRST = 8  # the batch of the first trial
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG])iB")
_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--batch-search`, `--batch-flag` and `--batch-dim`."""
    add = parser.add_argument
    add("--batch-search", metavar="SIZE", help="do not compare; find the largest batch of 1, 2, 4, ... in 8GiB")
    words = "the dimension of the model's first tensor that counts samples, from 0: for example 1 of (time, batch)"
    add("--batch-dim", type=int, metavar="N", help=f"{words} (default: 0)")
    add("--batch-flag", metavar="FLAG", help="the script's own option for its batch size, for example --batch-size")


def run(args: argparse.Namespace, plan: Plan, interrupts: Interrupts) -> int:
    """Search each level of the plan, print the table, write batch_search.json, and return the exit status.

    A signal that `interrupts` received ends the search.
    """
    levels: list[dict[str, Any]] = []
    status = 0
    try:
        limit = _limit(args)
        for level in plan.levels:
            levels.append(_search(args, plan, level, limit, interrupts))
    except Ended as interrupt:
        status = interrupt.status
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [("level", "batch", "MiB", "samples/s")]
    for each in levels:
        memory = "" if each["batch"] is None else wording.in_unit(each["memory_bytes"], "MiB")
        rate = "" if each["samples_per_second"] is None else wording.figure(each["samples_per_second"])
        rows.append((each["name"], str(each["batch"]), memory, rate))
    problems = [f"{each['name']}: {each['problem']}." for each in levels if each["problem"] is not None]
    path = args.out / "batch_search.json"
    write_whole(path, dumps({"script": args.script, "arguments": args.arguments, "levels": levels}, indent=1) + "\n")
    print("\n".join(["", *in_columns(rows, right=range(1, 4)), *problems, f"report: {path}"]))
    return status or (0 if all(each["batch"] is not None for each in levels) else 1)


def _limit(args: argparse.Namespace) -> int:
    found = _SIZE.fullmatch(args.batch_search.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"compare: --batch-search is {args.batch_search!r}; wanted a size, as 8GiB or 512MiB")
    if not args.batch_flag:
        raise ValueError(
            "compare: --batch-search needs the script's own option for its batch: add --batch-flag=--batch-size (the "
            "script is then given `--batch-size 8`; --batch-flag=batch_size= gives `batch_size=8`)"
        )
    return int(float(found[1]) * _BYTES[found[2]])


def _search(args: argparse.Namespace, plan: Plan, level: str, limit: int, interrupts: Interrupts) -> dict[str, Any]:
    """Double the batch until it does not fit, or takes no more memory. If the first does not fit, halve it.

    Returns:
        The entry of the level in batch_search.json.

    Raises:
        ValueError: the script must be edited, or failed at the first level with the first batch.
        Ended: a signal was received.
    """
    found: dict[str, Any] = {"name": level, "tried": []}
    found |= dict.fromkeys(("batch", "memory_bytes", "samples_per_second", "problem"))
    batch, halves, before = _FIRST, False, None
    while batch:
        run = _train(args, plan, level, batch, interrupts)
        found["name"] = wording.level_name(level, run.dtype)
        memory = measures.memory_bytes(run) if run.error is None else None
        size = {"memory_bytes": memory, "activations": run.activations, "samples": max(run.samples, default=0)}
        found["tried"].append({"batch": batch, **size, "error": run.error})
        if memory is None and run.error_kind not in (OUT_OF_MEMORY, KILLED):  # the system kills for lack of memory
            why = run.error_in_full if run.error else "its activations could not be counted (fewer than two steps?)"
            found["problem"] = f"failed with {batch}: {why}"
            if run.refused or (level == plan.levels[0] and found["batch"] is None):
                raise ValueError(run.error if run.refused else f"compare: {level} {found['problem']}")
        elif memory is not None and memory <= limit and size != before:
            before = size
            found |= {"batch": batch, "memory_bytes": memory, "samples_per_second": measures.samples_per_second(run)}
        elif size == before:
            found["problem"] = f"{batch} takes no more memory: the data ends, or the option changes nothing"
        print(f"{level} {args.batch_flag.rstrip('=')} {batch}", flush=True)
        halves = halves or found["batch"] is None
        if found["problem"] is not None or (halves if found["batch"] == batch else not halves):
            break
        batch = batch // 2 if halves else 2 * batch
    return {**found, "problem": found["problem"] or (None if found["batch"] else "a batch of 1 does not fit")}


def _train(args: argparse.Namespace, plan: Plan, level: str, batch: int, interrupts: Interrupts) -> Run:
    flag, run = args.batch_flag, Run(level)
    own = [f"{flag}{batch}"] if flag.endswith("=") else [flag, str(batch)]
    more = f"batch-{level}-{batch}", own
    Child(replace(plan, steps=_STEPS), args, run, OtherWork(), more).train_alone(interrupts.check)
    return run
