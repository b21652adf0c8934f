"""Functions of amp_C, apex_C and multi_tensor_apply, in the calling forms of scripts."""

from __future__ import annotations

import importlib
import math

import pytest
import reference
import torch
from apexed import CHUNK, buffer, on_devices, tensors
from conftest import DTYPES
from crossed import crossed
from training import same

import amp_patch.apex as shim
from amp_patch.apex import amp_C, apex_C
from amp_patch.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

# ---------------------------------------------------------------------------------------------------------------------
# The surface


def test_names_resolve_where_scripts_import_them():
    shim.install()
    try:
        top = importlib.import_module("amp_C")
        assert top is amp_C and all(callable(getattr(top, name)) for name in top.__all__)
        applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        assert applier is multi_tensor_applier
        assert importlib.import_module("apex_C") is apex_C
        for module, name in [
            ("adam", "FusedAdam"),
            ("sgd", "FusedSGD"),
            ("lamb", "FusedLAMB"),
            ("novograd", "FusedNovoGrad"),
            ("adagrad", "FusedAdagrad"),
        ]:
            optimizers = importlib.import_module("apex.optimizers")
            path = importlib.import_module(f"apex.optimizers.fused_{module}")
            assert getattr(optimizers, name) is getattr(path, name)
            assert name in optimizers.__all__ and name in path.__all__
    finally:
        shim.uninstall()


def test_the_applier_hands_on_its_chunk_size_and_the_rest():
    assert multi_tensor_applier.available is True and MultiTensorApply.available is True
    assert multi_tensor_applier.warned is False
    assert multi_tensor_applier.chunk_size == CHUNK
    multi_tensor_applier.check_avail()
    flag, lists = buffer(), [[torch.ones(1)]]
    assert MultiTensorApply(7)(lambda *args: args, flag, lists, 1, "two") == (7, flag, lists, 1, "two")


def test_flatten_and_unflatten():
    parts = tensors()
    flat = apex_C.flatten(parts)
    assert flat.shape == (sum(t.numel() for t in parts),)
    back = apex_C.unflatten(flat, parts)
    assert same(parts, back)
    flat.zero_()
    assert not any(t.any() for t in back)  # views


# ---------------------------------------------------------------------------------------------------------------------
# Copies, sums, norms


@on_devices
@crossed(
    {"src_dtype": DTYPES, "dst_dtype": DTYPES, "flag_dtype": [torch.int32, torch.float32, torch.uint8, torch.int64]}
)
def test_scale(src_dtype, dst_dtype, flag_dtype, device):
    src, flag = tensors(dtype=src_dtype, device=device), buffer(device, flag_dtype)
    dst = [torch.empty_like(t, dtype=dst_dtype) for t in src]
    amp_C.multi_tensor_scale(65536, flag, [src, dst], 0.5)
    assert same(dst, [reference.scale(t, dst_dtype, 0.5) for t in src])
    assert flag.item() == 0
    src[1][2] = math.inf
    amp_C.multi_tensor_scale(65536, flag, [src, dst], 0.5)
    assert flag.item() == 1 and dst[1][2] == math.inf
    src[1][2] = 0.0
    amp_C.multi_tensor_scale(65536, flag, [src, dst], 2.0)  # a set flag stops nothing and stays set
    assert flag.item() == 1 and same(dst, [reference.scale(t, dst_dtype, 2.0) for t in src])


def test_the_flag_may_be_a_scalar_and_scale_writes_parameters():
    params = [torch.nn.Parameter(t) for t in tensors()]
    masters, flag = tensors(1), torch.tensor(0, dtype=torch.int)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [masters, params], 1.0)
    assert same(params, masters) and flag.item() == 0


@on_devices
@pytest.mark.parametrize(("arg_to_check", "raised_by"), [(-1, "xy"), (0, "x"), (1, "y")])
def test_axpby(arg_to_check, raised_by, device):
    x, y = tensors(0, torch.float16, device), tensors(1, torch.float32, device)
    out, flag = [torch.empty_like(t) for t in y], buffer(device)
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [x, y, out], 0.5, 2.0, arg_to_check)
    assert same(out, [reference.axpby(0.5, p, 2.0, q, torch.float32) for p, q in zip(x, y, strict=True)])
    assert flag.item() == 0
    for name, tensor in (("x", x[0]), ("y", y[0])):
        kept = tensor[0, 0].item()
        tensor[0, 0] = math.nan
        flag.zero_()
        multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [x, y, out], 0.5, 2.0, arg_to_check)
        assert flag.item() == (name in raised_by)
        tensor[0, 0] = kept


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype, device):
    grads, flag = tensors(dtype=dtype, device=device), buffer(device)
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    assert norm.shape == (1,) and norm.dtype is torch.float32 and norm.device.type == device
    assert norm.item() == pytest.approx(reference.l2norm(grads).item(), rel=1e-6)
    norm, each = amp_C.multi_tensor_l2norm(CHUNK, flag, [grads], True)
    assert each.shape == (len(grads),)
    assert torch.allclose(each, torch.stack([t.float().norm() for t in grads]))
    assert amp_C.multi_tensor_l2norm(CHUNK, flag, [grads])[1].shape == (0,)
    assert flag.item() == 0
    grads[0][0, 0] = math.nan
    norm, _ = amp_C.multi_tensor_l2norm(CHUNK, flag, [grads], False)
    assert norm.isnan() and flag.item() == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong with a call


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: amp_C.multi_tensor_scale(CHUNK, buffer(), [tensors()], 1.0),
            ValueError,
            r"multi_tensor_scale: tensor_lists holds lists of \[4\] tensors, wanted are 2 lists .*: src, dst",
        ),
        (
            lambda: amp_C.multi_tensor_l2norm(CHUNK, torch.zeros(2), [tensors()]),
            TypeError,
            "multi_tensor_l2norm: noop_flag is .* a tensor of one element is wanted",
        ),
    ],
)
def test_wrong_calls_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
