"""The kernels of mixed precision: each call takes lists of tensors and does all of them in one pass.

Every list is a list or tuple of tensors of float32, float16 or bfloat16, mixed as you like between the lists and inside
one, or of float64 (then the tensors at that place are float64 in every list: float64 stays float64). Any number of
tensors, 0 too; any sizes, 0 too; any strides. All on one device: callers group by device. Arithmetic is in FP32 (FP64
for float64), each result is rounded once, to nearest even: exactly ``(src.float() * factor).to(dst.dtype)``.

Nothing here is recorded by autograd: outputs that require grad are refused unless grad mode is off. Nothing syncs with
the device. What is wrong with a call (ValueError, TypeError) is found before the first write. Written tensors have
their version counter bumped, as by torch's in-place functions.

``found_inf`` is a float32 tensor of one element on the lists' device. A kernel only ever writes 1.0 into it, where it
meets an infinity or a NaN; zeroing it is the caller's (as for torch's ``_amp_foreach_non_finite_check_and_unscale_``).

Two backends give the same results, norms up to the rounding of their sums: the extension ``amp_patch._C``, and plain
torch where it is absent or not built for the tensors' device. ``AMP_PATCH_BACKEND=torch`` in the environment, or
``use_backend("torch")``, turns to plain torch.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, SupportsFloat, SupportsIndex, overload

import torch
from torch import Tensor

from amp_patch.support.blocks import without_grad

__all__ = [
    "backend",
    "backend_reason",
    "multi_tensor_adopt",
    "multi_tensor_axpby",
    "multi_tensor_check_finite",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_unscale",
    "multi_tensor_unscale_l2norm",
    "update_scale",
    "use_backend",
]

Tensors = Sequence[Tensor]
Number = float | Tensor

BACKENDS = ("cpp", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# The smallest power of two whose inverse is finite in FP32.
SMALLEST_SCALE = 2.0**-127

# ---------------------------------------------------------------------------------------------------------------------
# Backends


def _load() -> tuple[ModuleType | None, str]:
    """(amp_patch._C or None, why)."""
    try:
        noted = importlib.import_module("amp_patch._build").REASON  # by setup.py, where something went wrong
    except ImportError:
        noted = ""
    try:
        extension = importlib.import_module("amp_patch._C")
    except ImportError as error:
        if noted:
            return None, f"amp_patch._C is absent: {noted}"
        # A build for another torch or Python fails here with the loader's words.
        return None, f"amp_patch._C cannot be imported: {error}; build it with `pip install --no-build-isolation .`"
    built = f"amp_patch._C is built for {', '.join(extension.devices)}"
    return extension, f"{built}; {noted}" if noted else built


_C, _reason = _load()
_forced = os.environ.get("AMP_PATCH_BACKEND", "")  # "": the extension if there is one
if _forced not in ("", *BACKENDS):
    raise ValueError(f"AMP_PATCH_BACKEND={_forced!r} is none of {', '.join(BACKENDS)}: correct it or unset it")
if _forced == "cpp" and _C is None:
    raise ImportError(f"AMP_PATCH_BACKEND=cpp, but {_reason}")


def extension() -> ModuleType | None:
    """``amp_patch._C`` if it is there and not turned off: what ``backend()`` is called ``"cpp"`` for."""
    return None if _forced == "torch" else _C


def backend() -> str:
    """``"cpp"`` or ``"torch"``: what runs the kernels, where the extension is built for the tensors' device."""
    return "torch" if extension() is None else "cpp"


def backend_reason() -> str:
    """One line: why ``backend()`` is what it is."""
    return "AMP_PATCH_BACKEND or use_backend() asks for torch" if _C is not None and _forced == "torch" else _reason


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the kernels on ``"cpp"`` or ``"torch"`` inside the block, in all threads. For tests and benchmarks."""
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"use_backend: {name!r} is none of {', '.join(BACKENDS)}")
    if name == "cpp" and _C is None:
        raise RuntimeError(f"use_backend: {_reason}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


# ---------------------------------------------------------------------------------------------------------------------
# Contracts. The extension guards memory by the same rules; when it refuses, the words come from here.


def _check_tensor(name: str, which: str, t: object, device: torch.device, first: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {which} is a {type(t).__name__}, a tensor is wanted")
    if t.layout is torch.sparse_coo:
        raise TypeError(
            f"{name}: {which} is sparse ({t.layout}), a dense one is wanted: hand over its coalesced values "
            "(`t.coalesce().values()`)"
        )
    if t.layout is not torch.strided:
        raise TypeError(
            f"{name}: {which} is {t.layout}, a dense one is wanted: hand over its values (`t.values()`) or a dense copy"
        )
    if _is_wrapper(t):
        raise TypeError(
            f"{name}: {which} is a {type(t).__name__}, a plain tensor is wanted: hand over the one inside it "
            "(`t.to_local()` of a DTensor)"
        )
    if t.dtype not in DTYPES:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name}: {which} is {t.dtype}, one of {wanted} is wanted: convert it or leave it out")
    if not _has_memory(t):
        raise TypeError(
            f"{name}: {which} has no memory of its own (nested, a lazy zero, seen through torch.func, or its storage "
            "was freed), a plain tensor is wanted: hand over a copy (`t.clone()`), or call this outside the transform"
        )
    if t.is_neg():
        raise ValueError(f"{name}: {which} is a lazily negated view, call `.resolve_neg()` on it first")
    if t.device.type != "meta" and t.numel() and t.untyped_storage().nbytes() < _end(t) * t.element_size():
        raise ValueError(
            f"{name}: {which} has shape {list(t.shape)} but its storage holds {t.untyped_storage().nbytes()} bytes: "
            "its memory was given back (a sharded parameter outside its forward?), hand over tensors that have theirs"
        )
    if t.device != device:
        raise ValueError(
            f"{name}: {which} is on {t.device}, {first} on {device}: one call takes one device, group the tensors by "
            "device"
        )


def _end(t: Tensor) -> int:
    """Elements from the start of the storage to behind the last one of `t`."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1)


def _is_wrapper(t: Tensor) -> bool:
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _has_memory(t: Tensor) -> bool:
    if t.is_nested or t._is_zerotensor() or torch._is_functional_tensor(t):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    # Not its address: asking for that makes a lazy copy real.
    return t.device.type not in ("cpu", "cuda") or not t.numel() or t.untyped_storage().nbytes() != 0


def _check_unrecorded(name: str, which: str, written: Tensor) -> None:
    if written.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: {which} requires grad, and autograd would not see the write: call {name} under torch.no_grad()"
        )


def _check_one(
    name: str, which: str, t: object, device: torch.device, dtypes: tuple[torch.dtype, ...], written: bool
) -> None:
    wanted = f"a {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} tensor of one element on {device}"
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {which} is a {type(t).__name__}, {wanted} is wanted")
    if t.dtype not in dtypes or t.numel() != 1 or t.device != device or t.layout is not torch.strided or t.is_neg():
        lazy = "lazily negated " if t.is_neg() else ""
        raise ValueError(
            f"{name}: {which} is a {lazy}{t.dtype} tensor of shape {list(t.shape)} on {t.device}, {wanted} is wanted"
        )
    if _is_wrapper(t) or not _has_memory(t):
        raise TypeError(f"{name}: {which} is a {type(t).__name__} without memory of its own, {wanted} is wanted")
    if written:
        _check_unrecorded(name, which, t)


def _is_number(value: object) -> bool:
    """Whether the extension's binding and ``float`` take it: int, NumPy's, Fraction, but no text."""
    try:
        return isinstance(value, (SupportsFloat, SupportsIndex)) and (float(value), True)[1]
    except (TypeError, ValueError, OverflowError):  # an array of many elements, an int past 1.8e308
        return False


def _overlap(t: Tensor, out: Tensor) -> bool:
    """Whether writing ``out`` disturbs ``t``, where torch can tell cheaply; the very same elements are no overlap."""
    if t is out or not t.numel():
        return False
    if t.data_ptr() == out.data_ptr() and t.dtype == out.dtype and t.stride() == out.stride():
        return False
    if not all(torch.ops.aten.is_non_overlapping_and_dense(x) for x in (t, out)):
        return False
    ends = [x.data_ptr() + x.numel() * x.element_size() for x in (t, out)]
    return t.data_ptr() < ends[1] and out.data_ptr() < ends[0]


def _check_apart(name: str, written: str, outs: Tensors) -> None:
    """No two outputs share elements, where torch can tell cheaply: which of the two writes would be the last?"""

    def known(t: Tensor) -> int:  # how many elements lie one after another
        return t.numel() if torch.ops.aten.is_non_overlapping_and_dense(t) else 1

    spans = sorted(
        (t.data_ptr(), t.data_ptr() + known(t) * t.element_size(), i) for i, t in enumerate(outs) if t.numel()
    )
    for (_, end, i), (begin, _, j) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(
                f"{name}: tensors {min(i, j)} and {max(i, j)} of {written} overlap in memory: hand over each element "
                "once"
            )


def _check_lists(
    name: str,
    lists: dict[str, Tensors],
    written: str | None,
    found_inf: object = None,
    numbers: dict[str, object] | None = None,
) -> None:
    for label, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name}: {label} is a {type(tensors).__name__}, a list or tuple of tensors is wanted")
    (label0, list0), *_ = lists.items()
    device = next((t.device for t in (*list0, found_inf) if isinstance(t, Tensor)), torch.device("cpu"))
    for label, tensors in lists.items():
        if len(tensors) != len(list0):
            raise ValueError(f"{name}: {label} has {len(tensors)} tensors, {label0} has {len(list0)}")
        for i, (t, t0) in enumerate(zip(tensors, list0, strict=True)):
            _check_tensor(name, f"tensor {i} of {label}", t, device, f"tensor 0 of {label0}")
            if t.shape != t0.shape:
                raise ValueError(
                    f"{name}: tensor {i} of {label} has shape {list(t.shape)}, {label0} has {list(t0.shape)}"
                )
            if (t.dtype == torch.float64) != (t0.dtype == torch.float64):
                raise TypeError(
                    f"{name}: tensor {i} of {label} is {t.dtype}, {label0} has {t0.dtype}: float64 stays float64, "
                    "convert one of the two first"
                )
    for i, out in enumerate(lists[written] if written else ()):
        _check_unrecorded(name, f"tensor {i} of {written}", out)
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(
                f"{name}: tensor {i} of {written} overlaps itself (an expanded tensor, strides {list(out.stride())}): "
                "it cannot be written, hand over a `.clone()`"
            )
        for label, tensors in lists.items():
            if _overlap(tensors[i], out):
                raise ValueError(
                    f"{name}: tensor {i} of {written} overlaps tensor {i} of {label} in memory: they must be the same "
                    "elements or apart, hand over a `.clone()`"
                )
    if written:
        _check_apart(name, written, lists[written])
    if found_inf is not None:
        _check_one(name, "found_inf", found_inf, device, (torch.float32,), written=True)
    for label, number in (numbers or {}).items():
        if isinstance(number, Tensor):
            _check_one(name, label, number, device, (torch.float32, torch.float64), written=False)
        elif not _is_number(number):
            raise TypeError(
                f"{name}: {label} is a {type(number).__name__}, a float is wanted, or a float32 or float64 tensor of "
                f"one element on {device}"
            )


def _run(
    op: str, plain: Callable[..., Any], lists: tuple[Any, ...], rest: tuple[Any, ...], check: Callable[[], None]
) -> Any:
    """``op`` of the extension where it serves the tensors' device, else ``plain``; both take ``(*lists, *rest)``."""
    if _C is not None and _forced != "torch" and all(isinstance(tensors, (list, tuple)) for tensors in lists):
        first = next(iter(lists[0] if lists else rest), None)
        if not isinstance(first, Tensor) or first.device.type in _C.devices:
            try:
                return getattr(_C, op)(*lists, *rest)
            except (_C.Refused, TypeError):  # TypeError is pybind11's: something is no tensor or no number
                check()
                raise
    check()
    return _plainly(plain, *lists, *rest)


@without_grad
def _plainly(plain: Callable[..., Any], *args: Any) -> Any:
    return plain(*args)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


def multi_tensor_scale(src: Tensors, dst: Tensors, factor: Number, found_inf: Tensor | None = None) -> None:
    """``dst = src * factor``, rounded to dst's dtypes. With factor 1.0 and no found_inf it is the cast and the copy.

    ``dst`` is written in place; it may be ``src``, otherwise the two must not share memory. ``factor`` is a float, or a
    float32 or float64 tensor of one element on the lists' device, which is read there. ``found_inf`` is raised by a
    non-finite element of src and by a product that overflows, in FP32 or on the cast to dst's dtype.

    After Apex's ``amp_C.multi_tensor_scale``, which reads its flag from an int32 buffer and takes a float only.
    """
    _run(
        "scale",
        _scale,
        (src, dst),
        (factor, found_inf),
        lambda: _check_lists("multi_tensor_scale", {"src": src, "dst": dst}, "dst", found_inf, {"factor": factor}),
    )


def multi_tensor_unscale(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> None:
    """``grads *= inv_scale`` in place; ``found_inf`` as in ``multi_tensor_scale(grads, grads, inv_scale, found_inf)``.

    As ``torch._amp_foreach_non_finite_check_and_unscale_``, but for any mix of dtypes, FP16 too.
    """
    _run(
        "unscale",
        _unscale,
        (grads,),
        (inv_scale, found_inf),
        lambda: _check_lists("multi_tensor_unscale", {"grads": grads}, "grads", found_inf, {"inv_scale": inv_scale}),
    )


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
    _run(
        "axpby",
        _axpby,
        (x, y, out),
        (a, b, found_inf, check != "y", check != "x"),
        lambda: _check_lists("multi_tensor_axpby", {"x": x, "y": y, "out": out}, "out", found_inf, {"a": a, "b": b}),
    )


def multi_tensor_check_finite(tensors: Tensors, found_inf: Tensor) -> None:
    """Raise ``found_inf`` if any element of ``tensors`` is infinite or NaN. Writes nothing else."""
    _run(
        "check_finite",
        _check_finite,
        (tensors,),
        (found_inf,),
        lambda: _check_lists("multi_tensor_check_finite", {"tensors": tensors}, None, found_inf),
    )


@overload
def multi_tensor_l2norm(tensors: Tensors, per_tensor: Literal[False] = False) -> Tensor: ...
@overload
def multi_tensor_l2norm(tensors: Tensors, per_tensor: Literal[True]) -> tuple[Tensor, Tensor]: ...
def multi_tensor_l2norm(tensors: Tensors, per_tensor: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The 2-norm of all tensors taken together: a tensor of shape [] on their device (on the CPU if there are none).

    With ``per_tensor`` also a tensor of shape [len(tensors)] with the norm of each. Both are float32, or float64 if any
    of the tensors is. Squares are FP32: elements past 1.8e19 make the norm infinite, as in torch.

    After Apex's ``amp_C.multi_tensor_l2norm``.
    """
    total, norms = _run(
        "l2norm",
        _l2norm,
        (tensors,),
        (),
        lambda: _check_lists("multi_tensor_l2norm", {"tensors": tensors}, None),
    )
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
    """``multi_tensor_unscale``, then ``multi_tensor_l2norm`` of what it stored, in one pass: for clipping."""
    total, norms = _run(
        "unscale_l2norm",
        _unscale_l2norm,
        (grads,),
        (inv_scale, found_inf),
        lambda: _check_lists(
            "multi_tensor_unscale_l2norm", {"grads": grads}, "grads", found_inf, {"inv_scale": inv_scale}
        ),
    )
    return (total, norms) if per_tensor else total


def multi_tensor_adopt(params: Tensors, masters: Tensors) -> None:
    """Where a user changed a published low-precision weight, its FP32 master takes the new value.

    Element by element: ``master = param if master.to(param.dtype) != param else master``. So a master keeps its
    precision where nothing was edited, and a NaN in a parameter is adopted. ``masters`` are float32, written in place.
    """

    def check() -> None:
        _check_lists("multi_tensor_adopt", {"params": params, "masters": masters}, "masters")
        for i, master in enumerate(masters):
            if master.dtype != torch.float32:
                raise TypeError(f"multi_tensor_adopt: tensor {i} of masters is {master.dtype}, float32 is wanted")

    _run("adopt", _adopt, (params, masters), (), check)


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

    def check() -> None:
        device = scale.device if isinstance(scale, Tensor) else torch.device("cpu")
        _check_one(name, "scale", scale, device, (torch.float32,), written=True)
        _check_one(name, "growth_tracker", growth_tracker, device, (torch.int32,), written=True)
        _check_one(name, "found_inf", found_inf, device, (torch.float32,), written=False)
        if hysteresis_tracker is not None:
            _check_one(name, "hysteresis_tracker", hysteresis_tracker, device, (torch.int32,), written=True)
        for which, factor in (("growth_factor", growth_factor), ("backoff_factor", backoff_factor)):
            if not _is_number(factor):
                raise TypeError(f"{name}: {which} is {factor!r}, a float is wanted")
        for which, count in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            if not isinstance(count, SupportsIndex) or not -(2**31) <= operator.index(count) < 2**31:
                raise TypeError(f"{name}: {which} is {count!r}, an int of 32 bits is wanted")

    numbers = (growth_factor, backoff_factor, growth_interval, lowest, highest, hysteresis, hysteresis_tracker)
    _run("update_scale", _update_scale, (), (scale, growth_tracker, found_inf, *numbers), check)


# ---------------------------------------------------------------------------------------------------------------------
# The same in plain torch, under no_grad, after the checks


def _widen(tensors: Tensors) -> list[Tensor]:
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def _times(tensors: Tensors, factor: Number) -> list[Tensor]:
    wide = _widen(tensors)
    if not isinstance(factor, Tensor):
        return list(torch._foreach_mul(wide, float(factor)))
    # In the tensors' own type: where they have no dimensions either, the wider type of the two would win.
    factors = {dtype: factor.reshape(()).to(dtype) for dtype in {t.dtype for t in wide}}
    if len(factors) == 1:
        return list(torch._foreach_mul(wide, factors[wide[0].dtype]))
    return [t * factors[t.dtype] for t in wide]


def _raise_flag(found_inf: Tensor | None, finite: list[Tensor]) -> None:
    if found_inf is not None and finite:
        found_inf.masked_fill_(~torch.stack(finite).all(), 1.0)


def _scale(src: Tensors, dst: Tensors, factor: Number, found_inf: Tensor | None) -> None:
    if not src:
        return
    copies = not isinstance(factor, Tensor) and factor == 1.0 and found_inf is None  # every bit, a NaN's too
    torch._foreach_copy_(list(dst), list(src) if copies else _times(src, factor))
    _check_finite(dst, found_inf)


def _unscale(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> None:
    _scale(grads, grads, inv_scale, found_inf)


def _axpby(
    x: Tensors, y: Tensors, out: Tensors, a: Number, b: Number, found_inf: Tensor | None, watch_x: bool, watch_y: bool
) -> None:
    if not x:
        return
    excused = [
        torch.zeros_like(p, dtype=torch.bool) if watch_x and watch_y else ~(q if watch_x else p).isfinite()
        for p, q in zip(x, y, strict=True)
    ]
    raised = [
        torch.zeros_like(p, dtype=torch.bool) if watch_x and watch_y else ~(p if watch_x else q).isfinite()
        for p, q in zip(x, y, strict=True)
    ]
    torch._foreach_copy_(list(out), torch._foreach_add(_times(x, a), _times(y, b)))
    finite = [
        (t.isfinite() | (excuse & ~flagged)).all() for t, excuse, flagged in zip(out, excused, raised, strict=True)
    ]
    _raise_flag(found_inf, finite)


def _check_finite(tensors: Tensors, found_inf: Tensor | None) -> None:
    if found_inf is not None:
        _raise_flag(found_inf, [t.isfinite().all() for t in tensors])


def _l2norm(tensors: Tensors) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    if not tensors:
        return torch.zeros(()), torch.zeros(0)
    norms = torch.stack([torch.linalg.vector_norm(t, dtype=dtype) for t in tensors])
    return torch.linalg.vector_norm(norms), norms


def _unscale_l2norm(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    _unscale(grads, inv_scale, found_inf)
    total, norms = _l2norm(grads)
    return (total, norms) if grads or found_inf is None else (total.to(found_inf.device), norms.to(found_inf.device))


def _adopt(params: Tensors, masters: Tensors) -> None:
    for param, master in zip(params, masters, strict=True):
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))


def _update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    lowest: float,
    highest: float,
    hysteresis: int,
    hysteresis_tracker: Tensor | None,
) -> None:
    overflow = (found_inf != 0).reshape(scale.shape)
    exhausted = overflow
    if hysteresis_tracker is not None:
        hysteresis_tracker.copy_(
            torch.where(overflow.reshape(hysteresis_tracker.shape), hysteresis_tracker - 1, hysteresis)
        )
        exhausted = overflow & (hysteresis_tracker <= 0).reshape(scale.shape)
    # In FP64, rounded once, as the extension does.
    lower, higher = (scale.double() * factor for factor in (backoff_factor, growth_factor))
    lower, higher = lower.clamp(min=SMALLEST_SCALE).float(), higher.float()
    steps = torch.where(overflow, 0, growth_tracker.reshape(scale.shape) + 1)
    grows = ~overflow & (steps >= growth_interval)
    growth_tracker.copy_(torch.where(grows, 0, steps).reshape(growth_tracker.shape))
    new = torch.where(exhausted, lower, torch.where(grows & higher.isfinite(), higher, scale))
    scale.copy_(new.clamp(lowest, highest))
