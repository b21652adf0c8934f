"""csrc/kernels/plan.h, the host code that splits lists into launches; it needs the extension and no device."""

from __future__ import annotations

import itertools

import pytest

from amp_patch import multi_tensor

# Without the extension there is no plan.h to test: the whole file is skipped, with the reason of the build.
_C = pytest.importorskip("amp_patch._C", reason=multi_tensor.backend_reason())


def plan(sizes, chunk=8, max_tensors=4, max_chunks=6):
    return _C.plan(sizes, chunk, max_tensors, max_chunks)


def covered(launches, chunk):
    """The (tensor, chunk index) pairs of a plan, in order."""
    return [(tensors[slot], index) for tensors, chunks in launches for slot, index in chunks]


def expected(sizes, chunk):
    return [(tensor, index) for tensor, size in enumerate(sizes) for index in range(-(-size // chunk))]


def check(sizes, chunk=8, max_tensors=4, max_chunks=6):
    launches = plan(sizes, chunk, max_tensors, max_chunks)
    assert covered(launches, chunk) == expected(sizes, chunk)  # every element once, in order
    for tensors, chunks in launches:
        assert 0 < len(tensors) <= max_tensors
        assert 0 < len(chunks) <= max_chunks
        assert len(set(tensors)) == len(tensors)
        assert {slot for slot, _ in chunks} == set(range(len(tensors)))  # no slot without work
    for tensors, chunks in launches[:-1]:
        assert len(tensors) == max_tensors or len(chunks) == max_chunks  # no launch before one is full
    return launches


def test_a_plan_equals_the_hand_made_one():
    assert plan([8, 17, 0, 3]) == [([0, 1, 3], [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)])]


def test_every_capacity_and_empties_anywhere():
    """All lists of up to three sizes, with empties first, between, last and only, in launches of every shape."""
    for length in range(4):
        for sizes in itertools.product([1, 8, 9, 17, 24], repeat=length):
            for max_tensors, max_chunks in itertools.product(range(1, length + 2), range(1, 3 * length + 2)):
                launches = check(sizes, 8, max_tensors, max_chunks)
                for gaps in itertools.product(range(2), repeat=length + 1):
                    full = [0] * gaps[0]
                    places = []
                    for size, gap in zip(sizes, gaps[1:], strict=True):
                        places.append(len(full))
                        full += [size] + [0] * gap
                    # Empties change nothing but the numbers of the tensors.
                    moved = [([places[t] for t in tensors], chunks) for tensors, chunks in launches]
                    assert plan(full, 8, max_tensors, max_chunks) == moved


def test_sizes_past_31_bits():
    chunk = 2**30
    launches = check([2**31 + 1, 3, 2**33], chunk)
    assert covered(launches, chunk)[:4] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert len(covered(launches, chunk)) == 3 + 1 + 8
    assert len(covered(plan([2**62], 2**55), 2**55)) == 128


@pytest.mark.parametrize("arguments", [([1], 0, 1, 1), ([1], 1, 0, 1), ([1], 1, 1, 0), ([-1], 1, 1, 1)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match=r"^plan: "):
        _C.plan(*arguments)
