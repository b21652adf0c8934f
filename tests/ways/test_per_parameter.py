"""Classes of optimizers that are not torch's, which a user registers as stepping each parameter by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from any_optimizer import Each as Counting
from coded_states import coded, go_on, loss_of, net, start
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import masters_of, same

from amp_patch import amp
from amp_patch.testing import check_per_parameter_optimizer
from amp_patch.ways import portions

pytestmark = pytest.mark.usefixtures("registrations")


class Averaging(Counting):
    """Keeps the average of the weights, as schedule-free ones do."""

    def direction(self, group: Any, param: Tensor) -> Tensor:
        average = self.state[param].setdefault("z", param.clone())
        return average.lerp_(param, 0.5).sub(param) - param.grad


class AveragingSlowly(Counting):
    def direction(self, group: Any, param: Tensor) -> Tensor:
        self.state[param].setdefault("ema", torch.zeros_like(param)).lerp_(param, 0.001)
        return param.grad


class Decaying(Counting):
    """An optimizer whose momentum depends on the weights, as SGD's with weight decay. Eight bits suffice for it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, weight_decay=0.1)

    def direction(self, group: Any, param: Tensor) -> Tensor:
        average = self.state[param].setdefault("momentum", torch.zeros_like(param))
        return average.mul_(0.9).add_(param.grad).add_(param, alpha=group["weight_decay"])


class Clipping(Counting):
    """Looks at all gradients."""

    def direction(self, group: Any, param: Tensor) -> Tensor:
        norms = [
            other.grad.norm() for group in self.param_groups for other in group["params"] if other.grad is not None
        ]
        return param.grad / torch.stack(norms).norm().clamp(min=1)


class Estimating(Counting):
    """From its 16th step on the learning rate comes from the parameters that it was given: no short trial shows it."""

    def direction(self, group: Any, param: Tensor) -> Tensor:
        if group["step"] > 15:
            group["lr"] = float(param.norm())
        return super().direction(group, param)


class Drawing(Counting):
    def direction(self, group: Any, param: Tensor) -> Tensor:
        return torch.rand_like(param)


class Failing(Counting):
    def direction(self, group: Any, param: Tensor) -> Tensor:
        raise ArithmeticError("odd shape")


def two_groups(make: Any) -> Any:
    """Return a function that makes an optimizer with two groups, of which the second has another learning rate."""

    def made(params: Any) -> Any:
        first, *others = params
        return make([{"params": others}, {"params": [first], "lr": 0.02}])

    return made


def settings(optimizer: Any) -> list[Any]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_a_group_without_gradients_counts_its_steps_too():
    def train() -> list[Any]:
        model, optimizer = start(two_groups(Counting), optimizer_state=None, master_weights="split")
        for step in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, step), optimizer) as loss:
                loss.backward()
            next(iter(model.parameters())).grad = None
            optimizer.step()
        return settings(optimizer)

    wanted = train()
    amp.register_per_parameter_optimizer(Counting)
    assert train() == wanted


def checked(kind: Any, fp32_state: Any = (), make: Any = None) -> None:
    amp.register_per_parameter_optimizer(kind, fp32_state=fp32_state)
    check_per_parameter_optimizer((make or kind)(net().parameters()))


def test_the_check_passes_classes_that_step_each_parameter_independently():
    checked(Counting)
    checked(Counting, make=two_groups(Counting))
    checked(Decaying)
    checked(Averaging, fp32_state=["z"])


def test_the_check_wants_state_that_holds_weights_to_be_named():
    with pytest.raises(AssertionError, match="its state 'ema' holds weights"):
        checked(AveragingSlowly)
    with pytest.raises(AssertionError, match=r"its state 'z' holds weights.*register it with fp32_state=\['z'\]"):
        checked(Averaging)
    with pytest.raises(AssertionError, match=r"its state has no 'zz', which fp32_state names; it has z$"):
        checked(Averaging, fp32_state=["zz"])
    amp.register_per_parameter_optimizer(Averaging, fp32_state=["z"])
    model, optimizer = start(Averaging)
    go_on(model, optimizer, range(2))
    assert coded(optimizer) == {}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Clipping, "it steps a parameter by itself differently from the same among others"),
        (Drawing, "it draws random numbers, which portions would draw more of"),
        (Failing, r"its step fails \(ArithmeticError: odd shape\)"),
    ],
)
def test_the_check_raises_for_a_class_that_combines_parameters_and_changes_nothing(kind, reason):
    amp.register_per_parameter_optimizer(kind)
    optimizer = kind(net().parameters())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    wanted = f"^{kind.__name__}, registered by register_per_parameter_optimizer: {reason}"
    with pytest.raises(AssertionError, match=f"{wanted}.*leave the registration out"):
        check_per_parameter_optimizer(optimizer)
    assert type(optimizer) is kind and not optimizer.state and torch.equal(torch.get_rng_state(), before)


def test_the_check_refuses_a_class_that_is_not_registered():
    with pytest.raises(ValueError, match=r"Each, a class that is not registered; call amp\.register_per_"):
        check_per_parameter_optimizer(Counting(net().parameters()))


def test_a_fault_that_no_probe_shows_ends_the_step_that_shows_it(monkeypatch):
    amp.register_per_parameter_optimizer(Estimating)
    model, optimizer = start(two_groups(Estimating), optimizer_state="8bit")
    go_on(model, optimizer, range(15))
    monkeypatch.setattr(portions, "PORTION", 1)
    shown = r"^Estimating.step: .* has left 'lr' of the group at .* does not step each parameter by itself"
    with pytest.raises(RuntimeError, match=shown):
        go_on(model, optimizer, range(15, 16))


def test_a_step_in_backward_is_refused_by_name():
    amp.register_per_parameter_optimizer(Counting)
    with pytest.raises(ValueError, match="gradient_release=True is not for this Each: its class is not one of torch"):
        start(Counting, optimizer_state=None, gradient_release=True)


def test_the_environment_registers_its_named_classes(monkeypatch):
    monkeypatch.setenv("AMP_PATCH_PER_PARAMETER", "Lion, Averaging:z,Each")
    for kind, wanted in (Counting, {"exp_avg": 2}), (Averaging, {}):
        model, optimizer = start(kind)
        go_on(model, optimizer, range(1))
        assert coded(optimizer) == wanted
    amp.register_per_parameter_optimizer(Averaging)  # what the script says counts
    model, optimizer = start(Averaging)
    go_on(model, optimizer, range(1))
    assert coded(optimizer) == {"z": 2}


def test_subclasses_and_replaced_steps_of_a_registered_class_are_refused_with_the_way_out(monkeypatch):
    way_out = r"nor registered .*amp\.register_per_parameter_optimizer, or AMP_PATCH_PER_PARAMETER=(Each|Heir)"
    with pytest.raises(ValueError, match=way_out):
        start(Counting)
    amp.register_per_parameter_optimizer(Counting)
    with pytest.raises(ValueError, match=way_out):
        start(type("Heir", (Counting,), {}))
    monkeypatch.setattr(Counting, "step", torch.optim.Optimizer.step)
    with pytest.raises(ValueError, match=way_out):
        start(Counting)


@pytest.mark.parametrize(
    ("wanted", "fp32_state", "message"),
    [
        (nn.Linear, (), r"optimizer_class is <class .*Linear'>; wanted a subclass of torch\.optim\.Optimizer"),
        (
            Counting([nn.Parameter(torch.ones(1))]),
            (),
            r"an object of Each; wanted a subclass of torch\.optim\.Optimizer \(the class, not one",
        ),
        (Counting, "z", r"fp32_state is 'z'; wanted a list of names of state tensors"),
        (Counting, [1], r"fp32_state is \[1\]; wanted a list"),
    ],
)
def test_classes_that_cannot_be_registered_are_refused(wanted, fp32_state, message):
    with pytest.raises(TypeError, match=f"^register_per_parameter_optimizer: .*{message}"):
        amp.register_per_parameter_optimizer(wanted, fp32_state=fp32_state)


def trained_in_shares(sharded: bool) -> list[Tensor]:
    amp.register_per_parameter_optimizer(Counting)
    make: Any = Counting
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make = partial(ZeroRedundancyOptimizer, optimizer_class=Counting, lr=0.1)
    model, optimizer = start(make, optimizer_state=None, master_weights="split")
    wrapped = DistributedDataParallel(model) if sharded else model
    go_on(wrapped, optimizer, range(3))
    return masters_of(optimizer)


def test_a_zero_redundancy_optimizer_of_a_registered_class_trains_as_one_process_does(ranks):
    wanted = trained_in_shares(False)
    for found in ranks(trained_in_shares, True):
        assert same(found, wanted)
