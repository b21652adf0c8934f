"""Stochastic rounding: to one of two neighbours, with the right frequency, and the same bits on every backend."""

from __future__ import annotations

import math
import random

import pytest
import torch
from on_every_backend import ADAM, SGD, backend_fixture, device, no_grad_fixture, on_every_set  # noqa: F401  fixtures
from torch import Tensor

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import plain_random

pytestmark = on_every_set

WORD = 2**32 - 1
LARGEST = torch.finfo(torch.bfloat16).max
SIZES = [0, 1, 7, 8, 9, 33, 127, 128, 2048 + 5, 16384 + 13]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, as the paper has it."""
    (c0, c1, c2, c3), (key0, key1) = counter, key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ key0, second & WORD, first >> 32 ^ c3 ^ key1, first & WORD
        key0, key1 = key0 + 0x9E3779B9 & WORD, key1 + 0xBB67AE85 & WORD
    return [c0, c1, c2, c3]


def expected_bits(count: int, seed: int, draw: int) -> Tensor:
    bits: list[int] = []
    for group in range(-(-count // 8)):
        words = philox([group & WORD, group >> 32, draw & WORD, draw >> 32], [seed & WORD, seed >> 32])
        bits += [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.tensor(bits[:count], dtype=torch.int32)


def rounded(*masters: Tensor, seed: int = 5, draws: list[int] | None = None) -> list[Tensor]:
    weights = [torch.empty_like(m, dtype=torch.bfloat16) for m in masters]
    mt.multi_tensor_stochastic_round(list(masters), weights, seed, draws or [*range(len(masters))])
    return weights


# The vectors that come with the authors' code (Random123, kat_vectors).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_is_the_authors(counter, key, words):
    assert philox(counter, key) == words
    plain = plain_random.philox([torch.tensor([word]) for word in counter], key[0] | key[1] << 32)
    assert [int(word) for word in plain] == words


@device
@pytest.mark.parametrize(("seed", "draw"), [(0, 0), (7, 3 << 40 | 12), (2**63 - 1, 2**63 - 1)])
def test_every_backend_rounds_by_the_same_bits(device, seed, draw):
    generator = torch.Generator().manual_seed(1)
    masters = [torch.randn(n, generator=generator) for n in SIZES]
    weights = rounded(*(m.to(device) for m in masters), seed=seed, draws=[draw ^ n for n in SIZES])
    for master, weight, size in zip(masters, weights, SIZES, strict=True):
        wanted = (master.view(torch.int32) + expected_bits(size, seed, draw ^ size)) >> 16
        assert torch.equal(weight.cpu().view(torch.int16), wanted.to(torch.int16))


@device
def test_a_number_becomes_one_of_its_two_neighbours_and_one_that_bf16_has_stays(device):
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=generator).to(torch.int32)
    master = bits.view(torch.float32)
    master = master[master.abs() <= LARGEST].to(device)
    for draw in range(3):
        (weight,) = rounded(master, draws=[draw])
        below = master.view(torch.int32) >> 16
        assert ((weight.view(torch.int16).int() == below) | (weight.view(torch.int16).int() == below + 1)).all()
        exact = (master.view(torch.int32) & -(2**16)).view(torch.float32)
        assert torch.equal(rounded(exact, draws=[draw])[0].float().view(torch.int32), exact.view(torch.int32))


@device
@pytest.mark.parametrize("value", [1 + 2.0**-10, -(1 + 3 * 2.0**-9), 2.0**-132 * 1.1, 1e30])
def test_the_mean_of_a_million_roundings_is_the_number(device, value):
    count = 10**6
    (weight,) = rounded(torch.full((count,), value, device=device), draws=[9])
    low, high = sorted(weight.double().unique().tolist())
    number = torch.tensor(value).double().item()
    share = (number - low) / (high - low)
    mean = weight.double().mean().item()
    sigma = (high - low) * math.sqrt(share * (1 - share) / count)
    assert abs(mean - number) < 4 * sigma


@device
def test_values_without_two_neighbours_stay(device):
    beyond = torch.tensor([0x7F7FFFFF], dtype=torch.int32).view(torch.float32).item()  # FP32's largest number
    values = [math.inf, -math.inf, 0.0, -0.0, LARGEST, -LARGEST, beyond, -beyond]
    wanted = [*values[:6], LARGEST, -LARGEST]
    for draw in range(50):
        (weight,) = rounded(torch.tensor(values * 5, device=device), draws=[draw])
        assert weight.tolist() == wanted * 5 and weight[3].signbit()
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -(2**23) + 1], dtype=torch.int32).view(torch.float32)
    assert rounded(nans.to(device).repeat(9))[0].isnan().all()


@device
@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_weights_is_the_step_of_their_values_rounded(device, optimizer, dtype):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, generator=generator).to(device).bfloat16() for n in SIZES]
    states = [[[torch.zeros(n, device=device) for n in SIZES] for _ in range(3)] for _ in range(2)]
    steps = [[torch.zeros((), device=device) for _ in SIZES] for _ in range(2)]
    for k in range(5):
        grads = [torch.randn(n, generator=generator).to(device, dtype) for n in SIZES]
        draws = [k + (i << 40) for i in range(len(SIZES))]
        whole = [weight.float() for weight in weights]
        chance = ({}, {"seed": 3, "draws": draws})
        for params, (m, v, most), counts, options in zip((whole, weights), states, steps, chance, strict=True):
            if optimizer == "sgd":
                mt.multi_tensor_sgd(grads, params, m, **SGD, first_run=k == 0, factors=(0.3,), **options)
            else:
                most = most if optimizer == "amsgrad" else None
                mt.multi_tensor_adam(grads, params, m, v, most, counts, **ADAM, factors=(0.3,), **options)
        assert all(map(torch.equal, weights, rounded(*whole, seed=3, draws=draws)))
        assert all(map(torch.equal, sum(states[0], steps[0]), sum(states[1], steps[1])))
    before = [t.clone() for t in weights]
    flag = torch.ones((), device=device)
    mt.multi_tensor_sgd(grads, weights, None, **SGD | {"momentum": 0.0}, found_inf=flag, seed=3, draws=draws)
    assert all(map(torch.equal, weights, before))


def test_threads_and_the_place_among_other_tensors_change_no_bit():
    master = torch.randn(100_003, generator=torch.Generator().manual_seed(4))
    (alone,) = rounded(master, draws=[11])
    others = [torch.randn(random.Random(k).randrange(40_000)) for k in range(5)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(rounded(*others, master, *others, draws=[1, 2, 3, 4, 5, 11, 6, 7, 8, 9, 10])[5], alone)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(rounded(master, draws=[12])[0], alone)
    assert not torch.equal(rounded(master, seed=6, draws=[11])[0], alone)


def test_elements_are_counted_in_memory_order():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (weight,) = rounded(x, draws=[2])
    flat = x.permute(0, 2, 3, 1).contiguous().flatten()
    assert weight.stride() == x.stride()
    assert torch.equal(weight.permute(0, 2, 3, 1).flatten(), rounded(flat, draws=[2])[0])
    with pytest.raises(ValueError, match=r"multi_tensor_stochastic_round: tensor 0 of masters has strides"):
        mt.multi_tensor_stochastic_round([x.contiguous()], [weight], 0, [0])
