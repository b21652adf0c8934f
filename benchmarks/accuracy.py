"""Train three families of models at each level from several seeds, and write docs/accuracy.md: is accuracy lost?

`python -m amp_patch compare` trains each family of examples/train.py. The page and its pictures are written from the
reports. The script ends with an error, and the page says so, if at O1, O2, O4 or O5 the held-out loss is not within the
spread of O0's seeds, or is worse than O0's at the same seeds by more than the margin.

    python benchmarks/accuracy.py                        # a quarter of an hour on an idle machine
    python benchmarks/accuracy.py --from out/accuracy    # the page again, from the reports of an earlier run
    python benchmarks/accuracy.py --levels O0,O5+act8    # these levels, whose tables are printed; no page
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import eight_bit_state
import uneven_gradients as cases
from poster import dots

from amp_patch.comparison.commands.guard import Guard
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.verdict import gap_in_words, interval_of, percent_of
from amp_patch.diagnose.recording.run import loads
from amp_patch.diagnose.wording import signed

ROOT = Path(__file__).parents[1]
EIGHT_BITS = ROOT / "benchmarks/results/eight_bit_state.json"
UNEVEN = ROOT / "benchmarks/results/uneven_gradients.json"
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
CLAIMED = ("O1", "O2", "O4", "O5")
METRIC = "held_out_loss"
JUDGED = "How a level is judged is in [comparing levels](compare.md#read-the-report)."
# Task of examples/train.py -> (heading of its section, name of the model in a sentence, description)
FAMILIES = {
    "digits": (
        "A convnet reads digits",
        "the convnet",
        "Two convolutions with batch norms and two linear layers, SGD with momentum. 1347 handwritten digits of 8 x 8 "
        "pixels (scikit-learn's) to train on, 450 held out.",
    ),
    "gpt": (
        "A GPT writes Python's manual",
        "the GPT",
        "Two blocks of attention and MLP, 64 wide, with layer norms, Adam. Nine in ten topics of Python's reference "
        "manual, character by character, to train on; every tenth is held out.",
    ),
    "lstm": (
        "An LSTM writes Python's manual",
        "the LSTM",
        "An embedding, `torch.nn.LSTM` with 96 units and a linear layer, Adam. The same text.",
    ),
}
SECOND = {"accuracy": "accuracy, %", "bits": "bits per character"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each training (the default is each task's own)")
    parser.add_argument("--levels", help="train these levels and print their tables, and write no page")
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"), help="where the reports go")
    parser.add_argument("--from", dest="reports", type=Path, help="train nothing: take the reports from this folder")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page goes")
    args = parser.parse_args()

    for family in args.families if args.reports is None else []:
        done = train(family, args.out / family, args.seeds, args.steps, args.levels or ",".join(LEVELS))
        if done:
            return done
    folder = args.reports or args.out
    comparisons = {family: read(folder / family / "report.json") for family in args.families}
    if args.levels:
        for family, comparison in comparisons.items():
            print(f"{FAMILIES[family][0]}, {comparison.steps} steps\n\n{table(comparison)}\n")
        return 0
    broken = write(comparisons, args.docs)
    print(f"The page: {args.docs / 'accuracy.md'}")
    for each in broken:
        print(f"The claim does not hold: {each}", file=sys.stderr)
    return 1 if broken else 0


def train(family: str, out: Path, seeds: int, steps: int | None, levels: str) -> int:
    """Run the comparison of a family, and return its exit status."""
    compare = ["-m", "amp_patch", "compare", "--levels", levels, "--seeds", str(seeds), "--seed-flag=--seed"]
    script = [str(ROOT / "examples/train.py"), "--", "--task", family, *(["--steps", str(steps)] if steps else [])]
    command = [sys.executable, *compare, "--metric", METRIC, "--out", str(out), *script]
    guard = Guard()  # kills the comparison if this process is killed
    try:
        return subprocess.run(command, env={**os.environ, **guard.environment}).returncode
    finally:
        guard.join()


def read(report: Path) -> Comparison:
    if not report.exists():
        raise SystemExit(f"accuracy.py: there is no {report}: run it without --from, or with --families")
    return Comparison.from_dict(loads(report.read_text()))


def write(comparisons: dict[str, Comparison], docs: Path) -> list[str]:
    """Write accuracy.md and a picture for each family into `docs`. Return the `contradictions`."""
    docs.mkdir(parents=True, exist_ok=True)
    for family, comparison in comparisons.items():
        draw(comparison, docs / f"accuracy-{family}.svg")
    (docs / "accuracy.md").write_text(page(comparisons))
    return contradictions(comparisons)


def contradictions(comparisons: dict[str, Comparison]) -> list[str]:
    """Return a line for each family and claimed level that contradicts the claim, or whose result is not known.

    A level contradicts it if its held-out loss is worse at the same seeds, or not within the spread of O0's seeds.
    """
    broken = []
    for family, comparison in comparisons.items():
        levels = {level.level: level for level in comparison.levels}
        for name in CLAIMED:
            level = levels.get(name)
            if "O0" not in levels or level is None:
                broken.append(f"{family} was not trained at {name if level is None else 'O0'}")
            elif level.failed or level.finding.rejected or not within_spread(comparison, level):
                broken.append(f"{family} at {name}: {outcome(comparison, level)}")
    return broken


def within_spread(comparison: Comparison, level: LevelResult) -> bool:
    """Return whether a level's mean is between the lowest and the highest result of O0's seeds."""
    base = list(comparison.baseline.finite.values()) if comparison.baseline is not None else []
    return level.mean is not None and bool(base) and min(base) <= level.mean <= max(base)


def page(comparisons: dict[str, Comparison]) -> str:
    first = next(iter(comparisons.values()))
    steps = listed([f"{comparison.steps} steps for {FAMILIES[f][1]}" for f, comparison in comparisons.items()])
    parts = [
        "# Does mixed precision lose accuracy?",
        "<!-- Written by `make accuracy` (benchmarks/accuracy.py): edit that. -->",
        answer(comparisons),
        "## How it was measured",
        f"Each model was trained at each level from {seeds(first)} seeds, which change the weights and the batches but "
        f"not the held-out data: {steps}. In the first tenth of the steps the learning rate rises, and then it falls "
        "to 0, so that losses are compared at rest. The held-out loss is the mean cross entropy in nats.",
        JUDGED,
        "In the tables, the *gap* is the gap to O0 with the same seeds, in nats, and in per cent with its interval. "
        "*Speed* is O0's step time over the level's: above 1, the level is faster. *Memory* is the ratio of the bytes "
        "of weights, masters, gradients and optimizer state. The speed is for the machine named below and for very "
        "small models, where casts take a larger share of the time than in large ones. If a processor has no FP16 "
        "arithmetic, FP16 is emulated: accuracy is the same, and time is not.",
    ]
    for family, comparison in comparisons.items():
        title, _, what = FAMILIES[family]
        alt = "The gap in held-out loss to O0 with its interval, by level; the margin is shaded."
        picture = f"![{alt}](accuracy-{family}.svg)"
        parts += [f"## {title}", what, table(comparison), picture]
    machine = ", ".join(f"{name} {value}" for name, value in first.machine.items())
    parts += [
        *state_in_eight_bits(),
        "## Again",
        "    make accuracy",
        f"trains everything again and rewrites this page. It fails if the held-out loss at {listed(CLAIMED)} is not "
        "within the spread of O0's seeds in every family, or is worse with the same seeds by more than the margin. "
        "`out/accuracy/` then has a report for each family, with loss curves, loss scales and times.",
        f"These figures are from: {machine}.",
    ]
    return "\n\n".join(parts) + "\n"


def state_in_eight_bits(rows: Path = EIGHT_BITS) -> list[str]:
    """Return the section on `optimizer_state="8bit"`, from the rows that eight_bit_state.py has written."""
    found = loads(rows.read_text())
    outside = [row for row in found["rows"] if row["verdict"] == "outside"]
    named = listed([f"{row['optimizer']} on {row['task']} by {row['outside']:.4f}" for row in outside])
    said = f"All but {named} are within" if outside else "All are within"
    seeds = len(found["rows"][0]["FP32"])
    more = [row for row in found["rows"] if len(row["FP32"]) > seeds]
    heads = [eight_bit_state.HEADS, ["---", "---", *["---:"] * (len(eight_bit_state.HEADS) - 3), "---"]]
    table = [f"| {' | '.join(row)} |" for row in [*heads, *map(eight_bit_state.cells, found["rows"])]]
    return [
        "## The optimizer's state in eight bits",
        "Each optimizer of torch.optim with its state in FP32, and [in eight bits](ladder.md#state-in-eight-bits): "
        f"the digits and the GPT at O0, {found['steps']} steps, {seeds} seeds. {said} the range of the seeds in FP32, "
        "or better. The state is in bytes per parameter. These models are small: a large model keeps almost nothing in "
        "FP32. Muon is combined with AdamW for parameters that are no matrix.",
        *[
            f"{row['optimizer']} on {row['task']} has {len(row['FP32'])} seeds, which lie far apart: FP32 ends at "
            f"{min(row['FP32']):.4f} to {max(row['FP32']):.4f}, eight bits at {min(row['8bit']):.4f} to "
            f"{max(row['8bit']):.4f}. By the first {seeds} seeds alone, the mean in eight bits is "
            f"{eight_bit_state.told(eight_bit_state.verdict(row['FP32'][:seeds], row['8bit'][:seeds]))}."
            for row in more
        ],
        "\n".join(table),
        f"`python benchmarks/eight_bit_state.py` trains them; these figures are of: {found['machine']}.",
        *uneven_gradients(),
    ]


def uneven_gradients(rows: Path = UNEVEN) -> list[str]:
    """Return the paragraphs on blocks with gradients of different magnitude, from the rows of uneven_gradients.py."""
    found = loads(rows.read_text())
    heads = [cases.HEADS, ["---", "---", "---:", "---:"]]
    return [
        "The 256 elements of a block share a scale. Where their gradients differ by orders of magnitude, AdamW at O0, "
        "the mean of three seeds:",
        "\n".join(f"| {' | '.join(row)} |" for row in [*heads, *map(cases.cells, found["rows"])]),
        f"`python benchmarks/uneven_gradients.py` trains them; these figures are of: {found['machine']}.",
    ]


def answer(comparisons: dict[str, Comparison]) -> str:
    """Return the first paragraph of the page, which answers its title."""
    broken = contradictions(comparisons)
    names = listed([FAMILIES[family][1] for family in comparisons])
    count = seeds(next(iter(comparisons.values())))
    if broken:
        claim = f"that at {listed(CLAIMED)} the held-out loss of {names} lies within the spread of O0's {count} seeds"
        claim += ", and is not worse with the same seeds"
        sentences = [f"**Not shown by these runs.** The claim {claim}, does not hold: {'; '.join(broken)}."]
    else:
        claim = f"the held-out loss of {names} lies within the spread of O0's {count} seeds"
        claim += ", and with the same seeds none is found to be worse by more than the margin"
        sentences = [f"**Not at {listed(CLAIMED)}:** there {claim}. {furthest(comparisons)}"]
    return " ".join([*sentences, *of_o3(comparisons)])


def furthest(comparisons: dict[str, Comparison]) -> str:
    """Return a sentence on the largest difference to O0 at a claimed level, as a share of the spread of O0's seeds."""

    def share(comparison: Comparison, level: LevelResult) -> float:
        base = comparison.baseline.final
        spread = max(base) - min(base)
        return abs(level.mean - statistics.mean(base)) / spread if spread else 0.0

    trials = [(f, each, level) for f, each in comparisons.items() for level in each.levels if level.level in CLAIMED]
    family, comparison, level = max(trials, key=lambda trial: share(*trial[1:]))
    return (
        f"Measured by that spread {FAMILIES[family][1]} at {level.level} comes out furthest from O0: "
        f"{outcome(comparison, level)}, {share(comparison, level):.0%} of the spread away."
    )


def of_o3(comparisons: dict[str, Comparison]) -> list[str]:
    """Return a sentence on O3's results, which are outside of the claim; nothing without O3."""
    found = [(f, each, level) for f, each in comparisons.items() for level in each.levels if level.level == "O3"]
    told = [f"{FAMILIES[f][1]} {verdict(level)}, {outcome(each, level)}" for f, each, level in found]
    start = "O3, FP16 throughout without FP32 masters, is outside of the claim and shown as it came out"
    return [f"{start}: {'; '.join(told)}."] if found else []


def outcome(comparison: Comparison, level: LevelResult) -> str:
    """Return a level's mean and O0's in words, with the gap; for a level with failures, its verdict."""
    base = comparison.baseline
    if level.failed or base is None or len(level.finite) < len(level.runs) or not level.runs:
        return level.verdict.text
    low, high = min(base.final), max(base.final)
    apart = level.finding.gap
    at_seeds = "" if apart is None else f", {gap_in_words(apart, 'O0')}"
    return f"a mean of {level.mean:#.5g} against O0's {base.mean:#.5g} ({low:#.5g} to {high:#.5g}){at_seeds}"


def verdict(level: LevelResult) -> str:
    """Return the finding of a level in words: "as good", "as good by range", "worse"."""
    found = level.finding
    names = {"within": "as good", "so far": "as good so far", "differs": "better" if found.better else "worse"}
    return names.get(found.kind, found.kind) + (" by range" if found.by_range else "")


def table(comparison: Comparison, costs: bool = True) -> str:
    """Return the Markdown table of all levels. Without `costs` it has only the columns on the losses."""
    base = comparison.baseline
    logged = {name for run in comparison.runs for name in run.logged}
    second = next((name for name in SECOND if name in logged), None)
    heads = ["level", "held-out loss", "of the seeds", "gap", "in per cent", "verdict"]
    heads += [*([SECOND[second]] if second else []), "speed", "memory", "skipped steps"]
    rows = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    for level in comparison.levels:
        values = list(level.finite.values())
        other, apart = base is not None and level is not base and bool(values), level.finding.gap
        row = [
            level.level,
            f"{level.mean:#.5g}" if values else "",
            f"{min(values):#.5g} to {max(values):#.5g}" if values else "",
            signed(apart.mean) if other and apart is not None else "",
            ", ".join(filter(None, [percent_of(apart), interval_of(apart)])) if other and apart is not None else "",
            verdict(level) + (f", {len(level.failed)} failed" if level.failed else ""),
        ]
        if second:
            each = [run.logged[second][-1][1] for run in level.runs if second in run.logged]
            row.append(f"{statistics.mean(each):.2f}" if each else "")
        row += [
            f"{level.speedup.median:.2f}" if other and level.speedup else "",
            f"{level.bytes_ratio:.2f}" if other and level.bytes_ratio is not None else "",
            f"{sum(level.skips)} of {sum(run.steps for run in level.runs)}",
        ]
        rows.append(row)
    if not costs:
        rows = [row[:6] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(comparison: Comparison, path: Path) -> None:
    """Write the gaps of the levels as an SVG file in light colours. Without a baseline, write nothing."""
    if comparison.baseline is not None:
        path.write_text(dots(comparison))


def seeds(comparison: Comparison) -> int:
    return len({run.seed for run in comparison.runs})


def listed(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


if __name__ == "__main__":
    sys.exit(main())
