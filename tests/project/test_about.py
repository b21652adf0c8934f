"""`make tests-about`: the tests about a word."""

from __future__ import annotations

import about
import pytest

pytestmark = pytest.mark.slow  # a tool that no training needs

SKIPS = '''"""What a skip must not change."""

def test_a_bad_loss_is_told(x):
    """NaN too."""
'''
TIES = """class TestTies:
    def test_one_is_shared(self):
        pass

def helper():
    pass
"""
FILES = {"training/test_overflow.py": SKIPS, "masters/test_masters.py": TIES}


@pytest.fixture
def tests(tmp_path):
    for name, text in FILES.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).write_text(text)
    return tmp_path / "tests"


@pytest.mark.parametrize("words", [["overflow"], ["SKIP"], ["nan", "bad"], ["bad_loss"]])
def test_a_word_may_be_in_the_path_the_files_docstring_the_name_or_the_docstring(tests, capsys, words):
    assert about.main(words, tests) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tests/training/test_overflow.py: What a skip must not change.",
        "    3: a bad loss is told: NaN too.",
        f"1 tests about {' '.join(words)}",
    ]


def test_each_of_several_words_is_asked_for_and_helpers_are_no_tests(tests, capsys):
    assert about.main(["shared"], tests) == 0 and "    2: one is shared" in capsys.readouterr().out
    assert about.main(["shared", "nan"], tests) == 1 and about.main(["helper"], tests) == 1


def test_our_own_are_found():
    assert about.main(["overflow", "scale"]) == 0
