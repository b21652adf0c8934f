"""Cast weights that no optimizer of `initialize` holds: a warning names other code that steps or averages them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import Tensor, nn
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


# --- averages ---------------------------------------------------------------------------------------------------------


class Task(nn.Module):
    """Holds the average of its network, as timm's train.py does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.ema = nn.ModuleDict({"module": copy.deepcopy(self.net).requires_grad_(False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.ema.parameters(), self.net.parameters(), strict=True))


def in_place(task: Task) -> None:
    with torch.no_grad():
        for average, weight in task.pairs():
            average.mul_(0.99).add_(weight, alpha=0.01)


def by_data(task: Task) -> None:
    for average, weight in task.pairs():
        average.data = average.data * 0.99 + weight.data.to(average.dtype) * 0.01


def by_state_dict(task: Task) -> None:
    averages, weights = task.ema["module"].state_dict(), task.net.state_dict()
    for name, average in averages.items():
        average.lerp_(weights[name].to(average.dtype), 0.01)


WAYS: dict[str, Callable[[Task], None]] = {"in place": in_place, "data": by_data, "state dict": by_state_dict}


def train(task: Task, optimizers: list[Any], update: Callable[[Task], Any], steps: int = 5, bodies: int = 1) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(bodies):
            with amp.scale_loss(task(X).square().mean(), optimizers) as loss:
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        update(task)


def start(level: str, split: bool = False, **options: Any) -> tuple[Task, list[Any]]:
    task = Task()
    optimizers = [sgd(part) for part in ((task.net[0], task.net[2]) if split else (task.net,))]
    task, optimizers = amp.initialize(task, optimizers, opt_level=level, loss_scale=1.0, verbosity=0, **options)
    return task, optimizers


@crossed(
    {"level": ["O2", "O3", "O5"], "way": list(WAYS), "bodies": [1, 2]},
    pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "two"]),
)
def test_an_average_inside_a_cast_model_is_warned_of_once_and_named(level, way, bodies, split):
    task, optimizers = start(level, split)
    words = r"^initialize: the weights of \['ema.module'\] are torch\.\w+16, .*keep_fp32=\['ema.module'\]\)"
    with pytest.warns(UserWarning, match=words) as found:
        train(task, optimizers, WAYS[way], bodies=bodies)
    assert [each.filename for each in found] == [__file__]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", CAST)
def test_an_average_that_keep_fp32_names_as_the_warning_does_is_fp32_and_moves(level, way):
    task, optimizers = start(level, keep_fp32=["ema.module"])
    expected = [average.clone() for average in task.ema.parameters()]

    def update(task: Task) -> None:
        WAYS[way](task)
        for value, (_, weight) in zip(expected, task.pairs(), strict=True):
            value.mul_(0.99).add_(weight.detach().float(), alpha=0.01)

    train(task, optimizers, update)
    for (average, _), value in zip(task.pairs(), expected, strict=True):
        torch.testing.assert_close(average, value)


def load(task: Task) -> None:
    task.ema.load_state_dict(task.ema.state_dict())


ONCE: dict[str, Callable[[int, Task], None]] = {
    "never": lambda step, task: None,
    "a load before the first step and after the third": lambda step, task: load(task) if step in (0, 3) else None,
    "swapped in and out between two steps": lambda step, task: (load(task), load(task))[0] if step == 2 else None,
}


@pytest.mark.parametrize("when", ONCE)
@pytest.mark.parametrize("level", CAST)
def test_frozen_weights_that_are_loaded_now_and_then_are_not_warned_of(level, when):
    task, optimizers = start(level)
    count = iter(range(1, 9))
    ONCE[when](0, task)
    train(task, optimizers, lambda task: ONCE[when](next(count), task), steps=6)


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_tower_that_is_written_before_each_step_and_has_other_shapes_is_not_warned_of(level, device):
    task = Task().to(device)
    task.ema = nn.ModuleDict({"module": nn.Linear(5, 5).to(device).requires_grad_(False)})
    task, optimizer = amp.initialize(task, sgd(task.net), opt_level=level, loss_scale=1.0, verbosity=0)
    for _ in range(5):
        optimizer.zero_grad()
        backward(task(X.to(device)).square().mean(), optimizer)
        optimizer.step()
        load(task)


def test_a_frozen_tower_is_freed_while_its_optimizer_is_there():
    task, optimizers = start("O2")
    weight = weakref.ref(task.ema["module"][0].weight)
    del task.ema
    gc.collect()
    assert weight() is None
    train(task, optimizers, lambda task: None)


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
