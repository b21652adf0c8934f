"""`python -m amp_patch`: what a bug report should begin with."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import amp_patch
from amp_patch import multi_tensor
from amp_patch.__main__ import main
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.lab.commands import compare
from amp_patch.lab.comparison.machine import time_of_products
from amp_patch.lab.comparison.plan import Plan


def rows(printed: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in printed.splitlines())


def test_info_names_versions_kernels_and_devices(capsys):
    main(["info"])
    printed = rows(capsys.readouterr().out)
    assert printed["amp_patch"] == amp_patch.__version__
    assert printed["torch"] == torch.__version__
    assert printed["kernels"] == f"{multi_tensor.backend()}: {multi_tensor.backend_reason()}"
    assert torch.backends.cpu.get_cpu_capability() in printed["devices"]
    assert printed["devices"].count("cuda:") == torch.cuda.device_count()


def test_info_tells_when_the_kernels_are_plain_torch_and_why(capsys):
    with multi_tensor.use_backend("torch"):
        main(["info"])
        reason = multi_tensor.backend_reason()
    assert rows(capsys.readouterr().out)["kernels"] == f"torch: {reason}"


@pytest.mark.parametrize(
    ("arithmetic", "expected"),
    [
        (True, "auto is native: this CPU has FP16 arithmetic"),
        (False, "auto is emulate: this CPU has no FP16 arithmetic"),
    ],
)
def test_info_tells_how_fp16_runs_on_this_cpu(arithmetic, expected, capsys, monkeypatch):
    monkeypatch.setattr("amp_patch.lab.comparison.machine.has_fp16_arithmetic", lambda: arithmetic)
    main(["info"])
    assert rows(capsys.readouterr().out)["cpu_fp16"] == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.374, "products take 0.37 of FP32's time on this CPU"),
        (12.04, "products take 12 times FP32's time on this CPU: it shows a level's accuracy, not its speed"),
    ],
)
def test_info_tells_how_bf16_runs_on_this_cpu(ratio, expected, capsys, monkeypatch):
    monkeypatch.setattr("amp_patch.lab.comparison.machine.time_of_products", lambda dtype: ratio)
    main(["info"])
    assert rows(capsys.readouterr().out)["bfloat16"] == expected


@pytest.mark.parametrize(
    ("levels", "dtype", "warns"),
    [(("O0", "O5"), None, True), (("O0", "O1"), "bfloat16", True), (("O0", "O1"), None, False)],
)
def test_compare_warns_of_slow_bf16_before_it_runs(levels, dtype, warns, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for ratio in (10.0, 0.4):
        monkeypatch.setattr("amp_patch.lab.commands.compare.time_of_products", lambda dtype, ratio=ratio: ratio)
        compare._warn_of_slow_products(Plan(levels, dtype=dtype))
        assert ("not its speed" in capsys.readouterr().out) is (warns and ratio > 1)


def test_products_are_timed_beside_fp32s():
    assert all(time_of_products(dtype) > 0 for dtype in (torch.float32, torch.bfloat16))


def test_info_tells_what_runs_the_casts(wrappers, capsys):
    main(["info"])
    assert rows(capsys.readouterr().out)["casts"].startswith(f"{cast_wrappers.backend()}: ")
    assert cast_wrappers.backend() == wrappers


@pytest.mark.parametrize("arguments", [[], ["inform"]], ids=["none", "unknown"])
def test_without_a_known_subcommand_the_usage_is_shown(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "python -m amp_patch" in capsys.readouterr().err


def test_python_dash_m_runs_it():
    run = subprocess.run([sys.executable, "-W", "error", "-m", "amp_patch", "info"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert set(rows(run.stdout)) == {
        "amp_patch",
        "package",
        "extension",
        "torch",
        "python",
        "kernels",
        "casts",
        "devices",
        "bfloat16",
        "cpu_fp16",
    }
