"""html, write: a comparison as one page that needs nothing but itself, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from amp_patch.comparison import headline, wording
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult, failures
from amp_patch.comparison.markup import items, plain, section, table
from amp_patch.comparison.rows import Row, axis, rows
from amp_patch.comparison.sections import number, sections
from amp_patch.comparison.style import style
from amp_patch.policy import OPT_LEVELS
from amp_patch.recording.run import NATIVE, dumps
from amp_patch.support.files import write_whole

# Nothing may be loaded, and nothing runs: what a user's script put into a name or an error stays text.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_FEW = 3  # notes that stand on the page unfolded


def write(comparison: Comparison, folder: str | Path) -> Path:
    """Write report.html and report.json into `folder`, which is made if it is not there; the page's path.

    Each is there whole or not at all; a symbolic link in its place is replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The numbers first: they took hours, perhaps, and a picture can fail.
    write_whole(folder / "report.json", dumps(comparison.to_dict()) + "\n")
    path = folder / "report.html"
    write_whole(path, html(comparison))
    return path


def html(comparison: Comparison) -> str:
    """The page: pictures inline, no script, no request to anything; light and dark as the reader's system is."""
    notes = [note for note in comparison.notes if note != comparison.load_note]
    parts = [
        f"<header><p><strong>{plain(comparison.title)}</strong> {plain(_about(comparison))}</p></header>",
        _card(comparison),
        _levels(comparison),
        items(notes) if len(notes) <= _FEW else section(f"Notes on the runs ({len(notes)})", items(notes)),
        *sections(comparison),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{plain(headline.headline(comparison))}: {plain(comparison.title)}</title>\n"
        f"<style>{style()}</style>\n</head>\n<body>\n<main>\n" + "\n".join(filter(None, parts)) + "\n</main>\n</body>\n"
        "</html>\n"
    )


def _about(comparison: Comparison) -> str:
    """What was compared, and on what."""
    machine = comparison.machine
    seeds = len({run.seed for run in comparison.runs})
    said = [f"{len(comparison.levels)} levels", f"{seeds} seed{'s' if seeds != 1 else ''}"]
    said += [f"{comparison.steps} steps"] if comparison.steps else []
    devices = {run.device for run in comparison.runs if run.device}
    processor = machine.get("gpu" if devices == {"cuda"} else "cpu", "")
    said += [processor] if processor and processor != "none" else sorted(devices)
    return " · ".join([*said, *([f"torch {machine['torch']}"] if "torch" in machine else [])])


def _card(comparison: Comparison) -> str:
    best = comparison.recommended
    gains = headline.gains(comparison)
    said = {"Why": headline.why(comparison), "How sure": headline.how_sure(comparison)}
    pairs = "".join(f"<dt>{name}</dt><dd>{plain(words)}</dd>" for name, words in said.items() if words)
    if best is not None and best is not comparison.baseline and best.level != NATIVE:
        pairs += f"<dt>To use it</dt><dd><code>from amp_patch import amp<br>{plain(_argument(best))}</code></dd>"
    won = best is not None and best is not comparison.baseline
    return (
        f'<section class="card"><div{" class=best" * won}><h1>{plain(headline.headline(comparison))}</h1>\n'
        + (f'<p class="gains">{plain(gains)}</p>\n' if gains else "")
        + f'<dl class="said">{pairs}</dl></div>\n{_rows(comparison)}</section>'
    )


def _argument(level: LevelResult) -> str:
    bf16_unasked = OPT_LEVELS[level.level].dtype is torch.bfloat16
    also = ", dtype=torch.bfloat16" if level.dtype == "bfloat16" and not bf16_unasked else ""
    return f'amp.initialize(..., opt_level="{level.level}"{also})'


def _rows(comparison: Comparison) -> str:
    made = rows(comparison)
    if not any(row.speed for row in made):
        return ""
    base = comparison.baseline.name if comparison.baseline is not None else "the baseline"
    better = "higher" if comparison.maximize else "lower"
    dots = f"{better} is better; a dot a seed, a line their mean; grey: {base}'s range"
    head = (
        '<div class="row head"><div></div>'
        "<div><b>Speed</b> <small>longer is faster</small></div>"
        f"<div><b>Memory</b> <small>{plain(headline.what_memory(comparison))}</small></div>"
        f"<div><b>Final {plain(comparison.metric)}</b> <small>{plain(dots)}</small></div>"
        "</div>"
    )
    labels = f'<div class="row"><svg class="axis">{axis(comparison)}</svg></div>'
    alt = plain("; ".join(row.alt for row in made))
    return f'<div class="rows" role="img" aria-label="{alt}">{head}{"".join(map(_row, made))}{labels}</div>'


def _row(row: Row) -> str:
    level = row.level
    type_name = wording.type_name(level.dtype) if level.dtype else ""
    cells = "".join(f"<svg>{cell}</svg>" for cell in (row.speed, row.memory, row.dots))
    if not row.speed:
        cells = '<div class="failed">no run went well: the table says why</div>'
    words = f"<b>{plain(level.level)}</b> {plain(type_name)} <small>{plain(row.short)}</small>"
    return f'<div class="row {row.state}"><div>{words}</div>{cells}</div>'


def _levels(comparison: Comparison) -> str:
    base, levels = comparison.baseline, comparison.levels
    if not levels:
        return ""
    of_base = plain(f"from {base.name}") if base is not None else "difference"
    unit, sizes = wording.sizes([level.memory_bytes or 0 for level in levels])
    head = ["level", "finding", f"final {plain(comparison.metric)}", of_base, "step, ms", "speed", "samples/s"]
    head += [f"memory, {unit}", "last loss scale", "skipped steps", "failed runs"]
    lines = []
    for level, size in zip(levels, sizes, strict=True):
        other = base is not None and level is not base
        lines.append(
            [
                plain(level.heading),
                _finding(level, comparison),
                number(level.mean) + (f"<small>{_several(level.final)}</small>" if len(level.final) > 1 else ""),
                wording.signed_percent(level.mean, base.mean) if base is not None and other else "",
                wording.three(level.step_ms) if level.step_ms else "",
                _speed(level) if other else "",
                wording.three(level.samples_per_second) if level.samples_per_second else "",
                size if level.memory_bytes else "",
                _several(level.scales, wording.power) if any(scale != 1 for scale in level.scales) else "",
                _several(level.skips, str) if any(level.skips) else "",
                f"{len(level.failed)} of {len(level.failed) + len(level.runs)}" if level.failed else "",
            ]
        )
    return table("The levels", head, lines, texts=["finding"])


def _finding(level: LevelResult, comparison: Comparison) -> str:
    word, _ = headline.outcome(level, comparison)  # the reason has the rest
    reason = level.verdict.reason if level.runs else "; failed with ".join(failures(level))
    first = f'<span class="finding {headline.state(level, comparison)}">{plain(word)}</span>' if word else ""
    return ": ".join(filter(None, [first, plain(reason)]))


def _speed(level: LevelResult) -> str:
    if level.speedup is None:
        return ""
    median, low, high = (f"{value:.2f}" for value in level.speedup)
    return f"{median}x" + (f"<small>{low} to {high}</small>" if low != high else "")


def _several(values: Sequence[float], words: Callable[[float], str] = number) -> str:
    """One number a seed; one for all where they agree."""
    texts = [words(value) for value in values]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])
