"""The number of samples in an epoch, read from the DataLoader of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from amp_patch.support.patches import Patches


class EpochSize:
    """A patch of `DataLoader.__iter__` that reads the loader's length and batch size, while its `with` block runs.

    The loader of the training is the one whose iteration began last before the first step.

    Args:
        steps: returns the number of steps taken so far.

    Attributes:
        samples: the number of samples in an epoch of this process; 0 if unknown.
        batch: the batch size of the loader; 0 if unknown.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self.samples = self.batch = 0
        self._steps = steps
        self._patches = Patches()

    def __enter__(self) -> EpochSize:
        original = DataLoader.__iter__

        def iterated(loader: DataLoader[Any]) -> Any:
            if not self._steps():
                self._read(loader)
            return original(loader)

        self._patches.set(DataLoader, "__iter__", iterated)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.remove()

    def _read(self, loader: DataLoader[Any]) -> None:
        self.samples = self.batch = 0
        if loader.batch_size is None:  # a batch sampler, whose batches may differ in size, or no batches
            return
        try:
            batches, samples = len(loader), len(loader.sampler)  # type: ignore[arg-type]
        except TypeError:  # the dataset is an IterableDataset without a length
            return
        self.batch = loader.batch_size
        self.samples = min(samples, batches * self.batch)  # `drop_last` leaves samples out
