"""FP16 and BF16 on a CPU without arithmetic for them: FP32 sums rounded once, forward and backward."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from casting import half_kernels
from cpu_half_cases import (
    FP16,
    ONLY_EMULATES,
    POLICIES,
    double_differentiable,
    half,
    installed_fixture,  # noqa: F401  the fixture `installed`
    only_emulates,
)
from crossed import crossed
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp, multi_tensor
from amp_patch.casts import cpu_half, regions
from amp_patch.casts.wrappers import backend
from amp_patch.training.training import trainings


def in_place(name: str) -> Callable[..., Tensor]:
    return lambda own, *others: getattr(own.clone(), name)(*others)


# name -> (function of low tensors, shapes)
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(2, 5, 7), (3, 7), (3,)]),
    "matmul": (lambda a, b: torch.matmul(a, b), [(2, 3, 4), (4, 5)]),
    "@": (lambda a, b: a @ b, [(3, 4), (4, 5)]),
    "Tensor.matmul": (lambda a, b: a.matmul(b), [(3, 4), (4,)]),
    "linalg.matmul": (lambda a, b: torch.linalg.matmul(a, b), [(3, 4), (4, 5)]),
    "mm": (lambda a, b: torch.mm(a, b), [(3, 4), (4, 5)]),
    "mm transposed": (lambda a, b: torch.mm(a.t(), b.t()), [(4, 3), (5, 4)]),
    "Tensor.mm": (lambda a, b: a.mm(b), [(3, 4), (4, 5)]),
    "mv": (lambda a, b: torch.mv(a, b), [(3, 4), (4,)]),
    "bmm": (lambda a, b: torch.bmm(a, b), [(2, 3, 4), (2, 4, 5)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(3, 5), (3, 4), (4, 5)]),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b), [(3, 5), (2, 3, 4), (2, 4, 5)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b), [(3,), (3, 4), (4,)]),
    "addr": (lambda c, a, b: torch.addr(c, a, b), [(3, 4), (3,), (4,)]),
    "dot": (lambda a, b: torch.dot(a, b), [(6,), (6,)]),
    "Tensor.dot": (lambda a, b: a.dot(b), [(6,), (6,)]),
    "vdot": (lambda a, b: torch.vdot(a, b), [(6,), (6,)]),
    "inner": (lambda a, b: torch.inner(a, b), [(3, 6), (2, 6)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 3, 4), (2, 4, 5)]),
    "einsum of a list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), [(3, 4), (4, 5)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=2), [(2, 3, 4), (3, 4, 5)]),
    "bilinear": (lambda a, b, w: F.bilinear(a, b, w), [(5, 3), (5, 4), (2, 3, 4)]),
    "addmm_": (in_place("addmm_"), [(3, 5), (3, 4), (4, 5)]),
    "addbmm_": (in_place("addbmm_"), [(3, 5), (2, 3, 4), (2, 4, 5)]),
    "baddbmm_": (in_place("baddbmm_"), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "addmv_": (in_place("addmv_"), [(3,), (3, 4), (4,)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding="same"), [(2, 3, 9), (4, 3, 3), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), [(2, 3, 7, 7), (4, 3, 3, 3), (4,)]),
    "conv3d": (lambda x, w: F.conv3d(x, w), [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2)]),
    "torch.conv2d": (lambda x, w: torch.conv2d(x, w, groups=2), [(2, 4, 5, 5), (4, 2, 3, 3)]),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w), [(2, 3, 5), (3, 4, 3)]),
    "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b), [(2, 3, 5, 5), (3, 4, 3, 3), (4,)]),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w), [(1, 2, 3, 3, 3), (2, 3, 2, 2, 2)]),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
        [(2, 3, 5, 5), (4, 3, 3, 3)],
    ),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(2, 2, 4, 8)] * 3),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [(2, 2, 4, 8)] * 3 + [(4, 4)],
    ),
}


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """First gradients for a fixed low direction, then those of their sum of squares: the double backward."""
    torch.manual_seed(1)
    first = torch.autograd.grad(out, inputs, torch.randn_like(out), create_graph=True)
    scalar = sum((g.float() ** 2).sum() for g in first)
    second = torch.autograd.grad(scalar, inputs, allow_unused=True) if scalar.requires_grad else ()  # type: ignore
    return [*first, *(g for g in second if g is not None)]


@crossed({"name": list(CALLS), "policy": POLICIES}, meet=1)
@double_differentiable()
def test_result_gradients_and_double_gradients_are_fp32_rounded_once(name, policy, installed):
    function, shapes = CALLS[name]
    torch.manual_seed(0)
    inputs = [half(*shape, dtype=policy.dtype) for shape in shapes]
    expected = function(*[tensor.float() for tensor in inputs]).to(policy.dtype)  # the oracle: FP32, rounded
    expected_gradients = gradients(expected, inputs)
    with regions.region(policy):
        result = function(*inputs)
    assert result.dtype is policy.dtype and torch.equal(result, expected)
    found = gradients(result, inputs)  # autograd needs no region
    assert [g.dtype for g in found] == [policy.dtype] * len(found)
    assert len(found) == len(expected_gradients)
    firsts = len(found) if name not in SUMMED_LOW else len(inputs)
    assert all(torch.equal(a, b) for a, b in zip(found[:firsts], expected_gradients[:firsts], strict=True))
    near = 4 * torch.finfo(policy.dtype).eps
    for a, b in zip(found[firsts:], expected_gradients[firsts:], strict=True):
        assert (a - b).norm() <= near * b.norm()


# Torch's double backward of these adds parts of a gradient that are low already.
SUMMED_LOW = ("addmv", "addmv_", "bilinear")

SLOW: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "x ** 2": (lambda x: x**2, [(3, 4)]),
    "pow": (lambda x: torch.pow(x, 3), [(3, 4)]),
    "Tensor.pow": (lambda x: x.abs().pow(0.5), [(3, 4)]),
    "torch.norm": (lambda x: torch.norm(x, dim=1), [(3, 4)]),
    "Tensor.norm": (lambda x: x.norm(3, dim=0), [(3, 4)]),
    "linalg.norm": (lambda x: torch.linalg.norm(x, dim=1), [(3, 4)]),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=1), [(3, 4)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "cdist": (lambda x, y: torch.cdist(x, y), [(3, 4), (5, 4)]),
    "square": (lambda x: torch.square(x), [(3, 4)]),
    "fold": (lambda x: F.fold(x, (4, 4), 2), [(1, 8, 9)]),
    "unfold": (lambda x: F.unfold(x, 2), [(1, 2, 4, 4)]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), [(1, 2, 4, 4, 4)]),
}


@crossed({"rows": [2100, 2003], "transposed": [False, True], "bias": [False, True]}, meet=1)
def test_large_products_are_computed_in_blocks(rows, transposed, bias, installed):
    policy = only_emulates(FP16)
    integers = torch.Generator().manual_seed(0)  # whole numbers, of which FP32 sums are exact
    shapes = [(rows, 3), (2101, 3), (2101,)]
    x, weight, b = (torch.randint(-3, 4, shape, generator=integers).to(policy.dtype) for shape in shapes)
    if transposed:
        x = x.t().contiguous().t()
    inputs = [each.requires_grad_() for each in ([x, weight, b] if bias else [x, weight])]
    grad = torch.randint(-3, 4, (rows, 2101), generator=integers).to(policy.dtype)
    wide = [each.detach().float().requires_grad_() for each in inputs]
    wanted = F.linear(*wide)
    wanted.backward(grad.float())
    if in_cpp := backend() == "cpp":
        multi_tensor.extension().casts.free_scratch()
    with regions.region(policy), torch.profiler.profile(profile_memory=True) as profile:
        result = F.linear(*inputs)
        result.backward(grad)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(sizes) == (result.nbytes if in_cpp else 2 * result.nbytes)
    assert torch.equal(result, wanted.to(policy.dtype))
    for mine, theirs in zip(inputs, wide, strict=True):
        assert torch.equal(mine.grad, theirs.grad.to(policy.dtype))


def test_a_convolutions_backward_rounds_the_gradient_of_its_input_before_it_computes_the_weights(installed):
    policy, peaks = only_emulates(FP16), []
    integers = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-2, 3, shape, generator=integers).half() for shape in [(4, 8, 64, 64), (8, 8, 3, 3)])
    wide = [each.float().requires_grad_() for each in (x, weight)]
    F.conv2d(*wide, padding=1).backward(torch.ones(4, 8, 64, 64))
    for needs in (False, True):
        inputs = [x.detach().requires_grad_(needs), weight.detach().requires_grad_()]
        with regions.region(policy):
            result = F.conv2d(*inputs, padding=1)
            if in_cpp := backend() == "cpp":
                multi_tensor.extension().casts.free_scratch()
            with torch.profiler.profile(profile_memory=True) as profile:
                result.backward(torch.ones_like(result))
        events = profile.profiler.kineto_results.events()
        memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        peaks.append(max(itertools.accumulate(size for _, size in memory)))
        assert torch.equal(inputs[1].grad, wide[1].grad.half())
    assert torch.equal(inputs[0].grad, wide[0].grad.half())
    assert not in_cpp or peaks[1] - peaks[0] < 1.5 * x.nbytes  # FP32 would take twice as much as `x`


@pytest.mark.parametrize("name", SLOW)
def test_slow_half_functions_without_casts_are_fp32_rounded_once(name, installed):
    function, shapes = SLOW[name]
    torch.manual_seed(0)
    inputs = [half(*shape) for shape in shapes]
    expected = function(*[tensor.float() for tensor in inputs]).half()
    with regions.region(ONLY_EMULATES):
        result = function(*inputs)
    assert result.dtype is FP16 and torch.equal(result, expected)
    directions = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, directions)
    # Torch's formulas of most of their gradients round between two operations.
    near = 0.0 if name in ("group_norm", "fold", "unfold", "avg_pool3d") else 4 * torch.finfo(FP16).eps
    for a, b in zip(torch.autograd.grad(result, inputs, directions), wanted, strict=True):
        assert (a - b).norm() <= near * b.norm()


def test_a_type_that_the_user_names_is_kept(installed):
    x = torch.full((2, 4), 0.1).half()
    with regions.region(ONLY_EMULATES):
        assert torch.norm(x, dtype=torch.float32).dtype is torch.float32
        assert x.norm(2, 0, False, torch.float32).dtype is torch.float32
        assert torch.linalg.vector_norm(x, dtype=torch.float64).dtype is torch.float64


# ---------------------------------------------------------------------------------------------------------------------
# The argument.


@pytest.mark.parametrize("word", ["fast", True, "Emulate", "convolutions", "sums"])
def test_another_word_is_refused(word):
    message = f"initialize: cpu_half is {word!r}; wanted 'auto' or 'emulate' or 'native'"
    with pytest.raises(ValueError, match=re.escape(message)):
        amp.initialize(training.convnet(), cpu_half=word)


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_auto_emulates_where_the_processor_has_no_arithmetic(level, arithmetic, monkeypatch):
    monkeypatch.setattr(cpu_half, "has_arithmetic", lambda dtype: arithmetic)
    model = amp.initialize(nn.Linear(3, 3), opt_level=level)
    low = model._amp.policy.dtype
    decided = "emulate" if not arithmetic else "convolutions" if low is FP16 else "sums"
    assert f"cpu_half={decided}" in str(model._amp.policy)
    assert (half_kernels(lambda: model(torch.ones(2, 3)), low) == []) is not arithmetic
    assert amp.autocast("cpu", dtype=low).policy.cpu_half == decided
    assert amp.autocast("mps", dtype=low).policy.emulated is None  # on the CPU's tensors alone


def test_fp16_s_convolutions_are_emulated_beside_arithmetic(monkeypatch):
    monkeypatch.setattr(cpu_half, "has_arithmetic", lambda dtype: True)
    model = amp.initialize(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(3, 3)), opt_level="O3")
    ran = half_kernels(lambda: model(torch.ones(1, 1, 5, 5)).sum().backward())
    assert ran and not [name for name in ran if "conv" in name]


@pytest.mark.parametrize(
    "options",
    [
        {"opt_level": "O0"},
        {"opt_level": "O2", "cpu_half": "native"},
        {"opt_level": "O5", "cpu_half": "native"},
        {"opt_level": "O2", "cast_model_type": torch.float32},
    ],
    ids=str,
)
def test_nothing_is_emulated_without_low_tensors(options):
    amp.initialize(training.convnet(), **{"cpu_half": "emulate", **options})
    policy = trainings[-1].policy
    assert policy.emulated is None and not kernels()
    assert ("cpu_half" in str(policy)) is policy.makes_low_tensors


def kernels() -> list[str]:
    """The ops of aten's that have a kernel of ours now."""
    names = [product.name for product in cpu_half.products(FP16, "emulate")]
    return [name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "BackendSelect")]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_restore_takes_the_kernels_away(level):
    a = torch.randn(4, 4, dtype=torch.bfloat16)
    before = a @ a
    amp.initialize(training.convnet(), opt_level=level, cpu_half="emulate")
    assert "mm" in kernels() and "convolution_backward" in kernels()
    amp.restore()
    assert not kernels() and torch.equal(a @ a, before)


def test_a_model_with_nothing_on_a_cpu_is_native():
    model = amp.initialize(training.convnet(device="meta"), opt_level="O2", cpu_half="emulate")
    assert model._amp.policy.emulated is None
    assert amp.initialize(nn.ReLU(), opt_level="O2", cpu_half="emulate")._amp.policy.emulated is FP16  # anywhere


def no_extension(name: str) -> Any:
    raise ImportError(name)


@pytest.mark.parametrize(
    ("flags", "fp16", "bf16"),
    [
        ("fpu f16c avx512f", False, False),
        ("avx512f amx_bf16", False, True),
        ("avx512f avx512_bf16", False, True),
        ("avx512f avx512_fp16 avx512_bf16", True, True),
        ("amx_fp16", True, False),
        ("fp asimdhp", True, False),
        ("fp asimdhp bf16", True, True),
        ("fp asimd evtstrm aes crc32", False, False),  # Cortex-A72
        ("fp asimd fphp asimdhp asimddp", True, False),  # Graviton 2
        ("fp asimd fphp asimdhp sve svebf16 i8mm bf16", True, True),  # Graviton 3
    ],
)
def test_the_system_names_arithmetic(flags, fp16, bf16, monkeypatch, tmp_path):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(cpu_half.importlib, "import_module", no_extension)
    monkeypatch.setattr(cpu_half, "Path", lambda _: tmp_path / "cpuinfo")
    ask = cpu_half.has_arithmetic.__wrapped__
    assert ask(FP16) is fp16 and ask(torch.bfloat16) is bf16
    monkeypatch.setattr(cpu_half, "Path", lambda _: tmp_path / "missing")
    monkeypatch.setattr(cpu_half.platform, "machine", lambda: "arm64")
    assert ask(FP16) and not ask(torch.bfloat16)


@pytest.mark.parametrize(
    ("cap", "fp16", "bf16"),
    [
        ("AVX2", False, False),
        ("avx512_core_vnni", False, False),
        ("AVX512_CORE_BF16", False, True),
        ("AVX512_CORE_FP16", True, True),
        ("", True, True),
    ],
)
def test_a_cap_on_torchs_instructions_counts_as_the_processor(cap, fp16, bf16, monkeypatch):
    monkeypatch.setattr(cpu_half.importlib, "import_module", lambda name: SimpleNamespace(cpu_has=lambda dtype: True))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    ask = cpu_half.has_arithmetic.__wrapped__
    assert ask(FP16) is fp16 and ask(torch.bfloat16) is bf16


# ---------------------------------------------------------------------------------------------------------------------
# Trainings.


def test_a_forward_without_backward_holds_nothing():
    """Functions of autograd that save their own result (softmax in attention) would hold the graph that holds them."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = amp.initialize(model, opt_level="O2", cpu_half="emulate")
    params = [weakref.ref(param) for param in model.parameters()]
    model(torch.randn(2, 4, 8))
    del model
    gc.collect()
    assert not [ref for ref in params if ref() is not None]
