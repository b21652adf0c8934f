"""Rungs as levels of a comparison: O5+split, O5+stochastic, each a level by one string, everywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from compared_runs import (
    compare,
    importable_fixture,  # noqa: F401  the fixture `importable`
    seeds,
)
from torch import nn

from amp_patch import amp
from amp_patch.__main__ import main
from amp_patch.comparison import headline, page, table
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.lost_updates import Updates
from amp_patch.diagnose.recording.run import NATIVE, Run, dumps, loads

LEVELS = ["O5", "O5+split", "O5+stochastic", "O5+split+8bit"]
BF16 = {"dtype": "bfloat16"}
BASE, SAME = (1.0, 1.25, 1.5), (1.25, 1.0, 1.5)


def build() -> tuple:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    batches = [(torch.randn(8, 64), torch.randint(0, 8, (8,))) for _ in range(4)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.functional.cross_entropy, batches


@pytest.fixture(scope="module", name="compared")
def compared_fixture():
    return amp.compare(build, LEVELS, seeds=2, steps=8, verbosity=0)


def test_each_rung_has_its_own_figures(compared):
    assert [level.name for level in compared.levels] == ["O0", *(f"{level} BF16" for level in LEVELS)]
    _, whole, split, stochastic, coded = compared.levels
    assert [run.error or run.notes for run in compared.runs] == [[]] * len(compared.runs)
    assert [level.runs[0].masters for level in (whole, split, stochastic)] == [4 * 4680, 2 * 4680, 0]
    assert whole.memory > split.memory > stochastic.memory > coded.memory
    assert coded.runs[0].masters == split.runs[0].masters and coded.runs[0].state < 0.4 * split.runs[0].state
    # Split masters equal FP32 but for ties in the rounding of weights. Stochastic rounding gives other losses.
    for one, other in zip(whole.runs, split.runs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
    assert stochastic.runs[0].loss != whole.runs[0].loss


def test_table_page_json_and_notebook_show_the_name_of_a_rung(compared, tmp_path):
    assert "O5+stochastic BF16" in "\n".join(table.lines(compared)) and "O5+split BF16: " in repr(compared)
    text = page.write(compared, tmp_path).read_text()
    assert "<b>O5+split</b> BF16" in text and "O5+stochastic BF16" in text
    told = loads((tmp_path / "report.json").read_text())
    assert [level["level"] for level in told["levels"]] == ["O0", *LEVELS]
    assert [run["level"] for run in told["runs"]] == 2 * ["O0", *LEVELS]
    again = type(compared).from_dict(loads(dumps(compared.to_dict())))
    assert again.summary == compared.summary and [level.name for level in again.levels][2] == "O5+split BF16"


def updates(changed: int, lost: int, dtype: str = "bfloat16") -> dict[str, list[Updates]]:
    return {"updates": [Updates(dtype, {"0.weight": [changed, lost]}, 1), Updates(dtype, {"1.weight": [0, 0]}, 2)]}


def test_a_comparison_shows_the_updates_that_weights_without_masters_would_lose(compared, tmp_path):
    _, whole, split, stochastic, _ = compared.levels
    base = [run.lost_updates() for run in compared.baseline.runs]
    assert all(0 < share < 1 for share in base) and min(base) <= compared.baseline.lost_updates <= max(base)
    assert split.lost_updates == pytest.approx(whole.lost_updates, abs=0.02)
    assert stochastic.lost_updates == compared.baseline.lost_updates, "it has no FP32 values of its own"
    (note,) = [note for note in compared.notes if "without masters" in note]
    assert note.startswith(f"without masters {100 * whole.lost_updates:.0f} % of the updates would be lost in BF16")
    assert note in " ".join(" ".join(table.lines(compared)).split()) and note in repr(compared)
    assert note in page.html(compared)
    told = loads(page.write(compared, tmp_path).with_suffix(".json").read_text())
    assert [level["lost_updates"] for level in told["levels"]] == [level.lost_updates for level in compared.levels]


def test_many_lost_updates_explain_o3_and_name_the_safe_rungs():
    base = seeds("O0", *BASE, **updates(100, 89))
    o3 = seeds("O3", 2.0, 2.25, 2.5625, **BF16)
    made = compare(base, seeds("O5", *SAME, ms=5, **BF16, **updates(100, 88)), o3)
    assert [level.lost_updates for level in made.levels] == [0.89, 0.88, 0.89]
    assert made.levels[2].finding.lost_updates == 0.89 and made.levels[1].finding.lost_updates is None
    verdict = made.levels[2].verdict
    assert "worse (margin 0.2 %); its weights lose 89 % of their updates; " in verdict.text
    assert verdict.reason.endswith("; its weights lose 89 % of their updates")
    assert "lose" not in made.levels[1].verdict.text
    assert made.notes == [
        "without masters 88 % of the updates would be lost in BF16 weights: take masters (O5 and O5+split), or "
        "stochastic rounding (O5+stochastic)"
    ]
    # A level that is within by these figures is warned of, too.
    within = compare(base, seeds("O3", *SAME, ms=5, **BF16)).levels[1].verdict
    assert within.kind == "within" and within.reason.endswith("; its weights lose 89 % of their updates")


def test_few_lost_updates_give_a_number_and_no_advice():
    made = compare(seeds("O0", *BASE, **updates(100, 17)), seeds("O3", *SAME, **BF16))
    assert made.notes == ["without masters 17 % of the updates would be lost in BF16 weights"]
    assert made.levels[1].finding.lost_updates == 0.17 and "lose" not in made.levels[1].verdict.text


def test_lost_fp16_updates_point_to_o2_and_unmeasured_ones_are_not_mentioned():
    made = compare(seeds("O0", *BASE, **updates(10, 9, "float16")), seeds("O3", *SAME))
    assert made.notes == ["without masters 90 % of the updates would be lost in FP16 weights: take masters (O2)"]
    made = compare(seeds("O0", *BASE, **updates(10, 9)), seeds("O3", *SAME))
    assert made.notes == [] and made.levels[1].lost_updates is None


def test_a_recommended_rung_has_an_edit_and_a_command():
    small = seeds("O5+split", *SAME, ms=5, **BF16)
    edit, command = headline.how_to_use(compare(seeds("O0", *BASE), small, command="train.py"))
    assert 'opt_level="O5", master_weights="split")' in edit[2]
    assert command == "AMP_PATCH_OPT_LEVEL=O5+split python -m amp_patch run train.py"
    edit, command = headline.how_to_use(
        compare(seeds("O0", *BASE), seeds("O2+stochastic", *SAME, ms=5, **BF16), command="train.py")
    )
    assert 'opt_level="O2", master_weights="stochastic", dtype=torch.bfloat16)' in edit[2]
    assert command == "AMP_PATCH_OPT_LEVEL=O2+stochastic AMP_PATCH_DTYPE=bfloat16 python -m amp_patch run train.py"


def test_rungs_in_any_order_give_one_name():
    assert Plan(("O5+8bit+split", "O4+8bit")).levels == ("O0", "O5+split+8bit", "O4+8bit")
    with pytest.raises(ValueError, match=r"compare: O5\+split\+8bit is in levels twice"):
        Plan(("O5+8bit+split", "O5+split+8bit"))
    edit, _ = headline.how_to_use(compare(seeds("O0", *BASE), seeds("O5+split+8bit", *SAME, ms=5, **BF16)))
    assert 'opt_level="O5", master_weights="split", optimizer_state="8bit")' in edit[2]


def test_stochastic_rounding_is_recommended_if_it_is_fastest_and_o3_is_not():
    base = seeds("O0", *BASE)
    whole, chance = (seeds(level, *SAME, ms=ms, **BF16) for level, ms in (("O5", 5), ("O5+stochastic", 4)))
    assert compare(base, whole, chance).summary.startswith("Use O5+stochastic BF16: 2.5x faster")
    assert compare(base, whole, seeds("O3", *SAME, ms=4, **BF16)).summary.startswith("Use O5 BF16: 2.0x faster")


def test_a_plan_sets_the_level_of_a_run_with_its_rungs():
    plan = Plan(("O5", "O5+split"), seeds=1)
    for level, wanted in (("O5", "O5"), ("O5+split", "O5+split"), (NATIVE, "O0")):
        assert plan.environment(Run(level)) == {"AMP_PATCH_OPT_LEVEL": wanted, "AMP_PATCH_SEED": "0"}
    assert plan.type_of("O5+split") == "bfloat16" and Plan(("O2+split",), dtype="bfloat16").levels == ("O0", "O2+split")


PLAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_an_unedited_script_is_compared_at_rungs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PLAIN)
    main(["compare", "train.py", "--levels", ",".join(LEVELS), "--seeds", "1", "--out", "out"])
    runs = [Run.from_dict(run) for run in loads(Path("out/report.json").read_text())["runs"]]
    assert {run.level: run.masters for run in runs} == {
        "O0": 0,
        "O5": 4 * 676,
        "O5+split": 2 * 676,
        "O5+stochastic": 0,
        "O5+split+8bit": 2 * 676,
    }
    assert all(run.error is None and not run.notes for run in runs)
    names = Counter(path.name.partition("-seed")[0] for path in Path("out/runs").iterdir())
    assert names == dict.fromkeys(["O0", *LEVELS], 2)
    main(["compare", "train.py", "--levels", "O2", "--seeds", "1", "--out", "out"])
    assert {path.name.partition("-seed")[0] for path in Path("out/runs").iterdir()} == {"O0", "O2"}, "old runs went"
