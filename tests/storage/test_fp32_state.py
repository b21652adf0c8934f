"""`fp32_state=` of `initialize`: parameters whose optimizer state stays FP32 beside state in eight bits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from coded_states import LEVELS, MAKERS, coded, go_on, kept_names, net, start, state_of, through_file
from fsdp_trainings import restored_fixture  # noqa: F401  the fixture `restored`
from torch import nn
from training import masters_of, same

from amp_patch import amp, multi_tensor

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
one_of_each_way = pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "SGD", "NAdam")])
every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)


def coded_params(optimizer: Any) -> list[int]:
    """The places of the parameters whose state has codes, in the order of `master_params`."""
    states = [optimizer.state.get(param) for param in amp.master_params(optimizer)]
    return [i for i, state in enumerate(states) if state and kept_names(state)]


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


@every_maker
def test_with_all_parameters_named_a_training_has_the_bits_of_fp32_state(make):
    ends = []
    for options in ({"fp32_state": nn.Module}, {"optimizer_state": None}):
        model, optimizer = start(make, **options)
        ends.append([*map(torch.tensor, go_on(model, optimizer, range(4))), *masters_of(optimizer)])
        ends[-1] += state_of(optimizer)
        assert not coded(optimizer)
        amp.restore()
    assert same(*ends)


@every_level
@pytest.mark.parametrize("make", [MAKERS["AdamW, amsgrad"], MAKERS["NAdam"]], ids=["one pass", "portions"])
def test_the_state_of_named_parameters_has_no_codes_at_any_level(make, options):
    model, optimizer = start(make, **options, fp32_state="2")
    for step in range(3):
        go_on(model, optimizer, range(step, step + 1))
        assert coded_params(optimizer) == [0] and coded(optimizer) == {"exp_avg": 1, "exp_avg_sq": 1}


def test_plain_torch_and_steps_in_backward_leave_it_in_fp32_too():
    with multi_tensor.use_backend("torch"):
        model, optimizer = start(MAKERS["AdamW"], fp32_state="0.weight")
        go_on(model, optimizer, range(2))
        assert coded_params(optimizer) == [2]
    amp.restore()
    model, optimizer = start(MAKERS["NAdam"], fp32_state="0.weight", gradient_release=True)
    go_on(model, optimizer, range(2))
    assert coded_params(optimizer) == [2]


# ---------------------------------------------------------------------------------------------------------------------
# How parameters are named


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ("2", [0]),
        ("0.weight", [2]),
        (["0.weight", "2"], []),
        (lambda model: model[2], [0]),
        (lambda model: model[0].weight, [2]),
        (lambda model: model[0].parameters(), [2]),
        (lambda model: [model[0].weight, "2"], []),
        (lambda model: lambda name, module: name == "2", [0]),
        (nn.Linear, []),
        (nn.LayerNorm, [0, 2]),
        ([], [0, 2]),
    ],
    ids=[
        "module",
        "parameter",
        "two",
        "a module",
        "a parameter",
        "parameters",
        "both",
        "predicate",
        "class",
        "-",
        "none",
    ],
)
def test_parameters_are_named_by_themselves_their_names_or_their_modules(rules, kept):
    model = net()
    named = rules(model) if callable(rules) and not isinstance(rules, type) else rules
    model, optimizer = start(MAKERS["AdamW"], model, fp32_state=named)
    go_on(model, optimizer, range(2))
    assert coded_params(optimizer) == kept


@pytest.mark.parametrize(
    ("rules", "error", "match"),
    [
        ("0.wieght", ValueError, r"fp32_state names '0.wieght', which matches no parameter .*did you mean '0.weight'"),
        (nn.Embedding, ValueError, r"fp32_state names <class .*Embedding'>, which matches no parameter"),
        (nn.GELU, ValueError, r"fp32_state names <class .*GELU'>, which matches no parameter"),
        (nn.Linear(2, 2), ValueError, r"fp32_state names a Linear, which matches no parameter"),
        (nn.Parameter(torch.ones(2)), ValueError, r"fp32_state names a Parameter, which matches no parameter"),
        ([3], TypeError, r"fp32_state holds 3; wanted parameters, their names, module names"),
        ([int], TypeError, r"fp32_state holds <class 'int'>; wanted parameters, their names"),
    ],
)
def test_rules_that_match_nothing_are_errors_and_change_nothing(rules, error, match):
    model = net()
    optimizer = MAKERS["AdamW"](model.parameters())
    with pytest.raises(error, match=f"^initialize: {match}"):
        amp.initialize(model, optimizer, opt_level="O5+8bit", fp32_state=rules, verbosity=0)
    assert type(model) is nn.Sequential and model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O5", "O5+split"])
def test_it_is_an_error_without_state_in_eight_bits(level):
    model = net()
    with pytest.raises(ValueError, match=r"^initialize: fp32_state names .*optimizer_state is None.*='8bit', or leave"):
        amp.initialize(model, MAKERS["AdamW"](model.parameters()), opt_level=level, fp32_state="2", verbosity=0)


@pytest.mark.parametrize(("level", "kept"), [("O0", []), ("O3", []), ("O4", [0]), ("O5+split", [0]), ("O1+8bit", [0])])
def test_under_another_level_of_the_environment_it_goes_with_optimizer_state(monkeypatch, caplog, level, kept):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", level)
    with caplog.at_level(logging.INFO, "amp_patch"):
        model, optimizer = start(MAKERS["SGD"], opt_level="O2", loss_scale=1.0, fp32_state="2")
    go_on(model, optimizer, range(2))
    assert coded_params(optimizer) == kept
    assert ("fp32_state=True" in caplog.text) is (not kept)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, copies, and parameters that come later


@one_of_each_way
def test_checkpoints_move_between_trainings_that_name_others(make):
    for first, second, kept in (("2", (), [0, 2]), ((), "2", [0]), ("2", "2", [0])):
        model, optimizer = start(make, fp32_state=first)
        go_on(model, optimizer, range(3))
        saved, wanted = through_file([model.state_dict(), optimizer.state_dict()]), copy.deepcopy(state_of(optimizer))
        losses = go_on(model, optimizer, range(3, 5))
        amp.restore()
        again, its_optimizer = start(make, fp32_state=second)
        again.load_state_dict(saved[0])
        its_optimizer.load_state_dict(saved[1])
        assert same(state_of(its_optimizer), wanted)
        resumed = go_on(again, its_optimizer, range(3, 5))
        assert resumed == losses or first != second
        assert coded_params(its_optimizer) == kept
        amp.restore()


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, "O0"), (torch.bfloat16, "O5")])
@every_maker
def test_state_that_comes_with_the_optimizer_stays_fp32_too(make, dtype, level):
    model = net().to(dtype)
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 48, dtype=dtype)).square().mean().backward()
        optimizer.step()
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    ends = []
    for each, of in ((model, optimizer), (twin, its_optimizer)):
        options = {"optimizer_state": "8bit", "fp32_state": "2"} if each is model else {}
        each, of = amp.initialize(each, of, opt_level=level, **options, verbosity=0)
        go_on(each, of, range(2, 3))
        ends.append([t for t in of.state_dict()["state"][2].values() if isinstance(t, torch.Tensor) and t.dim()])
    assert coded_params(optimizer) == [0] and not coded(its_optimizer) and ends[0] and same(*ends)
    amp.restore()


@pytest.mark.parametrize("number", [1, 2])
def test_a_named_parameter_of_a_later_group_has_fp32_state(number):
    model = net()
    both = [MAKERS["AdamW"](model[0].parameters()), MAKERS["NAdam"](model[3].parameters())][:number]
    model, _ = amp.initialize(model, both, opt_level="O5+8bit", fp32_state=["2", "3"], verbosity=0)
    both[-1].add_param_group({"params": list(model[2].parameters())})
    for _ in range(2):
        with amp.scale_loss(model(torch.randn(8, 48)).square().mean(), both) as loss:
            loss.backward()
        for each in both:
            each.step()
            each.zero_grad()
    assert coded_params(both[0]) == [0] and all(coded_params(each) == [] for each in both[1:])
