"""Calls of the kernels that are refused: by every backend with the same words, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hunts import hunt
from hypothesis import assume
from hypothesis import strategies as st
from kernel_cases import F64, Buffer, Case, cases, everywhere, narrow, same_bits, seeds
from torch import Tensor

from amp_patch import multi_tensor as mt

KERNELS: dict[str, tuple[tuple[str, ...], str | None, Callable[..., Any]]] = {
    "multi_tensor_scale": (("src", "dst"), "dst", lambda s, d, n, f: mt.multi_tensor_scale(s, d, n, f)),
    "multi_tensor_unscale": (("grads",), "grads", lambda g, n, f: mt.multi_tensor_unscale(g, n, f)),
    "multi_tensor_axpby": (("x", "y", "out"), "out", lambda x, y, o, n, f: mt.multi_tensor_axpby(1.0, x, n, y, o, f)),
    "multi_tensor_check_finite": (("tensors",), None, lambda t, n, f: mt.multi_tensor_check_finite(t, f)),
    "multi_tensor_l2norm": (("tensors",), None, lambda t, n, f: mt.multi_tensor_l2norm(t)),
    "multi_tensor_unscale_l2norm": (("grads",), "grads", lambda g, n, f: mt.multi_tensor_unscale_l2norm(g, n, f)),
    "multi_tensor_adopt": (("params", "masters"), "masters", lambda p, m, n, f: mt.multi_tensor_adopt(p, m)),
}
TAKES_FLAG = {"multi_tensor_scale", "multi_tensor_unscale", "multi_tensor_axpby", "multi_tensor_check_finite"}
TAKES_FACTOR = {"multi_tensor_scale", "multi_tensor_unscale", "multi_tensor_axpby", "multi_tensor_unscale_l2norm"}

# What stands in the place of one tensor, made from it.
FAULTY: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "a number": lambda t: 1.0,
    "int32": lambda t: torch.ones(t.shape, dtype=torch.int32),
    "bool": lambda t: torch.ones(t.shape, dtype=torch.bool),
    "complex": lambda t: torch.ones(t.shape, dtype=torch.cfloat),
    "float8": lambda t: torch.ones(t.shape).to(torch.float8_e4m3fn),
    "sparse": lambda t: torch.ones(t.shape).to_sparse(),
    "negated": lambda t: torch.ones(t.shape, dtype=torch.cfloat).conj().imag,
    "meta": lambda t: torch.ones(t.shape, device="meta"),
}
# Those that need a second list, or one that is written.
UNLIKE: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: torch.ones((*t.shape, 2)),
    "float64": lambda t: torch.ones(t.shape, dtype=torch.float32 if t.dtype == F64 else F64),
}
UNWRITABLE: dict[str, Callable[[Tensor], Any]] = {
    "expanded": lambda t: torch.ones(1).expand(*t.shape, 3)[..., 0].expand(3, *t.shape)[0].expand(t.shape),
    "requires grad": lambda t: torch.ones(t.shape, dtype=t.dtype, requires_grad=True),
}


def message_of(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return (ValueError if isinstance(caught.value, ValueError) else TypeError), str(caught.value)


def check_refused(kernel: str, buffers: list[Tensor], call: Callable[[Tensor], Any]) -> None:
    before, versions, words = [b.clone() for b in buffers], [b._version for b in buffers], set()
    for _ in everywhere():
        found = torch.zeros(())
        words.add(message_of(lambda found=found: call(found)))
        assert same_bits(buffers, before, nan_bits=True) and found.item() == 0.0
        assert [b._version for b in buffers] == versions and found._version == 0
    assert len(words) == 1, words
    (_, text), *_ = words
    assert re.match(rf"{kernel}: \S", text), text


@st.composite
def calls(draw: Any) -> tuple[str, Case]:
    kernel = draw(st.sampled_from(sorted(KERNELS)))
    roles, written, _ = KERNELS[kernel]
    adopts = kernel == "multi_tensor_adopt"
    dtypes = {"masters": torch.float32} if adopts else None
    return kernel, draw(cases(*roles, written=written, dtypes=dtypes, double=not adopts))


@hunt(150, call=calls(), data=st.data())
def test_a_faulty_tensor_anywhere_is_refused(call: tuple[str, Case], data: Any) -> None:
    kernel, case = call
    roles, written, function = KERNELS[kernel]
    buffers, lists = case.make()
    assume(len(lists[roles[0]]) > 0)
    role = data.draw(st.sampled_from(roles), label="list")
    i = data.draw(st.integers(0, len(lists[role]) - 1), label="index")
    faults = dict(FAULTY)
    faults.update(UNLIKE if len(roles) > 1 else {})
    faults.update(UNWRITABLE if role == written else {})
    fault = data.draw(st.sampled_from(sorted(faults)), label="fault")
    bad = faults[fault](lists[role][i])
    # One of two different lists, where a single tensor sets the tone for all, may be no fault; see the other tests.
    assume(fault != "expanded" or not bad.is_contiguous())
    assume(fault != "meta" or len(lists[roles[0]]) * len(roles) > 1)
    lists[role][i] = bad
    check_refused(kernel, buffers, lambda found: function(*lists.values(), 2.0, found))


@hunt(80, call=calls(), extra=st.booleans(), data=st.data())
def test_lists_of_different_lengths_are_refused(call: tuple[str, Case], extra: bool, data: Any) -> None:
    kernel, case = call
    roles, _, function = KERNELS[kernel]
    buffers, lists = case.make()
    assume(len(roles) > 1 and (extra or lists[roles[0]]))
    role = data.draw(st.sampled_from(roles), label="list")
    lists[role] = [*lists[role], torch.ones(3)] if extra else lists[role][:-1]
    check_refused(kernel, buffers, lambda found: function(*lists.values(), 2.0, found))


@hunt(
    80,
    call=calls(),
    flaw=st.sampled_from(["float64", "int32", "two elements", "meta", "a number", "negated"]),
    of=st.sampled_from(["found_inf", "factor"]),
)
def test_a_faulty_flag_or_factor_is_refused(call: tuple[str, Case], flaw: str, of: str) -> None:
    kernel, case = call
    assume(kernel in (TAKES_FLAG if of == "found_inf" else TAKES_FACTOR))
    assume(of == "found_inf" or flaw not in ("float64", "a number"))
    wrong: Any = {
        "float64": torch.zeros((), dtype=F64),
        "int32": torch.zeros((), dtype=torch.int32),
        "two elements": torch.zeros(2),
        "meta": torch.zeros((), device="meta"),
        "a number": 0.0,
        "negated": torch.zeros((), dtype=torch.cfloat).conj().imag,
    }[flaw]
    buffers, lists = case.make()
    # Without tensors the flag alone says where the call takes place.
    assume(flaw != "meta" or any(lists.values()))
    if of == "found_inf":
        check_refused(kernel, buffers, lambda found: KERNELS[kernel][2](*lists.values(), 2.0, wrong))
    else:
        check_refused(kernel, buffers, lambda found: KERNELS[kernel][2](*lists.values(), wrong, found))


WRITING = sorted(kernel for kernel, (_, written, _) in KERNELS.items() if written)
sizes = st.sampled_from([2, 3, 8, 63, 64, 65, 513, 16385])


@hunt(
    100,
    kernel=st.sampled_from(WRITING),
    dtype=narrow,
    n=sizes,
    shift=st.one_of(st.none(), st.floats(0, 1)),
    around=seeds,
)
def test_outputs_that_overlap_are_refused(
    kernel: str, dtype: torch.dtype, n: int, shift: float | None, around: int
) -> None:
    roles, _, function = KERNELS[kernel]
    dtype = torch.float32 if kernel == "multi_tensor_adopt" else dtype
    by = int((shift or 0.0) * (n - 1))  # 0: the very same elements, twice
    whole = Buffer(dtype, 2 * n if shift is None else n + by, "normal", around).make()
    others = [torch.ones(around % 7 + i, dtype=dtype) for i in range(around % 4)]
    twice = [whole[::2], whole[::2]] if shift is None else [whole[:n], whole[by:]]
    outs = [twice[around % 2], *others, twice[1 - around % 2]]
    lists = [*([torch.ones_like(t) for t in outs] for _ in roles[1:]), outs]
    check_refused(kernel, [whole, *others], lambda found: function(*lists, 2.0, found))


@hunt(100, kernel=st.sampled_from(WRITING), how=st.sampled_from(["shifted", "transposed", "as another type"]), n=sizes,
      shift=st.floats(0, 1), data=st.data())  # fmt: skip
def test_outputs_over_their_inputs_are_refused(kernel: str, how: str, n: int, shift: float, data: Any) -> None:
    roles, written, function = KERNELS[kernel]
    assume(len(roles) > 1)
    adopts = kernel == "multi_tensor_adopt"
    if how == "as another type":
        assume(not adopts)
        whole = Buffer(torch.float16, n, "normal", n).make()
        source, out = whole, whole.view(torch.bfloat16)
    elif how == "transposed":
        whole = Buffer(torch.float32, 25, "normal", n).make()
        source, out = whole.view(5, 5), whole.view(5, 5).t()
    else:
        by = 1 + int(shift * (n - 2))
        whole = Buffer(torch.float32, n + by, "normal", n).make()
        source, out = whole[:n], whole[by:]
        if data.draw(st.booleans(), label="the other way round"):
            source, out = out, source
    of = data.draw(st.sampled_from([role for role in roles if role != written]), label="input")
    lists = {role: [torch.ones(3), torch.ones(source.shape), torch.ones(())] for role in roles}
    lists[of][1], lists[written][1] = source, out
    check_refused(kernel, [whole], lambda found: function(*lists.values(), 2.0, found))
