"""The modules that `import amp_patch` loads, and those that the first use of a name loads."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch

import amp_patch

# Wings that a training need not have.
WINGS = ("diagnose", "run", "comparison", "graph", "apex", "integrations")

LOADED = f"""
import sys
import textwrap

def loaded():
    return [name for name in sys.modules if name.startswith("amp_patch.") and name.split(".")[1] in {WINGS}]
"""


def test_a_training_loads_no_wing_that_it_need_not_have():
    code = """
import torch, amp_patch
assert not loaded(), loaded()
amp_patch.initialize(torch.nn.Linear(2, 2))
assert not loaded(), loaded()
amp_patch.explain(torch.nn.Linear(2, 2), torch.ones(2))
assert "amp_patch.diagnose.explain" in loaded()
"""
    subprocess.run([sys.executable, "-c", LOADED + code], check=True)


@pytest.mark.parametrize(
    "code",
    [
        "import amp_patch; found = amp_patch.record",
        "from amp_patch import record as found",
        "from amp_patch.amp import record as found",
        "from amp_patch import amp; found = amp.record",
        "from amp_patch import *; found = record",
    ],
)
def test_a_name_is_put_into_the_module_at_its_first_use(code, monkeypatch):
    record = amp_patch.record
    monkeypatch.delitem(vars(amp_patch), "record")
    names = {}
    exec(code, names)
    assert names["found"] is record
    assert vars(amp_patch)["record"] is record


def test_a_star_import_gives_all_names():
    names = {}
    exec("from amp_patch import *", names)
    assert set(amp_patch.__all__) <= set(names)
    assert names["graph"].Graph is amp_patch.graph.Graph


def test_functions_are_not_hidden_by_modules_of_their_name():
    import amp_patch.comparison.commands.compare
    import amp_patch.diagnose.explain
    import amp_patch.diagnose.inspect

    assert all(map(callable, (amp_patch.compare, amp_patch.explain, amp_patch.inspect)))


def test_dir_has_every_public_name_and_other_names_are_refused():
    assert {name for name in dir(amp_patch) if not name.startswith("__")} == set(amp_patch.__all__)
    with pytest.raises(AttributeError, match="module 'amp_patch' has no attribute 'nothing'"):
        _ = amp_patch.nothing


def test_help_of_initialize_begins_with_an_example_that_runs():
    summary, example, *_ = (inspect.getdoc(amp_patch.initialize) or "").split("\n\n")
    assert summary.endswith("::")
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"amp": amp_patch, "model": model, "optimizer": optimizer, "criterion": torch.nn.functional.mse_loss}
    exec(
        textwrap.dedent(example), {**names, "loader": [(torch.ones(3, 2), torch.ones(3, 1))] * 8}
    )  # the first steps may overflow
    assert model.weight.dtype is torch.float16 and not torch.equal(model.weight.float(), before)
