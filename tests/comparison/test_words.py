"""The words of a report: the level to use, how sure it is, and its limits."""

from __future__ import annotations

import pytest
import torch
from compared_runs import compare, logs, seeds

from amp_patch import amp
from amp_patch.comparison import headline, named_lines, page, table
from amp_patch.diagnose import wording
from amp_patch.diagnose.recording.run import Run

BASE = (1.0, 1.25, 1.5)
SAME = (1.25, 1.0, 1.5)


def test_a_recommended_level_has_a_complete_edit_and_a_command():
    made = compare(seeds("O0", *BASE), seeds("O2", *SAME, dtype="bfloat16", ms=5), command="train.py --lr 1")
    edit, command = headline.how_to_use(made)
    assert command == "AMP_PATCH_OPT_LEVEL=O2 AMP_PATCH_DTYPE=bfloat16 python -m amp_patch run train.py --lr 1"
    names = {"torch": torch, "model": torch.nn.Linear(2, 2)}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    first, step = "\n".join(edit).split("# in place of loss.backward():")
    exec(first, names)
    names["loss"] = names["model"](torch.ones(1, 2)).sum()
    exec(step, names)
    assert names["model"].weight.dtype is torch.bfloat16 and names["model"].weight.grad.eq(1).all()
    amp.restore()
    assert headline.how_to_use(compare(seeds("O0", *BASE), seeds("O2", *SAME, ms=20))) == ([], ""), "stay with O0"
    assert headline.how_to_use(compare(seeds("O0", *BASE), seeds("O2", *SAME, ms=5)))[1] == "", "no script: a notebook"


@pytest.mark.parametrize(("metric", "said"), [("held_out_loss", "loss on held-out data"), ("accuracy", "accuracy")])
def test_a_held_out_loss_is_called_loss_on_held_out_data(metric, said):
    assert wording.metric_in_words(metric) == said
    base, level = logs("O0", *BASE, name=metric), logs("O2", *SAME, name=metric)
    for run in level:
        run.seconds = [0.005] * 40
    made = compare(base, level, metric=metric, maximize=True)  # `logs` begins at 0.125
    assert f"same {said} over 3 seeds" in headline.gains(made) and headline.gains(made) in made.summary
    shown = page.html(made)
    assert f"<b>Gap in {said}</b>" in shown and f"final {said}" in shown
    assert "\n".join(table.lines(made)).count("held_out") == 0
    missing = compare(seeds("O0", 1.0), seeds("O2", 1.0), metric=metric).summary
    assert f"no run gave {metric}; call amp.log({metric}=...)" in missing, "the name is what a script has to give"


def test_a_sum_over_several_optimizers_is_not_judged():
    base, level = seeds("O0", *BASE, objectives=2), seeds("O2", 1.25, 1.125, 1.5, ms=5, objectives=2)
    made = compare(base, level, seeds("O1", 2.0, 3.0, 4.0, objectives=2))
    assert [each.finding.kind for each in made.levels] == ["baseline", "unjudged", "unjudged"]
    why = "a sum of the losses of several optimizers, as a GAN's, tells nothing of quality; give a figure of"
    assert all(why in each.verdict.text for each in made.levels[1:]) and "do not use" not in made.summary
    assert made.summary.startswith("Stay with O0 for now: whether O2 FP16 (2.0x faster) and O1 FP16 would do as well")
    assert headline.outcome(made.levels[1], made) == "not judged" and headline.headline(made).endswith(" for now")
    # Equal bits, a loss that is not finite, and a logged metric are still judged.
    kinds = [
        compare(base, seeds("O2", *BASE, objectives=2)).levels[1].finding.kind,
        compare(base, seeds("O2", float("nan"), 1.0, 1.0, objectives=2)).levels[1].finding.kind,
    ]
    assert kinds == ["within", "differs"]
    logged = compare(logs("O0", 0.5, 0.75), logs("O2", 0.6, 0.7), metric="accuracy", maximize=True)
    for run in logged.runs:
        run.objectives = 2
    assert logged.levels[1].finding.kind == "so far"


def swinging(level: str) -> list[Run]:
    """Runs whose losses are 0.25 and -0.25 in turn, as those of a policy gradient with a baseline."""
    runs = seeds(level, 0.0, 0.0, 0.0, ms=5)
    for run in runs:
        run.loss = [0.25 * (-1) ** (step + run.seed) for step in range(len(run.loss))]
        run.loss[-1] += len(level) * (1 + run.seed) / 1024
    return runs


UNJUDGED = {
    "direction": (logs("O0", 0.5, 0.75), logs("O2", 0.25, 0.375), "accuracy", "with --maximize more of it is better"),
    "around 0": (
        swinging("O0"),
        swinging("O5+split"),
        "loss",
        "as a policy gradient's; give a figure of quality to amp.log",
    ),
    "too good": (seeds("O0", 1.75, 1.8, 1.85), seeds("O2", 0.1, 0.2, 0.1), "loss", "train on the same batches"),
    "too good with one seed": (seeds("O0", 2.0), seeds("O2", 0.75), "loss", "train on the same batches"),
}


@pytest.mark.parametrize(("base", "level", "metric", "said"), UNJUDGED.values(), ids=UNJUDGED)
def test_figures_that_measure_no_quality_recommend_nothing(base, level, metric, said):
    made = compare(base, level, metric=metric)
    assert made.levels[1].finding.kind == "unjudged" and said in made.levels[1].verdict.text
    assert made.recommended.level == "O0" and said in made.summary
    assert made.summary.startswith("Stay with O0 for now: whether ") and f"its {metric} does not say" in made.summary
    assert named_lines.ended_badly(made.levels[1]) is ("same batches" in said), "the survey may name why"


def test_gains_that_a_rounding_may_explain_are_judged():
    assert compare(seeds("O0", 1.75, 1.8, 1.85), seeds("O2", 1.6, 1.65, 1.7)).levels[1].finding.better
    made = compare(logs("O0", 0.5, 0.6), logs("O2", 0.5, 0.625), metric="accuracy", maximize=True)
    assert made.levels[1].finding.usable
    made = compare(logs("O0", 0.5, 0.6, name="val_loss"), logs("O2", 0.5, 0.55, name="val_loss"), metric="val_loss")
    assert made.levels[1].finding.kind != "unjudged", "O0 overfits: it began at 0.125"
    assert compare(seeds("O0", 3.98), seeds("O2", 3.9)).levels[1].finding.kind == "undecided", "O0 gained 0.02"


@pytest.mark.parametrize(("two", "objectives"), [(True, 2), (False, 1)])
def test_a_recording_counts_optimizers_with_a_loss_and_not_losses(two, objectives):
    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    nets, made = amp.initialize(nets, made, opt_level="O0", num_losses=2, verbosity=0)
    with amp.record() as run:
        for _ in range(3):
            for index, net in enumerate(nets):
                with amp.scale_loss(net(torch.ones(1, 2)).sum(), made[index] if two else made, index) as scaled:
                    scaled.backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
    assert (run.steps, run.objectives) == (3, objectives)
    amp.restore()


@pytest.mark.parametrize(("steps", "said"), [(1, "1 step decides nothing"), (20, "20 steps decide little"), (30, "")])
def test_a_summary_warns_of_few_steps(steps, said):
    made = compare(seeds("O0", *BASE, steps=steps), seeds("O2", *SAME, ms=5, steps=steps))
    assert made.few_steps_note == (f"{said}: train for at least 30" if said else "")
    assert ("decide" in made.summary) is ("decide" in headline.how_sure(made)) is bool(said)
    assert ("Use O2" in made.summary) is (steps > 1), "fewer than ten decide nothing"
