"""Modules of torch that are imported after the casts are installed, or never, each case in a new process."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATE = """
import sys
import torch
from amp_patch import amp

late = "torch.nn.attention.flex_attention"
with amp.autocast("cpu", dtype=torch.bfloat16):
    torch.ones(2, 2) @ torch.ones(2, 2)
assert late not in sys.modules and "torch._dynamo" not in sys.modules and "torch.nn.attention.varlen" not in sys.modules
if "restored" in sys.argv:
    amp.restore()
from torch.nn.attention.flex_attention import flex_attention
found = sys.modules[late].flex_attention_hop
assert hasattr(found, "__wrapped__") is ("restored" not in sys.argv), found
q, v = torch.ones(1, 1, 16, 8), torch.ones(1, 1, 16, 8, dtype=torch.bfloat16)
with amp.autocast("cpu", dtype=torch.bfloat16):
    assert flex_attention(q, q, v).dtype is torch.bfloat16
amp.restore()
assert not hasattr(sys.modules[late].flex_attention_hop, "__wrapped__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["installed", "restored"])
def test_casts_import_no_listed_package_and_reach_later_imports(state: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LATE, state], check=True)


IN_A_TRACE = """
import torch
from amp_patch import amp

def attend(q, v):
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(q, q, v)

q, v = torch.ones(1, 1, 16, 8), torch.ones(1, 1, 16, 8, dtype=torch.bfloat16)
with amp.autocast("cpu", dtype=torch.bfloat16):
    assert torch.compile(attend, backend="eager", fullgraph=True)(q, v).dtype is torch.bfloat16
"""


@pytest.mark.slow
def test_an_import_in_a_trace_is_in_time() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", IN_A_TRACE], check=True)
