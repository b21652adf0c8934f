"""`make test-versions`: its input and output, without making an environment."""

from __future__ import annotations

import json
import re

import pytest
import versions
from paths import ROOT

pytestmark = pytest.mark.slow  # a tool that no training needs

REPORT = """<testsuites><testsuite>
<testcase classname="tests.casts.test_regions" name="test_one[O1]" />
<testcase classname="tests.casts.test_regions" name="test_two"><failure message="no" /></testcase>
<testcase classname="tests.model.test_model" name="test_three"><error message="no" /></testcase>
<testcase classname="tests.model.test_model" name="test_four"><skipped message="why" /></testcase>
</testsuite></testsuites>"""


def test_counts_equal_pytests_report(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = versions.counts(tmp_path / "report.xml")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["tests/casts/test_regions.py::test_two", "tests/model/test_model.py::test_three"]


def test_an_untried_version_is_a_row_and_earlier_rows_stay(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(versions, "VERSIONS", [versions.pair("2.13.0@9.9")])
    (tmp_path / "versions.json").write_text('{"2.6.0@3.11": {"passed": 3, "failed": 0, "skipped": 0}}')
    with pytest.raises(SystemExit) as ended:
        versions.main(["2.13.0@9.9", "--out", str(tmp_path)])
    assert ended.value.code == 1 and "there is no python9.9 on PATH" in capsys.readouterr().out
    kept = json.loads((tmp_path / "versions.json").read_text())
    assert kept["2.6.0@3.11"]["passed"] == 3 and kept["2.13.0@9.9"] == {"not_tried": "there is no python9.9 on PATH"}
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["2.13.0@9.9.log"]
    with pytest.raises(SystemExit):
        versions.main(["2.13"])
    assert "is no torch@python" in capsys.readouterr().err


def test_each_declared_end_is_among_them():
    project = (ROOT / "pyproject.toml").read_text()
    oldest_torch = re.search(r'dependencies = \["torch>=([\d.]+)"\]', project)[1]
    oldest_python = re.search(r'requires-python = ">=([\d.]+)"', project)[1]
    assert any(which.torch.startswith(f"{oldest_torch}.") for which in versions.VERSIONS)
    assert oldest_python in {which.python for which in versions.VERSIONS}
