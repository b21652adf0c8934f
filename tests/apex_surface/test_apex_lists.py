"""Apex's variant of the op lists: each call has the types that it had in Apex, forward and backward.

The tables here are facts about Apex (apex/amp/lists at the parent of NVIDIA/apex#1896), not read off oplists.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES, original
from op_calls import (
    APEXS,
    AUGMENTED,
    BF16,
    COMPARISONS,
    DOUBLE,
    FULL,
    HALF,
    NATIVE,
    OPTIONAL,
    ROWS,
    TABLE,
    TWO,
    arguments,
    call_of,
    flat,
    inside,
    installed_fixture,  # noqa: F401  the fixture `installed`
    resolve,
    result_types,
    sample,
)
from torch import Tensor, nn

from amp_patch.apex.amp import lists
from amp_patch.casts import install, regions
from amp_patch.casts.apex_oplists import APEX
from amp_patch.casts.oplists import rules_by_name
from amp_patch.policy import Policy

# ---------------------------------------------------------------------------------------------------------------------
# The table: kind -> the result's type for arguments of FP16, of FP32, and of both.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("owner", "names", "expected"), ROWS)
def test_types_forward_and_backward(
    owner: str, names: list[str], expected: tuple[torch.dtype, ...], device: str
) -> None:
    for name, (given, wanted) in product(names, zip(([HALF], [FULL], [HALF, FULL]), expected, strict=True)):
        args, kwargs = arguments(owner, name, given, device)
        floating = [tensor for tensor in flat(args) if tensor.dtype in (HALF, FULL)]
        if len(given) > len(floating):
            continue  # one tensor: nothing to mix
        # Statistics and targets take no gradient.
        leaves = floating[:1] if name in ("batch_norm", "instance_norm", "soft_margin_loss") else floating
        for leaf in leaves:
            leaf.requires_grad_()
        if owner == "torch.Tensor":
            args[0] = args[0] * 1  # what is changed in place is no leaf
        with inside:
            result = call_of(owner, name, args, kwargs)
        # CUDA's statistics of a layer norm are FP32.
        typed = result[0] if name == "native_layer_norm" and device != "cpu" else result
        assert result_types(typed) == {wanted}, (name, given)
        torch.autograd.backward([output.float().sum() for output in flat(result) if output.requires_grad])
        assert leaves[0].grad is not None, name
        assert all(leaf.grad is None or leaf.grad.dtype is leaf.dtype for leaf in leaves), name


def test_the_variant_holds_only_differences_each_of_them_tested() -> None:
    native = rules_by_name("torch")
    for owner, rules in APEX.items():
        for rule, names in rules.items():
            for name in names:
                assert native.get((owner, name)) != rule, "no difference"
                assert sum(name in others for others in rules.values()) == 1, "a name has one rule"
                assert f"{owner}.{name}" in OPTIONAL or callable(original(getattr(resolve(owner), name)))
    told = {(owner, name) for owner, kinds in TABLE.items() for names in kinds.values() for name in names.split()}
    told |= {("torch.functional", name) for name in ("einsum", "chain_matmul")}  # torch's own, again
    told |= {(owner, name) for owner, names in COMPARISONS.items() for name in names.split()}
    told |= {(owner, name) for owner, names in REFUSED.items() for name in names.split()}
    assert {(owner, name) for owner, rules in APEX.items() for names in rules.values() for name in names} <= told


# ---------------------------------------------------------------------------------------------------------------------
# Mixed types


MIXED = [(owner, name) for owner in ("torch", "torch.Tensor") for name in APEX[owner]["mixed_fp32"] if name in TWO]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", [HALF, BF16])
def test_a_tensor_without_dimensions_widens_as_any_other(low: torch.dtype, device: str) -> None:
    x, scale = torch.ones(3, dtype=low, device=device), torch.tensor(2.0, device=device)
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: x * y, lambda x, y: y * x, lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x / y, torch.mul,
        torch.Tensor.add, lambda x, y: torch.addcmul(x, x, y),
    ]  # fmt: skip
    for function in calls:
        with inside:
            assert function(x, scale).dtype is FULL
        with regions.region(NATIVE):
            assert function(x, scale).dtype is low
        assert function(x, scale).dtype is low
    with inside:
        assert (x * 2.0).dtype is low and (1 - x).dtype is low and (x + 1).dtype is low, "a number is no tensor"


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner in COMPARISONS for name in COMPARISONS[owner].split()]
)
def test_comparisons_compare_in_fp32(owner: str, name: str) -> None:
    # 2049 rounds to 2048 in FP16.
    low, full = torch.tensor([2048.0], dtype=HALF), torch.tensor(2049.0)
    answer = bool(getattr(resolve(owner), name)(low.float(), full.view(1)))
    with inside:
        assert bool(getattr(resolve(owner), name)(low, full if name != "equal" else full.view(1))) is answer
        assert low.eq(low).all() and not low.ne(low).any()


@pytest.mark.parametrize(("owner", "name"), MIXED)
def test_low_precision_with_fp64_is_refused_and_fp32_with_fp64_is_not(owner: str, name: str) -> None:
    for low in (HALF, BF16):
        for given in ([low, DOUBLE], [DOUBLE, low]):
            args, kwargs = arguments(owner, name, given, "cpu")
            with inside, pytest.raises(NotImplementedError, match=f"got tensors of {low} and torch.float64"):
                call_of(owner, name, args, kwargs)
            with regions.region(NATIVE):
                call_of(owner, name, args, kwargs)
    for given in ([DOUBLE], [DOUBLE, FULL]):
        args, kwargs = arguments(owner, name, given, "cpu")
        with inside:
            assert result_types(call_of(owner, name, args, kwargs)) <= {DOUBLE}


# ---------------------------------------------------------------------------------------------------------------------
# In place


@pytest.mark.parametrize("name", AUGMENTED.split())
def test_an_augmented_assignment_of_mixed_types_makes_a_new_fp32_tensor(name: str) -> None:
    half, full = torch.full((3,), 4.0, dtype=HALF), torch.full((3,), 2.0)
    before = half.clone()
    with inside:
        result = getattr(half, name)(full)
        assert result.dtype is FULL and torch.equal(half, before)
        assert getattr(full, name)(half) is full and full.dtype is FULL
        assert getattr(half, name)(half) is half


REFUSED = {  # the FP32 functions of Apex that have a form in place
    "torch": "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_",
    "torch.Tensor": """
        acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_
        erfinv_ pow_ cumsum_ cumprod_ renorm_
    """,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner in REFUSED for name in REFUSED[owner].split()])
def test_functions_with_fp32_results_are_refused_in_place_on_low_precision(owner: str, name: str, device: str) -> None:
    for low in (HALF, BF16):
        args, kwargs = sample(owner, name, [low], device)
        before = args[0].clone()
        with inside, pytest.raises(NotImplementedError, match=f"{name}: got a {low} tensor.* use {name[:-1]},"):
            call_of(owner, name, list(args), kwargs)
        assert torch.equal(args[0], before)
    args, kwargs = sample(owner, name, [FULL], device)
    with inside:
        assert call_of(owner, name, list(args), kwargs) is args[0], "FP32 in place as ever"
    for policy in (NATIVE, Policy("O2", cast_model_type=HALF, op_lists="apex"), None):
        args, kwargs = sample(owner, name, [HALF], "cpu")
        if name != "erfinv_" or torch.device(device).type != "cpu":
            with regions.region(policy):
                assert call_of(owner, name, list(args), kwargs).dtype is HALF


def test_banned() -> None:
    probabilities, target = torch.full((3,), 0.5), torch.ones(3)
    for loss in (F.binary_cross_entropy, nn.BCELoss()):
        with inside, pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            loss(probabilities.half(), target)
        with regions.region(replace(APEXS, allow_banned=True)):
            assert loss(probabilities.half(), target).dtype is FULL
        with inside:
            assert loss(probabilities, target).dtype is FULL


# ---------------------------------------------------------------------------------------------------------------------
# The lists as callers see them


MODULES = {
    "torch.nn.functional": lists.functional_overrides,
    "torch": lists.torch_overrides,
    "torch.Tensor": lists.tensor_overrides,
}


@pytest.mark.parametrize("owner", MODULES)
def test_the_lists_name_what_apex_named(owner: str) -> None:
    module = MODULES[owner]
    assert module.MODULE is resolve(owner)
    assert set(TABLE[owner]["half"].split()) <= set(module.FP16_FUNCS)
    assert set(TABLE[owner]["float"].split()) <= set(module.FP32_FUNCS)
    if owner != "torch.nn.functional":
        named = {*module.CASTS, *lists.torch_overrides.SEQUENCE_CASTS, *module.FP32_FUNCS}
        assert {"add", "mul", "div", "addcmul", "addcdiv", "atan2", "cross", "dot", "eq", "ne", "equal"} <= named


def test_edits_act(monkeypatch: pytest.MonkeyPatch) -> None:
    functional, tensor = lists.functional_overrides, lists.tensor_overrides
    x, half = torch.rand(3, 3), torch.rand(3, 3).half()
    lists.register_edits()
    assert not install._registered, "no edit, nothing to register"

    monkeypatch.setattr(functional, "FP16_FUNCS", [*functional.FP16_FUNCS, "relu", "function_of_tomorrow"])
    monkeypatch.setattr(functional, "FP32_FUNCS", [*functional.FP32_FUNCS, "gelu", "linear"])
    monkeypatch.setattr(functional, "BANNED_FUNCS", [])
    monkeypatch.setattr(tensor, "CASTS", [*tensor.CASTS, "sub"])
    functional.FP16_FUNCS.remove("linear")
    functional.FP32_FUNCS.remove("softmin")
    lists.register_edits()
    with inside:
        assert F.relu(x).dtype is HALF and F.gelu(half).dtype is FULL and F.linear(half, x).dtype is FULL
        assert F.binary_cross_entropy(half, half).dtype is HALF and F.softmin(half, dim=0).dtype is HALF
        assert x.sub(half).dtype is FULL
    install.uninstall()
    install.install("apex")  # as the next initialize does
    with inside:
        assert F.relu(x).dtype is HALF and F.softmin(half, dim=0).dtype is HALF
