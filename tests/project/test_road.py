"""The road through one training step does not grow: Python calls of a step, and the files that they are in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from paths import BENCHMARKS

from amp_patch import multi_tensor

# (calls, files). Lower them whenever the road gets shorter; to raise one is to make every user's step longer.
CEILINGS = {
    "O1": (368, 29),
    "O2": (423, 33),
    "O4": (316, 26),
    "O5": (388, 31),
    "O5, split": (394, 31),
    "GAN, O1": (1212, 29),
    "GAN, O2": (1236, 35),
}


@pytest.fixture(scope="module")
def road() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import road

        yield road
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.skipif(multi_tensor.backend() != "cpp", reason="the ceilings are of the road with the extension")
@pytest.mark.parametrize("name", CEILINGS)
def test_a_step_takes_no_more_calls_and_files_than_it_did(name: str, road: Any) -> None:
    counted = road.counts(name)
    calls, files = CEILINGS[name]
    assert counted.total <= calls and counted.files <= files, counted.calls.most_common(20)


def test_every_training_that_is_counted_has_a_ceiling(road: Any) -> None:
    assert set(road.TRAININGS) == set(CEILINGS)


def test_a_call_of_amp_patch_is_counted_and_one_of_torch_is_not(road: Any) -> None:
    from amp_patch.support import tree

    counted = road.count(lambda: tree.tensors([]))
    assert counted.calls["support/tree.py", "tensors"] == 1 and counted.total >= 1
    assert all(file.startswith(("support/", "<generated>")) for file, _ in counted.calls)
    assert road.count(lambda: road.network()(road.torch.ones(1, 16))).total == 0
