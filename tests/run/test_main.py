"""`python -m amp_patch info`: the first lines of a bug report."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from paths import ROOT

import amp_patch
from amp_patch import multi_tensor
from amp_patch.__main__ import main
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.comparison.commands import compare
from amp_patch.comparison.plan import Plan
from amp_patch.run.machine import ProductTime, products_in_words, time_of_products


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


def test_info_says_why_the_kernels_are_plain_torch(capsys):
    with multi_tensor.use_backend("torch"):
        main(["info"])
        reason = multi_tensor.backend_reason()
    assert rows(capsys.readouterr().out)["kernels"] == f"torch: {reason}"


WORDS = {torch.float16: ("float16", "FP16"), torch.bfloat16: ("bfloat16", "BF16")}


@pytest.mark.parametrize(
    ("arithmetic", "native", "emulated", "expected"),
    [
        (True, 0.374, 1.1, "auto is native, this CPU has {} arithmetic: torch's own products take 0.374x FP32's time"),
        (
            False,
            12.04,
            1.1,
            "auto is emulate, this CPU has no {} arithmetic: torch's own products take 12x FP32's time",
        ),
        (True, 1.75, 1.1, 'by this clock cpu_half="emulate" is faster'),
        (False, 0.5, 1.1, 'by this clock cpu_half="native" is faster'),
    ],
)
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_info_says_how_a_type_runs_on_this_cpu(dtype, arithmetic, native, emulated, expected, capsys, monkeypatch):
    monkeypatch.setattr("amp_patch.run.machine.has_arithmetic", lambda dtype: arithmetic)
    monkeypatch.setattr(
        "amp_patch.run.machine.time_of_products",
        lambda dtype, emulated_=emulated, emulated=False: ProductTime(*3 * [emulated_ if emulated else native]),
    )
    main(["info"])
    row, name = WORDS[dtype]
    told = rows(capsys.readouterr().out)[row]
    assert expected.format(name) in told and f"emulated ones {emulated:.1f}x" in told
    assert ("by this clock" in told) is ("by this clock" in expected)


@pytest.mark.parametrize(
    ("levels", "dtype", "tells"),
    [(("O0", "O5"), None, True), (("O0", "O1"), "bfloat16", True), (("O0", "O1"), None, False)],
)
def test_compare_warns_of_emulated_bf16_before_the_first_run(levels, dtype, tells, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arithmetic in (False, True):
        monkeypatch.setattr("amp_patch.run.machine.has_arithmetic", lambda dtype, has=arithmetic: has)
        compare._note_emulated_types(Plan(levels, dtype=dtype))
        assert ("no BF16 arithmetic" in capsys.readouterr().out) is (tells and not arithmetic)


@pytest.mark.parametrize(
    ("turns", "said"),
    [((0.92, 0.93, 0.95), "0.93x"), ((30.2, 72.9, 399.1), "30.2x to 399x"), ((340, 343, 350), "343x")],
)
def test_info_gives_a_range_if_measured_times_vary(turns, said, monkeypatch):
    module = "amp_patch.run.machine"
    monkeypatch.setattr(f"{module}.time_of_products", lambda dtype, emulated=False: ProductTime(*turns))
    assert f"torch's own products take {said} FP32's time" in products_in_words(torch.bfloat16)


def test_products_are_timed_relative_to_fp32():
    for dtype in (torch.float32, torch.bfloat16):
        low, median, high = time_of_products(dtype)
        assert 0 < low <= median <= high


def test_info_names_the_backend_of_the_casts(wrappers, capsys):
    main(["info"])
    assert rows(capsys.readouterr().out)["casts"].startswith(f"{cast_wrappers.backend()}: ")
    assert cast_wrappers.backend() == wrappers


@pytest.mark.parametrize("arguments", [[], ["inform"]], ids=["none", "unknown"])
def test_an_unknown_subcommand_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "python -m amp_patch" in capsys.readouterr().err


def test_python_dash_m_prints_all_rows_of_info():
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
        "float16",
    }


@pytest.mark.parametrize("command", [["-m", "amp_patch", "info"], ["-m", "amp_patch"], ["-c", "import amp_patch"]])
def test_a_missing_torch_is_named_with_the_command_to_install_it(command, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 1 and "pip install torch" in run.stderr and sys.executable in run.stderr
    assert ("Traceback" in run.stderr) is (command[0] == "-c")


def test_a_torch_that_is_broken_shows_its_own_error(tmp_path):
    (tmp_path / "torch.py").write_text("import a_part_of_torch_that_is_missing")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "amp_patch", "info"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 1 and "No module named 'a_part_of_torch_that_is_missing'" in run.stderr


@pytest.mark.parametrize("command", [["amp_patch", "compare", "train.py"], ["package_that_imports_it", "compare"]])
def test_an_import_prints_nothing(command, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    (tmp_path / "package_that_imports_it").mkdir()
    (tmp_path / "package_that_imports_it" / "__init__.py").write_text("import amp_patch")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    python = [sys.executable, "-m", *command]
    run = subprocess.run(python, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (3, "")
