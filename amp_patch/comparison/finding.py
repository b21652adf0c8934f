"""Findings: a level's figures compared with the baseline's, as data (`Finding`) and in words (`Verdict`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from amp_patch.comparison.gap import Gap
from amp_patch.diagnose.recording.run import Run


class Lost(NamedTuple):
    """Runs of a level without a result, all for the same reason.

    Attributes:
        kind: "stopped" (fewer steps than O0's), "left out batches" (forwards that led to no step), "diverged" (a loss
            is not finite), "not finite" (a logged metric is not), or "missing" (no value).
        step: for "stopped", the number of steps; for "left out batches", that of such forwards; for "diverged", the
            step of the first loss that is not finite; else None.
        as_base: whether the baseline's runs with these seeds have no result either.
        eps: the optimizer's eps, if it is 0 in the type of the parameters (`Run.lost_eps`); else None.
        caught: unless it is "diverged", the line of the log that names an error (`Run.caught`).
        seeds: the seeds of these runs.
    """

    kind: str
    step: int | None
    as_base: bool
    eps: float | None
    caught: str
    seeds: list[int]


class Skips(NamedTuple):
    """The skipped steps of the run that skipped the largest share of its steps."""

    skipped: int
    steps: int
    seed: int


class Collapse(NamedTuple):
    """Runs with finite results that are too bad for chance or rounding (`judge.COLLAPSED_RANGES`).

    Attributes:
        seeds, figures: the seeds and results of these runs.
        of_seeds: whether the bound comes from the range of the baseline's seeds. With one seed it comes from the
            baseline's loss curve.
    """

    seeds: list[int]
    figures: list[float]
    of_seeds: bool


@dataclass(frozen=True)
class Finding:
    """The result of the test of a level. docs/compare.md describes the test.

    Attributes:
        kind: one of these:
            "baseline": the level that the others are compared with.
            "within": as good as the baseline.
            "differs": better than the baseline (`better`), or not to be used.
            "so far": as good so far. The gap at the same seeds decides nothing yet, the mean is inside the range of
            the baseline's seeds, and the gap is not surely a loss.
            "no worse": the gap decides nothing yet, and the mean is beyond that range on the better side.
            "undecided": none of these, or there is only one seed.
            "unjudged": the figures measure no quality (`unjudged`).
            "failed": no run went well.
            "alone": there is no other level to compare it with.
        unjudged: why the kind is "unjudged"; "" for other kinds:
            "sum": the loss is a sum over several optimizers, for example a GAN's.
            "both ways": some parameters maximize the loss, and others minimize it.
            "rises": the baseline's training made the loss larger.
            "direction": the baseline's training made the metric worse.
            "around 0": the baseline's loss changes its sign and does not fall, as a policy gradient's.
            "constant": the baseline's figure is the same at every step.
            "FP64": the script's weights are FP64, and every loss is the baseline's: the level casts FP32 alone.
            "start": a run began with other weights, or another batch, than the baseline's of its seed.
            "frozen": the baseline's steps change no weight.
            "left out": forwards led to no step, for a reason that is not known.
            "outlier": one run of the baseline has collapsed, and the level's run of that seed has not.
            "length": a run made fewer steps than O0's of its seed, for a reason that is not known.
            "scale": the skipped steps of the search for a loss scale explain the gap.
            "rounded": the forward rounds the loss by as much as the gap.
            "few steps": the runs have fewer than `unjudged.LEAST_STEPS` steps.
            "too good": the level is better by more than a rounding explains. Its runs may have trained on other
            batches, or have gone on from another run's checkpoint.
        better: whether the level differs on the better side. The test is as strict as that for worse.
        by_range: whether the range of the baseline's seeds decides, instead of the gap.
        to_the_bit: whether every loss equals the baseline's.
        diverged: the runs without a result.
        collapsed: the runs with a finite result that chance does not explain; None if there are none.
        rounding: if the losses were recorded in a low-precision type and the gap is at most one step of that type, the
            size of the step (the kind is then "within" or, with one seed, "undecided"); else None.
        skips: the skipped steps, if a run skipped more than a dynamic loss scale needs to find its height; else None.
        fallen_scale: the final loss scale, if it fell below 1; else None.
        faults: the runs that failed. A run that the user interrupted is not one of them.
        lost_updates: the share of updates that the weights lose, at a level without masters (O3); None if unknown.
        gap: the gap to the baseline at the same seeds; None without a pair, and for the baseline.
    """

    kind: str
    unjudged: str = ""
    better: bool = False
    by_range: bool = False
    to_the_bit: bool = False
    diverged: list[Lost] = field(default_factory=list)
    collapsed: Collapse | None = None
    rounding: float | None = None
    skips: Skips | None = None
    fallen_scale: float | None = None
    faults: list[Run] = field(default_factory=list)
    lost_updates: float | None = None
    gap: Gap | None = None

    @property
    def promising(self) -> bool:
        """Whether the level is undecided for lack of an interval (one seed), with a gap within the margin.

        Such a level can be recommended "so far" (`recommend`).
        """
        gap = self.gap
        if self.kind != "undecided" or gap is None or gap.low is not None:
            return False
        return gap.sign * gap.mean <= gap.margin or self.rounding is not None

    @property
    def lost(self) -> str:
        """How the first run without a result ended (`Lost.kind`); "" without such a run."""
        return self.diverged[0].kind if self.diverged else ""

    @property
    def usable(self) -> bool:
        """Whether the level's accuracy allows its use: no finding shows that it is worse than the baseline."""
        return self.kind in ("baseline", "within", "so far", "no worse") or self.better

    @property
    def rejected(self) -> bool:
        """Whether the level is not to be used: it diverged, collapsed, or is worse by more than chance explains."""
        return self.kind == "differs" and not self.better

    @property
    def ruled_out(self) -> bool:
        """Whether no further seed can make the level usable: it is rejected, or a run failed or skipped many steps."""
        return self.rejected or self.kind == "failed" or bool(self.faults or self.skips)

    @property
    def sound(self) -> bool:
        """Whether the level is usable and no run failed. Skipped steps are not considered."""
        return self.usable and not self.faults


class Verdict(NamedTuple):
    """A finding in words.

    Attributes:
        kind, better: the attributes of `Finding`.
        text: a sentence without the level's name and without a full stop.
        reason: the parts of the text that are not about speed or memory; "" if the level is simply as good. Errors are
            shortened: this is for the page's table, and the page has the full errors in another place.
    """

    kind: str
    text: str
    better: bool = False
    reason: str = ""

    @property
    def usable(self) -> bool:
        """The value of `Finding.usable`."""
        return Finding(self.kind, better=self.better).usable
