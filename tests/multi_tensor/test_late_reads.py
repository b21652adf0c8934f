"""A number argument that shares memory with an output: it is copied, since a block could read it after a write."""

from __future__ import annotations

import pytest
import torch
from paths import TESTS
from torch.utils import cpp_extension

from amp_patch import multi_tensor as mt

pytestmark = pytest.mark.slow  # a compiler works for a minute


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """The ops of csrc on the CPU as on a device: number arguments are read again before each element."""
    return cpp_extension.load(
        "late_reads",
        [str(TESTS / "cuda" / "late_reads.cpp")],
        extra_cflags=["-O0", "-ffp-contract=off"],
        build_directory=str(tmp_path_factory.mktemp("late_reads")),
    )


SIZE = 40


def threes():
    return torch.full((SIZE,), 3.0)


def call(name, late, number_of):
    """One call whose outputs hold its numbers, where `number_of(output)` is one: what it has written."""
    x, lists = threes(), [threes() for _ in range(4)]
    out = lists[1]
    number = number_of(out)
    if name == "scale":
        late.scale([x], [out], number)
    elif name == "unscale":
        late.scale([out], [out], number)
    elif name == "axpby":
        late.axpby(number, [x], number, [out], [out])
    elif name == "adam":
        late.adam(*([t] for t in lists), number, number, [number, number])
    else:
        late.sgd(*([t] for t in lists[:3]), number, [number, number])
    return torch.stack(lists)


@pytest.mark.parametrize("where", [0, 7, SIZE - 1])
@pytest.mark.parametrize("name", ["scale", "unscale", "axpby", "adam", "sgd"])
def test_a_late_read_returns_the_value_before_the_first_write(late, name, where):
    assert torch.equal(call(name, late, lambda out: out[where]), call(name, late, lambda out: 3.0))


def test_one_in_another_list_is_no_output(late):
    x, out = threes(), threes()
    late.scale([x], [out], x[2])
    assert (out == 9.0).all()
    alone = torch.zeros(SIZE)
    mt.multi_tensor_scale([x], [alone], x[2])  # as the CPU's own loop has it
    assert torch.equal(out, alone)
