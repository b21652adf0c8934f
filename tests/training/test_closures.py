"""Steps with a closure, on masters: equal to the bit to the loop that calls the closure first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_trainings import x
from split_masters import MAKERS, OPTIM, loss_of, net
from torch import Tensor
from training import backward, linear, masters_of, same

from amp_patch import amp, optimizers

ALL = {name: MAKERS[name] for name in ("AdamW", "SGD", "NAdam", "FusedLAMB", "FusedAdam")} | {
    "Adagrad": lambda p: OPTIM.Adagrad(p, lr=0.05, fused=True),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
}
SOME = ("AdamW", "NAdam", "FusedSGD")


def start(make: Any, form: Any = True) -> tuple[Any, Any]:
    model = net()
    return amp.initialize(model, make(model.parameters()), opt_level="O5", master_weights=form, verbosity=0)


def iterate(model: Any, optimizer: Any, steps: range, *, closure: bool) -> None:
    def gradients(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        backward(loss, optimizer)
        return loss

    for step in steps:
        if closure:
            assert optimizer.step(lambda step=step: gradients(step)) is not None
        else:
            gradients(step)
            optimizer.step()


def state_of(model: Any, optimizer: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    return [p.detach().clone() for p in model.parameters()], masters_of(optimizer), amp.state_dict()


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_step_with_a_closure_makes_the_update_of_the_step_after_it(make):
    results = []
    for closure in (False, True):
        model, optimizer = start(make)
        before = masters_of(optimizer)
        iterate(model, optimizer, range(3), closure=closure)
        results.append(state_of(model, optimizer))
        assert not any(map(torch.equal, before, masters_of(optimizer)))
        amp.restore()
    (weights, masters, state), (its_weights, its_masters, its_state) = results
    assert same(its_weights, weights) and same(its_masters, masters) and its_state == state


@pytest.mark.parametrize("name", SOME)
def test_a_closure_adds_to_existing_gradients(name):
    results = []
    for closure in (False, True):
        model, optimizer = start(ALL[name])
        backward(loss_of(model, 0), optimizer)
        second = lambda: backward(loss_of(model, 1), optimizer)  # noqa: E731, B023
        if closure:
            optimizer.step(second)
        else:
            second()
            optimizer.step()
        results.append(state_of(model, optimizer))
        amp.restore()
    assert same(results[0][0], results[1][0]) and results[0][2] == results[1][2]


class Twice(torch.optim.SGD):
    """Two steps in one, each with gradients of its own."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        super().step(closure)
        return super().step(closure)


class SamOfItsOwn(torch.optim.SGD):
    """A step of the gradients at the weights plus half the gradient."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        params = self.param_groups[0]["params"]
        closure()
        moves = [p.grad / 2 for p in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
        return super().step()


# The gradient of w * w / 2 is w, and lr 1/2: 1 -> 1/2 -> 1/4; and 1 - 1/2 * (1 + 1/2).
@pytest.mark.parametrize(("kind", "wanted"), [(Twice, 0.25), (SamOfItsOwn, 0.25)])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": False}], ids=str)
def test_a_step_that_calls_the_closure_twice_computes_the_second_on_written_weights(kind, wanted, how):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, kind(model.parameters(), lr=0.5, **how), opt_level="O5", verbosity=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x(1.0)).float().square().sum() / 2
        backward(loss, optimizer)
        return loss

    optimizer.step(closure)
    assert model.weight.item() == wanted and [m.item() for m in amp.master_params(optimizer)] == [wanted]


@pytest.mark.parametrize("form", ["split", "stochastic"])
def test_a_closure_is_refused_by_masters_without_memory_and_nothing_has_moved(form):
    model, optimizer = start(ALL["AdamW"], form)
    backward(loss_of(model, 0), optimizer)
    before, called = state_of(model, optimizer), []
    with pytest.raises(RuntimeError, match=rf"AdamW.step: a closure is not for master_weights='{form}': .*body first"):
        optimizer.step(lambda: called.append(1))
    found = state_of(model, optimizer)
    assert not called and same(found[0], before[0]) and same(found[1], before[1])
    optimizer.step()
    assert not same(state_of(model, optimizer)[0], before[0])
