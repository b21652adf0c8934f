"""html, write: a comparison as one page that needs nothing but itself, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from amp_patch.comparison import drawing, measures, number_pictures, pictures, wording
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.drawing import Picture
from amp_patch.comparison.level_result import LevelResult
from amp_patch.recording.run import PARTS, Look, Run, dumps

_KINDS = {
    "baseline": "the baseline",
    "within": "within the spread",
    "differs": "differs",
    "undecided": "undecided",
    "failed": "failed",
    "alone": "nothing to compare with",
}
_LISTED = 12  # parameters of which the page tells what FP16 loses

# Nothing may be loaded, and nothing runs: what a user's script put into a name or an error stays text.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px }
h2 { font-size: 1.2rem; margin: 44px 0 10px; padding-top: 10px; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 26px 0 8px }
p, ul { margin: 8px 0 }
p, .verdicts, .plain { max-width: 76ch }
.soft, small { color: var(--soft) }
.summary { font-size: 1.35rem; line-height: 1.4; font-weight: 600; margin: 20px 0; padding: 14px 18px;
  border-left: 5px solid var(--O0); background: var(--card); border-radius: 4px }
.verdicts { list-style: none; padding: 0 }
.verdicts li { padding: 8px 0 8px 14px; margin: 6px 0; border-left: 4px solid var(--behind) }
.kind { display: inline-block; border: 1px solid currentColor; border-radius: 10px; padding: 0 9px; margin: 0 6px;
  font-size: 0.85rem }
.within, .better { color: var(--good) } .differs, .failed { color: var(--lost) } .undecided { color: var(--unsure) }
.tables { display: flex; flex-wrap: wrap; gap: 0 56px }
.tables > div { min-width: 0; max-width: 100%; margin-top: 14px }
.tables p { margin: 0 }
.scroll { overflow-x: auto; margin: 6px 0; max-width: 100% }
.scroll:focus-visible { outline: 2px solid var(--O1) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem }
th, td { padding: 6px 14px 6px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: nowrap; overflow-wrap: normal }
th:first-child, td:first-child, td.text, th.text { text-align: left }
td.text { white-space: normal; min-width: 16em }
th[scope=row] { position: sticky; left: 0; background: var(--paper) }
.named th[scope=row] { position: static; white-space: normal; overflow-wrap: anywhere; min-width: 11em }
.named thead th { white-space: normal; min-width: 6em }
thead th { color: var(--soft); font-weight: 600; border-bottom-color: var(--soft); vertical-align: bottom }
td small { display: block; white-space: normal; min-width: 9em; max-width: 17em; margin-left: auto }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: 22px 28px;
  align-items: start }
figure { margin: 0; break-inside: avoid }
svg { display: block; width: 100%; height: auto; overflow: hidden }
svg * { stroke-linejoin: round; stroke-linecap: butt }
svg text { font-family: system-ui, sans-serif !important }
pre { background: var(--card); border-radius: 4px; padding: 10px 14px; margin: 8px 0; white-space: pre-wrap;
  font: 0.88rem/1.45 ui-monospace, monospace }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; max-width: 76ch }
dt { color: var(--soft) } dd { margin: 0 }
@media (max-width: 600px) { main { padding: 16px 14px 32px } .summary { font-size: 1.15rem; padding: 12px 14px } }
@media print { .scroll { overflow: visible } main { max-width: none; padding: 0 } :root { font-size: 11px }
  body { font-size: 1rem }
  th, td, .named th[scope=row] { padding-right: 8px; white-space: normal; min-width: 0 } td small { min-width: 0 }
  td.text { min-width: 9em } h2, h3 { break-after: avoid } tr { break-inside: avoid } }
"""
_MORE_COLOURS = {"card": ("#f4f5f7", "#1e2329"), "good": ("#1a7f37", "#56d06f"), "unsure": ("#8a5a00", "#e3b341")}


def write(comparison: Comparison, folder: str | Path) -> Path:
    """Write report.html and report.json into `folder`, which is made if it is not there; the page's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The figures first: they took hours, perhaps, and a picture can fail. A user's text can hold what UTF-8 has no form
    # for: a file name's stray byte.
    figures = dumps(comparison.to_dict())
    (folder / "report.json").write_text(figures + "\n", encoding="utf-8", errors="replace")
    path = folder / "report.html"
    path.write_text(html(comparison), encoding="utf-8", errors="replace")
    return path


def html(comparison: Comparison) -> str:
    """The page: pictures inline, no script, no request to anything; light and dark as the reader's system is."""
    runs = comparison.runs
    seeds = len({run.seed for run in runs})
    well = any(level.runs for level in comparison.levels)
    about = [f"{_count(len(comparison.levels), 'level')}, {_count(seeds, 'seed')}"]
    about += [f"{comparison.steps} steps"] if comparison.steps else []
    about += sorted({run.device for run in runs if run.device})
    parts = [
        f"<h1>{_text(comparison.title)}: opt levels compared</h1>",
        f'<p class="soft">{_text(", ".join(about))}</p>',
        f'<p class="summary">{_text(comparison.summary)}</p>',
        '<ul class="verdicts">' + "".join(map(_verdict, comparison.levels)) + "</ul>" if comparison.levels else "",
        _items([_text(note) for note in comparison.notes]),
        _section("How it was decided", f"<p>{_text(comparison.test)}</p>" if well else ""),
        _section("The levels", _levels(comparison) if well else ""),
        _section("The figure at the end", _figures(pictures.finals(comparison))),
        _section("Training loss", _figures(pictures.losses(comparison))),
        _section("Time and memory", _figures(pictures.costs(comparison)) + _splits(comparison)),
        _section("Loss scale", _figures(pictures.scales(comparison))),
        _section("What failed", _failures(comparison)),
        _section("What the numbers look like", "".join(map(_seen, comparison.levels))),
        _section("What each level is", _definitions(_policies(comparison))),
        _section("The machine", _definitions(comparison.machine)),
        _section("Every run", _runs(comparison)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{_text(comparison.title)}: opt levels compared</title>\n"
        f"<style>{_colours()}{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def _colours() -> str:
    """Every colour as a variable; on paper the light ones."""
    every = {**drawing.COLOURS, **_MORE_COLOURS}
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in every.items()) for i in (0, 1))
    return (
        f"\n:root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def _verdict(level: LevelResult) -> str:
    kind, text, better, _ = level.verdict
    word = "better" if better and kind == "differs" else _KINDS[kind]
    look = "better" if better and kind == "differs" else kind
    text = f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""
    return (
        f'<li style="border-color: var(--{drawing.colour(level.level)})"><strong>{_text(level.name)}</strong>'
        f'<span class="kind {look}">{_text(word)}</span>{_text(text)}</li>'
    )


def _levels(comparison: Comparison) -> str:
    base = comparison.baseline
    against = f"against {base.name}" if base is not None else "against the baseline"
    head = [
        "level",
        f"final {comparison.metric}",
        against,
        "step",
        "speed",
        "samples/s",
        "peak memory",
        against,
        "last scale",
        "skips",
        "failed",
    ]
    rows = []
    for level in comparison.levels:
        peaks = [run.peak_memory for run in level.runs if run.peak_memory is not None]
        rows.append(
            [
                _text(level.name),
                _number(level.mean) + (f"<small>{_several(level.final)}</small>" if len(level.final) > 1 else ""),
                "" if base is None or level is base else _apart(level.mean, base.mean),
                f"{level.step_ms:.3g} ms" if level.step_ms else "",
                "" if level is base else _speed(level),
                f"{level.samples_per_second:,.4g}" if level.samples_per_second else "",
                wording.size(sum(peaks) / len(peaks)) if peaks else "",
                f"{level.memory_ratio:.2f}x" if level.memory_ratio is not None and level is not base else "",
                _several(level.scales),
                _several(level.skips),
                f"{len(level.failed)} of {len(level.failed) + len(level.runs)}" if level.failed else "",
            ]
        )
    return _table("Under the mean, the figure of each seed; of the speed, its range over the seeds.", head, rows)


def _splits(comparison: Comparison) -> str:
    times, sizes = [], []
    for level in (level for level in comparison.levels if level.runs):
        split = measures.part_ms(level.runs, level.step_ms)
        times.append([_text(level.name), *(f"{split[part]:.3g} ms" for part in PARTS)])
        runs = level.runs
        kinds = [sum(getattr(run, name) for run in runs) / len(runs) for name in wording.SIZES]
        sizes.append([_text(level.name), *(wording.size(each) for each in (*kinds, sum(kinds)))])
    if not times:
        return ""
    return _tables(
        _table("Where the time of a step goes.", ["level", *wording.PARTS_IN_WORDS.values()], times),
        _table("What the model's tensors take.", ["level", *wording.SIZES.values(), "together"], sizes),
    )


def _failures(comparison: Comparison) -> str:
    """The errors, each once, with the runs that had it."""
    runs_of: dict[str, list[str]] = {}
    for level in comparison.levels:
        for run in level.failed:
            where = f"{level.name}, seed {run.seed}" + (f", after {_count(run.steps, 'step')}" if run.steps else "")
            runs_of.setdefault(run.error or "recorded no step", []).append(where)
    return "".join(f"<h3>{_text('; '.join(w))}</h3><pre>{_text(error)}</pre>" for error, w in runs_of.items())


def _seen(level: LevelResult) -> str:
    """What `amp.inspect` saw at a level."""
    looked = [(run, look) for run in (*level.runs, *level.failed) for look in run.looks]
    if not looked:
        return ""
    looks = [look for _, look in looked]
    steps = sorted({look.step for look in looks})
    parts = [f"<h3>{_text(level.name)}</h3>", _figures(number_pictures.numbers(level))]
    bad = [
        f"Seed {run.seed}: {look.not_finite}" + ("" if look in run.overflows else "; later looks saw nothing like it")
        for run, look in looked
        if look.not_finite
    ]
    names = list(dict.fromkeys(name for run in (*level.runs, *level.failed) for name in run.keep_fp32))
    when = (
        f"of step {steps[0] + 1}"
        if len(steps) == 1
        else f"of {len(steps)} steps, from {steps[0] + 1} to {steps[-1] + 1}"
    )
    parts.append(f'<p class="soft">What is shown is {when}.</p>')
    if bad:
        parts += ["<p>Where the first number that is not finite appeared:</p>", _items([_text(each) for each in bad])]
    if names:
        parts.append(f"<p>Best kept in FP32:</p><pre>amp.initialize(..., keep_fp32={_text(repr(names))})</pre>")
    errors = [*measures.errors(looks).items()][: number_pictures.WORST]
    rows = [[_text(name or "the model itself"), _number(error)] for name, error in errors]
    head = ["module", "relative error"]
    worst = _table("Modules whose output differs most from FP32's.", head, rows, named=True) if rows else ""
    return "".join(parts) + _tables(worst, _lost(looks))


def _lost(looks: Sequence[Look]) -> str:
    """Of which gradients FP16 loses most: the largest shares of all looks."""
    none = [0.0, 0.0, 0.0]
    shares: dict[str, list[float]] = {}
    for look in looks:
        for name in {**look.flushed, **look.overflowed}:
            here = [*look.flushed.get(name, none), look.overflowed.get(name, none)[0]]
            shares[name] = [max(pair) for pair in zip(here, shares.get(name, [0.0] * 4), strict=True)]
    worst = sorted(((name, each) for name, each in shares.items() if any(each)), key=lambda item: -max(item[1]))
    if not worst:
        return ""
    head = ["parameter", "flush at the scale in use", "at scale 1", "at the best", "overflow at the scale in use"]
    rows = [[_text(name), *map(wording.percent, each)] for name, each in worst[:_LISTED]]
    return _table("Parameters of whose gradients FP16 loses most.", head, rows, named=True)


def _policies(comparison: Comparison) -> dict[str, str]:
    """label of a level -> its policy, in words."""
    policies = {
        level.name: [*dict.fromkeys(run.policy for run in (*level.runs, *level.failed) if run.policy)]
        for level in comparison.levels
    }
    return {name: "; ".join(words) for name, words in policies.items() if words}


def _runs(comparison: Comparison) -> str:
    metric = comparison.metric
    head = ["level", "seed", "steps", "last loss", *([metric] if metric != "loss" else []), "median step", "skips"]
    head += ["weights", "peak memory", "notes"]
    rows = []
    for level in comparison.levels:
        for run in sorted((*level.runs, *level.failed), key=lambda run: run.seed):
            rows.append([_text(level.name), *_run(run, metric)])
    return _tables(_table("", head, rows)) if rows else ""


def _run(run: Run, metric: str) -> list[str]:
    seconds = sorted(each for each in run.seconds if math.isfinite(each))
    logged = run.logged.get(metric, [])
    return [
        str(run.seed),
        str(run.steps),
        _number(run.loss[-1] if run.loss else None),
        *([_number(logged[-1][1] if logged else None)] if metric != "loss" else []),
        f"{1000 * seconds[len(seconds) // 2]:.3g} ms" if seconds else "",
        str(sum(run.skipped)),
        wording.size(run.weights) if run.weights else "",
        wording.size(run.peak_memory) if run.peak_memory is not None else "",
        _text("; ".join([*(["failed"] if run.error else []), *run.notes])),
    ]


def _section(title: str, content: str) -> str:
    """Nothing where there is no content."""
    return f"<section>\n<h2>{_text(title)}</h2>\n{content}\n</section>" if content else ""


def _figures(several: Sequence[Picture]) -> str:
    if not several:
        return ""
    return '<div class="pictures">' + "".join(f"<figure>{each.svg}</figure>" for each in several) + "</div>"


def _items(items: Iterable[str]) -> str:
    lines = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="plain">{lines}</ul>' if lines else ""


def _definitions(pairs: dict[str, Any]) -> str:
    lines = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in pairs.items())
    return f"<dl>{lines}</dl>" if lines else ""


def _tables(*several: str) -> str:
    """Side by side where there is room."""
    return f'<div class="tables">{"".join(several)}</div>' if any(several) else ""


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, named: bool = False) -> str:
    """A table of HTML cells, in a box of its own that scrolls; the first cell of a row is its heading.

    A column without a figure is left out.

    `named`: those are names of the user's, which can be long: they are broken into lines.
    """
    kept = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
    rows = [[row[place] for place in kept] for row in rows]
    columns = [(head[place], ' class="text"' if head[place] == "notes" else "") for place in kept]
    top = "".join(f'<th scope="col"{look}>{_text(name)}</th>' for name, look in columns)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{look}>{cell}</td>" for cell, (_, look) in zip(others, columns[1:], strict=True))
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    words = _text(title or head[0])
    return (
        (f'<div><p class="soft">{words}</p>' if title else "<div>")
        + f'<div class="scroll{" named" * named}" role="region" tabindex="0" aria-label="{words}">'
        + f'<table aria-label="{words}"><thead><tr>{top}</tr></thead>'
        + f"<tbody>{''.join(lines)}</tbody></table></div></div>"
    )


def _speed(level: LevelResult) -> str:
    if level.speedup is None:
        return ""
    median, low, high = level.speedup
    return f"{median:.2f}x<small>{low:.2f} to {high:.2f}</small>"


def _apart(figure: float | None, base: float | None) -> str:
    if figure is None or base is None:
        return ""
    return f"{100 * (figure - base) / abs(base):+.2f} %" if base else f"{figure - base:+.3g}"


def _several(values: Sequence[float]) -> str:
    """One figure a seed; one for all where they agree."""
    texts = [_number(value) for value in values]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}" if math.isfinite(value) else "not finite"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _text(value: Any) -> str:
    return escape(str(value))
