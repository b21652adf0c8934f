"""Verdicts: the findings of levels in words. judge.py tests the levels, and so decides the findings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from amp_patch.comparison import unjudged
from amp_patch.comparison.finding import Collapse, Finding, Lost, Verdict
from amp_patch.comparison.gap import CONFIDENCE, Gap
from amp_patch.comparison.judge import COLLAPSED_RANGES
from amp_patch.comparison.level_result import (
    LevelResult,
    failures,
    has_no_spread,
    seeds_change_nothing,
    seeds_in_words,
)
from amp_patch.comparison.lost_without_masters import lost_by_weights
from amp_patch.diagnose.wording import (
    counted,
    fine_percent,
    metric_in_words,
    relative_distance,
    shortest_distinct,
    signed,
    signed_percents,
    times,
    two,
    whole_percent,
)

_NOISY = "it cannot be told with results this noisy: take more steps, or a metric"


def verdict(level: LevelResult, base: LevelResult | None, found: Finding, metric: str) -> Verdict:
    """Put the finding of a level, which `judge` has made, into words.

    Args:
        base: the baseline; None if no level has figures.
        found: the finding.
        metric: "loss", or a name given to `amp.log`.
    """
    failed, cut = failures_in_words(level), failures_in_words(level, short=True)
    lost = "; ".join(_lost(each, metric, base) for each in found.diverged)
    what = f"final {metric_in_words(metric)}"
    if not level.runs:
        return Verdict(found.kind, failed, reason=cut)
    if base is None:
        return Verdict(found.kind, lost, reason=lost)
    skips, without = _skips(found), lost_by_weights(found.lost_updates)
    if level is base:
        as_is = f"the script as it is, {base.own_weights}: " if base.own_weights else ""
        own = f"{as_is}{what} {_mean_and_spread(base)}"
        return Verdict(found.kind, _joined(own, lost, skips, failed), reason=_joined(lost, skips, cut))
    collapsed = _collapsed(found.collapsed, base, what) if found.collapsed else ""
    accuracy = _joined(lost, collapsed) or _accuracy(found, level, base, what)
    if found.rejected:
        text = _joined("do not use: " + accuracy, without, skips, cost(level), failed)
    else:
        first = (accuracy, cost(level)) if found.better else (cost(level), accuracy)
        text = _joined(*first, without, skips, failed)
    if found.collapsed:  # the text has the rule of a collapse
        accuracy = _joined(lost, _collapsed_seeds(found.collapsed, what))
    elif found.gap is not None and not (lost or found.unjudged or seeds_change_nothing(base)):  # the gap has a column
        accuracy = f"every loss as {base.name}'s, to the bit" if found.to_the_bit else ""
        if found.by_range or (found.gap.told is None and found.gap.low is not None):
            accuracy = what_it_tells(found, found.gap)
    return Verdict(found.kind, text, found.better, _joined(accuracy, without, skips, cut))


def failures_in_words(level: LevelResult, *, short: bool = False) -> str:
    """List the level's failed seeds and their errors, in full or shortened; "" if no run failed."""
    return "; ".join(f"failed with {each}" for each in failures(level, short=short))


def more_seeds(base: LevelResult, undecided: Sequence[LevelResult] = ()) -> str:
    """Return the advice for a comparison whose seeds do not decide: "run 4 more seeds".

    If the script does not use its seeds, the advice is to let it use them.

    Args:
        undecided: the levels that the seeds are to decide. If it is empty, or if the number of seeds for one of them
            is unknown, the advice has no number.
    """
    if seeds_change_nothing(base):
        return "let the script use the seeds"
    more = [level.finding.gap.more_seeds for level in undecided if level.finding.gap is not None]
    if any(level.finding.gap is not None and level.finding.gap.is_noisy for level in undecided):
        return _NOISY
    known = [each for each in more if each is not None]
    if known and len(known) == len(undecided):
        return f"run {counted(max(known), 'more seed')}"
    return "run more seeds" if len(base.finite) > 2 else "run three seeds or more"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _mean_and_spread(base: LevelResult) -> str:
    spread = list(base.finite.values())
    text, low, high = shortest_distinct(statistics.mean(spread), min(spread), max(spread))
    return text + (f" over {len(spread)} seeds ({low} to {high})" if len(spread) > 1 else "")


def _accuracy(found: Finding, level: LevelResult, base: LevelResult, figure: str) -> str:
    """Put the accuracy of a level into words.

    `verdict` uses the result only if no run of the level has diverged or collapsed: otherwise the words for these runs
    stand in its place.
    """
    gap = found.gap
    if gap is None:
        return f"no seed of it has a result of {base.name}'s to compare with"
    if found.to_the_bit and not found.unjudged:
        return f"{figure} {shortest_distinct(gap.level)[0]}, every loss the same as {base.name}'s, to the bit"
    distance = relative_distance(gap.level, gap.base)
    if found.kind == "unjudged":
        return f"{figure} {distance} {base.name}'s: {'; '.join(unjudged.in_words(found.unjudged, level, base))}"
    if has_no_spread(base):
        what = "the seeds change nothing" if len(base.finite) > 1 else "one seed, so without an interval"
        return f"{what}: {figure} {distance} {base.name}'s; {more_seeds(base)} to judge it"
    if found.rounding is not None:
        step = fine_percent(found.rounding / abs(gap.level))
        off = f"{figure} {shortest_distinct(gap.level, gap.base)[0]}, {distance} {base.name}'s"
        return f"{off}: less than the steps of {step} in which losses were recorded"
    words = f"{gap_in_words(gap, base.name)}: {what_it_tells(found, gap)}"
    if not found.by_range and gap.told is not None:
        return f"{figure} {shortest_distinct(gap.level, gap.base)[0]}, {words}"
    return f"{_beside_the_range(found, gap, base, figure)}; {words}"


def _beside_the_range(found: Finding, gap: Gap, base: LevelResult, figure: str) -> str:
    """Put into words how the level's mean result compares with the range of the baseline's seeds."""
    low, high = min(base.finite.values()), max(base.finite.values())
    text, low_, high_ = shortest_distinct(gap.level, low, high)
    spread = f"the spread of {base.name}'s {len(base.finite)} seeds ({low_} to {high_})"
    if low <= gap.level <= high:
        return f"{figure} {text} within {spread}"
    better = ", better: " if found.better else ", no worse: " if found.kind == "no worse" else ", "
    of_base = shortest_distinct(gap.base)[0]
    distance = relative_distance(gap.level, gap.base)
    outside = f"{figure} {text}{better}{distance} {base.name}'s {of_base}, outside {spread}"
    if gap.low is None:
        return f"{outside}, with one seed"
    return outside if found.kind == "differs" else f"{outside}, which may be chance"


def what_it_tells(found: Finding, gap: Gap) -> str:
    """Put into words what a gap shows, with its interval or without one."""
    if found.rounding is not None:
        return "the losses are rounded, less than their steps is not seen"
    if not found.by_range and gap.told is not None:
        return f"{gap.told} ({margin_in_words(gap)})"
    if gap.decorrelated:
        said = "the runs have decorrelated, it tells no more than the spread"
        return said if found.kind != "undecided" else f"{said}; {_more_in_words(gap)}"
    if gap.is_slight:
        return f"more than the {margin_in_words(gap)}, and little of what the training gained"
    what = "worse, by how much" if gap.is_loss else "as good or not"
    return f"{what} ({margin_in_words(gap)}) cannot be told yet; {_more_in_words(gap)}"


def _more_in_words(gap: Gap) -> str:
    """Return "4 more seeds would tell", or the advice if the number is unknown."""
    if gap.more_seeds is None:
        return _NOISY if gap.is_noisy else "run more seeds"
    return f"{counted(gap.more_seeds, 'more seed')} would tell"


def gap_in_words(gap: Gap, base: str) -> str:
    """Format a gap: "gap to O0 +0.0012 (+0.052 %, 95 %: -0.02 to +0.12 %)"."""
    interval = interval_of(gap) or "one seed, so without an interval"
    return f"gap to {base} {signed(gap.mean)} ({', '.join(filter(None, [percent_of(gap), interval]))})"


def percent_of(gap: Gap) -> str:
    """Format the gap in per cent of the baseline: "+0.052 %"; "" if the baseline is 0."""
    share = gap.share(gap.mean)
    return "" if share is None else f"{signed_percents(share)[0]} %"


def interval_of(gap: Gap) -> str:
    """Format the interval: "95 %: -0.02 to +0.12 %", without per cent if the baseline is 0; "" without an interval."""
    if gap.low is None or gap.high is None:
        return ""
    low, high = gap.share(gap.low), gap.share(gap.high)
    if low is None or high is None:
        return f"{whole_percent(CONFIDENCE)}: {signed(gap.low)} to {signed(gap.high)}"
    return f"{whole_percent(CONFIDENCE)}: {' to '.join(signed_percents(low, high))} %"


def margin_in_words(gap: Gap) -> str:
    """Format the margin: "margin 0.2 %"."""
    share = gap.share(gap.margin)
    return f"margin {fine_percent(share)}" if share is not None else "margin 0"


def _collapsed(collapsed: Collapse, base: LevelResult, what: str) -> str:
    said = _collapsed_seeds(collapsed, what)
    if not collapsed.of_seeds:
        return f"{said}, further above every loss of {base.name}'s than those lie apart"
    low, high = shortest_distinct(min(base.finite.values()), max(base.finite.values()))
    return (
        f"{said}, where {base.name}'s {len(base.finite)} seeds end at {low} to {high}: further off than "
        f"{COLLAPSED_RANGES} times their range, and than half of what {base.name}'s training gained"
    )


def _collapsed_seeds(collapsed: Collapse, what: str) -> str:
    least, most = shortest_distinct(min(collapsed.figures), max(collapsed.figures))
    ended = least if least == most else f"{least} to {most}"
    return f"collapsed with {seeds_in_words(collapsed.seeds)}: {what} {ended}"


def _lost(lost: Lost, metric: str, base: LevelResult | None) -> str:
    if lost.kind == "left out batches":
        named = base.name if base is not None else "the baseline"
        said = f": {lost.caught}" if lost.caught else ", as after an error, or a loss that is not finite"
        return f"{lost.step} forwards more than {named}'s led to no step with {seeds_in_words(lost.seeds)}{said}"
    if lost.kind == "stopped":
        of = max((run.steps for run in base.runs if run.seed in lost.seeds), default=0) if base is not None else 0
        said = f": {lost.caught}" if lost.caught else ", by itself or after an error that the script catches"
        return f"made {lost.step} of {counted(of, 'step')} with {seeds_in_words(lost.seeds)}{said}"
    what = {"diverged": "diverged", "not finite": f"{metric} was not finite", "missing": f"gave no {metric}"}[lost.kind]
    at = "" if lost.step is None else f" at step {lost.step}"
    as_base = f", as {base.name} did" if base is not None and lost.as_base else ""
    eps = "" if lost.eps is None else f": its optimizer's eps {lost.eps:g} is 0 in FP16; take eps=1e-4 or more, or O2"
    said = f": {lost.caught}" if lost.caught else ""
    return f"{what} with {seeds_in_words(lost.seeds)}{at}{as_base}{eps}{said}"


def _skips(found: Finding) -> str:
    """Put skipped steps and a fallen loss scale into words; "" if the finding has neither."""
    words = []
    if found.skips is not None:
        words.append("{} of {} steps were skipped with seed {}".format(*found.skips))
    if found.fallen_scale is not None:
        words.append(f"the loss scale fell to {two(found.fallen_scale)}")
    return ", ".join(words)


def cost(level: LevelResult) -> str:
    """Return "1.8x faster, 12 % less memory", relative to the baseline's."""
    parts = ["emulated: no speed, no memory"] if level.emulated else [speed_in_words(level), memory_in_words(level)]
    return ", ".join(filter(None, parts))


def speed_in_words(level: LevelResult) -> str:
    """Return "1.8x faster"; "" if the speed is not known."""
    if level.speedup is None:
        return ""
    median, pace = level.speedup.median, level.speedup.pace
    if pace in ("faster", "slower"):
        return f"{times(max(median, 1 / median))[0]}x {pace}"
    return pace if pace == "as fast" else f"speed {pace}"


def memory_in_words(level: LevelResult) -> str:
    """Return "12 % less memory", relative to the baseline's; "" if it is not known."""
    if level.memory is None:
        return ""
    percent = round(100 * (level.memory - 1))
    what = "memory" if level.memory_ratio is not None else "memory for weights and optimizer"
    return f"same {what}" if percent == 0 else f"{abs(percent)} % {'more' if percent > 0 else 'less'} {what}"
