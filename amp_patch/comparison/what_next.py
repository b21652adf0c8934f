"""The commands that a report advises to run next, and its advice in words if there is none."""

from __future__ import annotations

import shlex

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.headline import how_to_use
from amp_patch.comparison.plan import SEEDS
from amp_patch.comparison.recommendation import verb
from amp_patch.comparison.unjudged import FEW_STEPS, LEAST_STEPS, in_words
from amp_patch.comparison.verdict import more_seeds
from amp_patch.diagnose.recording.run import NATIVE

_OF_SEARCH = ("--dtype", "--steps", "--seed-flag", "--metric", "--maximize", "--margin", "--device")


def commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs in the order of a reader's use; the last command is the one to run next."""
    resume = f"python -m amp_patch compare --resume {shlex.quote(comparison.folder)}" if comparison.folder else ""
    found = [("use it without an edit", how_to_use(comparison)[1]), ("be sure", to_be_sure(comparison))]
    if comparison.cut:
        found.append(("make the runs that are missing", resume))
    elif comparison.seeds_to_tell is not None and resume:
        found.append((f"be sure of the {comparison.metric_in_words}", f"{resume} --seeds {comparison.seeds_to_tell}"))
    else:
        found.append(_search(comparison))
    return [(purpose, command) for purpose, command in found if command]


def to_be_sure(comparison: Comparison) -> str:
    """If one seed decides nothing, return the shell command that compares with more seeds, in a folder of its own.

    It names each level that is not ruled out, and asks for more steps if there were too few. "" if the baseline has
    more seeds, if no command made the comparison, or if nothing is left to decide.
    """
    found, base, steps = comparison.recommendation, comparison.baseline, comparison.asked_steps
    if not comparison.again or found is None or base is None or len(base.finite) > 1:
        return ""
    few = steps is not None and comparison.steps < LEAST_STEPS
    if not (found.so_far or few or "undecided" in found.because):
        return ""
    left = [level.level for level in comparison.levels if level is not base and not level.finding.ruled_out]
    names, again = ",".join(name for name in left if name != NATIVE), comparison.again
    if steps is not None and steps < FEW_STEPS:
        again = again.replace(f"--steps={steps}", f"--steps={FEW_STEPS}", 1)
    out = f"--out={shlex.quote(f'{comparison.folder}-sure')} " if comparison.folder else ""
    return f"python -m amp_patch compare --levels {names} --seeds {SEEDS} {out}{again}" if names else ""


def advice(comparison: Comparison) -> str:
    """Return the next action in words, for a report that has no command to run."""
    found, base = comparison.recommendation, comparison.baseline
    if found is None or base is None:
        return "Mend what failed, and compare again." if any(level.failed for level in comparison.levels) else ""
    if found.level is not base:
        return "Nothing: it is your script as it is." if found.level.level == NATIVE else "Train with it."
    if "unjudged" in found.because:
        level = found.because["unjudged"][0]
        _, way_out = in_words(level.finding.unjudged, level, base)
        return f"{way_out[0].upper()}{way_out[1:]}."
    if "undecided" in found.because:
        words = more_seeds(base, found.because["undecided"])
        return f"{words[0].upper()}{words[1:]}."
    if verb(found, base) == "Go back to":
        return "Remove the script's own autocast and GradScaler."
    return f"Nothing: {base.level} is the script as it is."


def _search(comparison: Comparison) -> tuple[str, str]:
    """Return (purpose, command) of a module search, if a level is worse and the baseline is recommended.

    Otherwise return ("", "").
    """
    found, base = comparison.recommendation, comparison.baseline
    if found is None or found.level is not base or not comparison.again:
        return "", ""
    worse = [level for level in found.because.get("differs", []) if level.level != NATIVE]
    # If the optimizer's eps is 0 in FP16, or the script catches errors, no kept module helps.
    worse = [each for each in worse if not each.stopped and all(lost.eps is None for lost in each.finding.diverged)]
    if not worse:
        return "", ""
    level, words = worse[-1].level, shlex.split(comparison.again)
    script = next((i for i, word in enumerate(words) if word == "-m" or not word.startswith("-")), len(words))
    options = [word for word in words[:script] if word.partition("=")[0] in _OF_SEARCH]
    command = shlex.join(["python", "-m", "amp_patch", "search", "--level", level, *options, *words[script:]])
    return f"find the modules that {level} needs in a higher precision", command
