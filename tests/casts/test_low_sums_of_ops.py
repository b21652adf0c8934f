"""Sums of low-precision numbers on a CPU, op by op: in FP32, rounded once."""

from __future__ import annotations

import copy

import pytest
import torch
import wrapper_backends
from on_every_backend import backend_fixture  # noqa: F401  the fixture `backend`
from torch import nn
from torch.nn import functional as F

from amp_patch import amp

LOW = [torch.float16, torch.bfloat16]


def initialized(dtype: torch.dtype, cpu_half: str = "auto") -> None:
    """Begin a training in whose process kernels for `dtype` are registered."""
    level = "O5" if dtype is torch.bfloat16 else "O3"
    amp.initialize(nn.Linear(2, 2), opt_level=level, cpu_half=cpu_half, verbosity=0)


# Inputs are small whole numbers, so FP32 has the exact sums.

FIRST = torch.zeros(1200, dtype=torch.long)
CENTRES = torch.tensor([-0.5, 0.5])[torch.arange(6144).reshape(1, 32, 64, 3) % 2]  # of pixels, in an image of 2


def bag(mode: str, **options):
    return lambda weight: F.embedding_bag(FIRST[:1024].reshape(-1, 4), weight, mode=mode, **options)


def into(name: str, *rest, **options):
    """Call a method of zeros: `add` 1,200 values at the first place."""
    return lambda values: getattr(values.new_zeros(values[:3].shape), name)(*rest, values, **options)


def sparse(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(FIRST[None], values, (2, *values.shape[1:]), check_invariants=False)


ADDED = {
    "embedding, sparse": (lambda weight: F.embedding(FIRST, weight, sparse=True), (3, 2)),
    **{f"bag, {mode}": (bag(mode), (3, 2)) for mode in ("sum", "mean", "max")},
    **{f"bag, {mode}, large": (bag(mode), (2000, 2)) for mode in ("sum", "mean", "max")},
    "bag, int": (lambda weight: F.embedding_bag(FIRST.int().reshape(-1, 4), weight), (2000, 2)),
    "bag, sparse": (bag("sum", sparse=True), (3, 2)),
    "bag, padded": (bag("sum", padding_idx=1), (3, 2)),
    "bag, weighted": (
        lambda weight, factors: F.embedding_bag(FIRST.reshape(-1, 4), weight, mode="sum", per_sample_weights=factors),
        (3, 2),
        (300, 4),
    ),
    "coalesce": (lambda values: sparse(values).coalesce().values(), (1200,)),
    "to_dense": (lambda values: sparse(values).to_dense(), (1200, 2)),
    "index_select": (lambda table: table.index_select(0, FIRST), (3,)),
    "take": (lambda table: table.take(FIRST), (3,)),
    "index_add": (into("index_add", 0, FIRST), (1200,)),
    "index_add_": (into("index_add_", 0, FIRST), (1200,)),
    "put": (into("put", FIRST, accumulate=True), (1200,)),
    "index_reduce": (
        lambda values: values.new_zeros(3, 2).index_reduce(0, FIRST[:1024], values, "mean", include_self=False),
        (1024, 2),
    ),
    "segment_reduce": (lambda values: torch.segment_reduce(values, "sum", lengths=torch.tensor([1190, 10])), (1200, 2)),
    "addbmm": (torch.addbmm, (2, 2), (400, 2, 3), (400, 3, 2)),
    "prod": (lambda values: values.detach().prod(0), (11, 200)),
    "histc": (lambda values: values.detach().histc(2), (1200,)),
    "fold": (lambda values: F.fold(values, (33, 33), 16), (1, 256, 324)),
    "unfold": (lambda image: F.unfold(image, 16), (1, 1, 33, 33)),
    "Tensor.unfold": (lambda values: values.unfold(0, 500, 1), (1200,)),
    "as_strided": (lambda values: values.as_strided((700, 500), (1, 1)), (1200,)),
    **{
        f"grid_sample, {mode}": (
            lambda image, mode=mode: F.grid_sample(image, CENTRES[..., :2].to(image), mode, align_corners=False),
            (1, 2, 2, 2),
        )
        for mode in ("bilinear", "nearest", "bicubic")
    },
    "grid_sample, 3-D": (
        lambda image: F.grid_sample(image, CENTRES[:, None].to(image), align_corners=False),
        (1, 2, 2, 2, 2),
    ),
    **{
        f"{mode}, {n}-D": (lambda image, mode=mode, n=n: F.pad(image, (2, 2) * n, mode), (1, 2, *[3] * n))
        for mode in ("replicate", "reflect")
        for n in (1, 2, 3)
    },
    "replicate": (lambda image: F.pad(image, (600, 600), "replicate"), (2, 2, 3)),
    "max_pool2d": (lambda image: F.max_pool2d(image, 32, 1), (1, 1, 64, 64)),
    "max_pool3d": (lambda image: F.max_pool3d(image, 8, 1), (1, 1, 16, 16, 16)),
    "avg_pool2d": (lambda image: F.avg_pool2d(image, 16, 1), (1, 1, 40, 40)),
    "avg_pool3d": (lambda image: F.avg_pool3d(image, 8, 1), (1, 1, 16, 16, 16)),
    "adaptive_avg_pool2d": (lambda image: F.adaptive_avg_pool2d(image, 48), (1, 1, 3, 3)),
    "adaptive_avg_pool3d": (lambda image: F.adaptive_avg_pool3d(image, (1, 2, 16)), (1, 1, 16, 16, 2)),
    "adaptive_max_pool2d": (lambda image: F.adaptive_max_pool2d(image, 48), (1, 1, 3, 3)),
    "adaptive_max_pool3d": (lambda image: F.adaptive_max_pool3d(image, 12), (1, 1, 2, 2, 2)),
    "fractional_max_pool2d": (
        lambda image: F.fractional_max_pool2d(image, 31, 32, _random_samples=image.new_full((1, 1, 2), 0.5)),
        (1, 1, 64, 64),
    ),
    "fractional_max_pool3d": (
        lambda image: F.fractional_max_pool3d(image, 8, 8, _random_samples=image.new_full((1, 1, 3), 0.5)),
        (1, 1, 16, 16, 16),
    ),
}


def result_and_gradients(function, inputs: list[torch.Tensor], low: torch.dtype) -> list[torch.Tensor]:
    """Return the result, and the gradients for upstream numbers in (0, 2) with all bits of `low`."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    if not result.requires_grad:
        return [result]
    step = torch.finfo(low).eps
    upstream = (
        torch.randint(1, int(2 / step), result.shape, generator=torch.Generator().manual_seed(1)).to(result) * step
    )
    found = torch.autograd.grad(result, leaves, upstream)
    return [each.to_dense() if each.is_sparse else each for each in (result.detach(), *found)]


@pytest.fixture
def kernels(backend):
    with wrapper_backends.use_backend("cpp" if backend == "cpp" else "python"):
        yield


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("dtype", LOW)
def test_an_op_adds_in_fp32_and_rounds_once(dtype, name, kernels):
    function, *shapes = ADDED[name]
    torch.manual_seed(0)
    inputs = [torch.randint(1, 4, shape).to(dtype) for shape in shapes]
    if name == "histc":
        inputs = [torch.tensor([1.0, 2.0], dtype=dtype).repeat(2100)]
    wanted = result_and_gradients(function, [each.double() for each in inputs], dtype)
    alone = (
        None if name == "avg_pool3d" else result_and_gradients(function, inputs, dtype)
    )  # torch lacks that in these types
    initialized(dtype)
    found = result_and_gradients(function, inputs, dtype)
    assert all(each.dtype is dtype for each in found)
    assert all(torch.equal(each, exact.to(dtype)) for each, exact in zip(found, wanted, strict=True))
    single = result_and_gradients(function, [each.float() for each in inputs], dtype)
    assert all(torch.equal(each, exact.float()) for each, exact in zip(single, wanted, strict=True))
    amp.restore()
    if alone is not None:
        assert all(map(torch.equal, result_and_gradients(function, inputs, dtype), alone))


def test_a_sparse_gradient_is_not_rounded_on_its_way_to_the_master():
    """257 values of 1 have no sum in BF16."""
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with amp.scale_loss(model(torch.full((257,), 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    (master,) = amp.master_params(optimizer)
    assert master.grad.is_coalesced() and master.grad.to_dense()[3].tolist() == [257.0] * 4


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["batch", "instance", "group"])
def test_norms_of_a_batch_have_the_gradients_of_fp32(name, dtype, kernels):
    """The mean is far from 0, so its rounding in the low type would add up in the weight's gradient."""
    torch.manual_seed(0)
    inputs = [(torch.rand(shape) + shift).to(dtype) for shape, shift in (((8, 4, 16, 16), 4), ((4,), 1), ((4,), 1))]
    upstream = torch.rand(inputs[0].shape).to(dtype)

    def trained(dtype: torch.dtype) -> list[torch.Tensor]:
        given, weight, bias = (each.to(dtype, copy=True).requires_grad_() for each in inputs)
        running = [torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)]
        if name == "group":
            result, running = F.group_norm(given, 2, weight, bias), []
        else:
            norm = F.batch_norm if name == "batch" else F.instance_norm
            result = norm(given, *running, weight, bias, True)
        return [result, *torch.autograd.grad(result, (given, weight, bias), upstream.to(dtype)), *running]

    wanted = trained(torch.float64)
    initialized(dtype)
    found = trained(dtype)
    assert all(each.dtype is dtype for each in found)
    for each, exact in zip((found[0], *found[2:]), (wanted[0], *wanted[2:]), strict=True):
        assert (each - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    assert (found[1] - wanted[1]).norm() <= 8 * torch.finfo(dtype).eps * wanted[1].norm()  # a difference of large terms


def rnn_gradients(network: nn.Module, dtype: torch.dtype, between=lambda network: None) -> list[torch.Tensor]:
    network = copy.deepcopy(network).to(dtype)
    steps = torch.linspace(0.5, 1.5, 4800, dtype=torch.float64).reshape(400, 2, 6).bfloat16().to(dtype)
    loss = network(steps)[0].float().sum()
    between(network)
    loss.backward()
    return [each.grad for each in network.parameters()]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_gradients_of_a_recurrent_network_add_up_over_time(kind, dtype):
    """At each of 400 steps the weights get a gradient, which autograd adds."""
    torch.manual_seed(0)
    network = kind(6, 6, bidirectional=True).bfloat16()
    wanted = rnn_gradients(network, torch.float64)

    def furthest() -> float:
        found = rnn_gradients(network, dtype)
        assert all(each.dtype is dtype for each in found)
        return max(float((each - exact).norm() / exact.norm()) for each, exact in zip(found, wanted, strict=True))

    near = 2 * torch.finfo(dtype).eps
    initialized(dtype, "native")
    assert furthest() > near
    initialized(dtype)
    assert furthest() <= near


def test_a_weight_that_is_written_between_forward_and_backward_is_refused():
    def write(network: nn.Module) -> None:
        with torch.no_grad():
            network.weight_hh_l0.zero_()

    initialized(torch.bfloat16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rnn_gradients(nn.GRU(6, 6), torch.bfloat16, write)
