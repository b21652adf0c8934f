"""The kernels: functions over lists of tensors, each of which processes all tensors of its lists in one pass.

Lists. A list is a list or tuple of any number of tensors, 0 included, of any shapes and strides. All tensors of a call
are on one device. float32, float16 and bfloat16 may be mixed within a list and between lists. If a tensor is float64,
the tensors at the same index of the other lists must be float64 too.

Arithmetic. It is in FP32 (FP64 for float64), and each result is rounded once, to nearest even. So a product is exactly
``(src.float() * factor).to(dst.dtype)``.

Autograd. No call is recorded: outputs that require grad are refused unless grad mode is off. A call increases the
version counter of each tensor that it writes, as torch's in-place functions do.

Errors. Invalid arguments raise ValueError or TypeError before the first write. No call syncs with the device.

``found_inf`` is a float32 tensor of one element on the lists' device. "Raises ``found_inf``" means: if the kernel finds
an infinity or a NaN, it writes 1.0 into it. No kernel writes 0: the caller zeroes it (as for torch's
``_amp_foreach_non_finite_check_and_unscale_``).

Backends. The extension ``amp_patch._C`` runs the kernels. Plain torch does if the extension is absent or not built for
the tensors' device, or if ``AMP_PATCH_BACKEND=torch`` in the environment or ``use_backend("torch")`` selects it. Both
give equal results, except for rounding in the sums of norms and in the steps of optimizers.

Files, the first one to read first:

- `steps.py`: kernels that make a whole optimizer step in one pass: unscaling, moments, FP32 masters and
  low-precision weights
- `checks.py`: contracts, and their checker
- `backends.py`: the choice of the extension or plain torch, and the call
- `plain.py`: the kernels in plain torch
- `plain_steps.py`: steps of Adam and SGD in plain torch, and by torch's fused functions
- `plain_random.py`: stochastic rounding
- `plain_codes.py`: state in eight bits
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

from torch import Tensor

from amp_patch.multi_tensor import plain
from amp_patch.multi_tensor.backends import backend, backend_reason, run, use_backend
from amp_patch.multi_tensor.backends import extension as extension
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
        Argument("earlier_inf", FP32, written=True, optional=True),
    ),
)


def multi_tensor_scale(src: Tensors, dst: Tensors, factor: Number, found_inf: Tensor | None = None) -> None:
    """Write ``dst = src * factor``, rounded to dst's dtypes. With factor 1.0 and no ``found_inf`` only copy and cast.

    ``dst`` is written in place. It may be the same list as ``src``; otherwise the two must not share memory. ``factor``
    is a float, or a float32 or float64 tensor of one element on the lists' device, read without a sync. ``found_inf``
    is raised by a non-finite element of src, and by a product that overflows in FP32 or on the cast to dst's dtype.

    After Apex's ``amp_C.multi_tensor_scale``, which reads its flag from an int32 buffer and takes a float only.
    """
    run(_SCALE, plain.scale, (src, dst), (factor, found_inf))


def multi_tensor_unscale(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place: ``multi_tensor_scale(grads, grads, inv_scale, found_inf)``.

    Like ``torch._amp_foreach_non_finite_check_and_unscale_``, but for any mix of dtypes, FP16 included.
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
    """Write ``out = a * x + b * y``. Both products and the sum are rounded to FP32, then the sum to out's dtypes.

    ``out`` is written in place; it may be ``x`` or ``y``. ``a`` and ``b`` are like ``factor`` of
    ``multi_tensor_scale``. ``found_inf`` is raised by a non-finite element of the lists that ``check`` names, and by a
    result that overflows although both elements are finite. Use ``check="x"`` to add new gradients x to earlier
    gradients y that were checked before.

    After Apex's ``amp_C.multi_tensor_axpby``; its ``arg_to_check`` -1, 0, 1 is "both", "x", "y" here.
    """
    if check not in ("both", "x", "y"):
        raise ValueError(f"multi_tensor_axpby: check={check!r} is none of 'both', 'x', 'y'")
    run(_AXPBY, plain.axpby, (x, y, out), (a, b, found_inf, check != "y", check != "x"))


def multi_tensor_check_finite(tensors: Tensors, found_inf: Tensor, factor: Number = 1.0) -> None:
    """Raise ``found_inf`` if any element of ``tensors``, times ``factor`` in FP32, is infinite or NaN.

    Writes nothing else. ``factor`` is as in ``multi_tensor_scale``.
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
    """Return the 2-norm of all tensors together: shape [], on their device (on the CPU if there are no tensors).

    With ``per_tensor`` return (that norm, a tensor of shape [len(tensors)] with the norm of each). Both are float32, or
    float64 if any tensor is float64. Squares are FP32, so elements above 1.8e19 make the norm infinite, as in torch.

    Each element is first multiplied by ``factor`` (as in ``multi_tensor_scale``) in FP32. So the norm of gradients that
    are still scaled has the same bits as if they had been unscaled to FP32. ``found_inf`` is raised in the same pass,
    as by ``multi_tensor_check_finite``.

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
    """Unscale ``grads`` in place, and return ``multi_tensor_l2norm`` of the results, in one pass; for clipping."""
    total, norms = run(_UNSCALE_L2NORM, plain.unscale_l2norm, (grads,), (inv_scale, found_inf))
    return (total, norms) if per_tensor else total


def multi_tensor_adopt(params: Tensors, masters: Tensors) -> None:
    """Copy user edits of low-precision weights into their FP32 masters.

    For each element: ``master = param if master.to(param.dtype) != param else master``. So an element that was not
    edited keeps its FP32 value. A NaN in a parameter is treated as an edit. ``masters`` are float32, written in place.
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
    earlier_inf: Tensor | None = None,
) -> None:
    """Grow or back off a loss scale after a step, on the device::

        if found_inf != 0 or earlier_inf != 0:              # NaN too
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

    ``scale`` (float32), ``growth_tracker`` (int32) and ``hysteresis_tracker`` (int32) are tensors of one element,
    written in place. ``found_inf`` (float32) is read; the caller zeroes it. ``earlier_inf`` (float32) is the flag of
    earlier backward passes. It is zeroed here, and may be ``found_inf``. All are on one device.

    ``hysteresis`` is the number of successive overflows after which the scale backs off. It then backs off at each
    further overflow, until a step without overflow. A value above 1 needs a ``hysteresis_tracker``, whose initial value
    is ``hysteresis``.

    ``SMALLEST_SCALE`` is 2**-127, the smallest power of two whose inverse is finite in FP32.

    After ``torch._amp_update_scale_`` and Apex's ``update_scale_hysteresis``, with bounds in addition.
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
    run(
        _UPDATE_SCALE,
        plain.moved_scale,
        (),
        (scale, growth_tracker, found_inf, *numbers, hysteresis_tracker, earlier_inf),
    )


def inverse_of(scale: Tensor) -> Tensor:
    """Return 1 / ``scale`` (float32, shape []) on its device, rounded once; no sync."""
    return scale.reciprocal()
