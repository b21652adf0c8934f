"""Lines of user code that break a level: the survey of the script's first step names them for a level that ended badly.

The report shows the lines next to the level's result. A line breaks a level if the survey reports it for that level as
a problem, not as a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.unjudged import OF_LEVEL
from amp_patch.diagnose.recording.run import INTERRUPTED, KILLED, OUT_OF_MEMORY
from amp_patch.diagnose.survey.report import Line
from amp_patch.diagnose.wording import counted, listed
from amp_patch.policy import OPT_LEVELS

Survey = dict[str, Any]  # the result of `Report.to_json`; or {"failed": the reason why there is no survey}
_TOLD = 2  # lines that are shown next to a level; further lines are only counted


def ended_badly(level: LevelResult) -> bool:
    """Return whether a run failed, diverged, collapsed or skipped many steps, or the level seems worse, or too good.

    Runs that were interrupted, were killed or lacked memory do not count: no line of user code is to blame. False for
    levels that no survey judges (`_known_as`).
    """
    found = level.finding
    faults = [run for run in level.failed if run.error_kind not in (INTERRUPTED, KILLED, OUT_OF_MEMORY)]
    doubtful = (found.kind == "undecided" and not found.promising) or found.unjudged in OF_LEVEL
    return _known_as(level.level, level.dtype) != "" and bool(faults or found.rejected or found.skips or doubtful)


def named(survey: Survey | None, level: LevelResult) -> list[Line]:
    """Return the lines that break the level according to the survey. Lines of one place and edit are returned once.

    If no run of the level failed or stopped, lines that would be errors are left out: the unedited script was served
    without them.
    """
    ended = bool(level.failed or level.stopped)
    lines = _lines(survey, level.level, level.dtype)
    lines = [line for line in lines if line.breaks and (ended or not line.raises)]
    found = {(line.place, line.edit): line for line in reversed(lines)}
    return [*reversed(found.values())]


def modules(survey: Survey | None, level: str, dtype: str | None) -> list[str]:
    """Return the names of the modules whose forwards run the lines that break `level` with type `dtype`, each once."""
    return [*dict.fromkeys(name for line in _lines(survey, level, dtype) if line.breaks for name in line.modules)]


def beside(survey: Survey | None, level: LevelResult) -> str:
    """Return the end of a sentence: "the survey names train.py:12 (div): 1e-08 is 0 in FP16".

    If no line tells what a measurement of the level has found, its sentence follows. "" if the level has not ended
    badly, or if nothing was found or measured.
    """
    if survey is None or not ended_badly(level):
        return ""
    lines = named(survey, level)
    told = [f"{line.place} raises it" if _in_verdict(line.what, level) else str(line) for line in lines[:_TOLD]]
    more = [f"and {counted(len(lines) - _TOLD, 'more line')}"] if len(lines) > _TOLD else []
    names = ["the survey names " + "; ".join(told + more)] if lines else []
    return "; ".join(names + [f"one step, measured: {words}" for words in _measured(survey, level, lines)])


def _measured(survey: Survey, level: LevelResult, lines: Sequence[Line]) -> list[str]:
    name = _known_as(level.level, level.dtype)
    found = [each for each in survey.get("measured", []) if name in each["levels"] and not each["failed"]]
    if any(line.raises for line in lines):
        found = [each for each in found if not each.get("raised")]
    told = [each.get("words", "") for each in found]
    return [
        words
        for words in told
        if words and not any(words in line.what for line in lines) and not _in_verdict(words, level)
    ]


def _in_verdict(words: str, level: LevelResult) -> bool:
    """Return whether the level's verdict has the error that `words` tell: "the step raises RuntimeError: ..."."""
    raises, _, error = words.partition("the step raises ")
    return bool(error) and not raises and error in level.verdict.text


def to_change(survey: Survey | None, level: LevelResult) -> list[Line]:
    """Return the lines that must change before a script that was not edited runs at the level with `initialize`."""
    return [line for line in _lines(survey, level.level, level.dtype) if line.served]


def edits(survey: Survey | None, levels: Sequence[LevelResult]) -> list[tuple[Line, list[str]]]:
    """Collect the lines that break a level which ended badly. Lines of one place and edit are merged.

    Returns:
        (line, names of the levels that ended badly and that the line breaks) for each line.
    """
    found: dict[tuple[str, str], tuple[Line, dict[str, None]]] = {}
    for level in filter(ended_badly, levels):
        for line in named(survey, level):
            found.setdefault((line.place, line.edit), (line, {}))[1][level.name] = None
    return [(line, [*names]) for line, names in found.values()]


def note(survey: Survey | None, levels: Sequence[LevelResult]) -> str:
    """Return a sentence for the report if the survey failed, or if it names no line for some level that ended badly.

    Otherwise, and without a survey, return "".
    """
    if survey is None:
        return ""
    if "failed" in survey:
        return f"the first step could not be surveyed for lines that break a level: {survey['failed']}"
    without = [level.name for level in levels if ended_badly(level) and not beside(survey, level)]
    return f"the survey of the first step names no line that breaks {listed(without)}" if without else ""


def _lines(survey: Survey | None, level: str, dtype: str | None) -> list[Line]:
    lines = [] if survey is None else [Line(**each) for each in survey.get("lines", [])]
    return [line for line in lines if _known_as(level, dtype) in line.levels]


def known_as(levels: Sequence[LevelResult]) -> list[str]:
    """Return the names of levels in a survey."""
    return [_known_as(level.level, level.dtype) for level in levels]


def _known_as(level: str, dtype: str | None) -> str:
    """Return the level's name in a survey, which names levels without suffixes: "O2" for O2+split.

    If the level runs in a `dtype` other than its own, return a level of that type which casts the model, or functions,
    as this one does: "O5" for O2 in BF16. "" for O0 and for torch's own mixed precision.
    """
    name = level.partition("+")[0]
    policy = OPT_LEVELS.get(name)
    if policy is None or policy.changes_nothing:
        return ""
    if dtype is None or str(policy.dtype) == f"torch.{dtype}":
        return name
    casts = policy.cast_model_type is None
    alike = (
        each
        for each, other in OPT_LEVELS.items()
        if str(other.dtype) == f"torch.{dtype}" and (other.cast_model_type is None) == casts
    )
    return next(alike, name)
