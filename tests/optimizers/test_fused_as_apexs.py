"""The fused optimizers have Apex's arguments, state names and refusals."""

from __future__ import annotations

import inspect

import pytest
from reference_optimizers import parameters, required, run_steps

from amp_patch.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)


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
    with pytest.raises(RuntimeError, match=r"FusedAdam.step: scale is refused .Apex's first FusedAdam"):
        FusedAdam(parameters()).step(scale=128.0)


@pytest.mark.parametrize(
    ("name", "instead"), [("capturable", r"torch.optim.AdamW\(.*capturable=True"), ("master_weights", "opt_level='O2'")]
)
def test_what_other_optimizers_have_is_refused_by_name(name, instead):
    with pytest.raises(ValueError, match=f"FusedAdam: {name}=True is not supported.*{instead}"):
        FusedAdam(parameters(), **{name: True})


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
    run_steps(optimizer, params)
    assert all(set(optimizer.state[p]) == names for p in params)
    assert keys <= set(optimizer.param_groups[0])
    assert optimizer.param_groups[0].get("step", 3) == 3
