"""`amp.fp32_copy`: a plain FP32 model with the values that are trained."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import training
from crossed import crossed
from python_forks import python
from torch import nn
from training import LEVELS, SGD, backward, convnet, linear

from amp_patch import amp


@pytest.mark.parametrize("level", LEVELS)
def test_fp32_copy_is_a_plain_model_with_the_masters_values(level):
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32="head")
    training.train(model, optimizer, 2)
    plain = amp.fp32_copy(model)
    if level not in ("O1", "O4"):  # whose casts hold in the whole process, and are held off
        assert [type(m) for m in plain.modules()] == [type(m) for m in convnet().modules()]
    assert training.same(
        [p.detach() for p in plain.parameters()], [p.detach().float() for p in amp.master_params(optimizer)]
    )
    assert not any("_amp" in vars(m) for m in plain.modules())
    assert isinstance(model, training.ConvNet) and ("_amp" in vars(model)) is (level != "O0")
    with torch.no_grad():
        plain.head.weight.zero_()
    assert model.state_dict()["head.weight"].any()


class Generating(nn.Module):
    """Functions, methods and operators that O1 casts, in forward and in methods beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.norm = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.body(self.first(x))) @ self.first.weight

    def generate(self, x):
        return self.first(x).matmul(self.first.weight)


PRECISE = torch.linspace(-1, 1, 12).reshape(3, 4) * 1.001


def generating(level):
    """A model in training at `level`, its FP32 copy, and what the copy gives when there is no training."""
    torch.manual_seed(0)
    model = Generating()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    backward(model(PRECISE).float().sum() / 8, optimizer)
    optimizer.step()
    amp.initialize(linear([[1.0]]), opt_level="O1")  # the newest O1 training need not be the model's own
    plain = amp.fp32_copy(model)
    with torch.no_grad():
        twin = Generating()
        twin.load_state_dict(plain.state_dict())
        with amp.disable_casts():
            expected = [twin(PRECISE), twin.generate(PRECISE), twin.body(PRECISE)]
        assert not torch.equal(twin(PRECISE), expected[0])  # a bystander is cast
    return model, plain, expected


def in_eager(plain):
    with torch.no_grad():
        return [plain(PRECISE), plain.generate(PRECISE), plain.body(PRECISE)]


@pytest.mark.parametrize("level", LEVELS)
def test_an_fp32_copy_runs_in_fp32_while_the_training_lives(level):
    _, plain, expected = generating(level)
    amp.initialize(linear([[1.0]]), opt_level="O4")  # a later one neither
    assert isinstance(plain, Generating) and type(plain).__qualname__ == "Generating"
    assert (
        plain.state_dict().keys() == Generating().state_dict().keys()
        and vars(plain).keys() == vars(Generating()).keys()
    )
    for each in (plain, copy.deepcopy(plain), copy.deepcopy({"of it": copy.deepcopy(plain)})["of it"]):
        assert training.same(in_eager(each), expected)
    assert type(pickle.loads(pickle.dumps(plain))) is Generating
    with amp.autocast(dtype=torch.bfloat16):  # the caller's own word
        assert plain.generate(PRECISE).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain.generate(PRECISE).dtype is torch.bfloat16
    assert training.same(in_eager(plain), expected)
    amp.restore()
    assert type(plain) is Generating and type(plain.body) is nn.Sequential
    assert training.same(in_eager(plain), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@crossed({"level": ["O1", "O2"], "how": ["trace", "script", "export", "compile"]}, meet=1)
def test_an_fp32_copy_is_exported_in_fp32_while_the_training_lives(level, how, fresh_compiler):
    _, plain, expected = generating(level)
    with torch.no_grad():
        if how == "export":
            made = torch.export.export(plain, (PRECISE,), strict=False)  # torch 2.6's default is True
            text = str(made.graph)
            made = made.module()
        elif how == "compile":
            graphs = []
            made = torch.compile(plain, backend=lambda graph, inputs: (graphs.append(graph), graph)[1], fullgraph=True)
            made(PRECISE)
            (graph,) = graphs
            text = graph.code
        else:
            made = torch.jit.trace(plain, PRECISE) if how == "trace" else torch.jit.script(plain)
            text = str(made.inlined_graph)
        assert not any(word in text for word in ("float16", "Half", "bfloat16", "BFloat16", "aten::to", "aten.to"))
        amp.restore()
        assert torch.equal(made(PRECISE), expected[0])


def test_a_pickled_fp32_copy_needs_no_amp_patch(tmp_path):
    amp.initialize(linear([[1.0]]), opt_level="O1")
    model = amp.initialize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), opt_level="O1")
    torch.save(amp.fp32_copy(model), tmp_path / "copy")
    code = (
        "import sys, torch; sys.modules['amp_patch'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "assert type(model) is torch.nn.Sequential and model(torch.ones(1, 2)).dtype is torch.float32"
    )
    done = python("-c", code, tmp_path / "copy")
    assert done.returncode == 0, done.stderr
