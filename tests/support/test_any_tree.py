"""Properties of tree.py and patches.py: random nested containers, random sequences of patches."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from hunts import hunt
from hypothesis import strategies as st

from amp_patch.support.patches import Patches
from amp_patch.support.tree import map_tensors, tensors

Pair = namedtuple("Pair", "left right")

leaves = st.integers(0, 5).map(lambda n: torch.tensor(float(n))) | st.none() | st.text(max_size=2) | st.integers()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner).map(lambda both: Pair(*both))
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """The containers with their types and keys, and all that is no tensor."""
    if isinstance(value, dict):
        return type(value), [(key, shape(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape(each) for each in value]
    return torch.Tensor if isinstance(value, torch.Tensor) else value


@hunt(50, value=trees)
def test_a_tree_keeps_its_shape_and_each_tensor_is_mapped_once(value: Any) -> None:
    before = tensors(value)
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert shape(doubled) == shape(value) and all(map(lambda a, b: a is b, tensors(value), before))
    assert [t.item() for t in tensors(doubled)] == [2 * t.item() for t in before]
    assert map_tensors(lambda tensor: tensor, value) is value


class Base:
    inherited, also = 1, 2


class Child(Base):
    also = 3


NAMES = ("inherited", "also", "fresh")


@hunt(50, calls=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(NAMES), st.integers()), max_size=8))
def test_any_pile_of_patches_comes_apart(calls: list[tuple[int, str, int]]) -> None:
    owners: list[Any] = [Base, Child, SimpleNamespace(also=4)]
    before, patches = [dict(vars(owner)) for owner in owners], Patches()
    for place, name, value in calls:
        patches.set(owners[place], name, value)
        assert vars(owners[place])[name] == value
    assert len(patches) == len(calls)
    patches.remove()
    assert [dict(vars(owner)) for owner in owners] == before and len(patches) == 0
