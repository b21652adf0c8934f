"""Trainings with optimizer_state="8bit", and functions that read their states."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from interrupts import send, sent_again_by_the_test
from torch import Tensor, nn
from training import iterate

from amp_patch import amp, multi_tensor, optimizers
from amp_patch.storage.coded_state import Coded

OPTIM = torch.optim

IN_ONE_PASS = ("AdamW", "AdamW, amsgrad", "SGD", "FusedAdam", "FusedSGD")  # of MAKERS; the others step in portions
MAKERS = {
    "AdamW": lambda p: OPTIM.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW, amsgrad": lambda p: OPTIM.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda p: OPTIM.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2, adam_w_mode=False),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "NAdam": lambda p: OPTIM.NAdam(p, lr=1e-2, foreach=True),
    "RMSprop": lambda p: OPTIM.RMSprop(p, lr=1e-3, momentum=0.9, foreach=False),
}
LEVELS = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1", "loss_scale": 128.0},
    "O2": {"opt_level": "O2", "loss_scale": 128.0},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
}


def net() -> nn.Sequential:
    """Two weights that are kept in codes, one with a last block that is not whole, and parameters that are small."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 131), nn.GELU(), nn.Linear(131, 48), nn.LayerNorm(48), nn.Linear(48, 5))


def start(make: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = net() if model is None else model
    wanted = {"opt_level": "O5", "optimizer_state": "8bit", "verbosity": 0} | options
    return amp.initialize(model, make(model.parameters()), **wanted)


def loss_of(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 48, generator=generator).to(next(model.parameters()).device)
    return (model(inputs).float() - inputs[:, :5].sin()).square().mean()


def go_on(model: Any, optimizer: Any, steps: range) -> list[float]:
    return iterate(optimizer, partial(loss_of, model), steps)


def coded(optimizer: Any) -> dict[str, int]:
    """Return for each name of state the number of tensors that are codes."""
    names = [name for state in optimizer.state.values() for name in kept_names(state)]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def kept_names(state: Any) -> list[str]:
    return [name for name, value in state.items() if type(getattr(value, "_local_tensor", value)) is Coded]


def state_of(optimizer: Any) -> list[Tensor]:
    """Return all tensors of the state in FP32, in the order of the parameters."""
    states = sorted(optimizer.state_dict()["state"].items())
    return [t for _, state in states for t in state.values() if isinstance(t, Tensor)]


def in_eight_bits(value: Tensor, dtype: torch.dtype) -> Tensor:
    codes = torch.empty_like(value, dtype=dtype)
    scales = torch.empty(-(-value.numel() // 256))
    multi_tensor.multi_tensor_encode([value], [codes], [scales])
    multi_tensor.multi_tensor_decode([codes], [made := torch.empty_like(value)], [scales])
    return made


def in_codes(value: Tensor) -> Tensor:
    """Return the codes of a value of an interrupted step."""
    return value if value.numel() < 4096 else in_eight_bits(value, torch.uint8 if (value >= 0).all() else torch.int8)


OURS = ("amp_patch.storage.code",)  # how the modules' names begin


def interrupt(place: int, call: Callable[[], Any]) -> int:
    """`call()`, with Ctrl-C at the line number `place` that it comes to of the files that keep state in codes.

    Returns how many lines it has come to; `place` or fewer where it was not interrupted.
    """
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not str(frame.f_globals.get("__name__")).startswith(OURS):
            return trace if event == "call" else None
        if event == "line":
            count += 1
            if count > place:
                sys.settrace(None)
                send()
        return trace

    with suppress(KeyboardInterrupt), sent_again_by_the_test():
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
    return count


def through_file(states: Any) -> Any:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file)  # weights alone: it contains no class of amp_patch
