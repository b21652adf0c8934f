"""The types of amp_patch for editors and type checkers: mypy and pyright check a script that is also run."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

import amp_patch
from amp_patch.policy import OPT_LEVELS, OptLevel
from amp_patch.training.arguments import Keywords

pytestmark = pytest.mark.program

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from typing_extensions import assert_type

import amp_patch
import amp_patch as as_a_whole
from amp_patch import amp
from amp_patch.amp import GradScaler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def make() -> tuple[Net, SGD]:
    net = Net()
    return net, SGD(net.parameters(), lr=0.5)


# Its own type for each.
net, sgd = make()
assert_type(amp.initialize(net), Net)
assert_type(amp.initialize(net, sgd, opt_level="O0"), tuple[Net, SGD])
assert_type(as_a_whole.initialize(net, sgd, verbosity=0), tuple[Net, SGD])
assert_type(amp.amp.initialize(net, sgd, enabled=False), tuple[Net, SGD])
assert_type(amp.initialize(net, optimizers=None, opt_level="O0"), Net)
net, sgd = amp.initialize(net, sgd, opt_level="O2", loss_scale="dynamic", keep_fp32=["layer"], cpu_half="native")
model: nn.Module
optimizer: torch.optim.Optimizer
model, optimizer = amp.initialize(net, sgd, opt_level="O5", master_weights="split", dtype=torch.bfloat16)
model, optimizer = amp.initialize(net, sgd, opt_level="O5", master_weights="stochastic")
model, optimizer = amp.initialize(net, sgd, opt_level="O5+split+8bit")

# Lists for lists, and for tuples.
other, its = make()
assert_type(amp.initialize([net, other]), list[Net])
assert_type(amp.initialize([net, other], [sgd, its]), tuple[list[Net], list[SGD]])
assert_type(amp.initialize((net, other), (sgd, its), num_losses=2), tuple[tuple[Net, Net], tuple[SGD, SGD]])
assert_type(amp.initialize(net, [sgd]), tuple[Net, list[SGD]])
assert_type(amp.initialize([net], sgd), tuple[list[Net], SGD])
models, optimizers = amp.initialize([net, nn.Linear(1, 1)], [sgd, Adam(other.parameters())])
nets: list[nn.Module] = [*models]
both: list[Optimizer] = [*optimizers]


# What is known later: strings from a command line, an optimizer that there may be none of, anything.
def later(level: str, some: Optimizer | None, anything: Any) -> None:
    assert_type(amp.initialize(net, some, opt_level=level), tuple[Net, Optimizer] | Net)
    amp.initialize(anything, anything, opt_level=level, loss_scale="128.0")
    amp.initialize(torch.compile(net), sgd, opt_level=level)


parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--keep-batchnorm-fp32", default=None)
args = parser.parse_args([])
amp.initialize(net, sgd, opt_level=args.opt_level, keep_batchnorm_fp32=args.keep_batchnorm_fp32)


class Lookahead:
    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    def step(self) -> None:
        self.optimizer.step()


wrapped = Lookahead(sgd)
assert_type(amp.initialize(net, wrapped, opt_level="O1"), tuple[Net, Lookahead])

# The loop.
with amp.scale_loss(net(torch.ones(3, 2)).sum(), sgd) as scaled_loss:
    assert_type(scaled_loss, Tensor)
    scaled_loss.backward()  # type: ignore[no-untyped-call]
with amp.scale_loss(net(torch.ones(3, 2)).sum(), [sgd], loss_id=0) as scaled_loss:
    assert_type(scaled_loss, Tensor)
torch.nn.utils.clip_grad_norm_(amp.master_params(sgd), 1.0)
sgd.step()
assert_type(amp.master_params(wrapped), Iterator[Tensor])
assert_type(amp.loss_scale(sgd), Tensor)
amp.load_state_dict(amp.state_dict(sgd), sgd)
assert_type(amp.fp32_copy(net), Net)
with amp.record() as run:
    amp.log(held_out_loss=0.5)
assert_type(run.loss, list[float])
assert_type(amp_patch.graph.Graph.is_compiled.__doc__, str | None)

# Torch's own names.
scaler = GradScaler("cpu", init_scale=2.0)
assert_type(scaler.scale(torch.ones(2)), Tensor)
assert_type(scaler.scale([torch.ones(2)]), list[Tensor])
with amp.autocast("cpu", dtype=torch.bfloat16):
    net(torch.ones(3, 2))


@amp.autocast("cpu")
def decorated(x: Tensor) -> Tensor:
    return x


@amp.float_function
def in_fp32(x: Tensor) -> Tensor:
    return x


same: Callable[[Tensor], Tensor] = decorated
assert_type(decorated(torch.ones(1)), Tensor)
assert_type(in_fp32(torch.ones(1)), Tensor)


class Double(torch.autograd.Function):
    @staticmethod
    @amp.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @amp.custom_bwd
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


assert_type(Double.forward(None, torch.ones(1)), Tensor)


def slips() -> None:
    amp.initialize(net, sgd, opt_levl="O1")  # wrong: no such argument
    as_a_whole.initialize(net, sgd, opt_levl="O1")  # wrong: no such argument
    amp.initialize(net, sgd, opt_level=1)  # wrong: the level is no number
    amp.initialize(net, sgd, opt_level="O2", cpu_half="emulated")  # wrong: none of the words
    amp.initialize(net, sgd, opt_level="O2", master_weights="spilt")  # wrong: none of the words
    amp.initialize(net, sgd, opt_level="O2", keep_batchnorm_fp32="yes")  # wrong: none of the words
    amp.initialize(net, sgd, opt_level="O2", optimizer_state="8 bit")  # wrong: none of the words
    amp.initialize(net, sgd, opt_level="O2", loss_scale=[])  # wrong: no number
    amp.initialize(net, methods="encode")  # wrong: no tuple
    amp.initialize(net, sgd, "O1")  # wrong: the third argument is `enabled`
    amp.initialize(net, net.parameters())  # wrong: no optimizer
    amp.initialize(sgd, net)  # wrong: the other way round
    amp.initialize(net, sgd).train()  # wrong: a pair has no such method
    amp.initalize(net, sgd)  # wrong: no such name
    as_a_whole.initalize(net, sgd)  # wrong: no such name
    amp.scale_loss(1.0, sgd)  # wrong: the loss is no tensor
    amp.scale_loss(torch.ones(()), net)  # wrong: no optimizer
    amp.scale_loss(torch.ones(()), sgd, los_id=1)  # wrong: no such argument
    with amp.scale_loss(torch.ones(()), sgd) as scaled:
        scaled.backwards()  # wrong: a tensor has no such method
    decorated("a")  # wrong: the function takes a tensor
"""

COMPLETE = "from amp_patch import amp\n" + "".join(f"reveal_type(amp.{name})\n" for name in amp_patch.__all__)


def mypy_says(folder: Path) -> str:
    # With a cache of its own: with that of `make lint`, whose options are others, each would undo the other's.
    cache = ROOT / ".mypy_cache" / "of_users"
    scripts = [str(path) for path in sorted(folder.glob("*.py"))]
    return check(["mypy", "--strict", "--cache-dir", str(cache), *scripts], folder)


def pyright_says(folder: Path) -> str:
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed; `make lint` installs it with the other tools, by pip alone")
    settings = folder / "pyrightconfig.json"
    settings.write_text('{"typeCheckingMode": "standard", "enableTypeIgnoreComments": false}')
    return check(["pyright", "--pythonpath", sys.executable, "--project", str(settings)], folder)


def check(command: list[str], folder: Path) -> str:
    """What a type checker prints of the scripts in a folder, to which amp_patch is an installed package."""
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    result = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


# In a fresh clone mypy reads all of torch first.
@pytest.fixture(
    scope="module", params=[pytest.param(mypy_says, marks=pytest.mark.slow), pyright_says], ids=["mypy", "pyright"]
)
def said(request, tmp_path_factory):
    """What a type checker says of both scripts, in one run."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "complete.py").write_text(COMPLETE)
    return request.param(folder)


def test_a_users_slips_are_errors_and_nothing_else_is(said):
    wrong = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# wrong" in line}
    errors = [line for line in said.splitlines() if re.search(r"script\.py:\d+.*\berror\b", line)]
    assert {int(re.search(r":(\d+)", line)[1]) for line in errors} == wrong, "\n".join(errors)


def test_no_public_name_is_any(said):
    types = dict(re.findall(r"complete\.py:(\d+)\S* .*?(?:Revealed type is| is) \"(.*)\"", said))
    assert [int(line) for line in types] == list(range(2, len(amp_patch.__all__) + 2)), said
    assert not re.search(r"complete\.py:\d+.*\berror\b", said), said
    vague = re.compile(r"Any|Unknown|def \(\*Any, \*\*Any\) -> Any|\(\.\.\.\) -> Any|.* -> Any")
    assert [type for type in types.values() if vague.fullmatch(type)] == []


def test_the_correct_half_of_the_script_runs():
    good = SCRIPT.partition("def slips()")[0]
    subprocess.run([sys.executable, "-W", "error", "-c", good], check=True, env={"PYTHONPATH": str(ROOT)})


def test_the_overloads_of_initialize_take_its_own_arguments():
    own = {name: parameter.annotation for name, parameter in inspect.signature(amp_patch.initialize).parameters.items()}
    of_overloads = {name: known.__forward_arg__ for name, known in Keywords.__annotations__.items()}
    of_overloads = {name: annotation.replace(" | Else", "") for name, annotation in of_overloads.items()}
    assert {name: known for name, known in own.items() if name in of_overloads} == of_overloads
    assert list(own)[:4] == ["models", "optimizers", "enabled", "opt_level"]
    assert set(own) == {"models", "optimizers", "enabled", "opt_level", *of_overloads}


def test_the_levels_that_an_editor_offers_are_those_that_there_are():
    assert get_args(OptLevel) == tuple(OPT_LEVELS)
