"""Artificial runs, scripts and arguments for tests of comparisons."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
from paths import ROOT

from amp_patch.comparison.commands.compare_arguments import add_arguments, split
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.finding import Verdict
from amp_patch.diagnose.recording.run import PARTS, Run


def made_up_run(
    level: str = "O0", seed: int = 0, steps: int = 40, *, final: float = 1.0, ms: float = 10.0, **fields: Any
) -> Run:
    """Return a run whose loss falls from 4 to `final`. Each step takes `ms` milliseconds, half in backward."""
    run = Run(level, seed, dtype=None if level == "O0" else "float16", policy=level, device="cuda")
    shares = dict(zip(PARTS, (0.05, 0.25, 0.5, 0.05, 0.15), strict=True))
    for step in range(steps):
        loss = final + (4 - final) * max(0.0, 1 - step / (0.75 * steps))
        seconds = ms / 1000
        parts = {part: seconds * share for part, share in shares.items()}
        scaled = level in ("O1", "O2")
        run.add(
            {
                "event": "step",
                "loss": loss,
                "seconds": seconds,
                "cpu_seconds": seconds,
                "parts": parts,
                "scale": 65536.0 if scaled else 1.0,
                "skipped": scaled and step == 0,
                "samples": 8,
            }
        )
    run.weights, run.masters, run.gradients, run.state, run.peak_memory = 4000, 0, 4000, 8000, 2**20
    for name, value in fields.items():
        setattr(run, name, value)
    return run


def seeds(level: str, *finals: float, **fields) -> list[Run]:
    """Return one run for each seed, which ends with the given loss."""
    return [made_up_run(level, seed, final=final, **fields) for seed, final in enumerate(finals)]


def compare(*groups: list[Run], **options) -> Comparison:
    return Comparison("train.py", [run for group in groups for run in group], **options)


def judge(base: list[Run], level: list[Run], **options) -> Verdict:
    """Return the verdict on a level that is compared with O0's runs."""
    return compare(base, level, **options).levels[1].verdict


def logs(level: str, *values: float | None, name: str = "accuracy") -> list[Run]:
    return [
        made_up_run(level, seed, logged={} if value is None else {name: [(0, 0.125), (40, value)]})
        for seed, value in enumerate(values)
    ]


@pytest.fixture(name="importable", autouse=True)
def importable_fixture(monkeypatch):
    """Make child processes import the package under test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in ("AMP_PATCH_OPT_LEVEL", "AMP_PATCH_DTYPE", "AMP_PATCH_SEED"):
        monkeypatch.delenv(name, raising=False)


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own, scripts = split([*given])
    return argparse.Namespace(**vars(parser.parse_args(own)), arguments=scripts)
