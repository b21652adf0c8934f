"""Skipped steps: what causes one, what it must not change, how it can be read."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import training
from conftest import DEVICES
from torch import nn
from training import LEVELS, assert_unchanged, backward, linear, snapshot

from amp_patch import amp

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1e-4, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-4),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_at_all(name, level, device):
    model = linear([[1.0, 2.0], [3.0, 4.0]], device)
    model, optimizer = amp.initialize(model, OPTIMIZERS[name](model.parameters()), opt_level=level)
    good, bad = torch.full((1, 2), 0.25, device=device), torch.tensor([[math.inf, 1.0]], device=device)
    backward(model(good).sum() / 4, optimizer)
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped
    optimizer.zero_grad()
    before = snapshot(model, optimizer)

    backward(model(bad).sum(), optimizer)
    optimizer.step()

    assert optimizer._amp_stash.step_skipped
    assert_unchanged(before, snapshot(model, optimizer))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}

    optimizer.zero_grad()
    backward(model(good).sum() / 4, optimizer)
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped
    assert not training.same(before[0], snapshot(model, optimizer)[0])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_scaled_gradient_that_fp16_cannot_hold_is_found(level):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, training.SGD(model.parameters()), opt_level=level, loss_scale=2.0**15, verbosity=0
    )
    backward(model(torch.tensor([[1.0]])).sum(), optimizer)  # gradient 2**15: fits
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped
    optimizer.zero_grad()
    backward(model(torch.tensor([[4.0]])).sum(), optimizer)  # 2**17 does not
    optimizer.step()
    assert optimizer._amp_stash.step_skipped


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_a_scale_of_1_checks_nothing_and_lets_nan_through_as_plain_training_does(level):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level=level)
    backward(model(torch.tensor([[math.nan]])).sum(), optimizer)
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped
    assert model.weight.isnan().all()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scheduler_built_before_or_after_initialize_works_and_does_not_warn(level, when):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for value, skipped, rate in ((math.inf, True, 0.5), (1.0, False, 0.25)):  # a warning would be an error here
        optimizer.zero_grad()
        backward(model(torch.tensor([[value]])).sum() / 2, optimizer)
        optimizer.step()
        scheduler.step()
        assert optimizer._amp_stash.step_skipped is skipped
        assert optimizer.param_groups[0]["lr"] == rate
    assert model.weight.item() == 0.75  # one step, at rate 0.5, of gradient 0.5


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_master_gradients_keep_their_non_finite_values_until_the_step(level):
    model = linear([[1.0, 1.0]])
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level=level, verbosity=0)
    backward(model(torch.tensor([[math.nan, 1.0]])).sum(), optimizer)
    assert math.isnan(torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0))  # tacotron2's test
    optimizer.step()
    assert optimizer._amp_stash.step_skipped


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_step_after_a_discarded_overflow_is_taken(level):
    for discard in ("optimizer", "model", "none"):
        model = linear([[1.0]])
        model, optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, verbosity=0
        )
        backward(model(torch.tensor([[math.inf]])).sum(), optimizer)
        if discard == "optimizer":
            optimizer.zero_grad()
        elif discard == "model":
            model.zero_grad()
        else:
            for p in amp.master_params(optimizer):
                p.grad = None
        backward(model(torch.tensor([[0.5]])).sum(), optimizer)
        optimizer.step()
        assert not optimizer._amp_stash.step_skipped and model.weight.item() == 0.5


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_bad_micro_batch_skips_the_whole_step(level):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level=level, verbosity=0)
    for value in (0.5, math.inf, 0.5):
        backward(model(torch.tensor([[value]])).sum() / 4, optimizer)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and model.weight.item() == 1.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 1}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_body_leaves_gradients_casts_and_scale_consistent(level):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0
    )
    with pytest.raises(KeyError), amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
    assert model.weight.grad is None and all(p.grad is None for p in amp.master_params(optimizer))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 64.0, "unskipped": 0}
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is (torch.float16 if level == "O1" else torch.float32)
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    optimizer.step()
    assert model.weight.item() == 0.0


def test_an_exception_in_the_body_leaves_an_earlier_micro_batch_unscaled():
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O1", loss_scale=64.0
    )
    backward(model(torch.full((1, 1), 3.0)).sum(), optimizer)
    with pytest.raises(KeyError), amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer):
        raise KeyError
    assert model.weight.grad.item() == 3.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_inside_step_does_not_disable_the_next(level):
    class Fragile(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise OSError("out of luck")
            return super().step(closure)

    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, Fragile(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0)
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    with pytest.raises(OSError, match="out of luck"):
        optimizer.step()
    optimizer.fails = False
    optimizer.zero_grad()
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizer)
    optimizer.step()  # fires the hooks twice: Fragile.step calls super().step
    assert model.weight.item() == 0.5


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_counters_that_an_optimizer_keeps_in_its_groups_are_put_back(level):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
            return super().step(closure)

    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, Counting(model.parameters(), lr=1.0), opt_level=level, verbosity=0)
    for value, steps in ((math.inf, None), (0.5, 1), (math.inf, 1), (0.5, 2)):
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer)
        optimizer.step()
        assert optimizer.param_groups[0].get("step") == steps


class Thorough(torch.optim.Optimizer):
    """Counts its steps where nobody looks, keeps a number in a tensor, and divides by the number of gradients."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "sum": torch.zeros(())})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["sum"] += sum(grad.sum() for grad in grads) / len(grads)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("scheduled", ["never", "before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_skipped_step_of_an_optimizer_that_is_not_torch_s_is_not_taken_at_all(level, scheduled):
    model = linear([[1.0]])
    optimizer, told = Thorough(model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: told.append(optimizer.steps))
    if scheduled == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    if scheduled == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)
    for value, steps in ((0.5, 1), (math.inf, 1), (0.25, 2)):
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), value)).sum(), optimizer)
        optimizer.step()
        if scheduled != "never":
            scheduler.step()  # it warns of schedules without steps, and a warning is an error here
        assert optimizer.steps == steps and optimizer._amp_stash.step_skipped is (value == math.inf)
    assert model.weight.item() == 0.25 and optimizer.param_groups[0]["sum"].item() == 0.75 and told == [1, 1, 2]
    amp.restore()
    optimizer.zero_grad()
    model(torch.full((1, 1), 0.25)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 3 and model.weight.item() == 0.0 and told == [1, 1, 2, 3]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closures_are_refused_under_loss_scaling_and_work_without(level):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0
    )
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    with pytest.raises(RuntimeError, match=r"SGD\.step: a closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    assert model.weight.item() == 0.0

    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O0")

    def closure():
        loss = model(torch.ones(1, 1)).sum()
        backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).item() == 1.0 and model.weight.item() == 0.0


def test_the_message_names_the_parameters_when_many_steps_in_a_row_are_skipped(caplog):
    model = training.convnet()
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level="O2")
    inputs, targets = training.images(0)
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for _ in range(10):
            optimizer.zero_grad()
            backward(torch.nn.functional.cross_entropy(model(inputs * math.inf), targets), optimizer)
            optimizer.step()
    assert "10 in a row" in caplog.text and "head.weight (NaN)" in caplog.text
    assert len(caplog.records) == 5  # skips 1, 2, 4, 8 and 10


def test_a_skipped_step_leaves_fp32_gradients_where_the_script_will_clear_them():
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level="O1", verbosity=0)
    backward(model(torch.full((1, 1), math.inf)).sum(), optimizer)
    grad = model.weight.grad
    optimizer.step()
    assert model.weight.grad is grad
    for p in model.parameters():
        p.grad.zero_()


def test_a_step_taken_ends_the_row_of_skips(caplog):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level="O2")
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for number in range(11):
            optimizer.zero_grad()
            backward(model(torch.full((1, 1), 0.0 if number == 9 else math.inf)).sum() * 1e-4, optimizer)
            optimizer.step()
    assert "in a row" not in caplog.text and "skip 8" in caplog.text


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_found_inf_stays_on_the_device_until_the_step(level, monkeypatch):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level=level)
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        original = getattr(torch.Tensor, name)
        counted = lambda self, *a, original=original, name=name: (reads.append(name), original(self, *a))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, counted)
    for delay in (False, False, True, False):  # adds to what is there, unscaled and scaled
        backward(model(torch.ones(1, 1)).sum() / 8, optimizer, delay_unscale=delay)
    assert reads == []
    optimizer.step()
    assert len(reads) == 1


class Raising(torch.optim.SGD):
    """Raises in the middle of a step while `broken`."""

    broken = False

    def step(self, closure=None):
        if self.broken:
            raise KeyError("planted")
        return super().step(closure)


@pytest.mark.parametrize("level", training.LEVELS)
@pytest.mark.parametrize("value", [0.5, math.inf])
@pytest.mark.parametrize("again", ["retry", "scale_loss", "grad_scaler"])
def test_a_step_that_an_exception_left_is_over(level, value, again):
    model = linear([[1.0]])
    optimizer = Raising(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def scaled_backward(value: float) -> None:
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer)

    scaled_backward(value)
    optimizer.broken = True
    with pytest.raises(KeyError):
        torch.optim.Optimizer.profile_hook_step(Raising.step)(optimizer)
    optimizer.broken = False
    if again == "retry":
        optimizer.step()
        if level not in ("O0", "O3", "O4", "O5"):  # the loss is scaled, and the overflow seen
            assert model.weight.item() == (1.0 if value == math.inf else 0.875)
        return
    if again == "scale_loss":
        scaled_backward(0.5)
        optimizer.step()
    else:
        scaler = amp.GradScaler("cpu", init_scale=8.0)
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 1), 0.5)).sum() / 4).backward()
        assert scaler.step(optimizer) is True
    assert model.weight.item() == 0.875
    assert next(iter(amp.master_params(optimizer))).item() == 0.875


def test_casts_are_back_after_a_step_that_an_exception_left_and_restore():
    a = torch.ones(2, 2)
    for _ in range(2):
        model = linear([[1.0]])
        optimizer = Raising(model.parameters(), lr=1.0)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        assert torch.mm(a, a).dtype is torch.float16
        backward(model(torch.ones(1, 1)).sum() / 4, optimizer)
        optimizer.broken = True
        with pytest.raises(KeyError):
            torch.optim.Optimizer.profile_hook_step(Raising.step)(optimizer)
        amp.restore()
        assert torch.mm(a, a).dtype is torch.float32


# An overflow is the matter of the loss that made it


def one_loss_overflows(level, device="cpu", delay=False, shared=False):
    """Loss 0 overflows in the first optimizer; loss 1, which is clean, then goes to both. Scales are dynamic."""
    models = [linear([[1.0]], device), linear([[1.0]], device)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, num_losses=2, verbosity=0)
    backward(models[0](torch.full((1, 1), math.inf, device=device)).sum(), optimizers[0], loss_id=0)
    small = torch.full((1, 1), 0.25, device=device)
    if delay:
        backward((models[0](small) + models[1](small)).sum() / 4, optimizers, loss_id=1, delay_unscale=True)
    backward((models[0](small) + models[1](small)).sum() / 4, optimizers, loss_id=1)
    return models, optimizers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_overflow_of_one_loss_is_not_blamed_on_another(level, delay, device):
    models, optimizers = one_loss_overflows(level, device, delay)
    states = amp.state_dict()
    assert states["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    assert states["loss_scaler1"] == {"loss_scale": 2.0**16, "unskipped": 1}
    grads = [next(iter(amp.master_params(optimizer))).grad.item() for optimizer in optimizers]
    assert grads == [math.inf, 0.0625 * (1 + delay)]
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer._amp_stash.step_skipped for optimizer in optimizers] == [True, False]
    assert [model.weight.item() for model in models] == [1.0, 1 - 0.0625 * (1 + delay)]

    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), 0.25, device=device)).sum() / 4, optimizer, loss_id=0)
        optimizer.step()
        assert not optimizer._amp_stash.step_skipped
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}
    assert models[0].weight.item() == 0.9375


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", ["bad first", "good first"])
@pytest.mark.parametrize("way", ["plain", "delay_unscale", "delay_overflow_check"])
def test_of_two_losses_of_one_optimizer_only_that_which_overflowed_is_scaled_down(level, order, way):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, num_losses=2, verbosity=0)
    bad, good = (0, 1) if order == "bad first" else (1, 0)
    for loss_id in (0, 1):
        value = math.inf if loss_id == bad else 0.25
        last = loss_id == 1
        kwargs = {way: True} if last and way != "plain" else {}
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer, loss_id=loss_id, **kwargs)
        if kwargs:
            backward(model(torch.full((1, 1), 0.25)).sum() / 4, optimizer, loss_id=loss_id)
    states = amp.state_dict()
    assert states[f"loss_scaler{bad}"] == {"loss_scale": 2.0**15, "unskipped": 0}
    assert states[f"loss_scaler{good}"] == {"loss_scale": 2.0**16, "unskipped": 1}
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and model.weight.item() == 1.0


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_third_loss_after_an_overflow_is_checked_by_itself(level):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, num_losses=3, verbosity=0, loss_scale="dynamic", max_loss_scale=1024.0
    )
    for loss_id, value in enumerate((math.inf, 0.25, math.nan)):
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer, loss_id=loss_id)
    assert [tuple(s.values()) for s in amp.state_dict().values()] == [(512.0, 0), (1024.0, 1), (512.0, 0)]
    assert next(iter(amp.master_params(optimizer))).grad.isnan().all()
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and model.weight.item() == 1.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_optimizers_that_share_a_parameter_both_skip_after_a_loss_that_did_not_overflow(level):
    model = linear([[1.0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, num_losses=2, verbosity=0)
    backward(model(torch.full((1, 1), math.inf)).sum(), optimizers, loss_id=0)
    backward(model(torch.full((1, 1), 0.25)).sum() / 4, optimizers, loss_id=1)
    assert [tuple(s.values()) for s in amp.state_dict().values()] == [(2.0**15, 0), (2.0**16, 1)]
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer._amp_stash.step_skipped
    assert model.weight.item() == 1.0


def overflowed_earlier(kind, scale=64.0):
    """A parameter that is its own master, with a gradient that overflowed in loss 0, and a clean loss 1 for it."""
    num_losses = {"num_losses": 2, "verbosity": 0, "opt_level": "O1", "loss_scale": scale}
    if kind == "sparse":
        table = nn.Embedding(3, 1, sparse=True)
        nn.init.ones_(table.weight)
        table, optimizer = amp.initialize(table, torch.optim.SGD(table.parameters(), lr=1.0), **num_losses)
        return optimizer, table.weight, lambda by: (table(torch.tensor([1, 1, 2])) * by).sum()
    if kind == "mixed":  # a dense gradient after a sparse one, and the other way round
        table, turns = nn.Embedding(3, 1, sparse=True), iter([True, False, True, False])
        nn.init.ones_(table.weight)
        table, optimizer = amp.initialize(table, torch.optim.SGD(table.parameters(), lr=1.0), **num_losses)

        def loss(by):
            dense = (table.weight[[1, 1, 2]] * by).sum()
            return (table(torch.tensor([1, 1, 2])) * by).sum() if next(turns) else dense

        return optimizer, table.weight, loss
    dtype = torch.complex64 if kind == "complex" else torch.float64 if kind == "double" else torch.float32
    param = nn.Parameter(torch.ones(3, 1, dtype=dtype))
    if kind == "transposed":
        param = nn.Parameter(torch.ones(2, 3).t())
    _, optimizer = amp.initialize(linear([[1.0]]), torch.optim.SGD([param], lr=1.0), **num_losses)
    return optimizer, param, lambda by: (param[[1, 1, 2]] * by).real.sum()


def dense(grad):
    grad = grad.to_dense() if grad.is_sparse else grad
    return (grad.real if grad.is_complex() else grad)[:, 0].tolist()


KINDS = ["dense", "double", "complex", "transposed", "sparse", "mixed"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, once a process
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_are_added_to_an_earlier_overflow_unchecked(kind, delay):
    optimizer, param, loss = overflowed_earlier(kind)
    backward(loss(math.inf), optimizer, loss_id=0)
    backward(loss(2.0), optimizer, loss_id=1, delay_unscale=delay)
    if delay:
        backward(loss(0.5), optimizer, loss_id=1)
    assert dense(param.grad) == [0.0, math.inf, math.inf]
    flags = [found.item() for _, found in optimizer._amp_stash.found]
    assert flags == [1.0, 0.0]
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and param.real.flatten()[0] == 1.0

    optimizer, param, loss = overflowed_earlier(kind)
    backward(loss(3.0), optimizer, loss_id=0)
    backward(loss(2.0), optimizer, loss_id=1, delay_unscale=delay)
    if delay:
        assert dense(param.grad) == [0.0, 2 * 5 * 64.0, 5 * 64.0]  # the whole sum, scaled
        backward(loss(0.5), optimizer, loss_id=1)
    total = 5.5 if delay else 5.0
    assert dense(param.grad) == [0.0, 2 * total, total]
    backward(loss(math.inf), optimizer, loss_id=1)
    assert [found.item() for _, found in optimizer._amp_stash.found] == [0.0, 1.0]


def test_scaled_once_more_an_earlier_gradient_may_be_more_than_its_type_holds():
    """FP16 at a scale of 1024: an earlier 100 is there unscaled, and must not become an infinity while it waits."""
    model = linear([[1.0, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", loss_scale=1024.0, verbosity=0)
    ones = torch.ones(1, 2)
    for _ in range(4):
        backward(model(ones * torch.tensor([32.0, 0.5])).sum(), optimizer)
    assert model.weight.grad.tolist() == [[128.0, 2.0]]
    backward(model(ones).sum(), optimizer, delay_unscale=True)
    assert model.weight.grad.tolist() == [[1024.0, 3072.0]]
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped and model.weight.tolist() == [[-128.0, -2.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("scale", [64.0, 3.0])
def test_an_exception_in_the_body_brings_the_earlier_gradient_back_to_the_bit(kind, bad, scale):
    optimizer, param, loss = overflowed_earlier(kind, scale)
    backward(loss(0.1), optimizer, loss_id=0)
    if bad:
        backward(loss(math.nan), optimizer, loss_id=0)
    else:
        loss(0.1)
    before, grad = param.grad.clone(), param.grad
    with pytest.raises(KeyError), amp.scale_loss(loss(0.2), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
    assert param.grad is grad
    torch.testing.assert_close(param.grad, before, rtol=0, atol=0, equal_nan=True)
    assert [found.item() for _, found in optimizer._amp_stash.found] == [float(bad)]
    assert not optimizer._amp_stash.backward.aside


@pytest.mark.parametrize("delay", [False, True])
def test_a_parameter_that_backward_does_not_reach_keeps_its_earlier_gradient(delay):
    models = [linear([[1.0]]), linear([[1.0]])]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1.0)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O1", num_losses=2, loss_scale=3.0, verbosity=0)
    backward(sum(model(torch.full((1, 1), 0.1)).sum() for model in models), optimizer)
    grad = models[1].weight.grad
    before = grad.clone()
    backward(models[0](torch.full((1, 1), 0.1)).sum(), optimizer, loss_id=1, delay_unscale=delay)
    if delay:
        assert models[1].weight.grad.item() == pytest.approx(3 * before.item())
        backward(models[0](torch.full((1, 1), 0.1)).sum(), optimizer, loss_id=1)
        torch.testing.assert_close(models[1].weight.grad, before)
    else:
        assert models[1].weight.grad is grad and torch.equal(grad, before)


@pytest.mark.parametrize("accumulates", ["in one buffer", "apart"])
def test_the_gradient_is_the_same_tensor_after_it_was_added_to(accumulates):
    """As in torch: whoever holds it, or made it a part of a buffer of all gradients, goes on seeing it."""
    model = linear([[1.0, 2.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=64.0)
    buffer = torch.zeros(4)
    model.weight.grad = grad = buffer[1:3].view(1, 2) if accumulates == "in one buffer" else torch.zeros(1, 2)
    for number in (1, 2):
        backward(model(torch.tensor([[0.5, 0.25]])).sum(), optimizer, delay_unscale=number == 2)
    assert model.weight.grad is grad and grad.tolist() == [[64.0, 32.0]]
    backward(model(torch.tensor([[0.5, 0.25]])).sum(), optimizer)
    assert model.weight.grad is grad and grad.tolist() == [[1.5, 0.75]]
    with pytest.raises(KeyError), amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        grad.zero_()  # as a DDP does, whose bucket this may be a part of
        raise KeyError
    if accumulates == "in one buffer":
        assert model.weight.grad is grad and grad.tolist() == [[1.5, 0.75]]
        assert buffer.tolist() == [0.0, 1.5, 0.75, 0.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_cleared_in_the_body_or_while_they_wait_do_not_come_back(level, how, to_none, delay):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    clear = optimizer.zero_grad if how == "optimizer" else model.zero_grad

    backward(model(torch.full((1, 1), 3.0)).sum(), optimizer)
    with amp.scale_loss(model(torch.full((1, 1), 0.5)).sum(), optimizer, delay_unscale=delay) as scaled_loss:
        clear(set_to_none=to_none)
        scaled_loss.backward()
    if delay:
        backward(model(torch.full((1, 1), 0.25)).sum(), optimizer)
    assert next(iter(amp.master_params(optimizer))).grad.item() == (0.75 if delay else 0.5)

    optimizer.zero_grad()
    backward(model(torch.full((1, 1), math.inf)).sum(), optimizer)
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizer, delay_unscale=True)
    clear(set_to_none=True)
    backward(model(torch.full((1, 1), 0.25)).sum(), optimizer)
    assert next(iter(amp.master_params(optimizer))).grad.item() == 0.25


def test_gradients_of_a_bystander_cleared_in_the_body_do_not_come_back():
    models = [linear([[1.0]]), linear([[1.0]])]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O1", loss_scale=64.0, verbosity=0)
    for clear in (optimizers[1].zero_grad, models[1].zero_grad):
        backward(models[1](torch.full((1, 1), 3.0)).sum(), optimizers[1])
        loss = models[1](models[0](torch.full((1, 1), 0.5))).sum()
        with amp.scale_loss(loss, optimizers[0]) as scaled_loss:
            clear()
            scaled_loss.backward()
        assert models[1].weight.grad.item() == 0.5
        optimizers[1].zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_optimizers_that_share_a_weight_unscale_it_once_after_a_delayed_exit(level):
    model = linear([[1.0, 1.0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale=128.0)
    backward(model(torch.tensor([[2.0, 4.0]])).sum(), optimizers, delay_unscale=True)
    for optimizer in optimizers:
        optimizer.step()
    master = next(amp.master_params(optimizers[0]))
    assert master.tolist() == [[-3.0, -7.0]]  # 1 - 2 * 2, 1 - 2 * 4


def two_of_one_weight(level, scale):
    model = linear([[64.0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, num_losses=2, verbosity=0)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": scale, "unskipped": 0} for i in range(2)})
    return model, *optimizers


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_an_overflow_in_a_shared_weight_skips_the_steps_of_both_optimizers(last, bad, level):
    """Each loss goes to one of them."""
    model, *optimizers = two_of_one_weight(level, 8.0)
    for index in (0, 1):
        value = torch.full((1, 1), math.inf if index == bad else 1.0)
        backward(model(value).sum(), optimizers[index], loss_id=index)
    for optimizer in (optimizers[1 - last], optimizers[last]):
        optimizer.step()
        assert optimizer._amp_stash.step_skipped and model.weight.item() == 64.0
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [4.0 if index == bad else 8.0 for index in (0, 1)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    for index in (0, 1):
        backward(model(torch.ones(1, 1)).sum(), optimizers[index], loss_id=index)
        optimizers[index].step()
        optimizers[index].zero_grad()
    assert model.weight.item() == 62.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_id", [None, 0, 1])
def test_a_shared_weight_s_gradients_of_a_delayed_exit_are_unscaled_for_whoever_comes_first(loss_id, level):
    model, first, second = two_of_one_weight(level, 8.0)
    one = torch.ones(1, 1)
    backward(model(one).sum(), first, loss_id=0, delay_unscale=True)
    if loss_id is not None:
        backward(2 * model(one).sum(), second, loss_id=loss_id)
    gradient = 1.0 if loss_id is None else 3.0
    second.step()
    assert model.weight.item() == 64.0 - gradient
    first.step()
    assert model.weight.item() == 64.0 - 2 * gradient


@pytest.mark.parametrize("level", LEVELS)
def test_after_a_delayed_exit_for_both_a_loss_of_one_leaves_the_shared_gradient_unscaled_once(level):
    model, first, second = two_of_one_weight(level, 8.0)
    one = torch.ones(1, 1)
    backward(model(one).sum(), [first, second], delay_unscale=True)
    backward(2 * model(one).sum(), second)
    first.step()
    second.step()
    assert model.weight.item() == 64.0 - 2 * 3.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("loss_id", [0, 1])
def test_after_a_delayed_exit_for_one_a_loss_of_both_adds_to_the_shared_gradient(loss_id, order, level):
    model, *optimizers = two_of_one_weight(level, 8.0)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 8.0 * 2**i, "unskipped": 0} for i in range(2)})
    one = torch.ones(1, 1)
    backward(model(one).sum(), optimizers[0], delay_unscale=True)
    backward(2 * model(one).sum(), [optimizers[index] for index in order], loss_id=loss_id)
    for optimizer in optimizers:
        optimizer.step()
    assert model.weight.item() == 64.0 - 2 * 3.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_a_shared_weight_that_are_yet_to_be_reduced_are_not_unscaled_before(level, monkeypatch):
    model, first, second = two_of_one_weight(level, 8.0)
    one = torch.ones(1, 1)
    with monkeypatch.context() as inside:
        inside.setattr("amp_patch.model.forward.gradients_stay_local", lambda _: True)
        backward(model(one).sum(), first)
    with pytest.raises(RuntimeError, match="give those optimizers too"):
        backward(model(one).sum(), second)
    backward(model(one).sum(), [first, second])
    second.step()
    assert model.weight.item() == 62.0


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_scales_loaded_at_a_level_without_scaling_do_not_reach_gradients_of_a_delayed_exit(level):
    model = linear([[64.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, num_losses=2)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 8.0 * 2**i, "unskipped": 0} for i in range(2)})
    backward(model(torch.ones(1, 1)).sum(), optimizer, loss_id=0, delay_unscale=True)
    backward(2 * model(torch.ones(1, 1)).sum(), optimizer, loss_id=1)
    optimizer.step()
    assert model.weight.item() == 64.0 - 3.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("leave", [amp.restore, None])
def test_gradients_that_overflowed_are_dropped_where_the_training_ends_before_the_step(level, leave):
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 3)).sum() * math.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    before = next(amp.master_params(optimizer)).detach().clone()
    if leave is None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    else:
        leave()
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)), before)
