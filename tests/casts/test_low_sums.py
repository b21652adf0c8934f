"""Sums of low-precision numbers on a CPU, in gradients and results: in FP32, rounded once."""

from __future__ import annotations

import pytest
import torch
from on_every_backend import backend_fixture, on_every_set  # noqa: F401  the fixture `backend`
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.casts import cpu_half

LOW = [torch.float16, torch.bfloat16]
MODES = ["auto", "emulate"]


def initialized(dtype: torch.dtype, cpu_half: str = "auto") -> None:
    """Begin a training in whose process kernels for `dtype` are registered."""
    level = "O5" if dtype is torch.bfloat16 else "O3"
    amp.initialize(nn.Linear(2, 2), opt_level=level, cpu_half=cpu_half, verbosity=0)


def gradient(indices: torch.Tensor, rows: int, given: torch.Tensor, **options) -> torch.Tensor:
    weight = torch.zeros(rows, given.shape[-1], dtype=given.dtype, requires_grad=True)
    F.embedding(indices, weight, **options).backward(given)
    assert weight.grad.dtype is given.dtype
    return weight.grad


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rows", [3, 5000], ids=["few rows", "more rows than indices"])
def test_equal_indices_add_up(dtype, rows):
    """Torch's kernel ends at 256 in BF16, and at 2,048 in FP16."""
    indices = torch.full((4000,), 2)
    given = torch.ones(4000, 4, dtype=dtype)
    assert (gradient(indices, rows, given)[2] < 4000).all()
    initialized(dtype)
    wanted = torch.zeros(rows, 4, dtype=dtype)
    wanted[2] = 4000
    assert torch.equal(gradient(indices, rows, given), wanted)
    amp.restore()
    assert (gradient(indices, rows, given)[2] < 4000).all()


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str
)
@pytest.mark.parametrize("shape", [(600,), (20, 30), (7,), (0,), ()], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", LOW)
def test_a_gradient_is_that_of_fp32_rounded_once(dtype, mode, shape, options):
    torch.manual_seed(0)
    indices = torch.randint(0, 40, shape)
    given = torch.randn(*shape, 6).to(dtype)
    wanted = gradient(indices, 40, given.float(), **options).to(dtype)
    initialized(dtype, mode)
    assert torch.equal(gradient(indices, 40, given, **options), wanted)
    assert torch.equal(gradient(indices.int(), 40, given, **options), wanted)
    double = given.double()
    assert gradient(indices, 40, double, **options).dtype is torch.float64


READS = {
    "one row": lambda table, rows, mask: table[:, rows % 5][:, 3],
    "a new dimension": lambda table, rows, mask: table[:, rows % 5][None, 1],
    "mask": lambda table, rows, mask: table[mask],
    "twice": lambda table, rows, mask: table[rows, rows % 5],
    "few of many": lambda table, rows, mask: F.pad(table, (0, 0, 0, 0, 9000, 0))[rows - 7],
    "few of many, twice": lambda table, rows, mask: F.pad(table, (0, 0, 0, 0, 9000, 0))[rows - 7, -1 - rows % 5],
    "few of many, in columns": lambda table, rows, mask: F.pad(table, (9000, 0))[..., rows % 6 - 6],
    "few of many, apart": lambda table, rows, mask: F.pad(table, (0, 0, 9000, 0))[rows % 7, :, rows % 6],
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dtype", LOW)
def test_a_gradient_of_an_indexed_table_is_that_of_fp32_rounded_once(dtype, read):
    torch.manual_seed(0)
    rows = torch.randint(0, 7, (30, 40))
    start = torch.randn(7, 5, 6).to(dtype)
    mask = torch.rand(7, 5) > 0.3

    def trained(dtype: torch.dtype) -> torch.Tensor:
        table = start.to(dtype).requires_grad_()
        values = READS[read](table, rows, mask)
        generator = torch.Generator().manual_seed(1)
        values.backward(torch.randn(values.shape, generator=generator).bfloat16().half().to(dtype))
        return table.grad

    wanted = trained(torch.float32).to(dtype)
    initialized(dtype)
    assert torch.equal(trained(dtype), wanted)


def test_torch_s_kernel_is_kept_by_native_and_on_other_devices():
    given = torch.ones(4000, 4, dtype=torch.bfloat16)
    initialized(torch.bfloat16, "native")
    assert (gradient(torch.zeros(4000, dtype=torch.long), 3, given)[0] == 256).all()
    initialized(torch.bfloat16)
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, device="meta", requires_grad=True)
    F.embedding(torch.zeros(5, dtype=torch.long, device="meta"), weight).sum().backward()
    assert weight.grad.device.type == "meta" and weight.grad.shape == (3, 4)


@pytest.mark.parametrize("arithmetic", [True, False])
def test_the_gradient_of_the_gradient_is_torch_s(arithmetic, monkeypatch):
    monkeypatch.setattr(cpu_half, "has_arithmetic", lambda dtype: arithmetic)
    indices = torch.tensor([2, 0, 2])

    def second() -> torch.Tensor:
        weight = torch.arange(8.0).reshape(4, 2).bfloat16().requires_grad_()
        (first,) = torch.autograd.grad(F.embedding(indices, weight).square().sum(), weight, create_graph=True)
        first.square().sum().backward()
        return weight.grad

    wanted = second()
    initialized(torch.bfloat16)
    assert torch.equal(second(), wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Layer norms


def norm_gradients(given: torch.Tensor, weight, bias, upstream: torch.Tensor, eps: float = 1e-5):
    """Return the gradients of `given`, `weight` and `bias`; None for those that do not require one."""
    leaves = [
        None if each is None else each.detach().clone().requires_grad_(each.requires_grad) for each in (weight, bias)
    ]
    inputs = given.detach().clone().requires_grad_(given.requires_grad)
    shape = (weight if weight is not None else bias).shape
    F.layer_norm(inputs, shape, *leaves, eps).backward(upstream)
    return [None if each is None else each.grad for each in (inputs, *leaves)]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("shape", "normalized"), [((50, 8), 1), ((3, 5, 4, 6), 2), ((1400, 1024), 1), ((0, 8), 1), ((8,), 1)], ids=str
)
@pytest.mark.parametrize(
    ("frozen", "left_out", "of_parameters"),
    [((), (), None), ((0,), (), None), ((2,), (), None), ((), (2,), None), ((1, 2), (), None), ((), (), torch.float32)],
    ids=["all", "input frozen", "bias frozen", "no bias", "parameters frozen", "parameters in FP32"],
)
def test_a_layer_norm_s_gradients_are_those_of_fp32(shape, normalized, frozen, left_out, of_parameters, dtype):
    torch.manual_seed(0)
    given, upstream = (torch.randn(shape).to(dtype) for _ in range(2))
    parameters = [torch.randn(shape[-normalized:]).to(of_parameters or dtype) for _ in range(2)]
    tensors = [each.requires_grad_(index not in frozen) for index, each in enumerate((given, *parameters))]
    tensors = [None if index in left_out else each for index, each in enumerate(tensors)]
    wide = [None if each is None else each.detach().double().requires_grad_(each.requires_grad) for each in tensors]
    wanted = norm_gradients(*wide, upstream.double())
    initialized(dtype)
    found = norm_gradients(*tensors, upstream)
    for each, exact, tensor in zip(found, wanted, tensors, strict=True):
        assert (each is None) is (exact is None)
        if each is not None:
            assert each.dtype is tensor.dtype and each.shape == tensor.shape
            near = 2 * torch.finfo(dtype).eps  # the norm's statistics are rounded too
            assert (each - exact).norm() <= near * exact.norm()


@on_every_set
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("threads", [1, 2])
def test_each_instruction_set_and_number_of_threads_adds_the_same(threads, dtype, backend):
    torch.manual_seed(0)
    given, upstream = torch.randn(3000, 70).to(dtype), torch.randint(-4, 5, (3000, 70)).to(dtype)  # exact sums
    weight, bias = (torch.randn(70).to(dtype).requires_grad_() for _ in range(2))
    wanted = norm_gradients(*(each.detach().double().requires_grad_() for each in (given, weight, bias)), upstream)
    initialized(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = norm_gradients(given, weight, bias, upstream)
    finally:
        torch.set_num_threads(before)
    assert (found[1] - wanted[1]).norm() <= 2 * torch.finfo(dtype).eps * wanted[1].norm()
    assert torch.equal(found[2], upstream.float().sum(0).to(dtype))


@pytest.mark.parametrize("strided", ["transposed", "expanded"])
def test_a_layer_norm_of_strided_tensors_has_the_gradients_of_contiguous_ones(strided):
    torch.manual_seed(0)
    weight, bias = (torch.randn(6).bfloat16().requires_grad_() for _ in range(2))
    given = torch.randn(6, 700).bfloat16().T if strided == "transposed" else torch.randn(1, 6).bfloat16().expand(700, 6)
    upstream = torch.randn(1, 6).bfloat16().expand(700, 6)
    initialized(torch.bfloat16)
    found = norm_gradients(given.requires_grad_(), weight, bias, upstream)
    given = given.detach().contiguous().requires_grad_()
    for each, wanted in zip(found, norm_gradients(given, weight, bias, upstream.contiguous()), strict=True):
        assert torch.equal(each, wanted)
