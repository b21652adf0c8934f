"""Artificial runs for tests of comparisons."""

from __future__ import annotations

from made_up import made_up_run

from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.comparison.finding import Verdict
from amp_patch.lab.recording.run import Run


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
