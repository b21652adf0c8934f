"""Steps inside of the body of `scale_loss`, and in hooks of backward."""

from __future__ import annotations

import pytest
import torch
from small_trainings import EVERY, LEVELS_WITH_MASTERS, SCALED, master_grads, setup, sgd, x
from torch import nn
from training import backward, linear

from amp_patch import amp

REFUSED = {
    level: "scaled and unchecked" if level in SCALED else "on the low-precision parameters"
    for level in EVERY
    if level in SCALED or level in LEVELS_WITH_MASTERS
}


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
    if level not in REFUSED:
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
        if (
            level in LEVELS_WITH_MASTERS and not delayed
        ):  # its gradients are its masters', which this body does not touch
            scaled_loss.backward()
            optd.step()
        else:
            with pytest.raises(RuntimeError, match="its own gradients are away until that ends"):
                optd.step()
    if delayed or level not in LEVELS_WITH_MASTERS:
        optd.step()
    assert netd.weight.item() == 0.5


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
