"""Search for the largest batch of a training that fits a given memory: the batches to try, and their results.

A trial is a short run of the script with one batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amp_patch.lab import wording
from amp_patch.lab.comparison.plan import BASELINE
from amp_patch.lab.text_table import in_columns
from amp_patch.lab.wording import figure, level_name, listed

_FIRST = 8  # the batch of the first trial: it fits for most models, and batch norm has enough samples
_GROWTH = 8  # a trial has at most this many times the best batch, until three trials show memory linear in the batch
_STRAIGHT = 0.01  # a line that misses a third trial by less than this share of its memory range is trusted
_MOST = 16  # the most trials of a level

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b?", re.IGNORECASE)


def size_in_bytes(text: str) -> int:
    """Read a size with a unit: "8GiB" is 8 * 2**30 bytes, "8GB" is 8 * 10**9 bytes.

    Raises:
        ValueError: `text` is not a positive number with such a unit.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        number, unit, binary = found.groups()
        bytes_ = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))
    if found is None or not bytes_:
        raise ValueError(f"compare: --batch-search is {text!r}; wanted a size, as 8GiB or 512MiB")
    return bytes_


@dataclass(frozen=True)
class Trial:
    """A short run with one batch.

    Attributes:
        batch: the value of the script's batch flag.
        memory: bytes, by `measures.memory_bytes`; None if the run failed.
        samples: the number of samples of one step, over all its micro-batches; 0 if unknown.
        samples_per_second: the number of samples per second, over the few steps of the run; None if unknown.
        error: the reason why the run has no figures; None if it has.
        ran_out: whether the run failed because memory ran out.
        given: the sizes of the model's first tensor if the batch dimension is unknown (`samples` then counts
            dimension 0); empty if it is known.
    """

    batch: int
    memory: int | None = None
    samples: int = 0
    samples_per_second: float | None = None
    error: str | None = None
    ran_out: bool = False
    given: tuple[int, ...] = ()


@dataclass(frozen=True)
class Search:
    """The search for the largest batch of one level: its trials so far.

    Attributes:
        dtype: the level's low-precision type; None at O0.
        limit: the memory that a batch may take, in bytes.
        tried: the trials, in the order of their runs.
        first: the batch of the first trial.
    """

    level: str
    dtype: str | None
    limit: int
    tried: list[Trial]
    first: int = _FIRST

    @property
    def name(self) -> str:
        """The level with its type: "O2 FP16", or "O0"."""
        return level_name(self.level, self.dtype)

    @property
    def best(self) -> Trial | None:
        """The trial with the largest batch that fits; None if no batch fits."""
        return max((t for t in self.tried if self._fits(t)), key=lambda t: t.batch, default=None)

    @property
    def over(self) -> Trial | None:
        """The trial with the smallest batch that does not fit; None if every batch fits."""
        return min((t for t in self.tried if not self._fits(t)), key=lambda t: t.batch, default=None)

    @property
    def problem(self) -> str | None:
        """The reason why the search has no answer, or only a lower bound, in words; None if it has an exact answer."""
        failed = next((t for t in self.tried if t.error is not None and not t.ran_out), None)
        if failed is not None:
            return f"failed with {failed.batch}: {failed.error}"
        if self.best is None:
            smallest = self.over
            took = (
                f" takes {in_unit_of(self.limit, smallest.memory)}"
                if smallest is not None and smallest.memory
                else " runs out"
            )
            return f"a batch of {smallest.batch}{took}" if smallest is not None else "was not tried"
        if self._flat:
            return f"the batch changes nothing: {listed([str(t.batch) for t in self.tried])} take the same memory"
        return f"the data gave no more than {self._samples(self.best)} samples" if self._data_ended else None

    @property
    def batch_dim(self) -> int | None:
        """The dimension of the model's first tensor that changes with the batch.

        If several change, the first that is proportional to the batch is taken: lengths of padded sequences change
        too. None if no dimension changes, or if the runs know the batch dimension (`Trial.given` is then empty).
        """
        shaped = [t for t in self.tried if t.given]
        first = min(shaped, key=lambda t: t.batch, default=None)
        others = [t for t in shaped if first is not None and len(t.given) == len(first.given) and t.batch > first.batch]
        if first is None or not others:
            return None
        moved = [d for d, size in enumerate(first.given) if any(t.given[d] != size for t in others)]
        evenly = [d for d in moved if all(t.given[d] * first.batch == first.given[d] * t.batch for t in others)]
        return next(iter([*evenly, *moved]), None)

    @property
    def rate(self) -> float | None:
        """The number of samples per second of the best trial, counted in dimension `batch_dim`; None if unknown."""
        best = self.best
        if best is None or best.samples_per_second is None or not best.samples:
            return None
        return best.samples_per_second * self._samples(best) / best.samples

    def following(self) -> int | None:
        """Return the batch to try next; None if the search has ended.

        It has ended if the answer is known, if a run failed other than by lack of memory, or after `_MOST` trials.
        """
        best, over = self.best, self.over
        if len(self.tried) >= _MOST or any(t.error is not None and not t.ran_out for t in self.tried):
            return None
        if best is None:
            return self.first if over is None else max(1, over.batch // _GROWTH) if over.batch > 1 else None
        top = best.batch * _GROWTH if over is None else over.batch - 1
        if self._data_ended or self._flat or top <= best.batch:
            return None
        line = self._line
        if line is None:  # fewer than two known memories, or no growth with the batch
            return min((2 if len(self.tried) == 1 else _GROWTH) * best.batch, top)
        if over is None and self._straight:
            top = line.batch_at(self.limit)
        guess = line.batch_at(self.limit)
        if guess <= best.batch:
            return None  # the line predicts that a batch one larger does not fit
        # If the trial that did not fit ran out of memory, its memory is unknown, and cannot correct the line: bisect.
        return min(guess, top if over is None or over.memory is not None else (best.batch + over.batch) // 2)

    def next_memory(self) -> int | None:
        """Estimate the bytes of the batch one larger than the best, by the line through two trials.

        None if no batch fits, or if there is no line (`_line`).
        """
        return None if self.best is None or self._line is None else self._line.memory_at(self.best.batch + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of this level in batch_search.json."""
        best = self.best
        return {
            "level": self.level,
            "dtype": self.dtype,
            "name": self.name,
            "batch": None if best is None else best.batch,
            "memory_bytes": None if best is None else best.memory,
            "samples_per_second": self.rate,
            "batch_dim": self.batch_dim,
            "next_memory_bytes": self.next_memory(),
            "problem": self.problem,
            "tried": [asdict(trial) for trial in self.tried],
        }

    def _fits(self, trial: Trial) -> bool:
        return trial.memory is not None and trial.memory <= self.limit

    @property
    def _line(self) -> _Line | None:
        """The line through the best trial and the trial with the next larger batch, of the trials with a known memory.

        If no trial with a larger batch has a known memory, the line goes through the next smaller one. None if no batch
        fits, if fewer than two trials have a known memory, or if the larger batch does not take more memory.
        """
        known = sorted((t for t in self.tried if t.memory is not None), key=lambda t: t.batch)
        if self.best is None or len(known) < 2:
            return None
        at = min(known.index(self.best), len(known) - 2)
        line = _Line(known[at], known[at + 1])
        return line if line.slope[0] > 0 else None

    @property
    def _straight(self) -> bool:
        """Whether a third trial is on `_line`, so that the line may predict batches far beyond the trials.

        The trial may miss the line by `_STRAIGHT` of the difference in memory to the line's larger batch.
        """
        line = self._line
        if line is None:
            return False
        others = [(t.batch, t.memory) for t in self.tried if t.memory is not None and t not in (line.low, line.high)]
        top = line.memory_at(line.high.batch)
        return any(abs(line.memory_at(batch) - memory) < _STRAIGHT * abs(top - memory) for batch, memory in others)

    @property
    def _flat(self) -> bool:
        """Whether the batch flag seems to have no effect: all trials with figures have equal memory and equal samples.

        At least two trials must have figures, or four if no trial knows its samples.
        """
        known = [t for t in self.tried if t.memory is not None]
        enough = 2 if any(t.samples for t in known) else 4
        return len(known) >= enough and len({(t.memory, self._samples(t)) for t in known}) == 1

    @property
    def _data_ended(self) -> bool:
        """Whether the script's data has fewer samples than the best trial's batch asked for.

        This is so if its number of samples, divided by its batch, is below that of the trial with the smallest batch.
        """
        first, best = min(self.tried, key=lambda t: t.batch), self.best
        if best is None or len({self._samples(t) for t in self.tried if t.memory is not None}) == 1:
            return False  # no dimension changes with the batch, so `samples` does not count the batch
        return self._samples(best) * first.batch < self._samples(first) * best.batch

    def _samples(self, trial: Trial) -> int:
        """Return the number of samples in a step of this trial, counted in dimension `batch_dim`."""
        dim = self.batch_dim
        if not dim or len(trial.given) <= dim:
            return trial.samples
        return trial.samples * trial.given[dim] // trial.given[0] if trial.given[0] else 0


@dataclass(frozen=True)
class _Line:
    """The straight line through two trials: memory in bytes as a function of the batch."""

    low: Trial
    high: Trial

    @property
    def slope(self) -> tuple[int, int]:
        """The rise of the line, as the integers (bytes, batches): a float would round exactly linear memory."""
        assert self.low.memory is not None and self.high.memory is not None
        return self.high.memory - self.low.memory, self.high.batch - self.low.batch

    def batch_at(self, memory: int) -> int:
        bytes_, batch = self.slope
        assert self.low.memory is not None
        return self.low.batch + (memory - self.low.memory) * batch // bytes_

    def memory_at(self, batch: int) -> int:
        bytes_, wide = self.slope
        assert self.low.memory is not None
        return self.low.memory + (batch - self.low.batch) * bytes_ // wide


def lines(searches: Sequence[Search], flag: str) -> list[str]:
    """Return the lines of the table for a terminal, followed by remarks: problems, and how each answer was found."""
    limit = searches[0].limit
    unit = _unit(limit)
    rows = [("level", "batch", f"memory, {unit}", "samples/s")]
    for search in searches:
        best = search.best
        rate = "" if search.rate is None else figure(search.rate)
        memory = "" if best is None or best.memory is None else wording.in_unit(best.memory, unit)
        rows.append((search.name, "none" if best is None else str(best.batch), memory, rate))
    table = in_columns(rows, right=range(1, 4))
    said = [f"{search.name}: {problem}." for search in searches if (problem := search.problem) is not None]
    return [f"The largest {flag} in {in_unit_of(limit, limit)}", *table, *said, *_sure(searches)]


def in_unit_of(limit: int, memory: int) -> str:
    """Format a size in the unit of the limit, so that all sizes of a search share it: "7.93 GiB"."""
    unit = _unit(limit)
    return f"{wording.in_unit(memory, unit)} {unit}"


def _unit(limit: int) -> str:
    return "GiB" if limit >= 2**30 else "MiB"


def _sure(searches: Sequence[Search]) -> list[str]:
    found = [search for search in searches if search.best is not None and search.problem is None]
    tried: list[str] = []
    reckoned: list[str] = []
    for search in found:
        assert search.best is not None
        next_was_tried = search.over is not None and search.over.batch == search.best.batch + 1
        (tried if next_was_tried else reckoned).append(search.name)
    texts = ["Each batch above was run for a few steps; samples/s are of these." if found else ""]
    texts.append(f"One more does not fit: tried at {listed(tried)}." if tried else "")
    texts.append(f"One more does not fit by the line through two trials: {listed(reckoned)}." if reckoned else "")
    base = next((search for search in found if search.level == BASELINE), None)
    if base is not None and len(found) > 1:
        assert base.best is not None
        ratios = [(s.best.batch / base.best.batch, s.name) for s in found if s is not base and s.best is not None]
        ratio, name = max(ratios)
        texts.append(f"{name} takes {wording.ratio(ratio)} times {base.name}'s batch.")
    return [text for text in texts if text]


def search(
    level: str, limit: int, trial: Callable[[int], tuple[Trial, str | None]], near: Search | None = None
) -> Search:
    """Try batches until the largest that fits is known, or until the search must end (`Search.following`).

    Args:
        level, limit: the attributes of `Search`.
        trial: runs the script with a batch, and returns the trial and the level's low-precision type.
        near: the finished search of another level. The first trial has half of the largest batch found there. If it is
            None or found no batch, the first trial has a batch of `_FIRST`.
    """
    first = _FIRST if near is None or near.best is None else max(1, near.best.batch // 2)
    found = Search(level, None, limit, [], first)
    while (batch := found.following()) is not None:
        done, dtype = trial(batch)
        found = Search(level, dtype or found.dtype, limit, [*found.tried, done], first)
    return found
