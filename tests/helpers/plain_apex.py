"""The baseline of the legacy programs: FP32 training with plain torch, without amp_patch.

`run(script, arguments)` runs a script of examples/legacy as it is, with an `apex` that does nothing: `amp.initialize`
hands back what it gets, `scale_loss` yields the loss, and the fused optimizers and layers are written out below in
torch's own operations, after the papers. `.cuda()` and its like are harmless on a machine without a GPU. As a program:
`python tests/helpers/plain_apex.py [--cuda] SCRIPT ARGUMENTS...`.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class FusedLAMB(torch.optim.Optimizer):
    """LAMB (arXiv:1904.00962, algorithm 2) with Apex's clipping to a global norm of `max_grad_norm` before it."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
    ):
        self.max_grad_norm = max_grad_norm
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        clip = torch.clamp(norm / self.max_grad_norm, min=1.0)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad / clip
                m.copy_(beta1 * m + (1 - beta1) * g)
                v.copy_(beta2 * v + (1 - beta2) * g * g)
                m_hat, v_hat = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = 1.0
                if group["weight_decay"] != 0:  # Apex leaves the others' learning rate alone, use_nvlamb aside
                    weight, change = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
                    ratio = weight / change if weight > 0 and change > 0 else 1.0
                p.sub_(group["lr"] * ratio * update)


class LARC:
    """Layer-wise adaptive rate (arXiv:1708.03888, section 3.3), scaling instead of clipping, around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, trust_coefficient: float, clip: bool, eps: float = 1e-8):
        assert not clip
        self.optim, self.trust_coefficient, self.eps = optimizer, trust_coefficient, eps
        self.param_groups = optimizer.param_groups
        self.zero_grad, self.state_dict = optimizer.zero_grad, optimizer.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    @torch.no_grad()
    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            decay, group["weight_decay"] = group["weight_decay"], 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, gradient = torch.norm(p), torch.norm(p.grad)
                if weight != 0 and gradient != 0:
                    rate = self.trust_coefficient * weight / (gradient + weight * decay + self.eps)
                    p.grad.add_(p, alpha=decay)
                    p.grad.mul_(rate)
        self.optim.step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay


class _Scaler:
    """The loss scale of FP32 training: whatever a script writes into it, it stays 1."""

    def __init__(self) -> None:
        self._loss_scale, self._overflow_buf = 1.0, torch.zeros(1, dtype=torch.int)

    def loss_scale(self) -> float:
        return 1.0

    def update_scale(self) -> bool:
        return bool(self._overflow_buf.item())


def _initialize(models: Any, optimizers: Any = None, **options: Any) -> Any:
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        optimizer._lazy_init_maybe_master_weights = lambda: None
        optimizer._amp_stash = SimpleNamespace()
    return models, optimizers


@contextlib.contextmanager
def _scale_loss(loss: Tensor, optimizers: Any, **options: Any) -> Iterator[Tensor]:
    yield loss


def _multi_tensor_scale(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    for source, destination in zip(*lists, strict=True):
        destination.copy_(source * factor)
        overflow[0] |= int(not destination.isfinite().all())


def _multi_tensor_l2norm(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> Any:
    return torch.cat([t.flatten() for t in lists[0]]).double().norm(), None


def _unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _ddp(model: nn.Module, delay_allreduce: bool = False) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def modules() -> dict[str, ModuleType]:
    """The stand-in: a new `apex`, `amp_C` and `apex_C`, with what the legacy programs use of them."""
    found: dict[str, ModuleType] = {}

    def module(name: str, **names: Any) -> ModuleType:
        found[name] = ModuleType(name)
        found[name].__dict__.update(names)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(found[parent], leaf, found[name])
        return found[name]

    module("apex").__path__ = []
    module(
        "apex.amp",
        initialize=_initialize,
        scale_loss=_scale_loss,
        master_params=lambda optimizer: (p for group in optimizer.param_groups for p in group["params"]),
        state_dict=dict,
        load_state_dict=lambda state: None,
        _amp_state=SimpleNamespace(loss_scalers=[_Scaler()], opt_properties=SimpleNamespace(master_weights=False)),
    )
    module("apex.fp16_utils", to_python_float=lambda t: t.item())
    module("apex.multi_tensor_apply", multi_tensor_applier=lambda op, *args: op(65536, *args))
    module("apex.normalization", FusedLayerNorm=nn.LayerNorm)
    module("apex.optimizers", FusedLAMB=FusedLAMB)
    module(
        "apex.parallel",
        DistributedDataParallel=_ddp,
        convert_syncbn_model=lambda model, process_group=None: model,
        create_syncbn_process_group=lambda group_size: None,
    )
    module("apex.parallel.LARC", LARC=LARC)
    module("amp_C", multi_tensor_scale=_multi_tensor_scale, multi_tensor_l2norm=_multi_tensor_l2norm)
    module("apex_C", unflatten=_unflatten)
    return found


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """`.cuda()` and its like do nothing, where there is no GPU: as much of it as the legacy programs say."""
    if torch.cuda.is_available():
        yield
        return
    stay = lambda self, *args, **kwargs: self  # noqa: E731
    stream = SimpleNamespace(wait_stream=lambda other: None)
    empty = torch.empty
    with contextlib.ExitStack() as stack:
        for owner in (Tensor, nn.Module, torch.UntypedStorage, torch.TypedStorage):
            stack.enter_context(mock.patch.object(owner, "cuda", stay))
        for name, value in {
            "is_available": lambda: True,
            "set_device": stay,
            "synchronize": lambda: None,
            "manual_seed_all": stay,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "IntTensor": torch.IntTensor,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # A torch that was built for CUDA pins memory where CUDA seems to be there; a loader's `pin_memory` asks for it.
        for name in ("record_stream", "pin_memory"):
            stack.enter_context(mock.patch.object(Tensor, name, stay))
        stack.enter_context(
            mock.patch.object(torch, "empty", lambda *size, device="", **kwargs: empty(*size, **kwargs))
        )
        yield


def run_script(script: str, arguments: list[str], cuda: bool = False) -> None:
    """Run the script as __main__ with these arguments, and leave the process as it was.

    `cuda`: the script takes a GPU for granted.
    """
    stand_in = modules()
    assert not sys.modules.keys() & {*stand_in, "amp_patch"}, "the baseline holds nothing of ours"
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        without_cuda() if cuda else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*pin_memory")  # asked for, and there is no GPU
        sys.modules.update(stand_in)
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            for name in stand_in:
                del sys.modules[name]


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--cuda"]
    run_script(given[0], given[1:], cuda="--cuda" in sys.argv)
