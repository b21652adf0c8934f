"""The base class of the fused optimizers, and `computable`, which prepares lists of tensors for their formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.multi_tensor import checks
from amp_patch.support import device_sync, distributed

Tensors = Sequence[Tensor]
Group = dict[str, Any]
Number = float | Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for the update and the state of parameters of `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@contextmanager
def computable(written: Sequence[Tensors], read: Sequence[Tensors]) -> Iterator[tuple[list[list[Tensor]], ...]]:
    """Yield the lists in the form that torch's fused kernels require: one type, FP32 or FP64, and one memory order.

    The tensors at one index get the same strides. Without this, torch's fused kernels would combine the wrong elements
    without an error. A tensor in the required form is yielded itself, any other as a copy. When the block ends, the
    copies of `written` are rounded once into their originals. For a DTensor its local shard is yielded.

    Args:
        written: lists of floating-point tensors on one device. The first list has the parameters; `wide` of their
            type is the type of all results.
        read: more lists. All lists have one length, and the tensors at one index one shape.

    Yields:
        The lists of `written`, then the lists of `read`.
    """
    written, read = ([[distributed.local(t) for t in ts] for ts in lists] for lists in (written, read))
    taken: list[tuple[Tensor, Tensor]] = []  # (original, stand-in)

    def stand_in(t: Tensor, like: Tensor | None) -> Tensor:
        if like is None:
            if t.dtype is wide(t.dtype) and (t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t)):
                return t
            new = torch.empty_like(t, dtype=wide(t.dtype), memory_format=torch.preserve_format, requires_grad=False)
        elif t.dtype is like.dtype and t.stride() == like.stride():
            return t
        else:
            new = torch.empty_like(like, memory_format=torch.preserve_format, requires_grad=False)
        taken.append((t, new))
        return new

    params = [stand_in(t, None) for t in written[0]]
    outputs = [params, *([stand_in(t, p) for t, p in zip(ts, params, strict=True)] for ts in written[1:])]
    to_write = len(taken)
    inputs = [[stand_in(t, p) for t, p in zip(ts, params, strict=True)] for ts in read]
    _copy(taken)
    yield outputs, inputs
    _copy([(new, t) for t, new in taken[:to_write]])


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each source of the pairs (source, result) into its result; their types may differ."""
    same = [(a, b) for a, b in pairs if (a.dtype is torch.float64) == (b.dtype is torch.float64)]
    if same:
        sources, results = map(list, zip(*same, strict=True))
        multi_tensor.multi_tensor_scale(sources, results, 1.0)
    for a, b in pairs:
        if (a.dtype is torch.float64) != (b.dtype is torch.float64):
            b.copy_(a)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step with grad mode on, and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def descend(params: list[Tensor], updates: list[Tensor], lr: Number) -> None:
    """Compute `params -= lr * updates` in place; the updates may be overwritten."""
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, lr.to(params[0]))
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-lr)


def bias_corrections(betas: tuple[float, float], step: int, on: bool) -> tuple[float, float]:
    """Return the divisors of (m, v) after `step` steps: `1 - beta ** step` for each of `betas`; (1, 1) if not `on`."""
    return (1 - betas[0] ** step, 1 - betas[1] ** step) if on else (1.0, 1.0)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers.

    Parameters may be float32, float16, bfloat16 and float64, mixed in a group, on several devices. Arithmetic and state
    are FP32 (FP64 for float64). Parameters without a gradient are left alone. If no parameter has a gradient, a step
    changes nothing, the count of steps included. amp relies on this to skip steps.
    """

    settings: tuple[str, ...] = ()  # the arguments of the constructor that are entries of a group; (): all of `given`
    # Attributes to add to pickles and copies: torch's `Optimizer.__getstate__` has only the groups and the state.
    pickled_settings: tuple[str, ...] = ("set_grad_none",)
    norms_of_tensors = False  # whether updates depend on norms of whole tensors; if so, DTensors are refused
    computes_in_fp32 = True  # read by `initialize`, which then does not warn of an eps that is 0 in low precision
    counts_on_host = False  # whether updates depend on a step count on the host; if so, CUDA graph capture is refused

    def __init__(self, params: Any, given: dict[str, Any], set_grad_none: bool) -> None:
        name, defaults = type(self).__name__, {setting: given[setting] for setting in self.settings or given}
        if given.get("amsgrad"):
            raise RuntimeError(f"{name}: amsgrad=True is not supported: use torch.optim.AdamW(amsgrad=True)")
        lr, betas = defaults["lr"], defaults.get("betas", ())
        for which in ("eps", "weight_decay", "momentum"):
            if defaults.get(which, 0) < 0:
                raise ValueError(f"{name}: {which}={defaults[which]}, a number that is not negative is wanted")
        # `lr` may be torch's marker `required`: then each group must have an `lr`.
        if isinstance(lr, int | float | Tensor) and lr < 0:
            raise ValueError(f"{name}: lr={lr}, a number that is not negative is wanted")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{name}: betas={betas}, two numbers from 0 up to but not including 1 are wanted")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.pickled_settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state dict of torch's AdamW lacks keys of this class, such as bias_correction: they get the defaults.
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key != "differentiable":  # a key that torch's `__setstate__` has added to the defaults
                    group.setdefault(key, value)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients as torch does. Without an argument, `set_grad_none` of the constructor decides how."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; no sync with the device.

        Args:
            closure: called first; evaluates the loss and its gradients.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: a gradient is sparse. Nothing was changed.
            TypeError: a parameter has another type than those above, or is a DTensor although the update needs norms
                of whole tensors. Nothing was changed.
            RuntimeError: a CUDA graph is being captured, and steps are counted on the host. Nothing was changed.
        """
        loss = loss_of(closure)
        work = [(group, self._batches(index, group)) for index, group in enumerate(self.param_groups)]
        if any(batches for _, batches in work):
            if self.counts_on_host and device_sync.is_capturing():
                name = type(self).__name__
                raise RuntimeError(
                    f"{name}.step: a CUDA graph is being captured, and this {name} counts its steps on the host: each "
                    "replay would be the same step; choose one that counts on the device, "
                    "torch.optim.AdamW(..., fused=True, capturable=True), or none, FusedSGD"
                )
            self._update(work)
        return loss

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        """Step all groups. `work` has (group, result of `_batches` for the group)."""
        raise NotImplementedError

    def _batches(self, index: int, group: Group) -> list[list[Tensor]]:
        """Return the group's parameters that have gradients, in lists of one device and one type of the update.

        Raises the errors of `step`.
        """
        batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for position, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            which = f"{type(self).__name__}.step: parameter {position} of group {index}"
            if param.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{which} has a sparse gradient ({param.grad.layout}), a dense one is wanted: "
                    f"{type(self).__name__} does not support sparse gradients, use torch.optim.SparseAdam for such "
                    "parameters, or a module that gives dense ones (nn.Embedding(sparse=False))"
                )
            if self.norms_of_tensors and distributed.is_dtensor(param):
                raise TypeError(
                    f"{which} is sharded, and {type(self).__name__} takes norms of whole tensors, of which this "
                    "process holds a part: use FusedAdam, FusedSGD or FusedAdagrad, or torch.optim.AdamW"
                )
            if param.dtype not in checks.DTYPES:
                wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in checks.DTYPES)
                raise TypeError(f"{which} is {param.dtype}, one of {wanted} is wanted: give it another optimizer")
            batches.setdefault((param.device, wide(param.dtype)), []).append(param)
        return list(batches.values())

    def averages(self, params: Iterable[Tensor], name: str) -> list[Tensor]:
        """Return the tensors called `name` in the parameters' states. A missing one is made, with zeros."""
        found = []
        for param in params:
            state = self.state[param]
            if state.get(name) is None:
                state[name] = torch.zeros_like(
                    param, dtype=wide(param.dtype), memory_format=torch.preserve_format, requires_grad=False
                )
            found.append(state[name])
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the state of low-precision parameters in FP32.

        torch rounds this state to the parameters' type, so the exact values are copied again afterwards.
        """
        loaded: dict[str, Any] = {}  # the state dict that torch loads, after users' pre-hooks, which may replace it
        handle = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        for key, param in zip(ids, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            for name, value in loaded["state"].get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and param.dtype is not wide(param.dtype):
                    self.state[param][name] = value.to(device=param.device, dtype=wide(param.dtype))


def gradients(params: Tensors) -> list[Tensor]:
    """Return the gradients of `params`, all of which have one."""
    return [param.grad for param in params if param.grad is not None]


def count(group: Group) -> int:
    """Add 1 to the group's count of steps; return it. The first step has number 1."""
    group["step"] = int(group.get("step", 0)) + 1
    return group["step"]
