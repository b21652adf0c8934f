"""A script whose weights come in BF16, and a level that is better than it."""

from __future__ import annotations

import pytest
import torch
from compared_runs import compare, seeds
from torch import nn

from amp_patch import amp
from amp_patch.comparison import headline, page
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose.lost_updates import Updates

SAME = (1.25, 1.0, 1.5)


LOSING = {"dtype": "bfloat16", "updates": [Updates("bfloat16", {"weight": [100, 81]})]}
ON_CPU = {"device": "cpu", "peak_memory": None, "activations": 0}


def of_bf16(ms: tuple[float, float, float], **options) -> Comparison:
    """A script in BF16 that loses 81 % of its updates, beside O5 at these times of a step, which takes half more."""
    base = seeds("O0", 2.026, 2.030, 2.022, weights_type="bfloat16", weights=4000, **ON_CPU)
    level = seeds("O5", 1.778, 1.780, 1.776, weights=12000, **LOSING, **ON_CPU)
    for run, each in zip(level, ms, strict=True):
        run.seconds = [each / 1000] * 40
    return compare(base, level, **options)


@pytest.mark.parametrize("ms", [(8.0, 11.0, 14.0), (7.1, 7.1, 7.1), (20.0, 20.0, 20.0)])
def test_a_level_with_a_better_loss_is_recommended_at_any_speed(ms):
    made = of_bf16(ms)
    assert made.summary.startswith("Use O5 BF16: 12 % better loss over 3 seeds, ")
    assert headline.headline(made) == "Use O5 (BF16)"
    assert headline.gains(made).startswith("12 % better loss over 3 seeds, ")
    assert headline.gains(made).endswith(", 50 % more memory")
    assert headline.why(made) == (
        "Its final loss is better than O0's. Your script loses 81 % of its updates: its weights are BF16 and have no "
        "masters."
    )
    assert "Your script loses 81 % of its updates" in made.summary and made.losing_note in made.notes


def test_a_report_calls_a_bf16_script_bf16_without_masters():
    made = of_bf16((10.0, 10.0, 10.0))
    base = made.baseline
    assert headline.label(base) == "O0 (BF16, no masters)"
    assert headline.outcome(base, made) == "the script as it is, BF16, no masters"
    assert base.verdict.text.startswith("the script as it is, BF16, no masters: final loss 2.026 over 3 seeds")
    assert headline.label(compare(seeds("O0", 1.0), seeds("O5", 1.0)).baseline) == "O0 (FP32)"
    # Weights that lose few updates are not warned of.
    few = {**LOSING, "updates": [Updates("bfloat16", {"weight": [100, 10]})]}
    calm = compare(seeds("O0", *SAME, weights_type="bfloat16"), seeds("O5", *SAME, **few))
    assert calm.losing_note == "" and not any("your script" in note for note in calm.notes)


@pytest.mark.parametrize("lacks", ["bfloat16", ""])
def test_a_speedup_over_slow_bf16_kernels_is_explained(lacks):
    made = of_bf16((2.0, 2.0, 2.0), machine={"lacks": lacks, "cpu": "a CPU", "gpu": "none"})
    said = "O0 runs torch's own BF16 kernels, which are slow on this CPU: what a level is faster by is that, "
    assert (said in made.summary) is bool(lacks)
    assert (said in page.html(made).replace("&#39;", "'")) is bool(lacks)


@pytest.mark.parametrize(
    ("dtypes", "told"),
    [
        ((torch.bfloat16, torch.bfloat16), "bfloat16"),
        ((torch.float16, torch.float32), "float16"),
        ((torch.float32, torch.bfloat16), ""),
        ((None, torch.float32), ""),  # adapters of a frozen model
    ],
)
def test_a_recording_has_the_type_of_the_weights_that_the_script_steps(dtypes, told):
    large, small = (
        nn.Parameter(torch.ones(size, dtype=dtype or torch.bfloat16))
        for size, dtype in zip((8, 2), dtypes, strict=True)
    )
    net = nn.Module()
    net.large, net.small = large, small
    stepped = [small] if dtypes[0] is None else [large, small]
    for level, expected in (("O0", told), ("O4", "")):
        with amp.record() as run:
            _, optimizer = amp.initialize(net, torch.optim.SGD(stepped, lr=0.1), opt_level=level, verbosity=0)
            with amp.scale_loss(sum(p.float().sum() for p in stepped), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        amp.restore()
        assert run.weights_type == expected
