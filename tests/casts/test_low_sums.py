"""Gradients of low-precision embeddings and tables on a CPU: sums in FP32, rounded once, as on CUDA."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize("index", [(slice(None), 3), (None, 1), "mask", "twice"], ids=str)
@pytest.mark.parametrize("dtype", LOW)
def test_a_gradient_of_an_indexed_table_is_that_of_fp32_rounded_once(dtype, index):
    torch.manual_seed(0)
    rows = torch.randint(0, 7, (30, 40))
    start = torch.randn(7, 5, 6).to(dtype)
    where = {"mask": torch.rand(7, 5) > 0.3, "twice": (rows, rows % 5)}.get(str(index), rows)

    def trained(dtype: torch.dtype) -> torch.Tensor:
        table = start.to(dtype).requires_grad_()
        read = table[where] if isinstance(index, str) else table[:, rows % 5][index]
        generator = torch.Generator().manual_seed(1)
        read.backward(torch.randn(read.shape, generator=generator).bfloat16().half().to(dtype))
        return table.grad

    wanted = trained(torch.float32).to(dtype)
    initialized(dtype)
    assert torch.equal(trained(dtype), wanted)


@pytest.mark.parametrize("dtype", LOW)
def test_values_are_added_and_assigned_in_place(dtype):
    indices = torch.full((4000,), 2)
    initialized(dtype)
    for count, wanted in ((3, 4001.0), (5000, None)):
        target = torch.ones(count, dtype=dtype)
        version = target._version
        assert target.index_put_((indices,), torch.ones(4000, dtype=dtype), accumulate=True) is target
        assert target._version == version + 1 and (target[:2] == 1).all()
        assert wanted is None or target[2] == torch.tensor(wanted).to(dtype)
        target[indices] = torch.tensor(7, dtype=dtype)
        assert target[2] == 7
    with pytest.raises(RuntimeError, match="dtypes match"):
        torch.ones(3, dtype=dtype).index_put_((indices,), torch.ones(4000), accumulate=True)


def test_torch_s_kernel_is_kept_by_native_and_on_other_devices():
    given = torch.ones(4000, 4, dtype=torch.bfloat16)
    initialized(torch.bfloat16, "native")
    assert (gradient(torch.zeros(4000, dtype=torch.long), 3, given)[0] == 256).all()
    initialized(torch.bfloat16)
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, device="meta", requires_grad=True)
    F.embedding(torch.zeros(5, dtype=torch.long, device="meta"), weight).sum().backward()
    assert weight.grad.device.type == "meta" and weight.grad.shape == (3, 4)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_language_model_has_the_embedding_s_gradient_of_fp32(level):
    """4,096 equal tokens, each with a gradient of 1, which all types hold."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model[0].weight.detach().clone()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    with amp.scale_loss(model(torch.full((8, 512), 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.float(), torch.zeros_like(start).index_fill_(0, torch.tensor(3), 4096.0))


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
