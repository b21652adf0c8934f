"""Every recipe that PyTorch and OneFlow document for mixed precision: with amp_patch it trains as with torch.amp.

The same code of a recipe runs with torch's `amp` and with ours. In BF16 both do the same arithmetic, save in `threads`
(torch's cache of cast weights is one for all threads, and does not give the same bits twice), so the losses are the
same bits. In FP16 they are not: on a CPU torch's kernels compute in FP16, ours in FP32, rounded once.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from paths import EXAMPLES
from python_forks import python
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import LEVELS, convnet, images, skipped

from amp_patch import amp
from amp_patch.casts.cpu_half import has_arithmetic

pytestmark = pytest.mark.program

pytest.importorskip("sklearn", reason="the recipes' digits come with scikit-learn")

RECIPES = EXAMPLES / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem != "common")
# Of each recipe the choices that are not its default.
CHOICES = [(name, {}) for name in NAMES] + [("checkpointing", {"reentrant": True})]


@functools.cache
def load(name: str) -> Any:
    sys.path.insert(0, str(RECIPES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(RECIPES))


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Remove the recipes' modules and path after these tests, because their names are common."""
    before, path = set(sys.modules), list(sys.path)
    yield
    load.cache_clear()
    torchs.cache_clear()
    sys.path[:] = path
    for name in {"common", "data", *NAMES} - before:
        sys.modules.pop(name, None)


def run_of(device: str, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    return load("common").Run(device, dtype, seed)


# In place of torch.amp: the same loop in FP32.
FP32 = SimpleNamespace(
    autocast=lambda device, dtype: torch.autocast(device, enabled=False),
    GradScaler=lambda device: torch.amp.GradScaler(device, enabled=False),
    custom_fwd=torch.amp.custom_fwd,
    custom_bwd=torch.amp.custom_bwd,
)


@functools.cache
def torchs(name: str, device: str, dtype: torch.dtype, seed: int = 0, **choice: bool) -> list[float]:
    """The losses of the original, in a process without casts of ours; without amp if `dtype` is FP32."""
    amp.restore()
    torch_amp = FP32 if dtype is torch.float32 else torch.amp
    return load(name).native(torch_amp, run_of(device, dtype, seed), **choice)


def end(losses: list[float]) -> float:
    return statistics.fmean(losses[-5:])


def assert_trains_like_torchs(name: str, losses: list[float], device: str, dtype: torch.dtype, **choice: bool) -> None:
    original = torchs(name, device, dtype, **choice)
    assert len(losses) == len(original)
    # Three seeds end 0.16 to 0.66 apart (`spread`); what separates us from the original is less than a tenth of that.
    assert abs(end(losses) - end(original)) < 0.02


CASES = [pytest.param(name, choice, id="-".join((name, *choice))) for name, choice in CHOICES]
every_case = pytest.mark.parametrize(("name", "choice"), CASES)


@pytest.mark.parametrize("device", DEVICES)
@every_case
def test_the_same_code_with_our_amp_gives_the_bits_of_torchs_in_bf16(name, choice, device):
    losses = load(name).native(amp, run_of(device, torch.bfloat16), **choice)
    if name == "threads" or device != "cpu" or not has_arithmetic(torch.bfloat16):  # emulated: sums of another order
        assert_trains_like_torchs(name, losses, device, torch.bfloat16, **choice)
    else:
        assert losses == torchs(name, device, torch.bfloat16, **choice)


@pytest.mark.parametrize("device", DEVICES)
@crossed({"name, choice": CASES, "level": LEVELS}, meet=1)
def test_every_opt_level_trains_like_torchs_autocast(name, choice, level, device):
    """O3 too: twenty steps of FP16 weights are not yet lost in rounding.

    O0 trains like torch in FP32. On a GPU dropout drops other numbers in FP32 than in FP16.
    """
    dtype = {"O0": torch.float32, "O4": torch.bfloat16, "O5": torch.bfloat16}.get(level, torch.float16)
    losses = load(name).opt_level(level, run_of(device), **choice)
    assert_trains_like_torchs(name, losses, device, dtype, **choice)
    if level == "O0" and device == "cpu":
        assert losses == torchs(name, device, dtype, **choice)
    if level == "O4" and name != "threads" and device == "cpu" and has_arithmetic(torch.bfloat16):
        # The casts of torch's BF16 autocast; its scale of 2**16 and ours of 1 change no bit.
        assert losses == torchs(name, device, dtype, **choice)


def losses_of(form: str, name: str, run: Any, **choice: bool) -> list[float]:
    """The losses of a recipe with our `amp`: of its native form, or at a level."""
    return load(name).native(amp, run, **choice) if form == "native" else load(name).opt_level(form, run, **choice)


@pytest.mark.parametrize("form", ["native", "O2", "O4"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(form):
    run = run_of("cpu", torch.float16 if form == "native" else None)
    assert losses_of(form, "resume", run, stop=True) == losses_of(form, "resume", run, stop=False)


def test_a_recipe_prints_its_losses(tmp_path):
    """As a user runs it, from anywhere."""
    command = ["-W", "error", RECIPES / "checkpointing.py", "--form", "native"]
    options = ["--device", "cpu", "--dtype", "bfloat16", "--steps", "3", "--reentrant"]
    done = python(*command, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    run = load("common").Run("cpu", torch.bfloat16, steps=3)
    losses = load("checkpointing").native(amp, run, reentrant=True)
    assert done.stdout == "".join(f"step {i:3}  loss {loss:.4f}\n" for i, loss in enumerate(losses, 1))


def test_each_recipe_is_in_the_readme():
    table = (RECIPES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in table for name in NAMES)


# ---------------------------------------------------------------------------------------------------------------------
# Gradient penalties: gradients that torch.autograd.grad returns are the user's to scale and unscale.


def penalized(model: nn.Module, scale: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cross entropy and the squared norm of its gradients, in the model's double backward."""
    inputs, targets = images(0)
    loss = nn.functional.cross_entropy(model(inputs.to(dtype)), targets)
    scaled = torch.autograd.grad(loss * scale, list(model.parameters()), create_graph=True)
    norm = torch.stack([(g.to(torch.promote_types(g.dtype, torch.float32)) / scale).square().sum() for g in scaled])
    return loss + 0.1 * norm.sum()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, inputs, use_reentrant=False)  # reentrant has no autograd.grad, in torch itself


@crossed({"level": LEVELS, "checkpointed": [False, True]}, meet=1)
def test_double_backward_at_every_level(level, checkpointed):
    """Through convolutions, a batch norm and a linear layer; against the same in FP64, without amp."""
    exact = convnet().double()
    wanted = penalized(exact, 1.0, torch.float64)
    wanted.backward()

    model = Checkpointed(convnet()) if checkpointed else convnet()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), opt_level=level, verbosity=0)
    for _ in range(4):  # 2**16 may be too much for the FP16 of the double backward: the scale is found by trial
        optimizer.zero_grad()
        loss = penalized(model, amp.loss_scale(optimizer))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        grads = flat([param.grad for param in amp.master_params(optimizer)])
        optimizer.step()
        if not skipped(optimizer):
            break

    eps = torch.finfo({"O0": torch.float32, "O4": torch.bfloat16, "O5": torch.bfloat16}.get(level, torch.float16)).eps
    assert loss.item() == pytest.approx(wanted.item(), rel=8 * eps)
    truth = flat([param.grad for param in exact.parameters()])
    assert (grads - truth).norm() < 8 * eps * truth.norm()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])
