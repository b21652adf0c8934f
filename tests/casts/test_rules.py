"""rules.py: the op lists, the decorators, the extension and `explain` agree with its table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from amp_patch import multi_tensor
from amp_patch.casts import functions, install
from amp_patch.casts.oplists import rules_by_name
from amp_patch.casts.rules import RULES

IN_CPP = sorted(name for name, rule in RULES.items() if rule.in_cpp)


@pytest.fixture
def extension() -> Iterator[Any]:
    """The casts of the extension, in use."""
    if multi_tensor.extension() is None:
        pytest.skip(multi_tensor.backend_reason() or "no extension")
    with install.use_backend("cpp"):
        yield multi_tensor.extension().casts


def test_every_rule_is_used_by_the_lists_or_by_users() -> None:
    listed = {rule for lists in ("torch", "apex") for rule in rules_by_name(lists).values()}
    for name, rule in RULES.items():
        assert rule.name == name
        assert (name in listed) is not (rule.for_users or name == "none"), "a rule is of the lists or of users"
    assert listed <= set(RULES)


def test_a_rule_that_users_register_names_its_amp_patch_function() -> None:
    assert {rule.name for rule in RULES.values() if rule.for_users} <= {
        rule.name for rule in RULES.values() if rule.registered_by
    }
    for rule in RULES.values():
        assert not rule.registered_by or callable(getattr(functions, rule.registered_by))


def test_the_extension_has_the_rules_that_the_table_says(extension: Any) -> None:
    assert extension.rules == frozenset(IN_CPP)
    assert not any(RULES[name].for_users for name in IN_CPP), "what users hand in is left to Python"
