"""`apex.normalization.fused_layer_norm`: layer norm and RMS norm with Apex's rules for types.

Statistics and arithmetic are FP32 (FP64 for float64), and the result is rounded once. It has the input's type, or in
the functions and modules called "mixed" the weight's type. Input and weight may have different types everywhere.
(Apex's functions called "fused" refused this, and so failed under the casts of O1.) Inside `torch.autocast`, tensors
are cast to its type first, as in Apex. The functions can be differentiated any number of times, on CPU and CUDA.

`memory_efficient` is accepted without effect: torch saves the input for backward. (Apex could save the output instead.)

Sources: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch.support import tree

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def manual_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm with the roundings of T5's layer norm.

    If `weight` is float16 or bfloat16, the normalized input is rounded to that type before it is multiplied by the
    weight, and the result has that type. Otherwise the result is FP32.
    """
    wide = _widen(input)
    dims = tuple(range(-len(normalized_shape), 0))
    normal = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return normal
    return weight * (normal.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else normal)


def _layer_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    if any(t is not None and t.dtype is not input.dtype for t in (weight, bias)) or dtype is not input.dtype:
        # torch's kernel for inputs of one type computes in FP32; a kernel for two types exists on the CPU only.
        input, weight, bias = _widen(input), _widen(weight), _widen(bias)
    return F.layer_norm(input, _as_shape(shape), weight, bias, eps).to(dtype)


def _rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    # In low precision, torch would round a second time before the multiplication by the weight. So compute in FP32.
    return F.rms_norm(_widen(input), list(_as_shape(shape)), _widen(weight), eps).to(dtype)


def _widen(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.dtype is torch.float64 else tensor.float()


def _as_shape(shape: Shape) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, numbers.Integral) else tuple(shape)  # type: ignore[arg-type]


class FusedLayerNormAffineFunction:
    """A class with the name of Apex's autograd function; other code calls `apply`, and reads `forward`'s arguments.

    It is no autograd function: torch differentiates the functions that `forward` calls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the layer norm times `weight` plus `bias`, in the type of `input`; `ctx` is ignored."""
        return _layer_norm(input, normalized_shape, weight, bias, eps, input.dtype)

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Call `forward` without a context."""
        return cls.forward(None, *args, **kwargs)


def _autocast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function, which casts tensors to the type of torch.autocast first, inside of one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        device = tree.tensors((args, kwargs))[0].device.type
        if torch.is_autocast_enabled(device):
            args, kwargs = tree.cast_floats((args, kwargs), torch.get_autocast_dtype(device), _CASTABLE)
        return function(*args, **kwargs)

    return call


@_autocast
def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `(input - mean) / sqrt(var + eps)` over the last dimensions, of `normalized_shape`."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


fused_layer_norm_affine = _autocast(FusedLayerNormAffineFunction.apply)
fused_layer_norm_affine.__name__ = fused_layer_norm_affine.__qualname__ = "fused_layer_norm_affine"  # pickled by name


@_autocast
def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm times `weight` plus `bias`, in the type of `weight`."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, weight.dtype)


@_autocast
def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return `input / sqrt(mean(input**2) + eps)` over the last dimensions, in the input's type."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


@_autocast
def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the RMS norm times `weight`, in the type of `input`."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype)


@_autocast
def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the RMS norm times `weight`, in the type of `weight`."""
    return _rms_norm(input, normalized_shape, weight, eps, weight.dtype)


class _Norm(nn.Module):
    """Base of the norms, with the parameters `weight` and, if `has_bias`, `bias`, of shape `normalized_shape`."""

    has_bias: bool
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(_as_shape(normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            empty = torch.empty(self.normalized_shape, dtype=torch.get_default_dtype())
            self.register_parameter(name, nn.Parameter(empty) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight with ones and the bias with zeros."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.has_bias and self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """Layer norm over the last dimensions, of shape `normalized_shape`; the result has the input's type.

    As in Apex, its parameters are low precision at O2 and O3: only batch norms stay FP32.
    """

    has_bias = True
    affine = staticmethod(fused_layer_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        """`input` of shape [..., *normalized_shape], normalized: a new tensor in the dtype of `input`."""
        if self.weight is None or self.bias is None:
            return fused_layer_norm(input, self.normalized_shape, self.eps)
        return self.affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_Norm):
    """RMS norm over the last dimensions, of shape `normalized_shape`; the result has the input's type."""

    has_bias = False
    affine = staticmethod(fused_rms_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        """`input` of shape [..., *normalized_shape], normalized: a new tensor in the dtype of `input`."""
        if self.weight is None:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return self.affine(input, self.weight, self.normalized_shape, self.eps)


class _Mixed(_Norm):
    """Base of the norms whose result has the weight's type."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(f"{name}: elementwise_affine is False, and the type of the result is the weight's")
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """`FusedLayerNorm` whose result has the weight's type."""

    affine = staticmethod(mixed_dtype_fused_layer_norm_affine)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """`FusedRMSNorm` whose result has the weight's type."""

    affine = staticmethod(mixed_dtype_fused_rms_norm_affine)
