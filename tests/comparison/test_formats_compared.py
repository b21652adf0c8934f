"""`compare --formats`: the losses with emulated FP8 and FP4, without a speed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_patch import amp
from amp_patch.comparison import table
from amp_patch.comparison.commands import compare_arguments
from amp_patch.comparison.plan import LEVELS, Plan


def plan_of(*given: str) -> Plan:
    parser = argparse.ArgumentParser()
    compare_arguments.add_arguments(parser)
    return compare_arguments.plan_of(parser.parse_args([*given, "train.py"]))


def test_formats_add_levels_to_the_plan():
    assert plan_of("--formats", "fp8, mxfp8").levels == (*LEVELS, "O6+fp8", "O6+mxfp8")
    assert plan_of("--levels", "O0", "--formats", "nvfp4").levels == ("O0", "O6+nvfp4")
    assert plan_of("--levels", "O7+mxfp8+split").levels == ("O0", "O7+mxfp8+split")
    assert not any(level.startswith(("O6", "O7")) for level in LEVELS)


def test_an_unknown_format_is_refused():
    wanted = (
        r"^compare: --formats has 'fp4'; wanted of fp8, fp8_tensorwise, mxfp8, mxfp8_floor, nvfp4, nvfp4_naive, as "
        r"fp8,mxfp8$"
    )
    with pytest.raises(ValueError, match=wanted):
        plan_of("--formats", "fp8,fp4")


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
