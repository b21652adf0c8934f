"""The page "What would FP8 and FP4 do to a loss?" has each format's gap, no times, and says of what its claims are."""

from __future__ import annotations

import pytest
import scripts
from compared_runs import made_up_run

from amp_patch.comparison.comparison import Comparison
from amp_patch.policy import PRODUCT_FORMATS

pytestmark = pytest.mark.slow  # a tool that no training needs


@pytest.fixture(scope="module")
def script():
    return scripts.load("accuracy_formats")


def comparison(levels: tuple[str, ...]) -> Comparison:
    runs = []
    for seed in range(3):
        for index, level in enumerate(levels):
            figure = 2 + seed / 4 + index / 16
            runs.append(made_up_run(level, seed, final=figure, logged={"held_out_loss": [(40, figure)]}))
    return Comparison("train", runs, metric="held_out_loss", machine={"torch": "2.13.0"})


def test_the_page_has_a_row_for_each_format_with_its_gap_and_verdict(script):
    errors = {name: [0.25, 0.5] for name in script.GRADIENTS}
    page = script.page({family: comparison(script.LEVELS) for family in script.FAMILIES}, errors)
    rows = [line for line in page.splitlines() if line.startswith("| O")]
    assert len(rows) == 3 * (2 + len(PRODUCT_FORMATS))
    assert [row.split(" | ")[0] for row in rows[2:8]] == [f"| O6+{name}" for name in PRODUCT_FORMATS]
    assert "| O6+fp8 | 2.3750 | 2.1250 to 2.6250 | +0.12 | +5.6 %, 95 %: +5.6 to +5.6 % | worse |" in page
    assert "**The claims are of the order of the formats, and of the gap at this size" in page
    assert "| nvfp4_naive, head in BF16 | 37.5 % | 25.0 to 50.0 % |" in page and "16 batches, 2 seeds." in page
    assert "| speed |" not in page and "Nothing is in the format: an LSTM's products" in page
