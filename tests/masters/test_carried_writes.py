"""Arithmetic on weights that is below the rounding of their type, `p.data.mul_(1 - 1e-4)`: it reaches the master."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import SGD, backward

from amp_patch import amp
from amp_patch.masters.masters import master_of

LEVELS = ["O2", "O5", "O5+split"]
FACTOR = 1 - 1e-4


def multiplied(data: Tensor) -> None:
    data *= FACTOR


# What is done to a weight, as it is written in FP32 scripts. None is seen in a weight of 16 bits.
WRITES = {
    "mul_": lambda x: x.mul_(FACTOR),
    "*=": multiplied,
    "add_": lambda x: x.add_(x.new_full(x.shape, 1e-5)),
    "sub_ with alpha": lambda x: x.sub_(torch.ones_like(x), alpha=1e-5),
    "addcmul_": lambda x: x.addcmul_(torch.ones_like(x), torch.ones_like(x), value=1e-5),
    "lerp_": lambda x: x.lerp_(torch.zeros_like(x), 1e-4),
    "div_": lambda x: x.div_(1 + 1e-4),
}


def made(level: str, device: str = "cpu", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(device)
    for param in model.parameters():
        param.data.random_(72, 96).div_(64)  # numbers of each type, without a power of two, where its steps change
    return amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0, loss_scale=1.0, **options)


def values(optimizer) -> list[Tensor]:
    return [master.detach().clone() for master in amp.master_params(optimizer)]


def same(these, those) -> bool:
    return all(map(torch.equal, these, those))


@crossed({"device": DEVICES, "level": LEVELS, "write": list(WRITES), "of": [".data", "no_grad"]}, meet=2)
def test_a_write_below_the_rounding_is_exact_in_the_master(level, write, of, device):
    model, optimizer = made(level, device)
    model(torch.ones(2, 8, device=device))
    expected, weights = values(optimizer), [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        for param, value in zip(model.parameters(), expected, strict=True):
            with torch.no_grad():
                WRITES[write](param.data if of == ".data" else param)
            WRITES[write](value)
    assert same([param.detach() for param in model.parameters()], weights)
    assert same(values(optimizer), expected) and not same(expected, [w.float() for w in weights])
    backward(model(torch.ones(2, 8, device=device)).sum() * 0, optimizer)
    optimizer.step()
    assert same(values(optimizer), expected)


@pytest.mark.parametrize("level", [*LEVELS, "O1", "O3"])
def test_vectors_of_the_parameters_are_those_of_the_masters(level):
    model, optimizer = made(level)
    vector = parameters_to_vector(model.parameters())
    assert vector.dtype is (torch.float16 if level == "O3" else torch.float32)
    assert torch.equal(vector, torch.cat([value.flatten() for value in values(optimizer)]))
    vector_to_parameters(vector + 1e-5, model.parameters())
    assert torch.equal(parameters_to_vector(model.parameters()), vector + 1e-5)
    kinds = {"O1": torch.float32, "O2": torch.float16, "O3": torch.float16}
    assert {param.dtype for param in model.parameters()} == {kinds.get(level, torch.bfloat16)}
    with pytest.raises(TypeError):
        vector_to_parameters(None, model.parameters())
    model[0].weight.data.fill_(2.0)
    if level != "O5+split":  # an edit of its weight leaves the low half
        assert parameters_to_vector([model[0].weight]).unique().tolist() == [2.0]
    if level == "O5":  # a vector in low precision changes what differs from the rounded masters
        before = values(optimizer)
        vector_to_parameters(parameters_to_vector(model.parameters()).bfloat16(), model.parameters())
        parameters_to_vector(model.parameters())
        assert same(values(optimizer)[1:], before[1:]) and {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_that_is_copied_away_and_back_keeps_its_precision(level):
    model, optimizer = made(level)
    expected, backup = values(optimizer), [param.data.clone() for param in model.parameters()]
    for param, value in zip(model.parameters(), backup, strict=True):
        param.data.copy_(value * 2)
        param.data.copy_(value)
        param.data.mul_(torch.ones_like(value))  # a mask
    assert same(values(optimizer), expected)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_edit_before_and_a_written_master_count(level):
    model, optimizer = made(level)
    weight, master = model[0].weight, master_of(model[0].weight)
    weight.data.fill_(1.0)
    weight.data.add_(1e-5)
    assert torch.equal(values(optimizer)[0], torch.full((8, 8), 1.0).add_(1e-5))
    master.data.fill_(2.0)
    weight.data.add_(weight.data, alpha=1e-5)
    assert torch.equal(values(optimizer)[0], torch.full((8, 8), 2.0).add_(2.0, alpha=1e-5))


@pytest.mark.parametrize("level", LEVELS)
def test_data_behaves_as_a_tensor_that_shares_the_memory(level):
    model, _ = made(level)
    weight = model[0].weight
    data = weight.data
    assert isinstance(data, Tensor) and data.data_ptr() == weight.data_ptr() and not data.requires_grad
    assert all(type(plain) is Tensor for plain in (data + 1, data.clone(), data[0], data.T, copy.deepcopy(data)))
    assert type(pickle.loads(pickle.dumps(data))) is Tensor
    torch.save({"weight": data}, file := io.BytesIO())
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=True)["weight"], data)
    assert type(nn.Parameter(data)) is nn.Parameter and repr(data).startswith("tensor([[")
    data[0] = 3.0
    assert weight[0].tolist() == [3.0] * 8
    weight.data = data.clone()
    before = data.clone()
    data.mul_(2)  # no longer the weight's memory
    assert torch.equal(weight, before)


@pytest.mark.parametrize("level", LEVELS)
def test_autograd_sees_what_it_sees_in_torch(level):
    model, optimizer = made(level)
    loss = model(torch.ones(2, 8)).sum()
    model[1].weight.data.mul_(FACTOR)
    backward(loss, optimizer)
    loss = model(torch.ones(2, 8)).sum()
    with torch.no_grad():
        model[1].weight.mul_(FACTOR)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(loss, optimizer)
    before = values(optimizer)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError):
        model[1].weight.data.mul_(torch.ones(3))
    assert same(values(optimizer), before)


def test_a_step_takes_torch_s_own_methods_and_restore_gives_all_back():
    _, optimizer = made("O5")
    assert type(next(amp.master_params(optimizer))).mul_ is Tensor.mul_
    amp.restore()
    assert "data" not in vars(nn.Parameter) and "mul_" not in vars(nn.Parameter)
    assert torch.nn.utils.parameters_to_vector.__module__ == "torch.nn.utils.convert_parameters"
    assert not hasattr(torch.nn.utils.parameters_to_vector, "func")


@pytest.mark.program
@pytest.mark.parametrize("level", LEVELS)
def test_compiled_code_reads_data(level, fresh_compiler):
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.weight.data.sum()

    model = amp.initialize(Reads(4, 4), opt_level="O2") if level == "O2" else None
    if model is None:
        model = Reads(4, 4)
        model, _ = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0)
    x = torch.ones(2, 4)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
