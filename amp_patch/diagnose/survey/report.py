"""The report of a survey: the lines of user code that levels would break, and the levels without a finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from amp_patch.diagnose.survey.kinds import LEVELS, Place
from amp_patch.diagnose.survey.measured import Measured, as_dict
from amp_patch.diagnose.wording import listed, type_name

_SERVED = "run and compare serve it; a script with amp.initialize needs the edit"
_JUDGES = "The survey judges one step, by rules for lines and by a measurement beside FP32. It trains nothing."
_BY_RULES = "The survey judges the mechanics of one step: ranges, types and roundings. It trains nothing."


@dataclass
class Line:
    """One problem that levels would cause at a line of user code.

    Attributes:
        file, line: the innermost code outside of torch.
        called: if that code is in an installed package, the line of the script that calls it: "train.py:31".
        op: the operation.
        levels: the levels that would cause it.
        what: the problem, in words.
        edit: a change of user code that avoids it.
        modules: the names of the modules whose forward runs the line.
        breaks: whether the problem breaks a training. If not, the line is a note: a level with notes alone is clear.
        raises: whether the problem is an error.
        served: whether `run` and `compare` train the level without the problem, if the script is not edited. In the
            survey of such a script the line is a note.
    """

    file: str
    line: int
    called: str
    op: str
    levels: list[str]
    what: str
    edit: str
    modules: list[str] = field(default_factory=list)
    breaks: bool = True
    raises: bool = False
    served: bool = False

    @property
    def note(self) -> str:
        """The end of the line's first line in a report: why the line is a note. "" if it breaks its levels."""
        return "" if self.breaks else f", a note: {_SERVED}"

    @property
    def key(self) -> tuple[object, ...]:
        """The attributes that tell this line from other lines of a report."""
        return self.file, self.line, self.op, self.edit, self.breaks, self.served

    @property
    def place(self) -> str:
        """The file and the line: "train.py:31"."""
        return Place(self.file, self.line).shown

    def __str__(self) -> str:
        return f"{self.place} ({self.op}): {self.what}"


@dataclass
class Report:
    """The findings of a survey; `print` it.

    Attributes:
        lines: the problems, sorted by file and line.
        measured: a measurement for each kind of levels (`measured.py`); empty if nothing was measured.
        lost: "float16" and "bfloat16" -> the share of the updates that would be lost without masters, if a step was
            seen.
    """

    lines: list[Line] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    lost: dict[str, float] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """Add a line. If the report has a line of the same `key`, add levels and modules to that."""
        found = next((each for each in self.lines if each.key == line.key), line)
        if found is line:
            self.lines.append(line)
            self.lines.sort(key=lambda each: (each.file, each.line))
        found.modules += [module for module in line.modules if module not in found.modules]
        found.levels = [level for level in LEVELS if level in found.levels or level in line.levels]

    def add_measured(self, found: Measured) -> None:
        """Add the measurement of a level. If no line breaks the level so far, what the measurement tells is a line."""
        self.measured.append(found)
        if not (found.told or found.raised) or found.level in self.broken:
            return
        if found.raised and any(line.served and found.level in line.levels for line in self.lines):
            return  # `run` serves the line that raises
        cause = found.cause
        line = found.line or (None if cause is None else cause.line) or Place("", 0)
        what = str(found).partition(": ")[2] + (f" ({cause})" if cause is not None and str(cause) else "")
        edit = "compute this in FP32" if cause is None else cause.edit
        modules = [cause.module] if cause is not None and cause.module else []
        self.add(Line(*line, "measured", [*found.levels], what, edit, modules, raises=bool(found.raised)))

    @property
    def broken(self) -> list[str]:
        """The levels for which the survey has found a problem that breaks a training."""
        return [level for level in LEVELS if any(line.breaks and level in line.levels for line in self.lines)]

    @property
    def clear(self) -> list[str]:
        """The levels for which the survey has found no problem that breaks a training."""
        return [level for level in LEVELS if level not in self.broken]

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        for line in self.lines:
            called = f" (called at {line.called})" if line.called else ""
            yield f"{line.place}{called}  {line.op}  at {', '.join(line.levels)}{line.note}"
            yield f"    {line.what}"
            yield f"    edit: {line.edit}"
        yield f"clear: {listed(self.clear)}" if self.clear else "no level is clear"
        if self.lost:
            shares = [f"{100 * share:.0f} % in {type_name(dtype)}" for dtype, share in self.lost.items()]
            yield f"updates that would be lost without masters (O3): {listed(shares)}"
        if self.measured:
            yield "measured in one step:"
            yield from (f"    {found}" for found in self.measured)
            yield from (f"    {found.note}" for found in self.measured if found.note)
        yield _JUDGES if self.measured else _BY_RULES

    def to_json(self) -> dict[str, object]:
        """Return the report for JSON.

        Returns:
            "lines": a dict for each line, with the attributes of `Line`.
            "clear": `clear`.
            "measured": a dict for each measurement.
            "lost_updates": `lost`.
        """
        return {
            "lines": [vars(line) for line in self.lines],
            "clear": self.clear,
            "lost_updates": self.lost,
            "measured": [as_dict(found) for found in self.measured],
        }
