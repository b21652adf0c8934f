"""amp_patch.cuda.amp and amp_patch.cpu.amp: the names of torch.cuda.amp and torch.cpu.amp, with their arguments."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from training import mm_dtype

import amp_patch
from amp_patch import amp

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")


@pytest.fixture
def with_cuda(monkeypatch):
    """Simulate a machine with CUDA, so that the casts act, on tensors of any device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_arguments_are_torch_s_in_torch_s_order(device):
    theirs = importlib.import_module(f"torch.{device}.amp")
    ours = importlib.import_module(f"amp_patch.{device}.amp")
    assert getattr(amp_patch, device).amp is getattr(amp, device).amp is ours
    names = {name for name in dir(theirs) if name in amp.__all__}
    assert names == set(ours.__all__) and len(names) >= 2
    for name in names:
        made = [getattr(module, name) for module in (theirs, ours)]
        is_class = isinstance(made[0], type)
        # From Python 3.13 on a deprecated class, as torch's are, shows the arguments of its `__init__` there alone.
        wanted, found = (inspect.signature(each.__init__ if is_class else each).parameters for each in made)
        if is_class:
            assert [(p.name, p.default) for p in wanted.values()] == [
                (p.name, p.default) for p in found.values() if p.kind is not p.VAR_KEYWORD
            ]
        else:
            assert [p.default for p in wanted.values()] == [p.default for p in found.values()]
        assert issubclass(getattr(ours, name), getattr(amp, name)) if name in ("GradScaler", "autocast") else True


def test_autocast_takes_enabled_first(with_cuda):
    from amp_patch.cuda.amp import autocast

    with autocast():
        assert mm_dtype() is HALF
        with autocast(False):
            assert mm_dtype() is FP32
        with autocast(True, BF16, False) as inner:
            assert mm_dtype() is BF16 and not inner.caches
    from amp_patch.cpu import amp as cpu_amp

    with cpu_amp.autocast():
        assert mm_dtype() is BF16
    with cpu_amp.autocast(True, HALF), cpu_amp.autocast(enabled=False):
        assert mm_dtype() is FP32

    @autocast()
    def forward():
        return mm_dtype()

    assert forward() is HALF and autocast(False)(mm_dtype)() is FP32
    assert mm_dtype() is FP32


@without_cuda
def test_without_cuda_autocast_warns_and_casts_nothing():
    with pytest.warns(
        UserWarning, match=r"cuda\.amp\.autocast: CUDA is not available.*use amp_patch\.autocast"
    ) as seen:
        area = amp_patch.cuda.amp.autocast()
    assert [warning.filename for warning in seen] == [__file__]
    with area:
        assert mm_dtype() is FP32
    with amp_patch.cuda.amp.autocast(False), amp_patch.cuda.amp.autocast(enabled=False, dtype=BF16):
        assert mm_dtype() is FP32
    with pytest.warns(UserWarning, match="autocast: device_type is 'cuda'") as seen:
        amp.autocast("cuda")
    assert [warning.filename for warning in seen] == [__file__]


def test_grad_scalers_take_the_scale_first():
    scaler = amp_patch.cpu.amp.GradScaler(2.0**10, 4.0, 0.25, 7)
    assert scaler.get_scale() == 1024.0 and scaler.is_enabled() and scaler._device == "cpu"
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 7)
    assert not amp_patch.cpu.amp.GradScaler(2.0, 2.0, 0.5, 1, False).is_enabled()
    assert amp_patch.cpu.amp.GradScaler(2.0**10, max_scale=512.0).get_scale() == 512.0
    assert not amp_patch.cuda.amp.GradScaler(enabled=False).is_enabled()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not amp_patch.cuda.amp.GradScaler(2.0**10).is_enabled()


def test_custom_functions_of_the_older_names(with_cuda):
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        @amp_patch.cuda.amp.custom_fwd(cast_inputs=FP32)
        def forward(ctx, x):
            seen.append((x.dtype, mm_dtype()))
            return x * 1

        @staticmethod
        @amp_patch.cuda.amp.custom_bwd
        def backward(ctx, grad):
            seen.append((grad.dtype, mm_dtype()))
            return grad

    class Plain(Function):
        forward = staticmethod(amp_patch.cuda.amp.custom_fwd(lambda ctx, x: x * 1))

    x = torch.ones(2, dtype=HALF, requires_grad=True)
    with amp_patch.cuda.amp.autocast():
        y = Function.apply(x)
    y.sum().backward()
    assert seen == [(FP32, FP32)] * 2 and x.grad.dtype is HALF
    with amp_patch.cuda.amp.autocast():
        Plain.apply(x).sum().backward()
    assert seen[2:] == [(HALF, HALF)]
