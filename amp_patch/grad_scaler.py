"""GradScaler: `torch.amp.GradScaler` on the multi-tensor kernels, for FP16 gradients and FP32 masters too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_patch import multi_tensor
from amp_patch.casts import state as casts_state
from amp_patch.masters.grad_field import with_gradient
from amp_patch.masters.gradients import FoundInf, gather
from amp_patch.policy import scale_number
from amp_patch.support import distributed
from amp_patch.support.compiled import eager_only
from amp_patch.support.words import of_class
from amp_patch.training.innermost import innermost
from amp_patch.training.scale_loss import refuse_sharded_since
from amp_patch.training.stash import no_gradient
from amp_patch.training.step import consume
from amp_patch.training.unscale import drop
from amp_patch.watch import scaler_mixtures, slips
from amp_patch.watch.scaler_mixtures import stash_within

Outputs = TypeVar("Outputs", Tensor, list[Tensor], tuple[Tensor, ...])
_COUNT = 2**31 - 1  # the bits of a growth counter without its sign


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling with every method of `torch.amp.GradScaler`::

        scaler = amp.GradScaler()
        with amp.autocast():
            loss = loss_fn(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Differences from torch's:

    - float16 and bfloat16 gradients are unscaled, in place and with one rounding. With an optimizer of `initialize` at
      O2 the unscaled gradients are written to its FP32 masters.
    - All gradients of a device, of all dtypes, are unscaled and checked in one pass.
    - An optimizer whose parameters have no gradients is accepted.
    - `step` returns whether it stepped. If the first step is skipped, the learning-rate scheduler does not warn.
    - `min_scale` and `max_scale` bound the scale. With `hysteresis=n` the scale backs off at the n-th overflow in a
      row.
    - Gradients that another scaler has unscaled, or must unscale, or that `amp.scale_loss` made, are refused.

    Args:
        device: "cuda" or "cpu", the device of the scale. None: CUDA if it is available, else the CPU. As in torch, a
            scaler for "cuda" without CUDA warns and is disabled.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: range of the scale; positive numbers, or None for no bound.
        hysteresis: the number of overflows, without a clean step between them, after which the scale backs off.
        process_group: reduce the overflow flag of `step` over this torch.distributed group, so that its processes skip
            together, for gradients that DDP does not reduce (each process has a part of the model). This makes one
            reduction per unscaled optimizer; every process of the group must unscale or step with it.

    Raises:
        ValueError: invalid bounds or hysteresis.
        AssertionError: invalid factors, as in torch.

    Source: torch.amp.GradScaler; hysteresis as in Megatron-LM.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        process_group: Any = None,
    ) -> None:
        if isinstance(device, float | int) and not isinstance(device, bool):
            raise TypeError(
                f"GradScaler: device is {device!r}; the first argument is the device: init_scale={device!r}, or "
                f"amp_patch.cuda.amp.GradScaler({device!r})"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        lowest = None if min_scale is None else scale_number("GradScaler: min_scale", min_scale)
        highest = None if max_scale is None else scale_number("GradScaler: max_scale", max_scale)
        if lowest is not None and highest is not None and lowest > highest:
            raise ValueError(f"GradScaler: min_scale {lowest:g} is above max_scale {highest:g}")
        if isinstance(hysteresis, bool) or not isinstance(hysteresis, int) or hysteresis < 1:
            raise ValueError(f"GradScaler: hysteresis is {hysteresis!r}; wanted a positive integer")
        super().__init__(str(device), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale, self._max_scale, self._hysteresis = lowest, highest, hysteresis
        self._process_group = process_group
        self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: Tensor | None = None
        self._has_scaled = False  # whether a loss was scaled since the last update
        self._has_served = False  # whether an optimizer was unscaled or stepped
        self._loss: weakref.ref[Tensor] | None = None  # the last one that was scaled
        if self._enabled:
            scaler_mixtures.scalers.add(self)
            self._init_scale = min(max(self._init_scale, lowest or 0.0), highest or float("inf"))

    @overload
    def scale(self, outputs: Outputs) -> Outputs: ...
    @overload
    def scale(self, outputs: Iterable[Any]) -> Iterable[Any]: ...
    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the scale: a tensor, or an iterable, nested or not. Lists and tuples keep their type.

        Raises:
            TypeError: a tensor of integers or booleans, which has no gradient.
            ValueError: neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if not (outputs.is_floating_point() or outputs.is_complex()):
                raise TypeError(
                    f"GradScaler.scale: outputs holds a tensor of {outputs.dtype}; wanted floating or complex tensors, "
                    "which have gradients"
                )
            self._has_scaled = True
            if not (self._has_served or torch.compiler.is_compiling()):
                self._loss = weakref.ref(outputs)
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            # Written out here: torch.compile cannot trace torch's `scale`.
            return outputs * self._scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, str | bytes | Mapping) or not isinstance(outputs, Iterable):
            raise ValueError(
                f"GradScaler.scale: outputs must be a Tensor or an iterable of Tensors, got {of_class(outputs)}"
            )
        scaled = map(self.scale, outputs)
        if hasattr(outputs, "_fields"):  # a namedtuple
            return type(outputs)(*scaled)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    @eager_only
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer` in place and check them, once between two `update`s. No sync.

        A low-precision gradient keeps its type. With an optimizer of `initialize` at O2 the result is written to the
        FP32 masters, and `.grad` of the model's parameters reads it there.

        Raises:
            RuntimeError: called twice, or after `step`; or the gradients belong to another scaler.
            AssertionError: nothing was scaled before.
        """
        if not self._enabled:
            return
        self._has_served = True
        scaler_mixtures.refuse(self, optimizer, "unscale_")
        super().unscale_(optimizer)
        scaler_mixtures.note(self, optimizer)

    @eager_only
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` if all gradients are finite. Unscale them first if the caller has not.

        Syncs with the device once; with an optimizer that skips on the device (torch's fused ones) not at all.

        Returns:
            The return value of `optimizer.step` if it is not None. Otherwise whether the optimizer stepped: a bool, or
            for an optimizer that skips on the device a bool tensor of shape [] there, whose truth value syncs.

        Raises:
            RuntimeError: called twice, or with a closure; or the gradients belong to another scaler.
            AssertionError: nothing was scaled before.
        """
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            return True if result is None else result
        if kwargs.get("closure") is not None or any(map(callable, args)):
            raise RuntimeError(
                "GradScaler.step: a closure computes new gradients inside step(), after the check for overflow; call "
                "the closure's body first, then step() without it"
            )
        kwargs.pop("closure", None)
        self._has_served = True
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "GradScaler.step: this optimizer has stepped since the last update(); call update() first"
            )
        sharded = any(distributed.is_dtensor(p) for group in optimizer.param_groups for p in group["params"])
        # torch's fused optimizers require a DTensor as the flag for DTensors, and this flag is a plain tensor.
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False) and not sharded
        if state["stage"] is OptState.READY and (stash_within(optimizer) is not None or not on_device):
            self.unscale_(optimizer)
        if on_device:
            if state["stage"] is OptState.READY:
                scaler_mixtures.refuse(self, optimizer, "step")
                scaler_mixtures.note(self, optimizer)
            result = super().step(optimizer, *args, **kwargs)
            found = _found(state)
            stepped: Any = found[0] == 0 if found else True
            return stepped if result is None else result
        stepped = not any(found.item() for found in _found(state))
        result = optimizer.step(*args, **kwargs) if stepped else None
        # fully_shard gathers new values into the old tensor without a new version: the cache would return the old cast.
        casts_state.drop_cache()
        if not stepped and isinstance(optimizer, torch.optim.Optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined] # else the scheduler warns that it came before the first step
        state["stage"] = OptState.STEPPED
        if not stepped and (stash := stash_within(optimizer)) is not None:
            stash.step_skipped = True
            # Without this, the gradients would stay, unlike after a step that `Step` skips.
            consume(stash)
        return stepped if result is None else result

    @eager_only
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale by the overflow flags of the optimizers since the last `update`, on the device; no sync.

        Args:
            new_scale: set this scale instead: a number, or a tensor of one element that does not require grad.

        Raises:
            AssertionError: nothing was scaled before, or no optimizer was unscaled or stepped.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        self._has_scaled = False
        found = [f.to(scale.device) for s in self._per_optimizer_states.values() for f in _found(s)]
        if new_scale is not None or not (found or self._per_optimizer_states):
            # torch accepts an int, and a tensor of shape [1], and then fails on them.
            if isinstance(new_scale, Tensor) and new_scale.numel() == 1:
                new_scale = new_scale.reshape(())
            super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
            return
        if found:
            interval = self._growth_interval if self._growth_interval > 0 else _COUNT  # at 0, torch's never grows
            changes = (self._growth_factor, self._backoff_factor, interval, self._min_scale, self._max_scale)
            patience = (self._hysteresis, self._hysteresis_tracker)
            multi_tensor.update_scale(scale, growth_tracker, torch.stack(found).amax(), *changes, *patience)
        self._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state; with a hysteresis above 1 also the number of overflows until the scale falls. Syncs."""
        state = super().state_dict()
        if state and self._hysteresis > 1:
            state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's scaler."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._hold_growth()
            self._init_hysteresis_tracker = int(state_dict.get("_hysteresis_tracker", self._hysteresis))
            if self._hysteresis_tracker is not None:
                self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the interval. As in torch, a counter that is past it grows the scale only after the next overflow."""
        super().set_growth_interval(new_interval)
        self._hold_growth()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            **state,
            "_init_hysteresis_tracker": self._get_hysteresis_tracker(),
            "_hysteresis_tracker": None,
            "_loss": None,
            "_process_group": None,  # a group of this process
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._enabled:
            scaler_mixtures.scalers.add(self)

    def _hold_growth(self) -> None:
        """Set the sign of a counter past the interval: the kernel grows the scale from there on, torch only at it."""
        if self._enabled and self._growth_tracker is not None:
            count = self._growth_tracker & _COUNT
            self._growth_tracker.copy_(torch.where(count >= self._growth_interval, count | ~_COUNT, count))

    def _get_growth_tracker(self) -> int:
        return super()._get_growth_tracker() & _COUNT

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        slips.scalers.add(self)
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._hold_growth()

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        stash = stash_within(optimizer)
        if stash is None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            found = distributed.agree(gather([(p, p) for p in params], inv_scale), params)
            return self._everywhere(found, inv_scale.device)
        target = innermost(optimizer)
        refuse_sharded_since(stash.neighbours.siblings.unsharded, "GradScaler.unscale_")
        stash.masters.drop_last()
        pairs = stash.masters.of_groups(target.param_groups).distinct
        masters = [master for param, master in pairs if param is not master]
        direct = [(masters[index], masters[index]) for index in with_gradient(masters)]  # of a penalty over masters
        try:
            found = distributed.agree(gather([*direct, *pairs], inv_scale), [param for param, _ in pairs])
        except BaseException:  # some gradients may be unscaled already
            drop(pairs)
            raise
        stash.unscaled = no_gradient
        stash.route_grads()
        return self._everywhere(found, inv_scale.device)

    def _check_inf_per_device(self, optimizer: Any) -> Any:
        found = gather([(param, param) for group in optimizer.param_groups for param in group["params"]], 1.0)
        if self._scale is not None:
            found = self._everywhere(found, self._scale.device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _everywhere(self, found: FoundInf, device: torch.device) -> FoundInf:
        """Return one flag (0 or 1) for all devices, and for all processes of the group: the maximum of `found`.

        With one device and no group, return `found` itself. Without this function, torch's fused Adam would step after
        overflows on two devices: torch adds up the flags, and Adam skips only if the sum is exactly 1. Processes
        without gradients take part in the reduction too.
        """
        if self._process_group is None and len(found) < 2:
            return found
        overall = torch.zeros((), dtype=torch.float32, device=device)
        for found_inf in found.values():
            overall = torch.maximum(overall, found_inf.to(device))
        if self._process_group is not None:
            torch.distributed.all_reduce(overall, torch.distributed.ReduceOp.MAX, group=self._process_group)
        return {device: overall}


class OlderGradScaler(GradScaler):
    """`GradScaler` without the argument `device`, with the argument order of torch.cuda.amp and OneFlow.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in `GradScaler`.
        options: keyword-only arguments of `GradScaler`.
    """

    device_type: str | None = None  # the argument `device` of `GradScaler`

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        factors = (init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        super().__init__(self.device_type, *factors, **options)


def _found(state: dict[str, Any]) -> list[Tensor]:
    """Return the scaler's overflow flags for one optimizer, one flag for each device; [] if it had no gradients."""
    return list(state["found_inf_per_device"].values())
