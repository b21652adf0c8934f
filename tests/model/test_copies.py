"""Copies of cast models: FP32 weights with the masters' values, which compute in the level's type."""

from __future__ import annotations

import copy

import pytest
import torch
import training
from interrupts import Interrupt
from small_trainings import CAST, MASTERED, start_kind, values
from torch import nn
from training import DUPLICATES, convnet, images, masters_of

from amp_patch import amp


def trained(kind, steps=3):
    model, optimizer = start_kind(kind)
    training.train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("duplicate", DUPLICATES)
@pytest.mark.parametrize("kind", MASTERED)
def test_a_copy_of_the_model_alone_has_the_masters_values(kind, duplicate):
    model, optimizer = trained(kind)
    masters = masters_of(optimizer)
    twin = duplicate(model)
    state = twin.state_dict()
    assert training.same([state[name] for name, _ in model.named_parameters()], masters)
    assert training.same(values(twin), masters) and training.same(values(amp.fp32_copy(twin)), masters)
    assert training.same(masters_of(optimizer), masters)


# --- what a copy computes ---------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.full((8,), 1.1))
        self.register_buffer("shift", torch.full((8,), 0.1))

    def forward(self, images):
        self.kind = self.scale.dtype
        tokens = (images.flatten(1)[:, :4].abs() * 3).long().clamp(max=6)
        hidden, _ = self.lstm(self.table(tokens))
        return self.head(self.norm(hidden[:, -1]) * self.scale + self.shift)[:, :5]


def recurrent():
    torch.manual_seed(0)
    return Recurrent()


MODELS = {"convolutions": convnet, "recurrent, tied": recurrent}


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("kind", CAST)
def test_a_copy_gives_what_a_model_of_the_level_gives_with_its_weights(kind, make):
    model, optimizer = start_kind(kind, MODELS[make]())
    training.train(model, optimizer, 2)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in average.parameters():
            p.mul_(1.001)
    plain = MODELS[make]()
    plain.load_state_dict({name: value.clone() for name, value in average.state_dict().items()})
    other, _ = start_kind(kind, plain)
    inputs, _ = images(0)
    for mode in (True, False):
        average.train(mode)
        other.train(mode)
        with torch.no_grad():
            assert torch.equal(average(inputs), other(inputs))
    assert {p.dtype for p in average.parameters()} == {torch.float32}
    if make != "convolutions":
        assert average.kind is other.scale.dtype and average.head.weight is average.table.weight


@pytest.mark.parametrize("event", ["call", pytest.param("c_return", marks=pytest.mark.slow)])
def test_an_interrupt_at_any_call_leaves_the_copy_whole(event):
    model, _ = start_kind("O5", nn.Sequential(nn.Linear(1, 1)))
    average = copy.deepcopy(model)
    inputs = torch.ones(1, 1)
    with torch.no_grad():
        expected, before = average(inputs), list(average.parameters())
        calls = Interrupt(event=event)(lambda: average(inputs)).count
        for at in range(1, calls + 1):
            Interrupt(at, event)(lambda: average(inputs))
            assert all(mine is known for mine, known in zip(average.parameters(), before, strict=True)), at
            assert torch.equal(average(inputs), expected)
    assert calls > 20


# --- copies that go on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CAST)
def test_a_copy_of_what_holds_the_model_is_fp32(kind):
    model, optimizer = trained(kind)
    held = copy.deepcopy(nn.ModuleDict({"net": model}))
    assert training.same(values(held.net), [p.float() for p in masters_of(optimizer)])
    assert torch.equal(held.net.eval()(images(0)[0]), model.eval()(images(0)[0]))


@pytest.mark.parametrize("kind", CAST)
def test_a_conversion_of_a_copy_is_refused_with_the_ways_out(kind):
    model, _ = start_kind(kind)
    average = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"amp\.fp32_copy"):
        average.half()
    assert average.to("cpu") is average


@pytest.mark.parametrize("kind", CAST)
def test_a_copy_is_compiled_in_one_graph(kind, fresh_compiler):
    model, _ = start_kind(kind)
    average = copy.deepcopy(model).eval()
    compiled = torch.compile(average, backend="eager", fullgraph=True)
    inputs = images(0)[0]
    with torch.no_grad():
        for factor in (1.0, 1.5):
            for p in average.parameters():
                p.mul_(factor)
            assert torch.equal(compiled(inputs), average(inputs))
    assert all(isinstance(p, nn.Parameter) and p.dtype is torch.float32 for p in average.parameters())
