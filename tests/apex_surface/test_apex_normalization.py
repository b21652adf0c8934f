"""apex.normalization: the fused norms in the calling forms of scripts, against one-liners in FP64."""

from __future__ import annotations

import inspect
import itertools
import pickle

import pytest
import torch
import training
from conftest import DEVICES, DTYPES
from torch import nn

from amp_patch import amp
from amp_patch.apex import normalization
from amp_patch.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from amp_patch.apex.normalization import fused_layer_norm as functions

SHAPE = (3, 4)
EPS = 1e-3


def layer_norm(x, weight, bias, eps=EPS):
    """The definition, in FP64."""
    x = x.double()
    normal = (x - x.mean((-2, -1), keepdim=True)) / (x.var((-2, -1), correction=0, keepdim=True) + eps).sqrt()
    return normal if weight is None else normal * weight.double() + bias.double()


def rms_norm(x, weight, eps=EPS):
    normal = x.double() / (x.double().square().mean((-2, -1), keepdim=True) + eps).sqrt()
    return normal if weight is None else normal * weight.double()


def arguments(dtype, weight_dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator) * 3 for size in ((5, *SHAPE), SHAPE, SHAPE))
    made = (x.to(device, dtype), weight.to(device, weight_dtype), bias.to(device, weight_dtype))
    return [tensor.requires_grad_() for tensor in made]


def assert_is(result, wanted, dtype):
    """Assert that a result equals `wanted`, FP64, rounded to `dtype`, within one unit in the last place."""
    assert result.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), wanted, rtol=2 * eps, atol=8 * torch.finfo(torch.float32).eps)


def assert_gradients(result, wanted, tensors):
    seed = torch.linspace(-1, 1, result.numel(), device=result.device).reshape(result.shape)
    got = torch.autograd.grad(result, tensors, seed.to(result.dtype), retain_graph=True)
    exact = torch.autograd.grad(wanted, tensors, seed.to(result.dtype).double())
    for gradient, truth, tensor in zip(got, exact, tensors, strict=True):
        assert gradient.dtype is tensor.dtype
        tolerance = 16 * max(torch.finfo(result.dtype).eps, torch.finfo(tensor.dtype).eps)
        torch.testing.assert_close(gradient.double(), truth.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "weight_dtype"), list(itertools.product([*DTYPES, torch.float64], repeat=2)))
def test_every_function_gives_the_definition_rounded_once_and_its_gradients(device, dtype, weight_dtype):
    x, weight, bias = arguments(dtype, weight_dtype, device)
    shape = torch.Size(SHAPE)
    if dtype is torch.float64 or weight_dtype is torch.float64:
        weight, bias = (t.detach().to(dtype).requires_grad_() for t in (weight, bias))
        weight_dtype = dtype
    for result, wanted, tensors, out in (
        (functions.fused_layer_norm(x, shape, EPS), layer_norm(x, None, None), [x], dtype),
        (functions.fused_layer_norm_affine(x, weight, bias, shape, EPS), layer_norm(x, weight, bias), None, dtype),
        (
            functions.FusedLayerNormAffineFunction.apply(x, weight, bias, shape, EPS),
            layer_norm(x, weight, bias),
            None,
            dtype,
        ),
        (
            functions.mixed_dtype_fused_layer_norm_affine(x, weight, bias, shape, EPS),
            layer_norm(x, weight, bias),
            None,
            weight_dtype,
        ),
        (functions.fused_rms_norm(x, shape, EPS), rms_norm(x, None), [x], dtype),
        (functions.fused_rms_norm_affine(x, weight, shape, EPS), rms_norm(x, weight), [x, weight], dtype),
        (
            functions.mixed_dtype_fused_rms_norm_affine(x, weight, shape, EPS),
            rms_norm(x, weight),
            [x, weight],
            weight_dtype,
        ),
    ):
        assert_is(result, wanted, out)
        assert_gradients(result, wanted, tensors or [x, weight, bias])


@pytest.mark.parametrize("make", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_modules_have_torch_s_names_values_and_calling_forms(make):
    reference = nn.LayerNorm(4, eps=1e-5) if make.has_bias else nn.RMSNorm(4, eps=1e-5)
    module = make(4)
    assert isinstance(module, nn.Module) and getattr(normalization, make.__name__) is make
    assert {k: v.tolist() for k, v in module.state_dict().items()} == {
        k: v.tolist() for k, v in reference.state_dict().items()
    }
    x = torch.randn(2, 4)
    torch.testing.assert_close(module(x), reference(x))
    assert make(4, eps=1e-12)(torch.zeros(1, 4)).isfinite().all()
    assert make([3, 4], 1e-5, memory_efficient=True).weight.shape == (3, 4)
    assert make(torch.Size([3, 4])).normalized_shape == torch.Size([3, 4])
    assert repr(make(4)) == f"{make.__name__}(torch.Size([4]), eps=1e-05, elementwise_affine=True)"
    nn.init.zeros_(module.weight)
    module.reset_parameters()
    assert module.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("make", [FusedLayerNorm, FusedRMSNorm])
def test_a_module_without_parameters(make):
    module = make(SHAPE, EPS, elementwise_affine=False)
    assert module.state_dict() == {} and module.weight is None
    x = torch.randn(2, *SHAPE)
    assert_is(module(x), layer_norm(x, None, None) if make.has_bias else rms_norm(x, None), torch.float32)


@pytest.mark.parametrize("make", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_the_mixed_modules_refuse_what_apex_s_do(make):
    with pytest.raises(RuntimeError, match="elementwise_affine is False"):
        make(4, elementwise_affine=False)
    assert make(4, elementwise_affine=True).elementwise_affine
    with pytest.raises(TypeError, match="bias"):
        make(4, bias=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_which_type_a_module_gives(dtype):
    x = torch.randn(2, 4).to(dtype)
    assert FusedLayerNorm(4)(x).dtype is FusedRMSNorm(4)(x).dtype is dtype
    assert MixedFusedLayerNorm(4)(x).dtype is MixedFusedRMSNorm(4)(x).dtype is torch.float32
    assert MixedFusedLayerNorm(4).to(dtype)(x.float()).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_are_fp32(dtype):
    x = torch.full((1, 4096), 16.0).to(dtype)  # the sum of squares, 2**20, is past FP16
    assert functions.fused_rms_norm(x, 4096, 1e-6).float().tolist() == [[1.0] * 4096]


def test_code_that_looks_for_memory_efficient_among_the_arguments_finds_it():  # GPT-NeoX, NeMo
    assert "memory_efficient" in inspect.getfullargspec(functions.FusedLayerNormAffineFunction.forward).args


def test_functions_are_pickled_by_name():
    for function in (functions.fused_layer_norm_affine, functions.fused_rms_norm, functions.fused_layer_norm):
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("device", DEVICES)
def test_torch_s_autocast_casts_first(device):
    x, weight, bias = arguments(torch.float32, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert functions.fused_layer_norm_affine(x, weight, bias, SHAPE).dtype is torch.bfloat16
        assert functions.mixed_dtype_fused_rms_norm_affine(x, weight, SHAPE).dtype is torch.bfloat16


class TypesNet(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = make(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x)
        normal = self.norm(hidden)
        self.types = hidden.dtype, self.norm.weight.dtype, normal.dtype
        return self.head(normal)


@pytest.mark.parametrize(
    ("level", "fused", "mixed"),
    [
        ("O0", (torch.float32,) * 3, (torch.float32,) * 3),
        ("O1", (torch.float16, torch.float32, torch.float16), (torch.float16, torch.float32, torch.float32)),
        ("O2", (torch.float16,) * 3, (torch.float16,) * 3),
        ("O3", (torch.float16,) * 3, (torch.float16,) * 3),
    ],
)
@pytest.mark.parametrize("make", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_the_types_at_each_level(level, fused, mixed, make):
    torch.manual_seed(0)
    model = TypesNet(make)
    model, optimizer = amp.initialize(model, training.SGD(model.parameters()), opt_level=level, loss_scale=8.0)
    before = next(p for p in amp.master_params(optimizer) if p.shape == (8,)).detach().clone()
    loss = model(torch.randn(3, 4)).square().mean()
    training.backward(loss, optimizer)
    optimizer.step()
    assert not training.skipped(optimizer)
    assert model.types == (mixed if make.__name__.startswith("Mixed") else fused)
    assert not torch.equal(next(p for p in amp.master_params(optimizer) if p.shape == (8,)), before)
