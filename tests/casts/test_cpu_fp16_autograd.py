"""What the emulation of FP16 leaves alone, and what autograd keeps of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from cpu_fp16_cases import (
    FP16,
    ONLY_EMULATES,
    POLICIES,
    half,
    installed_fixture,  # noqa: F401  the fixture `installed`
)
from half_kernels import half_kernels
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

from amp_patch import amp
from amp_patch.casts import cpu_fp16, regions

# ---------------------------------------------------------------------------------------------------------------------
# What is left alone.


def test_only_the_training_itself_is_emulated():
    amp.initialize(training.convnet(), opt_level="O2", cpu_fp16="emulate")
    a = torch.randn(4, 4).half()
    assert half_kernels(lambda: a @ a) == ["aten::mm"]
    assert torch.backends.mha.get_fastpath_enabled()


def test_other_rules_do_not_act_where_nothing_is_cast(installed):
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


def test_integers_float64_and_other_devices_are_untouched(installed):
    with regions.region(ONLY_EMULATES):
        assert (torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64
        assert (torch.ones(2, 2).double() @ torch.ones(2, 2).double()).dtype is torch.float64
        there = torch.ones(2, 2, dtype=FP16, device="meta")
        assert (there @ there).dtype is FP16 and (there @ there).device.type == "meta"
    a, sparse = torch.ones(2, 2).half(), torch.eye(2).half().to_sparse()
    assert cpu_fp16.takes([a, a])
    assert not cpu_fp16.takes([]) and not cpu_fp16.takes([a, there]) and not cpu_fp16.takes([a, sparse])


def test_torchs_autocast_inside_chooses_the_type(installed):
    a = torch.ones(2, 2).half()
    with regions.region(ONLY_EMULATES), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(a, a).dtype is torch.bfloat16
        assert F.avg_pool3d(torch.ones(1, 2, 2, 2).half(), 2).dtype is torch.float32  # of its FP32 list


def test_a_call_with_out_is_torchs_own(installed):
    a, out = torch.ones(2, 2).half(), torch.empty(2, 2).half()
    with regions.region(ONLY_EMULATES):
        assert torch.mm(a, a, out=out) is out
    assert out.tolist() == [[2.0, 2.0]] * 2


def test_disable_casts_is_native(installed):
    a = torch.ones(2, 2).half()
    with regions.region(ONLY_EMULATES):
        assert half_kernels(lambda: amp.disable_casts()(torch.mm)(a, a)) == ["aten::mm"]


@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_functions_return_the_tensor_that_they_write(policy, installed):
    own, a = torch.ones(2, 2).half(), torch.ones(2, 2).half()
    version = own._version
    with regions.region(policy):
        assert own.addmm_(a, a) is own
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            torch.ones(2, 2).half().requires_grad_().addmm_(a, a)
    assert own.tolist() == [[3.0, 3.0]] * 2 and own._version > version


class Tagged(Tensor):
    """A subclass that counts the functions called on it."""

    calls: list[str]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Tagged.calls.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses_keep_their_class_and_see_the_call(installed):
    a = torch.randn(3, 3).half()
    Tagged.calls = []
    tagged = a.as_subclass(Tagged).requires_grad_()
    with regions.region(ONLY_EMULATES):
        product = torch.mm(tagged, a)
    assert type(product) is Tagged and product.dtype is FP16 and "mm" in Tagged.calls
    assert torch.equal(product.as_subclass(Tensor), (a.float() @ a.float()).half())


# ---------------------------------------------------------------------------------------------------------------------
# What autograd keeps.


def saved_by(run: Callable[[], Tensor]) -> int:
    """Bytes that `run` allocates and its graph keeps, beside the result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    bytes_left = sum(e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]")
    return bytes_left - result.numel() * result.element_size()


# Before torch 2.8 nobody can tell whether the user has hooks for what is saved: autograd keeps the FP32 copies there.
KEEPS_FP16 = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


def test_autograd_keeps_fp16_operands_not_their_fp32_copies(installed):
    x, w = half(64, 64), half(64, 64)
    copies = (x.numel() + w.numel()) * 4
    with regions.region(ONLY_EMULATES):
        assert saved_by(lambda: F.linear(x, w)) == (0 if KEEPS_FP16 else copies)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            assert saved_by(lambda: F.linear(x, w)) == copies  # the measure can fail


def test_an_operand_changed_before_backward_is_noticed(installed):
    x, w = half(2, 2), half(2, 2)
    with regions.region(ONLY_EMULATES):
        hidden = x * 2
        out = F.linear(hidden, w)
    expected = hidden.detach().sum(0).expand(2, 2)
    hidden.add_(1)
    if KEEPS_FP16:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
            out.sum().backward()
    else:  # what autograd keeps was not changed
        out.sum().backward()
        torch.testing.assert_close(w.grad, expected)


def test_a_mask_changed_before_backward_is_noticed(installed):
    """It is FP32 already: autograd keeps the caller's own."""
    q, mask = half(1, 1, 64, 8), torch.zeros(64, 64)
    with regions.region(ONLY_EMULATES):
        out = F.scaled_dot_product_attention(q, q, q, mask)
    mask.fill_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
        out.sum().backward()


def test_hooks_of_the_user_see_all_that_is_saved(installed):
    seen: list[Tensor] = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    x, w = half(2, 2), half(2, 2)
    with regions.region(ONLY_EMULATES), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.linear(x, w)
    assert len(seen) == 2


def test_where_hooks_are_forbidden_copies_are_saved(installed):
    x, w = half(2, 2), half(2, 2)
    with regions.region(ONLY_EMULATES), torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        out = F.linear(x, w)
    (found,) = torch.autograd.grad(out.sum(), w)
    assert torch.equal(found, torch.ones(2, 2).half().t() @ x.detach())


def test_inference_tensors_may_be_operands(installed):
    with torch.inference_mode():
        x = torch.ones(2, 2).half()
    w = half(2, 2)
    with regions.region(ONLY_EMULATES):
        out = F.linear(x, w)
    assert torch.autograd.grad(out.sum(), w)[0].tolist() == [[2.0, 2.0]] * 2


def test_wrapper_subclasses_may_be_operands(installed, monkeypatch):
    def no_storage(self):
        raise NotImplementedError("a wrapper")

    monkeypatch.setattr(TwoTensor, "untyped_storage", no_storage, raising=False)
    x, w = TwoTensor(torch.ones(2, 2).half(), torch.ones(2, 2).half()), half(2, 2)
    with regions.region(ONLY_EMULATES):
        out = F.linear(x, w)
    assert type(out) is TwoTensor and out.dtype is FP16
    (found,) = torch.autograd.grad(out.sum(), w)
    assert found.a.tolist() == [[2.0, 2.0]] * 2


def test_an_operand_that_is_changed_in_place_does_not_outlive_its_graph(installed):
    hidden, w = half(2, 2) * 2, half(2, 2)
    with regions.region(ONLY_EMULATES):
        hidden.add_(F.linear(hidden, w))
    alive = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert alive() is None


def test_views_and_transposes_of_operands_come_back_right(installed):
    torch.manual_seed(0)
    base = half(6, 8)
    views = [base.t(), base[::2, 1:5].t(), base[:1].expand(4, 8).t(), base.view(3, 16)[:, 3:].t()]
    for view in views:
        other = half(3, view.shape[0])
        wide = torch.autograd.grad((other.float() @ view.float()).half().sum(), (other, base), retain_graph=True)
        with regions.region(ONLY_EMULATES):
            product = other @ view
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(product.sum(), (other, base)), wide, strict=1))


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
