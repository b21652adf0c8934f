"""Averages that a script keeps in a deepcopy of a cast model (MoCo, BYOL, DINO, diffusion) are FP32's."""

from __future__ import annotations

import copy

import pytest
import torch
import training
from crossed import crossed
from small_trainings import CAST, MASTERED, start_kind, values
from torch import nn
from training import backward, images, linear, masters_of

from amp_patch import amp

M = 0.95


def each(blend):
    def update(average, model):
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            blend(a, p)

    return update


def moco(a, p):
    a.data = a.data * M + p.data * (1.0 - M)


def edm(a, p):
    a.copy_(p.detach().lerp(a, M))


def in_place_operators(a, p):
    a *= M
    a += (1 - M) * p


def foreach(average, model):
    torch._foreach_mul_(list(average.parameters()), M)
    torch._foreach_add_(list(average.parameters()), list(model.parameters()), alpha=1 - M)


def foreach_lerp(average, model):
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight=1 - M)


def state_dicts(average, model):
    for a, p in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        a.lerp_(p, 1 - M) if a.is_floating_point() else a.copy_(p)


def named(average, model):
    own = dict(average.named_parameters())
    for name, p in model.named_parameters():
        own[name].mul_(M).add_(p.data, alpha=1 - M)


def through_a_state_dict(average, model):
    old, new = average.state_dict(), model.state_dict()
    average.load_state_dict({k: M * v + (1 - M) * new[k] if v.is_floating_point() else v for k, v in old.items()})


BLENDS = {
    "lerp_": each(lambda a, p: a.lerp_(p, 1 - M)),
    "lerp_ of data": each(lambda a, p: a.data.lerp_(p.data, 1 - M)),
    "lerp_ by keyword": each(lambda a, p: a.detach().lerp_(end=p.detach(), weight=1 - M)),
    "diffusion": each(lambda a, p: a.detach().mul_(M).add_(p, alpha=1 - M)),
    "DINO": each(lambda a, p: a.data.mul_(M).add_((1 - M) * p.detach().data)),
    "MoCo": each(moco),
    "BYOL": each(lambda a, p: a.data.copy_(a.data * M + (1 - M) * p.data)),
    "EDM": each(edm),
    "operators": each(in_place_operators),
    "foreach": foreach,
    "foreach lerp": foreach_lerp,
    "state dicts": state_dicts,
    "names": named,
    "load_state_dict": through_a_state_dict,
}


@crossed({"kind": MASTERED, "blend": list(BLENDS)}, meet=1)
def test_an_average_in_a_deepcopy_is_fp32s(kind, blend):
    """The tolerance is 1 % of the movement, because the blended weights are rounded."""
    model, optimizer = start_kind(kind)
    average = copy.deepcopy(model).requires_grad_(False)
    begin = masters_of(optimizer)
    expected = [p.clone() for p in begin]
    for number in range(30):
        inputs, targets = images(number)
        backward(nn.functional.cross_entropy(model(inputs), targets), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            BLENDS[blend](average, model)
            expected = [e.mul(M).add(p, alpha=1 - M) for e, p in zip(expected, masters_of(optimizer), strict=True)]
            average(inputs)
    found = values(average)
    assert all(p.dtype is torch.float32 for p in found)
    moved, off = (
        torch.cat([(a - b).flatten() for a, b in zip(left, expected, strict=True)]).norm() for left in (begin, found)
    )
    assert off < 0.01 * moved
    state = average.state_dict()
    assert training.same([state[name] for name, _ in average.named_parameters()], found)


def test_an_average_of_o3s_weights_is_fp32():
    model, _ = start_kind("O3", linear([[1.0]]))
    average = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.fill_(2.0)
        for _ in range(4):
            average.weight.lerp_(model.weight, 2.0**-14)
    assert average.weight.item() == pytest.approx(2.0 - (1 - 2.0**-14) ** 4, abs=1e-6)


@pytest.mark.parametrize("kind", CAST)
def test_lerp_promotes_as_add_does_until_restore(kind):
    before = torch.Tensor.lerp_, torch.Tensor.lerp, torch._foreach_lerp_, torch._foreach_lerp
    start_kind(kind)
    full, low = torch.zeros(2), torch.ones(2, dtype=torch.bfloat16)
    assert full.lerp(low, 0.5).tolist() == [0.5, 0.5] and low.lerp(full, 0.5).dtype is torch.float32
    assert low.lerp(low, 0.5).dtype is torch.bfloat16
    assert torch._foreach_lerp([full, low], [low, low], 0.5)[0].dtype is torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        low.lerp_(full, 0.5)
    with pytest.raises(RuntimeError, match="dtype"):
        full.lerp_(full.double(), 0.5)
    with pytest.raises((RuntimeError, ValueError)):
        torch._foreach_lerp_([full], [low, low], 0.5)
    amp.restore()
    assert before == (torch.Tensor.lerp_, torch.Tensor.lerp, torch._foreach_lerp_, torch._foreach_lerp)
