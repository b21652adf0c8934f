"""One training, stepped three ways: in one pass, in one pass after gradients were read, by the optimizer's own step."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import training
from torch import Tensor, nn

from amp_patch import amp, multi_tensor
from amp_patch.optimizers import FusedAdam, FusedSGD
from amp_patch.optimizers.common import FusedOptimizer
from amp_patch.training.stash import known_stash
from amp_patch.training.step import WHOLE
from amp_patch.ways import one_pass, portions

HALF = {"O2": torch.float16, "O5": torch.bfloat16}
both_levels = pytest.mark.parametrize("level", HALF)
casting_levels = pytest.mark.parametrize("level", [*HALF, "O1", "O4"])


class Recipe(NamedTuple):
    make: type[torch.optim.Optimizer]
    options: dict[str, Any]

    def __call__(self, params: Any, **more: Any) -> Any:
        options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.options.items()}
        if issubclass(self.make, FusedOptimizer):
            more.pop("fused", None)
        return self.make(params, **options | more)


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
RECIPES = {
    "SGD": Recipe(SGD, {"lr": 0.05}),
    "SGD, Nesterov": Recipe(SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD, dampening": Recipe(SGD, {"lr": torch.tensor(0.05), "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "Adam": Recipe(ADAM, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adam, amsgrad": Recipe(ADAM, {"lr": torch.tensor(1e-2), "amsgrad": True, "maximize": True}),
    "AdamW": Recipe(ADAMW, {"lr": 1e-2, "weight_decay": 0.1}),
    "FusedAdam": Recipe(FusedAdam, {"lr": 1e-2, "weight_decay": 0.01, "adam_w_mode": False}),
    "FusedAdam, AdamW": Recipe(FusedAdam, {"lr": torch.tensor(1e-2), "bias_correction": False, "eps": 1e-3}),
    "FusedSGD": Recipe(FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
_SOME = ("SGD, Nesterov", "AdamW", "FusedAdam")
ONE_OF_EACH = pytest.mark.parametrize("recipe", [RECIPES[name] for name in _SOME], ids=_SOME)


def spied_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the kernels has from now on; it hides nothing from them."""
    calls: list[int] = []

    def spied(kernel: Any) -> Any:
        def call(grads: Any, *args: Any, **options: Any) -> None:
            kernel(grads, *args, **options)
            calls.append(len(grads))

        return call

    for name in ("multi_tensor_adam", "multi_tensor_sgd"):
        monkeypatch.setattr(multi_tensor, name, spied(getattr(multi_tensor, name)))
    return calls


class OnePass:
    """A step in one pass."""

    options: ClassVar[dict[str, Any]] = {}

    def before_step(self, optimizer: Any) -> None:
        pass


class Eager(OnePass):
    """torch's own fused step on FP32 gradients that were made at the end of the body."""

    options: ClassVar[dict[str, Any]] = {"fused": True}


class Unfused(Eager):
    """torch's step of one tensor after another."""

    options: ClassVar[dict[str, Any]] = {}


class LookedAt(OnePass):
    """A step in one pass after every gradient was read, and so made FP32."""

    def before_step(self, optimizer: Any) -> None:
        assert all(p.grad is None or p.grad.dtype is torch.float32 for p in amp.master_params(optimizer))


class LateNet(nn.Module):
    """A model with low-precision layers, a layer that stays FP32, and a layer that is added to the optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 5, bias=False)
        self.late = nn.Linear(11, 11)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        return self.last(hidden + self.late(hidden))


def start_recipe(level: str, recipe: Recipe, way: OnePass, **options: Any) -> tuple[LateNet, Any]:
    model = LateNet()
    early = [{"params": [*model.first.parameters(), *model.norm.parameters()]}]
    early.append({"params": list(model.last.parameters()), "lr": recipe.options["lr"] * 0.5})
    if level in HALF:
        options["keep_fp32"] = nn.LayerNorm
    return start_with(level, way, model, recipe(early, **way.options), **options)


def start_with(level: str, way: OnePass, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    if level in ("O1", "O2"):
        options.setdefault("loss_scale", 128.0)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(way, Eager):
            patch.setattr(one_pass.InOnePass, "knows", lambda *_: False)
            patch.setattr(portions.InPortions, "knows", lambda *_: False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    if isinstance(way, Eager) and level not in HALF:
        known_stash(optimizer).neighbours.strategy = WHOLE
    return model, optimizer


def loss_of(model: nn.Module, optimizer: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(6, 7, generator=generator), torch.randint(5, (6,), generator=generator)
    loss = nn.functional.cross_entropy(model(inputs).float(), targets)
    return -loss if optimizer.param_groups[0].get("maximize") else loss


def iterate(model: nn.Module, optimizer: Any, step: int, factor: float = 1.0) -> float:
    loss = loss_of(model, optimizer, step)
    training.backward(loss * factor, optimizer)
    return loss.item()


def trained(
    level: str, recipe: Recipe, steps: int = 3, way: OnePass | None = None, **options: Any
) -> tuple[LateNet, Any]:
    model, optimizer = start_recipe(level, recipe, way or OnePass(), **options)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any, steps: range = range(3, 6)) -> None:
    for step in steps:
        optimizer.zero_grad()
        iterate(model, optimizer, step)
        optimizer.step()


def ends(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    return list(model.parameters()), list(amp.master_params(optimizer)), optimizer.state_dict()["state"]


@torch.no_grad()
def rounds_as_torch(device: str = "cpu") -> bool:
    """Tell by three small steps whether this torch's fused Adam on `device` rounds as amp_patch's kernel does.

    On CUDA it does not: torch decays by `param -= lr * weight_decay * param`, and nvcc chooses which products it fuses.
    """
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([torch.full([77], value, device=device) for value in (0.3, 0.0, 0.0)] for _ in range(2))
    counts = [torch.zeros((), device=device) for _ in range(2)]
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    for _ in range(3):
        grad = torch.randn(77, generator=generator).to(device)
        (p, m, v), (q, n, w) = ours, theirs
        multi_tensor.multi_tensor_adam([grad], [p], [m], [v], None, [counts[0]], **options, decoupled=True)
        counts[1].add_(1)
        torch._fused_adamw_([q], [grad], [n], [w], [], [counts[1]], **options, amsgrad=False, maximize=False)
    return all(map(torch.equal, ours, theirs))


def close(ours: tuple[LateNet, Any], theirs: tuple[LateNet, Any]) -> None:
    """Masters, weights and states are those of other formulas for the same step, and there were as many steps."""
    torch.testing.assert_close(ends(*ours)[1:], ends(*theirs)[1:], rtol=1e-4, atol=1e-6)
    half = torch.finfo(ours[0].last.weight.dtype).eps
    torch.testing.assert_close(ends(*ours)[0], ends(*theirs)[0], rtol=half, atol=1e-6)
    counts = [[s["step"] for s in (*o.state.values(), *o.param_groups) if "step" in s] for _, o in (ours, theirs)]
    assert counts[0] == counts[1]
