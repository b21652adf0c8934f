"""The Python calls of one training step, and the files that they are in, do not grow in number."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from paths import BENCHMARKS, ROOT
from python_forks import python

# (calls, files). Lower them whenever the road gets shorter; to raise one is to make every user's step longer.
CEILINGS = {
    "O1": (173, 22),
    "O2": (191, 24),
    "O4": (151, 21),
    "O5": (157, 23),
    "O5, split": (168, 24),
    "GAN, O1": (722, 25),
    "GAN, O2": (696, 30),
}


COUNT = """
import json
import torch
import road
from amp_patch.support import tree

found = {name: (counted.total, counted.files) for name in road.TRAININGS for counted in [road.counts(name)]}
ours = road.count(lambda: tree.tensors([])).calls
network = road.network()  # a module that gets a part calls torch's registration hook, which is ours
theirs = road.count(lambda: network(torch.ones(1, 16))).total
print(json.dumps([found, {f"{file}: {name}": count for (file, name), count in ours.items()}, theirs]))
"""


@pytest.fixture(scope="module")
def counted() -> Any:
    """Count in a new process, because calls of other tests may change the path of a step."""
    path = os.pathsep.join([str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = python("-c", COUNT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.extension
@pytest.mark.parametrize("name", CEILINGS)
def test_a_step_takes_no_more_calls_and_files_than_it_did(name: str, counted: Any) -> None:
    trainings, _, _ = counted
    calls, files = CEILINGS[name]
    assert trainings[name][0] <= calls and trainings[name][1] <= files


def test_every_training_that_is_counted_has_a_ceiling(counted: Any) -> None:
    assert set(counted[0]) == set(CEILINGS)


def test_a_call_of_amp_patch_is_counted_and_one_of_torch_is_not(counted: Any) -> None:
    _, ours, theirs = counted
    assert ours["support/tree.py: tensors"] == 1 and theirs == 0
    assert all(name.startswith(("support/", "<generated>")) for name in ours)
