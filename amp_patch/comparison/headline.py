"""The texts of a report's card: the level, its speed and memory, the reason, and the certainty."""

from __future__ import annotations

from amp_patch.comparison import named_lines, recommendation
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult, seeds_change_nothing
from amp_patch.comparison.plan import MEMORY, variables
from amp_patch.comparison.recommendation import of_others
from amp_patch.comparison.verdict import gap_in_words, margin_in_words, speed_in_words, what_it_tells
from amp_patch.diagnose.recording.run import NATIVE
from amp_patch.diagnose.wording import listed, ratio, relative_size, type_name
from amp_patch.environment import named_level

_TOLD = 3  # lines on the card; the terminal has all


def headline(comparison: Comparison) -> str:
    """Return the headline of the card: "Use O5 (BF16)"."""
    found, base = comparison.recommendation, comparison.baseline
    if found is None or base is None:
        return "Nothing to compare" if comparison.only is None else f"Only {label(comparison.only)} has results"
    for_now = " for now" * (found.level is base and not found.sure)
    return f"{recommendation.verb(found, base)} {label(found.level)}{for_now}"


def label(level: LevelResult) -> str:
    """Return "O5 (BF16)"; "O0 (BF16, no masters)" if the script itself makes BF16 weights."""
    what = level.name if level.level == NATIVE else level.level
    return f"{what} ({level.own_weights or type_name(level.dtype or 'float32')})"


def gains(comparison: Comparison) -> str:
    """Return "1.4x faster, 10 % less memory, same loss over 3 seeds"; "" if the baseline is recommended."""
    found = comparison.recommendation
    return "" if found is None or found.level is comparison.baseline else _capital(recommendation.gains(found))


def what_gap(comparison: Comparison) -> str:
    """Return the caption of the column of gaps."""
    gap = next((level.finding.gap for level in comparison.levels if level.finding.gap is not None), None)
    margin = f"; grey: {margin_in_words(gap)}" if gap is not None and gap.base else ""
    return f"{'higher' if comparison.maximize else 'lower'} is better; a line: its interval{margin}"


def why(comparison: Comparison) -> str:
    """Return the reason of the recommendation in a sentence; if there is none, why there is nothing to compare."""
    found, base = comparison.recommendation, comparison.baseline
    if found is None or base is None:
        return _capital(comparison.why_nothing())  # without the errors, which the table has
    best = found.level
    if best is base:
        return _capital(f"{of_others(found, base)}.")
    if found.so_far:
        return "By one seed, which cannot tell chance from a difference, nothing speaks against it."
    if "better" in found.because:
        losing = f" {_capital(comparison.losing_note)}." if comparison.losing_note else ""
        return f"Its final {comparison.metric_in_words} is better than {base.name}'s.{losing}"
    if best.level == NATIVE:
        return "No level that is as good is faster than your script, or takes less memory."
    good = "did no worse than" if best.finding.kind == "no worse" else "is as good as"
    first = f"The {'fastest' if 'smaller' not in found.because else 'smallest'} level that {good} {base.name}"
    first += ", every loss to the bit" if best.finding.to_the_bit else ""
    some = any(level.finding.sound and level.speedup and level.speedup.pace == "faster" for level in comparison.levels)
    slower = "smaller" in found.because and found.goal != MEMORY
    return first + (f"; none as good is {'much ' * some}faster than {base.name}." if slower else ".")


def how_sure(comparison: Comparison) -> str:
    """Return sentences on how certain the recommendation is: the steps, the seeds, the interval, other work.

    "" if there is no recommendation.
    """
    best, base = comparison.recommended, comparison.baseline
    if best is None or base is None:
        return ""
    said = [f"{comparison.few_steps_note}."] if comparison.few_steps_note else []
    if seeds_change_nothing(base):
        said.append("The script does not use its seeds: they count as one.")
    elif len(base.finite) < 2:
        said.append("From one seed, so without an interval: run three seeds or more.")
    if len(base.finite) > 1 and not seeds_change_nothing(base) and not best.finding.to_the_bit:
        width = relative_size(max(base.finite.values()), min(base.finite.values()))
        if best is not base and (gap := best.finding.gap) is not None:
            said.append(_capital(f"{gap_in_words(gap, base.name)}: {what_it_tells(best.finding, gap)}."))
        said.append(f"{base.name}'s own seeds lie {width} apart in {comparison.metric_in_words}.")
    if best is not base and best.speedup is not None:
        low, high = best.speedup.low, best.speedup.high
        paired = len(set(best.seeds) & set(base.seeds))
        each = f"with each of {paired} seeds" if paired > 1 else "in one run"
        span = " to ".join(dict.fromkeys(f"{ratio(each)}x" for each in (low, high)))
        said.append(f"{'Faster' if low > 1 else 'Its speed'} {each}: {span}.")
    load = comparison.load_note
    return " ".join([*said, *([f"{_capital(load)}."] if load else [])])


def what_breaks(comparison: Comparison) -> str:
    """Return the first lines of user code that break levels which ended badly, each with its edit; "" without one."""
    found = named_lines.edits(comparison.survey, comparison.levels)
    return " ".join(f"{', '.join(names)}: {line}. Edit: {line.edit}." for line, names in found[:_TOLD])


def how_to_use(comparison: Comparison) -> tuple[list[str], str]:
    """Say how to train at the recommended level.

    Returns:
        edit: the lines to add to the script.
        command: the command that trains the unedited script at the level; "" if no command made the comparison.

    `edit` and `command` are empty if the recommended level is the baseline or the script's own mixed precision, which
    need no change. They are also empty if only one seed supports the level, because one seed recommends nothing.
    """
    best, advice = comparison.recommended, comparison.recommendation
    if best is None or advice is None or advice.so_far or best is comparison.baseline or best.level == NATIVE:
        return [], ""
    other = best.other_dtype
    call = named_level(best.level).arguments(other)
    edit = [
        "from amp_patch import amp",
        "# after the line that makes the optimizer:",
        f"model, optimizer = amp.initialize(model, optimizer, {call})",
        "# in place of loss.backward():",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:",
        "    scaled_loss.backward()",
    ]
    edit = ["# in its call of amp.initialize:", call] if _is_edited(comparison) else edit
    command = f"{variables(best.level, other)} python -m amp_patch run {comparison.command}"
    return edit, command if comparison.command else ""


def _is_edited(comparison: Comparison) -> bool:
    return any(run.edited for run in comparison.runs)  # the script chooses its level by amp_patch or Apex


def is_served(comparison: Comparison) -> bool:
    """Return whether there are lines to paste for a level at which the script was trained with mended lines.

    The notes of the level's runs name these.
    """
    best = comparison.recommended
    return best is not None and any(run.notes for run in best.runs) and _pastes(comparison)


def _pastes(comparison: Comparison) -> bool:
    return bool(how_to_use(comparison)[0]) and not _is_edited(comparison)


def to_change(comparison: Comparison) -> list[str]:
    """Return the lines of the script that must change before those of `how_to_use` are pasted, each with its edit."""
    best = comparison.recommended
    if best is None or not _pastes(comparison):
        return []
    own = [*dict.fromkeys(words for run in comparison.runs for words in run.replaced)]
    replaced = [f"{listed(own)}: remove; scaler.step(optimizer) becomes optimizer.step()"] if own else []
    lines = named_lines.to_change(comparison.survey, best)
    return replaced + [f"{line.place} ({line.op}): {line.edit}" for line in lines]


def in_short(level: LevelResult, comparison: Comparison) -> str:
    """Return the level's `outcome`. For a rejected level, add why: `Finding.lost`, "collapsed" or "worse"."""
    found = level.finding
    what = found.lost if found.diverged else "collapsed" if found.collapsed else "worse"
    return outcome(level, comparison) + (f": {what}" if found.rejected else "")


# Standing of a level (recommendation.py) -> the style and the words of its row. For every other standing, `outcome`
# describes the result and the speed.
_ROWS = {
    "failed": ("bad", "failed"),
    "differs": ("bad", "do not use"),
    "undecided": ("unsure", "undecided"),
    "unjudged": ("unsure", "not judged"),
    "failed with some": ("unsure", "failed with some seeds"),
    "skips": ("unsure", "skips too many steps"),
}


def outcome(level: LevelResult, comparison: Comparison) -> str:
    """Return two or three words on a level: "use this", "failed", "as good, slower", "the baseline".

    "" if there is no recommendation, because there is nothing to compare the level with.
    """
    advice, base = comparison.recommendation, comparison.baseline
    if not level.runs:
        return "failed"
    if advice is None or base is None:
        return ""
    if level is base:
        return f"the script as it is, {level.own_weights}" if level.own_weights else "the baseline"
    if level is advice.level:
        return "so far" if advice.so_far else "use this"
    standing = advice.standing(level)
    if standing in _ROWS:
        return _ROWS[standing][1]
    good = {"differs": "better", "no worse": "no worse", "so far": "as good so far"}.get(level.finding.kind, "as good")
    if standing == "no FP32 weights":
        return f"{good}; no FP32 weights"
    if level.speedup is None:
        return good
    if level.speedup.pace in ("slower", "faster"):
        return f"{good}, {level.speedup.pace}"
    return f"{good}, {speed_in_words(level)}"


def state(level: LevelResult, comparison: Comparison) -> str:
    """Return the style of a level's row: "best", "base", "bad", "unsure" or "plain"."""
    advice = comparison.recommendation
    if level is comparison.baseline:
        return "base"
    if advice is None:
        return "bad" if not level.runs else "unsure"
    if level is advice.level:
        return "unsure" if advice.so_far else "best"
    return _ROWS.get(advice.standing(level), ("plain", ""))[0]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
