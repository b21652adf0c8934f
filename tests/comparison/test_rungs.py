"""Rungs as levels of a comparison: O5+split, O5+stochastic, each a level by one string, everywhere."""

from __future__ import annotations

import argparse
import json
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
from amp_patch.comparison import headline, page, table
from amp_patch.comparison.commands import compare_arguments
from amp_patch.comparison.plan import LEVELS, Plan
from amp_patch.diagnose.lost_updates import Updates
from amp_patch.diagnose.recording.run import NATIVE, Run, dumps, loads

RUNGS = ["O5", "O5+split", "O5+stochastic", "O5+split+8bit"]
BF16 = {"dtype": "bfloat16"}
BASE, SAME = (1.0, 1.25, 1.5), (1.25, 1.0, 1.5)


def build() -> tuple:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    batches = [(torch.randn(8, 64), torch.randint(0, 8, (8,))) for _ in range(4)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.functional.cross_entropy, batches


@pytest.fixture(scope="module", name="compared")
def compared_fixture():
    return amp.compare(build, RUNGS, seeds=2, steps=8, verbosity=0)


def test_each_rung_has_its_own_figures(compared):
    assert [level.name for level in compared.levels] == ["O0", *(f"{level} BF16" for level in RUNGS)]
    _, whole, split, stochastic, coded = compared.levels
    assert [run.error or run.notes for run in compared.runs] == [[]] * len(compared.runs)
    assert [level.runs[0].masters for level in (whole, split, stochastic)] == [4 * 4680, 2 * 4680, 0]
    assert whole.memory > split.memory > stochastic.memory > coded.memory
    assert coded.runs[0].masters == split.runs[0].masters and coded.runs[0].state < 0.4 * split.runs[0].state
    # Split masters equal FP32 but for ties in the rounding of weights. Stochastic rounding gives other losses.
    for one, other in zip(whole.runs, split.runs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
    assert stochastic.runs[0].loss != whole.runs[0].loss


def wide() -> tuple:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    batches = [(torch.randn(256, 64), torch.randint(0, 8, (256,))) for _ in range(4)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.functional.cross_entropy, batches


def test_activations_in_eight_bits_are_counted():
    found = amp.compare(wide, ["O5", "O5+act8", "O1", "O1+act8"], seeds=1, steps=8, verbosity=0)
    assert [run.error or run.notes for run in found.runs] == [[]] * 5
    for level, coded in zip(found.levels[1::2], found.levels[2::2], strict=True):
        assert coded.level == f"{level.level}+act8" and coded.activations < 0.65 * level.activations
        assert coded.runs[0].masters == level.runs[0].masters and coded.runs[0].state == level.runs[0].state
        assert coded.runs[0].loss == pytest.approx(level.runs[0].loss, rel=2e-2)
        assert coded.runs[0].loss != level.runs[0].loss


def test_table_page_json_and_notebook_show_the_name_of_a_rung(compared, tmp_path):
    assert "O5+stochastic BF16" in "\n".join(table.lines(compared)) and "O5+split BF16 " in repr(compared)
    text = page.write(compared, tmp_path).read_text()
    assert "<b>O5+split</b> BF16" in text and "O5+stochastic BF16" in text
    told = loads((tmp_path / "report.json").read_text())
    assert [level["level"] for level in told["levels"]] == ["O0", *RUNGS]
    assert [run["level"] for run in told["runs"]] == 2 * ["O0", *RUNGS]
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
    assert note in " ".join(repr(compared).split())
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
    assert verdict.reason == "its weights lose 89 % of their updates"
    assert "lose" not in made.levels[1].verdict.text
    assert made.notes == [
        "without masters 88 % of the updates would be lost in BF16 weights: take masters (O5 and O5+split), or "
        "stochastic rounding (O5+stochastic)"
    ]
    # A level that is within by these figures is warned of, too.
    within = compare(base, seeds("O3", *SAME, ms=5, **BF16)).levels[1].verdict
    assert within.kind == "within" and within.reason.endswith("its weights lose 89 % of their updates")


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


# ---------------------------------------------------------------------------------------------------------------------
# O6 and O7: the losses with emulated FP8 and FP4, without a speed


def plan_of(*given: str) -> Plan:
    parser = argparse.ArgumentParser()
    compare_arguments.add_arguments(parser)
    return compare_arguments.plan_of(parser.parse_args([*given, "train.py"]))


def test_formats_are_levels_of_the_plan():
    assert plan_of("--levels", "O6+nvfp4,O7+mxfp8+split").levels == ("O0", "O6+nvfp4", "O7+mxfp8+split")
    assert not any(level.startswith(("O6", "O7")) for level in LEVELS)
    with pytest.raises(ValueError, match=r"^compare: .*fp4"):
        plan_of("--levels", "O6+fp4")


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), verbosity=0)
    for step in range(6):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).float(), x[:, :4].argmax(1))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_a_format_has_losses_but_no_speed_and_is_not_recommended(tmp_path: Path):
    compared = amp.compare(train, ["O4", "O6+mxfp8", "O6+nvfp4_naive"], seeds=2, verbosity=0)
    levels = {level.level: level for level in compared.levels}
    for name in "O6+mxfp8", "O6+nvfp4_naive":
        level = levels[name]
        assert level.emulated and level.name == name and len(level.final) == 2
        assert level.final[0] != levels["O4"].final[0] and abs(level.final[0] - levels["O0"].final[0]) < 0.1
        assert (level.speedup, level.step_ms, level.memory, level.memory_bytes) == (None, None, None, None)
        assert level.verdict.text.startswith("emulated: no speed, no memory; final loss ")
    assert levels["O6+mxfp8"].final != levels["O6+nvfp4_naive"].final
    assert levels["O4"].speedup is not None and not levels["O4"].emulated
    text, page = "\n".join(table.lines(compared)), compared._repr_html_()
    assert "emulated" in text and "emulated" in page
    assert compared.recommended.level in ("O0", "O4")
    again = type(compared).from_dict(json.loads(json.dumps(compared.to_dict())))
    assert [level.name for level in again.levels] == [level.name for level in compared.levels]
