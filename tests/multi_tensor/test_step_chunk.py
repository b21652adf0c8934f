"""The optimizers' CUDA kernels without their launches (step_chunk.h in csrc/kernels), run on the host."""

from __future__ import annotations

import ctypes

import emulated
import pytest
import torch
from conftest import DTYPES
from emulated import Given, Options, Seen, given
from reference import ADAM, SGD, State

from amp_patch import multi_tensor

if emulated.COMPILER is None:
    pytest.skip("no C++ compiler here to build tests/cuda/emulate.cpp with", allow_module_level=True)

PASS = 4096  # elements of the smallest chunk
SIZES = [0, 1, 3, 8, 255, 257, PASS - 1, PASS, PASS + 1, 3 * PASS + 7, 0]
PLACES = ("grads", "params", "low", "m", "v", "most")


class Places(ctypes.Structure):
    _fields_ = (("lists", ctypes.POINTER(Given) * len(PLACES)), ("steps", ctypes.POINTER(ctypes.c_void_p)))


@pytest.fixture(scope="module")
def library():
    return emulated.build()


@pytest.fixture
def step(library):
    def call(op, lists, steps=(), numbers=(), maximize=False, **options):
        """One call over lists by their place; what was seen."""
        held = [given(lists[name]) if lists.get(name) else None for name in PLACES]
        pointers = (ctypes.c_void_p * len(steps))(*(s.data_ptr() for s in steps)) if steps else None
        places = Places((ctypes.POINTER(Given) * len(PLACES))(*(h or ctypes.POINTER(Given)() for h in held)), pointers)
        options = Options(**{"max_rows": 2**40, "max_blocks": 2**31 - 1, "last_blocks": 2**40, **options})
        seen = Seen()
        status = library.emulate_step(
            *(op.encode(), ctypes.c_int64(len(lists["params"])), ctypes.byref(places)),
            *((ctypes.c_double * 6)(*numbers), ctypes.c_int64(maximize), ctypes.byref(options), ctypes.byref(seen)),
        )
        assert status != 2, f"{op}: a grid that no GPU takes"
        assert status == 0, f"emulate_step() knows no {op}"
        return seen

    return call


def close(a, b):
    for x, y in zip(a.everything(), b.everything(), strict=True):
        rtol = 1e-5 if x.dtype == torch.float32 else 2 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("low", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["adam", "amsgrad", "sgd"])
@pytest.mark.parametrize("options", [{}, {"backwards": True}, {"max_rows": 2, "max_blocks": 3}])
def test_steps(step, low, dtype, op, options):
    with torch.no_grad():
        ours, theirs = State(SIZES, low), State(SIZES, low)
        for _ in range(3):
            for state in (ours, theirs):
                state.gradients(4, dtype)
                if low is not None:
                    state.low[4].add_(1)
            lists = {name: getattr(ours, name) for name in PLACES}
            if op == "sgd":
                step(op, lists, numbers=(0.3, 0.1, 0.01, 0.9), **options)
                theirs.reference_sgd(**SGD | {"weight_decay": 0.1}, factors=(0.3,))
            else:
                numbers = (0.3, 0.1, 0.01, ADAM["beta1"], ADAM["beta2"], ADAM["eps"])
                step(op, lists, ours.steps, numbers, maximize=True, **options)
                flags = {"decoupled": False, "weight_decay": 0.1, "maximize": True, "amsgrad": op == "amsgrad"}
                theirs.reference_adam(**ADAM | flags, factors=(0.3,))
            close(ours, theirs)


@pytest.mark.parametrize("offset, width", [(0, 4), (1, 1), (2, 1), (4, 4)])
def test_accesses_are_as_wide_as_alignment_allows(step, offset, width):
    whole = torch.randn(200)
    lists = {"grads": [whole[offset : offset + 90]], "params": [torch.zeros(90)], "m": [torch.zeros(90)]}
    seen = step("sgd", lists, numbers=(1, 0, 1, 0.9))
    assert seen.widest == width and seen.runs == 22 + 2, "packs of four, and the last two elements"
    assert torch.equal(lists["params"][0], -lists["grads"][0])


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("backwards", [False, True])
def test_split_and_join(step, offset, backwards):
    generator = torch.Generator().manual_seed(0)
    sizes = [5, PASS + 7, 2**16 * 5]
    drawn = [torch.randint(-(2**31), 2**31, (n + 1,), generator=generator).int()[offset:] for n in sizes]
    masters = [bits[:n].view(torch.float32) for bits, n in zip(drawn, sizes, strict=True)]
    weights = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    halves = [torch.empty(n, dtype=torch.int16) for n in sizes]
    back = [torch.empty(n) for n in sizes]
    step("split", {"grads": masters, "params": halves, "low": weights}, backwards=backwards)
    step("join", {"grads": back, "params": halves, "low": weights}, backwards=backwards)
    for master, weight, joined in zip(masters, weights, back, strict=True):
        nan = master.isnan()
        assert torch.equal(weight.isnan(), nan) and torch.equal(joined.isnan(), nan)
        tiny = master.abs() < 2.0**-134  # half of BF16's smallest number
        assert tiny.any() or master.numel() < PASS * 16
        assert torch.equal(joined[~nan], torch.where(tiny, 0 * master, master)[~nan])
        tie = master.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(weight[~nan & ~tie], master[~nan & ~tie].bfloat16())


def test_a_step_of_split_masters(step):
    master, grad, buffer = torch.randn(PASS + 9), torch.randn(PASS + 9), torch.zeros(PASS + 9)
    weight, half, joined = master.bfloat16(), torch.empty(PASS + 9, dtype=torch.int16), torch.empty(PASS + 9)
    step("split", {"grads": [master], "params": [half], "low": [weight]})
    step("sgd", {"grads": [grad], "params": [half], "low": [weight], "m": [buffer]}, numbers=(1, 0, 0.1, 0.9))
    step("sgd", {"grads": [grad], "params": [master], "m": [torch.zeros(PASS + 9)]}, numbers=(1, 0, 0.1, 0.9))
    step("join", {"grads": [joined], "params": [half], "low": [weight]})
    assert torch.equal(joined, master)


SEED, FIRST_DRAW = 7, 3 << 40  # of emulate.cpp


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"backwards": True}, {"max_rows": 2, "max_blocks": 3}])
def test_stochastic_rounding_has_the_same_bits_in_any_blocks(step, offset, options):
    masters = [torch.randn(n + offset)[offset:] for n in SIZES]
    weights = [torch.empty(n + offset, dtype=torch.bfloat16)[offset:] for n in SIZES]
    wanted = [torch.empty_like(w) for w in weights]
    draws = [FIRST_DRAW + i for i in range(len(SIZES))]
    step("stochastic_round", {"grads": masters, "params": weights}, **options)
    multi_tensor.multi_tensor_stochastic_round(masters, wanted, SEED, draws)
    assert all(map(torch.equal, weights, wanted))
    grads, buffers = [torch.randn(n) for n in SIZES], [torch.zeros(n) for n in SIZES]
    stepped = [weight.float() for weight in weights]
    lists = {"grads": grads, "m": buffers}
    step("sgd", {**lists, "params": weights}, numbers=(1, 0, 0.1, 0.9), **options)
    step("sgd", {**lists, "params": stepped, "m": [torch.zeros(n) for n in SIZES]}, numbers=(1, 0, 0.1, 0.9))
    multi_tensor.multi_tensor_stochastic_round(stepped, wanted, SEED, draws)
    assert all(map(torch.equal, weights, wanted))


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
@pytest.mark.parametrize("op", ["split", "join", "stochastic_round", "sgd", "adam", "amsgrad"])
def test_nothing_to_do(step, op, sizes):
    """A GPU refuses a launch of no blocks. The steps of parameters without elements are counted."""
    lists = {name: [torch.empty(n) for n in sizes] for name in PLACES}
    steps = [torch.full((), 4.0) for _ in sizes] if op.startswith("a") else ()
    step(op, lists, steps, (0.3, 0.1, 0.01, 0.9, 0.99, 1e-8))
    assert [float(count) for count in steps] == [5.0] * len(steps)
