"""What the figures of a level say beside the baseline's, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from amp_patch.lab.comparison.equal_loss import Reached
from amp_patch.lab.comparison.gap import Gap
from amp_patch.lab.recording.run import Run


class Lost(NamedTuple):
    """Runs without a figure, for one reason.

    Attributes:
        kind: "diverged"; "not finite", of a metric that was logged; "missing".
        step: of the first loss that is not finite, where they diverged.
        as_base: whether the baseline's runs of these seeds have none, too.
        eps: `Run.lost_eps`.
        seeds: of these runs.
    """

    kind: str
    step: int | None
    as_base: bool
    eps: float | None
    seeds: list[int]


class Skips(NamedTuple):
    """Of the run that skipped the largest share of its steps."""

    skipped: int
    steps: int
    seed: int


class Collapse(NamedTuple):
    """Runs whose results are finite and beyond what chance or rounding explain (`judge.COLLAPSED_RANGES`).

    Attributes:
        seeds, figures: of these runs.
        of_seeds: whether that was judged by the range of the baseline's seeds; else, with one seed, by its curve.
    """

    seeds: list[int]
    figures: list[float]
    of_seeds: bool


@dataclass(frozen=True)
class Finding:
    """What is found of a level, by the test that `Comparison.test` puts in words.

    Attributes:
        kind: "baseline"; "within", as good; "differs" (`better`, or not to be used). Where the gap at the same seed
            decides neither, by the range of the baseline's seeds: as good "so far" inside of it, if nothing says that
            it is worse at all, "no worse" beyond it on the better side, else "undecided", as with one seed.
            "unjudged", where the loss is a sum over several optimizers, as a GAN's, and tells nothing of quality;
            "failed", without a run that went well; "alone", with nothing to compare it with.
        better: whether it differs on the better side: by the test that "worse" is held to.
        by_range: whether the range of the baseline's seeds is what decides, and not the gap.
        to_the_bit: whether every loss is the baseline's.
        diverged: the runs without a figure.
        collapsed: None unless runs ended with a finite figure that no chance explains.
        rounding: the steps in which losses recorded in a low-precision type lie apart, where these are what the mean
            is "within": it is off by less than one.
        skips: None unless a run skipped more than a dynamic loss scale does that looks for its height.
        fallen_scale: what the loss scale ended at, where it fell below 1.
        faults: the runs that failed by themselves.
        lost_updates: of a level without masters (O3) the share of updates that its weights lose; None where that is
            not known.
        p: of the paired t-test; None for fewer than two pairs.
        gap: to the baseline at the same seeds; None without a pair, and for the baseline.
        reached: when the baseline had the result with which a worse level ends; None where no curve tells.
    """

    kind: str
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
    p: float | None = None
    gap: Gap | None = None
    reached: Reached | None = None

    @property
    def promising(self) -> bool:
        """Whether one seed shows nothing against the level: no interval tells, and the gap is not beyond the margin."""
        gap = self.gap
        if self.kind != "undecided" or gap is None or gap.low is not None:
            return False
        return gap.sign * gap.mean <= gap.worse_from or self.rounding is not None

    @property
    def usable(self) -> bool:
        """Whether nothing found speaks against the level's accuracy."""
        return self.kind in ("baseline", "within", "so far", "no worse") or self.better

    @property
    def rejected(self) -> bool:
        """Whether the level is not to be used: it diverged or collapsed, or is worse than chance would make it."""
        return self.kind == "differs" and not self.better

    @property
    def sound(self) -> bool:
        """Whether nothing speaks against the level but, perhaps, its skips."""
        return self.usable and not self.faults


class Verdict(NamedTuple):
    """A finding in words.

    Attributes:
        kind, better: as of `Finding`.
        text: a sentence without the level's name, without a full stop.
        reason: of the text what does not tell of speed and memory; nothing where all is as it should be.
            Errors are cut: the page, whose table it is for, has them in full elsewhere.
    """

    kind: str
    text: str
    better: bool = False
    reason: str = ""

    @property
    def usable(self) -> bool:
        """As of `Finding`."""
        return Finding(self.kind, self.better).usable
