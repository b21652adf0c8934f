"""State in eight bits is a tensor: what holds it, how it is written, and what reads it."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
from coded_states import MAKERS, OPTIM, coded, go_on, in_eight_bits, start, through_file
from torch import Tensor, nn
from training import masters_of, same

from amp_patch import amp

one_of_each_way = pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "SGD", "NAdam")])


@one_of_each_way
@pytest.mark.parametrize("kind", [OrderedDict, UserDict, type("Mine", (dict,), {})])
def test_states_in_other_mappings_are_stored_as_codes_and_keep_their_class(kind, make):
    ends = []
    for of in (kind, dict):
        model, optimizer = start(make)
        go_on(model, optimizer, range(2))
        for param, state in list(optimizer.state.items()):
            optimizer.state[param] = of({name: value.clone() for name, value in state.items()})
        go_on(model, optimizer, range(2, 4))
        assert coded(optimizer) and set(coded(optimizer).values()) == {2}
        assert {type(state) for state in optimizer.state.values()} == {of}
        ends.append([*masters_of(optimizer), *(t for s in optimizer.state.values() for t in copy.deepcopy(s).values())])
        amp.restore()
        assert not coded(optimizer)
    assert same(*ends)


WRITES = {
    "[]": lambda t, new: t.__setitem__(slice(None), new),
    "a row": lambda t, new: [t[i].copy_(row) for i, row in enumerate(new)],
    "view": lambda t, new: t.view(-1).copy_(new.view(-1)),
    "flatten": lambda t, new: t.flatten().copy_(new.flatten()),
    "transposed": lambda t, new: t.t().copy_(new.t()),
    "chunk": lambda t, new: [a.copy_(b) for a, b in zip(t.chunk(3), new.chunk(3), strict=True)],
    "detach": lambda t, new: t.detach().copy_(new),
    "data": lambda t, new: t.data.copy_(new),
    "out": lambda t, new: torch.mul(new, 1.0, out=t),
    "lerp_": lambda t, new: t.lerp_(new, 1.0),
    "+=": lambda t, new: t.zero_().__iadd__(new),
    "foreach": lambda t, new: torch._foreach_copy_([t], [new]),
    "foreach of views": lambda t, new: torch._foreach_copy_([t[:24], t[24:]], [new[:24], new[24:]]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_way_to_write_counts(write):
    """Numbers that are the same in each block, and of which the codes hold each."""
    model, optimizer = start(MAKERS["AdamW"])
    go_on(model, optimizer, range(2))
    state = optimizer.state[list(amp.master_params(optimizer))[2]]
    before, new = state["exp_avg"].clone(), torch.full((48, 131), -0.375)
    assert not torch.equal(before, new)
    write(state["exp_avg"], new)
    assert torch.equal(state["exp_avg"], new) and coded(optimizer)["exp_avg"] == 2
    assert torch.equal(optimizer.state_dict()["state"][2]["exp_avg"], new)


def test_a_state_is_an_fp32_tensor_to_torch_and_to_numpy():
    model, optimizer = start(MAKERS["AdamW"])
    go_on(model, optimizer, range(2))
    value = optimizer.state[next(iter(amp.master_params(optimizer)))]["exp_avg"]
    wanted = optimizer.state_dict()["state"][0]["exp_avg"]
    assert type(wanted) is Tensor and repr(value) == repr(wanted) and value.tolist() == wanted.tolist()
    assert (np.asarray(value) == wanted.numpy()).all() and torch.equal(torch.from_dlpack(value), wanted)
    with pytest.raises(ValueError, match="read-only"):
        value.numpy()[0] = 1
    for twin in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), through_file(value), value.clone()):
        assert type(twin) is Tensor and torch.equal(twin, wanted)
    assert value.to(torch.float32) is value and torch.equal(value.double(), wanted.double())
    assert torch.equal(torch._foreach_mul([value], 2.0)[0], wanted * 2) and value.max() == wanted.max()
    weight = torch.ones_like(wanted, requires_grad=True)
    (weight * value).sum().backward()
    assert torch.equal(weight.grad, wanted)
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name).clone() for name in names}
    assert sum(t.nbytes for t in inner.values()) == value.numel() + 4 * -(-value.numel() // 256)
    twin = type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
    assert torch.equal(twin.mul_(2), wanted * 2) and torch.equal(value, wanted)
    with torch.inference_mode():
        assert torch.equal(value.view(-1)[:9].mul_(1), wanted.view(-1)[:9]) and torch.equal(value[0], wanted[0])
    with pytest.raises(RuntimeError, match=r"squeeze_.*changes the layout of optimizer state that is stored in eight"):
        value.squeeze_()


@pytest.mark.program
def test_compiled_code_reads_a_state():
    model, optimizer = start(MAKERS["AdamW"])
    go_on(model, optimizer, range(2))
    value = optimizer.state[next(iter(amp.master_params(optimizer)))]["exp_avg"]
    found = torch.compile(lambda t: (t * 2).sum() + t[0, 0], backend="aot_eager", fullgraph=True)(value)
    torch.testing.assert_close(found, (value * 2).sum() + value[0, 0])


def test_code_that_asks_for_memory_gets_an_error_and_torchs_optimizers_step_it():
    model, optimizer = start(MAKERS["AdamW"])
    go_on(model, optimizer, range(2))
    state = optimizer.state[next(iter(amp.master_params(optimizer)))]
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(state["exp_avg"])
    for settings in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        weight = nn.Parameter(torch.ones(131, 48))
        weight.grad = torch.ones_like(weight)
        plain = OPTIM.AdamW([weight], **settings)
        plain.state[weight] = dict(state)
        wanted = state["exp_avg"].lerp(weight.grad, 0.1)
        plain.step()
        torch.testing.assert_close(state["exp_avg"], in_eight_bits(wanted, torch.int8), rtol=0.15, atol=1e-3)
