"""Apex's variant of the op lists: what type each call gives, forward and backward, as it gave it in Apex.

The tables here are facts about Apex (apex/amp/lists at the parent of NVIDIA/apex#1896), not read off oplists.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES, original
from op_calls import call, flat, resolve, result_types, sample
from other_thread import run_in_thread
from torch import Tensor, nn
from torch_names import differences, namespaces

from amp_patch import amp
from amp_patch.apex.amp import lists
from amp_patch.casts import install, regions
from amp_patch.casts import state as casts_state
from amp_patch.casts.apex_oplists import APEX
from amp_patch.casts.oplists import OPTIONAL, rules_by_name
from amp_patch.policy import Policy

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

NATIVE = Policy("O1", patch_torch_functions=True)
APEXS = replace(NATIVE, op_lists="apex")


@pytest.fixture(autouse=True)
def installed(clean_casts: None) -> Iterator[None]:
    registered = dict(install._registered)
    install.install("apex")
    yield
    install._registered.clear()
    install._registered.update(registered)


inside = regions.region(APEXS)

# ---------------------------------------------------------------------------------------------------------------------
# The table: kind -> the result's type for arguments of FP16, of FP32, and of both.

KINDS: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "half": (HALF, HALF, HALF),
    "float": (FULL, FULL, FULL),
    "widest": (HALF, FULL, FULL),
    "self": (HALF, FULL, HALF),  # in place; batch norms: the type of what comes in, whatever their weights are
}

POINTWISE = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan"
ARITHMETIC = "add mul div __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __div__"
AUGMENTED = "__iadd__ __isub__ __imul__ __itruediv__ __idiv__"
COMPARISONS = {
    "torch": "eq equal ge gt le lt ne",
    "torch.Tensor": "eq equal ge gt le lt ne __eq__ __ge__ __gt__ __le__ __lt__ __ne__",
}
CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
BLAS = "addmm addmv addr matmul mm mv addbmm baddbmm bmm prelu"
REDUCTIONS = "cumprod cumsum dist norm prod std sum var renorm pow"

TABLE: dict[str, dict[str, str]] = {
    "torch.nn.functional": {
        "half": f"{CONVOLUTIONS} linear",
        "float": """
            interpolate grid_sample softplus softmin log_softmax softmax layer_norm group_norm local_response_norm
            normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div
            l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss
            nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss
        """,
        "widest": "pairwise_distance bilinear relu gelu tanh",
        "self": "batch_norm instance_norm",
    },
    "torch": {
        "half": f"{CONVOLUTIONS} {BLAS}",
        "float": f"{POINTWISE} {REDUCTIONS}",
        "self": "batch_norm instance_norm",
        "widest": """
            binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss kl_div margin_ranking_loss
            poisson_nll_loss triplet_margin_loss
            add mul div addcdiv addcmul atan2 cross bilinear dot cat stack
            einsum chain_matmul log1p logsumexp softmax log_softmax std_mean var_mean pairwise_distance layer_norm
            group_norm native_layer_norm cosine_similarity frobenius_norm mean sigmoid sqrt
        """,
    },
    "torch.Tensor": {
        "half": f"{BLAS} __matmul__",
        "float": f"{POINTWISE} {REDUCTIONS} __pow__ __rpow__ __ipow__ cpu",
        "widest": f"{ARITHMETIC} {AUGMENTED} addcdiv addcmul atan2 cross dot log1p logsumexp softmax log_softmax mean",
        "self": "add_ mul_ div_ addcdiv_ addcmul_ atan2_ addmm_ addmv_ addr_ addbmm_ baddbmm_",
    },
}

ROWS = [
    pytest.param(owner, name, KINDS[kind], id=f"{owner}.{name}")
    for owner, kinds in TABLE.items()
    for kind, names in kinds.items()
    for name in names.split()
]

# Arguments of what test_oplists.py has none for.
TWO = {*ARITHMETIC.split(), *AUGMENTED.split(), *COMPARISONS["torch.Tensor"].split(), "add_", "mul_", "div_"}


def arguments(owner: str, name: str, dtypes: list[torch.dtype], device: str) -> tuple[list[Any], dict[str, Any]]:
    if name in TWO:
        args, kwargs = sample("torch", "mm", dtypes, device)
    elif name in ("cat", "stack"):
        args, kwargs = (list(sample("torch", "mm", dtypes, device)[0]),), {}
    elif name == "__ipow__":
        args, kwargs = sample("torch", "pow", dtypes, device)
    elif name in ("batch_norm", "instance_norm"):
        x = torch.rand(2, 3, 4).to(device=device, dtype=dtypes[0])
        weights = [torch.ones(3, device=device, dtype=dtypes[-1]) for _ in range(4)]
        args, kwargs = (x, *weights, True), {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
        if owner != "torch":
            args, kwargs = (x, *weights, True), {}
    else:
        args, kwargs = sample(owner, name, dtypes, device)
    return list(args), kwargs


def run(owner: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        return getattr(resolve(owner), name)(*args, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("owner", "name", "expected"), ROWS)
def test_types_forward_and_backward(owner: str, name: str, expected: tuple[torch.dtype, ...], device: str) -> None:
    for given, wanted in zip(([HALF], [FULL], [HALF, FULL]), expected, strict=True):
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
            result = run(owner, name, args, kwargs)
        assert result_types(result) == {wanted}, given
        torch.autograd.backward([output.float().sum() for output in flat(result) if output.requires_grad])
        assert leaves[0].grad is not None
        assert all(leaf.grad is None or leaf.grad.dtype is leaf.dtype for leaf in leaves)


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
                run(owner, name, args, kwargs)
            with regions.region(NATIVE):
                run(owner, name, args, kwargs)
    for given in ([DOUBLE], [DOUBLE, FULL]):
        args, kwargs = arguments(owner, name, given, "cpu")
        with inside:
            assert result_types(run(owner, name, args, kwargs)) <= {DOUBLE}


def test_promote_function_refuses_fp64_as_well() -> None:
    half, double = torch.ones(2, dtype=HALF), torch.ones(2, dtype=DOUBLE)
    promote = amp.promote_function(lambda xs: torch.sub(*xs))
    with inside, pytest.raises(NotImplementedError, match=r"float16 and torch\.float64"):
        promote([half, double])
    with regions.region(NATIVE):
        assert promote([half, double]).dtype is DOUBLE


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


def test_rows_of_a_buffer_are_still_written() -> None:
    buffer = torch.zeros(2, 2, dtype=HALF)
    with inside:
        buffer[0] += torch.ones(2)
    assert buffer.tolist() == [[1.0, 1.0], [0.0, 0.0]] and buffer.dtype is HALF


REFUSED = {  # the FP32 functions of Apex that have a form in place
    "torch": "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_",
    "torch.Tensor": """
        acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_
        erfinv_ pow_ cumsum_ cumprod_ renorm_
    """,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner in REFUSED for name in REFUSED[owner].split()])
def test_what_gives_fp32_is_refused_in_place_on_low_precision(owner: str, name: str, device: str) -> None:
    for low in (HALF, BF16):
        args, kwargs = sample(owner, name, [low], device)
        before = args[0].clone()
        with inside, pytest.raises(NotImplementedError, match=f"{name}: got a {low} tensor.* use {name[:-1]},"):
            run(owner, name, list(args), kwargs)
        assert torch.equal(args[0], before)
    args, kwargs = sample(owner, name, [FULL], device)
    with inside:
        assert run(owner, name, list(args), kwargs) is args[0], "FP32 in place as ever"
    for policy in (NATIVE, Policy("O2", cast_model_type=HALF, op_lists="apex"), None):
        args, kwargs = sample(owner, name, [HALF], "cpu")
        if name != "erfinv_" or torch.device(device).type != "cpu":
            with regions.region(policy):
                assert run(owner, name, list(args), kwargs).dtype is HALF


@pytest.mark.parametrize("device", DEVICES)
def test_outside_of_the_variant_nothing_is_refused(device: str) -> None:
    x = torch.ones(2, dtype=HALF, device=device)
    with inside, amp.disable_casts():
        assert x.exp_() is x and (x * x.double()).dtype is DOUBLE
    with inside, regions.region(None):
        assert (x**2).dtype is HALF


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


def test_what_goes_to_numpy_is_fp32() -> None:
    with inside:
        assert torch.ones(2, dtype=HALF).cpu().numpy().dtype == "float32"
        assert torch.ones(2, dtype=DOUBLE).cpu().dtype is DOUBLE and torch.ones(2, dtype=torch.int64).cpu().sum() == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [HALF, FULL])
@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells(cell: type[nn.Module], given: torch.dtype, device: str) -> None:
    module = cell(3, 3).to(device)
    inputs = [torch.randn(2, 3, device=device).to(given).requires_grad_() for _ in range(3)]
    zeros = torch.zeros(2, 3, dtype=given, device=device)
    hidden: Any = (zeros, zeros) if cell is nn.LSTMCell else zeros
    with inside:
        for x in inputs:
            hidden = module(x, hidden)
            assert result_types(hidden) == {HALF}
    flat(hidden)[0].float().sum().backward()
    assert [x.grad.dtype for x in inputs if x.grad is not None] == [given] * 3
    assert {weight.grad.dtype for weight in module.parameters() if weight.grad is not None} == {FULL}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [HALF, FULL])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("packed", [False, True])
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
# The cast cache


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    return (x.mm(weight)).mm(weight).sum()


def raised(x: Tensor, weight: Tensor) -> Tensor:
    return (x + torch.pow(weight, 2) + torch.pow(weight, 2)).sum()


def promoted(x: Tensor, weight: Tensor) -> Tensor:
    return ((x * weight) * weight).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [HALF, FULL])
@pytest.mark.parametrize("operations", [multiplied, raised, promoted])
def test_training_evaluation_and_training_again(
    operations: Callable[[Tensor, Tensor], Tensor], given: torch.dtype, device: str
) -> None:
    rows = 8 if operations is multiplied else 2
    weight = nn.Parameter(torch.arange(rows * 8.0, device=device).view(rows, 8).to(given) / 8)
    x = torch.ones(2, 8, device=device)

    def train() -> None:
        weight.grad = None
        oracle = weight.detach().float().requires_grad_()
        operations(x, oracle).backward()
        with inside:
            operations(x, weight).backward()
        assert weight.grad is not None and weight.grad.dtype is given
        torch.testing.assert_close(weight.grad.float(), oracle.grad, rtol=1e-3, atol=1e-3)
        weight.data -= 1.0

    train()
    with inside, torch.no_grad():
        operations(x, weight)
    train()


def test_a_weight_is_cast_once_in_training_and_not_for_it_in_evaluation() -> None:
    weight, x = nn.Parameter(torch.eye(3)), torch.ones(2, 3)
    with inside:
        with torch.no_grad():
            F.linear(x, weight)
        first = casts_state.state().cached()
        y = F.linear(F.linear(x, weight), weight)
        assert casts_state.state().cached() == first + 1, "one cast, with a graph of its own"
        y.sum().backward()
        F.linear(x, weight.detach().clone())
        assert casts_state.state().cached() == first + 1, "what is no parameter is not kept"
    assert weight.grad is not None and weight.grad.dtype is FULL and weight.grad.abs().sum() > 0
    assert casts_state.state().cached() == 0
    with inside:
        weight.data.fill_(2.0)
        assert F.linear(torch.ones(1, 3), weight).tolist() == [[6.0, 6.0, 6.0]]


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


def test_threads_have_each_their_own() -> None:
    x = torch.rand(3, dtype=HALF)
    with inside:
        casts_state.set_default(NATIVE)
        assert x.softmax(0).dtype is HALF
        assert run_in_thread(lambda: x.softmax(0).dtype) is FULL
        casts_state.set_default(APEXS)
        assert run_in_thread(lambda: x.softmax(0).dtype) is HALF


def test_o4_follows_the_same_lists() -> None:
    x = torch.rand(2, 3)
    with regions.region(replace(APEXS, dtype=BF16)):
        assert (x @ x.T).dtype is BF16 and torch.cat([x.bfloat16(), x]).dtype is FULL
        assert (x.bfloat16() * torch.tensor(1.0)).dtype is FULL and x.bfloat16().softmax(0).dtype is BF16


EMULATING = replace(APEXS, cpu_fp16="emulate")


@pytest.mark.parametrize("policy", [EMULATING, Policy("O2", cast_model_type=HALF, cpu_fp16="emulate", op_lists="apex")])
@pytest.mark.parametrize("name", ["einsum", "chain_matmul", "bilinear", "dot", "mm", "baddbmm"])
def test_fp16_on_a_cpu_is_emulated_here_too(policy: Policy, name: str) -> None:
    args, kwargs = sample("torch", name, [HALF], "cpu")
    wide = [arg.float() if isinstance(arg, Tensor) and arg.dtype is HALF else arg for arg in args]
    expected = run("torch", name, wide, kwargs).half()
    with regions.region(policy):
        assert torch.equal(run("torch", name, list(args), kwargs), expected)


@pytest.mark.parametrize("given", [HALF, FULL])
def test_einsum_of_one_operand_is_a_view_under_emulation(given: torch.dtype) -> None:
    matrix = torch.ones(3, 3, dtype=given)
    with regions.region(EMULATING):
        torch.einsum("ii->i", matrix).zero_()
    assert matrix.sum() == 6


@pytest.mark.parametrize(
    ("owner", "name"),
    [row.values[:2] for row in ROWS if (row.values[0], row.values[1]) != ("torch.Tensor", "__ipow__")],
)
def test_types_are_the_same_under_emulation(owner: str, name: str) -> None:
    for given in ([HALF], [FULL], [HALF, FULL]):
        types = []
        for policy in (APEXS, EMULATING):
            args, kwargs = arguments(owner, name, given, "cpu")
            with regions.region(policy):
                types.append(result_types(run(owner, name, args, kwargs)))
        assert types[0] == types[1]


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


def test_banned_functions_come_with_advice() -> None:
    assert [name for name, _ in lists.functional_overrides.BANNED_FUNCS] == ["binary_cross_entropy"]
    assert all("with_logits" in advice for _, advice in lists.functional_overrides.BANNED_FUNCS)


def test_edits_act(monkeypatch: pytest.MonkeyPatch) -> None:
    functional, tensor = lists.functional_overrides, lists.tensor_overrides
    x, half = torch.rand(3, 3), torch.rand(3, 3).half()
    lists.register_edits(torch.float16)
    assert not install._registered, "no edit, nothing to register"

    monkeypatch.setattr(functional, "FP16_FUNCS", [*functional.FP16_FUNCS, "relu", "function_of_tomorrow"])
    monkeypatch.setattr(functional, "FP32_FUNCS", [*functional.FP32_FUNCS, "gelu", "linear"])
    monkeypatch.setattr(functional, "BANNED_FUNCS", [])
    monkeypatch.setattr(tensor, "CASTS", [*tensor.CASTS, "sub"])
    functional.FP16_FUNCS.remove("linear")
    functional.FP32_FUNCS.remove("softmin")
    lists.register_edits(torch.float16)
    with inside:
        assert F.relu(x).dtype is HALF and F.gelu(half).dtype is FULL and F.linear(half, x).dtype is FULL
        assert F.binary_cross_entropy(half, half).dtype is HALF and F.softmin(half, dim=0).dtype is HALF
        assert x.sub(half).dtype is FULL
    install.uninstall()
    install.install("apex")  # as the next initialize does
    with inside:
        assert F.relu(x).dtype is HALF and F.softmin(half, dim=0).dtype is HALF


# ---------------------------------------------------------------------------------------------------------------------
# The outputs of a cast model


@pytest.mark.parametrize(("wanted", "expected"), [(None, FULL), (HALF, HALF), (FULL, FULL)])
def test_cast_model_outputs(wanted: torch.dtype | None, expected: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"y": self.layer(x), "more": [self.layer(x), torch.tensor(1)]}

    model = amp.initialize(Model(), opt_level="O2", cast_model_outputs=wanted, verbosity=0)
    output = model(torch.ones(2, 3))
    assert output["y"].dtype is expected and output["more"][0].dtype is expected
    assert output["more"][1].dtype is torch.int64
