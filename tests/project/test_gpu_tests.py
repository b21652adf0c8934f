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
