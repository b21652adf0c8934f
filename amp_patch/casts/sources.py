"""FP32 logits that a model's exit or a script has cast from low precision: a loss returns a low-precision gradient."""

# ruff: noqa: SLF001 - the attributes of torch's nodes

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.policy import LOW_PRECISION

_CAST = "ToCopyBackward0"
# Nodes of functions that keep the elements in their order.
_RESHAPES = {f"{name}Backward0" for name in ("Alias", "Clone", "ReshapeAlias", "Unsqueeze", "UnsafeView", "View")}
_SLICE, _TRANSPOSE = "SliceBackward0", "TransposeBackward0"


class Source:
    """What FP32 logits were cast from.

    Attributes:
        place: a tensor in the place of the low-precision logits in autograd's graph, of the shape of the FP32 logits,
            with one element of memory. None without the extension.
    """

    def __init__(self, logits: Tensor, views: list[Any]) -> None:
        self.place: Tensor | None = None
        if (extension := multi_tensor.extension()) is None:
            return
        self._upcast = extension.Upcast(logits, len(views))
        self.place = self._upcast.place()
        for node in reversed(views):
            self.place = _seen(self.place, node)

    def takes_gradient(self) -> bool:
        """Tell whether in this backward no code but the loss has a part in the gradient of the FP32 tensors.

        Hooks receive it in FP32, gradients of other functions are added in FP32, and `torch.autograd.grad` returns it.
        """
        return self.place is not None and self._upcast.is_alone()


def source_of(logits: Tensor) -> Source | None:
    """Return what `logits`, or the tensor of which they are a view or a slice, were cast from; None if they were not.

    The node of the cast tells it. A write that autograd knows puts another node there. One without a gradient
    (`torch.no_grad`, `data`) changes the values alone, and the loss reads these from `logits`.
    """
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
        # Python gets negative bounds as unsigned numbers.
        start, end = (each - 2**64 if each >= 2**63 else each for each in (node._saved_start, node._saved_end))
        where = (*[slice(None)] * node._saved_dim, slice(start, end, node._saved_step))
        return place[where]
    if node.name() == _TRANSPOSE:
        return place.transpose(node._saved_dim0, node._saved_dim1)
    return place.view(node._input_metadata[0].shape)
