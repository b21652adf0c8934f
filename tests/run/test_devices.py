"""Devices of the command line: `--device cpu`, `mps` or `xpu`, and the lines of `info` about GPUs."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from amp_patch.__main__ import main
from amp_patch.run import no_cuda
from amp_patch.run.machine import accelerators, low_precision, machine


@pytest.mark.parametrize("command", [["run"], ["compare"], ["search"], ["check", "--run"]], ids="-".join)
@pytest.mark.parametrize("device", ["mps", "xpu", "tpu"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(command, device, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--device", device, "train.py"])
    assert ended.value.code == 2
    told = (
        f"argument --device: torch {torch.__version__} finds no device '{device}' here to replace CUDA by; wanted cpu"
    )
    assert told in capsys.readouterr().err


@pytest.fixture
def gpus(monkeypatch):
    """A function that gives torch the GPUs (kind, name, capability), at most one of Apple's."""

    def there(*given):
        for kind in ("cuda", "xpu"):
            mine = [(name, capability) for k, name, capability in given if k == kind]
            module = getattr(torch, kind)
            monkeypatch.setattr(module, "device_count", lambda mine=mine: len(mine))
            monkeypatch.setattr(module, "get_device_name", lambda i, mine=mine: mine[i][0])
            monkeypatch.setattr(module, "get_device_capability", lambda i, mine=mine: mine[i][1])
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: any(kind == "mps" for kind, *_ in given))

    return there


def test_devices_that_are_there_are_listed_and_accepted(gpus, capsys, monkeypatch):
    gpus()
    assert accelerators() == {} and machine()["gpu"] == "none"
    gpus(("xpu", "Intel(R) Arc(TM) A770", None), ("mps", "", None))
    assert accelerators() == {"xpu:0": "Intel(R) Arc(TM) A770", "mps": "Apple GPU"}
    assert no_cuda.here("mps") == "mps" and no_cuda.here("xpu") == "xpu" and no_cuda.here("cpu") == "cpu"
    with pytest.raises(Exception, match=r"no device 'cuda' here to replace CUDA by; wanted cpu or mps or xpu"):
        no_cuda.here("cuda")
    monkeypatch.setattr("amp_patch.__main__.widest", lambda device: torch.float32)
    main(["info"])
    printed = capsys.readouterr().out
    assert "xpu:0 (Intel(R) Arc(TM) A770, no FP64), mps (Apple GPU, no FP64)" in printed
    assert "tensor_cores" not in printed


BF16 = "BF16 is emulated, although torch.cuda.is_bf16_supported() is True"
NONE = f"none, and FP16 convolutions of cuDNN have given NaN on such GPUs; {BF16}"


@pytest.mark.parametrize(
    ("name", "capability", "told"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "FP16 and BF16"),
        ("NVIDIA T4G", (7, 5), f"FP16; {BF16}"),
        ("Tesla T4", (7, 5), f"FP16; {BF16}"),
        ("Tesla V100-SXM2-16GB", (7, 0), f"FP16; {BF16}"),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), f"FP16; {BF16}"),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), NONE),
        ("NVIDIA GeForce GTX 1650", (7, 5), NONE),
        ("NVIDIA T1000 8GB", (7, 5), NONE),
        ("NVIDIA GeForce MX450", (7, 5), NONE),
        ("Tesla P100-PCIE-16GB", (6, 0), f"none; {BF16}"),
        ("NVIDIA GeForce GTX 1080", (6, 1), f"none; {BF16}"),
        ("NVIDIA RTX 4000 Ada Generation", (8, 9), "FP16 and BF16"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "FP16 and BF16"),
    ],
)
def test_tensor_cores_are_those_of_the_gpu_and_not_of_its_capability(name, capability, told, gpus):
    gpus(("cuda", name, capability), ("cuda", name, capability))
    assert low_precision()["tensor_cores"] == told


def test_different_gpus_are_told_apart(gpus):
    gpus(("cuda", "Tesla T4", (7, 5)), ("cuda", "NVIDIA A100-SXM4-40GB", (8, 0)))
    assert low_precision()["tensor_cores"] == f"Tesla T4: FP16; {BF16}; NVIDIA A100-SXM4-40GB: FP16 and BF16"


@pytest.fixture
def meta():
    """CUDA is torch's device "meta"."""
    no_cuda.install("meta")
    yield "meta"
    no_cuda.uninstall()


def test_cuda_can_become_a_device_other_than_the_cpu(meta):
    x = torch.ones(2)
    made = [
        torch.zeros(2, device="cuda:1"),
        x.cuda(),
        x.to("cuda"),
        x.to(0, torch.float16),
        x.to(device=torch.device("cuda"), dtype=torch.float16),
        x.new_zeros(2, device="cuda"),
        nn.Linear(2, 2).cuda().weight,
        nn.Linear(2, 2).to("cuda").weight,
        nn.utils.rnn.pack_sequence([x]).cuda().data,
    ]
    assert {tensor.device.type for tensor in made} == {meta} and made[3].dtype is made[4].dtype is torch.float16
    assert made[1].cuda() is made[1].to("cuda") is made[1], "a tensor that is there already is returned"
    with torch.device("cuda"):
        assert torch.ones(2).device.type == meta
    assert x.device.type == x.cpu().device.type == x.to("cpu").device.type == "cpu"


def test_a_checkpoint_of_cuda_is_loaded_on_the_device_that_cuda_became(meta):
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, file)
    for location, wanted in (("cuda", meta), ("cpu", "cpu"), (None, "cpu")):
        file.seek(0)
        assert torch.load(file, map_location=location)["weight"].device.type == wanted
