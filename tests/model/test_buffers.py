"""Buffers of cast models: tables stay FP32, exact values come back, and averages that would stand still are named."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import training
from conftest import DEVICES
from torch import nn
from training import SGD

from amp_patch import amp

CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
FREQUENCIES = 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)


class Rotary(nn.Module):
    """The rotary table of language models: cosines of positions times frequencies, in the type of `x`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", FREQUENCIES.clone(), persistent=False)

    def forward(self, x, positions):
        self.ran = self.frequencies.dtype
        angles = positions[:, None].float() * self.frequencies
        return angles.cos().to(x.dtype), angles.sin()


class Table(nn.Module):
    """A module with a parameter and a table."""

    def __init__(self, values):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", values.clone())

    def forward(self, x):
        return self.linear(x) * self.scale + self.table


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rotary = Table(FREQUENCIES), Rotary()

    def forward(self, x):
        x = self.table(x)
        cos, sin = self.rotary(x, torch.arange(len(x), device=x.device) + 1000)
        self.seen = cos, sin, x.detach()
        return x * cos + sin


def cast_model(level="O5", device="cpu", **options):
    torch.manual_seed(0)
    model = Model().to(device)
    return amp.initialize(model, SGD(model.parameters()), opt_level=level, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", CAST)
def test_a_module_with_buffers_and_no_parameters_computes_in_fp32_and_fits_outside(level, device):
    model, _ = cast_model(level, device)
    model(torch.ones(3, 4, device=device))
    cos, sin, x = model.seen
    assert model.rotary.frequencies.dtype is model.rotary.ran is torch.float32
    assert cos.dtype is sin.dtype is x.dtype is model.table.table.dtype is CAST[level]
    exact = ((torch.arange(3, device=device) + 1000.0)[:, None] * FREQUENCIES.to(device)).cos()
    assert torch.equal(cos, exact.to(CAST[level]))


class Normalized(nn.Module):
    """A container: its children have the parameters, itself it has only buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 0.1))
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.norm, self.stats = nn.BatchNorm1d(4, affine=False), nn.Module()
        self.stats.register_buffer("std", torch.full((4,), 3.0))

    def forward(self, x):
        x = (x - self.mean) / self.stats.std
        assert x.dtype is torch.float32  # `stats` has buffers and no parameters
        return self.norm(self.layers[0](x))


@pytest.mark.parametrize("level", CAST)
def test_holders_of_buffers_stay_fp32_and_containers_of_layers_and_norms_do_not(level):
    model = amp.initialize(nn.Sequential(Normalized()), opt_level=level)
    assert model[0].mean.dtype is model[0].layers[0].weight.dtype is CAST[level]
    assert model[0].stats.std.dtype is torch.float32
    assert model[0].norm.running_mean.dtype is (torch.float16 if level == "O3" else torch.float32)
    assert model(torch.ones(3, 4)).dtype is torch.float32
    kept = {"0.stats": "buffers alone"} | ({} if level == "O3" else {"0.norm": "keep_batchnorm_fp32"})
    assert amp.explain(model, torch.ones(3, 4)).kept == kept
    again = amp.initialize(model, opt_level=level)  # its class is a generated one now
    assert again[0].stats.std.dtype is torch.float32 and again(torch.ones(3, 4)).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_parametrizations_and_scripted_modules_with_tables_work():
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", FREQUENCIES.clone())

        def forward(self, x):
            return x * self.table

    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.jit.script(Scripted()), nn.Linear(4, 4)
    )
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O5")
    assert model[0].parametrizations.weight[0]._u.dtype is torch.float32
    assert model[0].weight.dtype is model[1].table.dtype is torch.bfloat16
    training.train(model, optimizer, 3, lambda step: (torch.ones(3, 4), torch.ones(3, 4)))
    amp.restore()
    assert torch.equal(model[1].table, FREQUENCIES) and model(torch.ones(3, 4)).dtype is torch.float32


def through_pickle(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", CAST)
def test_exact_values_come_back_wherever_fp32_is_promised(level, device):
    model, optimizer = cast_model(level, device)
    training.train(model, optimizer, 2, lambda step: (torch.ones(3, 4, device=device), torch.ones(3, 4, device=device)))
    values = FREQUENCIES.to(device)
    assert model.table.table.dtype is CAST[level]
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_pickle(model)):
        assert torch.equal(each.state_dict()["table.table"], values)
        assert torch.equal(each.state_dict(prefix="net.")["net.table.table"], values)
        assert torch.equal(amp.fp32_copy(each).table.table, values)
        assert torch.equal(amp.fp32_copy(each.table).table, values)  # a part
        assert torch.equal(amp.fp32_copy(nn.ModuleDict({"net": each}))["net"].table.table, values)  # a wrapper
    other = "O5" if level == "O2" else "O2"
    amp.initialize(model, optimizer, opt_level=other)
    assert model.table.table.dtype is CAST[other] and torch.equal(model.state_dict()["table.table"], values)
    amp.restore()
    assert torch.equal(model.table.table, values) and torch.equal(model.rotary.frequencies, values)
    assert not any("amp" in name for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("values", [torch.ones(4), FREQUENCIES], ids=["exact in BF16", "rounded"])
def test_a_loaded_value_is_kept_exactly(values):
    torch.manual_seed(0)
    model = nn.Sequential(Table(values))
    amp.initialize(model, SGD(model.parameters()), opt_level="O5")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["0.table"] = torch.full((4,), 0.1)
    nn.ModuleDict({"module": model}).load_state_dict({f"module.{name}": value for name, value in state.items()})
    state["0.table"].zero_()  # the caller's own
    assert torch.equal(model[0].table, torch.full((4,), 0.1).bfloat16())
    assert torch.equal(model.state_dict()["0.table"], torch.full((4,), 0.1))
    model.load_state_dict({**model.state_dict(), "0.table": torch.full((4,), 0.5)})
    amp.restore()
    assert model[0].table.tolist() == [0.5] * 4


def test_a_buffer_that_two_modules_share_stays_shared():
    model = nn.Sequential(Table(FREQUENCIES), Table(FREQUENCIES))
    model[1].table = model[0].table
    amp.initialize(model, opt_level="O5")
    assert model[1].table is model[0].table and model[0].table.dtype is torch.bfloat16
    amp.restore()
    assert model[1].table is model[0].table and torch.equal(model[0].table, FREQUENCIES)


def test_only_rounded_buffers_use_memory():
    model = nn.Sequential(Table(torch.ones(4)), Table(FREQUENCIES))
    amp.initialize(model, opt_level="O5")
    assert [len(vars(table).get("_amp_exact", {})) for table in model] == [0, 1]


def test_a_model_with_tables_compiles_to_one_graph():
    model, _ = cast_model()
    expected = model(torch.ones(3, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3, 4)), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Running averages


class Averaging(nn.Module):
    """A layer that keeps a running average of what it saw, in one of several ways."""

    def __init__(self, how="in place"):
        super().__init__()
        self.linear, self.gain, self.how = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), how
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("table", FREQUENCIES.clone())

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.mask.logical_not_()
            new = x.detach().mean(0)
            if self.how == "in place":
                self.average.mul_(0.9999).add_(new, alpha=0.0001)
            elif self.how == "assigned":
                self.average = 0.9999 * self.average + 0.0001 * new
            elif self.how == "once" and self.seen == 1:
                self.average = new
        return self.linear(x) * self.gain + self.average * self.table


def steps(model, count=3, level="O5", **options):
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, **options)
    training.train(model, optimizer, count, lambda step: (torch.ones(3, 4), torch.ones(3, 4)))
    return model


@pytest.mark.parametrize("how", ["in place", "assigned"])
@pytest.mark.parametrize("level", CAST)
def test_a_running_average_in_low_precision_is_named_once(level, how):
    model = nn.Sequential(nn.Linear(4, 4), Averaging(how))
    with pytest.warns(UserWarning, match=r"\['1\.average'\].*keep_fp32=\['1'\]") as warned:
        steps(model, 5, level)
    assert len(warned) == 1


@pytest.mark.parametrize("how", ["never", "once"])
def test_tables_caches_counters_and_masks_are_no_averages(how):
    steps(nn.Sequential(Averaging(how), nn.BatchNorm1d(4)))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_batch_norms_spectral_norms_and_evaluations_are_no_averages():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.utils.spectral_norm(nn.Linear(4, 4))
    )
    steps(model)
    model = amp.initialize(Averaging().eval(), opt_level="O5")
    for _ in range(3):
        model(torch.ones(3, 4))
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.ones(3, 4))
