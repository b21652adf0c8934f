"""`make mutations`: its output for a small example, and the tests that its real mutations name."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest
from mutations import MUTATIONS, Broken, Mutation
from paths import ROOT

CODE = "def double(x):\n    return 2 * x\n\n\ndef unseen(x):\n    return x + 1\n"
TEST = "import amp_patch\n\n\ndef test_double():\n    assert amp_patch.double(3) == 6\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder, name, text in ("amp_patch", "__init__.py", CODE), ("tests", "test_double.py", TEST):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "tests" / "test_ill.py").write_text("def test_ill():\n    assert False\n")
    return tmp_path


@pytest.mark.slow
def test_rows_name_the_catching_test_and_the_source_is_unchanged(tree):
    rows: list[str] = []
    caught = Mutation("it doubles", "2 * x", "3 * x", ("test_double.py",))
    assert mutations.run([caught], tree, rows.append)
    assert "it doubles\n    caught by tests/test_double.py::test_double" in rows[0]
    assert not mutations.run([caught, caught._replace(text="4 * x")], tree, rows.append)
    assert "no file has it: '4 * x'" in rows[-2] and rows[-1] == "1 of 2 mutations caught"
    assert (tree / "amp_patch" / "__init__.py").read_text() == CODE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "instead", "tests", "why"),
    [
        ("x + 1", "x", "test_double.py", "NOT CAUGHT"),
        ("return", "yield", "test_double.py", r"amp_patch/__init__.py has it 2 times: 'return'"),
        ("2 * x", "3 * x", "test_gone.py", "there is no test_gone.py under tests/"),
        ("2 * x", "3 * x", "test_ill.py", "tests/test_ill.py::test_ill fails without it, too"),
        ("def double(x):", "def double(x:", "test_double.py", "pytest gave"),
    ],
)
def test_errors_and_passing_tests_are_no_catch(tree, text, instead, tests, why):
    with pytest.raises(Broken, match=why):
        mutations.outcome(tree, Mutation("it doubles", text, instead, (tests,)))
    assert (tree / "amp_patch" / "__init__.py").read_text() == CODE


def test_words_choose_mutations(monkeypatch, capsys):
    monkeypatch.setattr(mutations, "run", lambda chosen, *_: print(*(m.breaks for m in chosen), sep="\n"))
    mutations.main(["ddp:", "Portions"])
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["portions", "DDP"]
    with pytest.raises(SystemExit):
        mutations.main(["xyzzy"])


def test_the_tests_of_each_mutation_exist():
    assert len(MUTATIONS) == len({m.breaks for m in MUTATIONS}) >= 20
    for mutation in MUTATIONS:
        assert all(mutations.file_of(name, ROOT) for name in mutation.tests)


@pytest.mark.slow
@pytest.mark.release
def test_each_mutation_is_caught(capsys):
    assert mutations.main([]) == 0, capsys.readouterr().out
