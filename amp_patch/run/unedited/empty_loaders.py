"""Detection of loaders without a batch, as with `drop_last` over fewer samples than a batch: nothing is trained."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from amp_patch.support.patches import Patches


class EmptyLoaders:
    """Watches which of torch's loaders are asked for batches.

    Attributes:
        words: a sentence on the first loader that had no batch; "" if there was none.
    """

    def __init__(self) -> None:
        self.words = ""

    def install(self, patches: Patches) -> None:
        original = DataLoader.__iter__

        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:
            with suppress(Exception):  # a sampler of user code may raise anything, and has no length for us then
                if not (self.words or isinstance(loader.dataset, IterableDataset) or len(loader)):
                    drops = ", drop_last=True" * bool(loader.drop_last)
                    batches = f"batch_size={loader.batch_size}{drops}"
                    self.words = f"its DataLoader has {len(loader.dataset)} samples and no batch ({batches})"
            return original(loader)

        patches.set(DataLoader, "__iter__", __iter__)
