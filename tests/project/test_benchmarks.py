"""The benchmarks print what they measure. No test requires a speed."""

from __future__ import annotations

import json
import os

import pytest
from paths import BENCHMARKS, ROOT
from python_forks import python

pytestmark = pytest.mark.slow  # a tool that no training needs


def run_benchmark(script, folder, *options):
    """What a benchmark prints, and the rows of its JSON."""
    figures = folder / "figures.json"
    warnings = ["-W", "error", "-W", "ignore:`torch.jit.script_method` is deprecated"]  # Inductor's own import
    options = [*options, "--repeats", "1", "--threads", "1", "--json", str(figures)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = python(*warnings, BENCHMARKS / f"{script}.py", *options, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, json.loads(figures.read_text())["rows"]


@pytest.mark.parametrize(
    ("script", "dtype"),
    [("step", "bf16"), pytest.param("step", "fp16", marks=pytest.mark.release), ("compile", "bf16")],
)
def test_every_rival_of_the_step_trains_the_same_model(script, dtype, tmp_path):
    output, rows = run_benchmark(script, tmp_path, "--dtype", dtype, "--models", "convnet", "--batches", "1")
    rows = {row["rival"]: row for row in rows}
    assert set(rows) == {"fp32", "autocast", "autocast+scaler", "O1", "O2"}
    assert rows["autocast+scaler"]["ratio"] == 1.0
    for rival, row in rows.items():
        assert row["first_loss"] == pytest.approx(rows["fp32"]["first_loss"], rel=0.02), rival
        assert f"{rival:17}" in output
        assert row["host_milliseconds"] > 0 and (row["skipped"] is None) == (rival in ("fp32", "autocast"))
        assert row["syncs"] is row["gb_at_start"] is row["gb_in_a_step"] is None


def test_the_optimizers_half_of_a_step_equals_plain_training(tmp_path):
    output, rows = run_benchmark("optimizer", tmp_path, "--size", "tiny")
    assert len(rows) == len({(row["work"], row["dtype"]) for row in rows}) == 36
    for row in rows:
        masters, _, coded = row["dtype"].partition("+")
        # torch's masters round to nearest; stochastic weights end a neighbour away from those.
        assert row["weights equal"] > (0.5 if masters == "stochastic" else 0.9 if coded else 0.999), row
        assert row["ratio"] > 0 and f"{row['work']:21}{row['dtype']:16}" in output
        assert (row["FP32"] != "-") == bool(coded)
        for column in ("clipped", "torch clip adds", "amp_patch clip adds"):
            assert (row[column] != "-") == (row["work"] in ("gpt AdamW", "gpt SGD"))
        # Half weights, FP32 masters, halves or none, and AdamW's two or SGD's one; more is gradients and temporaries.
        # At this size a state is in eight bits nowhere.
        fewest = (10 if "SGD" in row["work"] else 14) - {"split": 2, "stochastic": 4}.get(masters, 0)
        assert row["amp_patch bytes"] >= fewest - 0.1
        if "NAdam" not in row["work"] and "RMSprop" not in row["work"]:  # whose portions share a memory
            assert row["torch bytes"] >= row["amp_patch bytes"] - 0.1


def test_rivals_are_timed_beside_the_levels_and_named_if_they_do_not_run(tmp_path):
    here = {"torch composition, fused": 18, "torch fused, BF16": 8, "amp_patch O5": 16, "amp_patch O5+split": 14}
    output, rows = run_benchmark("rivals", tmp_path, "--elements", "4096", "--only", *here, "FlashAdamW, BF16")
    assert {row["rival"]: row["bytes"] for row in rows if "ratio" in row} == pytest.approx(here, abs=0.3)
    assert {row["rival"]: row["guarantee"] for row in rows}["torch fused, BF16"] == "updates lost"
    refused = rows[-1]  # it wants CUDA, or is not installed
    assert refused["rival"] == "FlashAdamW, BF16" and "Error" in refused["refused"]
    assert f"FlashAdamW, BF16: does not run here: {refused['refused']}" in output
