"""Gradients through scale_loss: units, accumulation, several losses, models and optimizers, edits by the user."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import backward, linear

from amp_patch import amp

SCALED = ["O1", "O2"]
EVERY = ["O0", "O1", "O2", "O3", "O4", "O5"]


def sgd(model, lr=1.0, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


def setup(level, weight=((1.0, 2.0),), device="cpu", **kwargs):
    """A linear layer whose gradient is its input, at a static scale that leaves small numbers exact in FP16."""
    kwargs.setdefault("loss_scale", 64.0 if level in SCALED else None)
    model = linear([list(row) for row in weight], device)
    return amp.initialize(model, sgd(model), opt_level=level, **kwargs)


def quarter(model, *values):
    """A loss small enough for the first dynamic scale: 2**16 itself is no FP16 number."""
    return model(x(*values)).sum() / 4


def master_grads(optimizer):
    return [None if p.grad is None else p.grad.tolist() for p in amp.master_params(optimizer)]


def x(*values, device="cpu"):
    return torch.tensor([values], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("loss_scale", ["dynamic", "128.0", 3, 2.0**-10])
def test_gradients_in_the_body_are_scaled_and_after_it_are_not(level, loss_scale, device):
    model, optimizer = setup(level, device=device, loss_scale=loss_scale)
    scale = 65536.0 if loss_scale == "dynamic" else float(loss_scale)
    with amp.scale_loss(model(x(1.0, 2.0, device=device)).sum() / 4, optimizer) as scaled_loss:
        assert scaled_loss.item() == 1.25 * scale and scaled_loss.dtype is torch.float32
        scaled_loss.backward()
        assert model.weight.grad.tolist() == [[0.25 * scale, 0.5 * scale]]
    assert master_grads(optimizer) == [[[0.25, 0.5]]]
    assert all(p.grad.dtype is torch.float32 for p in amp.master_params(optimizer))
    if level == "O2":
        assert model.weight.grad is next(amp.master_params(optimizer)).grad
    optimizer.step()
    assert model.weight.tolist() == [[0.75, 1.5]]


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("delay", [False, True])
def test_micro_batches_accumulate_with_and_without_delay_unscale(level, delay):
    model, optimizer = setup(level, loss_scale=64.0)
    for step in range(2):
        for micro in range(3):
            backward(model(x(0.25, 0.5)).sum(), optimizer, delay_unscale=delay and micro < 2)
        assert master_grads(optimizer) == [[[0.75, 1.5]]]
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.tolist() == [[1.0 - 0.75 * (step + 1), 2.0 - 1.5 * (step + 1)]]


def test_delayed_gradients_add_up_in_the_model_s_type():
    model, optimizer = setup("O2", loss_scale=64.0)
    backward(model(x(1.0, 2.0)).sum(), optimizer, delay_unscale=True)
    assert model.weight.grad.tolist() == [[64.0, 128.0]] and model.weight.grad.dtype is torch.float16
    assert master_grads(optimizer) == [None]
    backward(model(x(1.0, 2.0)).sum(), optimizer)
    assert master_grads(optimizer) == [[[2.0, 4.0]]]


def test_accumulation_without_delay_adds_in_fp32():
    model, optimizer = setup("O2", loss_scale=1.0)
    backward(model(x(2048.0, 2048.0)).sum(), optimizer)
    backward(model(x(1.0, 1.0)).sum(), optimizer)  # 2049 is no FP16 number
    assert master_grads(optimizer) == [[[2049.0, 2049.0]]]


@pytest.mark.parametrize("level", SCALED)
def test_the_scale_may_move_between_delayed_micro_batches(level):
    model, optimizer = setup(level, num_losses=2, verbosity=0, loss_scale="dynamic")
    backward(quarter(model, 0.25, 0.5), optimizer, delay_unscale=True)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}})
    backward(quarter(model, 0.25, 0.5), optimizer, delay_unscale=True)
    backward(quarter(model, 0.25, 0.5), optimizer, loss_id=1)
    assert master_grads(optimizer) == [[[0.1875, 0.375]]]


@pytest.mark.parametrize("level", SCALED)
def test_a_step_with_gradients_still_scaled_unscales_them(level):
    model, optimizer = setup(level, loss_scale="dynamic")
    backward(quarter(model, 1.0, 2.0), optimizer, delay_unscale=True)
    optimizer.step()
    assert model.weight.tolist() == [[0.75, 1.5]]
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == (1 if optimizer._amp_stash.scalers[0].dynamic else 0)


def test_a_discarded_delayed_gradient_takes_its_overflow_with_it():
    model, optimizer = setup("O2", verbosity=0)
    backward(model(x(math.inf, 1.0)).sum(), optimizer)
    backward(model(x(1.0, 1.0)).sum(), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    backward(model(x(0.25, 0.5)).sum(), optimizer)
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped and model.weight.tolist() == [[0.75, 1.5]]


def test_delay_overflow_check_skips_the_step_but_moves_the_scale_later():
    model, optimizer = setup("O2", verbosity=0, loss_scale="dynamic")
    backward(model(x(math.inf, 0.5)).sum(), optimizer, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0
    optimizer.step()
    assert optimizer._amp_stash.step_skipped
    optimizer.zero_grad()
    backward(quarter(model, 1.0, 2.0), optimizer)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped


@pytest.mark.parametrize("level", SCALED)
def test_each_loss_has_a_scale_of_its_own_and_any_overflow_skips_the_step(level):
    model, optimizer = setup(level, num_losses=3, verbosity=0, loss_scale="dynamic")
    backward(quarter(model, 1.0, 2.0), optimizer, loss_id=0)
    backward(quarter(model, math.inf, 2.0), optimizer, loss_id=2)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [65536.0, 65536.0, 32768.0]
    assert [s["unskipped"] for s in amp.state_dict().values()] == [1, 0, 0]
    optimizer.zero_grad()
    backward(quarter(model, 1.0, 2.0), optimizer, loss_id=2)  # at its own scale
    assert master_grads(optimizer) == [[[0.25, 0.5]]]


@pytest.mark.parametrize("level", SCALED)
def test_a_loss_that_overflows_twice_before_one_step_moves_its_scale_once(level):
    model, optimizer = setup(level, verbosity=0, loss_scale="dynamic")
    for _ in range(2):
        backward(quarter(model, math.inf, 2.0), optimizer)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0


@pytest.mark.parametrize("level", EVERY)
def test_one_loss_for_several_optimizers(level):
    first, second = linear([[1.0]]), linear([[2.0]])
    models, optimizers = amp.initialize([first, second], [sgd(first), sgd(second)], opt_level=level, loss_scale=64.0)
    loss = models[1](models[0](x(1.0))).sum()  # d/d first = second's weight, and the reverse
    with amp.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert (first.weight.item(), second.weight.item()) == (-1.0, 1.0)


@pytest.mark.parametrize("level", EVERY)
def test_two_losses_for_one_optimizer_with_a_retained_graph(level):
    model, optimizer = setup(level, num_losses=2, loss_scale=64.0)
    out = model(x(1.0, 2.0))
    with amp.scale_loss(out.sum(), optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    with amp.scale_loss(2 * out.sum(), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    assert master_grads(optimizer) == [[[3.0, 6.0]]]


@pytest.mark.parametrize("level", EVERY)
def test_two_optimizers_over_one_model_share_its_masters(level):
    model = linear([[1.0]])
    model, first = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    model, second = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    for optimizer in (first, second):
        backward(model(x(1.0)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == -1.0
    assert [p.item() for p in amp.master_params(first)] == [-1.0]


class Gan(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, inputs):
        return self.layers(inputs)


def gan_losses(level, zero_at, steps=12, plant=lambda optimizer: None):
    """A GAN whose generator's loss also fills the discriminator's gradients; each optimizer clears only its own."""
    netd, netg = Gan(1), Gan(2)
    models, optimizers = [netd, netg], [sgd(netd, 0.02, momentum=0.9), sgd(netg, 0.02, momentum=0.9)]
    (netd, netg), (optd, optg) = amp.initialize(models, optimizers, opt_level=level, num_losses=3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        real, noise = torch.randn(2, 16, 4, generator=generator)
        plant(optd)
        if zero_at == "before backward":
            optd.zero_grad()
        loss_real = netd(real).pow(2).mean()
        backward(loss_real, optd, loss_id=0)
        fake = netg(noise)
        loss_fake = (netd(fake.detach()) - 1).pow(2).mean()
        backward(loss_fake, optd, loss_id=1)
        optd.step()
        optd.zero_grad()
        optg.zero_grad()
        loss_g = netd(fake).pow(2).mean()
        backward(loss_g, optg, loss_id=2)
        optg.step()
        losses.append((loss_real.item(), loss_fake.item(), loss_g.item()))
    return torch.tensor(losses)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_stale_scaled_gradient_enters_a_gan_s_step(level):
    expected = gan_losses("O0", "before backward")
    assert torch.allclose(gan_losses(level, "before backward"), expected, atol=0.02)
    # Clearing right after the step leaves the generator's gradients in the discriminator until its next backward.
    assert gan_losses(level, "after step").isfinite().all()


def test_gradients_that_another_loss_left_are_no_part_of_the_next_backward():
    netd, netg = linear([[1.0]]), linear([[2.0]])
    (netd, netg), (optd, optg) = amp.initialize([netd, netg], [sgd(netd), sgd(netg)], opt_level="O2", loss_scale=64.0)
    backward(netd(netg(x(1.0))).sum(), optg)
    assert netd.weight.grad is None  # it was scaled, and nobody's
    backward(netd(x(3.0)).sum(), optd)
    assert master_grads(optd) == [[[3.0]]]


def test_a_stale_scaled_gradient_planted_as_known_is_caught_by_the_gan_test():
    from amp_patch.training.stash import Pending

    def plant(optimizer):
        scaler = optimizer._amp_stash.scalers[0]  # as if the optimizer's own delayed exit had left the gradients
        optimizer.zero_grad = lambda: None
        optimizer._amp_stash.pending = Pending(scaler)
        optimizer._amp_stash.route_grads()
        for param in optimizer._amp_stash.masters.links.params:
            param.grad = torch.full_like(param, 30000.0)

    losses = gan_losses("O2", "after step", plant=plant)
    assert not torch.allclose(losses, gan_losses("O0", "before backward"), atol=0.02)


@pytest.mark.parametrize("level", SCALED)
def test_other_optimizers_of_the_training_see_unscaled_gradients(level):
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    _, (opta, _) = amp.initialize([first, second], [sgd(first), sgd(second)], opt_level=level, loss_scale=1024.0)
    inputs = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    backward(first(second(inputs)).sum(), opta)
    for p in second.parameters():
        assert p.grad.abs().max() < 16  # not 65536 times too large
    backward(first(second(inputs)).sum(), opta)
    assert second.bias.grad.abs().max() < 16


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["imported early", "attribute"])
@pytest.mark.parametrize("whose", ["masters", "model"])
def test_clipping_the_norm_acts_on_the_gradients_of_the_step(level, clip, whose):
    model, optimizer = setup(level)
    backward(model(x(3.0, 4.0)).sum(), optimizer)
    params = amp.master_params(optimizer) if whose == "masters" else model.parameters()
    assert clip(params, 1.0).item() == 5.0
    optimizer.step()
    assert model.weight[0].tolist() == pytest.approx([1 - 0.6, 2 - 0.8], abs=1e-2)


@pytest.mark.parametrize("level", EVERY)
def test_clipping_by_value_acts_on_the_gradients_of_the_step(level):
    model, optimizer = setup(level)
    backward(model(x(3.0, 0.25)).sum(), optimizer)
    clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 1.75]]


@pytest.mark.parametrize("edit", ["in place", "data", "copy"])
@pytest.mark.parametrize("level", EVERY)
def test_an_edited_weight_is_what_training_goes_on_from(level, edit):
    model, optimizer = setup(level, weight=((1.0, 2.0), (3.0, 4.0)))
    if edit == "in place":
        with torch.no_grad():
            model.weight.clamp_(-1.5, 1.5)
    elif edit == "data":
        model.weight.data.clamp_(-1.5, 1.5)  # WGAN's form, which no version counter tells
    else:
        model.weight.data.copy_(torch.tensor([[1.0, 1.5], [1.5, 1.5]]))
    backward(model(x(0.5, 0.25)).sum(), optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 1.25], [1.0, 1.25]]


@pytest.mark.parametrize("level", EVERY)
def test_an_edited_weight_is_in_the_state_dict(level):
    model, _ = setup(level)
    model.weight.data.clamp_(-1.5, 1.5)
    assert model.state_dict()["weight"].tolist() == [[1.0, 1.5]]
    model.load_state_dict({"weight": torch.tensor([[3.0, 4.0]])})
    model.weight.data.clamp_(-3.5, 3.5)
    assert model.state_dict()["weight"].tolist() == [[3.0, 3.5]]


def test_an_edit_leaves_the_other_elements_their_precision():
    model, _ = setup("O2", weight=((1.0001, 2.0),))
    model.weight.data[0, 1] = 5.0
    assert model.state_dict()["weight"].tolist() == torch.tensor([[1.0001, 5.0]]).tolist()


@pytest.mark.parametrize("level", EVERY)
def test_an_edited_master_is_published(level):
    model, optimizer = setup(level)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.add_(1.0)
    assert model.state_dict()["weight"].tolist() == model.weight.tolist() == [[2.0, 3.0]]
    optimizer.step()
    assert model.weight.tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize("level", EVERY)
def test_a_gradient_that_exists_at_initialize_is_carried_over(level):
    model = linear([[1.0, 2.0]])
    model(x(0.5, 0.25)).sum().backward()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    backward(model(x(0.5, 0.25)).sum(), optimizer)
    assert master_grads(optimizer) == [[[1.0, 0.5]]]


@pytest.mark.parametrize("level", EVERY)
def test_gradients_edited_through_master_params_are_honoured(level):
    model, optimizer = setup(level)
    backward(model(x(0.5, 1.0)).sum(), optimizer)
    for master in amp.master_params(optimizer):
        master.grad.mul_(2)
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("level", EVERY)
def test_sparse_gradients_are_unscaled_and_checked(level):
    model = nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0, verbosity=0)
    ids = torch.tensor([1, 1, 3])
    for _ in range(1 if level == "O3" else 2):  # torch cannot add sparse FP16 gradients on a CPU
        backward(model(ids).float().sum() / (2 if level == "O3" else 4), optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5]]
    optimizer.zero_grad()
    backward(model(ids).float().sum() * 2.0**14, optimizer)  # 2 * 2**14 * 64 is no FP16 number
    optimizer.step()
    if level in ("O2", "O3"):
        assert optimizer._amp_stash.step_skipped


@pytest.mark.parametrize("level", EVERY)
def test_complex_parameters_are_trained_as_they_are(level):
    phase = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    optimizer = torch.optim.SGD([phase], lr=1.0)
    _, optimizer = amp.initialize(linear([[1.0]]), optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(2):
        backward((phase * (3.0 - 4.0j)).real.sum() / 2, optimizer)
    optimizer.step()
    assert phase.tolist() == [-2.0 - 2.0j]
    backward((phase * math.inf).real.sum(), optimizer)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and phase.tolist() == [-2.0 - 2.0j]


@pytest.mark.parametrize("level", SCALED)
def test_sparse_and_complex_gradients_of_other_optimizers_are_unscaled_too(level):
    model, table, phase = linear([[1.0]]), nn.Embedding(3, 1, sparse=True), nn.Parameter(torch.tensor([1.0 + 0.0j]))
    with torch.no_grad():
        table.weight.fill_(1.0)
    optimizers = [sgd(model), torch.optim.SGD([*table.parameters(), phase], lr=1.0)]
    models, (first, _) = amp.initialize([model], optimizers, opt_level=level, loss_scale=64.0)
    for _ in range(2):
        loss = models[0](table(torch.tensor([1]))).float().sum() + (phase * 2).real.sum()
        backward(loss, first)
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 2.0, 0.0]
    assert phase.grad.tolist() == [4.0 + 0.0j]


@pytest.mark.parametrize("level", EVERY)
def test_a_parameter_without_gradient_and_a_step_without_any_are_legal(level):
    model = nn.ModuleDict({"used": linear([[1.0]]), "unused": linear([[1.0]])})
    used = model["used"]
    _, optimizer = amp.initialize([used, model["unused"]], sgd(model), opt_level=level, loss_scale=64.0)
    optimizer.zero_grad()
    optimizer.step()
    backward(used(x(1.0)).sum(), optimizer)
    optimizer.step()
    assert (used.weight.item(), model["unused"].weight.item()) == (0.0, 1.0)


def normed(level="O2", seed=0, **kwargs):
    """Half layers around a batch norm that is kept, which is its own master, and has gradients of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    return amp.initialize(model, sgd(model), opt_level=level, **kwargs)


FOUR = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [-1.0, 1.0]])


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_backward_outside_of_scale_loss_is_warned_about(level, kept):
    model, optimizer = normed(level, keep_batchnorm_fp32=kept)
    model(FOUR).sum().backward()
    more = 3 if kept else 5
    with pytest.warns(UserWarning, match=rf"SGD\.step: 0\.weight has a gradient .* never gathered .* {more} more"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("where", ["all", "a part"])
def test_a_backward_outside_of_scale_loss_after_one_inside_is_warned_about(level, where):
    model, optimizer = normed(level)
    for _ in range(2):
        backward(model(FOUR).sum(), optimizer)
        optimizer.step()  # no warning
        optimizer.zero_grad()
    backward(model(FOUR).sum(), optimizer)
    if where == "all":
        model(FOUR).sum().backward()
    else:
        model[2](FOUR.to(model[2].weight.dtype)).float().sum().backward()
    name = r"0\.weight" if where == "all" else r"2\.weight"
    with pytest.warns(UserWarning, match=rf"{name} has a gradient on the model that was never gathered"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_that_no_warning_is_for(level):
    """Delayed micro-batches, native scaling, a loss of another optimizer before and after the step, cleared ones."""
    (netd, optd), (netg, optg) = normed(level), normed(level, seed=1)
    for training in range(2):  # of two trainings, then of one
        if training:
            (netd, netg), (optd, optg) = amp.initialize([netd, netg], [optd, optg], opt_level=level, num_losses=2)
        for order in (0, 1):
            backward(netd(FOUR).sum() / 64, optd, delay_unscale=True)
            backward(netd(FOUR).sum() / 64, optd)
            if order:
                optd.step()
            backward(netd(netg(FOUR)).sum() / 64, optg)  # fills the discriminator's
            optg.step()
            if not order:
                optd.step()
        optd.zero_grad()
        backward(netd(FOUR).sum() / 64, optd, delay_unscale=True)
        optd.step()
        netd(FOUR).sum().backward()
        netd.zero_grad()
        optd.step()
        optd.step()
        optd.zero_grad()
        scaler = amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(netd(FOUR).sum()).backward()
        scaler.step(optd)
        optd.zero_grad()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (1.5, TypeError, "loss is a float"),
        (torch.tensor(3), TypeError, "loss is a tensor of torch.int64"),
        (None, TypeError, "loss is a NoneType"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(loss, error, words):
    _, optimizer = setup("O2")
    with pytest.raises(error, match=words), amp.scale_loss(loss, optimizer):
        pass


@pytest.mark.parametrize("loss_id", [1, -1, "0", True, None])
def test_a_loss_id_out_of_range_is_refused(loss_id):
    model, optimizer = setup("O2")
    with pytest.raises(ValueError, match="loss_id is"), amp.scale_loss(model(x(1.0, 1.0)).sum(), optimizer, loss_id):
        pass
    backward(model(x(1.0, 1.0)).sum(), optimizer)  # nothing was left behind


def test_an_optimizer_that_was_never_initialized_is_named():
    model = linear([[1.0]])
    with pytest.raises(RuntimeError, match=r"this SGD never went through initialize\(\)"):
        backward(model(x(1.0)).sum(), sgd(model))
    with pytest.raises(TypeError, match="optimizers is empty"):
        backward(model(x(1.0)).sum(), [])


def test_an_fp64_loss_stays_fp64():
    model, optimizer = setup("O2", loss_scale=8.0)
    with amp.scale_loss(model(x(1.0, 1.0)).double().sum(), optimizer) as scaled_loss:
        assert scaled_loss.dtype is torch.float64 and scaled_loss.item() == 24.0


def test_state_dict_is_written_into_a_destination_and_unknown_keys_are_refused():
    setup("O2", num_losses=2)
    destination = {}
    assert amp.state_dict(destination) is destination and list(destination) == ["loss_scaler0", "loss_scaler1"]
    with pytest.raises(RuntimeError, match="unexpected keys 'model'"):
        amp.load_state_dict({**destination, "model": {}})
    amp.load_state_dict({"loss_scaler1": {"loss_scale": 4.0, "unskipped": 7}})
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 4.0, "unskipped": 7}
    with pytest.raises(TypeError):
        amp.load_state_dict(destination, strict=False)


@pytest.mark.parametrize("level", SCALED)
def test_a_group_added_late_brings_no_stale_scaled_gradient(level):
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model[1].parameters(), lr=1.0), opt_level=level, loss_scale=64.0
    )
    backward(model(x(1.0)).sum(), optimizer)  # fills the first layer's gradient too, which no optimizer clears
    optimizer.add_param_group({"params": model[0].parameters()})
    optimizer.zero_grad()
    backward(model(x(1.0)).sum(), optimizer)
    assert master_grads(optimizer) == [[[1.0]], [[1.0]]]


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_closure_that_calls_scale_loss_trains_where_nothing_is_scaled(level):
    model, optimizer = setup(level)

    def closure():
        optimizer.zero_grad()
        loss = model(x(0.25, 0.5)).sum()
        backward(loss, optimizer)
        return loss

    for number in (1, 2):
        optimizer.step(closure)
        assert model.weight.tolist() == [[1 - 0.25 * number, 2 - 0.5 * number]]


@pytest.mark.parametrize("level", EVERY)
def test_optimizers_that_share_a_parameter_unscale_it_once_and_skip_together(level):
    model = linear([[1.0]])
    model, optimizers = amp.initialize(model, [sgd(model), sgd(model)], opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(2):
        backward(model(x(0.25)).sum(), optimizers)
    assert master_grads(optimizers[0]) == master_grads(optimizers[1]) == [[[0.5]]]
    backward(model(x(math.inf)).sum(), optimizers)
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer._amp_stash.step_skipped
    assert model.weight.item() == 1.0


@pytest.mark.parametrize("level", EVERY)
def test_nested_bodies_unscale_once(level):
    netd, netg = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    (netd, netg), (optd, optg) = amp.initialize(
        [netd, netg], [sgd(netd), sgd(netg)], opt_level=level, num_losses=2, loss_scale=64.0
    )
    inputs = torch.tensor([[0.0], [2.0]])
    with (
        amp.scale_loss(netd(inputs).sum(), optd, 0) as first,
        amp.scale_loss(netg(inputs).sum(), optg, 1) as second,
    ):
        first.backward()
        second.backward()
    for optimizer in (optd, optg):
        assert list(amp.master_params(optimizer))[1].grad.item() == 2.0


def test_optimizers_of_two_trainings_in_one_body_are_unscaled_alike():
    first, second = linear([[1.0]]), linear([[1.0]])
    first, scaled = amp.initialize(first, sgd(first), opt_level="O2", loss_scale=64.0)
    second, unscaled = amp.initialize(second, sgd(second), opt_level="O5")
    loss = first(x(0.5)).sum() + second(x(0.5)).sum()
    backward(loss, [scaled, unscaled])
    assert master_grads(scaled) == master_grads(unscaled) == [[[0.5]]]


def test_an_optimizer_whose_sibling_moved_to_another_level_trains_on():
    netd, netg = linear([[1.0]]), linear([[1.0]])
    (netd, netg), (optd, _) = amp.initialize([netd, netg], [sgd(netd), sgd(netg)], opt_level="O2", loss_scale=64.0)
    netg, _ = amp.initialize(netg, sgd(netg), opt_level="O1")
    netg, _ = amp.initialize(netg, sgd(netg), opt_level="O2")
    backward(netd(x(0.5)).sum(), optd)
    assert master_grads(optd) == [[[0.5]]]


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("how", ["restore", "initialize"])
def test_delayed_gradients_are_unscaled_when_the_training_ends_early(level, how):
    model, optimizer = setup(level, loss_scale=64.0)
    backward(model(x(0.5, 1.0)).sum(), optimizer, delay_unscale=True)
    if how == "restore":
        amp.restore()
    else:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=32.0)
    assert master_grads(optimizer) == [[[0.5, 1.0]]]


@pytest.mark.parametrize("level", SCALED)
def test_a_delayed_iteration_is_not_disturbed_by_another_loss(level):
    models, optimizers = [linear([[1.0]]), linear([[1.0]])], []
    optimizers = [sgd(model) for model in models]
    (netd, netg), (optd, optg) = amp.initialize(models, optimizers, opt_level=level, num_losses=2, loss_scale=64.0)
    backward(netd(x(0.5)).sum(), optd, delay_unscale=True)
    optd._amp_stash.scalers[1].load_state_dict({"loss_scale": 1024.0, "unskipped": 0})
    backward(netd(netg(x(0.25))).sum(), optg, loss_id=1)
    backward(netd(x(0.25)).sum(), optd)
    assert master_grads(optd) == [[[0.75]]]


def test_clipping_looks_past_gradients_that_another_loss_left():
    models, optimizers = [linear([[1.0]]), linear([[1.0]])], []
    optimizers = [sgd(model) for model in models]
    (netd, netg), (optd, optg) = amp.initialize(models, optimizers, opt_level="O2", loss_scale=64.0)
    backward(netd(x(3.0)).sum(), optd)
    backward(netd(netg(x(1.0))).sum(), optg)
    assert clip_grad_norm_(netd.parameters(), 1.5).item() == 3.0
    assert master_grads(optd)[0][0][0] == pytest.approx(1.5, abs=1e-4)


@pytest.mark.parametrize("level", EVERY)
def test_clipping_with_a_norm_computed_before_acts_on_the_gradients_of_the_step(level):
    model, optimizer = setup(level)
    backward(model(x(3.0, 4.0)).sum(), optimizer)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(5.0))
    assert master_grads(optimizer)[0][0] == pytest.approx([0.6, 0.8], abs=1e-2)


@pytest.mark.parametrize("level", SCALED)
def test_two_losses_that_overflow_both_lower_their_scales(level):
    model, optimizer = setup(level, num_losses=2, loss_scale="dynamic", verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        for loss_id in (0, 1):
            backward(quarter(model, math.inf, 1.0), optimizer, loss_id=loss_id)
        optimizer.step()
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [2.0**13, 2.0**13]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "high"])
def test_a_loaded_scale_that_cannot_be_is_refused_before_anything_is_loaded(value):
    setup("O2", num_losses=2, loss_scale="dynamic")
    before = amp.state_dict()
    state = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": {"loss_scale": value, "unskipped": 0}}
    with pytest.raises(ValueError, match="load_state_dict: loss_scale is"):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


@pytest.mark.parametrize("level", SCALED)
def test_a_body_unscales_by_the_scale_that_it_multiplied_by(level):
    first, second = linear([[1.0]]), linear([[1.0]])
    (first, second), (opta, optb) = amp.initialize(
        [first, second], [sgd(first), sgd(second)], opt_level=level, verbosity=0
    )
    with amp.scale_loss(first(x(0.5)).sum() / 4, opta) as scaled_loss:
        backward(second(x(math.inf)).sum(), optb)  # moves the scale that both losses have
        scaled_loss.backward()
    assert master_grads(opta) == [[[0.125]]]

    backward(first(x(0.5)).sum() / 4, opta, delay_unscale=True)
    backward(second(x(math.inf)).sum(), optb)
    opta.step()
    assert first.weight.item() == 1 - 0.25


@pytest.mark.parametrize("level", SCALED)
def test_two_optimizers_that_waited_for_one_loss_move_its_scale_once(level):
    first, second = linear([[1.0]]), linear([[1.0]])
    models, optimizers = amp.initialize([first, second], [sgd(first), sgd(second)], opt_level=level)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1999}})
    backward((models[0](x(0.5)) + models[1](x(0.5))).sum(), optimizers, delay_unscale=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        assert model.weight.item() == 0.5
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 0}


@pytest.mark.parametrize("level", EVERY)
def test_a_body_inside_a_body_of_the_same_optimizer_is_refused(level):
    model, optimizer = setup(level, num_losses=2)
    with amp.scale_loss(model(x(0.5, 1.0)).sum(), optimizer) as outer:
        with pytest.raises(RuntimeError, match="body of another scale_loss"):
            backward(model(x(0.5, 1.0)).sum(), optimizer, loss_id=1)
        outer.backward()
    assert master_grads(optimizer) == [[[0.5, 1.0]]]


@pytest.mark.parametrize("level", EVERY)
def test_clipping_a_model_of_which_only_a_part_is_trained(level):
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    model, optimizer = amp.initialize(model, sgd(model[1]), opt_level=level, loss_scale=64.0)
    for _ in range(2):
        model.zero_grad()
        backward(model(x(3.0)).sum(), optimizer)
        assert clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(math.sqrt(18.0), abs=0.01)
        assert master_grads(optimizer) == [[[3.0]]]


def test_an_overflow_that_reaches_another_optimizer_is_known_to_it():
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    optimizers = [sgd(layer) for layer in model]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
    backward(model(x(math.inf)).sum(), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer._amp_stash.step_skipped
    assert [p.item() for p in model.parameters()] == [1.0, 1.0]


@pytest.mark.parametrize("level", EVERY)
def test_optimizers_that_share_a_parameter_both_step(level):
    model = linear([[1.0]])
    model, optimizers = amp.initialize(model, [sgd(model), sgd(model)], opt_level=level, loss_scale=64.0)
    backward(model(x(0.25)).sum(), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert model.weight.item() == 0.5
    before = model.weight.item()
    for optimizer in optimizers if level in ("O2", "O5") else ():  # no later step takes what these were for
        optimizer.step()
    assert model.weight.item() == before


# A step in the body


REFUSED = {"O1": "scaled and unchecked", "O2": "scaled and unchecked", "O5": "on the low-precision parameters"}


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("catch", ["outside", "inside"])
def test_a_step_inside_the_body_is_refused_where_gradients_are_not_ready(level, catch):
    model, optimizer = setup(level, num_losses=2)
    backward(model(x(0.25, 0.5)).sum(), optimizer, loss_id=1)
    refused = pytest.raises(RuntimeError, match=rf"SGD\.step: called in the body of scale_loss, .*{REFUSED.get(level)}")
    if level not in REFUSED:
        with amp.scale_loss(model(x(0.25, 0.5)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
        assert model.weight.tolist() == [[0.5, 1.0]]
        return
    scales = amp.state_dict()
    if catch == "outside":
        with refused, amp.scale_loss(model(x(1.0, 1.0)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
    else:
        with amp.scale_loss(0 * model(x(1.0, 1.0)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            with refused:
                optimizer.step()
    assert model.weight.tolist() == [[1.0, 2.0]] and amp.state_dict() == scales
    assert master_grads(optimizer) == [[[0.25, 0.5]]]
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped and model.weight.tolist() == [[0.75, 1.5]]


def test_a_step_inside_the_body_is_refused_at_o3_where_the_loss_is_scaled():
    model, optimizer = setup("O3", loss_scale=64.0)
    with (
        pytest.raises(RuntimeError, match="scaled and unchecked"),
        amp.scale_loss(model(x(0.5, 0.5)).sum(), optimizer) as s,
    ):
        s.backward()
        optimizer.step()
    assert model.weight.tolist() == [[1.0, 2.0]] and model.weight.grad is None


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("whose", ["all", "first"])
def test_optimizers_that_step_in_hooks_of_backward(level, whose):
    """Right where nothing is scaled or cast; else an error, and the next iteration, without the hooks, is right."""
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    optimizers = [sgd(layer) for layer in model]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale=64.0 if level in SCALED else None)
    owner = {id(layer.weight): optimizer for layer, optimizer in zip(model, optimizers, strict=True)}
    hooks = [p.register_post_accumulate_grad_hook(lambda p: owner[id(p)].step()) for p in model.parameters()]
    mine = optimizers if whose == "all" else optimizers[0]
    loss = model(x(0.5)).sum()
    if level in ("O0", "O3", "O4"):
        backward(loss, mine)
        assert [p.item() for p in model.parameters()] == [0.5, 0.5]
        return
    with pytest.raises(RuntimeError, match=r"SGD\.step: called in the body of scale_loss"):
        backward(loss, mine)
    for hook in hooks:
        hook.remove()
    assert [p.item() for p in model.parameters()] == [1.0, 1.0]
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(model(x(0.5)).sum(), optimizers)
    for optimizer in optimizers:
        optimizer.step()
        assert not optimizer._amp_stash.step_skipped
    assert [p.item() for p in model.parameters()] == [0.5, 0.5]


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("delayed", [False, True])
def test_a_sibling_may_not_step_in_the_body_where_it_may_be_filled(level, delayed):
    netd, netg = linear([[1.0]]), linear([[1.0]])
    (netd, netg), (optd, optg) = amp.initialize(
        [netd, netg], [sgd(netd), sgd(netg)], opt_level=level, num_losses=2, loss_scale=64.0
    )
    backward(netd(x(0.5)).sum(), optd, delay_unscale=delayed)
    with amp.scale_loss(netd(netg(x(0.25))).sum(), optg, loss_id=1) as scaled_loss:
        if level in ("O2", "O5") and not delayed:  # its gradients are its masters', which this body does not touch
            scaled_loss.backward()
            optd.step()
        else:
            with pytest.raises(RuntimeError, match="its own gradients are away until that ends"):
                optd.step()
    if delayed or level not in ("O2", "O5"):
        optd.step()
    assert netd.weight.item() == 0.5


@pytest.mark.parametrize("level", EVERY)
def test_unrelated_optimizers_may_step_in_the_body(level):
    model, optimizer = setup(level)
    other, other_optimizer = setup("O0")
    plain = linear([[1.0]])
    plain_optimizer = sgd(plain)
    backward(other(x(0.5, 0.5)).sum(), other_optimizer)
    plain(x(0.5)).sum().backward()
    with amp.scale_loss(model(x(0.25, 0.5)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        other_optimizer.step()
        plain_optimizer.step()
    optimizer.step()
    assert model.weight.tolist() == [[0.75, 1.5]] and other.weight.tolist() == [[0.5, 1.5]]
    assert plain.weight.item() == 0.5


@pytest.mark.parametrize("level", EVERY)
def test_an_optimizer_that_torch_applies_in_backward_is_refused_where_gradients_are_not_ready(level):
    optim = pytest.importorskip("torch.distributed.optim", reason="this torch was built without distributed")
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    optimizer = sgd(model[0])
    optim._apply_optimizer_in_backward(torch.optim.SGD, model[1].parameters(), {"lr": 1.0})
    if level in ("O0", "O4"):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        backward(model(x(0.5)).sum(), optimizer)
        optimizer.step()
        assert [p.item() for p in model.parameters()] == [0.5, 0.5]
        return
    with pytest.raises(ValueError, match=r"initialize: an optimizer steps parameter '1\.weight' of Sequential during"):
        amp.initialize(model, optimizer, opt_level=level)
    assert type(optimizer) is torch.optim.SGD and model[1].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_body_inside_of_one_whose_backward_has_reached_its_parameters(level):
    models = [linear([[1.0]]), linear([[1.0]])]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    (first, second), optimizers = amp.initialize(models, optimizers, opt_level=level, loss_scale=128.0)
    ones = torch.ones(1, 1)
    with amp.scale_loss(second(first(ones)).sum(), optimizers[0]) as scaled_loss:
        scaled_loss.backward()
        if level == "O1":  # at O2 what other losses leave on a cast model is dropped
            with pytest.raises(RuntimeError, match="has already reached parameters of this call's optimizers"):
                backward(second(2 * ones).sum(), optimizers[1])
            optimizers[1].zero_grad()
        backward(second(2 * ones).sum(), optimizers[1])
    assert [p.grad.tolist() for o in optimizers for p in amp.master_params(o)] == [[[1.0]], [[2.0]]]
