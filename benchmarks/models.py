"""Survey and train public models at each level, and write docs/models.md: which models survive which level?

    python benchmarks/models.py                    # all that are not in the results yet; make models
    python benchmarks/models.py --only T5,GCN      # again those with such a word in their names
    python benchmarks/models.py --table            # the page again, from the results of earlier runs
    python benchmarks/models.py --again 10         # the first 10 again, or of --only: do their verdicts contradict
                                                   # the results? changes no file

A model is tiny and has random weights (model_cases.py). `amp.survey` looks at its first step, and `amp.compare` trains
it for 100 steps from three seeds at each level, in a fork of this process with one thread. The results are written
after each model. A model that does not train at O0 is left out, with its error.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import gc
import json
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from amp_patch import amp
from amp_patch.comparison.level_result import LevelResult

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"
LEVELS = ("O1", "O2", "O4", "O5")
STEPS, SEEDS, RATE = 100, 3, 3e-3
MARGIN = 1.0  # in per cent of O0's loss
MEMORY = 8 << 30  # bytes of address space of one model: a few configurations ignore the small sizes
CUT = 200  # an error is cut after this number of characters
PACKAGES = ("transformers", "timm", "diffusers", "torch_geometric", "x_transformers", "torchvision")
BAD = ("worse", "fails", "diverges", "skips")  # outcomes of a level that a model does not survive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="words, with commas between them, one of which is in a model's name")
    parser.add_argument("--limit", type=int, default=300, help="seconds of CPU for one model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--part", default="0/1", help="1/2: only every second model, from the second on")
    parser.add_argument("--again", type=int, default=0, help="compare the verdicts of so many models with the results")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.again:
        return again(read(args.results), args)
    if not args.table:
        run(read(args.results), args)
    args.page.write_text(page(read(args.results)))
    return 0


def run(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Train the models that have no result, or those that `--only` names, and write the results after each."""
    prepare()
    from model_cases import cases

    part, parts = map(int, args.part.split("/"))
    words = args.only.split(",") if args.only else []
    for case in cases()[part::parts]:
        known = case.label in results["models"] or case.label in results["left_out"]
        if not named(case.label, words) if words else known:
            continue
        found = in_fork(case, args.limit)
        wrong = found.get("left_out")
        print(f"{case.label}: {wrong or {k: v['outcome'] for k, v in found['levels'].items()}}", flush=True)
        add(case.label, found, args.results)


def read(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"models": {}, "left_out": {}}
    return json.loads(path.read_text()) if path.exists() else empty


def add(label: str, found: dict[str, Any], path: Path) -> None:
    """Write the result of a model. Other processes (`--part`) may write theirs to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = read(path)
        for each in results["models"], results["left_out"]:
            each.pop(label, None)
        results["left_out" if "left_out" in found else "models"][label] = found.get("left_out") or found
        results["torch"] = torch.__version__
        results["packages"] = {name: metadata.version(name) for name in PACKAGES}
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    finally:
        os.close(folder)  # unlocks it


def again(results: dict[str, Any], args: argparse.Namespace) -> int:
    """Train some models of the results again; print each that `contradicts` its results. Return whether one does."""
    prepare()
    from model_cases import cases

    words = args.only.split(",") if args.only else [""]
    known = [case for case in cases() if case.label in results["models"] and named(case.label, words)][: args.again]
    different = 0
    for case in known:
        now, before = in_fork(case, args.limit), results["models"][case.label]["levels"]
        ends = now.get("levels", {})
        same = ends.keys() == before.keys() and not any(contradicts(ends[name], before[name]) for name in ends)
        different += not same
        told = {name: (end["outcome"], end["gap"]) for name, end in ends.items()}
        print(f"{case.label}: {'the same' if same else told or now}", flush=True)
    print(f"{different} of {len(known)} models have another verdict")
    return int(bool(different))


def named(label: str, words: list[str]) -> bool:
    return any(word in label for word in words)


def contradicts(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether two results of one level exclude each other.

    Outcomes that differ by chance do not: the intervals of their gaps to O0 overlap.
    """
    if now["outcome"] == before["outcome"]:
        return False
    if any(len(each["gap"] or ()) < 3 for each in (now, before)):
        return True
    (_, low, high), (_, least, most) = now["gap"], before["gap"]
    return low > most or high < least


def prepare() -> None:
    """Set one thread, and declare the operators that PyPI's torchvision looks up and a CPU build of torch lacks."""
    torch.set_num_threads(1)
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_held"] = library  # without a reference the operators are undeclared
    os.environ["HF_HUB_OFFLINE"] = "1"


def in_fork(case: Any, limit: int) -> dict[str, Any]:
    """Return what `studied` returns in a fork; {"left_out": the error} if it raises or takes too long."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        with warnings.catch_warnings(), os.fdopen(writes, "w") as out:
            warnings.simplefilter("ignore")
            try:
                found = studied(case)
            except BaseException as error:
                found = {"left_out": short(f"{type(error).__name__}: {error}")}
                if os.environ.get("MODELS_TRACEBACK"):
                    traceback.print_exc()
            json.dump(found, out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"left_out": f"not at an end after {limit} seconds of CPU"}


def short(error: str) -> str:
    text = re.sub(r"\s+", " ", error).strip()
    text = re.sub(r"\S*/(site-packages|models_packages)/", "", text)
    return text if len(text) <= CUT else text[:CUT] + "..."


# One model ------------------------------------------------------------------------------------------------------------


def studied(case: Any) -> dict[str, Any]:
    """Survey a model and train it at each level."""
    torch.manual_seed(0)
    made = built(case)
    gc.freeze()  # amp.compare collects garbage before each run: without this, it visits the packages' objects
    inputs = {key: value for key, value in made.batches[0].items() if key != "targets"}
    surveyed = amp.survey(made.model, partial(made.loss, batch=made.batches[0]), inputs)
    compared = amp.compare(partial(trained, case), list(LEVELS), seeds=SEEDS, steps=STEPS, margin=MARGIN, verbosity=0)
    base = compared.baseline
    if base is None or base.level != "O0" or base.failed or len(base.finite) < SEEDS:
        return {"left_out": short(f"O0: {compared.why_nothing()}")}
    starts = [run.loss[0] for run in base.runs]
    levels = {level.level: ended(level) for level in compared.levels if level.level in LEVELS}
    return {
        "package": case.package,
        "parameters": sum(p.numel() for p in made.model.parameters()),
        "loss": [sum(starts) / len(starts), base.mean],
        "survey": [line_of(line) for line in surveyed.lines],
        "levels": levels,
    }


def built(case: Any) -> Any:
    """Make the model without dropout: levels draw other random numbers for it, which are no error of theirs."""
    made = case.make()
    for module in made.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    made.model.train()
    return made


def trained(case: Any) -> None:
    """Train the model at the level that `amp.compare` has set."""
    made = built(case)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=RATE)
    model, optimizer = amp.initialize(made.model, optimizer, verbosity=0)
    for step in range(STEPS):
        batch = made.batches[step % len(made.batches)]
        optimizer.zero_grad()
        output = model(**{key: value for key, value in batch.items() if key != "targets"})
        with amp.scale_loss(made.loss(output, batch), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def ended(level: LevelResult) -> dict[str, Any]:
    """Return the outcome of a level in a word, and the reason in compare's words if it is not as good."""
    found = level.finding
    if found.kind == "failed" or found.faults:
        outcome = "fails"
    elif found.diverged:
        outcome = "diverges"
    elif found.rejected:
        outcome = "worse"
    elif found.skips:
        outcome = "skips"
    else:
        outcome = "as good" if found.usable else "undecided"
    gap = found.gap
    ends = [] if gap is None else [x for x in (gap.mean, gap.low, gap.high) if x is not None]
    percents = [round(100 * x / abs(gap.base), 3) for x in ends] if gap is not None else None
    reason = "" if outcome == "as good" else short(level.verdict.reason or level.verdict.text)
    skipped = max((sum(run.skipped) for run in level.runs), default=0)
    return {"outcome": outcome, "gap": percents, "reason": reason, "skipped": skipped}


def line_of(line: Any) -> dict[str, Any]:
    place = re.sub(r".*/(site-packages|models_packages|benchmarks)/", "", line.file)
    levels = [level for level in line.levels if level in (*LEVELS, "O3")]
    return {"place": f"{place}:{line.line}", "op": line.op, "levels": levels, "what": line.what, "breaks": line.breaks}


# The page -------------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of reasons why a level is not as good as O0.

    Attributes:
        name: its words on the page.
        way_out: what user code does about it.
        has: whether a reason is of this kind, from the result of the level and what the survey names there.
    """

    name: str
    way_out: str
    has: Callable[[dict[str, Any], str], bool]


CHANCE = "more seeds, or a longer training on real data"
KINDS = (  # a reason is of the first kind that has it
    Kind(
        "fills with a number that FP16 or BF16 does not hold",
        "`torch.finfo(x.dtype).min`, of the tensor that is filled",
        lambda end, named: "without overflow" in end["reason"],
    ),
    Kind(
        "mixes FP32 tensors of its own with the level's",
        "O1 or O4, which cast; or `x.to(other.dtype)`",
        lambda end, named: "must have the same dtype" in end["reason"],
    ),
    Kind(
        "calls a function that torch lacks in FP16 and BF16",
        "name the module in `keep_fp32=`; or O1 or O4",
        lambda end, named: "Unsupported dtype" in end["reason"] or "not implemented" in end["reason"],
    ),
    Kind(
        "an epsilon of 1e-12 is lost in FP16",
        "an epsilon of 1e-5; or BF16",
        lambda end, named: "equal numbers with eps" in named,
    ),
    Kind(
        "a mask of -1e9 or less is -inf in FP16",
        "`torch.finfo(x.dtype).min`, of the scores; or BF16",
        lambda end, named: "is masked throughout" in named,
    ),
    Kind("activations that FP16 does not hold", "BF16: O4 or O5", lambda end, named: "infinite in FP16" in named),
    Kind("one seed of three collapsed", CHANCE, lambda end, named: end["reason"].startswith("collapsed with seed ")),
    Kind(
        "a step less: the first loss scale, 65,536, overflows",
        "a longer training, in which a step less is nothing",
        lambda end, named: 0 < end.get("skipped", 0) <= FEW and "final loss" in end["reason"],
    ),
    Kind("worse on random batches", CHANCE, lambda end, named: "final loss" in end["reason"]),
)
OTHER = Kind("another reason", "", lambda end, named: True)
UNDECIDED = Kind("undecided on random batches", CHANCE, lambda end, named: True)
NAMED = Kind("as good, although the survey names a line", "see the line in the next table", lambda end, named: True)
FEW = 3  # skipped steps of a loss scale that finds its size
SLIGHT = KINDS[-2:]  # kinds with the gap of each model
MANY = 20  # a kind with more models than this has their number for each level, not their names


def page(results: dict[str, Any]) -> str:
    models = results["models"]
    packages = collections.Counter(model["package"] for model in models.values())
    versions = ", ".join(f"{name} {results['packages'][name]} ({n})" for name, n in sorted(packages.items()))
    lost = {name: model for name, model in models.items() if problems(model)}
    parts = [
        "# Public models at each level",
        "<!-- Written by `make models` (benchmarks/models.py): edit that. -->",
        "This page says which public models train as well at a level as in FP32, and why the others do not. "
        f"{len(models)} models were trained at O0, O1, O2, O4 and O5 without an edit.",
        summary(models),
        "## Why a level is not as good",
        "The percentage is the gap to O0's loss.",
        kinds_table(models),
        "A *step less*: with `max_loss_scale=256`, BigBird, BlenderbotSmall, DistilBert, IBert and MegatronBert skip "
        "no step at O2, and end within 0.1 % of O0's loss. *Worse on random batches*: from 8 seeds, the gaps of T5 at "
        "O5 (+2.5 %, ±3.0 at 95 %), of Pvt at O1 (+8.6 %, ±10.5) and of Dinov2WithRegisters at O5 (+12 %, ±13) are "
        "not told from chance. Of 800 tests at 95 %, chance alone can make 20 of this kind.",
        "## How it was measured",
        f"Each model is made in code by its package with few and narrow layers, and trained on random batches for "
        f"{STEPS} steps of AdamW from {SEEDS} seeds. O1 and O2 are in FP16, O4 and O5 in BF16. Dropout is off. "
        f"`amp.compare` judges the mean loss of the last tenth of the steps, with a margin of {MARGIN:g} % of O0's "
        "([the test](compare.md#read-the-report)). `amp.survey` looks at one step ([the survey](survey.md)). "
        f"torch {results['torch']}, one thread; {versions} (models of each in brackets).",
        "Random weights cannot show what pretrained weights do: activations that grow over a long training are not in "
        "these models, so that FP16 may break a model that survives here. One T5 (*as large as trained*) therefore has "
        "larger weights in its feed-forwards, which return up to 2e5: FP16 ends at 65,504. It diverges at O1. At O2, "
        "transformers clamps the activations, and it trains worse.",
        "`benchmarks/results/models.json` has every model, its gaps, the words of `amp.compare` and all lines of the "
        f"survey. It also has {len(results['left_out'])} models that were left out, because they were not built or not "
        "trained at O0 with these tiny configurations, each with its error. `benchmarks/model_cases.py` lists more "
        "models, which were not trained yet.",
        "## Models with a finding",
        "A level is *as good* if it is not worse than O0 within the margin. *Survey* has the levels for which the "
        "survey names a line that breaks a training, and the first such line; O3 is surveyed, not trained. A model "
        "without a row has no finding.",
        table(lost) if lost else "No model of the results has one.",
        "## Again",
        "    make models",
        "trains the models that have no result yet, and rewrites this page. `python benchmarks/models.py --again 10` "
        "trains the first ten again and fails if a verdict contradicts its result here: the outcomes differ, and the "
        "intervals of the gaps do not overlap.",
        "The results are of an AMD EPYC with AVX2 alone, of a version that did not sum gradients of layer norms and "
        "embeddings in FP32 yet. On an Intel Xeon with AVX-512 and arithmetic for FP16 and BF16, no result of the 197 "
        "models contradicts them: 744 of the 788 outcomes are the same, among these all levels that fail, diverge or "
        "skip. The others are between *as good*, *undecided* and *worse*, which three seeds of 100 steps do not tell "
        "apart surely.",
    ]
    return "\n\n".join(parts) + "\n"


def kind_of(model: dict[str, Any], level: str) -> Kind | None:
    """Return the kind of the reason why a level is not as good; None if it is, and the survey names no line."""
    end = model["levels"][level]
    named = " ".join(line["what"] for line in model["survey"] if line["breaks"] and level in line["levels"])
    if end["outcome"] == "as good":
        return NAMED if named else None
    if end["outcome"] == "undecided":
        return UNDECIDED
    return next(kind for kind in (*KINDS, OTHER) if kind.has(end, named))


def kinds_table(models: dict[str, Any]) -> str:
    lines = ["| kind | models | which | what to do |", "|---|---:|---|---|"]
    for kind in (*KINDS, OTHER, UNDECIDED, NAMED):
        levels = {label: [n for n in LEVELS if kind_of(model, n) is kind] for label, model in sorted(models.items())}
        levels = {label: names for label, names in levels.items() if names}
        counts = collections.Counter(name for names in levels.values() for name in names)
        which = [
            f"{label} ({', '.join(cell(models[label], name) for name in names)})" for label, names in levels.items()
        ]
        if len(levels) > MANY:
            which = [f"{name}: {counts[name]}" for name in LEVELS]
        if levels:
            lines.append(f"| {kind.name} | {len(levels)} | {', '.join(which)} | {kind.way_out} |")
    return "\n".join(lines)


def cell(model: dict[str, Any], name: str) -> str:
    """Return a level with its gap, if the level was judged by that."""
    kind, gap = kind_of(model, name), model["levels"][name]["gap"]
    return f"{name} {gap[0]:+.2g} %" if gap and kind is not None and kind in SLIGHT else name


def problems(model: dict[str, Any]) -> bool:
    """Return whether a level was not as good, or the survey names a line that breaks one."""
    worse = any(level["outcome"] != "as good" for level in model["levels"].values())
    return worse or any(line["breaks"] for line in model["survey"])


def summary(models: dict[str, Any]) -> str:
    outcomes = ("as good", "undecided", *BAD)
    lines = [f"| level | {' | '.join(outcomes)} | named by the survey |", "|---|" + "---:|" * (len(outcomes) + 1)]
    for name in LEVELS:
        counts = collections.Counter(model["levels"][name]["outcome"] for model in models.values())
        named = sum(any(line["breaks"] and name in line["levels"] for line in m["survey"]) for m in models.values())
        lines.append(f"| {name} | {' | '.join(str(counts[each]) for each in outcomes)} | {named} |")
    return "\n".join(lines)


def table(models: dict[str, Any]) -> str:
    lines = [f"| model | package | {' | '.join(LEVELS)} | survey | line |", "|---|---|" + "---|" * (len(LEVELS) + 2)]
    for label, model in sorted(models.items(), key=lambda each: (each[1]["package"], each[0])):
        ends = [model["levels"][name]["outcome"] for name in LEVELS]
        broken = [line for line in model["survey"] if line["breaks"]]
        named = sorted({level for line in broken for level in line["levels"]})
        said = f"`{broken[0]['place']}` {broken[0]['op']}: {broken[0]['what']}" if broken else ""
        cells = [label, model["package"], *ends, ", ".join(named) or "clear", said.replace("|", "\\|")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
