"""The fused optimizers behave as torch's: state dicts, groups, hooks, schedulers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from conftest import DEVICES, DTYPES
from crossed import crossed
from reference_optimizers import ORACLES, cases, every, give_gradients, parameters, relative, required, run_steps
from syncs import count
from torch import nn

from amp_patch import multi_tensor
from amp_patch.multi_tensor import backends
from amp_patch.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)


@every
def test_a_parameter_that_joins_later_steps_as_if_it_were_alone(make):
    """Save for the count of steps, which is the group's."""
    flags = required(make) | ({"max_grad_norm": None} if issubclass(make, FusedLAMB) else {})
    if make not in (FusedSGD, FusedAdagrad):
        flags["bias_correction"] = False
    if make is FusedSGD:
        flags["dampening"] = 0.5  # not of a buffer's first value
    both, alone = parameters(shapes=[(3,), (4,)]), parameters(shapes=[(3,), (4,)])[1:]
    optimizer = make(both, **flags)
    run_steps(optimizer, both[:1], [7, 8])
    assert not optimizer.state[both[1]] and torch.equal(both[1], alone[0])
    other = make(alone, **flags)
    for step in range(3):
        give_gradients(both, step)
        alone[0].grad = both[1].grad.clone()
        optimizer.step()
        other.step()
    assert torch.equal(both[1], alone[0])


@every
def test_a_sparse_gradient_is_refused_before_anything_is_written(make):
    dense, table = nn.Parameter(torch.ones(2)), nn.Embedding(3, 2, sparse=True)
    optimizer = make([dense, table.weight], **required(make))
    dense.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=rf"{make.__name__}.step: parameter 1 of group 0 has a sparse gradient"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2)) and not optimizer.state and not optimizer.param_groups[0].get("step")


@every
def test_complex_parameters_are_refused_by_name(make):
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=rf"{make.__name__}.step: parameter 0 of group 0 is torch.complex64"):
        make([p], **required(make)).step()


@crossed(cases, {"through": ["load_state_dict", "torch.save", "deepcopy", "pickle"], "dtype": DTYPES}, meet=1)
def test_resume_is_bit_exact(make, flags, through, dtype):
    params = parameters(dtype)
    optimizer = make(params, **flags)
    run_steps(optimizer, params)
    if through == "deepcopy":
        twins, twin = copy.deepcopy((params, optimizer))
    elif through == "pickle":
        twins, twin = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        twin = make(twins, **flags)
        state = copy.deepcopy(optimizer.state_dict())
        if through == "torch.save":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        twin.load_state_dict(state)
    run_steps(optimizer, params, range(10, 13))
    run_steps(twin, twins, range(10, 13))
    assert all(torch.equal(p, q) and p is not q for p, q in zip(params, twins, strict=True))


def apex_checkpoint(make, params):
    """What Apex saved: the step and NovoGrad's norms in the group, states in the parameters' type."""
    names = {FusedAdam: ["exp_avg", "exp_avg_sq"], FusedLAMB: ["exp_avg", "exp_avg_sq"], FusedNovoGrad: ["exp_avg"]}
    group = {k: v for k, v in make(params).param_groups[0].items() if k != "params"}
    group |= {"params": list(range(len(params))), "step": 7}
    if make is FusedNovoGrad:
        group["exp_avg_sq"] = [torch.zeros(0), torch.full((len(params),), 3.0)]
    state = {i: {n: torch.full_like(p, 0.25) for n in names[make]} for i, p in enumerate(params)}
    return {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad], ids=lambda make: make.__name__)
def test_a_checkpoint_of_apex_s_is_continued(make):
    params = parameters(shapes=[(3,), (4,)])
    if make is not FusedNovoGrad:
        params = [q for p in params for q in (p, nn.Parameter(p.detach().half()))]
    twins = [p.detach().double() for p in params]
    optimizer = make(params)
    optimizer.load_state_dict(apex_checkpoint(make, params))
    states = [
        {"exp_avg": torch.full_like(p, 0.25)}
        | ({"norm": p.new_tensor(3.0)} if make is FusedNovoGrad else {})
        | ({"exp_avg_sq": torch.full_like(p, 0.25)} if make is not FusedNovoGrad else {})
        for p in twins
    ]
    give_gradients(params, 0)
    ORACLES[make](twins, [p.grad.double() for p in params], states, 8)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 8
    for p, twin in zip(params, twins, strict=True):
        assert relative(p, twin) <= (1e-3 if p.dtype is torch.float16 else 1e-6)
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize(
    "norms",
    [[torch.ones(1), torch.ones(1)], [torch.ones(0), torch.ones(1)]],
    ids=["of FP16 weights", "of a frozen one"],
)
def test_norms_that_are_not_one_for_each_parameter_are_refused(norms):
    params = parameters(shapes=[(2,), (2,)])
    saved = apex_checkpoint(FusedNovoGrad, params)
    saved["param_groups"][0]["exp_avg_sq"] = norms
    optimizer = FusedNovoGrad(params)
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        RuntimeError, match=r"has [01] norms of low-precision and 1 of other parameters, and the group 2"
    ):
        run_steps(optimizer, params, [0])
    assert all(map(torch.equal, params, before)) and optimizer.param_groups[0]["step"] == 7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b for b in backends.BACKENDS if b == "torch" or multi_tensor.backend() == "cpp"])
@every
def test_no_step_waits_for_the_device(make, backend, device):
    params = parameters(device=device) + parameters(torch.float16, device)
    optimizer = make(params, **required(make))
    with multi_tensor.use_backend(backend):
        run_steps(optimizer, params)
        give_gradients(params, 3)
        assert count(device, optimizer.step) == 0
