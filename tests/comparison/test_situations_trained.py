"""Situations that small trainings make, and what `amp.compare` and `amp.assert_level` must say of each."""

from __future__ import annotations

import itertools

import pytest
import torch

from amp_patch import amp
from amp_patch.comparison import headline


def small(maximize=False, dtype=torch.float32, lr=1e-2, classes=3, seed=lambda: 0):
    """Return a `build_fn` of a small classifier; with `maximize` its loss is negated."""

    def build():
        torch.manual_seed(seed())
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, classes)).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, maximize=maximize)

        def loss_fn(outputs, targets):
            return (-1 if maximize else 1) * torch.nn.functional.cross_entropy(outputs.to(dtype), targets)

        inputs = torch.randn(20, 16, 8, dtype=dtype)
        return net, optimizer, loss_fn, [(x, x[:, :classes].argmax(1)) for x in inputs]

    return build


def with_other_batches():
    drawn = torch.Generator()

    def build():
        net, optimizer, loss_fn, batches = small()()
        inputs = torch.randn(20, 16, 8, generator=drawn)
        return net, optimizer, loss_fn, [(x, targets) for x, (_, targets) in zip(inputs, batches, strict=True)]

    return build


TRAINED = {
    "constant": (small(classes=1), "O5", "constant"),
    "FP64": (small(dtype=torch.float64), "O4", "FP64"),
    "FP64 at O1": (small(dtype=torch.float64), "O1", "FP64"),
    "a learning rate of 0": (small(lr=0.0), "O5", "frozen"),
    "a seed of its own in each run": (small(seed=itertools.count().__next__), "O5", "start"),
    "batches of their own in each run": (with_other_batches(), "O5", "start"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_compare_and_assert_level_do_not_judge(name):
    build, level, why = TRAINED[name]
    for seeds_ in (1, 2):
        found = amp.compare(build, [level], seeds=seeds_, verbosity=0).levels[1].finding
        assert (found.kind, found.unjudged) == ("unjudged", why)
    with pytest.raises(AssertionError, match=f"assert_level: {level} .* is not judged: "):
        amp.assert_level(build, level, seeds=2)


@pytest.mark.parametrize(("lr", "seeds_"), [(0.1, 1), (0.1, 3), (1e-5, 3)])
def test_a_gate_that_saw_few_steps_judges_nothing_and_says_so(lr, seeds_):
    """Also if the gaps of so few steps lie within the margin, as at a tiny learning rate: nothing was trained yet."""
    finding = amp.compare(small(lr=lr), ["O5"], seeds=seeds_, steps=9, verbosity=0).levels[1].finding
    assert (finding.kind, finding.unjudged) == ("unjudged", "few steps")
    with pytest.raises(AssertionError, match=r"O5 BF16 is not judged: .*fewer than 10 steps; train for at least 30"):
        amp.assert_level(small(lr=lr), "O5", seeds=seeds_, steps=9, margin=50)
    amp.assert_level(small(lr=1e-5), "O5", seeds=3, steps=10, margin=50)


def test_a_maximizing_optimizer_turns_the_direction():
    made = amp.compare(small(maximize=True), ["O5"], seeds=2, steps=40, verbosity=0)
    assert made.maximize and made.baseline.runs[0].maximized == "all"
    assert made.levels[1].finding.gap.sign == -1 and made.levels[1].finding.unjudged == ""


def test_a_loss_that_one_of_two_trainings_maximizes_is_not_judged():
    def build():
        nets = [small()()[0] for _ in range(2)]
        both = [torch.optim.SGD(net.parameters(), lr=1e-2, maximize=at == 1) for at, net in enumerate(nets)]
        trained = [amp.initialize(*each, verbosity=0) for each in zip(nets, both, strict=True)]
        for inputs, targets in small()()[3]:
            losses = [torch.nn.functional.cross_entropy(net(inputs), targets) for net, _ in trained]
            with amp.scale_loss(2 * losses[0] - losses[1], both) as scaled_loss:
                scaled_loss.backward()
            for _, optimizer in trained:
                optimizer.step()
                optimizer.zero_grad()

    made = amp.compare(build, ["O5"], seeds=1, verbosity=0)
    assert made.runs[0].maximized == "some" and made.levels[1].finding.unjudged == "both ways"


def test_a_script_in_fp64_is_called_so():
    made = amp.compare(small(dtype=torch.float64), ["O4", "O5"], seeds=2, verbosity=0)
    assert made.levels[0].verdict.text.startswith("the script as it is, FP64: final loss")
    assert made.levels[2].finding.unjudged == "" and "O0 (FP64)" in headline.label(made.levels[0])


def test_a_level_that_stops_in_an_error_that_the_function_catches_fails_the_test():
    def build():
        net, optimizer, loss_fn, batches = small()()
        net, optimizer = amp.initialize(net, optimizer, verbosity=0)
        for step, (inputs, targets) in enumerate(batches):
            try:
                outputs = net(inputs)
                if step == 12 and net[0].weight.dtype is torch.bfloat16:
                    raise RuntimeError("expected scalar type Float")
                with amp.scale_loss(loss_fn(outputs, targets), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            except RuntimeError:
                break

    for seeds_ in (1, 2):
        found = amp.compare(build, ["O5"], seeds=seeds_, verbosity=0).levels[1]
        assert found.finding.rejected and "made 12 of 20 steps" in found.verdict.text
    with pytest.raises(AssertionError, match="made 12 of 20 steps with seed 0, by itself or after an error"):
        amp.assert_level(build, "O5")


UNTRAINED = {
    "no batch": ("for x in []: net(x)", "no batch came: the script never called the model"),
    "inference": ("with torch.no_grad(): net(x)", "calls its model without gradients alone, as inference does"),
    "no backward": ("net(x)", "never called amp.scale_loss"),
    "no step": ("with amp.scale_loss(net(x).sum(), optimizer) as loss: loss.backward()", "never called step()"),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_function_that_trains_nothing_is_told_why(name):
    code, words = UNTRAINED[name]

    def build():
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = amp.initialize(net, optimizer, verbosity=0)
        exec(code, {"torch": torch, "amp": amp, "net": net, "optimizer": optimizer, "x": torch.ones(2, 4)})

    made = amp.compare(build, ["O5"], seeds=1, verbosity=0)
    assert words in made.summary and made.summary.startswith("Nothing to compare")
    with pytest.raises(AssertionError, match="assert_level: O0 has no result"):
        amp.assert_level(build, "O5")
