"""The fused optimizers: Apex's arithmetic, arguments and state names; torch's manners; exact under amp."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle

import pytest
import reference_optimizers as reference
import torch
import training
from conftest import DEVICES, DTYPES
from syncs import CopiesToOrFrom, count
from torch import nn
from training import assert_unchanged, snapshot

from amp_patch import amp, multi_tensor
from amp_patch.multi_tensor import backends
from amp_patch.multi_tensor.plain_steps import decay
from amp_patch.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedOptimizer,
    FusedSGD,
)

ORACLES = {
    FusedAdam: reference.adam,
    FusedSGD: reference.sgd,
    FusedLAMB: reference.lamb,
    FusedMixedPrecisionLamb: reference.lamb,
    FusedNovoGrad: reference.novograd,
    FusedAdagrad: reference.adagrad,
}
CASES = [
    (FusedAdam, {}),
    (FusedAdam, {"weight_decay": 0.1}),
    (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}),
    (FusedAdam, {"weight_decay": 0.1, "bias_correction": False}),
    (FusedAdam, {"bias_correction": False, "adam_w_mode": False, "eps": 1e-4, "betas": (0.8, 0.95)}),
    (FusedAdam, {"betas": (0.0, 0.9)}),
    (FusedSGD, {"lr": 0.05}),
    (FusedSGD, {"lr": 0.05, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedLAMB, {}),
    (FusedLAMB, {"adam_w_mode": False}),
    (FusedLAMB, {"grad_averaging": False}),
    (FusedLAMB, {"bias_correction": False}),
    (FusedLAMB, {"weight_decay": 0.0}),
    (FusedLAMB, {"weight_decay": 0.0, "use_nvlamb": True}),
    (FusedLAMB, {"max_grad_norm": 1e6}),
    (FusedLAMB, {"max_grad_norm": None}),
    (FusedMixedPrecisionLamb, {}),
    (FusedMixedPrecisionLamb, {"adam_w_mode": False, "grad_averaging": False}),
    (FusedMixedPrecisionLamb, {"bias_correction": False}),
    (FusedMixedPrecisionLamb, {"weight_decay": 0.0, "max_grad_norm": None}),
    (FusedNovoGrad, {}),
    (FusedNovoGrad, {"weight_decay": 0.1}),
    (FusedNovoGrad, {"weight_decay": 0.1, "reg_inside_moment": True}),
    (FusedNovoGrad, {"norm_type": 0, "betas": (0.95, 0.98)}),
    (FusedNovoGrad, {"init_zero": True}),
    (FusedNovoGrad, {"norm_type": 0, "init_zero": True, "bias_correction": False}),
    (FusedNovoGrad, {"grad_averaging": False, "bias_correction": False}),
    (FusedAdagrad, {}),
    (FusedAdagrad, {"weight_decay": 0.1}),
    (FusedAdagrad, {"weight_decay": 0.1, "adagrad_w_mode": True}),
]
ids = [f"{make.__name__}-{'-'.join(f'{k}={v}' for k, v in flags.items())}" for make, flags in CASES]
cases = pytest.mark.parametrize(("make", "flags"), CASES, ids=ids)
every = pytest.mark.parametrize("make", list(ORACLES), ids=lambda make: make.__name__)
SHAPES = [(3, 5), (7,), (), (0,), (2, 3, 4, 5)]


def required(make):
    """Arguments that the class cannot do without; momentum, so that SGD has a state too."""
    return {"lr": 0.05, "momentum": 0.9} if make is FusedSGD else {}


def parameters(dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def give_gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, dtype or p.dtype)


def run(optimizer, params, steps=range(3)):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item() if a.numel() else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=["FP32", "FP64"])
@cases
def test_100_steps_match_the_oracle(make, flags, dtype, tolerance, device):
    params = parameters(dtype, device, [s for s in SHAPES if s != (0,)])
    exact, states = [p.detach().double() for p in params], [{} for _ in params]
    start = [p.clone() for p in exact]
    optimizer = make(params, **flags)
    for step in range(100):
        give_gradients(params, step)
        ORACLES[make](exact, [p.grad.double() for p in params], states, step + 1, **flags)
        optimizer.step()
    for p, oracle, before in zip(params, exact, start, strict=True):
        assert relative(p, oracle) <= tolerance
        assert relative(p, before) > 1e-4  # it went somewhere


@pytest.mark.parametrize(
    ("make", "flags", "plain", "plain_flags"),
    [
        (FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
        (FusedSGD, {"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
        (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD, ...),
        (FusedAdagrad, {"weight_decay": 0.1}, torch.optim.Adagrad, ...),
    ],
    ids=["AdamW", "Adam", "SGD", "Nesterov", "Adagrad"],
)
def test_100_steps_match_torch(make, flags, plain, plain_flags):
    ours, theirs = parameters(), [nn.Parameter(p.detach().double()) for p in parameters()]  # FP32's AdamW drifts
    one, other = make(ours, **flags), plain(theirs, **(flags if plain_flags is ... else plain_flags))
    run(one, ours, range(100))
    for step in range(100):
        give_gradients(ours, step)  # FP32 numbers
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.double()
        other.step()
    assert max(map(relative, ours, theirs)) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@cases
def test_low_precision_parameters_are_stepped_in_fp32_and_rounded_once(make, flags, dtype, device):
    params = parameters(dtype, device)
    optimizer = make(params, **flags)
    give_gradients(params, 0)
    twins = [nn.Parameter(p.detach().float()) for p in params]
    for p, twin in zip(params, twins, strict=True):
        twin.grad = p.grad.float()
    versions = [p.grad._version for p in params]
    optimizer.step()
    assert [p.grad._version for p in params] == versions  # gradients are only read
    make(twins, **flags).step()
    for p, twin in zip(params, twins, strict=True):
        assert torch.equal(p, twin.to(dtype)) and p.dtype is dtype
        assert all(v.dtype is torch.float32 for v in optimizer.state[p].values())


@pytest.mark.parametrize("device", DEVICES)
@every
def test_types_mix_within_a_group(make, device):
    mixed = [p for dtype in [*DTYPES, torch.float64] for p in parameters(dtype, device, [(3, 5), (7,)])]
    apart = [copy.deepcopy(p) for p in mixed]
    flags = required(make) | (
        {"max_grad_norm": None} if issubclass(make, FusedLAMB) else {}
    )  # else all are clipped together
    run(make(mixed, **flags), mixed)
    generator_order = make([{"params": [p]} for p in apart], **flags)
    run(generator_order, apart)
    assert all(torch.equal(a, b) for a, b in zip(mixed, apart, strict=True))


@every
def test_any_layout_gives_the_same(make):
    """torch's fused kernels on a CPU mix up the elements of tensors that are laid out differently."""
    plain = parameters(shapes=[(4, 6), (2, 3, 4, 5), (5, 3)])
    odd = [
        nn.Parameter(plain[0].detach().t().contiguous().t()),
        nn.Parameter(plain[1].detach().to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(5, 6)[:, ::2]),
    ]
    with torch.no_grad():
        odd[2].copy_(plain[2])
    one, other = make(plain, **required(make)), make(odd, **required(make))
    for step in range(3):
        give_gradients(plain, step)
        for p, q in zip(plain, odd, strict=True):
            q.grad = p.grad.clone()
        one.step()
        other.step()
    assert all(relative(q, p) <= 1e-6 for p, q in zip(plain, odd, strict=True))


def test_lamb_clips_over_all_groups_and_types():
    params = parameters(shapes=[(3, 5), (7,)])
    halves = [nn.Parameter(params[0].detach().clone()), nn.Parameter(params[1].detach().half())]
    whole = [nn.Parameter(params[0].detach().clone()), nn.Parameter(halves[1].detach().float())]
    for p in (*halves, *whole):
        p.grad = torch.full_like(p, 3.0)
    FusedLAMB([{"params": [halves[0]]}, {"params": [halves[1]]}]).step()
    reference.lamb([p.data for p in whole], [p.grad for p in whole], [{}, {}], 1)
    assert relative(halves[0], whole[0]) <= 1e-6
    assert torch.equal(halves[1], whole[1].half())


def test_lamb_takes_no_trust_ratio_from_a_norm_of_zero():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    FusedLAMB([p], lr=0.5, max_grad_norm=None).step()
    assert torch.allclose(p, torch.full((3,), -0.5), atol=1e-5)


def test_an_infinite_gradient_reaches_the_weights_without_amp():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([math.nan, 1.0])
    FusedLAMB([p]).step()
    assert p.isnan().all()  # through the norm, as in Apex


# ---------------------------------------------------------------------------------------------------------------------
# Apex's face


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            FusedAdam,
            "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights",
        ),
        (
            FusedSGD,
            "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none",
        ),
        (
            FusedLAMB,
            "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none max_grad_norm "
            "use_nvlamb",
        ),
        (
            FusedNovoGrad,
            "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging norm_type init_zero "
            "set_grad_none",
        ),
        (FusedAdagrad, "lr eps weight_decay set_grad_none adagrad_w_mode"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_arguments_stand_in_apex_s_order(make, names):
    assert list(inspect.signature(make).parameters) == ["params", *names.split()]


def test_the_calling_forms_of_scripts():
    model = nn.Linear(2, 2)
    params = model.parameters
    FusedAdam(params(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, bias_correction=False)
    FusedAdam(params(), lr=1e-3, bias_correction=False, adam_w_mode=True)
    FusedAdam(params(), 1e-3, False, (0.9, 0.99), 1e-8, False, 0.1, False, False)
    FusedSGD(params(), 0.1, 0.9, weight_decay=1e-4)
    FusedLAMB(
        [{"params": [model.weight], "weight_decay": 0.01}, {"params": [model.bias], "weight_decay": 0.0}], lr=1e-3
    )
    FusedNovoGrad(params(), lr=0.01, betas=(0.95, 0), weight_decay=0.001)
    FusedAdagrad(params(), lr=0.1)


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad], ids=lambda make: make.__name__)
def test_amsgrad_is_refused(make):
    with pytest.raises(RuntimeError, match=f"{make.__name__}: amsgrad=True is not supported"):
        make(parameters(), amsgrad=True)


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (FusedAdam, {"lr": -1.0}, "FusedAdam: lr=-1.0, a number that is not negative"),
        (FusedAdam, {"betas": (0.9, 1.0)}, r"FusedAdam: betas=\(0.9, 1.0\), two numbers from 0"),
        (FusedSGD, {"lr": 0.1, "momentum": -0.5}, "FusedSGD: momentum=-0.5"),
        (FusedSGD, {"lr": 0.1, "nesterov": True}, "FusedSGD: nesterov=True with momentum=0.0, dampening=0.0"),
        (FusedSGD, {}, "parameter group didn't specify a value of required optimization parameter lr"),
        (FusedLAMB, {"max_grad_norm": 0.0}, "FusedLAMB: max_grad_norm=0.0 would make every gradient 0"),
        (FusedAdagrad, {"weight_decay": -0.1}, "FusedAdagrad: weight_decay=-0.1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make, flags, message):
    with pytest.raises(ValueError, match=message):
        make(parameters(), **flags)


def test_novograd_knows_two_norms():
    with pytest.raises(RuntimeError, match=r"FusedNovoGrad: norm_type=1, wanted 2 .* or 0"):
        FusedNovoGrad(parameters(), norm_type=1)


def test_the_arguments_of_the_first_fused_adam_are_refused():
    with pytest.raises(RuntimeError, match=r"FusedAdam.step: scale was an argument of Apex's first FusedAdam"):
        FusedAdam(parameters()).step(scale=128.0)


def test_groups_bring_their_own_learning_rate():
    p, q = parameters(shapes=[(2,), (2,)])
    run(FusedSGD([{"params": [p], "lr": 0.0}, {"params": [q], "lr": 1.0}]), [p, q])
    start = parameters(shapes=[(2,), (2,)])
    assert torch.equal(p, start[0]) and not torch.equal(q, start[1])


@pytest.mark.parametrize(
    ("make", "names", "keys"),
    [
        (FusedAdam, {"exp_avg", "exp_avg_sq"}, {"step"}),
        (FusedSGD, {"momentum_buffer"}, set()),
        (FusedLAMB, {"exp_avg", "exp_avg_sq"}, {"step", "max_grad_norm", "grad_averaging"}),
        (FusedNovoGrad, {"exp_avg"}, {"step", "exp_avg_sq", "norm_type", "init_zero"}),
        (FusedAdagrad, {"sum"}, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_has_apex_s_names(make, names, keys):
    params = parameters()
    optimizer = make(params, **required(make))
    assert "step" not in optimizer.param_groups[0]
    run(optimizer, params)
    assert all(set(optimizer.state[p]) == names for p in params)
    assert keys <= set(optimizer.param_groups[0])
    assert optimizer.param_groups[0].get("step", 3) == 3


@pytest.mark.parametrize("make", [make for make in ORACLES if make is not FusedMixedPrecisionLamb])
def test_set_grad_none(make):
    for flag in (True, False):
        params = parameters()
        optimizer = make(params, **required(make), set_grad_none=flag)
        run(optimizer, params, [0])
        optimizer.zero_grad()
        assert all((p.grad is None) is flag for p in params)
        assert flag or all(not p.grad.any() for p in params)
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in params)


# ---------------------------------------------------------------------------------------------------------------------
# torch's manners


@every
def test_a_parameter_without_a_gradient_is_left_alone(make):
    params = parameters()
    optimizer = make(params, **required(make))
    before = params[1].detach().clone()
    run(optimizer, [p for p in params if p is not params[1]])
    assert torch.equal(params[1], before) and not optimizer.state[params[1]]
    run(optimizer, params)  # it may join later
    assert not torch.equal(params[1], before)


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
    run(optimizer, both[:1], [7, 8])
    other = make(alone, **flags)
    for step in range(3):
        give_gradients(both, step)
        alone[0].grad = both[1].grad.clone()
        optimizer.step()
        other.step()
    assert torch.equal(both[1], alone[0])


@every
def test_a_step_without_any_gradient_changes_nothing(make):
    params = parameters()
    optimizer = make(params, **required(make))
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state and not optimizer.param_groups[0].get("step")
    run(optimizer, params)
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    after = optimizer.state_dict()
    assert repr(after["param_groups"]) == repr(before[0]["param_groups"])
    assert all(map(torch.equal, params, before[1]))


@every
def test_empty_groups_and_groups_added_later(make):
    params = parameters()
    optimizer = make([{"params": []}, {"params": params[:2]}], **required(make))
    run(optimizer, params[:2])
    optimizer.add_param_group({"params": params[2:], "lr": 0.0, "weight_decay": 0.0})
    before = [p.detach().clone() for p in params]
    run(optimizer, params)
    assert all(torch.equal(p, q) for p, q in zip(params[2:], before[2:], strict=True))  # its own learning rate
    assert not torch.equal(params[0], before[0])
    assert optimizer.param_groups[2].get("step", 3) == 3


@every
def test_a_closure_is_evaluated_with_gradients(make):
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p], **required(make))

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (p != 1).all()


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through", ["load_state_dict", "torch.save", "deepcopy", "pickle"])
@cases
def test_resume_is_bit_exact(make, flags, through, dtype):
    params = parameters(dtype)
    optimizer = make(params, **flags)
    run(optimizer, params)
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
    run(optimizer, params, range(10, 13))
    run(twin, twins, range(10, 13))
    assert all(torch.equal(p, q) and p is not q for p, q in zip(params, twins, strict=True))


@every
def test_loading_runs_the_hooks_of_others_and_reads_what_they_return(make):
    params = parameters(torch.float16)
    optimizer = make(params, **required(make))
    run(optimizer, params)
    saved = optimizer.state_dict()
    name = next(iter(saved["state"][0]))

    def double(_, given):
        state = {key: {k: v * 2 for k, v in s.items()} for key, s in given["state"].items()}
        return {**given, "state": state}

    twin = make(params, **required(make))
    twin.register_load_state_dict_pre_hook(double)
    twin.load_state_dict(saved)
    assert torch.equal(twin.state[params[0]][name], 2 * saved["state"][0][name])
    assert len(twin._optimizer_load_state_dict_pre_hooks) == 1


def apex_checkpoint(make, params):
    """What Apex saved: the step and NovoGrad's norms in the group, states in the parameters' type."""
    names = {FusedAdam: ["exp_avg", "exp_avg_sq"], FusedLAMB: ["exp_avg", "exp_avg_sq"], FusedNovoGrad: ["exp_avg"]}
    group = {k: v for k, v in make(params).param_groups[0].items() if k != "params"}
    group |= {"params": list(range(len(params))), "step": 7}
    if make is FusedNovoGrad:
        halves = sum(p.dtype is torch.float16 for p in params)
        group["exp_avg_sq"] = [torch.full((halves,), 2.0), torch.full((len(params) - halves,), 3.0)]
    state = {i: {n: torch.full_like(p, 0.25) for n in names[make]} for i, p in enumerate(params)}
    return {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad], ids=lambda make: make.__name__)
def test_a_checkpoint_of_apex_s_is_continued(make):
    params = [q for p in parameters(shapes=[(3,), (4,)]) for q in (p, nn.Parameter(p.detach().half()))]
    twins = [p.detach().double() for p in params]
    optimizer = make(params)
    optimizer.load_state_dict(apex_checkpoint(make, params))
    states = [
        {"exp_avg": torch.full_like(p, 0.25)}
        | ({"norm": p.new_tensor(2.0 if q.dtype is torch.float16 else 3.0)} if make is FusedNovoGrad else {})
        | ({"exp_avg_sq": torch.full_like(p, 0.25)} if make is not FusedNovoGrad else {})
        for p, q in zip(twins, params, strict=True)
    ]
    give_gradients(params, 0)
    ORACLES[make](twins, [p.grad.double() for p in params], states, 8)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 8
    for p, twin in zip(params, twins, strict=True):
        assert relative(p, twin) <= (1e-3 if p.dtype is torch.float16 else 1e-6)
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32


def test_norms_of_frozen_parameters_are_absent_in_apex_s_checkpoints():
    params = parameters(shapes=[(2,), (2,), (2,)])
    saved = apex_checkpoint(FusedNovoGrad, params)
    del saved["state"][1]
    saved["param_groups"][0]["exp_avg_sq"] = [torch.zeros(0), torch.tensor([2.0, 3.0])]
    optimizer = FusedNovoGrad(params, betas=(0.9, 1 - 2**-30))
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["betas"] = (0.9, 1 - 2**-30)  # norms all but stand still
    give_gradients([params[0], params[2]], 0)
    optimizer.step()
    low, full = optimizer.param_groups[0]["exp_avg_sq"]
    assert low.numel() == 0 and torch.allclose(full, torch.tensor([2.0, 0.0, 3.0]))


def test_norms_that_fit_no_parameters_are_refused():
    params = parameters(shapes=[(2,), (2,)])
    saved = apex_checkpoint(FusedNovoGrad, params)
    saved["param_groups"][0]["exp_avg_sq"] = [torch.ones(1), torch.ones(2)]
    optimizer = FusedNovoGrad(params)
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="has 1 norms of low-precision and 2 of other parameters"):
        run(optimizer, params, [0])
    assert all(map(torch.equal, params, before)) and optimizer.param_groups[0]["step"] == 7


def test_a_checkpoint_of_torch_s_adamw_is_continued():
    params, twins = parameters(), parameters()
    theirs = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    run(theirs, params)
    ours = FusedAdam(twins, lr=1e-2, weight_decay=0.1)
    with torch.no_grad():
        for p, q in zip(params, twins, strict=True):
            q.copy_(p)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch takes a state's tensors as they are
    assert ours.param_groups[0]["step"] == 3 and ours.param_groups[0]["bias_correction"] is True
    run(theirs, params, range(10, 13))
    run(ours, twins, range(10, 13))
    assert max(map(relative, twins, params)) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b for b in backends.BACKENDS if b == "torch" or multi_tensor.backend() == "cpp"])
@every
def test_no_step_waits_for_the_device(make, backend, device):
    params = parameters(device=device) + parameters(torch.float16, device)
    optimizer = make(params, **required(make))
    with multi_tensor.use_backend(backend):
        run(optimizer, params)
        give_gradients(params, 3)
        assert count(device, optimizer.step) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_capturable_adam_keeps_its_numbers_on_the_device(device):
    params, twins = parameters(device=device), parameters(device=device)
    optimizer, twin = FusedAdam(params, lr=0.01, capturable=True), FusedAdam(twins, lr=0.01)
    run(optimizer, params)
    run(twin, twins)
    group = optimizer.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor) and group["lr"].device.type == device
    assert group["step"].dtype is torch.int32 and group["step"].item() == 3
    assert max(map(relative, params, twins)) <= 1e-6
    saved = copy.deepcopy(twin.state_dict())  # its numbers are on the host
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"].device.type == optimizer.param_groups[0]["step"].device.type == device
    with torch.no_grad():
        torch._foreach_copy_(params, twins)
    run(optimizer, params)
    run(twin, twins)
    assert max(map(relative, params, twins)) <= 1e-6
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # and the other way
    twin.param_groups[0]["lr"] = 0.01
    run(twin, twins)
    assert twin.param_groups[0]["step"] == 9  # three times three


@pytest.mark.parametrize("device", DEVICES)
def test_a_capturable_adam_skips_on_the_device_under_torch_s_scaler(device):
    params = parameters(device=device, shapes=[(3,), (4,)])
    optimizer = FusedAdam(params, lr=0.01, capturable=True)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    twins = parameters(device=device, shapes=[(3,), (4,)])
    twin = FusedAdam(twins, lr=0.01)
    optimizer.add_param_group({"params": parameters(device=device, shapes=[(2,)])})  # without gradients
    for step, bad in enumerate([False, True, False]):
        scaler.scale(torch.ones((), device=device))
        give_gradients(params, step)
        if not bad:
            give_gradients(twins, step)
            twin.step()
        for p in params:
            p.grad.mul_(scaler.get_scale())
        if bad:
            params[0].grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.param_groups[0]["step"].item() == 2
    assert max(map(relative, params, twins)) <= 1e-6


LAYOUTS = {
    "alike": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b for b in backends.BACKENDS if b == "torch" or multi_tensor.backend() == "cpp"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, amp.GradScaler])
@pytest.mark.parametrize("masters", [False, True])
def test_a_capturable_adam_unscales_every_gradient_in_place(kind, masters, layout, dtype, backend, device):
    """As torch's fused Adam does: right after a step taken, and as they came after one skipped."""
    value = torch.arange(1.0, 7.0).reshape(2, 3)
    params, twins = ([nn.Parameter(value.to(device, d, copy=True)) for d in (dtype, torch.float32)] for _ in range(2))
    optimizer = FusedAdam(params, lr=0.25, capturable=True, master_weights=masters)
    twin = FusedAdam(twins, lr=0.25, master_weights=masters)
    scaler = kind(device, init_scale=4.0)
    with multi_tensor.use_backend(backend):
        for bad in (False, True, False):
            scaler.scale(torch.ones((), device=device))
            unscaled = [LAYOUTS[layout](value.to(device, p.dtype, copy=True)) for p in params]
            scale = scaler.get_scale()
            for p, q, grad in zip(params, twins, unscaled, strict=True):
                p.grad, q.grad = LAYOUTS[layout](grad * scale), grad
            if bad:
                params[1].grad[0, 0] = math.inf
            given, before = [p.grad for p in params], [p.grad.clone() for p in params]
            if not bad:
                twin.step()
            scaler.step(optimizer)
            scaler.update()
            assert all(p.grad is grad for p, grad in zip(params, given, strict=True))
            assert training.same(given, before if bad else unscaled)
            assert training.same([p.detach() for p in params], [q.detach() for q in twins])
    assert optimizer.param_groups[0]["step"].item() == 2 and scaler.get_scale() == 2.0


def test_a_gradient_that_cannot_be_unscaled_in_place_is_refused_before_anything_is_counted():
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = FusedAdam([param], capturable=True)
    param.grad = torch.ones(1).expand(2, 3)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"FusedAdam: a gradient of shape \[2, 3\] overlaps itself .* `.clone\(\)`"):
        optimizer.step()
    assert "step" not in optimizer.param_groups[0] and torch.equal(param, torch.ones(2, 3))
    assert not optimizer.state


def test_master_weights_of_adam_keep_what_half_weights_lose():
    half = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = FusedAdam([half], lr=1e-5, master_weights=True)
    for _ in range(100):
        half.grad = torch.ones_like(half)
        optimizer.step()
    assert optimizer.state[half]["master_param"].item() == pytest.approx(1 - 1e-3, rel=1e-5)
    assert half.item() == pytest.approx(1 - 1e-3, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Under amp


class AdamW(torch.optim.Adam):
    """torch's Adam after Apex's weight decay."""

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p, alpha=1e-3 * 0.1)
        super().step()


ON_TORCH = {
    FusedAdam: lambda params: AdamW(params, lr=1e-3, fused=True),
    FusedSGD: lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, fused=True),
}
UNDER_AMP = {
    FusedAdam: {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8},
    FusedSGD: {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    FusedLAMB: {"lr": 0.01},
    FusedMixedPrecisionLamb: {"lr": 0.01},
    FusedNovoGrad: {"lr": 0.01, "weight_decay": 0.1},
    FusedAdagrad: {"lr": 0.05, "weight_decay": 0.1},
}


@every
def test_o2_publishes_the_bits_of_the_oracle_on_fp32_masters(make):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(model.parameters(), **UNDER_AMP[make])
    twins = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    states = [{} for _ in twins]
    oracle = ON_TORCH[make](twins) if make in ON_TORCH else None
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    generator = torch.Generator().manual_seed(1)
    with multi_tensor.use_backend("torch"):  # the oracle's norms are torch's sums
        for step in range(100):
            optimizer.zero_grad()
            training.backward(model(torch.randn(5, 6, generator=generator)).square().mean(), optimizer)
            grads = [m.grad.clone() for m in amp.master_params(optimizer)]
            optimizer.step()
            if oracle is None:
                ORACLES[make]([t.data for t in twins], grads, states, step + 1, **UNDER_AMP[make])
            else:
                for twin, grad in zip(twins, grads, strict=True):
                    twin.grad = grad
                oracle.step()
            for p, twin in zip(model.parameters(), twins, strict=True):
                assert torch.equal(p, twin.half()), f"step {step}"
    assert all(map(torch.equal, amp.master_params(optimizer), twins))


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@every
def test_a_skipped_step_is_exact(make, level, first):
    model = training.convnet()
    optimizer = make(model.parameters(), **{**UNDER_AMP[make], **({"eps": 1e-4} if make is not FusedSGD else {})})
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)

    def one_step(factor=1.0):
        images, _ = training.images(0)
        optimizer.zero_grad()
        training.backward(model(images).float().square().mean() * factor, optimizer)
        optimizer.step()

    if not first:
        one_step()
    weights = lambda: [p.detach().clone() for p in model.parameters()]  # noqa: E731  batch norms see the batch
    before = weights(), copy.deepcopy(optimizer.state_dict())
    one_step(math.inf)
    assert optimizer._amp_stash.step_skipped
    assert all(map(torch.equal, weights(), before[0]))
    after = optimizer.state_dict()
    assert repr(after["param_groups"]) == repr(before[1]["param_groups"])
    assert repr(after["state"]) == repr(before[1]["state"])
    one_step()
    assert not optimizer._amp_stash.step_skipped and not torch.equal(weights()[0], before[0][0])


@every
def test_state_outlives_o3_and_restore(make):
    """At O3 the parameters are half, their state is not; restore() makes them FP32 again."""
    model = training.convnet()
    optimizer = make(model.parameters(), **{**UNDER_AMP[make], **({"eps": 1e-4} if make is not FusedSGD else {})})
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    training.train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    amp.restore()
    assert isinstance(optimizer, FusedOptimizer)
    after = optimizer.state_dict()
    for key, state in before["state"].items():
        for name, value in state.items():
            assert value.dtype is torch.float32 and torch.equal(value, after["state"][key][name])
    images, classes = training.images(3)
    nn.functional.cross_entropy(model(images), classes).backward()
    optimizer.step()


def test_a_skip_is_told_by_the_snapshot_of_the_overflow_tests():
    model, optimizer = amp.initialize(
        layer := training.linear([[1.0, 2.0]]), FusedLAMB(layer.parameters()), opt_level="O2", verbosity=0
    )
    before = snapshot(model, optimizer)
    training.backward(model(torch.full((1, 2), math.inf)).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert_unchanged(before, snapshot(model, optimizer))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_weight_decay_under_a_flag_reads_its_rate_where_the_weights_are(rate):
    weights = torch.tensor([1.0, -3.0], dtype=torch.float64)
    before = weights.clone()
    decay([weights], rate, found_inf=torch.ones(1))
    assert torch.equal(weights, before)
    decay([weights], rate, found_inf=torch.zeros(1))
    assert torch.equal(weights, before - 0.1 * before), "0.1 of FP64, not of FP32"
    there = rate.to("meta") if isinstance(rate, torch.Tensor) else rate
    with CopiesToOrFrom("meta") as copies:
        decay([torch.ones(2, device="meta")], there, found_inf=torch.zeros(1, device="meta"))
    assert not copies.counts
