"""scripts_line.py: frames of user code are found by their module and folder, whatever the folders above are called."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

import pytest

from amp_patch.support.scripts_line import place


def frame_of(path: str, module: str) -> FrameType:
    """A frame of code that lies at `path`, in the module of that name."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile("import sys\nframe = sys._getframe()", path, "exec"), names)
    return names["frame"]


STDLIB = os.path.dirname(os.__file__)


@pytest.mark.parametrize(
    ("path", "module", "said"),
    [
        ("/home/me/amp_patch/train.py", "__main__", "train.py, line 1"),
        ("/home/me/torch/nets.py", "nets", "nets.py, line 1"),
        ("/home/me/site-packages-tests/train.py", "__main__", "train.py, line 1"),
        ("/home/me/.venv/lib/python3.12/site-packages/timm/models.py", "timm.models", None),
        ("/usr/lib/python3/dist-packages/timm/models.py", "timm.models", None),
        (f"{STDLIB}/contextlib.py", "contextlib", None),
        (f"{STDLIB}-mine/train.py", "__main__", "train.py, line 1"),
        ("<frozen runpy>", "runpy", None),
        ("/home/me/clone/amp_patch/frontend.py", "amp_patch.frontend", None),
        ("/home/me/clone/torch/_tensor.py", "torch._tensor", None),
        ("/home/me/amp_patch_tools.py", "amp_patch_tools", "amp_patch_tools.py, line 1"),
    ],
)
def test_a_place_is_named_for_the_script_s_code_alone(path, module, said):
    assert place(frame_of(path, module), 1) == said
