"""Functions of torch that a script has stored before the casts exist, by `from torch import einsum` for example."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import wrapper_backends
from conftest import WRAPPERS
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.casts import install

LOW = torch.bfloat16
SOURCE = """
import torch
from torch import einsum, nn
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import linear, softmax

class Net(nn.Module):
    soft = staticmethod(F.softmax)
    product = torch.mm

    def __init__(self):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.ones(4, 4)), F.softmax

    def forward(self, x):
        low = [einsum("ij,jk->ik", x, self.weight), linear(x, self.weight), self.product(x, self.weight)]
        raised = [softmax(low[0], -1), self.soft(low[0], -1), self.act(low[0], -1)]
        self.types = [[each.dtype for each in both] for both in (low, raised)]
        return sum(raised).sum() + sum(low).sum()
"""
O1S = [[LOW] * 3, [torch.float32] * 3]


@pytest.fixture
def script() -> Iterator[Any]:
    module = types.ModuleType("script_with_imported_names")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("backend", WRAPPERS)
@pytest.mark.parametrize("first", ["script", "casts"])
def test_bound_functions_are_cast_at_o4_and_torchs_own_after_restore(script: Any, backend: str, first: str) -> None:
    with wrapper_backends.use_backend(backend):
        if first == "casts":
            install.install()
        exec(SOURCE, vars(script))
        if first == "casts":
            install.uninstall()  # what was imported meanwhile keeps its wrappers, which call straight through
        net = script.Net()
        net(torch.ones(2, 4))
        assert net.types == [[torch.float32] * 3, [torch.float32] * 3]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = amp.initialize(net, optimizer, opt_level="O4")
        net(torch.ones(2, 4)).backward()
        assert net.types == O1S
        amp.restore()
        net(torch.ones(2, 4))
        assert net.types == [[torch.float32] * 3, [torch.float32] * 3]
        if first == "script":
            assert [script.einsum, script.linear, script.softmax] == [torch.einsum, F.linear, F.softmax]
            assert [net.act, net.soft, script.Net.product] == [F.softmax, F.softmax, torch.mm]


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_levels_without_casts_leave_bound_functions_alone(script: Any, level: str) -> None:
    exec(SOURCE, vars(script))
    names = dict(vars(script))
    net = script.Net()
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level)
    assert dict(vars(script)) == names and net.act is F.softmax


def test_copies_of_a_model_go_on_with_the_functions_that_it_holds() -> None:
    net = nn.Linear(2, 2)
    net.act, net.bound = F.softmax, partial(F.softmax, dim=-1)
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O4")
    low = torch.ones(2, 2, dtype=LOW)
    for each in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert each.act(low, -1).dtype is each.bound(low).dtype is torch.float32
    twin = copy.deepcopy(net)
    amp.restore()
    assert net.act is net.bound.func is F.softmax and twin.act(low, -1).dtype is LOW


def products(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,jk->ik", [x, x]) + F.softmax(x, -1) + F.linear(x, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("backend", WRAPPERS)
def test_torch_jit_compiles_functions_while_wrappers_are_installed(backend: str) -> None:
    x = torch.rand(4, 4)
    with wrapper_backends.use_backend(backend):
        install.install()
        scripted = torch.jit.script(products)
        assert torch.equal(scripted(x), products(x))


# ---------------------------------------------------------------------------------------------------------------------
# Modules of torch that are imported after the casts are installed, or never, each case in a new process

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
