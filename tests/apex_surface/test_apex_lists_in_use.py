"""Apex's op lists in modules and beside other trainings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from casting import differences, half_kernels, namespaces
from conftest import DEVICES, original
from crossed import crossed
from op_calls import (
    APEXS,
    DOUBLE,
    FULL,
    HALF,
    NATIVE,
    ROWS,
    arguments,
    call,
    call_of,
    inside,
    installed_fixture,  # noqa: F401  the fixture `installed`
    result_types,
    sample,
)
from torch import Tensor, nn

from amp_patch.casts import cpu_half, install, regions
from amp_patch.casts.apex_oplists import APEX
from amp_patch.casts.oplists import rules_by_name
from amp_patch.policy import Policy

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


@pytest.mark.parametrize("device", DEVICES)
@crossed(
    {
        "packed": [False, True],
        "kind": [nn.RNN, nn.GRU, nn.LSTM],
        "layers, both_ways": [(1, False), (2, False), (2, True)],
        "given": [HALF, FULL],
    }
)
def test_recurrent_networks(
    kind: type[nn.RNNBase], layers: int, both_ways: bool, given: torch.dtype, packed: bool, device: str
) -> None:
    network = kind(3, 3, num_layers=layers, bidirectional=both_ways).to(device)
    x = torch.randn(4, 2, 3, device=device).to(given).requires_grad_()
    state = torch.zeros(layers * (1 + both_ways), 2, 3, dtype=given, device=device)
    value: Any = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2])) if packed else x
    with inside:
        output, _ = network(value, (state, state) if kind is nn.LSTM else state)
    data = output.data if packed else output
    assert data.dtype is HALF
    data.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is given
    assert all(weight.grad is not None and weight.grad.dtype is FULL for weight in network.parameters())


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


EMULATING = replace(APEXS, cpu_half="emulate")


@pytest.mark.parametrize("policy", [EMULATING, Policy("O2", cast_model_type=HALF, cpu_half="emulate", op_lists="apex")])
@pytest.mark.parametrize("name", ["einsum", "chain_matmul", "bilinear", "dot", "mm", "baddbmm"])
def test_fp16_on_a_cpu_is_emulated_here_too(policy: Policy, name: str) -> None:
    args, kwargs = sample("torch", name, [HALF], "cpu")
    wide = [arg.float() if isinstance(arg, Tensor) and arg.dtype is HALF else arg for arg in args]
    expected = call_of("torch", name, wide, kwargs)
    found: list[Tensor] = []
    cpu_half.emulate(policy)
    with regions.region(policy):
        assert half_kernels(lambda: found.append(call_of("torch", name, list(args), kwargs))) == []
    torch.testing.assert_close(found[0].float(), expected, atol=2e-3, rtol=2e-3)  # two roundings to FP16


@pytest.mark.parametrize(("owner", "names", "expected"), ROWS)
def test_types_are_the_same_under_emulation(owner: str, names: list[str], expected: object) -> None:
    for name, given in product(names, ([HALF], [FULL], [HALF, FULL])):
        if (owner, name) == ("torch.Tensor", "__ipow__"):
            continue
        types = []
        for policy in (APEXS, EMULATING):
            args, kwargs = arguments(owner, name, given, "cpu")
            with regions.region(policy):
                types.append(result_types(call_of(owner, name, args, kwargs)))
        assert types[0] == types[1], (name, given)
