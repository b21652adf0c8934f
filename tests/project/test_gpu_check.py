"""`make gpu-check` without a GPU: missing tools, the stages and their time limits, its files and output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from paths import BENCHMARKS, ROOT

pytestmark = pytest.mark.slow  # a tool that no training needs


@pytest.fixture
def modules(monkeypatch):
    """gpu_check and gpu_preflight."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_check
    import gpu_preflight

    return gpu_check, gpu_preflight


@pytest.fixture
def gpu_check(modules):
    return modules[0]


@pytest.fixture
def preflight(modules):
    return modules[1]


# --- what is missing ---


def check(*options, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / "gpu_check.py"), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_machine_that_lacks_packages_prints_all_of_them_and_runs_nothing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    out = tmp_path / "figures.json"
    done = check("--only", "build", "--out", str(out), PYTHONPATH=str(tmp_path), PATH="/nowhere", CUDA_HOME="")
    lines = re.findall(r"^  ([\w.]+) +(MISSING: )?", done.stdout.partition("  Without a network")[0], re.MULTILINE)
    asked = ["python", "setuptools", "ninja", "pybind11", "pytest", "compiler", "nvcc", "Python.h", "torch", "GPU"]
    assert done.returncode == 1 and [what for what, _ in lines] == asked
    missing = {what for what, missing in lines if missing}
    assert missing >= {"compiler", "nvcc", "torch", "GPU"} and missing.isdisjoint({"python", "pytest"})
    assert "ImportError: no torch here" in done.stdout and "nothing was run; missing: " in done.stderr
    assert "===" not in done.stdout and not out.exists()


@pytest.mark.parametrize(
    "asked, lacking, built, runs, left_out",
    [
        ("build tests", "", False, "build tests", {}),
        ("kernels", "", True, "kernels", {}),
        ("kernels", "", False, "build kernels", {}),
        ("build tests kernels", "pytest", False, "build kernels", {"tests": "pytest"}),
        ("build kernels", "ninja", True, "kernels", {"build": "ninja"}),
        ("kernels", "ninja", True, "kernels", {}),
        ("kernels", "ninja nvcc", False, "", {"build": "ninja nvcc", "kernels": "ninja nvcc"}),
        ("tests kernels", "pytest GPU", True, "", {"tests": "pytest GPU", "kernels": "GPU"}),
        ("tests", "pytest", False, "", {"tests": "pytest"}),
    ],
)
def test_a_stage_without_its_packages_is_skipped_and_the_build_is_made_once_needed(
    asked, lacking, built, runs, left_out, gpu_check, monkeypatch
):
    monkeypatch.setattr(gpu_check, "is_built", lambda: built)
    stages, lacks = gpu_check.plan(asked.split(), lacking.split())
    assert " ".join(stages) == runs and {name: " ".join(missing) for name, missing in lacks.items()} == left_out


def test_the_extension_counts_as_built_for_cuda_until_its_sources_have_other_bytes(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "BUILT", tmp_path / "build" / "stamp")
    monkeypatch.setattr(gpu_check, "HAS_CUDA", "import sys; sys.exit(0)")
    extension, source = tmp_path / "amp_patch" / "_C.so", tmp_path / "csrc" / "kernels" / "a.cu"
    for path in (tmp_path / "setup.py", source, extension):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("as built")
    assert not gpu_check.is_built(), "another build may have had other sources"
    gpu_check.note_build()
    assert gpu_check.is_built()
    for path in (tmp_path / "setup.py", source):
        os.utime(path, (time.time() + 60,) * 2)
        assert gpu_check.is_built(), "the same sources were copied here again"
    for path in (tmp_path / "setup.py", source, extension):
        path.write_text("edited")
        assert not gpu_check.is_built()
        path.write_text("as built")
    (tmp_path / "csrc" / "new.h").touch()
    assert not gpu_check.is_built()
    (tmp_path / "csrc" / "new.h").unlink()
    monkeypatch.setattr(gpu_check, "HAS_CUDA", "import sys; sys.exit('built without CUDA')")
    assert not gpu_check.is_built()
    extension.unlink()
    gpu_check.note_build()
    assert not gpu_check.is_built()


def test_each_part_fits_where_a_command_may_take_ten_minutes(gpu_check):
    assert sorted(name for part in gpu_check.PARTS for name in part) == sorted(gpu_check.STAGES)
    for part in gpu_check.PARTS:
        assert sum(gpu_check.STAGES[name].limit for name in {"build", *part}) < 540
        for text in (gpu_check.__doc__, (ROOT / "Makefile").read_text(), (ROOT / "docs" / "speed.md").read_text()):
            assert f"ONLY={','.join(part)}" in text


# --- stages ---


# Long enough for a figure that is rounded to tenths of a second.
WRITES = (
    "import json, pathlib, sys, time; time.sleep(0.1); pathlib.Path(sys.argv[-1]).write_text(json.dumps({'rows': [1]}))"
)


def test_a_command_that_fails_says_so_and_the_next_one_runs(gpu_check, tmp_path):
    fails = f"{WRITES}; print('the reason'); sys.exit(3)"
    logs = tmp_path / "made-up-logs"
    result = gpu_check.run_stage("s", gpu_check.Stage(60, {"a": ["-c", fails], "b": ["-c", WRITES]}), logs)
    assert not result["passed"] and result["why"] == "a: exit status 3"
    assert result["tails"] == {"a": ["the reason"]}
    assert {path.name: path.read_text() for path in (logs / "s").iterdir()} == {"a.log": "the reason\n", "b.log": ""}
    assert result["a"] == result["b"] == {"rows": [1]}


def test_a_stage_over_its_limit_is_killed_with_all_that_it_started(gpu_check, tmp_path):
    number = tmp_path / "pid"
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open(sys.argv[1], 'w').write(str(p.pid))"
    sleeps = ["-c", f"{child}; p.wait()", str(number)]
    start = time.monotonic()
    stage = gpu_check.Stage(2, {"a": ["-c", WRITES], "b": sleeps, "c": ["-c", WRITES]})
    result = gpu_check.run_stage("s", stage, tmp_path)
    assert time.monotonic() - start < 20
    assert not result["passed"] and result["why"] == "b: killed after 2 s"
    assert result["a"] == {"rows": [1]} and "c" not in result and result["tails"].keys() == {"b"}
    state = Path(f"/proc/{number.read_text()}/stat")

    def is_there():
        with contextlib.suppress(OSError):
            return ") Z " not in state.read_text()
        return False

    deadline = time.monotonic() + 30  # a killed process ends when the machine comes to it; it sleeps longer
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_there()


MACHINE = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "gpu": "NVIDIA Made-Up 1",
    "compute_capability": [9, 0],
    "gigabytes": 79,
}


def test_figures_are_written_after_each_stage_and_other_stages_figures_stay(
    gpu_check, preflight, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "results" / "figures.json"
    reads = (
        f"import json, sys; sys.exit(list(json.load(open({str(out)!r}))['stages']) != ['build', 'tests', 'kernels'])"
    )
    stages = {
        "build": gpu_check.Stage(60, {"extension": ["-c", "import sys; sys.exit(2)"]}, False),
        "tests": gpu_check.Stage(60, {"x": ["-c", WRITES]}),
        "kernels": gpu_check.Stage(60, {"x": ["-c", WRITES]}),
        "step": gpu_check.Stage(60, {"x": ["-c", reads]}),
    }
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    built = [False]
    monkeypatch.setattr(gpu_check, "is_built", lambda: built[0])
    findings = [preflight.Finding("nvcc", False, "not on PATH"), preflight.Finding("GPU", True, "made up")]
    monkeypatch.setattr(gpu_check, "preflight", lambda: (findings, MACHINE))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def main(only):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", only, "--out", str(out)])
        gpu_check.main()

    with pytest.raises(SystemExit, match="nothing was run; missing: nvcc"):
        main("build,tests")
    built[0] = True
    with pytest.raises(SystemExit, match=r"^gpu-check: left out: build$"):
        main("build,tests")
    assert "left out; missing: nvcc" in capsys.readouterr().out
    findings[0] = findings[1]
    with pytest.raises(SystemExit, match=r"failed: build$"):
        main("step,build,kernels")
    written = json.loads(out.read_text())
    assert written["gpu"] == MACHINE["gpu"]
    passed = {name: stage["passed"] for name, stage in written["stages"].items()}
    assert passed == {"build": False, "tests": True, "kernels": True, "step": True}
    assert {path.name for path in out.parent.iterdir()} == {"figures.json", "figures-logs.tar.gz"}, "and nothing else"
    with tarfile.open(out.parent / "figures-logs.tar.gz") as packed:
        logs = [member.name for member in packed.getmembers() if member.isfile()]
    assert sorted(logs) == ["build/extension.log", "kernels/x.log", "step/x.log", "tests/x.log"]
    assert written["stages"]["tests"]["torch"] == "2.11.0+cu130" and written["stages"]["tests"]["x"] == {"rows": [1]}


def test_each_command_of_a_stage_takes_its_options(gpu_check):
    """As far as the parsers of the scripts go."""
    for stage in gpu_check.STAGES.values():
        for script, *options in stage.commands.values():
            if script.startswith("benchmarks/"):
                assert (ROOT / script).is_file()
                known = (ROOT / script).read_text() + (BENCHMARKS / "timing.py").read_text()
                assert all(f'"{option}"' in known for option in options if option.startswith("--"))
