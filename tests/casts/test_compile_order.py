"""torch.compile and `initialize` in either order, each case in a new process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo
from python_forks import python
from scripts import environment
from torch import nn

from amp_patch import amp
from amp_patch.casts import dynamo

# What torch's own tracing does, in plain scripts too.
pytestmark = [
    pytest.mark.program,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit"),
]


LATE = """
import sys, torch
from torch import nn
from amp_patch import amp
from amp_patch.casts import wrappers
assert "torch._dynamo" not in sys.modules
with amp.autocast("cpu"):
    torch.exp(torch.ones(2, 2) @ torch.ones(2, 2))
model = amp.initialize(nn.Linear(6, 6), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
assert "torch._dynamo" not in sys.modules, "who never compiles must not import the compiler"
assert wrappers.backend() == BACKEND
from casting import operands, same_as_eager, zoo
for backend in ("eager", "aot_eager"):
    same_as_eager(zoo, *operands(), backend=backend, rtol=2e-2, atol=2e-2)
    same_as_eager(model, operands()[0], backend=backend)
"""


@pytest.mark.parametrize("backend", ["cpp", pytest.param("python", marks=pytest.mark.slow)])
def test_the_compiler_may_be_imported_after_the_casts_are_installed(backend):
    kind = {"cpp": "", "python": "torch"}[backend]
    if backend == "cpp" and amp.multi_tensor.extension() is None:
        kind, backend = "torch", "python"
    code = f"BACKEND = {backend!r}\n{LATE}"
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path), "AMP_PATCH_BACKEND": kind}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


FIRST = """
import torch, torch._dynamo
from amp_patch import amp
from casting import operands
x, w = operands()
before = torch.compile(lambda x, w: x @ w, backend="aot_eager")
assert before(x, w).dtype is torch.float32
def function(x, w):
    with amp.autocast("cpu", dtype=torch.bfloat16):
        return x @ w, torch.nn.functional.linear(x, w)
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        assert {t.dtype for t in compiled(x, w)} == {torch.bfloat16}
with amp.autocast("cpu", dtype=torch.bfloat16):
    assert before(x, w).dtype is torch.bfloat16
assert before(x, w).dtype is torch.float32
"""


@pytest.mark.slow
def test_the_first_region_of_a_process_may_be_in_compiled_code():
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FIRST], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# Dynamo lists the methods of torch.Tensor at its first look, while wrappers stand there.
GONE = """
import torch
from torch.overrides import TorchFunctionMode
from amp_patch import amp

class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

def summed(x):
    return x.exp().sum()

x = torch.randn(3)
with amp.autocast("cpu"):
    torch.compile(summed, backend="eager")(x)
for _ in range(2):
    with Passing():
        assert torch.compile(lambda x: summed(x), backend="eager", fullgraph=True)(x) == summed(x)
    amp.restore()
"""


@pytest.mark.parametrize("wrappers", [pytest.param("torch", marks=pytest.mark.slow), "cpp"])
def test_methods_are_known_though_wrappers_stood_there_first(wrappers):
    warnings = ["-W", "error", "-W", "ignore:Guards may run slower on Python 3.13.0"]
    done = python(*warnings, "-c", GONE, env=environment(AMP_PATCH_BACKEND=wrappers))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", [*dynamo.NEVER_TRACED])
def test_each_module_that_dynamo_skips_exists(name):
    """It takes any name: what has moved would be traced again, without a word."""
    assert importlib.util.find_spec(f"amp_patch.{name}") is not None


REGISTERED = """
import importlib, torch
from amp_patch.casts import dynamo
if ATTACHED:
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    from amp_patch import amp
    amp.initialize(torch.nn.Linear(2, 2), verbosity=0)
    assert dynamo._attached
import amp_patch.diagnose.recording.recorder as recorder
if not ATTACHED:
    import torch._dynamo
    from amp_patch import amp
    amp.initialize(torch.nn.Linear(2, 2), verbosity=0)
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert dynamo._attached
from torch._dynamo import trace_rules
assert trace_rules.check_file(recorder.__file__).skipped
import amp_patch.model.forward as forward
assert not trace_rules.check_file(forward.__file__).skipped
"""


@pytest.mark.parametrize("attached", [True, False])
def test_a_package_registers_itself_before_or_after_dynamo_is_hooked(attached):
    done = python("-c", REGISTERED.replace("ATTACHED", str(attached)), env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


UNKNOWN = """
import logging, torch
from torch import nn
from amp_patch import amp
from amp_patch.casts import dynamo
said = []
logging.getLogger("amp_patch").addFilter(lambda record: said.append(record.getMessage()))
if WHEN == "importing":
    dynamo._USED += ("torch._dynamo.guards:no_such_name",)
else:
    def fail(tx):
        tx.no_such_name
    dynamo._guard = fail
late = nn.Linear(6, 6)
model = amp.initialize(nn.Linear(6, 6), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
import torch._dynamo
x, w = torch.randn(4, 6), torch.randn(6, 6)
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x).float(), model(x).float(), rtol=2e-2, atol=2e-2)
assert model(x).dtype is torch.nn.functional.linear(x, w).dtype is (x @ w).dtype is torch.bfloat16
(warning,) = [text for text in said if "compiler of torch" in text]
assert torch.__version__ in warning and "no_such_name" in warning, warning
"""


@pytest.mark.parametrize("when", [pytest.param("importing", marks=pytest.mark.slow), "tracing"])
def test_a_compiler_that_is_not_known_is_left_alone_with_one_warning(when):
    done = python("-c", f"WHEN = {when!r}\n{UNKNOWN}", env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["forward", "sample"])
def test_a_method_that_the_compiler_has_disabled_has_its_casts_when_it_is_compiled(name, fresh_compiler):
    class Model(nn.Linear):
        forward = torch.compiler.disable(nn.Linear.forward)
        sample = torch.compiler.disable(lambda self, inputs: nn.functional.linear(inputs, self.weight))

    model = Model(2, 2)
    model = amp.initialize(model, opt_level="O2", methods=("sample",), cast_model_outputs=torch.float64, verbosity=0)
    method = getattr(model, name)
    assert not hasattr(method, "_torchdynamo_orig_callable")  # which torch 2.6 and 2.8 would compile in its place
    with torch.no_grad():
        assert torch.compile(method, backend="eager")(torch.ones(1, 2)).dtype is torch.float64
