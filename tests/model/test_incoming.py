"""Models in low precision at `initialize`: they train as `model.float()` would, in less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from crossed import crossed
from low_models import CAST, LowNet, every_half, iterate_low, loss_of, net
from split_masters import MAKERS
from torch import nn
from training import LEVELS, SGD, backward, linear, same, through_pickle, trained

from amp_patch import amp
from amp_patch.masters.masters import master_of
from amp_patch.support import tree


def options_of(level: str) -> dict[str, Any]:
    """Of `initialize`, for a level, or for O5 with split masters."""
    return {"opt_level": level[:2], "verbosity": 0, "master_weights": "split" if level == "O5, split" else None}


def types(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


def states(optimizer: Any) -> list[torch.Tensor]:
    return tree.tensors([optimizer.state.get(p, {}) for p in amp.master_params(optimizer)])


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


@crossed({"level": ["O1", "O2", "O4", "O5", "O5, split"], "make": MAKERS}, every_half, meet=1)
def test_a_training_has_the_bits_of_one_of_the_model_in_fp32(level, make, half):
    options = options_of(level)
    models = [net(half), net(half).float()]
    if level in ("O1", "O4"):  # where frozen ones are cast is another thing
        for model in models:
            model.frozen.float()
    pairs = [amp.initialize(model, make(trained(model)), **options) for model in models]
    losses = [iterate_low(*pair) for pair in pairs]
    (model, optimizer), (wide, other) = pairs
    assert losses[0] == losses[1]
    assert same(amp.master_params(optimizer), amp.master_params(other))
    assert same(states(optimizer), states(other))
    assert same(model.parameters(), wide.parameters()) and types(model)["norm.running_var"] is torch.float32
    assert same(model.norm.buffers(), wide.norm.buffers()) and same(model.table.buffers(), wide.table.buffers())
    assert torch.equal(model.offset, wide.offset)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("options", [{}, {"master_weights": "split"}], ids=["whole", "split"])
def test_muon_keeps_the_momentum_of_bf16_weights(options):
    """Torch 2.13 normalizes it in place where the weights are BF16: 0.25 each time here."""
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1, momentum=0.5, nesterov=False)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)
    for momentum in (4.0, 6.0, 7.0):
        optimizer.zero_grad()
        backward(model(torch.full((4, 4), 2.0)).sum(), optimizer)
        optimizer.step()
        (master,) = amp.master_params(optimizer)
        assert optimizer.state[master]["momentum_buffer"].unique().tolist() == [momentum]


@every_half
def test_at_o0_nothing_is_changed(half):
    model = net(half)
    before, was = types(model), [p.detach().clone() for p in model.parameters()]
    amp.initialize(model, SGD(model.parameters()), opt_level="O0")
    assert type(model) is LowNet and types(model) == before and same(model.parameters(), was)
    amp.restore()
    assert types(model) == before and same(model.parameters(), was)


@every_half
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_frozen_weight_has_no_master_and_keeps_its_memory(level, half):
    model = net(half)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    assert master_of(model.frozen.weight) is None and model.frozen.weight.dtype is CAST[level]
    assert model.frozen.weight in set(amp.master_params(optimizer))
    if half is CAST[level]:
        kept = [name for name, p in model.named_parameters() if p.data_ptr() == places[name]]
        assert "frozen.weight" in kept and "enter.weight" in kept and "norm.weight" not in kept
    state = model.state_dict()
    assert state["frozen.weight"].dtype is CAST[level] and state["enter.weight"].dtype is torch.float32
    twin = copy.deepcopy(model)
    assert twin.frozen.weight.dtype is CAST[level] and twin.enter.weight.dtype is torch.float32
    iterate_low(model, optimizer, 3)


# ---------------------------------------------------------------------------------------------------------------------
# The way back


@pytest.mark.parametrize("by", [copy.deepcopy, through_pickle], ids=["copy", "pickle"])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_copy_that_is_initialized_again_knows_what_came_low(level, by):
    """The frozen layer came in BF16, and another one, frozen too, in FP32."""
    model = net(torch.bfloat16)
    model.shared.float().requires_grad_(False)
    pair = amp.initialize(model, SGD(trained(model)), opt_level=level, verbosity=0)
    iterate_low(*pair, 2)
    model, optimizer = by(pair)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    iterate_low(model, optimizer, 2)
    state = model.state_dict()
    assert state["shared.weight"].dtype is state["enter.weight"].dtype is torch.float32
    assert state["frozen.weight"].dtype is CAST.get(level, torch.bfloat16)
    amp.restore()
    assert model.frozen.weight.dtype is torch.bfloat16 and model.shared.weight.dtype is torch.float32


@crossed({"level": LEVELS}, pytest.mark.parametrize("split", [False, True], ids=["whole", "split"]), every_half)
def test_restore_restores_the_incoming_type(level, split, half):
    model = net(half)
    before, frozen = types(model), model.frozen.weight.detach().clone()
    options = {"master_weights": "split"} if split and level == "O5" else {}
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    iterate_low(model, optimizer, 3)
    masters = {id(p): (p if (m := master_of(p)) is None else m).detach().clone() for p in model.parameters()}
    backward(loss_of(model, 9), optimizer)
    amp.restore()
    assert type(model) is LowNet and types(model) == before
    assert torch.equal(model.frozen.weight, frozen) or (half, CAST.get(level)) == (torch.float16, torch.bfloat16)
    assert all(torch.equal(p, masters[id(p)].to(half)) for p in model.parameters() if p.requires_grad)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert {p.grad.dtype for p in trained(model)} == {half}
    amp.restore()
    assert types(model) == before


def test_a_value_that_the_type_cannot_hold_any_more_leaves_its_weight_fp32():
    model = linear([[60000.0]]).half()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e5), opt_level="O5")
    backward(-model(torch.ones(1, 1)).sum(), optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"restore: parameter 'weight' came in torch.float16.* stays FP32"):
        amp.restore()
    assert model.weight.dtype is torch.float32 and model.weight.item() == 160000.0


def test_frozen_fp16_of_65504_survives_bf16():
    model = linear([[65504.0]]).half().requires_grad_(False)
    amp.initialize(model, opt_level="O5")
    assert model.weight.item() == 65536.0
    amp.restore()
    assert model.weight.dtype is torch.float16 and model.weight.item() == 65504.0


@crossed({"then": LEVELS, "first": LEVELS}, every_half)
def test_a_second_call_keeps_the_values_and_settles(first, then, half):
    model = net(half)
    before = types(model)
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level=first, verbosity=0)
    iterate_low(model, optimizer, 3)
    values = {n: (p if (m := master_of(p)) is None else m).detach().float() for n, p in model.named_parameters()}
    values = {name: value.clone() for name, value in values.items()}
    amp.initialize(model, optimizer, opt_level=then, verbosity=0)
    for name, param in model.named_parameters():
        master = master_of(param)
        exact = param.detach().float() if master is None else master.detach()
        low = CAST.get(then) if master is None and (then == "O3" or not param.requires_grad) else None
        assert torch.equal(exact, values[name] if low is None else values[name].to(param.dtype).float()), name
    again = types(model), [p.data_ptr() for p in model.parameters()]
    if then != "O3":
        amp.initialize(model, optimizer, opt_level=then, verbosity=0)
        assert again == (types(model), [p.data_ptr() for p in model.parameters()])
    iterate_low(model, optimizer, 2)
    amp.restore()
    assert types(model) == before
