"""Does mixed precision lose accuracy? Three families of models, each level, several seeds: docs/accuracy.md.

Each family of examples/train.py goes through `python -m amp_patch compare`; the page and its pictures are written from
the reports. Ends with an error, and the page says so too, if the held-out loss of O1, O2, O4 or O5 does not lie within
the spread of O0's seeds.

    python benchmarks/accuracy.py                        # a quarter of an hour on one core
    python benchmarks/accuracy.py --from out/accuracy    # the page again, from the reports of an earlier run
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from amp_patch.report.figures import paired_t_test
from amp_patch.report.runs import loads
from amp_patch.report.verdict import Comparison, LevelResult

ROOT = Path(__file__).parents[1]
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
CLAIMED = ("O1", "O2", "O4", "O5")
METRIC = "held_out_loss"
# Task of examples/train.py -> (its heading, in a sentence, what is trained)
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
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"), help="where the reports go")
    parser.add_argument("--from", dest="reports", type=Path, help="train nothing: take the reports from this folder")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page goes")
    args = parser.parse_args()

    for family in args.families if args.reports is None else []:
        done = train(family, args.out / family, args.seeds, args.steps)
        if done:
            return done
    folder = args.reports or args.out
    broken = write({family: read(folder / family / "report.json") for family in args.families}, args.docs)
    print(f"The page: {args.docs / 'accuracy.md'}")
    for each in broken:
        print(f"The claim does not hold: {each}", file=sys.stderr)
    return 1 if broken else 0


def train(family: str, out: Path, seeds: int, steps: int | None) -> int:
    """Run the comparison of a family; its exit status."""
    compare = ["-m", "amp_patch", "compare", "--levels", ",".join(LEVELS), "--seeds", str(seeds), "--seed-flag=--seed"]
    script = [str(ROOT / "examples/train.py"), "--", "--task", family, *(["--steps", str(steps)] if steps else [])]
    return subprocess.run([sys.executable, *compare, "--metric", METRIC, "--out", str(out), *script]).returncode


def read(report: Path) -> Comparison:
    if not report.exists():
        raise SystemExit(f"accuracy.py: there is no {report}: run it without --from, or with --families")
    return Comparison.from_dict(loads(report.read_text()))


def write(comparisons: dict[str, Comparison], docs: Path) -> list[str]:
    """Write accuracy.md and a picture for each family into `docs`; what contradicts the claim, a line each."""
    docs.mkdir(parents=True, exist_ok=True)
    alts = {family: draw(comparison, docs / f"accuracy-{family}.svg") for family, comparison in comparisons.items()}
    (docs / "accuracy.md").write_text(page(comparisons, alts))
    return contradictions(comparisons)


def contradictions(comparisons: dict[str, Comparison]) -> list[str]:
    """Where the held-out loss is not within the spread of O0's seeds, though it should be, or is not known."""
    broken = []
    for family, comparison in comparisons.items():
        levels = {level.level: level for level in comparison.levels}
        for name in CLAIMED:
            level = levels.get(name)
            if level is None:
                broken.append(f"{family} was not trained at {name}")
            elif level.verdict.kind != "within" or level.failed or "O0" not in levels:
                broken.append(f"{family} at {name}: {level.verdict.text}")
    return broken


def page(comparisons: dict[str, Comparison], alts: dict[str, str]) -> str:
    first = next(iter(comparisons.values()))
    steps = ", ".join(f"{comparison.steps} for {FAMILIES[f][1]}" for f, comparison in comparisons.items())
    parts = [
        "# Does mixed precision lose accuracy?",
        "<!-- Written by `make accuracy` (benchmarks/accuracy.py): edit that. -->",
        answer(comparisons),
        "## How it was measured",
        f"Each model was trained at each level, from {seeds(first)} seeds, which move the weights and the batches; what "
        "is held out stays the same. The levels differ in one string, the opt level. The learning rate rises for a "
        f"tenth of the steps and then falls to 0, so that what is compared has come to rest: {steps}. The held-out "
        "loss is the mean cross entropy in nats.",
        first.test,
        "*p* is that of the paired t-test: a small one says that a difference is not chance, however small it is. "
        "*Speed* is the ratio of step times to O0's, above 1 where the level is faster; *memory* that of the bytes of "
        "weights, masters, gradients and optimizer state. Both are of this machine and of very small models, in which "
        "the casts take more of the time than in large ones; and where a processor has no FP16 arithmetic, FP16 on it "
        "is emulated: it shows what FP16 does to accuracy, not to time.",
    ]
    for family, comparison in comparisons.items():
        title, _, what = FAMILIES[family]
        parts += [f"## {title}", what, table(comparison), f"![{alts[family]}](accuracy-{family}.svg)"]
    machine = "; ".join(f"{name}: {value}" for name, value in first.machine.items())
    parts += [
        "## Again",
        "    make accuracy",
        f"trains all of it anew and rewrites this page; it fails if the held-out loss of {listed(CLAIMED)} does not lie "
        "within the spread of O0's seeds on every family. A report for each family, with loss curves, loss scales and "
        "times, is then in `out/accuracy/`.",
        f"These figures are of: {machine}.",
    ]
    return "\n\n".join(parts) + "\n"


def answer(comparisons: dict[str, Comparison]) -> str:
    """The paragraph on top, from the verdicts."""
    broken = contradictions(comparisons)
    names = listed([FAMILIES[family][1] for family in comparisons])
    claim = f"the held-out loss at {listed(CLAIMED)} lies within the spread of O0's seeds on {names}"
    if broken:
        sentences = ["**Here it did.** That", f"{claim}, did not hold:", "; ".join(broken) + "."]
    else:
        first = next(iter(comparisons.values()))
        sentences = [f"**No, not at {listed(CLAIMED)}:** {claim}, {seeds(first)} seeds each.", *furthest(comparisons)]
    return " ".join([*sentences, *of_o3(comparisons)])


def furthest(comparisons: dict[str, Comparison]) -> list[str]:
    """The largest difference among the levels of the claim, in units of the spread of O0's seeds."""

    def share(pair: tuple[str, LevelResult]) -> float:
        base = comparisons[pair[0]].baseline
        spread = max(base.final) - min(base.final)
        return abs(pair[1].mean - base.mean) / spread if spread else 0.0

    pairs = [(family, each) for family, c in comparisons.items() for each in c.levels if each.level in CLAIMED]
    family, level = max(pairs, key=share)
    base = comparisons[family].baseline
    return [
        f"The mean that is furthest from O0's, measured by that spread, is {FAMILIES[family][1]}'s at {level.level}: "
        f"{level.mean:.4f} against {base.mean:.4f}, and O0's own seeds go from {min(base.final):.4f} to "
        f"{max(base.final):.4f}."
    ]


def of_o3(comparisons: dict[str, Comparison]) -> list[str]:
    """O3 as it is."""
    found = {f: level for f, comparison in comparisons.items() for level in comparison.levels if level.level == "O3"}
    within = [FAMILIES[f][1] for f, level in found.items() if level.verdict.kind == "within" and not level.failed]
    other = [f"{FAMILIES[f][1]}: {lvl.verdict.text}" for f, lvl in found.items() if FAMILIES[f][1] not in within]
    start = ["O3, FP16 throughout without FP32 masters, promises nothing, and is shown as it came out."] if found else []
    held = [f"It lies within the spread too on {listed(within)}."] if within else []
    return [*start, *held, *(f"On {each}." for each in other)]


def table(comparison: Comparison) -> str:
    base = comparison.baseline
    logged = {name for run in comparison.runs for name in run.logged}
    second = next((name for name in SECOND if name in logged), None)
    heads = ["level", "held-out loss", "of the seeds", "to O0", "p", "verdict"]
    heads += [*([SECOND[second]] if second else []), "speed", "memory", "skipped steps"]
    rows = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    for level in comparison.levels:
        values = list(level.finite.values())
        pairs = [(level.finite[seed], base.finite[seed]) for seed in level.finite if seed in base.finite] if base else []
        known = bool(values) and level is not base and bool(pairs)
        difference = statistics.mean(ours - theirs for ours, theirs in pairs) if known else None
        p = paired_t_test(*zip(*pairs, strict=True)) if known and len(pairs) > 1 else None
        row = [
            level.level,
            f"{level.mean:.4f}" if values else "",
            f"{min(values):.4f} to {max(values):.4f}" if values else "",
            f"{difference:+.4f}" if difference is not None else "",
            "" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}",
            level.verdict.kind + (f", {len(level.failed)} failed" if level.failed else ""),
        ]
        if second:
            each = [run.logged[second][-1][1] for run in level.runs if second in run.logged]
            row.append(f"{statistics.mean(each):.2f}" if each else "")
        row += [
            f"{level.speedup.median:.2f}" if level.speedup and level is not base else "",
            f"{level.bytes_ratio:.2f}" if level.bytes_ratio is not None and level is not base else "",
            f"{sum(level.skips)} of {sum(run.steps for run in level.runs)}",
        ]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(comparison: Comparison, path: Path) -> str:
    """The held-out losses, a dot a seed, as an SVG file in light colours; what it shows, in words."""
    from amp_patch.report import pictures  # here: matplotlib takes a second

    picture = pictures.finals(comparison)[0]
    svg = picture.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background: #ffffff" ', 1)
    for name, (light, _) in pictures.COLOURS.items():
        svg = svg.replace(f"var(--{name})", light)
    path.write_text(svg + "\n")
    return picture.alt


def seeds(comparison: Comparison) -> int:
    return len({run.seed for run in comparison.runs})


def listed(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


if __name__ == "__main__":
    sys.exit(main())
