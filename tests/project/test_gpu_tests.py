"""The tests stage of `make gpu-check`: test files in several processes, of which some crash, hang or warn."""

from __future__ import annotations

import json
import sys

import pytest
from paths import BENCHMARKS, TESTS

pytestmark = pytest.mark.slow  # a tool that no training needs


@pytest.fixture
def gpu_tests(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_tests

    return gpu_tests


def test_the_files_with_cuda_cases_are_found_by_their_fixtures(gpu_tests):
    files = {str(path.relative_to(TESTS)) for path in gpu_tests.with_cuda_cases(TESTS)}
    assert files >= {"multi_tensor/test_cuda.py", "around/test_cuda_graphs.py", "training/test_syncs.py"}
    assert files.isdisjoint({"project/test_documents.py", "multi_tensor/test_plan.py"})


def test_lists_are_of_one_weight_and_begin_with_the_heaviest(gpu_tests):
    weights = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 1.0}
    assert gpu_tests.shared(weights, 2) == [["a", "d"], ["b", "c", "e"]]
    assert gpu_tests.shared({"a": 1.0}, 8) == [["a"]]


FILES = {
    "test_fine.py": "import pytest\n\n@pytest.mark.parametrize('x', range(3))\ndef test_fine(x): pass\n"
    "def test_skipped(): pytest.skip('no')\n@pytest.mark.slow\ndef test_slow(): assert 0\n"
    "@pytest.fixture\ndef late():\n    yield\n    raise ValueError('too late')\ndef test_torn_down(late): pass\n",
    "test_fails.py": "def test_wrong(): assert 1 == 2\ndef test_right(): pass\n",
    "test_broken.py": "import no_such_module\n",
    "test_crashes.py": "import os\ndef test_before(): pass\ndef test_crash(): os._exit(9)\ndef test_lost(): pass\n",
    "test_hangs.py": f"import time\ndef test_hang(): time.sleep(60)\n{'#' * 500}\n",
}


@pytest.fixture
def suite(gpu_tests, tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torch.py").touch()  # one that is imported at once
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "LOGS", tmp_path / "logs")
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.delenv("AMP_PATCH_GPU_LOGS", raising=False)

    def run(*options):
        figures = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", ["gpu_tests.py", *options, "--json", str(figures)])
        try:
            gpu_tests.main()
            status = 0
        except SystemExit as end:
            status = end.code
        result = json.loads(figures.read_text())
        del result["slowest"]
        return status, result

    return run


def test_counts_are_summed_and_failures_named_of_crashes_and_hangs_too(suite):
    order = ["test_broken.py", "test_fails.py", "test_crashes.py", "test_hangs.py", "test_fine.py"]
    status, result = suite("--processes", "2", "--test-limit", "6", *order)
    failures = result.pop("failures")
    assert status == 1 and result == {"passed": 5, "failed": 5, "skipped": 1, "warnings": {}, "not_run": []}
    assert failures == {
        "test_fine.py::test_torn_down": "ValueError: too late",
        "test_fails.py::test_wrong": "assert 1 == 2",
        "test_broken.py": "E   ModuleNotFoundError: No module named 'no_such_module'",
        "test_crashes.py::test_crash": "its process ended with 9",
        "test_hangs.py::test_hang": "stopped after 6 s",
    }


def test_files_without_time_left_are_named(suite):
    status, result = suite("--processes", "1", "--limit", "5", "test_fails.py", "test_hangs.py")
    assert status == 1 and result["not_run"] == ["test_fails.py"]
    assert result["failures"] == {"test_hangs.py::test_hang": "stopped: the time for all tests is over"}


def test_a_process_that_does_not_begin_leaves_all_of_its_files(suite, tmp_path):
    (tmp_path / "conftest.py").write_text("import no_such_module\n")
    status, result = suite("--processes", "1", "test_fails.py", "test_fine.py")
    assert status == 1 and result["not_run"] == ["test_fine.py", "test_fails.py"]
    assert result["failures"] == {
        "process files-0": "its process ended with 4: E   ModuleNotFoundError: No module named 'no_such_module'"
    }


def test_the_tests_of_a_file_can_be_shared(suite):
    status, result = suite("--by-test", "--processes", "2", "test_fails.py")
    assert status == 1 and (result["passed"], result["failed"]) == (1, 1)


@pytest.mark.parametrize("options", [[], ["--by-test"]])
def test_a_warning_fails_no_test_and_is_counted_and_named(suite, tmp_path, options, monkeypatch, capsys):
    """Where pytest makes errors of warnings; those of torch's import, and those that it is told to ignore, are none."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = slow\nfilterwarnings =\n    error\n    ignore:of no concern\n"
    )
    (tmp_path / "conftest.py").write_text("import torch\n")
    (tmp_path / "torch.py").write_text(
        "import warnings\nwarnings.warn('the pynvml package is deprecated', FutureWarning)\n"
    )
    warns = "import pytest, warnings\ndef test_right(): warnings.warn('of no concern')\n"
    warns += (
        "@pytest.mark.parametrize('x', range(3))\ndef test_warns(x): warnings.warn('only CUDA says so\\nat length')\n"
    )
    warns += "def test_another(): warnings.warn('and this', RuntimeWarning)\n"
    warns += "def test_asks(): pytest.warns(UserWarning, warnings.warn, 'x')\n"
    (tmp_path / "test_warns.py").write_text(warns)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    status, result = suite("--processes", "1", *options, "test_warns.py")
    assert status == 0 and (result["passed"], result["failed"]) == (6, 0)
    assert result["warnings"] == {
        "UserWarning: only CUDA says so (test_warns.py, line 4)": {"tests": 3, "first": "test_warns.py::test_warns[0]"},
        "RuntimeWarning: and this (test_warns.py, line 5)": {"tests": 1, "first": "test_warns.py::test_another"},
    }
    printed = capsys.readouterr().out
    assert (
        "warned: UserWarning: only CUDA says so (test_warns.py, line 4): 3 tests, first test_warns.py::test_warns[0]"
        in printed
    )
    assert printed.splitlines()[-1] == "6 passed, 0 failed, 0 skipped, 2 warnings"


def test_a_test_has_ninety_seconds(gpu_tests, monkeypatch, suite):
    limits = []
    monkeypatch.setattr(gpu_tests, "run_all", lambda names, label, ends, limit: limits.append(limit) or [])
    suite("test_fails.py")
    assert limits == [90]
