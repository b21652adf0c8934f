"""The tests stage of `make gpu-check`: test files in several processes, of which some crash, hang or warn."""

from __future__ import annotations

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
