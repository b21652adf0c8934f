"""Casts of an O1 policy without a training: regions, types of products, kernels in low precision, compiled code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import DTYPES
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from amp_patch import amp
from amp_patch.casts import install
from amp_patch.casts import state as casts_state
from amp_patch.policy import Policy

LOW = [dtype for dtype in DTYPES if dtype in (torch.float16, torch.bfloat16)]
HALF, FULL = torch.float16, torch.float32


def o1(dtype: torch.dtype = HALF, **options: Any) -> Policy:
    return Policy("O1", dtype=dtype, patch_torch_functions=True, **options)


OFF = Policy("O2", cast_model_type=HALF)


@pytest.fixture(name="_clean", autouse=True)
def clean_fixture(clean_casts: None) -> Iterator[None]:
    registered = dict(install._registered)
    yield
    install._registered.clear()
    install._registered.update(registered)


@pytest.fixture(name="installed")
def installed_fixture() -> Iterator[None]:
    install.install()
    yield


needs_install = pytest.mark.usefixtures("installed")


def cached() -> int:
    return casts_state.state().cached()


HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
a = torch.ones(2, 2)

# Who has the word tells the type of a product: ours FP16, torch's BF16.
KINDS: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "ours": (lambda: amp.autocast("cpu", HALF), HALF),
    "ours, off": (lambda: amp.autocast("cpu", enabled=False), FULL),
    "disable_casts": (lambda: amp.disable_casts(), FULL),
    "torch's": (lambda: torch.autocast("cpu", BF16), BF16),
    "torch's, off": (lambda: torch.autocast("cpu", enabled=False), FULL),
}


@pytest.fixture(name="default")
def default_fixture(request: pytest.FixtureRequest) -> torch.dtype:
    """The process default of that level; the type of a product outside of all regions."""
    if request.param is None:
        return FULL
    amp.initialize(nn.Linear(1, 1), opt_level=request.param)
    return HALF


def product() -> torch.dtype:
    made = a @ a
    linear = F.linear(a, a)
    assert made.dtype is linear.dtype and torch.equal(made, linear)
    return made.dtype


KERNELS = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|_?convolution|_?convolution_backward|slow_conv.*|thnn_conv.*"
    r"|mkldnn_.*|conv_tbc.*|_scaled_dot_product.*_for_cpu.*|_trilinear|im2col|col2im)$"
)
NAMES = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}


def half_kernels(run: Callable[[], Any], dtype: torch.dtype = torch.float16) -> list[str]:
    """The names of the GEMM-like ops that get a tensor of `dtype` while `run` runs, and are not emulated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            run()
    events = recorded.profiler.kineto_results.events()
    emulated = [e for e in events if e.name() == "amp_patch::emulated"]

    def is_native(event: Any) -> bool:
        inside = (event.start_ns() <= e.start_ns() <= event.end_ns() for e in emulated)
        return not any(inside)

    return [e.name() for e in events if KERNELS.match(e.name()) and NAMES[dtype] in e.dtypes() and is_native(e)]


def same_as_eager(function, *inputs, backend="aot_eager", **tolerances):
    """Compiled twice (the second call takes what the first made), in one graph: eager's types and numbers."""
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    compiled(*inputs)
    found, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(found, expected, **tolerances)  # types too
    return compiled


def zoo(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Each way to name a function: module functions, composites, methods, operators, unbound methods."""
    y = x @ w
    return (
        *(y, x.matmul(w), torch.Tensor.matmul(x, w), torch.mm(x, w), F.linear(x, w), torch.einsum("ij,jk->ik", x, w)),
        *(y.softmax(-1), F.softmax(y, -1), torch.exp(y), y.exp(), y**2, 2**y, y.sum(), torch.linalg.norm(y)),
        *(F.layer_norm(y, (6,)), F.cross_entropy(y, torch.arange(4)), F.gelu(y), torch.cat([x, y]), y + x),
    )


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6), torch.randn(6, 6)


def namespaces() -> dict[str, dict[str, Any]]:
    owners: list[Any] = [
        torch, torch.Tensor, torch.nn.functional, torch._VF, torch.linalg, torch.special, torch.fft, torch.functional,
        nn.RNNBase, nn.DataParallel, torch.backends.mha,
        torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction,
    ]  # fmt: skip
    return {repr(owner): dict(vars(owner)) for owner in owners}


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    missing = object()
    return [
        f"{owner}.{name}"
        for owner in before
        for name in {*before[owner], *after[owner]}
        if before[owner].get(name, missing) is not after[owner].get(name, missing)
    ]
