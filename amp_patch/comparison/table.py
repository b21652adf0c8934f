"""A comparison as lines for the terminal."""

from __future__ import annotations

import textwrap

from amp_patch.comparison import headline, named_lines
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.unjudged import SHORT
from amp_patch.comparison.verdict import failures_in_words, percent_of
from amp_patch.diagnose import wording
from amp_patch.diagnose.text_table import in_columns

_WIDTH = 80
_HEADING = 14  # letters in a line of a heading
# "bold", or the state of a level -> the number of ECMA-48: bold, green, red, yellow.
_COLOURS = {"bold": 1, "best": 32, "bad": 31, "unsure": 33}


def lines(comparison: Comparison, *, colours: bool = False) -> list[str]:
    """Return lines of at most 80 columns; with `colours`, they have escape codes for a terminal.

    The order is: the recommendation, four figures and a few words for each level, the reasons against levels, the
    machine, lines that break a level, and notes. The page and `report.json` have every other figure.
    """
    if not any(level.runs for level in comparison.levels):
        return [_coloured(comparison.summary, "bold", colours)]  # not wrapped: a path in it can be copied
    parts = [[_coloured(line, "bold", colours) for line in _wrapped(comparison.summary)]]
    parts += [_overview(comparison, colours), _reasons(comparison, colours), _wrapped(comparison.agreement)]
    parts += [
        _machine(comparison),
        _edits(comparison),
        [line for note in comparison.notes for line in _wrapped(f"Note: {note}.")],
    ]
    return [line for part in parts if part for line in ("", *part)][1:]


def _overview(comparison: Comparison, colours: bool) -> list[str]:
    base = comparison.baseline
    headings = ("level", f"final {comparison.metric_in_words}", f"vs {base.level}" if base else "vs", "speed", "memory")
    wrapped = [_wrapped(heading, _HEADING) for heading in headings]
    height = max(map(len, wrapped))
    rows = [*zip(*([""] * (height - len(cell)) + cell for cell in wrapped), strict=True)]
    for level in comparison.levels:
        missing = comparison.metric != LOSS and any(comparison.metric not in run.logged for run in level.runs)
        speed = f"{wording.ratio(level.speedup.median)}x" if level.speedup else "emulated" if level.emulated else ""
        result = "missing" if missing else _result(level)
        rows.append((level.name, result, _against(level), speed, wording.ratio(level.memory)))
    shown = in_columns(rows, right=range(1, len(headings)))
    for at, level in enumerate(comparison.levels, start=height):
        words = headline.in_short(level, comparison)
        if words and len(shown[at]) + len(words) + 2 <= _WIDTH:
            shown[at] += f"  {_coloured(words, headline.state(level, comparison), colours)}"
    return [*_wrapped(f"{comparison.title}, {comparison.steps} steps"), *shown]


def _reasons(comparison: Comparison, colours: bool) -> list[str]:
    """Return the reasons against levels that failed, are not to be used or cannot be judged."""
    found = []
    told = [level for level in comparison.levels if headline.state(level, comparison) in ("bad", "unsure")]
    told = [level for level in told if level is not comparison.recommended and level.finding.unjudged != SHORT]
    told = [level for level in told if level.verdict.reason]
    width = max((len(level.name) for level in told), default=0)
    for level in told:
        short, full = (failures_in_words(level, short=each) for each in (True, False))
        words = level.verdict.reason.replace(short, full) if level.failed else level.verdict.reason
        first, *others = _wrapped(words, _WIDTH - width - 1) or [""]
        found.append(
            f"{_coloured(f'{level.name:{width}}', headline.state(level, comparison), colours)} {first}".rstrip()
        )
        found += [" " * (width + 1) + line for line in others]
    return found


def _edits(comparison: Comparison) -> list[str]:
    """Return the lines of user code that break levels which ended badly, with a way out for each."""
    found = named_lines.edits(comparison.survey, comparison.levels)
    words = [f"{line.place}, {', '.join(names)}: {line.what}. Edit: {line.edit}." for line, names in found]
    return [each for text in words for each in _wrapped(text)]


def _machine(comparison: Comparison) -> list[str]:
    """Return the processor that trained, the CPU's threads, and what the processor does in FP16 and BF16."""
    machine = comparison.machine
    words = [comparison.processor] if comparison.processor else []
    of_cpu = {"bfloat16": "BF16", "float16": "FP16"}
    said = {"threads": "threads", **({"tensor_cores": "tensor cores"} if comparison.on_gpu else of_cpu)}
    words += [f"{name}: {machine[key]}" for key, name in said.items() if key in machine]
    return _wrapped("; ".join(words) + ".") if words else []


def _wrapped(text: str, width: int = _WIDTH) -> list[str]:
    """Return the text in lines of at most `width`; a longer word is broken."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _coloured(text: str, style: str, colours: bool) -> str:
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if colours and style in _COLOURS else text


def _result(level: LevelResult) -> str:
    """Return the mean of the results; "" without a result, "stopped" or "diverged" if one is not finite."""
    if not level.final:
        return ""
    if len(level.finite) < len(level.final):
        return "stopped" if level.stopped else level.finding.lost
    return wording.digits(level.mean or 0.0, 4)


def _against(level: LevelResult) -> str:
    """Return the gap to the baseline: "+0.30 %". "" if there is no gap, or if a result of the level is not finite."""
    gap = level.finding.gap
    if gap is None or len(level.finite) < len(level.runs):
        return ""
    return percent_of(gap) or wording.signed(gap.mean)
