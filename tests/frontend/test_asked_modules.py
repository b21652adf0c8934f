"""AMP_PATCH_KEEP_FP32 and AMP_PATCH_KEEP_HIGH: modules that an unchanged script keeps."""

from __future__ import annotations

import logging

import pytest
import torch
from scripts import start_script
from torch import nn

from amp_patch import amp
from amp_patch.environment import KEEP_FP32, KEEP_HIGH


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))


def begun(level: str, **options) -> nn.Sequential:
    model = net()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0, **options)[
        0
    ]


def kept(model: nn.Sequential) -> list[int]:
    return [i for i, layer in enumerate(model) if layer.weight.dtype is torch.float32]


def test_modules_are_added_to_the_script_s_kept_ones(monkeypatch, caplog):
    assert kept(begun("O2", keep_fp32="3")) == [3]
    monkeypatch.setenv(KEEP_FP32, "0, 2,encoder")
    with caplog.at_level(logging.INFO, logger="amp_patch"):
        assert kept(begun("O2", keep_fp32="3")) == [0, 2, 3]
    assert "AMP_PATCH_KEEP_FP32 names encoder, which Sequential does not have" in caplog.text
    assert kept(begun("O2", keep_fp32=["1", "3"])) == [0, 1, 2, 3]
    assert kept(begun("O5")) == [0, 2] and kept(begun("O5", keep_fp32=lambda name, _: name == "1")) == [0, 1, 2]
    monkeypatch.setenv(KEEP_FP32, "")
    assert kept(begun("O2")) == []


def test_at_o0_and_without_a_level_nothing_is_kept(monkeypatch):
    monkeypatch.setenv(KEEP_FP32, "0")
    model = begun("O0")
    assert type(model[0]) is nn.Linear
    assert type(begun("O2", enabled=False)[0]) is nn.Linear


@pytest.mark.parametrize(
    ("named", "rounded"),
    [(None, [1, 2]), ("", [1, 2]), ("1", [0, 2, 3]), ("()", [0, 1, 2, 3]), ("nothing of it", [1, 2])],
)
def test_kept_and_inner_layers_stay_out_of_low_bit_products(named, rounded, monkeypatch):
    """Return the layers whose product differs from BF16's, for inputs that FP4 cannot represent."""
    if named is not None:
        monkeypatch.setenv(KEEP_HIGH, named)
    model, found = begun("O6", dtype="nvfp4_naive"), []
    for layer in model:
        layer.register_forward_hook(lambda layer, args, out: found.append((layer, args[0], out)))
    model(torch.linspace(-1, 1, 64).reshape(4, 16))
    with amp.disable_casts(), torch.no_grad():
        low = [[each.bfloat16() for each in (given, layer.weight, layer.bias)] for layer, given, _ in found]
        exact = [torch.equal(out, nn.functional.linear(*each)) for (*_, out), each in zip(found, low, strict=True)]
    assert [i for i, same in enumerate(exact) if not same] == rounded


SCRIPT = """
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = net(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(*(layer.weight.dtype for layer in net))
"""


@pytest.mark.slow
def test_an_unedited_script_keeps_them(tmp_path):
    done = start_script(tmp_path, SCRIPT, "-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL="O5", AMP_PATCH_KEEP_FP32="1")
    assert done.stdout.splitlines()[0] == "torch.bfloat16 torch.float32", done.stdout + done.stderr
