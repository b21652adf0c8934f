"""oplists.py: every name resolves or is optional, and every function is called and yields its rule's type."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import wrapper_backends
from casting import half_kernels
from conftest import DEVICES, DTYPES, WRAPPERS, original
from cpu_half_cases import POLICIES
from op_calls import OPTIONAL, SAMPLES, call, flat, resolve, result_types, sample
from torch import Tensor, nn

from amp_patch import multi_tensor
from amp_patch.casts import cpu_half, functions, install, regions
from amp_patch.casts import state as casts_state
from amp_patch.casts.oplists import OPLISTS, rules_by_name
from amp_patch.casts.rules import RULES
from amp_patch.policy import Policy

LOW = [dtype for dtype in DTYPES if dtype in (torch.float16, torch.bfloat16)]
ALL = [(owner, rule, name) for owner, rules in OPLISTS.items() for rule, names in rules.items() for name in names]

# Their results are no floating numbers: what matters is that the call went through.
NOT_FLOATING = {"matrix_rank", "isclose", "allclose"}


@pytest.fixture(scope="module", params=WRAPPERS, autouse=True)
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install the casts with one kind of wrapper, once for all tests, which only call the functions."""
    with wrapper_backends.use_backend(request.param):
        install.install()
        yield


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """In place of the one for all tests, which would uninstall the casts."""
    yield
    cpu_half._installation.uninstall()
    assert casts_state.current() is None and install.installed()


def walk(*rules: str) -> list[Any]:
    return [
        pytest.param(owner, name, id=f"{owner}.{name}")
        for owner, rule, name in ALL
        if rule in rules and (f"{owner}.{name}" not in OPTIONAL or hasattr(resolve(owner), name))
    ]


def region(dtype: torch.dtype, **options: Any) -> regions.region:
    return regions.region(Policy("O1", dtype=dtype, patch_torch_functions=True, **options))


@pytest.mark.parametrize("owner", OPLISTS)
def test_every_name_resolves_once_and_is_wrapped(owner: str) -> None:
    for name, rule in [(name, rule) for of_owner, rule, name in ALL if of_owner == owner]:
        assert rule in RULES
        assert sum(name in names for names in OPLISTS[owner].values()) == 1, f"{name} has one rule"
        if f"{owner}.{name}" not in OPTIONAL or hasattr(resolve(owner), name):
            assert callable(original(getattr(resolve(owner), name))), name


def test_optional_names_and_samples_are_about_the_lists() -> None:
    names = {name for _, _, name in ALL}
    addresses = {f"{owner}.{name}" for owner, _, name in ALL}
    assert addresses >= OPTIONAL
    assert not {key for key in SAMPLES if key not in names and key not in addresses}, "samples of nothing"


FULL, DOUBLE = torch.float32, torch.float64
LOWERS, RAISES = ("lower", "product", "einsum", "rnn"), ("fp32", "loss", "norm", "direction", "inexact")


def gives(rule: str, low: torch.dtype) -> list[tuple[list[torch.dtype], torch.dtype]]:
    """Return (types of the floating arguments in turn, type of the result) of a rule under casts to `low`."""
    other = next(each for each in LOW if each is not low)
    if rule in LOWERS:
        return [([FULL], low), ([other], low), ([low, FULL], low), ([DOUBLE], DOUBLE)]
    if rule in RAISES:
        return [([low], FULL), ([FULL], FULL), ([low, FULL], FULL)]
    if rule == "match_self":
        return [([low, FULL], low), ([FULL, low], FULL)]
    return [([low, FULL], FULL), ([FULL, low], FULL), ([low, other], FULL), ([DOUBLE], DOUBLE)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("owner", "name"),
    [case for case in walk(*LOWERS, *RAISES, "widest", "match_self") if case.values[0] != "torch.ops.torch_attn"],
)
def test_a_function_gives_the_type_of_its_rule(owner: str, name: str, dtype: torch.dtype, device: str) -> None:
    rule = next(rule for of, rule, named in ALL if (of, named) == (owner, name))
    if device != "cpu" and name in ("saddmm", "smm", "sspaddmm"):
        pytest.skip("torch has no kernel, in FP32 either")
    with region(dtype):
        for given, result in gives(rule, dtype):
            expected = set() if name in NOT_FLOATING else {result}
            assert result_types(call(owner, name, given, device)) == expected, given
    if rule in LOWERS:
        assert result_types(call(owner, name, [FULL], device)) == {FULL}  # casts off
    if rule == "match_self":
        with pytest.raises((RuntimeError, IndexError)):
            call(owner, name, [dtype, FULL], device)  # what torch says by itself
    if rule in RAISES:
        with suppress(RuntimeError, ValueError), regions.region(None):  # no half kernel: listed with reason
            assert result_types(call(owner, name, [dtype], device)) != {FULL}, "FP32 without our help: nothing to list"


# (tests/casts/test_newer_functions.py calls the other functions of these rules.)
@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="no kernel for a CPU")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_fused(dtype: torch.dtype, device: str) -> None:
    other = next(low for low in (torch.float16, torch.bfloat16) if low is not dtype)
    for way in ("native", "emulate"):
        with region(dtype, cpu_half=way):
            for given in ([torch.float32], [other], [dtype, torch.float32]):
                assert result_types(call("torch", "_grouped_mm", given, device)) == {dtype}
    assert result_types(call("torch", "_grouped_mm", [torch.float32], device)) == {torch.float32}  # casts off


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("owner", "name"), walk("sigmoid"))
def test_sigmoid_gives_fp32_where_a_cross_entropy_may_follow(
    owner: str, name: str, dtype: torch.dtype, device: str
) -> None:
    for allowed, expected in ((True, torch.float32), (False, dtype)):
        with region(dtype, allow_banned=allowed):
            assert result_types(call(owner, name, [dtype], device)) == {expected}
            assert result_types(call(owner, name, [torch.float32], device)) == {torch.float32}
    assert result_types(call(owner, name, [dtype], device)) == {dtype}  # casts off


def widened(value: Any) -> Any:
    """Low tensors as FP32 ones of the same values."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW else value
    return type(value)(map(widened, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *walk("lower", "product", "einsum", "rnn"),
        *(("torch.Tensor", name) for name in ("addbmm_", "addmm_", "addmv_", "baddbmm_")),
    ],
)
def test_products_are_emulated(owner: str, name: str, policy: Policy) -> None:
    low = policy.dtype
    args, kwargs = sample(owner, name, [low], "cpu")
    wide, wide_kwargs = sample(owner, name, [low], "cpu")
    found: list[Any] = []
    cpu_half.emulate(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = getattr(resolve(owner), name)(*widened(list(wide)), **wide_kwargs)
        with regions.region(policy):
            assert half_kernels(lambda: found.append(getattr(resolve(owner), name)(*args, **kwargs)), low) == []
    assert result_types(found[0]) == {low}
    for one, other in zip(flat(found[0]), flat(expected), strict=True):
        torch.testing.assert_close(
            one.float(), other.float(), atol=8 * torch.finfo(low).eps, rtol=8 * torch.finfo(low).eps
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("owner", "name"), walk("banned"))
def test_banned(owner: str, name: str, dtype: torch.dtype, device: str) -> None:
    with region(dtype):
        for given in ([dtype], [dtype, torch.float32], [torch.float32, dtype]):
            with pytest.raises(NotImplementedError, match=f"{name}: got .*binary_cross_entropy_with_logits"):
                call(owner, name, given, device)
        assert result_types(call(owner, name, [torch.float32], device)) == {torch.float32}
    with region(dtype, allow_banned=True):
        assert result_types(call(owner, name, [dtype], device)) == {torch.float32}
    if torch.device(device).type == "cpu":
        assert result_types(call(owner, name, [dtype], device)) == {dtype}  # casts off: torch's own answer


@pytest.mark.parametrize("cpu_half", ["native", "emulate"])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_einsum_of_one_operand_is_a_view_of_it_still(given: torch.dtype, cpu_half: str) -> None:
    matrices = [torch.ones(3, 3, dtype=given) for _ in range(2)]
    with region(torch.float16, cpu_half=cpu_half):
        torch.einsum("ii->i", matrices[0]).zero_()
        torch.functional.einsum("ii->i", [matrices[1]]).zero_()
    assert [m.sum().item() for m in matrices] == [6.0, 6.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16])
def test_rnn_input(dtype: torch.dtype, weights: torch.dtype, device: str) -> None:
    rnn = nn.GRU(3, 3).to(device=device, dtype=weights)
    with region(dtype):
        for given in (torch.float32, dtype):
            assert rnn(torch.ones(2, 1, 3, dtype=given, device=device))[0].dtype is dtype
        with pytest.raises(RuntimeError, match=r"input\.size\(-1\)"):
            rnn(torch.ones(2, 1, 4, dtype=dtype, device=device))  # the check still checks shapes


def test_disabled() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    with region(torch.float16):
        assert not torch.backends.mha.get_fastpath_enabled()


# ---------------------------------------------------------------------------------------------------------------------
# The table of rules


def test_every_rule_is_used_by_the_lists_or_by_users() -> None:
    listed = {rule for lists in ("torch", "apex") for rule in rules_by_name(lists).values()}
    for name, rule in RULES.items():
        assert rule.name == name
        assert (name in listed) is not (rule.for_users or name == "none"), "a rule is of the lists or of users"
    assert listed <= set(RULES)


def test_a_rule_that_users_register_names_its_amp_patch_function() -> None:
    assert {rule.name for rule in RULES.values() if rule.for_users} <= {
        rule.name for rule in RULES.values() if rule.registered_by
    }
    for rule in RULES.values():
        assert not rule.registered_by or callable(getattr(functions, rule.registered_by))


@pytest.mark.extension
def test_the_extension_has_the_rules_that_the_table_says() -> None:
    in_cpp = {name for name, rule in RULES.items() if rule.in_cpp}
    assert multi_tensor.extension().casts.rules == in_cpp
    assert not any(RULES[name].for_users for name in in_cpp), "what users hand in is left to Python"
