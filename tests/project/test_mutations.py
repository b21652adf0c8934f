"""`make mutations`: each mutation names tests that exist, and is caught."""

from __future__ import annotations

import mutations
import pytest
from mutations import MUTATIONS
from paths import ROOT


def test_the_tests_of_each_mutation_exist():
    assert len(MUTATIONS) == len({m.breaks for m in MUTATIONS}) >= 20
    for mutation in MUTATIONS:
        assert all(mutations.file_of(name, ROOT) for name in mutation.tests)


@pytest.mark.slow
@pytest.mark.release
def test_each_mutation_is_caught(capsys):
    assert mutations.main([]) == 0, capsys.readouterr().out
