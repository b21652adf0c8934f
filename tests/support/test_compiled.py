"""Marks for torch.compile."""

from __future__ import annotations

import sys

import pytest
import torch._dynamo

from amp_patch.support.compiled import eager_only


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback"),
    reason="this torch cannot tell whether compiled code runs",
)
def test_an_eager_call_of_a_marked_function_enters_no_code_of_dynamo():
    files = []
    marked = eager_only(lambda: None)
    try:
        sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
        marked()
    finally:
        sys.setprofile(None)
    assert __file__ in files and not [file for file in files if "_dynamo" in file]


def test_a_marked_function_is_not_traced_in_compiled_code():
    traced = []
    marked = eager_only(lambda: traced.append(torch.compiler.is_compiling()))

    @torch.compile(backend="eager")
    def run(x):
        y = x + 1
        marked()
        return y * 2

    assert run(torch.ones(1)).item() == 4
    assert traced == [False]
