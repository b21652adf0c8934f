"""Python threads: kernels while another thread changes their lists, and casts while another thread installs casts."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import DTYPES
from torch import Tensor, nn

from amp_patch import amp
from amp_patch import multi_tensor as mt
from amp_patch.casts import install, regions
from amp_patch.casts import state as casts_state
from amp_patch.multi_tensor import backends
from amp_patch.policy import Policy

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
BACKENDS = [b for b in backends.BACKENDS if b == "torch" or mt.backend() == "cpp"]


@pytest.fixture(autouse=True)
def hurried() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with mt.use_backend(request.param):
            yield request.param
    finally:
        torch.set_num_threads(threads)


def run_on_threads(*works: Callable[[], Any]) -> None:
    """Run all functions at once, each on a thread; raise the first exception."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def guarded(work: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def test_kernels_in_threads_on_separate_lists_are_right(backend: str) -> None:
    """Threads share a flag and sources that they read; each has its own outputs."""
    found = torch.zeros(())
    sizes = [0, 1, 65, 513, 16385, 40_000, *([3] * 50)]
    src = [torch.linspace(-3, 3, n).to(dtype) for n, dtype in zip(sizes, itertools.cycle(DTYPES), strict=False)]

    def work(index: int, target: torch.dtype) -> None:
        factor = 1 + index / 3
        for _ in range(4):
            dst = [torch.empty_like(t, dtype=target) for t in src]
            mt.multi_tensor_scale(src, dst, factor, found)
            expected = [reference.scale(t, target, factor) for t in src]
            assert all(map(torch.equal, dst, expected))
            norms = mt.multi_tensor_unscale_l2norm(dst, 0.5, found, per_tensor=True)[1]
            expected = [reference.scale(t, target, 0.5) for t in expected]
            assert all(map(torch.equal, dst, expected))
            torch.testing.assert_close(
                norms, torch.stack([reference.l2norm([t]) for t in dst]).float(), rtol=2e-5, atol=0
            )
            out = [torch.empty_like(t) for t in src]
            mt.multi_tensor_axpby(2.0, src, -1.0, dst, out, found)
            mt.multi_tensor_check_finite(out, found)
            for z, x, y in zip(out, src, dst, strict=True):
                assert torch.equal(z, reference.axpby(2.0, x, -1.0, y, z.dtype))

    run_on_threads(*(lambda i=i: work(i, DTYPES[i % 3]) for i in range(6)))
    assert found == 0.0

    def spoil() -> None:
        mt.multi_tensor_check_finite([torch.tensor([1.0, float("nan")])], found)

    run_on_threads(spoil, *(lambda i=i: work(i, DTYPES[i % 3]) for i in range(3)))
    assert found == 1.0  # nobody who meets finite tensors puts it back


def test_lists_that_change_during_the_call(backend: str) -> None:
    """The call works on the tensors of one moment, or says that the lists do not fit; the tensors may die meanwhile."""
    src: list[Tensor] = []
    dst: list[Tensor] = []
    done = threading.Event()

    def call() -> None:
        found = torch.zeros(())
        try:
            for _ in range(300):
                try:
                    mt.multi_tensor_scale(src, dst, 2.0, found)
                    mt.multi_tensor_axpby(1.0, src, 1.0, dst, dst, found)
                    mt.multi_tensor_l2norm(dst, per_tensor=True)
                except (ValueError, IndexError, RuntimeError):  # plain torch looks at a list more than once
                    pass
        finally:
            done.set()

    def change() -> None:
        n = 0
        while not done.is_set():
            n = n % 40 + 1
            src[:] = [torch.full((n * 700,), float(i)) for i in range(n)]
            dst[:] = [torch.zeros(n * 700) for _ in range(n)]
            if n % 3 == 0:
                dst.reverse()
                src.append(torch.ones(n))
            if n % 5 == 0:
                src.clear()
                dst.clear()

    run_on_threads(call, change)
    src[:], dst[:] = [torch.ones(700)], [torch.zeros(700)]
    mt.multi_tensor_scale(src, dst, 2.0)
    assert (dst[0] == 2.0).all()
    left = [weakref.ref(t) for t in (*src, *dst)]
    src.clear()
    dst.clear()
    gc.collect()
    assert not any(reference() is not None for reference in left)  # no call has kept a tensor


# ---------------------------------------------------------------------------------------------------------------------
# Casts


def o1(dtype: torch.dtype) -> Policy:
    return Policy("O1", dtype=dtype, patch_torch_functions=True)


needs_clean = pytest.mark.usefixtures("clean_casts")


@needs_clean
def test_casts_are_installed_and_removed_under_calls() -> None:
    """A call sees the wrapper or the original, in a region and outside; whoever meets either gets its result."""
    before = dict(vars(torch.Tensor)), dict(vars(F)), dict(vars(torch))
    x, model, done = torch.ones(2, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), threading.Event()
    seen: set[torch.dtype] = set()

    def work(dtype: torch.dtype) -> None:
        while not done.is_set():
            with regions.region(o1(dtype)):
                product = x @ model[0].weight
                result = model(x)
                # Both in FP32: backward of torch's own mse_loss fails where one is not, as between two installs.
                loss = F.mse_loss(torch.exp(result).float(), torch.cat([product, product]).float()[:2])
                loss.backward()
            seen.add(product.dtype)
            assert product.dtype in (dtype, FULL) and loss.dtype is FULL
            assert (x @ model[0].weight).dtype is FULL and model(x).dtype is FULL

    def toggle() -> None:
        try:
            for _ in range(15):
                install.install()
                install.installed()
                torch.ones(1) @ torch.ones(1)
                install.uninstall()
        finally:
            done.set()

    run_on_threads(toggle, *(lambda dtype=dtype: work(dtype) for dtype in (HALF, BF16, HALF)))
    assert seen <= {HALF, BF16, FULL}
    assert not install.installed()
    assert before == (dict(vars(torch.Tensor)), dict(vars(F)), dict(vars(torch)))


# ---------------------------------------------------------------------------------------------------------------------
# DataParallel's threads


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is one, in the words that parallel_apply speaks: `torch.accelerator`'s, or `torch.cuda`'s up to 2.8."""
    words: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cpu"),
        "current_stream": lambda device=None: contextlib.nullcontext(),
        "device_index": lambda device: contextlib.nullcontext(),
    }
    if "accelerator" not in inspect.getsource(nn.parallel.parallel_apply):
        for name in ("current_stream", "device", "stream"):
            monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    for name, value in words.items():
        monkeypatch.setattr(torch.accelerator, name, value, raising=False)


class Tutorial(nn.Module):
    """A model as torch's page on AMP writes it for DataParallel: autocast in `forward`, by decorator or inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        self.seen: list[torch.dtype] = []

    def compute(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.seen.append(out.dtype)
        return out.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Decorated(Tutorial):
    @amp.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Inside(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        with amp.autocast("cpu", torch.bfloat16):
            return self.compute(x)


def replicas_of(model: nn.Module, count: int) -> list[nn.Module]:
    """As torch's replicate makes them: modules that are copies, parameters that are views of the one model's."""
    made = []
    for _ in range(count):
        made.append(copy.deepcopy(model, {id(p): p.view_as(p) for p in model.parameters()}))
    return made


def gradients(model: nn.Module, outputs: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """Of the sum over the outputs; powers of two, so that the order of a sum does not show."""
    (sum(out.square().sum() for out in outputs) * scale).backward()
    made = [p.grad / scale for p in model.parameters()]
    model.zero_grad()
    return made


@needs_clean
@pytest.mark.parametrize("kind", [Decorated, Inside])
@pytest.mark.parametrize("around", ["nothing", "ours", "torch's"])
def test_autocast_in_forward_acts_in_parallel_apply(kind: type[Tutorial], around: str, accelerator: None) -> None:
    """Each replica has a thread. A region around the call does not apply there. Gradients equal those of one thread."""
    torch.manual_seed(0)
    model, inputs = kind(), [torch.randn(3, 4) for _ in range(4)]
    region = {
        "nothing": contextlib.nullcontext,
        "ours": lambda: amp.autocast("cpu", HALF),
        "torch's": lambda: torch.autocast("cpu", HALF),
    }[around]
    single = gradients(model, [model(x) for x in inputs])
    replicas = [model] * len(inputs)
    with region():
        outputs = nn.parallel.parallel_apply(replicas, inputs)
    threaded = gradients(model, outputs)
    assert model.seen == [BF16] * 8 and all(out.dtype is FULL for out in outputs)
    for one, other in zip(single, threaded, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    assert casts_state.current() is None and not torch.is_autocast_enabled("cpu")


@needs_clean
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_replicas_of_a_training_in_threads(level: str, accelerator: None) -> None:
    torch.manual_seed(0)
    model = amp.initialize(Tutorial(), opt_level=level)
    inputs = [torch.randn(3, 4) for _ in range(4)]
    single = gradients(model, [model(x) for x in inputs], 1 / 64)
    replicas = replicas_of(model, len(inputs))
    threaded = gradients(model, nn.parallel.parallel_apply(replicas, inputs), 1 / 64)
    low = BF16 if level in ("O4", "O5") else HALF
    assert {dtype for replica in replicas for dtype in replica.seen} == {low}
    for one, other in zip(single, threaded, strict=True):  # low-precision weights add their gradients up in their type
        rounding = 4 * torch.finfo(one.dtype).eps * one.abs().max().item()
        torch.testing.assert_close(other, one, rtol=0, atol=rounding)
