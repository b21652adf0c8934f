"""Apex's op lists in modules and beside other trainings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from casting import differences, namespaces
from conftest import original
from op_calls import (
    APEXS,
    DOUBLE,
    FULL,
    HALF,
    NATIVE,
    call,
    inside,
    installed_fixture,  # noqa: F401  the fixture `installed`
    result_types,
)
from torch import nn

from amp_patch.casts import install, regions
from amp_patch.casts.apex_oplists import APEX
from amp_patch.casts.oplists import rules_by_name

# ---------------------------------------------------------------------------------------------------------------------
# Modules


def test_a_block_of_layers_has_the_types_that_apex_gave_it() -> None:
    conv, norm, linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
    seen: list[torch.dtype] = []
    with inside:
        x = conv(torch.randn(2, 3, 8, 8))
        seen.append(x.dtype)
        x = norm(x)
        seen.append(x.dtype)
        x = F.relu(x).mean((2, 3))
        seen.append(x.dtype)
        x = F.layer_norm(linear(x), (4,))
        seen.append(x.dtype)
        seen.append(F.softmax(linear(x), dim=1).dtype)
        seen.append(linear(x).softmax(dim=1).dtype)
        loss = F.mse_loss(linear(x), torch.zeros(2, 4))
    assert seen == [HALF, HALF, HALF, FULL, FULL, HALF] and loss.dtype is FULL
    loss.backward()
    for module in (conv, norm, linear):
        assert all(weight.grad is not None and weight.grad.dtype is FULL for weight in module.parameters())
    assert norm.running_mean.dtype is FULL and norm.running_mean.abs().sum() > 0 and norm.num_batches_tracked == 1
    norm.eval()
    with inside, torch.no_grad():
        assert norm(torch.ones(2, 4, 2, 2, dtype=HALF)).dtype is HALF


def test_arrays_for_numpy_are_fp32() -> None:
    with inside:
        assert torch.ones(2, dtype=HALF).cpu().numpy().dtype == "float32"
        assert torch.ones(2, dtype=DOUBLE).cpu().dtype is DOUBLE and torch.ones(2, dtype=torch.int64).cpu().sum() == 2


# ---------------------------------------------------------------------------------------------------------------------
# Beside other trainings


def test_native_trainings_neither_change_nor_carry_what_only_apex_listed() -> None:
    install.uninstall()
    before = namespaces()
    install.install()
    native = namespaces()
    only = {f"{owner}.{name}" for owner, name in rules_by_name("apex").keys() - rules_by_name("torch").keys()}
    touched = {change.replace("<class '", "").replace("'>", "") for change in differences(before, native)}
    assert not touched & only and "__add__" not in vars(torch.Tensor)
    install.install("apex")
    install.install("apex")
    assert original(torch.add) is before[repr(torch)]["add"] and "__add__" in vars(torch.Tensor)
    install.uninstall()
    assert differences(before, namespaces()) == []
    assert "__add__" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(owner, name, id=f"{owner}.{name}")
        for owner, rules in APEX.items()
        for rule, names in rules.items()
        for name in names
        if rule in ("widest", "emulated", "none", "einsum_widest") and owner != "torch.functional"
    ],
)
def test_policies_of_both_kinds_take_turns(owner: str, name: str) -> None:
    native = HALF if name in ("einsum", "chain_matmul") else FULL
    apexs = FULL if name in ("einsum", "chain_matmul") else HALF
    given = FULL if native is HALF else HALF
    for policy, expected in [(NATIVE, native), (APEXS, apexs)] * 2:
        with regions.region(policy):
            assert result_types(call(owner, name, [given], "cpu")) == {expected}
            with regions.region(None):
                assert result_types(call(owner, name, [given], "cpu")) == {given}
