"""`_amp_state`, Apex's process-wide state object, which scripts read and write."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.frontend import master_params
from amp_patch.training.training import newest_training

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """The object `apex.amp._amp_state`. It describes the training of the newest `initialize`.

    Attributes:
        opt_properties: the options of the opt level with the overrides, a `frontend.Properties`; absent before the
            first `initialize`.
        handle: an `AmpHandle` that switches the training's casts; absent before the first `initialize`.
        allow_incoming_model_not_fp32: if True, `initialize` accepts models whose weights are FP16 already.
        hard_override: if True, an option that contradicts the opt level is reported by a message, not by an error.
        min_loss_scale, max_loss_scale: the arguments of `initialize`.
    """

    opt_properties: Any
    handle: Any
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self._verbosity: int = 1

    @property
    def loss_scalers(self) -> list[Any]:
        """The loss scalers in use, by `loss_id`: the training's own list. An assignment replaces its elements."""
        if (training := newest_training()) is None:
            raise AttributeError("'AmpState' object has no attribute 'loss_scalers': amp.initialize() makes them")
        return training.scalers

    @loss_scalers.setter
    def loss_scalers(self, scalers: list[Any]) -> None:
        self.loss_scalers[:] = scalers

    @property
    def verbosity(self) -> int:
        """If 0, no messages are printed. A write also changes the loss scalers of the newest training."""
        return self._verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self._verbosity = value
        training = newest_training()
        for scaler in () if training is None else training.scalers:
            scaler.verbosity = int(value)


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError with `msg`, or print it if `_amp_state.hard_override` is True."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print("Warning:  " + msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print `msg` unless `_amp_state.verbosity` is 0; with `rank0` only on rank 0."""
    distributed = torch.distributed
    follower = distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    if _amp_state.verbosity > 0 and not (rank0 and follower):
        print(msg)
