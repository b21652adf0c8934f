"""Emulation of FP16 and BF16 on a CPU: calls that it does not change, and the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from casting import half_kernels
from cpu_half_cases import (
    FP16,
    ONLY_EMULATES,
    POLICIES,
    half,
    installed_fixture,  # noqa: F401  the fixture `installed`
    only_emulates,
)
from torch import Tensor
from torch.nn import functional as F
from training import run_in_thread

from amp_patch import amp
from amp_patch.casts import regions
from amp_patch.casts import state as casts_state

BF16 = torch.bfloat16

# ---------------------------------------------------------------------------------------------------------------------
# The machine's own arithmetic.

# name -> (function, shapes): with operands of up to 8, FP32 holds every partial sum exactly, in whatever order
NATIVE: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 64), (7, 64), (7,)]),
    "mm": (torch.mm, [(33, 64), (64, 17)]),
    "large mm": (torch.mm, [(128, 256), (256, 128)]),
    "bmm": (torch.bmm, [(3, 9, 64), (3, 64, 17)]),
    "conv1d": (F.conv1d, [(2, 8, 19), (16, 8, 3)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 8, 9, 9), (4, 8, 3, 3), (4,)]),
}


@pytest.mark.parametrize("name", NATIVE)
def test_emulated_and_native_bf16_differ_by_the_order_of_sums_alone(name, installed):
    """Operands for which all orders of summation give the same sum: results are equal to the bit on every CPU."""
    function, shapes = NATIVE[name]
    torch.manual_seed(0)
    operands = [torch.randint(-8, 9, shape).to(BF16).requires_grad_() for shape in shapes]
    native = function(*operands)
    direction = torch.randint(-8, 9, native.shape).to(BF16)
    native_gradients = torch.autograd.grad(native, operands, direction)
    calls = casts_state.in_use.emulated_calls()
    with regions.region(only_emulates(BF16)):
        emulated = function(*operands)
        assert casts_state.in_use.emulated_calls() == calls + 1
        gradients = torch.autograd.grad(emulated, operands, direction)
    assert torch.equal(emulated, native) and emulated.abs().max() > 256  # some sums are no BF16 numbers
    assert all(torch.equal(a, b) for a, b in zip(gradients, native_gradients, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# What is left alone.


def test_only_the_training_itself_is_emulated():
    amp.initialize(training.convnet(), opt_level="O2", cpu_half="emulate")
    a = torch.randn(4, 4).half()
    assert half_kernels(lambda: a @ a) == ["aten::mm"]
    assert torch.backends.mha.get_fastpath_enabled()


def test_other_rules_do_not_act_without_casts(installed):
    with regions.region(ONLY_EMULATES):
        assert torch.exp(torch.ones(2).half()).dtype is FP16
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        assert F.softmax(torch.ones(2, 2).half(), 0).dtype is FP16
        assert amp.half_function(lambda x: x)(torch.ones(2)).dtype is torch.float32
        probabilities = torch.full((2,), 0.5).half()
        assert F.binary_cross_entropy(probabilities, probabilities).dtype is FP16


def words(function: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        function()
    return str(raised.value)


MIXED = {
    "mm": lambda a, b: torch.mm(a, b),
    "linear": lambda a, b: F.linear(a, b),
    "addmm_": lambda a, b: a.clone().addmm_(b, b),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "conv1d": lambda a, b: F.conv1d(a[None], b[None]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float64])
def test_mixed_types_are_refused_in_torchs_words(name, other, installed):
    a, b = torch.ones(4, 4).half(), torch.ones(4, 4, dtype=other)
    expected = words(lambda: MIXED[name](a, b))
    with regions.region(ONLY_EMULATES):
        assert words(lambda: MIXED[name](a, b)) == expected


def test_attention_takes_masks_of_any_type_that_torch_takes(installed):
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8).half()
    for mask in (torch.randn(4, 4), torch.randn(4, 4).half(), torch.rand(4, 4) > 0.2):
        wide = mask.float() if mask.is_floating_point() else mask
        expected = F.scaled_dot_product_attention(*[q.float()] * 3, wide).half()
        with regions.region(ONLY_EMULATES):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q, mask), expected)
            assert torch.equal(F.scaled_dot_product_attention(q, q, value=q, attn_mask=mask), expected)


def test_torchs_autocast_inside_chooses_the_type(installed):
    a = torch.ones(2, 2).half()
    with regions.region(ONLY_EMULATES), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(a, a).dtype is torch.bfloat16
        assert F.avg_pool3d(torch.ones(1, 2, 2, 2).half(), 2).dtype is torch.float32  # of its FP32 list


def test_out_is_written_and_given_its_shape(installed):
    a = torch.ones(2, 2).half()
    for out in (torch.empty(2, 2).half(), torch.empty(0).half(), torch.empty(2, 2).half().t()):
        with regions.region(ONLY_EMULATES):
            assert torch.mm(a, a, out=out) is out
        assert out.tolist() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_functions_return_the_tensor_that_they_write(policy, installed):
    own, a = torch.ones(2, 2).half(), torch.ones(2, 2).half()
    version = own._version
    with regions.region(policy):
        assert own.addmm_(a, a) is own
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            torch.ones(2, 2).half().requires_grad_().addmm_(a, a)
    assert own.tolist() == [[3.0, 3.0]] * 2 and own._version > version


def test_backward_on_a_thread_of_autograds_own(installed):
    """Outside of the regions of the thread that began it, and without the GIL."""
    a, w = half(64, 64), half(64, 64)
    with regions.region(ONLY_EMULATES):
        out = a @ w
    found = half_kernels(lambda: run_in_thread(lambda: out.float().sum().backward()))
    assert found == []
    assert torch.equal(w.grad, (a.detach().float().t() @ torch.ones(64, 64)).half())


# ---------------------------------------------------------------------------------------------------------------------
# What autograd keeps.


@pytest.mark.parametrize(
    "function", [F.linear, lambda x, w: F.conv1d(x[None], w[:, :, None])], ids=["linear", "conv1d"]
)
def test_autograd_keeps_low_operands_not_their_fp32_copies(function, installed):
    x, w = half(64, 64), half(64, 64)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with regions.region(ONLY_EMULATES), hooks:
        function(x, w)
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} == {x.data_ptr(), w.data_ptr()}


def test_an_operand_changed_before_backward_is_noticed(installed):
    x, w = half(2, 2), half(2, 2)
    with regions.region(ONLY_EMULATES):
        hidden = x * 2
        out = F.linear(hidden, w)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")  # torch's forward mode imports it
def test_function_transforms(installed):
    torch.manual_seed(0)
    x, w = torch.randn(5, 3).half(), torch.randn(4, 3).half()

    def loss(weight: Tensor, inputs: Tensor) -> Tensor:
        return F.linear(inputs, weight).float().pow(2).sum()

    plain = w.clone().requires_grad_()
    with regions.region(ONLY_EMULATES):
        loss(plain, x).backward()
        assert torch.equal(torch.func.grad(loss)(w, x), plain.grad)
        assert torch.equal(torch.vmap(F.linear, (0, None))(x, w), F.linear(x, w))
        each = torch.vmap(torch.func.grad(loss), (None, 0))(w, x)
        assert each.dtype is FP16 and each.shape == (5, 4, 3)
        value, tangent = torch.func.jvp(lambda weight: F.linear(x, weight), (w,), (w,))
    assert torch.equal(value, tangent)
