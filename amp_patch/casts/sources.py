"""FP32 logits that a model's exit or a script has cast from low precision: a loss returns a low-precision gradient."""

# ruff: noqa: SLF001 - the attributes of torch's nodes

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.casts.upcast import TOPMOST, other_hooks
from amp_patch.policy import LOW_PRECISION

_CAST = "ToCopyBackward0"
# Nodes of functions that keep the elements in their order.
_RESHAPES = {f"{name}Backward0" for name in ("Alias", "Clone", "ReshapeAlias", "Unsqueeze", "UnsafeView", "View")}
_SLICE, _TRANSPOSE = "SliceBackward0", "TransposeBackward0"


class Source:
    """The logits of a loss in autograd's graph, and what FP32 logits were cast from.

    Attributes:
        place: a tensor in the place of the low-precision logits in the graph, of the shape of the FP32 logits, with one
            element of memory. None if the logits were not cast, and without the extension.
    """

    def __init__(self, logits: Tensor, views: list[Any] | None) -> None:
        self.place: Tensor | None = None
        self._extension: Any = None
        if (made := in_extension()) is None or logits.grad_fn is None:
            return
        self._extension = made(logits, -1 if views is None else len(views))
        self._writes = TOPMOST is not None and not other_hooks()
        if views is not None:
            self.place = self._extension.place()
            for node in reversed(views):
                self.place = _seen(self.place, node)

    def low_of(self, wide: Tensor) -> Tensor | None:
        """Return the low-precision logits in the shape of their FP32 copy; None if nothing else holds them.

        None in a checkpoint, whose recomputation must save the same types: by then the logits may be freed.
        """
        if self._extension is None or wide.dtype in LOW_PRECISION or TOPMOST is None:
            return None
        top = TOPMOST(False)
        if top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint":
            return None
        return self._extension.low_of(wide)

    def to_save(self, logits: Tensor) -> Tensor:
        """Return the tensor that autograd shall save of `logits`, which does not keep its views' bases alive."""
        return logits if self._extension is None else self._extension.saved(logits)

    def attached(self, saved: Tensor, low: bool) -> Tensor:
        """Return what autograd has saved, in the place of the logits in the graph, for second derivatives."""
        if self._extension is None:
            return saved
        return self._extension.attached(saved if low else saved.float())

    def takes_gradient(self) -> bool:
        """Tell whether in this backward no code but the loss has a part in the gradient of the FP32 tensors.

        Hooks receive it in FP32, gradients of other functions are added in FP32, and `torch.autograd.grad` returns it.
        """
        return self.place is not None and self._extension.is_alone()

    def may_write(self, saved: Tensor) -> bool:
        """Tell whether after this backward nobody can read `saved`, so that the gradient may take its memory."""
        return self._extension is not None and self._writes and self._extension.is_private(saved)


def in_extension() -> Any:
    """Return the extension's class of logits; None without the extension, or if it was built from older sources."""
    return getattr(multi_tensor.extension(), "Logits", None)


def source_of(logits: Tensor) -> Source | None:
    """Return the source of low-precision logits, or of FP32 ones that were cast from such; None of others.

    The node of the cast tells it, which may be behind views and slices. A write that autograd knows puts another node
    there. One without a gradient (`torch.no_grad`, `data`) changes the values alone, and the loss reads these.
    """
    if logits.dtype in LOW_PRECISION:
        return Source(logits, None)
    views: list[Any] = []
    node: Any = logits.grad_fn
    while node is not None and (name := node.name()) != _CAST:
        if name not in _RESHAPES and name not in (_SLICE, _TRANSPOSE):
            return None
        views.append(node)
        node = node.next_functions[0][0]
    if node is None:
        return None
    before, output = node.next_functions[0]
    cast = before._input_metadata[output]
    return Source(logits, views) if cast.dtype in LOW_PRECISION and cast.device == logits.device else None


def _seen(place: Tensor, node: Any) -> Tensor:
    """Return the view of `place` that the function of `node` has returned of the FP32 tensor."""
    if node.name() == _SLICE:
        given = (node._saved_dim, node._saved_start, node._saved_end, node._saved_step)
        return torch.ops.aten.slice.Tensor(place, *map(_signed, given))
    if node.name() == _TRANSPOSE:
        return place.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1))
    return place.view(node._input_metadata[0].shape)


def _signed(number: Any) -> Any:
    """Return a number that a node has saved: Python gets negative ones as unsigned, and a bound may be missing."""
    return number if number is None or number < 2**63 else number - 2**64
