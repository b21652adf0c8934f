"""The kernels of mixed precision: each call takes lists of tensors and does all of them in one pass.

Every list is a list or tuple of tensors of float32, float16 or bfloat16, mixed as you like between the lists and inside
one, or of float64 (then the tensors at that place are float64 in every list: float64 stays float64). Any number of
tensors, 0 too; any sizes, 0 too; any strides. All on one device: callers group by device. Arithmetic is in FP32 (FP64
for float64), each result is rounded once, to nearest even: exactly ``(src.float() * factor).to(dst.dtype)``.

Autograd records no call: outputs that require grad are refused unless grad mode is off. No call syncs with the device.
Invalid arguments raise ValueError or TypeError before the first write. A call bumps the version counter of each tensor
that it writes, as torch's in-place functions do.

``found_inf`` is a float32 tensor of one element on the lists' device. A kernel writes 1.0 into it if it meets an
infinity or a NaN, and never another value. The caller zeroes it (as for torch's
``_amp_foreach_non_finite_check_and_unscale_``).

There are two backends: the extension ``amp_patch._C``, and plain torch, used if the extension is absent or not built
for the tensors' device. Their results are equal up to rounding in the sums of norms and in the steps of optimizers.
``AMP_PATCH_BACKEND=torch`` in the environment, or ``use_backend("torch")``, selects plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

from torch import Tensor

from amp_patch.multi_tensor import plain
from amp_patch.multi_tensor.backends import backend as backend
from amp_patch.multi_tensor.backends import backend_reason as backend_reason
from amp_patch.multi_tensor.backends import extension as extension
from amp_patch.multi_tensor.backends import run
from amp_patch.multi_tensor.backends import use_backend as use_backend
from amp_patch.multi_tensor.checks import FP32, INT32, Argument, Contract, Number, TensorList, Tensors, floats, number
from amp_patch.multi_tensor.plain import SMALLEST_SCALE as SMALLEST_SCALE
from amp_patch.multi_tensor.steps import multi_tensor_adam as multi_tensor_adam
from amp_patch.multi_tensor.steps import multi_tensor_decode as multi_tensor_decode
from amp_patch.multi_tensor.steps import multi_tensor_encode as multi_tensor_encode
from amp_patch.multi_tensor.steps import multi_tensor_join as multi_tensor_join
from amp_patch.multi_tensor.steps import multi_tensor_sgd as multi_tensor_sgd
from amp_patch.multi_tensor.steps import multi_tensor_split as multi_tensor_split
from amp_patch.multi_tensor.steps import multi_tensor_stochastic_round as multi_tensor_stochastic_round

__all__ = [
    "backend",
    "backend_reason",
    "inverse_of",
    "multi_tensor_adam",
    "multi_tensor_adopt",
    "multi_tensor_axpby",
    "multi_tensor_check_finite",
    "multi_tensor_decode",
    "multi_tensor_encode",
    "multi_tensor_join",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_split",
    "multi_tensor_stochastic_round",
    "multi_tensor_unscale",
    "multi_tensor_unscale_l2norm",
    "update_scale",
    "use_backend",
]


_FOUND_INF = Argument("found_inf", FP32, written=True, optional=True)
_READ, _IN_PLACE = (TensorList("tensors"),), (TensorList("grads", written=True),)

_SCALE = Contract(
    "multi_tensor_scale", (TensorList("src"), TensorList("dst", written=True)), (number("factor"), _FOUND_INF)
)
_UNSCALE = Contract("multi_tensor_unscale", _IN_PLACE, (number("inv_scale"), _FOUND_INF))
_AXPBY = Contract(
    "multi_tensor_axpby",
    (TensorList("x"), TensorList("y"), TensorList("out", written=True)),
    (number("a"), number("b"), _FOUND_INF),
)
_CHECK_FINITE = Contract("multi_tensor_check_finite", _READ, (_FOUND_INF, number("factor")))
_L2NORM = Contract("multi_tensor_l2norm", _READ, (number("factor"), _FOUND_INF))
_UNSCALE_L2NORM = replace(_UNSCALE, name="multi_tensor_unscale_l2norm")
_ADOPT = Contract("multi_tensor_adopt", (TensorList("params"), TensorList("masters", FP32, written=True)))
_UPDATE_SCALE = Contract(
    "update_scale",
    arguments=(
        Argument("scale", FP32, written=True),
        Argument("growth_tracker", INT32, written=True),
        Argument("found_inf", FP32),
        *floats("growth_factor", "backoff_factor"),
        Argument("growth_interval", number=int),
        *floats("min_scale", "max_scale"),
        Argument("hysteresis", number=int),
        Argument("hysteresis_tracker", INT32, written=True, optional=True),
    ),
)


def multi_tensor_scale(src: Tensors, dst: Tensors, factor: Number, found_inf: Tensor | None = None) -> None:
    """``dst = src * factor``, rounded to dst's dtypes. With factor 1.0 and no found_inf it is the cast and the copy.

    ``dst`` is written in place; it may be ``src``, otherwise the two must not share memory. ``factor`` is a float, or a
    float32 or float64 tensor of one element on the lists' device, which is read there. ``found_inf`` is raised by a
    non-finite element of src and by a product that overflows, in FP32 or on the cast to dst's dtype.

    After Apex's ``amp_C.multi_tensor_scale``, which reads its flag from an int32 buffer and takes a float only.
    """
    run(_SCALE, plain.scale, (src, dst), (factor, found_inf))


def multi_tensor_unscale(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> None:
    """``grads *= inv_scale`` in place; ``found_inf`` as in ``multi_tensor_scale(grads, grads, inv_scale, found_inf)``.

    As ``torch._amp_foreach_non_finite_check_and_unscale_``, but for any mix of dtypes, FP16 too.
    """
    run(_UNSCALE, plain.unscale, (grads,), (inv_scale, found_inf))


def multi_tensor_axpby(
    a: Number,
    x: Tensors,
    b: Number,
    y: Tensors,
    out: Tensors,
    found_inf: Tensor | None = None,
    check: Literal["both", "x", "y"] = "both",
) -> None:
    """``out = a * x + b * y``: both products and the sum each rounded to FP32, then once to out's dtypes.

    ``out`` is written in place; it may be ``x`` or ``y``. ``a`` and ``b`` as ``factor`` of ``multi_tensor_scale``.
    ``found_inf`` is raised by a non-finite element of the lists that ``check`` names, and by a result that overflows
    from finite elements. ``check="x"`` is for gradients x added to earlier ones, y, checked when they were made.

    After Apex's ``amp_C.multi_tensor_axpby``; its ``arg_to_check`` -1, 0, 1 is "both", "x", "y" here.
    """
    if check not in ("both", "x", "y"):
        raise ValueError(f"multi_tensor_axpby: check={check!r} is none of 'both', 'x', 'y'")
    run(_AXPBY, plain.axpby, (x, y, out), (a, b, found_inf, check != "y", check != "x"))


def multi_tensor_check_finite(tensors: Tensors, found_inf: Tensor, factor: Number = 1.0) -> None:
    """Raise ``found_inf`` if any element of ``tensors``, times ``factor`` in FP32, is infinite or NaN.

    Writes nothing else. ``factor`` as in ``multi_tensor_scale``.
    """
    run(_CHECK_FINITE, plain.check_finite, (tensors,), (found_inf, factor))


@overload
def multi_tensor_l2norm(
    tensors: Tensors, per_tensor: Literal[False] = False, factor: Number = 1.0, found_inf: Tensor | None = None
) -> Tensor: ...
@overload
def multi_tensor_l2norm(
    tensors: Tensors, per_tensor: Literal[True], factor: Number = 1.0, found_inf: Tensor | None = None
) -> tuple[Tensor, Tensor]: ...
def multi_tensor_l2norm(
    tensors: Tensors, per_tensor: bool = False, factor: Number = 1.0, found_inf: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The 2-norm of all tensors taken together: a tensor of shape [] on their device (on the CPU if there are none).

    ``factor`` (as in ``multi_tensor_scale``) multiplies each element first, in FP32: the norm of gradients that are
    still scaled, as if they had been unscaled into FP32 ones, with the same bits. ``found_inf`` as in
    ``multi_tensor_check_finite``, in the same pass.

    With ``per_tensor`` also a tensor of shape [len(tensors)] with the norm of each. Both are float32, or float64 if any
    of the tensors is. Squares are FP32: elements past 1.8e19 make the norm infinite, as in torch.

    After Apex's ``amp_C.multi_tensor_l2norm``.
    """
    total, norms = run(_L2NORM, plain.l2norm, (tensors,), (factor, found_inf))
    return (total, norms) if per_tensor else total


@overload
def multi_tensor_unscale_l2norm(
    grads: Tensors, inv_scale: Number, found_inf: Tensor | None, per_tensor: Literal[False] = False
) -> Tensor: ...
@overload
def multi_tensor_unscale_l2norm(
    grads: Tensors, inv_scale: Number, found_inf: Tensor | None, per_tensor: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def multi_tensor_unscale_l2norm(
    grads: Tensors, inv_scale: Number, found_inf: Tensor | None, per_tensor: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``multi_tensor_unscale``, then ``multi_tensor_l2norm`` of the stored values, in one pass: for clipping."""
    total, norms = run(_UNSCALE_L2NORM, plain.unscale_l2norm, (grads,), (inv_scale, found_inf))
    return (total, norms) if per_tensor else total


def multi_tensor_adopt(params: Tensors, masters: Tensors) -> None:
    """Copy user edits of low-precision weights into their FP32 masters.

    Element by element: ``master = param if master.to(param.dtype) != param else master``. An element that was not
    edited keeps its FP32 value. A NaN in a parameter counts as an edit. ``masters`` are float32, written in place.
    """
    run(_ADOPT, plain.adopt, (params, masters), ())


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
) -> None:
    """Grow or back off a loss scale after a step, all of it on the device::

        if found_inf != 0:                                  # NaN too
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * backoff_factor, SMALLEST_SCALE)
            growth_tracker = 0
        else:
            hysteresis_tracker = hysteresis
            growth_tracker += 1
            if growth_tracker >= growth_interval:
                scale *= growth_factor                      # unless that is infinite
                growth_tracker = 0
        scale = clamp(scale, min_scale, max_scale)

    Each a tensor of one element on one device: ``scale`` float32, ``growth_tracker`` int32, ``hysteresis_tracker``
    int32 (all three written in place), ``found_inf`` float32 (read; zeroing it is the caller's). ``hysteresis`` is the
    number of overflows, with no clean step between them, at which the scale backs off, and it goes on backing off at
    each that follows at once; more than 1 needs a ``hysteresis_tracker``, which starts at ``hysteresis``.

    ``SMALLEST_SCALE`` is 2**-127, the smallest power of two whose inverse is finite in FP32.

    After ``torch._amp_update_scale_`` and Apex's ``update_scale_hysteresis``; the bounds are ours.
    """
    name = "update_scale"
    if hysteresis < 1:
        raise ValueError(f"{name}: hysteresis is {hysteresis}, at least 1 is wanted")
    if hysteresis > 1 and hysteresis_tracker is None:
        raise ValueError(
            f"{name}: hysteresis={hysteresis} needs a hysteresis_tracker, an int32 tensor that starts there"
        )
    lowest = 0.0 if min_scale is None else min_scale
    highest = float("inf") if max_scale is None else max_scale
    if not lowest <= highest:
        raise ValueError(f"{name}: min_scale={min_scale} is above max_scale={max_scale}")
    numbers = (growth_factor, backoff_factor, growth_interval, lowest, highest, hysteresis)
    run(_UPDATE_SCALE, plain.moved_scale, (), (scale, growth_tracker, found_inf, *numbers, hysteresis_tracker))


def inverse_of(scale: Tensor) -> Tensor:
    """1 / ``scale`` (float32, shape []) on its device, rounded once; no sync."""
    return scale.reciprocal()
