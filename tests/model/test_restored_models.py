"""`restore()` of models: complete, with a model that cannot be restored, and with objects of no training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import SGD, linear

from amp_patch import amp
from amp_patch.frontend import restored


def test_buffers_that_were_half_before_stay_half_after_restore():
    model = nn.BatchNorm1d(2)
    model.register_buffer("table", torch.ones(2, dtype=torch.float16))
    model.register_buffer("mask", torch.ones(2))
    for level in ("O1", "O2"):
        amp.initialize(model, opt_level=level, keep_batchnorm_fp32=None if level == "O1" else False)
    amp.restore()
    assert model.table.dtype is torch.float16 and model.mask.dtype is torch.float32


def other_class(model, optimizer):
    model.__class__ = type("Changed", (type(model),), {})


def other_class_of_the_optimizer(model, optimizer):
    optimizer.__class__ = type("Changed", (type(optimizer),), {})


def other_shape(model, optimizer):
    model.weight.data = torch.ones(2, 3, dtype=torch.float16)


def other_type(model, optimizer):
    for param in model.parameters():
        param.data = param.data.double()


def broken_group(model, optimizer):
    optimizer.param_groups.insert(0, {"params": 1})


BROKEN = {
    other_class: "restore: the class of this Changed was changed after initialize() (parametrizations and fully_shard "
    "do so) and stays, though everything else is undone; undo such a change before restore()",
    other_class_of_the_optimizer: "restore: the class of this Changed was changed after initialize() (parametrizations "
    "and fully_shard do so) and stays, though everything else is undone; undo such a change before restore()",
    other_shape: "restore: parameter 'weight' of this Linear became torch.float16 of shape [2, 3] on cpu after "
    "initialize(), and its master is [1, 1] on cpu; it has the master's value again, and later writes into it "
    "are lost: call restore() first, then model.double() and similar conversions",
    other_type: "restore: parameter 'weight' of this Linear became torch.float64 of shape [1, 1] on cpu after "
    "initialize(), and its master is [1, 1] on cpu; it has the master's value again, and later writes into it "
    "are lost: call restore() first, then model.double() and similar conversions",
    broken_group: "restore: this SGD could not be restored whole (TypeError: 'int' object is not iterable), everything "
    "else is; it was changed after initialize() in a way that restore() cannot undo: call restore() before that",
}


@pytest.mark.parametrize("change", BROKEN)
def test_restore_restores_all_others_and_torch_when_one_cannot_be(change):
    """The other models of its training, and of earlier and later trainings, are restored. A second call is a no-op."""
    nets = [linear([[1.0 / 3]]) for _ in range(5)]
    optimizers = [SGD(net.parameters()) for net in nets]
    amp.initialize(nets[0], optimizers[0], opt_level="O1")
    amp.initialize(nets[1:4], optimizers[1:4], opt_level="O2")
    amp.initialize(nets[4], optimizers[4], opt_level="O1")
    changed, its_optimizer = nets[2], optimizers[2]
    change(changed, its_optimizer)
    with pytest.raises(RuntimeError) as told:
        amp.restore()
    assert str(told.value) == BROKEN[change]
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
    amp.restore()
    for net, optimizer in zip(nets, optimizers, strict=True):
        assert type(net) is nn.Linear or (net is changed and change is other_class)
        assert type(optimizer) is torch.optim.SGD or change is other_class_of_the_optimizer
        assert net.weight.dtype is (torch.float64 if net is changed and change is other_type else torch.float32)
        assert torch.equal(net.weight.float(), torch.tensor([[1.0 / 3]]))  # the masters': FP16 has another third
        assert not any("_amp" in name for name in (*vars(net), *vars(optimizer)))
        assert not optimizer._optimizer_step_pre_hooks
        assert optimizer.param_groups[-1]["params"][0] is net.weight
        assert net(torch.ones(1, 1, dtype=net.weight.dtype)).dtype is net.weight.dtype


def test_the_trainings_from_before_stay_when_one_of_a_comparison_cannot_be_restored():
    known, (lost, other) = linear([[1.0]]), (linear([[1.0]]), linear([[1.0]]))
    amp.initialize(known, opt_level="O1")
    with pytest.raises(RuntimeError, match="class of this Changed was changed"), restored():
        amp.initialize([lost, other], opt_level="O2")
        other_class(lost, None)
    assert type(other) is nn.Linear and other.weight.dtype is torch.float32
    assert known(torch.ones(1, 1)).dtype is torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16


def test_a_failing_initialize_raises_its_error_although_undoing_fails(monkeypatch):
    model = linear([[1.0]])

    def fail(*_):
        other_class(model, None)
        raise KeyError("why")

    monkeypatch.setattr("amp_patch.model.tensors.reflatten", fail)
    with pytest.raises(KeyError, match="why"):
        amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    monkeypatch.undo()
    assert model.weight.dtype is torch.float32
    amp.restore()


def test_a_class_patched_later_is_what_runs():
    class Patched(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    model = amp.initialize(Patched(1, 1), opt_level="O2")
    Patched.forward = lambda self, inputs: inputs * 3
    assert model(torch.ones(1, 1)).item() == 3.0


@pytest.mark.parametrize("copied", [False, True])
def test_a_state_dict_under_inference_mode_can_be_written_through_later(copied):
    model = amp.initialize(linear([[1.0]]), opt_level="O2")
    model = copy.deepcopy(model) if copied else model
    with torch.inference_mode():
        state = model.state_dict()
    with torch.no_grad():
        state["weight"].fill_(2.0)
        assert model(torch.ones(1, 1)).item() == 2.0
