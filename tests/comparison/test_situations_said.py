"""Situations of users, and what a comparison says of them: the sentence, the table, the card and the commands."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from compared_runs import compare, made_up_run, parsed, seeds
from python_forks import python
from scripts import environment, start_script
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.comparison import page, table, what_next
from amp_patch.comparison.commands.compare_arguments import plan_of
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.plan import MEMORY, SMALL
from amp_patch.diagnose.recording.run import NATIVE, Run

BF16 = {"dtype": "bfloat16"}
SMALLER = {**BF16, "peak_memory": 2**19}
OWN = {"native": True, "replaced": ["torch.autocast (train.py, line 8)", "GradScaler (train.py, line 5)"]}
MASK = {"file": "net.py", "line": 12, "called": "", "op": "where", "levels": ["O5"], "what": "an error in BF16"}
SERVED = {"lines": [{**MASK, "edit": "make the mask in x.dtype", "breaks": False, "raises": True, "served": True}]}
BROKEN = {**MASK, "edit": "take 1e-5", "what": "1e-08 is 0 in FP16", "levels": ["O2"]}
STEP = {"levels": ["O2", "O3"], "failed": "", "words": "gradients differ from FP32's by 0.9 %; rounding explains 0.8 %"}
BASE, GOOD, BAD = (2.0, 2.02, 1.98), (2.0002, 2.0203, 1.9801), (5.0, 6.0, 7.0)


def quick(*groups: list[Run], base: float = 2.0, **options) -> Comparison:
    again = {"again": "--steps=20 train.py -- --lr 1", "folder": "out", "command": "train.py --lr 1"}
    return compare(seeds("O0", base), *groups, **{**again, **options})


def full(*groups: list[Run], of_base: dict | None = None, **options) -> Comparison:
    again = {"again": "train.py", "folder": "out", "command": "train.py"}
    return compare(seeds("O0", *BASE, **(of_base or {})), *groups, **{**again, **options})


class Situation(NamedTuple):
    """A comparison, the level that it recommends, and patterns that its report has (`says`) or lacks (`never`)."""

    made: Callable[[], Comparison]
    level: str
    says: tuple[str, ...]
    never: tuple[str, ...] = ()


SITUATIONS = {
    # The margin and the steps of a quick look.
    "quick: beyond the margin beside a good level": Situation(
        # O0 falls from 4 to 0.5: 0.59 % of 0.5 is little of what it gained, and three margins.
        lambda: quick(seeds("O5", 0.50295, **SMALLER, ms=5), seeds("O4", 0.49985, **BF16, ms=9), base=0.5),
        "O4",
        ("^So far O4 BF16: 1.11x faster", "loss -0.03 % with one seed"),
        ("So far O5",),
    ),
    "quick: beyond the margin alone": Situation(
        lambda: quick(seeds("O5", 0.50295, **SMALLER, ms=5), base=0.5),
        "O0",
        ("^Stay with O0 for now", r"loss \+0.59 %", "To be sure: .*--levels O5 --seeds 3"),
        ("So far",),
    ),
    "quick: an accuracy that is lower by more than the margin": Situation(
        lambda: compare(
            [made_up_run("O0", logged={"acc": [(0, 0.1), (40, 0.8)]})],
            [made_up_run("O5", ms=5, **BF16, logged={"acc": [(0, 0.1), (40, 0.795)]})],
            metric="acc",
            maximize=True,
        ),
        "O0",
        ("^Stay with O0 for now",),
        ("So far",),
    ),
    "three steps": Situation(
        lambda: compare(
            seeds("O0", 2.0, steps=3),
            seeds("O4", 2.0001, steps=3, **SMALLER, ms=5),
            again="--steps=3 train.py",
            folder="out",
            asked_steps=3,
        ),
        "O0",
        ("^Stay with O0 for now. 3 steps decide nothing: train for at least 30", "To be sure: .*--steps=30 train.py"),
        ("So far", "Use O4", "do not use"),
    ),
    "three steps, three seeds, clearly worse": Situation(
        lambda: compare(seeds("O0", *BASE, steps=3), seeds("O2", 2.1, 2.12, 2.08, steps=3, ms=5)),
        "O0",
        ("3 steps decide nothing: train for at least 30", "not judged"),
        ("Use O2", "do not use"),
    ),
    "twenty steps": Situation(
        lambda: compare(seeds("O0", *BASE, steps=20), seeds("O4", *GOOD, steps=20, **SMALLER, ms=5)),
        "O4",
        ("20 steps decide little: train for at least 30",),
    ),
    # To be sure.
    "to be sure keeps each level that is not ruled out": Situation(
        lambda: quick(
            seeds("O1", float("nan")),
            seeds("O4", 2.0001, **SMALLER),
            seeds("O5", 2.1, **SMALLER),
            [Run("O2", 0, error="RuntimeError: no kernel")],
            seeds("O3", 99.0),
        ),
        "O4",
        ("be sure: python -m amp_patch compare --levels O4,O5 --seeds 3 --out=out-sure --steps=20 train.py -- --lr 1",),
    ),
    "nothing to be sure of": Situation(
        lambda: quick(seeds("O5", 99.0, **SMALLER)), "O0", ("^Stay with O0: do not use O5",), ("To be sure",)
    ),
    # Lines to change before those to paste.
    "a mask that compare serves": Situation(
        lambda: full(seeds("O5", *GOOD, **SMALLER, ms=5), survey=SERVED),
        "O5",
        ("<dt>Change these lines first</dt><dd>[^<]*net.py:12 .where.: make the mask", "# after the line that makes"),
        ("behind the line",),
    ),
    "a mask that the level does not need": Situation(
        lambda: full(seeds("O4", *GOOD, **SMALLER, ms=5), survey=SERVED), "O4", (), ("Change these lines",)
    ),
    "a script with its own autocast and GradScaler": Situation(
        lambda: full(
            seeds(NATIVE, *GOOD, dtype="float16", ms=9), seeds("O5", *GOOD, **SMALLER, ms=5), of_base=OWN, survey=SERVED
        ),
        "O5",
        (
            r"these lines first.*torch.autocast \(train.py, line 8\) and GradScaler \(train.py, line 5\): remove",
            "O5 BF16 beside your script as it is: 1.80x faster, 50 % less memory",
            "your script as it is *2.000",
        ),
        ("native",),
    ),
    "its own mixed precision is as fast and as small": Situation(
        lambda: full(
            seeds(NATIVE, *GOOD, **SMALLER, ms=5), seeds("O5", *GOOD, **SMALLER, ms=4.9), of_base=OWN
        ),
        "native",
        ("^Keep your script as it is: 2.0x faster", "Nothing: it is your script as it is"),
        ("Change these", "amp.initialize", "Use O5"),
    ),
    "its own mixed precision is worse than FP32": Situation(
        lambda: full(seeds(NATIVE, *BAD, **BF16), seeds("O5", *BAD, **BF16), of_base=OWN),
        "O0",
        ("^Go back to O0", "O0 beside your script as it is: "),
        ("is the script as it is",),
    ),
    "a script that calls initialize": Situation(
        lambda: full(seeds("O5", *GOOD, **SMALLER, ms=5), of_base={"edited": True}, survey=SERVED),
        "O5",
        ("# in its call of amp.initialize:\nopt_level=.{1,6}O5",),
        ("Change these lines", "scale_loss"),
    ),
    # Speed or memory.
    "for speed": Situation(
        lambda: full(seeds("O4", *GOOD, **BF16, ms=5), seeds("O5+split", *GOOD, **SMALLER, ms=20)),
        "O4",
        ("^Use O4 BF16: 2.0x faster",),
    ),
    "for memory, however slow": Situation(
        lambda: full(
            seeds("O4", *GOOD, **BF16, ms=5), seeds("O5+split", *GOOD, **SMALLER, ms=20), goal=MEMORY
        ),
        "O5+split",
        (r"^Use O5\+split BF16: 50 % less memory, 2.0x slower", "The smallest level that is as good as O0"),
    ),
    "for memory, but worse": Situation(
        lambda: full(seeds("O4", *GOOD, **BF16, ms=5), seeds("O5+split", *BAD, **SMALLER), goal=MEMORY),
        "O4",
        ("^Use O4 BF16", r"O5\+split BF16 .*do not use"),
    ),
    "for memory, one seed": Situation(
        lambda: quick(
            seeds("O4", 2.0001, **BF16, ms=5), seeds("O5+split", 2.0001, **SMALLER, ms=20), goal=MEMORY
        ),
        "O5+split",
        (r"^So far O5\+split BF16: 50 % less memory",),
    ),
    "about as fast: the smaller": Situation(
        lambda: full(seeds("O4", *GOOD, **BF16, ms=5), seeds("O5", *GOOD, **SMALLER, ms=5.1)), "O5", ("^Use O5 BF16",)
    ),
    # The measurement beside the level.
    "a level that ended badly, which one step does not explain": Situation(
        lambda: full(seeds("O2", *BAD), survey={"lines": [], "measured": [STEP]}),
        "O0",
        (r"O2 FP16 .*one step, measured: gradients differ from FP32's by 0.9 %; rounding explains 0.8 %",),
        ("names no line",),
    ),
    "a level that ended badly, by a line": Situation(
        lambda: full(seeds("O2", *BAD), survey={"lines": [BROKEN], "measured": [STEP]}),
        "O0",
        (r"the survey names net.py:12 \(where\): 1e-08 is 0 in FP16; one step, measured: gradients differ",),
    ),
    "an undecided level": Situation(
        lambda: full(seeds("O2", 2.01, 2.1, 1.999), survey={"lines": [], "measured": [STEP]}),
        "O0",
        ("O2 FP16 .*one step, measured: ",),
    ),
    # Words.
    "other work": Situation(
        lambda: full(
            [made_up_run("O5", seed, final=GOOD[seed], ms=ms, **SMALLER) for seed, ms in enumerate((5, 6.1, 8.2))],
            machine={"load": "other work took 0.6 of 2 cores while it ran"},
        ),
        "O5",
        ("the speeds may be wrong by up to 64 %; compare again while nothing else runs. Losses and memory are right",),
        ("lie up to", "apart, the losses"),
    ),
}  # fmt: skip


def shown(made: Comparison) -> str:
    """The terminal's text with joined lines, and the page's, tags included."""
    lines = table.lines(made) + [f"To {purpose}: {command}" for purpose, command in what_next.commands(made)]
    joined = re.sub(r"\n +", " ", "\n".join(lines))
    return "\n".join(
        [joined, " ".join(joined.split()), html.unescape(page.html(made).partition("<body>")[2].partition("<table")[0])]
    )


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_report_says_what_was_asked(situation):
    made = situation.made()
    text = shown(made)
    assert made.recommended.level == situation.level, made.summary
    for pattern in situation.says:
        assert re.search(pattern, text, re.MULTILINE | re.DOTALL), f"{pattern} is missing in {text}"
    for pattern in situation.never:
        assert pattern not in text, text
    assert shown(Comparison.from_dict(made.to_dict())) == text


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_the_terminal_has_the_sentence_first_and_four_figures_of_a_level(situation):
    made = situation.made()
    lines = table.lines(made)
    joined = " ".join(" ".join(lines).split())
    assert joined.startswith(made.summary)
    start = next(i for i, line in enumerate(lines) if line.startswith("O0 "))
    for line, level in zip(lines[start:], made.levels, strict=False):
        figures = line.removeprefix(level.name).replace("% of", "")
        assert len(re.findall(r"[-+]?\d[\d.]*", figures)) <= 4, line
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert not re.search(r"95 %|t-test|spread of|gap to", joined)


# ---------------------------------------------------------------------------------------------------------------------
# In a notebook, and whole runs


def build(dtype: torch.dtype, width: int = 64) -> Callable[[], tuple]:
    def made() -> tuple:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 8)).to(dtype)
        batches = [(x := torch.randn(16, 8).to(dtype), x.float().sin().to(dtype)) for _ in range(4)]
        return model, torch.optim.AdamW(model.parameters()), F.mse_loss, batches

    return made


def test_in_a_notebook_a_bf16_model_tries_the_rungs_without_being_asked():
    made = amp.compare(build(torch.bfloat16, 1024), seeds=1, steps=12, verbosity=0)
    assert [level.level for level in made.levels] == ["O0", "O1", "O2", "O4", "O5", *SMALL]
    named = amp.compare(build(torch.bfloat16), ["O5"], seeds=1, steps=12, verbosity=0)
    assert [level.level for level in named.levels] == ["O0", "O5"]


def test_in_a_notebook_memory_is_a_goal():
    made = amp.compare(build(torch.float32, 1024), seeds=1, steps=12, goal="memory", margin=50, verbosity=0)
    assert [level.level for level in made.levels] == ["O0", "O1", "O2", "O4", "O5", *SMALL]
    sizes = {level.level: level.memory for level in made.levels}
    assert made.recommended.level == min(sizes, key=sizes.get) == "O5+split+8bit"
    assert repr(made).startswith("So far O5+split+8bit BF16: ")
    with pytest.raises(ValueError, match="goal is 'size'; wanted 'speed' or 'memory'"):
        amp.compare(build(torch.float32), goal="size")


def test_in_a_notebook_three_steps_decide_nothing():
    made = amp.compare(build(torch.float32), ["O4"], seeds=2, steps=3, verbosity=0)
    assert made.recommended.level == "O0"
    assert "3 steps decide nothing: train for at least 30." in " ".join(repr(made).split())


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ([], ("O0", "O1", "O2", "O4", "O5")),
        (["--for", "memory"], ("O0", "O1", "O2", "O4", "O5", *SMALL)),
        (["--for=memory", "--quick"], ("O0", "O4", "O5", *SMALL)),
        (["--for=memory", "--quick", "--dtype=float16"], ("O0", "O1", "O2")),
        (["--for=memory", "--levels=O2"], ("O0", "O2")),
    ],
)
def test_for_memory_the_rungs_are_in_the_plan(given, levels):
    assert plan_of(parsed(*given, "train.py")).levels == levels


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x):
        hidden = self.one(x).relu()
        hidden = torch.eye(x.shape[0]) @ hidden  # line 12
        return self.two(hidden)

torch.manual_seed(0)
net = Net(){to}
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled={own})
for step in range(30):
    x = torch.randn(32, 64){to}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled={own}):
        loss = (net(x) - x[:, :8]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def compared(folder: Path, script: str, *options: str) -> tuple[str, str, dict]:
    """Return what `compare` prints, the page's text, and the report as data."""
    ran = start_script(folder, script, "-m", "amp_patch", "compare", *options)
    out = folder / "amp_compare"
    assert (out / "report.json").exists(), ran.stderr
    return ran.stdout, html.unescape((out / "report.html").read_text()), json.loads((out / "report.json").read_text())


@pytest.mark.program
def test_lines_to_change_come_before_those_to_paste(tmp_path):
    options = ("--levels", "O5", "--seeds", "2", "--for", "memory", "--margin", "50", "--min-gain", "0")
    printed, card, report = compared(tmp_path, SCRIPT.format(to="", own=True), *options)
    assert [level["name"] for level in report["levels"]] == ["O0", "O5 BF16", "your script as it is"]
    change, paste = (card.index(each) for each in ("Change these lines first", "# after the line that makes"))
    said = card[change:paste]
    assert "GradScaler (train.py, line 18)" in said and "torch.autocast (train.py, line 21)" in said
    assert "train.py:12 (matmul)" in said and change < paste
    assert "O5 BF16 beside your script as it is: " in " ".join(printed.split())
    again = python("-m", "amp_patch", "report", "amp_compare", cwd=tmp_path, env=environment())
    assert again.stdout.splitlines()[0] in printed


@pytest.mark.program
def test_a_quick_look_at_a_bf16_script_tries_the_rungs_and_keeps_its_report(tmp_path):
    script = SCRIPT.format(to=".bfloat16()", own=False).replace("torch.eye(x.shape[0]) @ ", "")
    printed, _, report = compared(tmp_path, script, "--quick", "--steps", "12")
    assert [level["level"] for level in report["levels"]] == ["O0", "O4", "O5", *SMALL]
    sure = re.search("To be sure: (.*)", printed)
    assert sure is None or "--out=amp_compare-sure --steps=30" in sure[1]
