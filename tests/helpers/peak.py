"""A meter of the memory that torch's functions take in addition to a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amp_patch.support import tree


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that measures the most bytes that outputs of functions hold at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.before = {p.untyped_storage()._cdata for p in model.parameters()}
        self.known: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree.tensors([result]):
            if tensor.untyped_storage()._cdata in self.before:
                continue
            self.known[tensor.untyped_storage()._cdata] = torch.multiprocessing.reductions.StorageWeakRef(
                tensor.untyped_storage()
            )
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.known.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return result
