"""What has become worse since an earlier comparison, and `assert_level`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from compared_runs import compare, made_up_run, seeds
from python_forks import python
from torch import nn

from amp_patch import amp
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.regression import are_decided, regressions

O0 = seeds("O0", 1.0, 2.0, 3.0)
BEFORE = seeds("O2", 1.001, 2.001, 3.001, masters=8000)


def later(*finals: float, **fields):
    return compare(O0, seeds("O2", *finals, **{"masters": 8000, **fields}))


PLANTED = {
    "masters lost": later(1.001, 2.001, 3.001, masters=0),
    "one layer's masters lost": later(1.001, 2.001, 3.001, masters=6000),
    "state in FP16": later(1.001, 2.001, 3.001, state=4000),
    "a norm cast": later(1.001, 2.001, 3.001, weights=3980),
    "a loss scale of 1": later(1.001, 2.001, 3.001, scale=[1.0] * 40),
    "a layer cast": later(1.001, 2.001, 3.001, weights=3000),
    "a layer in FP32": later(1.001, 2.001, 3.001, weights=5000),
    "state in eight bits": later(1.001, 2.001, 3.001, state=2000),
    "two states more": later(1.001, 2.001, 3.001, state=16000),
    "gradients held twice": later(1.001, 2.001, 3.001, gradients=8000),
    "activations in FP32": later(1.001, 2.001, 3.001, activations=2000),
    "a scale that falls": later(1.001, 2.001, 3.001, scale=[65536.0] * 20 + [1024.0] * 20),
    "skipped steps": later(1.001, 2.001, 3.001, skipped=[True] * 4 + [False] * 36),
    "a gap of 1 %": later(1.02, 2.02, 3.021),
    "a gap of 10 %": later(1.2, 2.21, 3.2),
    "another type": later(1.001, 2.001, 3.001, dtype="bfloat16"),
    "one seed diverges": later(1.001, math.nan, 3.001),
    "all seeds diverge": later(math.nan, math.nan, math.nan),
    "it fails": later(1.0, 2.0, 3.0, error="RuntimeError: no kernel"),
    "it was not trained": compare(O0, seeds("O4", 1.0, 2.0, 3.0)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_regression_is_found_once_and_at_its_level(what):
    before = compare(O0, [*seeds("O2", 1.001, 2.001, 3.001, masters=8000, activations=1000)])
    now = PLANTED[what]
    (found, *more) = regressions(before, now)
    assert found.level == "O2"
    assert not more or what in ("all seeds diverge", "one seed diverges")


def test_a_gap_that_has_grown_is_told_with_signs():
    before = compare(O0, seeds("O2", 0.98, 1.98, 2.98, masters=8000, activations=1000))
    (found,) = regressions(before, PLANTED["a gap of 10 %"])
    assert found.what == "its gap to O0 is +10 %, and was -1 % before"


@pytest.mark.parametrize("finals", [(1.001, 2.001, 3.001), (1.0, 2.0, 3.0), (1.002, 2.001, 3.003), (0.9, 1.9, 2.9)])
def test_a_level_that_is_no_worse_than_the_margin_is_no_regression(finals):
    assert regressions(compare(O0, BEFORE), later(*finals)) == []


def test_of_100_pairs_of_the_same_training_at_most_5_alarm():
    """The gaps spread by a margin, 0.2 % of O0's mean result of 2."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.004 * torch.randn(100, 2, 3, generator=generator)
    pairs = [
        [compare(O0, seeds("O2", *(1.0 + each + i for i, each in enumerate(n.tolist())))) for n in two] for two in noise
    ]
    assert sum(bool(regressions(*pair)) for pair in pairs) <= 5


def test_a_metric_of_which_more_is_better_regresses_when_it_falls():
    def of(*finals):
        runs = [made_up_run(level, seed, logged={"accuracy": [(0, 0.1), (40, value)]}) for level, *values in finals
                for seed, value in enumerate(values)]  # fmt: skip
        return compare(runs, metric="accuracy", maximize=True)

    base = ("O0", 0.8, 0.81, 0.82)
    before = of(base, ("O2", 0.8, 0.81, 0.82))
    assert regressions(before, of(base, ("O2", 0.7, 0.711, 0.72)))[0].level == "O2"
    assert regressions(before, of(base, ("O2", 0.9, 0.911, 0.92))) == []


def test_one_seed_says_nothing_of_the_gap():
    assert regressions(compare(O0[:1], BEFORE[:1]), compare(O0[:1], seeds("O2", 1.5, masters=8000))) == []


def looks(growths: list[float]) -> Iterator[tuple[Comparison, Comparison]]:
    """Yield the comparisons before and after each seed, where O2's gap has grown by `growths` at the seeds."""
    before = compare(seeds("O0", *[2.0] * len(growths)), seeds("O2", *[2.0] * len(growths)))
    for count in range(1, len(growths) + 1):
        now = [2.0 + 2.0 * growth for growth in growths[:count]]
        yield before, compare(seeds("O0", *[2.0] * count), seeds("O2", *now))


def answer(growths: list[float]) -> tuple[bool, bool, int]:
    """Return (whether O2 has regressed, whether that is sure, the number of seeds) of a sequential test."""
    for count, (before, now) in enumerate(looks(growths), 1):
        if are_decided(before, now):
            return bool(regressions(before, now)), True, count
    return bool(regressions(before, now)), False, count


@pytest.mark.parametrize(("growths", "wanted"), [
    ([0.0] * 5, (False, True, 1)),  # the same losses to the bit: one seed tells all
    ([0.0001, 0.0002, 0.9], (False, True, 2)),
    ([0.05, 0.0501, 0.0], (True, True, 2)),
    ([-0.05, -0.0501, 0.0], (False, True, 2)),
    ([0.001, 0.05, -0.05], (False, False, 3)),
])  # fmt: skip
def test_no_more_seeds_are_wanted_than_make_the_answer_sure(growths, wanted):
    assert answer(growths) == wanted


def test_a_regression_that_one_seed_shows_wants_no_other_seed():
    before = compare(O0, BEFORE)
    now = compare(seeds("O0", 1.5), seeds("O2", 1.6, masters=0))
    assert are_decided(before, now)
    assert not are_decided(before, compare(seeds("O0", 1.5), seeds("O2", 1.6, masters=8000)))


def test_seeds_that_were_not_trained_are_no_regression():
    assert regressions(compare(O0, BEFORE), compare(O0[:2], BEFORE[:2])) == []


@pytest.mark.parametrize(("mean", "wrong"), [(0.0, True), (0.004, False)], ids=["nothing has grown", "two margins"])
def test_a_sequential_test_is_wrong_in_at_most_3_percent(mean, wrong):
    """Growths are normal and spread by a margin, 0.2 %; there are 8 seeds at most."""
    growths = mean + 0.002 * torch.randn(80, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    answers = [answer(each.tolist()) for each in growths]
    assert sum(regressed is wrong and sure for regressed, sure, _ in answers) <= 0.03 * 80
    assert sum(count for *_, count in answers) < 0.9 * 8 * 80


# --- assert_level ---


def regression_net(lost: float = 0.0):
    """Return a `build_fn`. `lost` is added to the loss at levels that cast the model."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        inputs = torch.randn(64, 8)

        def loss_fn(output, target):
            loss = nn.functional.mse_loss(output.float(), target)
            return loss + lost if model[0].weight.dtype is not torch.float32 else loss

        return model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, [(inputs, inputs.sum(1, keepdim=True))]

    return build


def test_assert_level_passes_a_level_that_is_as_good_and_stops_when_it_is_sure():
    compared = amp.assert_level(regression_net(), "O5", margin=5, steps=20)
    assert compared.levels[-1].verdict.usable
    assert len(compared.levels[-1].runs) < 8


def test_assert_level_fails_for_a_level_that_is_worse():
    with pytest.raises(AssertionError, match=r"assert_level: O5 BF16: .*gap to O0"):
        amp.assert_level(regression_net(2.0), "O5", margin=5, steps=20)


def test_assert_level_fails_for_a_level_that_does_not_run():
    def build():
        model, optimizer, loss_fn, batches = regression_net()()

        def fails(output, target):
            if model[0].weight.dtype is torch.bfloat16:
                raise RuntimeError("no kernel")
            return loss_fn(output, target)

        return model, optimizer, fails, batches

    with pytest.raises(AssertionError, match="no kernel"):
        amp.assert_level(build, "O5", steps=5)


def test_assert_level_that_is_not_sure_passes_with_a_warning():
    with pytest.warns(UserWarning, match="assert_level: O5 BF16 is not decided after 1 seeds"):
        amp.assert_level(regression_net(), "O5", margin=0.001, steps=20, seeds=1)


def test_the_fixture_takes_its_margin_from_the_ini_file(pytester_in):
    pytester_in(
        "pytest_plugins = ['amp_patch.pytest_plugin']",
        "def test_margin(amp_level):\n"
        "    import pytest, torch\n"
        "    def build():\n"
        "        model = torch.nn.Linear(2, 1)\n"
        "        return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.functional.mse_loss, "
        "[(torch.ones(4, 2), torch.ones(4, 1))]\n"
        "    assert amp_level(build, 'O5', steps=10).margin == 0.07\n"
        "    assert amp_level(build, 'O5', steps=10, margin=9).margin == 0.09\n",
    )


@pytest.fixture
def pytester_in(tmp_path):
    """Return a function that runs a test file beside a conftest.py, with amp_margin = 7."""

    def run(conftest: str, test: str) -> None:
        (tmp_path / "conftest.py").write_text(conftest)
        (tmp_path / "test_it.py").write_text(test)
        (tmp_path / "pytest.ini").write_text("[pytest]\namp_margin = 7\n")
        ran = python("-m", "pytest", "-q", cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return run


# --- what gates: evaluations, interrupts, and what was not compared ---


@pytest.mark.parametrize(("evaluate", "said"), [
    (lambda model: [][1], "evaluate raised IndexError: list index out of range"),
    (lambda model: None, "evaluate returned no number: log: evaluation is None"),
    (lambda model: "0.5", "evaluate returned no number: log: evaluation is '0.5'"),
    (lambda model: {}, "evaluate returned no number: log: evaluation is {}"),
    (lambda model: {"accuracy": None}, "evaluate returned no number: log: accuracy is None"),
    (lambda model: torch.ones(2), "evaluate returned no number: log: evaluation is a tensor of shape [2]"),
    (lambda model: 10**400, "evaluate returned no number: log: evaluation is larger than any float"),
    (lambda model: exit(), "evaluate raised SystemExit"),
])  # fmt: skip
@pytest.mark.parametrize("steps", [None, 3])
def test_an_evaluation_without_a_number_fails_the_test(evaluate, said, steps):
    with pytest.raises(AssertionError, match="assert_level: ") as failed:
        amp.assert_level(regression_net(), "O5", steps=steps, seeds=1, evaluate=evaluate)
    assert said in str(failed.value)
    compared = amp.compare(regression_net(), ["O5"], steps=steps, seeds=1, evaluate=evaluate, verbosity=0)
    assert not compared.comparable and all(said in run.error for run in compared.runs)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), torch.tensor([0.5]), True])
def test_numbers_of_numpy_and_torch_are_numbers(number):
    compared = amp.compare(regression_net(), ["O5"], steps=2, seeds=1, evaluate=lambda model: number, verbosity=0)
    assert compared.metric == "evaluation" and compared.runs[1].logged["evaluation"] == [(2, float(number))]


def test_an_evaluation_that_fails_at_the_level_alone_fails_the_level():
    def evaluate(model):
        return 1.0 if model[0].weight.dtype is torch.float32 else [][1]

    with pytest.raises(AssertionError, match=r"O5.*evaluate raised IndexError"):
        amp.assert_level(regression_net(), "O5", steps=3, seeds=2, evaluate=evaluate)


def test_an_evaluation_in_a_dict_decides_and_of_several_figures_one_must_be_named():
    made = amp.assert_level(regression_net(), "O5", steps=12, seeds=2, margin=50, evaluate=lambda _: {"accuracy": 0.5})
    assert made.metric == "evaluation" and made.runs[0].logged["accuracy"] == made.runs[0].logged["evaluation"]
    with pytest.raises(AssertionError, match="gave no finite evaluation"):
        amp.assert_level(regression_net(), "O5", steps=12, seeds=2, evaluate=lambda _: {"accuracy": float("nan")})
    several = {"accuracy": 0.5, "f1": 0.4}
    with pytest.raises(ValueError, match=r"evaluate returned accuracy and f1; name the one .* metric='accuracy'"):
        amp.assert_level(regression_net(), "O5", steps=12, evaluate=lambda _: several)
    made = amp.assert_level(
        regression_net(), "O5", steps=12, seeds=2, margin=50, metric="f1", maximize=True, evaluate=lambda _: several
    )
    assert made.metric == "f1"


def test_figures_named_loss_and_evaluations_of_other_trainings_are_refused():
    with pytest.raises(ValueError, match="evaluate returned a figure named 'loss', which is the training loss"):
        amp.assert_level(regression_net(), "O5", steps=3, evaluate=lambda model: {"loss": 1.0})

    def trains():
        model, optimizer, loss_fn, [(inputs, targets)] = regression_net()()
        model, optimizer = amp.initialize(model, optimizer, verbosity=0)
        for _ in range(3):
            with amp.scale_loss(loss_fn(model(inputs), targets), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    for steps in (None, 2):
        with pytest.raises(ValueError, match="evaluate has no model: build_fn trained it by itself"):
            amp.assert_level(trains, "O5", steps=steps, evaluate=lambda model: 1.0)


def test_an_interrupt_reaches_the_caller_of_assert_level():
    def build():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        amp.assert_level(build, "O5", steps=3)

    def evaluate(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        amp.assert_level(regression_net(), "O5", steps=3, evaluate=evaluate)


def test_batches_that_end_before_the_steps_are_refused():
    def build():
        *rest, batches = regression_net()()
        return (*rest, iter(batches * 3))

    assert amp.compare(build, ["O5"], seeds=1, steps=3, verbosity=0).steps == 3
    with pytest.raises(ValueError, match="batches of build_fn gave nothing after pass 1, and steps is 5"):
        amp.compare(build, ["O5"], seeds=1, steps=5, verbosity=0)


@pytest.mark.parametrize("arguments", [{"margin": "0.2"}, {"margin": None}, {"seeds": None}, {"seeds": 1.5}])
def test_arguments_of_other_types_are_refused_by_name(arguments):
    (name,) = arguments
    for call in (lambda: amp.assert_level(regression_net(), "O5", **arguments),
                 lambda: amp.compare(regression_net(), ["O5"], **arguments)):  # fmt: skip
        with pytest.raises(ValueError, match=f"compare: {name} is {arguments[name]!r}; wanted"):
            call()


COLLAPSED = 1000.0


@pytest.mark.parametrize("was", [1, 3])
@pytest.mark.parametrize("finals", [(1.001, 2.001, COLLAPSED), (COLLAPSED,) * 3])
def test_a_level_that_collapses_now_is_worse(was, finals):
    before, now = compare(O0[:was], BEFORE[:was]), later(*finals)
    assert now.levels[1].finding.collapsed
    assert [each.level for each in regressions(before, now)] == ["O2"]


def test_a_level_that_was_not_to_be_used_is_no_regression():
    assert regressions(later(COLLAPSED, 2.0, 3.0), later(COLLAPSED, 2.0, 3.0)) == []
