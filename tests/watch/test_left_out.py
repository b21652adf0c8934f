"""Cast weights that no optimizer of `initialize` holds: a warning names other optimizers that step them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from training import backward

from amp_patch import amp

MASTERED = ("O2", "O5", "O7")
CAST = (*MASTERED, "O3")
X = torch.linspace(-1, 1, 32).reshape(8, 4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain_steps(model: nn.Module, optimizer: Any, count: int = 3) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(X).float().square().mean().backward()
        optimizer.step()


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_post_hooks)


# --- an optimizer that was not given ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", MASTERED)
def test_an_optimizer_that_was_not_given_is_warned_of_at_its_first_step_alone(level):
    model = amp.initialize(network(), opt_level=level, verbosity=0)
    optimizer = sgd(model)
    words = rf"^initialize: this SGD .* Sequential .*amp\.initialize\(.*, opt_level='{level}'\).*scale_loss"
    with pytest.warns(UserWarning, match=words) as found:
        plain_steps(model, optimizer)
    assert [each.filename for each in found] == [__file__]
    with pytest.warns(UserWarning, match="this Adam"):
        plain_steps(model, torch.optim.Adam(model.parameters(), eps=1e-3))


@pytest.mark.parametrize("level", MASTERED)
def test_an_optimizer_that_was_left_out_beside_another_one_is_warned_of(level):
    model = network()
    given, left_out = sgd(model[0]), sgd(model[2])
    model, given = amp.initialize(model, given, opt_level=level, loss_scale=1.0, verbosity=0)
    with pytest.warns(UserWarning, match="this SGD was not given") as found:
        for _ in range(4):
            with amp.scale_loss(model(X).square().mean(), given) as loss:
                loss.backward()
            given.step()
            left_out.step()
    assert len(found) == 1


@pytest.mark.parametrize("level", [*MASTERED, "O5+split", "O5+stochastic"])
@pytest.mark.parametrize("both", [True, False])
def test_a_second_optimizer_of_the_same_weights_is_warned_of_at_its_first_step_alone(level, both):
    model = network()
    model, given = amp.initialize(model, sgd(model), opt_level=level, loss_scale=1.0, verbosity=0)
    second = sgd(model)
    with pytest.warns(UserWarning, match="this SGD was not given to initialize") as found:
        for _ in range(3):
            backward(model(X).square().mean(), given)
            if both:
                given.step()
            second.step()
    assert [each.filename for each in found] == [__file__]


class Around(torch.optim.Optimizer):
    """Has groups of its own, and steps the optimizer inside."""

    def __init__(self, inside: Any, params: Any) -> None:
        super().__init__(params, {})
        self.optimizer = inside

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("level", MASTERED)
def test_a_wrapper_that_holds_the_weights_beside_its_optimizer_is_not_warned_of(level):
    model = network()
    model, given = amp.initialize(model, sgd(model), opt_level=level, loss_scale=1.0, verbosity=0)
    around = Around(given, model.parameters())
    backward(model(X).square().mean(), given)
    around.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4", "O6"])
def test_levels_whose_plain_loop_is_right_do_not_warn(level):
    model = amp.initialize(network(), opt_level=level, verbosity=0)
    plain_steps(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("level", MASTERED)
def test_optimizers_of_other_weights_and_ones_that_were_given_later_do_not_warn(level):
    model, other = amp.initialize(network(), opt_level=level, verbosity=0), network()
    by_hand = [p.detach().float().requires_grad_() for p in model.parameters()]
    plain_steps(other, sgd(other))
    torch.optim.SGD(by_hand, lr=0.1).step()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    backward(model(X).square().mean(), optimizer)
    optimizer.step()


def test_torch_has_the_hook_only_while_there_are_such_weights():
    before = hooks()
    for level in ("O1", "O3"):
        amp.initialize(model := network(), sgd(model), opt_level=level, verbosity=0)
    assert hooks() == before
    amp.initialize(network(), opt_level="O2", verbosity=0)
    amp.initialize(model := network(), sgd(model), opt_level="O2", verbosity=0)
    assert hooks() == before + 1
    amp.restore()
    assert hooks() == before
    restored = network()
    plain_steps(restored, sgd(restored))


@pytest.mark.parametrize("level", CAST)
def test_weights_that_an_optimizer_gets_later_are_not_warned_of(level):
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    for _ in range(5):
        backward(model(X).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
