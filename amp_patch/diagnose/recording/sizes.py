"""Sizes of the tensors of the recorded trainings, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_patch.diagnose.recording.run import LOW_TYPES
from amp_patch.diagnose.recording.step import sample
from amp_patch.storage.coder import stored
from amp_patch.support import distributed
from amp_patch.support.compiled import eager_only
from amp_patch.training.training import Training
from amp_patch.watch import questions
from amp_patch.watch.small_eps import lost_eps

_PARAMS = 16  # parameters that `first_weights` reads


class Sizes:
    """Bytes of weights, masters, gradients and the optimizers' state, at their last measurement.

    Args:
        trainings: a list that grows during the recording; each measurement searches their tensors again.

    Attributes:
        bytes: "weights", "masters", "gradients" or "state" -> bytes.
    """

    def __init__(self, trainings: list[Training]) -> None:
        self._trainings = trainings
        self.bytes = {"weights": 0, "masters": 0, "gradients": 0, "state": 0}

    def lost_eps(self) -> float | None:
        """Return the eps of an optimizer, if it is 0 in the type of its parameters, so that Adam divides by 0.

        None if no optimizer has such an eps.
        """
        return next((eps for optimizer in self._optimizers() for _, eps, _ in lost_eps(optimizer)), None)

    def other_type(self) -> str:
        """Return the type that most elements of the optimizers' parameters have, if it is not FP32 ("bfloat16").

        Otherwise return "".
        """
        counts: dict[str, int] = {}
        params = [p for group in self._groups() for p in group["params"]]
        for param in params:  # not the models' parameters: no optimizer steps a frozen weight
            name = str(param.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + param.numel()
        most = max(counts, key=lambda name: counts[name], default="")
        return most if most in (*LOW_TYPES, "float64") else ""

    def maximized(self) -> str:
        """Return `Run.maximized`: which groups of the optimizers have `maximize=True`."""
        found = {bool(group.get("maximize")) for group in self._groups()}
        return "" if True not in found else "some" if False in found else "all"

    def first_weights(self) -> list[Tensor | float]:
        """Return up to four elements of each of the models' first parameters, on their devices."""
        params = [param for model in self._models() for param in model.parameters()]
        return [element for param in params[:_PARAMS] for element in sample(param, 4)]

    def device(self) -> torch.device:
        """Return the device of the first parameter; the CPU if there is none."""
        return next((param.device for param, _ in self._pairs()), torch.device("cpu"))

    def at_rest(self) -> list[Tensor]:
        """Return the tensors that live between steps: parameters and buffers."""
        buffers = [buffer for model in self._models() for buffer in model.buffers()]
        return [param for param, _ in self._pairs()] + buffers

    @eager_only
    def measure(self) -> None:
        """Measure weights, masters and optimizer state. Gradients exist only within a step (`measure_gradients`)."""
        optimizers = self._optimizers()
        if not optimizers:
            return  # the optimizers were freed, or restored: the sizes measured before stay
        pairs = self._pairs()
        states = [getattr(distributed.stateful(optimizer), "state", None) or {} for optimizer in optimizers]
        self.bytes["weights"] = _bytes(param for param, _ in pairs)
        masters = [master for param, master in pairs if master is not param]
        stepped = questions.stored(masters)
        weights = {id(param) for param, _ in pairs}  # a stochastically rounded master is stored in its weight
        self.bytes["masters"] = _bytes(tensor for tensor in stepped if id(tensor) not in weights)
        self.bytes["state"] = _bytes(tensor for state in states for tensor in stored(state.values()))

    @eager_only
    def measure_gradients(self) -> None:
        """Measure the bytes of the gradients that parameters and masters have now, deferred ones included.

        `bytes["gradients"]` is the largest measurement so far.
        """
        tensors = {id(t): t for pair in self._pairs() for t in pair}.values()
        self.bytes["gradients"] = max(self.bytes["gradients"], _bytes(questions.gradients_of(tensors)))

    def _optimizers(self) -> list[Any]:
        """Return the trainings' optimizers that still exist and are in no later training."""
        return [optimizer for training in self._trainings for optimizer in training.own_optimizers()]

    def _models(self) -> list[Any]:
        return [model for training in self._trainings for model in alive(training.models)]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers() for group in optimizer.param_groups]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter, master) for all parameters of the models and the optimizers.

        A parameter without a master gives (parameter, parameter).
        """
        pairs = [pair for optimizer in self._optimizers() for pair in questions.pairs_of(optimizer)]
        known = {id(param) for param, _ in pairs}
        return pairs + [(p, p) for model in self._models() for p in model.parameters() if id(p) not in known]


def alive(refs: Iterable[Any]) -> list[Any]:
    """Return the live referents of weak references."""
    return [value for ref in refs if (value := ref()) is not None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors. Each tensor counts once, and a DTensor by its local shard."""
    total = 0
    for tensor in {id(t): t for t in tensors}.values():
        local = distributed.local(tensor)
        parts = (local._values(), local._indices()) if local.is_sparse else (local,)
        total += sum(part.numel() * part.element_size() for part in parts)
    return total
