"""Split masters: a BF16 weight and an int16 half hold an FP32 number, and the optimizers' steps work on them."""

from __future__ import annotations

import math

import pytest
import torch
from on_every_backend import ADAM, SGD, backend_fixture, device, no_grad_fixture, on_every_set  # noqa: F401  fixtures

from amp_patch import multi_tensor as mt

pytestmark = on_every_set

TINY = 0x8000  # the bits of 2**-134, half of BF16's smallest number
TIES = 32_640  # exact ties that torch's cast rounds down, to even


def split(masters):
    weights = [torch.empty_like(m, dtype=torch.bfloat16) for m in masters]
    halves = [torch.empty_like(m, dtype=torch.int16) for m in masters]
    mt.multi_tensor_split(masters, weights, halves)
    return weights, halves


def join(weights, halves):
    masters = [torch.empty_like(w, dtype=torch.float32) for w in weights]
    mt.multi_tensor_join(weights, halves, masters)
    return masters


def check_patterns(bits):
    """That the numbers with these bits come back, and 0 for those whose BF16 weight is 0.

    Returns the number of those that torch's cast rounds to something else.
    """
    x = bits.to(torch.int32).view(torch.float32)
    (weight,), (half,) = split([x])
    (back,) = join([weight], [half])
    nan = x.isnan()
    assert torch.equal(weight.isnan(), nan) and torch.equal(back.isnan(), nan)
    tiny = x.view(torch.int32) & 0x7FFFFFFF < TINY
    wanted = torch.where(tiny, x.view(torch.int32) & -(2**31), x.view(torch.int32))
    assert ((back.view(torch.int32) == wanted) | nan).all()
    assert (half[nan] == 0).all()
    other = (weight != x.bfloat16()) & ~nan
    assert ((x.view(torch.int32)[other] & 0xFFFF) == 0x8000).all()
    return int(other.sum())


@device
def test_a_sample_of_all_patterns(backend, device):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (2**20 + 5,), generator=generator)
    low = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    edges = ((torch.arange(2**16) << 16).unsqueeze(1) + low).flatten()  # every high half
    assert check_patterns(edges.to(device)) == TIES
    check_patterns(drawn.to(device))


@pytest.mark.slow
@pytest.mark.release
def test_all_patterns(backend):
    if backend == "torch":
        pytest.skip("plain torch takes minutes; the sample has every high half")
    part = 2**22
    assert sum(check_patterns(torch.arange(k * part, (k + 1) * part)) for k in range(2**32 // part)) == TIES


@device
def test_a_write_into_a_weight_sets_the_master(backend, device):
    wrote = torch.tensor([0.0, -0.0, 1.0, -3.5, math.inf, -math.inf, math.nan], dtype=torch.bfloat16, device=device)
    for half in (-32768, -1, 0, 1, 32767):
        (master,) = join([wrote], [torch.full_like(wrote, half, dtype=torch.int16)])
        assert not master[:6].isnan().any() and master[6].isnan()
        # Within a unit in the last place: of an infinity that is the largest numbers of FP32.
        assert master[:2].view(torch.int32).tolist() == [0, -(2**31)] and (master[4:6].abs() > 3.38e38).all()
        torch.testing.assert_close(master[2:4], wrote[2:4].float(), rtol=2**-8, atol=0)
        assert torch.equal(master.signbit()[2:6], wrote.signbit()[2:6])


@device
@pytest.mark.parametrize("flushes", [False, True])
def test_a_weight_of_zero_is_zero_with_any_low_half(backend, device, flushes):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    smallest = torch.tensor([0, -(2**15), 1, 1 - 2**15], dtype=torch.int16, device=device).view(torch.bfloat16)
    if not torch.set_flush_denormal(flushes) and flushes:
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        for weight, high in zip(smallest, (0, 2**31, 2**16, 2**31 + 2**16), strict=True):
            (master,) = join([weight.expand(2**16).contiguous()], [halves])
            wanted = high + (halves.long() if high & 2**16 else torch.zeros_like(halves, dtype=torch.int64))
            assert torch.equal(master.view(torch.int32), wanted.to(torch.int32))
    finally:
        torch.set_flush_denormal(False)


@device
def test_a_step_of_a_pruned_weight_leaves_zero(backend, device):
    master = torch.randn(100, generator=torch.Generator().manual_seed(3)).to(device)
    for zero in (0.0, -0.0):
        (weight,), (half,) = split([master])
        weight[::2] = zero
        grad = torch.where(torch.arange(100, device=device) % 2 == 0, 0.0, 1.0)
        mt.multi_tensor_sgd([grad], [half], None, [weight], **SGD | {"momentum": 0.0, "lr": 1.0})
        (after,) = join([weight], [half])
        assert (weight[::2] == 0).all() and (after[::2] == 0).all()
        assert torch.equal(after[1::2], master[1::2] - 1)


@device
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_step_of_the_joined_masters(backend, device, optimizer, dtype):
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 7, 8, 33, 70, 16384 + 13]
    whole = [torch.randn(n, generator=generator).to(device) for n in sizes]
    weights, halves = split(whole)
    states = [[[torch.zeros_like(p) for p in whole] for _ in range(2)] for _ in range(2)]
    steps = [[torch.zeros((), device=device) for _ in whole] for _ in range(2)]
    for k in range(20):
        grads = [torch.randn(n, generator=generator).to(device, dtype) for n in sizes]
        for params, low, (m, v), counts in ((whole, None, states[0], steps[0]), (halves, weights, states[1], steps[1])):
            if optimizer == "adam":
                mt.multi_tensor_adam(grads, params, m, v, None, counts, low, **ADAM, factors=(0.3,))
            else:
                mt.multi_tensor_sgd(grads, params, m, low, **SGD, first_run=k == 0, factors=(0.3,))
    for one, two in zip([whole, *states[0]], [join(weights, halves), *states[1]], strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a, b)
    before = [t.clone() for t in (*weights, *halves)]
    mt.multi_tensor_sgd(
        grads, halves, None, weights, **SGD | {"momentum": 0.0}, found_inf=torch.ones((), device=device)
    )
    assert all(torch.equal(a, b) for a, b in zip((*weights, *halves), before, strict=True))


def test_memory_orders(backend):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights, halves = split([x])
    assert weights[0].stride() == x.stride() and torch.equal(join(weights, halves)[0], x)
    with pytest.raises(ValueError, match=r"multi_tensor_split: tensor 0 of weights has strides .*, its parameter has"):
        mt.multi_tensor_split([x], [weights[0].contiguous()], halves)
    with pytest.raises(ValueError, match=r"multi_tensor_join: tensor 0 of halves has strides .*, its parameter has"):
        mt.multi_tensor_join(weights, [halves[0].contiguous()], [x])
