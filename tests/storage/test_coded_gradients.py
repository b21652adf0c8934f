"""`optimizer_state="8bit"` where gradients in one block differ by orders of magnitude, by a benchmark's cases."""

from __future__ import annotations

from typing import Any

import pytest
import scripts


@pytest.fixture(scope="module", name="script")
def script_fixture() -> Any:
    return scripts.load("uneven_gradients")


@pytest.mark.parametrize(("share", "level"), [(1e-2, "O0"), (1e-3, "O0"), (1e-4, "O0"), (1e-3, "O5+split")])
def test_outputs_with_a_small_share_of_the_loss_are_learned_as_with_fp32_state(script, share, level):
    ours, wanted = (script.held_out_loss(share, state, 600, level=level) for state in ("8bit", None))
    assert ours < 1.05 * wanted < 1.4 * script.NOISE**2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-4, 1e-5])
def test_outputs_with_a_small_share_end_within_5_per_cent_of_fp32_state(script, share, seed):
    ours, wanted = (script.held_out_loss(share, state, 1500, seed) for state in ("8bit", None))
    assert ours < 1.05 * wanted


def test_rows_that_begin_at_step_100_move_as_with_fp32_state(script):
    ours, wanted = (script.trained(script.late_rows(), state) for state in ("8bit", None))
    assert 0.8 < ours.largest_update / wanted.largest_update < 1.25


def test_rare_rows_stay_near_those_with_fp32_state(script):
    ours, wanted = (script.trained(script.rare_rows(1000), state) for state in ("8bit", None))
    assert 0.8 < ours.largest_update / wanted.largest_update < 1.25
    drift = (ours.weight - wanted.weight)[script.SMALL].abs().max()
    assert drift < 0.5 * wanted.weight[script.SMALL].abs().max()


@pytest.mark.parametrize(
    ("beta2", "steps"), [(0.99, 300), (0.95, 300), pytest.param(0.999, 3000, marks=pytest.mark.slow)]
)
def test_squares_beside_a_large_element_fall_as_with_fp32_state(script, beta2, steps):
    """Rounding to nearest would hold them where they were."""
    ratio = script.ratio("exp_avg_sq", script.one_large(steps), betas=(0.9, beta2))
    assert 0.8 < ratio.mean() < 1.25


@pytest.mark.parametrize("steps", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_running_maximum_of_amsgrad_is_near_that_with_fp32_state(script, steps):
    ratio = script.ratio("max_exp_avg_sq", script.one_large(steps), betas=(0.9, 0.99), amsgrad=True)
    assert ratio.min() > 0.7 and 0.95 < ratio.mean() < 1.05 and ratio.max() < 1.5
