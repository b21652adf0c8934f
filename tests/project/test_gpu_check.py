"""`make gpu-check` without a GPU: its stages, their commands and their time limits."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from paths import BENCHMARKS, ROOT, benchmark_fixture

pytestmark = pytest.mark.slow  # a tool that no training needs


gpu_check = benchmark_fixture("gpu_check")


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


def test_what_no_gpu_has_run_comes_first_and_each_of_its_stages_leaves_its_results(gpu_check):
    unknown = ["build", "look", "first", "offload", "wide", "new"]
    assert [*gpu_check.STAGES][: len(unknown)] == unknown == [*gpu_check.PARTS[0]]
    measured = 90  # seconds of the build on an H200
    assert measured + sum(gpu_check.STAGES[name].limit for name in unknown[1:4]) < 300


def test_each_part_fits_where_a_command_may_take_ten_minutes(gpu_check):
    assert sorted(name for part in gpu_check.PARTS for name in part) == sorted(gpu_check.STAGES)
    for part in gpu_check.PARTS:
        assert sum(gpu_check.STAGES[name].limit for name in {"build", *part}) < 540
        for text in (gpu_check.__doc__, (ROOT / "Makefile").read_text(), (ROOT / "docs" / "speed.md").read_text()):
            assert f"ONLY={','.join(part)}" in text


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


def test_each_command_of_a_stage_takes_its_options(gpu_check):
    """As far as the parsers of the scripts go."""
    for stage in gpu_check.STAGES.values():
        for script, *options in stage.commands.values():
            if script.startswith("benchmarks/"):
                assert (ROOT / script).is_file()
                known = (ROOT / script).read_text() + (BENCHMARKS / "timing.py").read_text()
                assert all(f'"{option}"' in known for option in options if option.startswith("--"))


gpu_tests, first_look = benchmark_fixture("gpu_tests"), benchmark_fixture("first_look")
HAS_A_GPU = """
def pytest_collection(session):
    import conftest
    conftest.DEVICES.append("cuda")
"""


@pytest.fixture(scope="module")
def collected(gpu_tests, tmp_path_factory):
    """The names of all tests, as on a machine with a GPU."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "has_a_gpu.py").write_text(HAS_A_GPU)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        return gpu_tests.tests_of(["tests"], "-p", "has_a_gpu")


def test_the_stage_of_tests_takes_each_file_with_cases_on_a_gpu(gpu_tests, collected):
    chosen = gpu_tests.with_cuda_cases(ROOT / "tests", collected)
    kernels = ["lists", "multi_tensor", "split", "steps", "step_layouts", "stochastic_round", "update_scale"]
    assert {f"tests/multi_tensor/test_{name}.py" for name in kernels} <= set(chosen)
    assert {test.partition("::")[0] for test in collected if "[cuda]" in test or "-cuda-" in test} <= set(chosen)
    assert "tests/project/test_documents.py" not in chosen


@pytest.mark.parametrize("name", ["first", "new"])
def test_the_listed_tests_are_there_and_have_cases_on_a_gpu(gpu_tests, collected, name):
    cases = {test.partition("::")[0] for test in collected if gpu_tests.has_cuda(test)}
    names = {test.partition("[")[0] for test in collected}
    assert set(gpu_tests.listed(BENCHMARKS / f"gpu_{name}_tests.txt")) <= cases | names


def test_the_first_look_finds_no_difference_between_the_cpu_and_itself(first_look, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["first_look.py", "--small", "--json", str(tmp_path / "figures.json")])
    first_look.main()
    assert capsys.readouterr().out.count("'differ': {}") == 16
