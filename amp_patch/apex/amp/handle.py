"""`apex.amp.handle`: scale_loss, disable_casts, and the handles that switch the casts of O1."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from amp_patch.apex.amp._amp_state import _amp_state
from amp_patch.apex.amp._process_optimizer import AmpOptimizer, AmpOptimizerState
from amp_patch.apex.amp.lists import register_edits
from amp_patch.apex.amp.opt import OptimWrapper
from amp_patch.apex.amp.scaler import LossScaler
from amp_patch.casts import install, regions
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_half import emulate, resolve_cpu_half
from amp_patch.casts.thread_state import this_thread
from amp_patch.environment import LEVEL, overridden
from amp_patch.model import forward as model_forward
from amp_patch.policy import Options, Policy, resolve
from amp_patch.training import optimizer as optimizer_side
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.scale_loss import scale_loss as scale_loss_of
from amp_patch.training.stash import stash_of
from amp_patch.training.training import Dialect, Setup, Training, begin_training

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


def dialect() -> Dialect:
    """Return the dialect whose classes have Apex's private names."""
    return Dialect(LossScaler, AmpOptimizerState, AmpOptimizer, _amp_state.allow_incoming_model_not_fp32, False, True)


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Scale as `amp_patch.scale_loss` does. If `opt_properties.enabled` is False, yield `loss` itself."""
    if not _enabled(optimizers):
        return nullcontext(loss)
    return scale_loss_of(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)


class NoCastsWithin(regions.region):
    """A region of this thread without casts, also in all regions inside it, models' regions included.

    Source: Apex's `disable_casts`. (Inside `amp.disable_casts`, the forward of a training's model still casts.)
    """

    def __init__(self) -> None:
        super().__init__(None, disables_torch_autocast=True)

    def on_entry(self, entry: regions.Entry) -> None:
        """Keep all regions inside this one from casting, until `on_exit`."""
        this_thread.uncastable_entries.append(entry)

    def on_exit(self, entry: regions.Entry) -> None:
        """Undo `on_entry`."""
        if entry in this_thread.uncastable_entries:
            this_thread.uncastable_entries.remove(entry)


def disable_casts() -> regions.region:
    """Return a region without casts, also in models that are called inside: a context manager and a decorator."""
    return NoCastsWithin()


class AmpHandle:
    """A switch for the casts of one training, or of the whole process (the result of `amp.init`).

    Args:
        loss_scale: "dynamic" or a number, for optimizers that this handle wraps.
        enable_caching: stored as `has_cache`, without effect: weights are cast once per forward and `scale_loss`.
        verbose: stored as `verbose`, without effect.
        training: the training; None for the process. The level of the process is O1, or the value of
            ``AMP_PATCH_OPT_LEVEL``, O4 or O0. At O0 the handle casts and scales nothing.

    Raises:
        ValueError: ``AMP_PATCH_OPT_LEVEL`` is a level that casts a model; a process has none.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        allow_banned: bool = False,
        training: Training | None = None,
    ) -> None:
        self.has_cache, self.verbose = enable_caching, verbose
        self._training = training
        self._policy: Policy | None = None
        self._active = True
        if training is None:
            wanted = Options(loss_scale=loss_scale, allow_banned=allow_banned)
            level, wanted = overridden("O1", wanted)
            policy = resolve(level, wanted)
            if policy.cast_model_type is not None:
                raise ValueError(
                    f"amp.init: the environment variable {LEVEL} is {level!r}, which casts a model, and amp.init() is "
                    "given none; wanted O0, O1 or O4, or a script that calls amp.initialize(model, optimizer)"
                )
            self._policy = resolve_cpu_half(replace(policy, op_lists="apex"), on_cpu=True)
            if policy.patch_torch_functions:
                register_edits()
                install.install("apex")
                emulate(self._policy)
            casts_state.set_default(self._policy)

    def is_active(self) -> bool:
        """Tell whether the casts act."""
        return self._active

    # Apex's attribute. A script that writes it gets an AttributeError.
    _is_active = property(is_active)

    def _deactivate(self) -> None:
        """Turn the casts of torch's functions off, until the next `initialize` or `init`."""
        if not self._active:
            return
        self._active = False
        before = self._policy if self._training is None else self._training.policy
        assert before is not None
        after = replace(before, patch_torch_functions=False)
        if casts_state.default() is before:
            casts_state.set_default(None)
        if self._training is None:
            self._policy = after
            return
        self._training.policy = after
        for model_ref in self._training.models:
            if (model := model_ref()) is not None and model_forward.policy_of(model) is before:
                model_forward.set_policy(model, after)
        for ref in self._training.optimizers:
            stash = None if (optimizer := ref()) is None else stash_of(optimizer)
            if stash is not None and stash.policy is before:  # the optimizer may be in another training by now
                stash.policy = after

    def _disable_casts(self) -> AbstractContextManager[Any]:
        return disable_casts() if self._active else nullcontext()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer wrapped in an object with a method `scale_loss`, for `num_loss` losses an iteration."""
        if self._active:
            self._adopt(optimizer, num_loss)
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Scale as `amp.scale_loss` does, also for an optimizer that was not given to `initialize`."""
        if not self._active:
            return nullcontext(loss)
        if stash_of(innermost(optimizer)) is None:
            self._adopt(optimizer, 1)
        return scale_loss_of(loss, optimizer)

    def _adopt(self, optimizer: Any, num_loss: int) -> None:
        """Begin a training of this optimizer alone, at the handle's policy."""
        target = innermost(optimizer)
        policy = self._policy if self._training is None else self._training.policy
        assert policy is not None
        optimizer_side.check_optimizer(target, policy)
        optimizer_side.restore(target, recast_state=False)
        begin_training(dialect(), policy, [], [target], num_loss, _amp_state.verbosity, Setup([], (), None))

    def _clear_cache(self) -> None:
        """Free the casts of weights that this thread has cached."""
        casts_state.drop_cache()


class NoOpHandle(AmpHandle):
    """The handle of `amp.init(enabled=False)`: it casts and scales nothing."""

    def __init__(self) -> None:
        self.has_cache = self.verbose = self._active = False


def _enabled(optimizers: Any) -> bool:
    """Return `opt_properties.enabled` of the training of `optimizers`, or of the newest one if they are in none."""
    found = (stash_of(innermost(optimizer)) for optimizer in as_list(optimizers) if optimizer is not None)
    stashes = [stash for stash in found if stash is not None]
    newest = [getattr(_amp_state, "opt_properties", None)] if not stashes else []
    properties = [getattr(stash, "properties", None) for stash in stashes] + newest
    return all(p is None or p.enabled for p in properties)
