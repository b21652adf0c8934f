"""What `import amp_patch` loads, and what it loads when a name is first used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import amp_patch

# Wings that a training need not have.
WINGS = ("diagnose", "recording", "comparison", "commands", "graph", "apex", "integrations")


def loaded_after(code):
    """The modules of those wings that a new process has loaded when it has run `code`."""
    tell = "import json, sys; print(json.dumps([name for name in sys.modules if name.startswith('amp_patch.')]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, check=True)
    names = json.loads(done.stdout.splitlines()[-1])
    return [name for name in names if name.split(".")[1] in WINGS]


def test_a_plain_import_loads_no_wing_that_a_training_need_not_have():
    assert loaded_after("import amp_patch") == []


@pytest.mark.parametrize("verbosity", [1, 2])
def test_initialize_loads_explain_only_at_verbosity_2(verbosity):
    code = f"""
import torch, amp_patch
amp_patch.initialize(torch.nn.Linear(2, 2), verbosity={verbosity})
"""
    assert ("amp_patch.diagnose.explain" in loaded_after(code)) is (verbosity == 2)


@pytest.mark.parametrize(
    "code",
    [
        "import amp_patch; assert callable(amp_patch.record)",
        "from amp_patch import record; assert callable(record)",
        "from amp_patch.amp import record; assert callable(record)",
        "from amp_patch import amp; assert callable(amp.record)",
    ],
)
def test_a_name_is_loaded_when_it_is_first_used_and_is_an_attribute_then(code):
    assert "amp_patch.recording.recorder" in loaded_after(f"{code}; import amp_patch; vars(amp_patch)['record']")


def test_a_star_import_gives_all_names():
    code = "from amp_patch import *; assert graph.Graph and all(map(callable, (compare, explain, inspect, log)))"
    assert "amp_patch.comparison.notebook" in loaded_after(code)


def test_functions_are_not_hidden_by_modules_of_their_name():
    code = "import amp_patch.diagnose.inspect, amp_patch.diagnose.explain, amp_patch.commands.compare, amp_patch"
    loaded_after(f"{code}; assert all(map(callable, (amp_patch.inspect, amp_patch.explain, amp_patch.compare)))")


def test_dir_has_every_public_name_and_other_names_are_refused():
    assert set(amp_patch.__all__) <= set(dir(amp_patch))
    with pytest.raises(AttributeError, match="module 'amp_patch' has no attribute 'nothing'"):
        _ = amp_patch.nothing
