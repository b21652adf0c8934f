"""The figures of a run, and statistics of a few runs, as numbers; verdict.py and wording.py put them into words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from amp_patch.diagnose.recording.run import LOW_TYPES, Run

T = TypeVar("T")
LOSS = "loss"  # the metric that every recording has
ALIKE = 1.05  # up to this ratio of step times a level is "as fast", and its memory counts more
CROWDED = 0.1  # share of the cores: if other work takes more, the CPU times of two runs are compared

# Field of `Run` -> its name in tables.
KINDS = {
    "weights": "weights",
    "masters": "masters",
    "gradients": "gradients",
    "state": "optimizer state",
    "activations": "activations",
}

_ROUNDED = 8  # distinct losses that show their type: this many FP32 losses are all exact in BF16 once in 2**128 times


class Ratio(NamedTuple):
    """A speed relative to the baseline's; above 1 is faster."""

    median: float
    low: float
    high: float

    @property
    def pace(self) -> str:
        """The speed in words.

        "faster": the level is faster with every seed. "slower": it is slower with every seed, and in the median by more
        than `ALIKE`. "as fast": it is slower with every seed, but in the median by at most `ALIKE`; or the speeds
        differ by at most `ALIKE` with every seed. "not clear": none of these.
        """
        if self.low > 1:
            return "faster"
        if self.high < 1 and self.median < 1 / ALIKE:
            return "slower"
        alike = self.low >= 1 / ALIKE and self.high <= ALIKE
        return "as fast" if alike or self.high < 1 else "not clear"

    @property
    def gains_much(self) -> bool:
        """Whether the level is faster with every seed, and in the median by more than `ALIKE`."""
        return self.pace == "faster" and self.median > ALIKE


def final(run: Run, metric: str, steps: int) -> float:
    """Return the result of a run; NaN if it has none, or if a value in it is not finite.

    For "loss" it is the mean over the last tenth (at least one) of the first `steps` steps, and NaN if the last loss of
    the whole run is not finite. For any other metric it is the last value that the run gave to `amp.log`.
    """
    if metric == LOSS:
        ended_well = 0 < steps <= run.steps and math.isfinite(run.loss[-1])
        values = run.loss[steps - max(1, steps // 10) : steps] if ended_well else []
    else:
        values = [value for _, value in run.logged.get(metric, [])[-1:]]
    if not values or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.mean(values)  # rounded once: the mean of equal numbers is that number


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of two or more."""
    largest = max(map(abs, values))
    # Scaled: `stdev` of Python 3.10 squares the values, which can overflow.
    return largest * statistics.stdev([v / largest for v in values]) if largest else 0.0


def half_width(deviation: float, count: int, confidence: float) -> float:
    """Return half of Student's interval of a mean: t * deviation / sqrt(count).

    Source: Student, The probable error of a mean, Biometrika 6 (1908).
    """
    return student_quantile(confidence, count - 1) * deviation / math.sqrt(count)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are None."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def warm(values: Sequence[T]) -> Sequence[T]:
    """Return `values`, one for each step, without the first tenth (at least one): the steps that warm up."""
    return values[max(1, len(values) // 10) :]


def step_times(run: Run, by_cpu_time: bool = False) -> list[float]:
    """Return the seconds of each step of the run, without the steps that warm up and measured ones (NaN).

    With `by_cpu_time` they are the CPU seconds of the process.

    If the numbers of samples in a step differ by powers of two, the times of each power are multiplied by one factor,
    so that their median is the mean step of the run. The median of steps of several sizes would be that of one size.
    """
    times = run.cpu_seconds if by_cpu_time else run.seconds
    numbers = run.samples if len(run.samples) == len(times) else [0] * len(times)
    pairs = zip(warm(times), warm(numbers), strict=True)
    steps = [(seconds, number.bit_length()) for seconds, number in pairs if math.isfinite(seconds) and seconds > 0]
    sizes = {size for _, size in steps}
    if len(sizes) < 2:
        return [seconds for seconds, _ in steps]
    medians = {size: statistics.median(seconds for seconds, its in steps if its == size) for size in sizes}
    mean = statistics.mean(medians[size] for _, size in steps)
    return [seconds * mean / medians[size] for seconds, size in steps]


def samples_per_second(run: Run) -> float | None:
    """Return (number of samples in a step) / (its seconds): the median over the timed steps after warm-up.

    None if no number of samples or no time is known.
    """
    pairs = zip(warm(run.samples), warm(run.seconds), strict=False)
    return median(samples / time for samples, time in pairs if samples > 0 and math.isfinite(time) and time > 0)


def is_crowded(runs: Iterable[Run]) -> bool:
    """Return whether the speeds of the runs are judged by the CPU time of their processes.

    This is so on a CPU, if other work took more than `CROWDED` of its cores during one of the runs.
    """
    timed = [run for run in runs if run.steps]
    return any(run.other_work > CROWDED for run in timed) and all(
        run.device == "cpu" and any(map(math.isfinite, run.cpu_seconds)) for run in timed
    )


def speedup(pairs: Sequence[tuple[Run, Run]], by_cpu_time: bool = False) -> Ratio | None:
    """Return the ratio of median step times of pairs (the baseline's run, the level's run with the same seed).

    `median` is the ratio of the medians over the pairs, as in the table; `low` and `high` are the extremes of single
    pairs. With one pair they come from the quartiles of its step times: the baseline's lower quartile over the level's
    upper one, and the reverse. None without times.

    With `by_cpu_time` the times are CPU times, and the lower quartile of a run replaces its median: other work only
    lengthens steps, as it takes caches and memory. Without it, if other work took more of the cores during one run of a
    pair than during the other, it may have slowed that run by as much, and the range has both speeds.
    """
    times = [(step_times(base, by_cpu_time), step_times(run, by_cpu_time), _slowed(base, run)) for base, run in pairs]
    times = [(base, run, by) for base, run, by in times if base and run]
    if not times:
        return None
    medians = [(_typical(base, by_cpu_time), _typical(run, by_cpu_time)) for base, run, _ in times]
    whole = statistics.median(base for base, _ in medians) / statistics.median(run for _, run in medians)
    ranges = [(base / run, base / run) for base, run in medians]
    if len(times) == 1:
        (base_low, base_high), (low, high) = (_quartiles(each) for each in times[0][:2])
        ranges = [(base_low / high, base_high / low)]
    slowed = [1.0 if by_cpu_time else by for _, _, by in times]
    low = min(low * min(1.0, by) for (low, _), by in zip(ranges, slowed, strict=True))
    return Ratio(whole, low, max(high * max(1.0, by) for (_, high), by in zip(ranges, slowed, strict=True)))


def _typical(times: Sequence[float], by_cpu_time: bool) -> float:
    return _quartiles(times)[0] if by_cpu_time else statistics.median(times)


def _slowed(base: Run, run: Run) -> float:
    """Return the ratio of the shares of the cores that other work left to the runs, each at least a twentieth."""
    left = [max(0.05, 1 - each.other_work) for each in (base, run)]
    return left[0] / left[1]


def loss_type(runs: Sequence[Run]) -> str | None:
    """Return the type that represents all losses of the runs exactly: "bfloat16" or "float16"; None for FP32.

    The losses were then rounded to that type before they were recorded. With fewer than `_ROUNDED` distinct losses this
    is unknown, and the result is None.
    """
    several = {loss for run in runs for loss in run.loss if math.isfinite(loss) and loss}
    if len(several) < _ROUNDED:
        return None
    return next((each for each in LOW_TYPES if all(each in (run.loss_types or ()) for run in runs)), None)


def loss_step(runs: Sequence[Run], loss: float) -> float:
    """Return the distance of adjacent losses near `loss` in the `loss_type` of the runs; 0 for FP32."""
    dtype = loss_type(runs)
    if dtype is None or not loss:
        return 0.0
    return math.ldexp(1.0, math.frexp(loss)[1] - LOW_TYPES[dtype])


def held_bytes(run: Run) -> int:
    """Return the bytes of weights, masters, gradients and the optimizer's state."""
    return run.weights + run.masters + run.gradients + run.state


def memory_bytes(run: Run) -> int | None:
    """Return the peak memory of a training in bytes; None if it is not known.

    On CUDA it is the peak of the allocated bytes. On a CPU it is `held_bytes` plus the activations. The size of the
    process is not used there: it includes libraries, data, and memory that the allocator does not free.
    """
    if run.device == "cuda":
        return run.peak_memory
    return None if run.activations is None else held_bytes(run) + run.activations


def student(t: float, freedom: int) -> float:
    """Return the probability that |T| <= t, for t >= 0, under Student's distribution with `freedom` degrees of freedom.

    Source: the finite sums for whole degrees of freedom, 26.7.3 and 26.7.4 of Abramowitz and Stegun, Handbook of
    Mathematical Functions (1964).
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    # A sum over powers of the cosine, from `start` in steps of 2 to freedom - 2. Each term is the one before times
    # cosine**2 and the ratio of their factors.
    start = freedom % 2
    total, term = 0.0, cosine**start
    for power in range(start, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if start else sine * total


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return t such that `student(t, freedom)` is `probability`, from 0 to below 1, to 50 bits."""
    high = 1.0
    while student(high, freedom) < probability:
        high *= 2
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) < probability else (low, middle)
    return high


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
