"""Calls that break a contract: what came, what was wanted, and nothing written; and how a backend is chosen."""

from __future__ import annotations

import contextlib
import re
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from on_every_backend import (
    backend_fixture,  # noqa: F401  the fixture `backend`
    flag,
    scaler,
    versions,
)
from python_forks import python
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_patch import multi_tensor as mt

# ---------------------------------------------------------------------------------------------------------------------
# Errors: what came, what was wanted, and nothing written


F32, F16 = torch.ones(3), torch.ones(3, dtype=torch.float16)
BAD_CALLS = [
    (([F32], [F32, F32]), ValueError, "multi_tensor_scale: dst has 2 tensors, src has 1"),
    (
        ([F32] * 4, [F32, F32, F32, torch.ones(2)]),
        ValueError,
        "multi_tensor_scale: tensor 3 of dst has shape [2], src has [3]",
    ),
    ((F32, [F32]), TypeError, "multi_tensor_scale: src is a Tensor, a list or tuple of tensors is wanted"),
    (([F32], F32), TypeError, "multi_tensor_scale: dst is a Tensor, a list or tuple of tensors is wanted"),
    (([F32, None], [F32, F32]), TypeError, "multi_tensor_scale: tensor 1 of src is a NoneType, a tensor is wanted"),
    (
        ([F32.int()], [F32]),
        TypeError,
        "multi_tensor_scale: tensor 0 of src is torch.int32, one of float32, float16, bfloat16, float64 is wanted: ",
    ),
    (([F32], [F32.cfloat()]), TypeError, "multi_tensor_scale: tensor 0 of dst is torch.complex64, one of float32"),
    (
        ([F32.to_sparse()], [F32]),
        TypeError,
        "multi_tensor_scale: tensor 0 of src is torch.sparse_coo, a dense one is wanted: hand over its "
        "coalesced values (`t.coalesce().values()`)",
    ),
    (
        ([F32, F32.double()], [F32, F32]),
        TypeError,
        "multi_tensor_scale: tensor 1 of dst is torch.float32, src has torch.float64: float64 stays float64",
    ),
    (
        ([F32, F32.to("meta")], [F32, F32]),
        ValueError,
        "multi_tensor_scale: tensor 1 of src is on meta, tensor 0 of src on cpu: one call takes one device",
    ),
    (
        ([F32.expand(2, 3)], [F16.expand(2, 3)]),
        ValueError,
        "multi_tensor_scale: tensor 0 of dst overlaps itself (an expanded tensor, strides [0, 1])",
    ),
    (
        ([torch.ones(2, dtype=torch.cfloat).conj().imag], [torch.ones(2)]),
        ValueError,
        "multi_tensor_scale: tensor 0 of src is a lazily negated view, call `.resolve_neg()` on it first",
    ),
]


@pytest.mark.parametrize("lists, error, message", BAD_CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_errors_name_the_list_and_the_index_and_change_nothing(lists, error, message):
    tensors = [t for ts in lists for t in (ts if isinstance(ts, list) else [ts]) if isinstance(t, torch.Tensor)]
    before, found = versions(tensors), flag()
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        mt.multi_tensor_scale(*lists, 2.0, found)
    assert versions(tensors) == before
    assert found == 0.0 and F32.tolist() == [1.0] * 3 and F16.tolist() == [1.0] * 3


# By kernel the number of its lists, and a call with them, a factor and a flag. The last list is written.
KERNELS = {
    "multi_tensor_scale": (2, lambda s, d, n, f: mt.multi_tensor_scale(s, d, n, f)),
    "multi_tensor_unscale": (1, lambda g, n, f: mt.multi_tensor_unscale(g, n, f)),
    "multi_tensor_axpby": (3, lambda x, y, o, n, f: mt.multi_tensor_axpby(1.0, x, n, y, o, f)),
    "multi_tensor_check_finite": (1, lambda t, n, f: mt.multi_tensor_check_finite(t, f)),
    "multi_tensor_l2norm": (1, lambda t, n, f: mt.multi_tensor_l2norm(t)),
    "multi_tensor_unscale_l2norm": (1, lambda g, n, f: mt.multi_tensor_unscale_l2norm(g, n, f)),
    "multi_tensor_adopt": (2, lambda p, m, n, f: mt.multi_tensor_adopt(p, m)),
}
READ_ONLY = ("multi_tensor_check_finite", "multi_tensor_l2norm")
FAULTY = {
    "None": lambda: None,
    "a number": lambda: 1.0,
    "int32": lambda: torch.ones(3, dtype=torch.int32),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(3, dtype=torch.cfloat),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "negated": lambda: torch.ones(3, dtype=torch.cfloat).conj().imag,
    "meta": lambda: torch.ones(3, device="meta"),
}
OF_SEVERAL = {"another shape": lambda: torch.ones(3, 2), "FP64 among FP32": lambda: torch.ones(3, dtype=torch.float64)}
WRITTEN = {
    "expanded": lambda: torch.ones(1).expand(3),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_faulty_tensor_in_any_list_is_refused_by_name_and_nothing_is_written(kernel):
    count, call = KERNELS[kernel]
    for role in range(count):
        writes = role == count - 1 and kernel not in READ_ONLY
        faults = FAULTY | (OF_SEVERAL if count > 1 else {}) | (WRITTEN if writes else {})
        for name, make in faults.items():
            lists, found = [[torch.ones(3) for _ in range(3)] for _ in range(count)], flag()
            lists[role][1] = make()
            good = [t for tensors in lists for t in tensors if t is not lists[role][1]]
            with pytest.raises((TypeError, ValueError), match=rf"^{kernel}: \S"):
                call(*lists, 2.0, found)
                pytest.fail(f"{name} in list {role} was taken")
            assert not any(versions([*good, found])) and found == 0.0


@pytest.mark.parametrize("kernel", [name for name, (count, _) in KERNELS.items() if count > 1])
def test_lists_of_different_lengths_and_outputs_over_inputs_are_refused(kernel):
    count, call = KERNELS[kernel]
    whole = torch.arange(9.0)
    for role in range(count):
        lists = [[torch.ones(8), torch.ones(8)] for _ in range(count)]
        lists[role].append(torch.ones(3))
        with pytest.raises(ValueError, match=rf"^{kernel}: \S"):
            call(*lists, 2.0, flag())
        if role < count - 1:
            for source, out in ((whole[:8], whole[1:]), (whole[1:], whole[:8])):
                lists = [[torch.ones(8)] for _ in range(count)]
                lists[role], lists[-1] = [source], [out]
                with pytest.raises(ValueError, match=rf"^{kernel}: \S.* overlaps "):
                    call(*lists, 2.0, flag())
    assert whole.tolist() == [*range(9)]


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in READ_ONLY])
def test_an_element_in_two_outputs_is_refused(kernel):
    count, call = KERNELS[kernel]
    whole = torch.ones(70)
    for outs in ([whole, whole], [whole[:64], torch.ones(3), whole[5:69]], [whole[::2], whole[::2]]):
        lists = [[torch.ones_like(out) for out in outs] for _ in range(count - 1)]
        with pytest.raises(ValueError, match=rf"^{kernel}: tensors 0 and {len(outs) - 1} of \w+ overlap in memory"):
            call(*lists, outs, 2.0, flag())
    assert whole.tolist() == [1.0] * 70 and whole._version == 0


def test_tensors_without_their_memory_are_refused():
    tensors = [torch.ones(6), torch.ones(2, 3).t(), torch.ones(6)[2:]]
    for t in tensors:
        t.untyped_storage().resize_(t.untyped_storage().nbytes() - 4)
    for t in tensors:
        shape = re.escape(str(list(t.shape)))
        with pytest.raises(
            ValueError, match=f"^multi_tensor_unscale: tensor 1 of grads has shape {shape} but its storage"
        ):
            mt.multi_tensor_unscale([torch.ones(3), t], 2.0, flag())
    empty = torch.ones(0, 3)
    empty.untyped_storage().resize_(0)
    mt.multi_tensor_unscale([empty], 2.0, flag())


# Argument -> calls with a wrong value of it, beside a list of tensors that it would write.
ARGUMENTS = {
    "found_inf": [
        lambda t, wrong: mt.multi_tensor_unscale(t, 2.0, wrong),
        mt.multi_tensor_check_finite,
        lambda t, wrong: mt.multi_tensor_unscale_l2norm(t, 2.0, wrong),
        lambda t, wrong: mt.multi_tensor_axpby(2.0, t, 2.0, t, t, wrong),
        lambda t, wrong: mt.update_scale(*scaler(8.0), wrong),
    ],
    "factor": [lambda t, wrong: mt.multi_tensor_scale(t, t, wrong)],
    "b": [lambda t, wrong: mt.multi_tensor_axpby(1.0, t, wrong, t, t)],
    "inv_scale": [lambda t, wrong: mt.multi_tensor_unscale(t, wrong, flag())],
    "(scale|growth_tracker)": [
        lambda t, wrong: mt.update_scale(wrong, scaler(8.0)[1], flag()),
        lambda t, wrong: mt.update_scale(scaler(8.0)[0], wrong, flag()),
    ],
    "backoff_factor": [lambda t, wrong: mt.update_scale(*scaler(8.0), flag(), backoff_factor=wrong)],
}


def fake_number():
    with FakeTensorMode():
        return torch.zeros(())


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_wrong_number_or_flag_is_refused_by_name_and_nothing_is_written(argument):
    wrong = [torch.ones(2), torch.ones((), dtype=torch.float16), torch.ones((), device="meta"), fake_number()]
    wrong += [torch.ones((), dtype=torch.cfloat).conj().imag, torch._efficientzerotensor(())]
    wrong = [] if argument == "backoff_factor" else wrong  # which any number may be
    of_the_device = argument in ("found_inf", "(scale|growth_tracker)")
    wrong += [0.0, 8] if of_the_device else ["2", None, 10**400, 2j, torch.ones(2).numpy(), [2.0]]
    for call in ARGUMENTS[argument]:
        for value in wrong:
            tensors = [torch.ones(3)]
            with pytest.raises((TypeError, ValueError), match=rf"^\w+: {argument} is .*wanted"):
                call(tensors, value)
                pytest.fail(f"{value!r} was taken")
            assert tensors[0].tolist() == [1.0] * 3


@pytest.mark.parametrize("count", [2.5, "3", 2**31])
def test_counts_that_are_no_int_are_refused(count):
    scale, tracker = scaler(8.0)
    with pytest.raises(TypeError, match=r"^update_scale: growth_interval is .*, an int of 32 bits is wanted$"):
        mt.update_scale(scale, tracker, flag(), growth_interval=count)
    assert (scale.item(), tracker.item()) == (8.0, 0)


@pytest.mark.parametrize("factor", [2, True, Fraction(1, 2), Decimal("0.5"), torch.tensor(0.5).numpy()], ids=str)
def test_any_number_is_a_factor(factor):
    tensors = [torch.full((3,), 4.0)]
    mt.multi_tensor_unscale(tensors, factor, flag())
    assert tensors[0].tolist() == [4.0 * float(factor)] * 3


# ---------------------------------------------------------------------------------------------------------------------
# Backends


def test_the_backend_says_what_and_why(backend):
    assert mt.backend() == backend
    assert "\n" not in mt.backend_reason() and mt.backend_reason()
    with (
        pytest.raises(ValueError, match=re.escape("use_backend: 'cuda' is none of cpp, torch")),
        mt.use_backend("cuda"),
    ):
        pass
    assert mt.backend() == backend


@pytest.mark.parametrize("left_by", [None, KeyError])
def test_a_backend_is_in_use_inside_of_its_block_alone(backend, left_by):
    with contextlib.suppress(KeyError), mt.use_backend("torch"):
        assert mt.backend() == "torch" and mt.extension() is None
        if left_by is not None:
            raise left_by
    assert mt.backend() == backend and (mt.extension() is None) == (backend == "torch")


def test_the_environment_forces_torch_and_the_import_touches_no_cuda():
    program = (
        "import torch; from amp_patch import multi_tensor as mt;"
        "print(mt.backend(), torch.cuda.is_initialized(), mt.backend_reason())"
    )

    def run(**environment):
        import os

        return python("-c", program, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})

    assert run(AMP_PATCH_BACKEND="torch").stdout.startswith("torch False ")
    assert "AMP_PATCH_BACKEND='nonsense' is none of cpp, torch" in run(AMP_PATCH_BACKEND="nonsense").stderr
