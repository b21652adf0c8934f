"""Emulated products in FP8 and FP4 (O6, O7): both operands are rounded by a recipe (formats.py), sums are in FP32.

A linear layer has three matrix products: the forward, the gradient of its input and the gradient of its weight. Each
product rounds both operands along the dimension that it sums over. All three call one operator,
`torch.ops.amp_patch.low_bit_product`. Its gradients are calls of the same operator, so it can be differentiated any
number of times. The rounding has gradient 1, as in the recipes. torch.compile makes the operator one node of its graph,
and autograd saves its BF16 operands as for torch's own products, also under activation checkpointing.

These products stay in BF16: products with a vector or a sparse tensor, `einsum`, attention's fused operator,
convolutions and recurrent networks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.casts.formats import FORMATS, ROWS, Role, quantized

# ---------------------------------------------------------------------------------------------------------------------
# The operator

_SCHEMA = "(Tensor a, Tensor b, Tensor? bias, str recipe, str a_role, str b_role, bool hadamard) -> Tensor"


@torch.library.custom_op("amp_patch::low_bit_product", mutates_args=(), schema=_SCHEMA)
def low_bit_product(
    a: Tensor, b: Tensor, bias: Tensor | None, recipe: str, a_role: Role, b_role: Role, hadamard: bool
) -> Tensor:
    """Return `a @ b.mT + bias`: operands rounded along the sum, accumulated in FP32, rounded to BF16 once.

    Args:
        a: BF16, [M, K] or [B, M, K].
        b: BF16, [N, K] or [B, N, K].
        bias: BF16, of a shape that broadcasts to the result, [M, N] or [B, M, N].
        recipe: a name of `formats.FORMATS`.
        a_role, b_role: the kind of each operand: "activation", "weight", "gradient".
        hadamard: apply the Hadamard transform to both operands; for a weight's gradient, under a recipe with
            `hadamard`.
    """
    chosen = FORMATS[recipe]
    left, left_scale = quantized(a, ROWS, a_role, chosen, hadamard)
    right, right_scale = quantized(b, ROWS, b_role, chosen, hadamard)
    aten = torch.ops.aten  # no wrapper replaces its operators
    result = (aten.mm if a.dim() == 2 else aten.bmm)(left, right.mT)
    if left_scale is not None and right_scale is not None:
        result.mul_(left_scale * right_scale)
    if bias is not None:
        result.add_(bias)
    return result.to(torch.bfloat16)


@low_bit_product.register_fake
def _(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, bias, ctx.recipe, ctx.a_role, ctx.b_role, _ = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
    recipe, product = ctx.recipe, torch.ops.amp_patch.low_bit_product
    grad_a = grad_b = grad_bias = None
    if wants_a:
        grad_a = product(grad, b.mT, None, recipe, "gradient", ctx.b_role, False)
    if wants_b:
        spread = FORMATS[recipe].hadamard and ctx.b_role == "weight"
        grad_b = product(grad.mT, a.mT, None, recipe, "gradient", ctx.a_role, spread)
    if wants_bias:
        grad_bias = grad.sum_to_size(ctx.bias_shape)
    return grad_a, grad_b, grad_bias, None, None, None, None


low_bit_product.register_autograd(_backward, setup_context=_save)

# ---------------------------------------------------------------------------------------------------------------------
# Calls of torch's functions


class Operands(NamedTuple):
    """The operands of one call: `a @ b`, or `a @ b.mT` if `transposed`, plus `bias`."""

    a: Any
    b: Any
    bias: Any
    transposed: bool


class _Call(NamedTuple):
    """The signature of a torch function.

    Attributes:
        arguments: the names of the function's arguments, in order.
        a, b, bias: the names of the arguments that are the operands.
        transposed: the function multiplies by `b.mT`, as `linear` does.
        dims: the number of dimensions that `a` and `b` must have; None: two or more.
    """

    arguments: tuple[str, ...]
    a: str
    b: str
    bias: str = ""
    transposed: bool = False
    dims: int | None = None


_MATMUL = _Call(("input", "other"), "input", "other")
# The keys are names of torch's functions and methods, as under the rule "product" of the op lists. A call with other
# arguments (`beta`, `out_dtype`) remains a BF16 product.
_CALLS: dict[str, _Call] = {
    "linear": _Call(("input", "weight", "bias"), "input", "weight", "bias", transposed=True),
    "matmul": _MATMUL,
    "linalg_matmul": _MATMUL,
    "__matmul__": _MATMUL,
    "__rmatmul__": _Call(("input", "other"), "other", "input"),
    "mm": _Call(("input", "mat2"), "input", "mat2", dims=2),
    "bmm": _Call(("input", "mat2"), "input", "mat2", dims=3),
    "addmm": _Call(("input", "mat1", "mat2"), "mat1", "mat2", "input", dims=2),
    "baddbmm": _Call(("input", "batch1", "batch2"), "batch1", "batch2", "input", dims=3),
}
_KEPT = "_amp_keep_high"  # marks a weight whose products stay in 16 bits


class _Running(threading.local):
    """The weights marked by `keep_named` in the forward that runs on this thread. `_is_kept` reads them in a trace."""

    def __init__(self) -> None:  # an instance attribute: torch.compile's guards need one
        self.kept: list[Tensor] = []


_running = _Running()


def keep_high(weight: Tensor) -> None:
    """Mark `weight`: products of this tensor and of its views are computed in the policy's 16-bit type."""
    if not hasattr(weight, _KEPT):
        setattr(weight, _KEPT, True)


def keep_named(model: Any, names: Iterable[str]) -> list[Tensor]:
    """Call `keep_high` for the tensors with the qualified `names` in `model`; return these tensors."""
    found = []
    for name in names:
        tensor = model
        for key in name.split("."):
            tensor = getattr(tensor, key, None)
        if isinstance(tensor, Tensor):
            keep_high(tensor)
            found.append(tensor)
    return found


def keeping_named(method: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Wrap `method(model, ...)`: each call first marks the tensors that have `names` in `model` then (`keep_named`).

    A mark is an attribute of a tensor. If a copy, `load_state_dict(assign=True)`, `functional_call` or `fully_shard`
    puts another tensor under a name, that tensor has no mark until the next call.
    """

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        before, _running.kept = _running.kept, keep_named(model, names)
        try:
            return method(model, *args, **kwargs)
        finally:
            _running.kept = before

    return call


def release(weight: Tensor) -> None:
    """Undo `keep_high`."""
    if hasattr(weight, _KEPT):
        delattr(weight, _KEPT)


def operands_of(name: str, args: Any, kwargs: Any) -> Operands | None:
    """Return the operands of a call of torch's function `name`; None if it cannot be a low-bit product."""
    call = _CALLS.get(name)
    if call is None or len(args) > len(call.arguments) or not all(each in call.arguments for each in kwargs):
        return None
    given = {**dict(zip(call.arguments[: len(args)], args, strict=True)), **kwargs}  # torch 2.6 traces no other zip
    a, b, bias = given.get(call.a), given.get(call.b), given.get(call.bias)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and (bias is None or isinstance(bias, Tensor))):
        return None
    if call.dims is not None and (a.dim() != call.dims or b.dim() != call.dims):
        return None  # torch raises its own error
    if b.dim() < 2 or a.dim() < 2 - call.transposed or (call.transposed and b.dim() != 2) or _is_kept(a) or _is_kept(b):
        return None
    if not is_dynamo_compiling() and (a.layout is not torch.strided or b.layout is not torch.strided):
        return None  # Dynamo refuses to read a layout in the backward of an autograd function
    return Operands(a, b, bias, call.transposed)


def _is_kept(operand: Tensor) -> bool:
    if hasattr(operand, _KEPT):
        return True
    if is_dynamo_compiling():  # in a trace the base of a view does not have the mark
        return any(weight is operand._base for weight in _running.kept)
    base = operand._base
    return base is not None and hasattr(base, _KEPT)


def _is_differentiated_by_functorch() -> bool:
    found = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in found)


def multiply(operands: Operands, recipe: str) -> Tensor | None:
    """Multiply BF16 operands in low bits; return None if their types or shapes do not allow it.

    Operands with three or more dimensions are multiplied matrix by matrix. A right operand with two dimensions is
    multiplied with all rows of the left one at once.

    Raises:
        NotImplementedError: a transform of torch.func differentiates the call.
    """
    a, b, bias, transposed = operands
    if a.dtype is not torch.bfloat16 or b.dtype is not torch.bfloat16:
        return None
    if bias is not None and bias.dtype is not torch.bfloat16:
        return None
    if not is_dynamo_compiling() and _is_differentiated_by_functorch():
        raise NotImplementedError(
            "torch.func's grad, vjp and jvp have no rule for products in FP8 and FP4 (O6, O7); differentiate with "
            "torch.autograd, or call inside amp.disable_casts()"
        )
    if not transposed:
        b = b.mT
    if a.shape[-1] != b.shape[-1]:
        return None  # torch raises its own error
    product = torch.ops.amp_patch.low_bit_product
    if b.dim() == 2:
        shape = (*a.shape[:-1], b.shape[0])
        rows = a if a.dim() == 2 else a.reshape(-1, a.shape[-1])
        if bias is not None and bias.dim() > 1 and a.dim() > 2:
            return None
        result = product(rows, b, bias, recipe, "activation", "weight", False)
        return result if a.dim() == 2 else result.reshape(shape)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    result = product(a, b, bias, recipe, "activation", "activation", False)
    return result.reshape(*batch, *result.shape[-2:])
