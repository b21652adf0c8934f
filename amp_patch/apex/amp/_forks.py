"""Arguments of `initialize` and `init` that two forks of Apex, ROCm's and Huawei's, have added.

Names, defaults and meaning are those of ROCm/apex (apex/amp/frontend.py) and Ascend/apex (patch/npu.patch).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from amp_patch.apex.amp._amp_state import maybe_print
from amp_patch.apex.parallel.distributed import flat_dist_call
from amp_patch.frontend import master_params
from amp_patch.masters.masters import master_of, publish
from amp_patch.policy import LOW_PRECISION, boolean, scale_number
from amp_patch.support.blocks import block
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.stash import stash_of

_DTYPES: dict[str, torch.dtype | None] = {
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "None": None,
}

# Huawei's switches with their defaults.
SWITCHES: dict[str, Any] = {
    "combine_grad": None,
    "combine_ddp": None,
    "ddp_replica_count": 4,
    "user_cast_preferred": None,
    "check_combined_tensors": None,
}

_DEEPSPEED = "deepspeed.runtime.engine"

_WITHOUT_EFFECT = {
    "combine_grad": "gradients are unscaled in one pass as they are",
    "ddp_replica_count": "gradients are averaged in one piece per type",
    "user_cast_preferred": "a registered function always has the registered rule alone",
    "check_combined_tensors": "no tensors are combined",
}


def low_precision(name: str, value: Any) -> torch.dtype | None:
    """Return a low-precision type, given as a dtype or its name, or None.

    Raises:
        ValueError: any other value. The message begins with `name`.
    """
    found = _DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value
    if found is not None and found not in LOW_PRECISION:
        raise ValueError(f"{name} is {value!r}; wanted {' or '.join(map(str, LOW_PRECISION))}, or None")
    return found


def movement(init_scale: Any, growth_factor: Any, backoff_factor: Any, window: Any) -> dict[str, Any]:
    """Return {field of `Policy`: value} for a dynamic loss scale, from Huawei's four arguments.

    Raises:
        ValueError: an argument is out of its range.
    """
    growth = _number(growth_factor)
    if not 1 <= growth < math.inf:
        raise ValueError(f"initialize: scale_growth_factor is {growth_factor!r}; wanted a number from 1 up")
    backoff = _number(backoff_factor)
    if not 0 < backoff < 1:
        raise ValueError(f"initialize: scale_backoff_factor is {backoff_factor!r}; wanted a number between 0 and 1")
    if isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 2**31:
        raise ValueError(f"initialize: scale_window is {window!r}; wanted a positive integer below 2**31")
    return {
        "init_scale": scale_number("initialize: dynamic_init_scale", init_scale),
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": window,
    }


def _number(value: Any) -> float:
    """Return the value as a float; if it is no number NaN, which is outside of every range."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def switches(arguments: dict[str, Any]) -> dict[str, Any]:
    """Check Huawei's switches among the arguments of `initialize`, and return {name of a switch: its value}.

    Only `initialize` may call this, because `_calls_initialize` looks a fixed number of frames up.

    Raises:
        TypeError, ValueError: an invalid value.
        RuntimeError: combine_ddp without a process group; or no combine_ddp, and DeepSpeed has called `initialize` in
            one of several processes.
    """
    count = arguments["ddp_replica_count"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"initialize: ddp_replica_count is {count!r}; wanted a positive integer")
    checked = {name: boolean(name, arguments[name]) for name in SWITCHES if name != "ddp_replica_count"}
    together = distributed.is_available() and distributed.is_initialized()
    several = together and distributed.get_world_size() > 1
    if several and not checked["combine_ddp"] and _calls_initialize() == _DEEPSPEED:
        # DeepSpeed averages `param.grad` after scale_loss has unscaled and checked it. One process could skip a step
        # that another makes, and at O2 the masters would not receive the average.
        raise RuntimeError(
            "initialize: DeepSpeed averages gradients over the processes too late for apex.amp; add "
            '"combine_ddp": true to "amp" in its config, by which amp averages them over all processes in scale_loss'
        )
    if checked["combine_ddp"] and not together:
        raise RuntimeError(
            "initialize: combine_ddp=True averages gradients over the processes, and there is no process group; call "
            "torch.distributed.init_process_group() first, or leave combine_ddp out"
        )
    return {**checked, "ddp_replica_count": count}


def _calls_initialize() -> str:
    """Return the name of the module that has called `initialize`, three frames up from here; "" if unknown."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = None if frame is None else frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def say_what_has_no_effect(chosen: dict[str, Any]) -> None:
    """Print, on rank 0, one line with the switches that were set and have no effect here."""
    idle = [
        f"{name}={chosen[name]!r} ({why})" for name, why in _WITHOUT_EFFECT.items() if chosen[name] != SWITCHES[name]
    ]
    if idle:
        maybe_print(f"amp_patch (apex.amp): without effect here: {'; '.join(idle)}", rank0=True)


# ---------------------------------------------------------------------------------------------------------------------
# combine_ddp: gradients averaged by amp itself, instead of by DistributedDataParallel.


@torch.no_grad()
def broadcast(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Broadcast the parameters, and their masters if any, from rank 0."""
    models, optimizers = list(models), list(optimizers)
    params = {id(p): p for model in models for p in model.parameters()}
    masters = {id(p): p for optimizer in optimizers for p in master_params(optimizer)}
    own = [p for key, p in params.items() if key not in masters and master_of(p) is None]
    flat_dist_call([*masters.values(), *own], distributed.broadcast, (0,))
    for target in _innermost(optimizers):
        if (stash := stash_of(target)) is not None:
            publish(stash.masters.links)


def averages(optimizers: Any) -> bool:
    """Tell whether the training of these optimizers has combine_ddp."""
    found: list[Any] = [stash_of(target) for target in _innermost(optimizers)]
    return any(stash is not None and getattr(stash.properties, "combine_ddp", None) for stash in found)


@block
def averaged(scaling: AbstractContextManager[Tensor], optimizers: Any) -> Generator[Tensor, None, None]:
    """Run a body of `scale_loss`; at its end replace the model's scaled gradients by their mean over the ranks.

    All ranks must do this equally often. A parameter without a gradient gets a gradient of zeros first, as with
    Huawei's combined tensors. No sync with the device.
    """
    with scaling as scaled_loss:
        yield scaled_loss
        with torch.no_grad():
            _average(_innermost(optimizers))


def _average(targets: Iterable[Any]) -> None:
    """Average the gradients of the parameters of the optimizers `targets` over the ranks, in place."""
    params = {
        id(param): param
        for target in targets
        if (stash := stash_of(target)) is not None
        for param, _ in stash.masters.pairs(target.param_groups)
        if param.requires_grad
    }
    for param in params.values():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    grads: list[Tensor] = [param.grad for param in params.values() if param.grad is not None]
    if grads:
        # The gradients are divided before they are summed over the ranks, because the sum may overflow in FP16.
        torch._foreach_div_(grads, distributed.get_world_size())
        flat_dist_call(grads, _all_reduce)


def _all_reduce(flat: Tensor) -> None:
    distributed.all_reduce(flat)


def _innermost(optimizers: Any) -> list[Any]:
    """Return the innermost optimizer of each of `optimizers`, one optimizer or a list."""
    return [innermost(optimizer) for optimizer in as_list(optimizers) if optimizer is not None]
