"""Steps in one pass: they have the numbers and the behaviour of the optimizer's own step."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
import training
from crossed import crossed
from interrupts import send, sent_again_by_the_test
from three_ways import (
    ADAM,
    HALF,
    ONE_OF_EACH,
    SGD,
    Eager,
    LateNet,
    LookedAt,
    OnePass,
    Recipe,
    Unfused,
    both_levels,
    casting_levels,
    close,
    ends,
    every_recipe,
    go_on,
    iterate,
    loss_of,
    rounds_as_torch,
    spied_kernels,
    start_recipe,
    start_with,
    trained,
)
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_patch import amp, multi_tensor
from amp_patch.multi_tensor import backend
from amp_patch.optimizers import FusedAdam, FusedSGD
from amp_patch.ways import one_pass

pytestmark = pytest.mark.skipif(backend() != "cpp", reason="in plain torch optimizers step by themselves")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return spied_kernels(monkeypatch)


def story(level: str, recipe: Recipe, way: OnePass, steps: int, **options: Any) -> tuple[list[float], Any]:
    """Train with all events that may happen between two steps; return the losses and the final state."""
    model, optimizer = start_recipe(level, recipe, way, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    losses = []
    for step in range(steps):
        if step == 20:
            optimizer.add_param_group({"params": list(model.late.parameters()), "weight_decay": 0.0})
        if step in (30, 60):
            model.first.weight.requires_grad_(step == 60)
        if step == 40:
            with torch.no_grad():
                model.last.weight.clamp_(-0.25, 0.25)
                next(amp.master_params(optimizer)).add_(0.125)
        optimizer.zero_grad()
        overflows = step % 23 == 5 and level in ("O1", "O2")
        for body in range(1 + step % 3):
            losses.append(iterate(model, optimizer, 3 * step + body, math.inf if overflows else 1.0))
        if step % 4 == 1:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        if step % 7 == 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        way.before_step(optimizer)
        optimizer.step()
        scheduler.step()
    masters = list(amp.master_params(optimizer))
    states = [dict(optimizer.state[master]) for master in masters]
    counts = [group.get("step") for group in optimizer.param_groups]
    assert losses[-1] != losses[0] and all(map(math.isfinite, losses))
    return losses, (list(model.parameters()), masters, states, counts, optimizer.state_dict()["state"])


@casting_levels
@every_recipe
@pytest.mark.parametrize("steps", [75, pytest.param(200, marks=pytest.mark.slow)])  # all of a story has come by 60
def test_many_steps_come_to_the_same_bits_as_torch_s_own(steps, level, recipe, kernels):
    alike = rounds_as_torch()
    steps = steps if alike else 1
    kernels.clear()
    ended = [
        story(level, recipe, way, steps, loss_scale="dynamic" if level in ("O1", "O2") else None)
        for way in (OnePass(), LookedAt())
    ]
    assert len(kernels) > 2 * steps  # both took this way
    kernels.clear()
    wanted = story(level, recipe, Eager(), steps, loss_scale="dynamic" if level in ("O1", "O2") else None)
    assert not kernels
    training.assert_unchanged(*ended)
    if alike:
        training.assert_unchanged(ended[0], wanted)
    else:  # 2 units in the last place
        for ours, theirs in zip(ended[0][1][1], wanted[1][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2.0**-22, atol=0)


@ONE_OF_EACH
def test_a_script_s_line_is_named_by_warnings_of_the_step(recipe):
    model, optimizer = start_recipe("O5", recipe, OnePass())
    loss_of(model, optimizer, 0).backward()
    with pytest.warns(UserWarning, match="never gathered") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


# ---------------------------------------------------------------------------------------------------------------------
# What goes the optimizer's own way


def put_in_the_state(name: str, change: Any, group: int = 0) -> Any:
    def put(model: LateNet, optimizer: Any) -> None:
        state = optimizer.state[optimizer.param_groups[group]["params"][0]]
        state[name] = change(state[name])

    return put


def leave_it(model: LateNet, optimizer: Any) -> None:
    pass


def in_another_order(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


class Subclass(torch.optim.Adam):
    """It may do anything."""


class OneMoreSetting(Recipe):
    """An optimizer of a later torch, whose class has a setting that the kernels do not read."""

    def __call__(self, params: Any, **more: Any) -> Any:
        optimizer = super().__call__(params, **more)
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["cautious"] = True
        return optimizer


# name: (optimizer, what is done to it after two steps, how many calls of the kernels the third step has)
OWN_WAYS = {
    "betas that are tensors": (
        Recipe(ADAM, {"lr": 1e-2, "betas": (torch.tensor(0.9), torch.tensor(0.999))}),
        leave_it,
        0,
    ),
    "a subclass": (Recipe(Subclass, {"lr": 1e-2}), leave_it, 0),
    **{
        f"one more setting of {kind.__name__}": (OneMoreSetting(kind, {"lr": 1e-2}), leave_it, 0)
        for kind in one_pass.KERNELS
    },
    "weight decay that is a tensor": (Recipe(SGD, {"lr": 0.1, "weight_decay": torch.tensor(0.5)}), leave_it, 0),
    "a state of another type": (
        Recipe(SGD, {"lr": 0.1, "momentum": 0.9}),
        put_in_the_state("momentum_buffer", Tensor.double),
        2,
    ),
    "a state in another order": (Recipe(ADAM, {"lr": 1e-2}), put_in_the_state("exp_avg", in_another_order), 2),
    "a count of another type": (Recipe(ADAM, {"lr": 1e-2}), put_in_the_state("step", Tensor.long), 2),
    "FusedAdam's decay": (Recipe(FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}), leave_it, 0),
    "FusedSGD's decay": (Recipe(FusedSGD, {"lr": 0.1, "weight_decay": 0.1, "wd_after_momentum": True}), leave_it, 0),
    "a count on the device": (Recipe(FusedAdam, {"lr": 1e-2, "capturable": True}), leave_it, 0),
    "masters of its own": (Recipe(FusedAdam, {"lr": 1e-2, "master_weights": True}), leave_it, 0),
    "a state of FusedAdam's in another order": (
        Recipe(FusedAdam, {"lr": 1e-2}),
        put_in_the_state("exp_avg", in_another_order),
        2,
    ),
}


@crossed(pytest.mark.parametrize("recipe, change, calls", OWN_WAYS.values(), ids=OWN_WAYS), casting_levels, meet=1)
def test_the_optimizer_s_own_way(level, recipe, change, calls, kernels):
    ours, theirs = (trained(level, recipe, 2, way) for way in (OnePass(), Unfused()))
    for both, wanted in ((ours, calls), (theirs, 0)):
        change(*both)
        kernels.clear()
        go_on(*both, range(2, 3))
        assert len(kernels) == (wanted if level in HALF else bool(wanted))  # else one call fewer: one type of weights
        go_on(*both)
    close(ours, theirs)


REFUSED = {
    "differentiable": (Recipe(ADAM, {"differentiable": True}), RuntimeError, "in-place operation"),
    "capturable": (Recipe(ADAM, {"capturable": True}), AssertionError, "capturable=True"),
    "a state of another type": (Recipe(ADAM, {}), RuntimeError, "dtype"),
}


@casting_levels
@pytest.mark.parametrize("recipe, error, message", REFUSED.values(), ids=REFUSED)
def test_arguments_that_torch_refuses_are_refused_by_torch(level, recipe, error, message, kernels):
    for way in (OnePass(), Unfused()):
        model = training.linear([[1.0, 2.0]])
        optimizer = recipe(model.parameters())
        model, optimizer = start_with(level, way, model, optimizer)
        (master,) = amp.master_params(optimizer)
        if message == "dtype":
            zeros = torch.zeros_like(model.weight, dtype=torch.float64)
            optimizer.state[master] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros.float()}
        training.backward(model(torch.ones(1, 2)).float().sum(), optimizer)
        with pytest.raises(error, match=message):
            optimizer.step()
        assert not kernels and model.weight.tolist() == [[1, 2]]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_parameters_of_fp64_are_stepped_by_the_optimizer_itself(level, kernels):
    """At O1 and O4, where the parameters may have any type."""
    both = []
    for way in (OnePass(), Unfused()):
        model = training.linear([[1.0, 2.0]]).double()
        model, optimizer = start_with(level, way, model, ADAM(model.parameters(), lr=0.25))
        for _ in range(2):
            optimizer.zero_grad()
            training.backward((model.weight * torch.tensor([3.0, 4.0])).float().sum(), optimizer)
            optimizer.step()
        both.append(ends(model, optimizer))
    assert not kernels and both[0][0][0].dtype is torch.float64
    training.assert_unchanged(*both)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_frozen_low_precision_parameters_do_not_change_the_steps_of_the_others(level, kernels):
    """An adapter's base of BF16 is often in the optimizer's groups too, before the FP32 adapter."""
    both = []
    for base in ([], [nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)]):
        model = training.linear([[1.0, 2.0]])
        model, optimizer = start_with(level, OnePass(), model, ADAM([*base, *model.parameters()], lr=0.25))
        training.backward((model.weight * torch.tensor([3.0, 4.0])).sum(), optimizer)
        optimizer.step()
        both.append(model.weight.detach().clone())
        assert kernels.pop() == 1 and not kernels
    assert training.same(both[:1], both[1:])


@both_levels
@pytest.mark.parametrize("make", [SGD, ADAM])
def test_sparse_gradients_beside_others(level, make, kernels):
    made = []
    for way in (OnePass(), Unfused()):
        kernels.clear()
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), training.linear([[1.0, 2.0]]))
        nn.init.ones_(model[0].weight)
        optimizer = make([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.5)
        model, optimizer = start_with(level, way, model, optimizer, keep_fp32=nn.Embedding)
        for _ in range(2):
            training.backward(model(torch.tensor([1, 1, 3])).float().sum(), optimizer)
            if make is ADAM:
                with pytest.raises(RuntimeError, match="sparse gradients"):
                    optimizer.step()
                optimizer.zero_grad()
                model[0].weight.grad = None
            else:
                optimizer.step()
                assert model[0].weight[0].tolist() == [1, 1]
            assert not kernels  # what torch refuses of sparse gradients it refuses before it has stepped others
        made.append(list(model.parameters()))
    training.assert_unchanged(*made)


# ---------------------------------------------------------------------------------------------------------------------
# Manners


@both_levels
@ONE_OF_EACH
@pytest.mark.parametrize("own_way", [False, True], ids=["in one pass", "partly its own way"])
def test_hooks_are_called_once_a_step(level, recipe, own_way, kernels):
    model, optimizer = trained(level, recipe)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    name = "momentum_buffer" if recipe.make is SGD else "exp_avg"
    if own_way:
        state[name] = in_another_order(state[name])
    seen: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre, of all")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post, of all")),
    ]
    try:
        kernels.clear()
        go_on(model, optimizer, range(2))
    finally:
        for hook in hooks:
            hook.remove()
    assert kernels == ([2, 1] if own_way else [2, 2, 1]) * 2
    assert sorted(seen) == sorted(["pre, of all", "pre", "post", "post, of all"] * 2)
    assert max(seen.index("pre"), seen.index("pre, of all")) < min(seen.index("post"), seen.index("post, of all"))


@crossed({"captured": ["before", "after", "by a scheduler"]}, ONE_OF_EACH, both_levels, meet=1)
def test_a_step_that_was_captured(level, recipe, captured, kernels):
    both = []
    for way in (OnePass(), Eager()):
        model = training.linear([[1.0, 2.0], [3.0, 4.0]])
        optimizer = recipe(model.parameters(), **way.options)
        step = optimizer.step
        if captured == "by a scheduler":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = start_with(level, way, model, optimizer)
        step = step if captured == "before" else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            training.backward(model(torch.tensor([[1.0, 0.1]])).float().square().sum(), optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step()
                if captured == "by a scheduler":
                    scheduler.step()
        both.append(ends(model, optimizer))
    assert len(kernels) == 3
    training.assert_unchanged(*both)


@both_levels
@ONE_OF_EACH
@pytest.mark.parametrize("frozen", [False, True])
def test_edits_of_weights_are_adopted_and_edits_of_masters_published(level, recipe, frozen):
    both = []
    for way in (OnePass(), Eager()):
        model, optimizer = trained(level, recipe, way=way)
        if frozen:
            model.first.requires_grad_(False)
        model.first.weight.data[0] = 0.375
        for step in range(3, 6):
            optimizer.zero_grad()
            iterate(model, optimizer, step)
            model.first.weight.data[1, :3] = 0.75 - step / 16
            with torch.no_grad():
                optimizer.param_groups[1]["params"][0].mul_(0.5)
            optimizer.step()
        both.append(ends(model, optimizer))
        master = optimizer.param_groups[0]["params"][0]
        assert torch.equal(master.to(model.first.weight.dtype), model.first.weight)
        if frozen:
            assert (master[0] == 0.375).all() and (master[1, :3] == 0.75 - 5 / 16).all()
    training.assert_unchanged(*both)


@both_levels
@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad_does_what_the_optimizer_was_told_to(level, to_none):
    recipe = Recipe(FusedSGD, {"lr": 0.5, "weight_decay": 0.5, "set_grad_none": to_none})
    for way in (OnePass(), Eager()):
        model = training.linear([[1.0, 2.0]])
        model, optimizer = start_with(level, way, model, recipe(model.parameters()))
        training.backward(model(torch.ones(1, 2)).float().sum(), optimizer)
        optimizer.zero_grad()
        optimizer.step()
        assert model.weight.tolist() == ([[1, 2]] if to_none else [[0.75, 1.5]])  # a gradient of 0 is decayed


class Interrupting:
    """Kernels at whose call of that number Ctrl-C comes, as it begins or as it ends; once."""

    def __init__(self, at: int, after: bool) -> None:
        self.at, self.after, self.calls = at, after, 0

    def __call__(self, kernel: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.calls += 1
            now = self.calls == self.at
            if now and not self.after:
                send()
            try:
                kernel(*args, **options)
            finally:
                if now and self.after:
                    send()

        return call


@crossed(
    pytest.mark.parametrize("first", [False, True], ids=["later", "first"]),
    pytest.mark.parametrize("own_way", [False, True], ids=["in one pass", "partly its own way"]),
    ONE_OF_EACH,
    both_levels,
)
def test_an_interrupt_waits_for_the_end_of_the_step(level, recipe, own_way, first, monkeypatch):
    def begin() -> tuple[LateNet, Any]:
        model, optimizer = trained(level, recipe, 0 if first else 3)
        if own_way:
            if first:
                optimizer.param_groups[1]["differentiable"] = True
            else:
                put_in_the_state("momentum_buffer" if recipe.make is SGD else "exp_avg", in_another_order, 1)(
                    model, optimizer
                )
            model.last.weight.data[0] = 0.25  # an edit to adopt, which writes to the master
        iterate(model, optimizer, 3)
        return model, optimizer

    model, optimizer = begin()
    optimizer.step()
    wanted = copy.deepcopy(ends(model, optimizer)[1])
    for at in range(1, 5 if own_way and not first else 4):  # the kernels, one that refuses, the optimizer's own way
        for after in (False, True):
            model, optimizer = begin()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), sent_again_by_the_test():
                interrupting = Interrupting(at, after)
                for name in ("multi_tensor_adam", "multi_tensor_sgd"):
                    patch.setattr(multi_tensor, name, interrupting(getattr(multi_tensor, name)))
                patch.setattr(one_pass, "_step_with_torch", interrupting(one_pass._step_with_torch))
                optimizer.step()
            training.assert_unchanged(ends(model, optimizer)[1], wanted)
            go_on(model, optimizer)
            other, others = begin()
            others.step()
            go_on(other, others)
            training.assert_unchanged(ends(model, optimizer), ends(other, others))


def tensors_there_are() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@crossed(ONE_OF_EACH, both_levels, meet=1)
def test_nothing_grows(level, recipe):
    model, optimizer = trained(level, recipe, 10)
    first, held = tensors_there_are(), len(pickle.dumps(optimizer))
    go_on(model, optimizer, range(10, 300))
    assert tensors_there_are() <= first and len(pickle.dumps(optimizer)) <= held + 16
    stash = optimizer._amp_stash
    assert stash.step is None and not stash.masters.waiting
