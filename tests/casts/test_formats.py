"""FP8 and FP4: rounding equals torch's types and ml_dtypes to the bit; scales; stochastic rounding; Hadamard."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from conftest import DEVICES
from on_every_backend import SETS, backend_fixture, on_every_set  # noqa: F401
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch import multi_tensor
from amp_patch.casts import formats
from amp_patch.casts.formats import COLUMNS, E2M1, E4M3, E5M2, FORMATS, ROWS, quantized
from amp_patch.policy import PRODUCT_FORMATS

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
SCALES = (1.0, 0.37, 2.0**-7, 1 / 448, 3e-5, 1e4, 2.0**30, 1e-30)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Signs of zeros too; one NaN is as good as another."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def randoms(*shape: int, spread: float = 2.0, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * torch.exp(spread * torch.randn(shape))).bfloat16().to(device)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_bf16_number_becomes_what_torchs_type_has(name, scale):
    values = ALL_BF16.float()
    found = formats.rounded(values, ELEMENTS[name], scale)
    largest = ELEMENTS[name].largest
    assert same_bits(found, (values / scale).clamp(-largest, largest).to(reference.TYPES[name]).float())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_bf16_number_becomes_what_ml_dtypes_has(name, scale):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numpy = pytest.importorskip("numpy")
    values = ALL_BF16[~ALL_BF16.isnan()].float()  # FP4 has no NaN: ml_dtypes gives it a number
    largest = ELEMENTS[name].largest
    its_type = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}[name]
    divided = (values / scale).clamp(-largest, largest).numpy().astype(getattr(ml_dtypes, its_type))
    assert same_bits(formats.rounded(values, ELEMENTS[name], scale), torch.from_numpy(divided.astype(numpy.float32)))


class AsOnCuda(TorchDispatchMode):
    """Divides by a number as CUDA does: it multiplies by the number's reciprocal, rounded."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return torch.mul(args[0], torch.tensor(1.0) / args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_those_of_a_cpu_where_a_division_by_a_number_is_a_product(name):
    for seed in range(20):
        torch.manual_seed(seed)
        x = torch.randn(16, 32)
        for role in "activation", "gradient":
            with multi_tensor.use_backend("torch"):
                expected = quantized(x, ROWS, role, FORMATS[name])
                with AsOnCuda():
                    found = quantized(x, ROWS, role, FORMATS[name])
            assert same_bits(found[0], expected[0])
            assert expected[1] is None or same_bits(found[1], expected[1])


@on_every_set
@pytest.mark.parametrize("name", reference.FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_rounded_tile_by_tile(name, device, backend):
    element, of_gradients, scale, block = reference.FORMATS[name]
    for shape in ((5, 7), (64, 96), (33, 47), (1, 16)):
        x = randoms(*shape, device=device)
        for role, numbers in ("activation", element), ("weight", element), ("gradient", of_gradients):
            tile = None if block is None else (1, block or shape[1])
            expected, factor = reference.quantized(x.cpu(), tile, numbers, scale)
            values, outer = quantized(x, ROWS, role, FORMATS[name])
            assert same_bits(values.cpu(), expected) and (1.0 if outer is None else outer.item()) == factor
            down, _ = quantized(x.mT.contiguous(), COLUMNS, role, FORMATS[name])
            assert same_bits(down.mT.contiguous().cpu(), expected)
            view, _ = quantized(x.mT, COLUMNS, role, FORMATS[name])
            assert same_bits(view.mT.contiguous().cpu(), expected)


def test_weights_of_nvfp4_are_rounded_in_squares_so_that_both_products_have_one_weight():
    x = randoms(33, 50)
    expected, _ = reference.quantized(x, (16, 16), "e2m1", "two_levels")
    for along in ROWS, COLUMNS:
        values, _ = quantized(x, along, "weight", FORMATS["nvfp4"])
        assert same_bits(values, expected)
    assert not same_bits(quantized(x, ROWS, "activation", FORMATS["nvfp4"])[0], expected)


@pytest.mark.extension
@pytest.mark.parametrize("backend", [f"cpp-{name}" for name in SETS], indirect=True)
def test_the_extension_rounds_as_plain_torch_does(backend):
    for shape in ((5, 7), (64, 96), (3, 33, 47), (2, 20, 1100), (0, 4), (4, 0), (130, 65)):
        x = randoms(*shape)
        kinds = [x, x * 0, x * 1e-37, x.mT, -x.abs()]
        if x.numel():
            kinds.append(x.masked_fill(x == x.flatten()[0], math.inf))
            kinds.append(x.masked_fill(x == x.flatten()[0], math.nan))
        for given in kinds:
            for name, recipe in FORMATS.items():
                for along, role in (ROWS, "activation"), (ROWS, "gradient"), (COLUMNS, "weight"), (COLUMNS, "gradient"):
                    spread = recipe.hadamard and role == "gradient" and along == COLUMNS
                    values, outer = quantized(given, along, role, recipe, spread)
                    with multi_tensor.use_backend("torch"):
                        expected, plain_outer = quantized(given, along, role, recipe, spread)
                    assert same_bits(values, expected), (shape, name, along, role)
                    assert (outer is None) == (plain_outer is None)
                    assert outer is None or same_bits(outer, plain_outer)


def test_powers_of_two_are_rounded_up_or_down_as_the_recipe_says():
    x = torch.tensor([[448.0, 449.0, 500.0, 511.0]]).bfloat16()  # BF16 has 448, 450, 500, 512
    up, _ = quantized(x, ROWS, "activation", FORMATS["mxfp8"])
    assert up.tolist() == [[448.0, 448.0, 512.0, 512.0]]  # by 2: steps of 32 and 64
    low = torch.tensor([[410.0, 450.0, 500.0, 508.0]]).bfloat16()
    floor, _ = quantized(low, ROWS, "activation", FORMATS["mxfp8_floor"])
    assert floor.tolist() == [[416.0, 448.0, 448.0, 448.0]]  # by 1: they saturate
    assert quantized(low, ROWS, "activation", FORMATS["mxfp8"])[0].max() == 512


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_tile_with_an_infinity_is_nan_and_no_number_hides_it(name, bad):
    x = torch.ones(4, 64).bfloat16()
    x[1, 3] = bad
    for role in "activation", "gradient":
        values, outer = quantized(x, ROWS, role, FORMATS[name])
        whole = values if outer is None else values * outer
        assert whole[1, :16].isnan().all()
        assert torch.equal(whole.isnan().all(), torch.tensor(FORMATS[name].block is None or "nvfp4" in name))


@on_every_set
def test_gradients_of_nvfp4_are_rounded_stochastically(backend):
    recipe = FORMATS["nvfp4"]
    x = torch.full((64, 1024), 1.3).bfloat16()
    x[:, ::16] = 6.0  # the scale of each tile is 1
    x[0, 0] = 6.0
    values, outer = quantized(x, ROWS, "gradient", recipe)
    assert outer is not None
    found = (values * outer).reshape(-1, 16)[:, 1:].flatten()
    near = (found * 4).round() / 4
    assert set(near.unique().tolist()) == {1.0, 1.5}
    assert abs(found.mean().item() - x[0, 1].item()) < 4 * 0.25 / math.sqrt(found.numel())
    assert same_bits(values, quantized(x.clone(), ROWS, "gradient", recipe)[0])  # of the same numbers the same
    other = x.clone()
    other[3, 5] = 1.4
    assert not same_bits(values[10:], quantized(other, ROWS, "gradient", recipe)[0][10:])
    assert set(quantized(x, ROWS, "activation", recipe)[0].unique().tolist()) != {0.0}


@on_every_set
@pytest.mark.parametrize("rows", [16, 40, 7])
def test_hadamards_matrix_cancels_in_the_product(rows, backend):
    extension = multi_tensor.extension()
    transform = formats.hadamard_plainly
    if extension is not None:
        transform = lambda x: extension.casts.hadamard(x, formats._SIGNS)  # noqa: E731
    a, b = randoms(rows, 33), randoms(rows, 20)
    spread = transform(a)
    assert spread.shape == (-(-rows // 16) * 16, 33)
    exact = a.double().T @ b.double()
    found = spread.double().T @ transform(b).double()
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    outlier = torch.zeros(16, 1).bfloat16()
    outlier[3] = 100.0
    assert transform(outlier).abs().unique().tolist() == [25.0]


def test_the_recipes_equal_the_arguments_of_initialize():
    assert tuple(FORMATS) == PRODUCT_FORMATS
