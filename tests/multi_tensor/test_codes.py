"""Numbers in eight bits: the codec, and the kernels of steps on what it has encoded."""

from __future__ import annotations

import pytest
import torch
from coded_cases import ADAM, FORMS, MAPS, OF_KERNEL, SGD, SIZES, decoded, drawn, encoded, same_bits, states, stepped
from conftest import DEVICES
from on_every_backend import BF16, INF, NAN, SETS, backend_fixture, no_grad_fixture, on_every_set  # noqa: F401  # noqa: F401
from torch import Tensor

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import plain_codes

KEPT = torch.float8_e4m3fn
every_map = pytest.mark.parametrize("dtype", MAPS, ids=["signed", "unsigned"])
every_device = pytest.mark.parametrize("device", DEVICES)

# ---------------------------------------------------------------------------------------------------------------------
# The codec


def used(dtype: torch.dtype) -> Tensor:
    """The codes of blocks with numbers, the largest last: of E5M3 those from 1 to 240, of E4M3 those from -1 to 1."""
    if dtype is torch.uint8:
        return torch.arange(1, 241, dtype=torch.uint8)
    magnitudes = torch.arange(0x79, dtype=torch.uint8)
    return torch.cat([magnitudes | 0x80, magnitudes]).view(torch.int8)


def numbers_of(codes: Tensor) -> Tensor:
    """FP64, of a block whose scale is 1."""
    if codes.dtype is torch.int8:
        return codes.view(torch.float8_e4m3fn).double() / 2**8
    exponents, fractions = codes.int() >> 3, (codes.int() & 7).double()
    mantissas = torch.where(exponents == 0, fractions, 8 + fractions)
    return torch.ldexp(mantissas, exponents.clamp(min=1) - 33)


@on_every_set
@every_map
def test_the_numbers_are_those_of_e5m3_and_e4m3(dtype):
    codes = used(dtype)
    assert torch.equal(decoded(codes, torch.ones(1)).double(), numbers_of(codes))
    assert numbers_of(codes)[-1] == 1 and numbers_of(codes).abs().max() == 1


@on_every_set
@every_map
@pytest.mark.parametrize("scale", [1.0, 3.7e-3, 1.7e-28, 2.0**-94, 8.4e37])
def test_every_code_comes_back(dtype, scale):
    for codes in (used(dtype), used(dtype).flip(0)[:100]):  # as vectors, and with a tail
        scales = torch.tensor([scale])
        again, its_scales = encoded(decoded(codes, scales), dtype)
        assert torch.equal(again, codes) and same_bits(its_scales, scales)


@on_every_set
@every_map
def test_one_of_the_two_codes_around_a_number_is_taken_and_the_largest_of_a_block_is_exact(dtype):
    numbers = numbers_of(used(dtype)).sort().values
    blocks = drawn(256 * 40, dtype).reshape(-1, 256)
    blocks[1] *= 1e33
    found = decoded(*encoded(blocks.reshape(-1), dtype)).reshape(-1, 256)
    places = blocks.abs().argmax(1, keepdim=True)
    assert torch.equal(found.gather(1, places), blocks.gather(1, places))
    scales = blocks.abs().amax(1, keepdim=True).double()
    made = found / scales
    least = -1 if dtype is torch.int8 else numbers[0]
    above = torch.searchsorted(numbers, (blocks / scales).clamp(min=least)).clamp(min=1)
    errors = torch.stack([(made - numbers[place]).abs() for place in (above, above - 1)]).amin(0)
    assert (errors <= 1e-6 * made.abs()).all()


@on_every_set
@every_map
@pytest.mark.parametrize("place", [0.9, 0.01, 1e-4, 1.7e-5])
def test_the_mean_of_what_numbers_come_back_as_is_that_of_the_numbers(dtype, place):
    """Rounding to nearest would hold a number that falls by a tenth of a code's distance at each step."""
    generator = torch.Generator().manual_seed(0)
    for offset in (0.02, 0.1, 0.3, 0.6):
        values = place * (1 + offset * torch.rand(256 * 400, generator=generator))
        values[::256] = 1.7
        values[1::2] *= 1 if dtype is torch.uint8 else -1
        found = decoded(*encoded(values, dtype))
        kept = values.abs() < 1.7
        spread = (found - values).abs()[kept].double().square().mean().sqrt() / kept.sum().sqrt()
        error = (found.abs() - values.abs())[kept].double().mean()
        assert spread > 0 and error.abs() < 5 * spread


@on_every_set
def test_a_square_beside_others_is_never_0():
    values = torch.rand(600) * 1e-20
    values[7] = 1e6  # of the first block
    values[300:] = 0  # of the last
    values[256:300] = torch.rand(44) * 1e-40  # subnormal
    codes, scales = encoded(values, torch.uint8)
    found = decoded(codes, scales)
    assert (found[:256] >= 1e6 * 2.0**-32).all() and found[7] == 1e6
    assert (found[256:512] == 2.0**-109).all(), "with its momentum, sqrt(0) + eps would make the step"
    assert (found[512:] == 0).all()
    values[256:512] = torch.rand(256) * 1e-30
    assert (decoded(*encoded(values, torch.uint8))[256:512] == values[256:512].max()).all()


@on_every_set
@every_device
@every_map
@pytest.mark.parametrize("size", SIZES)
def test_each_instruction_set_and_plain_torch_give_the_same_bits(dtype, size, device):
    values = drawn(size, dtype, seed=size).to(device)
    codes = torch.empty_like(values, dtype=dtype)
    scales = torch.empty(-(-size // 256), device=device)
    plain_codes.encode([values], [codes], [scales])
    wanted = torch.empty_like(values)
    plain_codes.decode([codes], [wanted], [scales])
    ours, its_scales = encoded(values, dtype)
    assert torch.equal(ours, codes) and same_bits(its_scales, scales)
    assert same_bits(decoded(codes, scales), wanted)


@on_every_set
@every_device
@every_map
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF, 2.0**126])
def test_a_block_that_is_not_finite_is_nan_as_a_whole_and_the_others_are_as_ever(dtype, bad, device):
    values = drawn(3 * 256 + 10, dtype).to(device)
    wanted = decoded(*encoded(values, dtype))
    values[300] = bad
    found = decoded(*encoded(values, dtype))
    assert found[256:512].isnan().all()
    wanted[256:512] = found[256:512] = 0
    assert torch.equal(found, wanted)
    codes, scales = encoded(values, dtype)
    again, its_scales = encoded(decoded(codes, scales), dtype)
    assert torch.equal(again, codes) and its_scales[1].isnan() and torch.equal(its_scales[2:], scales[2:])


@on_every_set
@every_device
@every_map
def test_zeros_of_both_signs_and_momenta_that_are_too_small_are_zeros(dtype, device):
    zeros = [torch.zeros(300), -torch.zeros(300)]
    small = [torch.full((300,), 2.0**-110), torch.full((300,), -1e-45)] if dtype is torch.int8 else []
    for values in zeros + small:
        codes, scales = encoded(values.to(device), dtype)
        assert (codes == 0).all() and (scales == 0).all() and (decoded(codes, scales) == 0).all()
    values = torch.tensor([2.0**-109, 2.0**-127, 0.0, -0.0, 1e-45], device=device)
    assert decoded(*encoded(values, torch.int8)).tolist() == [2.0**-109, 0, 0, 0, 0]


@every_device
@every_map
def test_blocks_follow_each_other_in_memory(dtype, device):
    values = drawn(6 * 5 * 7 * 9, dtype).reshape(6, 5, 7, 9).to(device)
    for layout in (values.to(memory_format=torch.channels_last), values.permute(3, 1, 0, 2), values[2:4]):
        flat = layout.as_strided((layout.numel(),), (1,), layout.storage_offset())
        codes, scales = encoded(layout, dtype)
        assert codes.stride() == layout.stride()
        wanted, its_scales = encoded(flat, dtype)
        assert torch.equal(codes.as_strided((layout.numel(),), (1,)), wanted) and torch.equal(scales, its_scales)
        found = decoded(codes, scales)
        assert found.stride() == layout.stride()
        assert torch.equal(found.as_strided((layout.numel(),), (1,)), decoded(wanted, its_scales))


def test_many_tensors_at_once_and_threads():
    values = [drawn(size, torch.int8, seed) for seed, size in enumerate((10_000, 3, 300_000, 0, 257))]
    wanted = [encoded(value, torch.int8) for value in values]
    codes = [torch.empty_like(value, dtype=torch.int8) for value in values]
    scales = [torch.empty(-(-value.numel() // 256)) for value in values]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        mt.multi_tensor_encode(values, codes, scales)
    finally:
        torch.set_num_threads(before)
    for (code, scale), its_code, its_scale in zip(wanted, codes, scales, strict=True):
        assert torch.equal(code, its_code) and torch.equal(scale, its_scale)


@on_every_set
@pytest.mark.parametrize("low", [torch.float16, BF16])
@pytest.mark.parametrize("dtype", [*MAPS, KEPT])
def test_low_precision_values_have_the_codes_of_their_fp32_copies(dtype, low):
    for size in SIZES:
        values = drawn(size, dtype).clamp(-6e4, 6e4).to(low)
        codes, scales = encoded(values, dtype)
        wanted = encoded(values.float(), dtype)
        assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8)) and same_bits(scales, wanted[1])
        again = torch.full_like(values, NAN)
        mt.multi_tensor_decode([codes], [again], [scales])
        assert torch.equal(again, decoded(codes, scales).to(low))


@on_every_set
@pytest.mark.parametrize("low", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-36, 1e37])
def test_codes_of_activations_keep_signs_and_zeros(low, scale):
    values = (torch.randn(700) * scale).to(low)
    values[::5] = 0
    for at in (3, 333, 698):  # in a vector and in the tail of a block
        values[at], values[at + 1] = values.abs().max() * 1e-7, values.abs().max() * -1e-7
    codes, scales = encoded(values, KEPT)
    again = torch.empty_like(values)
    mt.multi_tensor_decode([codes], [again], [scales])
    assert torch.equal(again.sign(), values.sign()) and torch.equal(again.isinf(), values.isinf())
    # Smaller numbers of FP16 are a few units; below 1e-33 the scale is not the largest number.
    large = (values.abs() > values.abs().max() / 2**8) & (values.abs().max() > 1e-32) & ~values.isinf()
    assert ((again - values)[large].abs() <= values[large].abs() / 8).all()


@on_every_set
@pytest.mark.parametrize("low", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("largest", [0.0, 1e-40, 1.0])
def test_zeros_of_activations_keep_their_sign_also_where_a_block_has_nothing_else(low, largest):
    values = torch.zeros(700, dtype=low)
    values[1::3] = -0.0
    values[600] = largest
    codes, scales = encoded(values, KEPT)
    again = torch.ones_like(values)
    mt.multi_tensor_decode([codes], [again], [scales])
    assert torch.equal(again.signbit(), values.signbit()) and torch.equal(again == 0, values == 0)


@on_every_set
@pytest.mark.parametrize("mask", [-INF, INF, torch.finfo(torch.float32).min, torch.finfo(BF16).min])
def test_activations_of_two_numbers_and_masks_are_exact(mask):
    values = torch.zeros(600)
    values[::3], values[400:500] = 1 / 0.9, -1 / 0.9
    assert torch.equal(decoded(*encoded(values, KEPT)), values)
    for size in (600, 520, 3):  # of a mask without other numbers, too
        values[300:size], values[1] = mask, mask
        again = decoded(*encoded(values, KEPT))
        assert torch.equal(again, values.masked_fill(values == mask, INF if mask > 0 else -INF))


@on_every_set
def test_a_nan_makes_the_block_of_activations_nan():
    values = torch.ones(600)
    values[300], values[301] = NAN, INF
    again = decoded(*encoded(values, KEPT))
    assert again[256:512].isnan().all() and torch.equal(again[:256], values[:256])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scales": torch.zeros(1)}, ValueError, r"tensor 0 of scales of codes has shape \[1\], \[2\] is wanted"),
        ({"scales": torch.zeros(4)[::2]}, ValueError, "contiguous"),
        ({"scales": torch.zeros(2, dtype=torch.float64)}, TypeError, "torch.float64, float32 is wanted"),
        ({"codes": torch.zeros(300, dtype=torch.int16)}, TypeError, "one of int8, uint8, float8_e4m3fn is wanted"),
        ({"codes": torch.zeros(301, dtype=torch.int8)}, ValueError, r"shape \[300\]"),
        (
            {"values": torch.zeros(300).double()},
            TypeError,
            "torch.float64, one of float32, float16, bfloat16 is wanted",
        ),
    ],
)
def test_what_breaks_the_contract_is_refused(change, error, match):
    given = {"values": torch.ones(300), "codes": torch.zeros(300, dtype=torch.int8), "scales": torch.zeros(2)} | change
    with pytest.raises(error, match=match):
        mt.multi_tensor_encode([given["values"]], [given["codes"]], [given["scales"]])
    assert not given["codes"].any() and not given["scales"].any()
    if "values" not in change:
        with pytest.raises(error):
            mt.multi_tensor_decode([given["codes"]], [given["values"]], [given["scales"]])
        assert (given["values"] == 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# Steps on codes

every_form = pytest.mark.parametrize("form", FORMS)
every_kernel = pytest.mark.parametrize("kernel", list(OF_KERNEL))


@on_every_set
@every_device
@every_form
@every_kernel
def test_a_step_on_codes_is_decode_step_encode_to_the_bit(form, kernel, device):
    for ours, wanted in zip(stepped(form, kernel, True, device), stepped(form, kernel, False, device), strict=True):
        assert all(map(same_bits, ours, wanted))


@every_device
@every_form
@every_kernel
def test_a_step_that_is_skipped_leaves_codes_as_they_are(form, kernel, device):
    *_, codes = stepped(form, kernel, True, device, found_inf=torch.ones((), device=device))
    for i, state in enumerate(states(OF_KERNEL[kernel][-1], device)):
        if i != 1:
            assert all(map(same_bits, codes[2 * i : 2 * i + 2], state))


@every_device
def test_the_first_step_of_sgd_reads_no_momentum(device):
    grad, param = torch.randn(5000, device=device), torch.ones(5000, device=device)
    codes, scales = torch.full((5000,), 99, dtype=torch.int8, device=device), torch.full((20,), NAN, device=device)
    mt.multi_tensor_sgd([grad], [param], [codes], first_run=True, scales=[[scales]], **SGD | {"weight_decay": 0.0})
    wanted = encoded(grad, torch.int8)
    assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1])


def test_scales_that_share_memory_are_refused():
    """Two blocks would divide by one scale: the weights would be others, and on a GPU it would be a race."""
    grads, params, codes = [torch.ones(256)], [torch.ones(256)], torch.zeros(256, dtype=torch.int8)
    squares, one = torch.zeros(256, dtype=torch.uint8), torch.ones(1)
    for scales in ([[one], [one]], [[codes.view(torch.float32)[:1]], [one]], [[one], [params[0][:1]]]):
        with pytest.raises(ValueError, match=r"^multi_tensor_adam: .* overlap"):
            mt.multi_tensor_adam(grads, params, [codes], [squares], None, 1, scales=scales, **ADAM)
    with pytest.raises(ValueError, match=r"^multi_tensor_encode: .* overlap"):
        mt.multi_tensor_encode([torch.ones(256)] * 2, [codes, codes.clone()], [one, one])
    assert not codes.any() and not squares.any() and (params[0] == 1).all() and one == 1


def test_a_step_whose_codes_have_no_scales_is_refused():
    lists = [torch.ones(5000)], [torch.ones(5000)], [torch.zeros(5000, dtype=torch.int8)]
    with pytest.raises(ValueError, match=r"tensor 0 of momentum_buffers is codes, and .* has none for it"):
        mt.multi_tensor_sgd(*lists, **SGD)
    with pytest.raises(TypeError, match=r"torch\.uint8, one of float32, int8 is wanted"):
        mt.multi_tensor_sgd(*lists[:2], [torch.zeros(5000, dtype=torch.uint8)], scales=[[torch.zeros(20)]], **SGD)
    assert (lists[1][0] == 1).all()
    fp32 = [*lists[:2], [torch.ones(5000)]]
    with pytest.raises(TypeError, match="tensor 0 of scales of momentum_buffers is a NoneType, a tensor is wanted"):
        mt.multi_tensor_sgd(*fp32, scales=[[None]], **SGD)
    assert (fp32[1][0] == 1).all() and (fp32[2][0] == 1).all()
