"""The cast rules that the op lists name: for each rule a function that casts the arguments of one call and makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import in_fp32, lean_loss, low_bit
from amp_patch.casts.in_fp32 import Alone, cross_entropy_alone, direction, direction_alone, inexact_alone, rnn_alone
from amp_patch.casts.state import cast_weight, is_plain_eager, outside
from amp_patch.casts.thread_state import is_enabled, set_enabled
from amp_patch.casts.upcast import Upcast, rounded
from amp_patch.support import flat_rnn
from amp_patch.support.tree import map_tensors, tensors

if TYPE_CHECKING:
    from amp_patch.policy import Policy

    Args = tuple[Any, ...]
    Kwargs = dict[str, Any]
    Apply = Callable[[Callable[..., Any], Args, Kwargs, Policy], Any]
    CastOne = Callable[[Tensor, torch.dtype], Tensor]

_FLOAT16, _BFLOAT16, _FLOAT32 = torch.float16, torch.bfloat16, torch.float32
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_WIDTH = {_FLOAT16: 1, _BFLOAT16: 1, _FLOAT32: 2, torch.float64: 3}

# ---------------------------------------------------------------------------------------------------------------------
# One tensor. float64, integer, complex and 8-bit tensors are never touched.


def _lowered(tensor: Tensor, low: torch.dtype) -> Tensor:
    found = tensor.dtype
    if found is low:
        return tensor
    if found is _FLOAT32:
        return cast_weight(tensor, low)
    return tensor.to(low) if found is _FLOAT16 or found is _BFLOAT16 else tensor


def _raised(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    found = tensor.dtype
    return tensor.to(dtype) if found is _FLOAT16 or found is _BFLOAT16 else tensor


def _matched(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    found = tensor.dtype
    return tensor.to(dtype) if found is not dtype and _WIDTH.get(found, 3) < 3 else tensor


# ---------------------------------------------------------------------------------------------------------------------
# The arguments of one call. If nothing is to be cast, each function returns the object that it received.


def _cast_args(args: Args, one: CastOne, dtype: torch.dtype) -> Args:
    """Return `args` with `one` applied to the tensors in it, also inside lists and tuples.

    torch's own functions take no other containers.
    """
    out: list[Any] | None = None
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            new: Any = one(value, dtype)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, list, tuple)):
            new = _cast_args(value, one, dtype)  # type: ignore[arg-type]
        else:
            continue
        if new is not value:
            if out is None:
                out = list(args)
            out[index] = new
    if out is None:
        return args
    return out if isinstance(args, list) else tuple(out)


def _cast_kwargs(kwargs: Kwargs, one: CastOne, dtype: torch.dtype) -> Kwargs:
    if not kwargs:
        return kwargs
    values = tuple(kwargs.values())
    new = _cast_args(values, one, dtype)
    return kwargs if new is values else dict(zip(kwargs, new, strict=True))


def _cast_trees(values: Args, one: CastOne, dtype: torch.dtype) -> Args:
    """Return `values` with `one` applied to the tensors in every container that `support/tree.py` knows.

    Functions of the user may take tensors in any of these containers.
    """
    mapped: Args = map_tensors(lambda tensor: one(tensor, dtype), values)
    return mapped


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _is_low(tensor: Tensor) -> bool:
    return tensor.dtype is _FLOAT16 or tensor.dtype is _BFLOAT16


def _widest(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Return the widest floating type among the tensors; None if all have one type. FP16 with BF16 gives FP32.

    As in torch's own promotion, tensors without dimensions count only if all floating tensors have none.
    """
    first: torch.dtype | None = None
    mixed = False
    for tensor in _tensors(args) if not kwargs else _tensors((args, kwargs)):
        found = tensor.dtype
        if found is not first and found in _WIDTH:
            if first is None:
                first = found
            else:
                mixed = True
    if not mixed:
        return None
    floating = [tensor for tensor in _tensors((args, kwargs)) if tensor.dtype in _WIDTH]
    voters = [tensor.dtype for tensor in floating if tensor.dim() > 0] or [tensor.dtype for tensor in floating]
    return functools.reduce(torch.promote_types, voters)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "")


# ---------------------------------------------------------------------------------------------------------------------
# The rules: (function, args, kwargs, policy) -> the function's result. They are called only while casts act. oplists.py
# says what each rule does.


def _lower(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    low = policy.dtype
    if not is_dynamo_compiling():  # Dynamo refuses to read a layout in the backward of an autograd function
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.layout in _SPARSE:
                return _sparse(function, args, kwargs, policy)
    return function(*_cast_args(args, _lowered, low), **_cast_kwargs(kwargs, _lowered, low))


def _product(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    name, others = _name(function), _lower if policy.patch_torch_functions else _none
    recipe = policy.product_format
    operands = None if recipe is None else low_bit.operands_of(name, args, kwargs)
    if recipe is None or operands is None:
        return others(function, args, kwargs, policy)
    if policy.patch_torch_functions:
        low = policy.dtype
        three = operands.a, operands.b, operands.bias  # torch 2.6 traces no slice and no `_replace` of a named tuple
        a, b, bias = (_lowered(each, low) if isinstance(each, Tensor) else each for each in three)
        operands = low_bit.Operands(a, b, bias, operands.transposed)
    result = low_bit.multiply(operands, recipe)
    return others(function, args, kwargs, policy) if result is None else result


def _sparse(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    # torch has low-precision kernels only for some layouts and products, and the CPU kernels accumulate in the low
    # type.
    result = _fp32(function, args, kwargs, policy)
    dense = isinstance(result, Tensor) and result.layout is torch.strided and result.dtype is _FLOAT32
    return result.to(policy.dtype) if dense else result


def _of_several(apply: Apply) -> Apply:
    def einsum(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
        # With one operand einsum multiplies nothing. The result may be a view that the user writes through: a cast
        # would redirect those writes into a copy.
        several = sum(1 for _ in _tensors((args, kwargs))) > 1
        return apply(function, args, kwargs, policy) if several else function(*args, **kwargs)

    return einsum


def _rnn(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    # A torch.autocast around the call would not do: on CUDA it casts an RNN to FP16, even if its own type is BF16.
    cast = _cast_args(args, _lowered, policy.dtype)
    if not is_dynamo_compiling() and is_plain_eager():
        flat_rnn.flatten_casts(_name(function), args, cast)
    return rnn_alone(function, cast, _cast_kwargs(kwargs, _lowered, policy.dtype))


def _fp32(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy | None) -> Any:
    if kwargs:
        if kwargs.get("dtype") is not None:  # an explicit type is the user's choice, as under torch.autocast
            return function(*args, **kwargs)
        kwargs = _cast_kwargs(kwargs, _raised, _FLOAT32)
    return function(*_cast_args(args, _raised, _FLOAT32), **kwargs)


def _loss(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy | None = None) -> Any:
    loss = None if is_dynamo_compiling() else lean_loss.cross_entropy(args, kwargs)
    return _fp32(function, args, kwargs, policy) if loss is None else loss


def _loss_alone(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return function(*args, **kwargs) if lean_loss.user_has_chosen() else _loss(function, args, kwargs)


def _norm(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    given: Any = args[0] if args else kwargs.get("input")
    low = given.dtype if isinstance(given, Tensor) and _is_low(given) else None
    if low is None or not policy.low_precision_norms:
        return _fp32(function, args, kwargs, policy)
    if given.device.type != "cpu":
        return function(*_cast_args(args, _lowered, low), **_cast_kwargs(kwargs, _lowered, low))
    # CPU kernels of layer norm accumulate the weights' gradients in the input's type: in BF16, sums over 8192 rows had
    # an error of a tenth. FP16 and channels-last kernels are also slower than casts to FP32 and back.
    upcast = Upcast()
    args, kwargs = _cast_args(args, upcast, _FLOAT32), _cast_kwargs(kwargs, upcast, _FLOAT32)
    result = upcast.run(function, args, kwargs)
    if isinstance(result, tuple):  # native_layer_norm: the statistics stay FP32, as in CUDA's kernel
        return rounded(result[0], low), *result[1:]
    return rounded(result, low)


def _sigmoid(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    return (_fp32 if policy.allow_banned else _none)(function, args, kwargs, policy)


def _direction(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    return direction(function, args, kwargs)


def _promote(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    widest = _widest(args, kwargs)
    if widest is not None:
        args, kwargs = _cast_args(args, _matched, widest), _cast_kwargs(kwargs, _matched, widest)
    return function(*args, **kwargs)


def _mixed_fp32(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    _refuse_fp64((args, kwargs), _name(function))
    if len({tensor.dtype for tensor in _tensors((args, kwargs)) if tensor.dtype in _WIDTH}) > 1:
        args, kwargs = _cast_args(args, _raised, _FLOAT32), _cast_kwargs(kwargs, _raised, _FLOAT32)
    return function(*args, **kwargs)


def _refuse_fp64(values: Any, name: str) -> None:
    """Raise if FP16 or BF16 meets FP64, as Apex does. (Apex also refuses FP32 with FP64; torch promotes FP32.)"""
    found = {tensor.dtype for tensor in _tensors(values)}
    if torch.float64 in found and (_FLOAT16 in found or _BFLOAT16 in found):
        low = _FLOAT16 if _FLOAT16 in found else _BFLOAT16
        raise NotImplementedError(
            f"{name}: got tensors of {low} and torch.float64, which Apex's lists do not promote; cast the float64 "
            "tensor with .float(), or call inside amp.disable_casts()"
        )


def _in_place_fp32(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    if args and isinstance(args[0], Tensor) and _is_low(args[0]):
        name = _name(function)
        raise NotImplementedError(
            f"{name}: got a {args[0].dtype} tensor to change in place, and the result is FP32 by Apex's lists; use "
            f"{name.removesuffix('_')}, which returns a new tensor, or call inside amp.disable_casts()"
        )
    return _fp32(function, args, kwargs, policy)


def _none(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    return function(*args, **kwargs)


def _match_self(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    if not (args and isinstance(args[0], Tensor)):
        return function(*args, **kwargs)  # torch raises its own error for the wrong call
    own = args[0].dtype
    if own in _WIDTH:
        args, kwargs = _cast_args(args, _matched, own), _cast_kwargs(kwargs, _matched, own)
    return function(*args, **kwargs)


INSTEAD_OF_BANNED = (
    "Drop the sigmoid before it and use binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss), or cast the "
    "inputs with .float(), or pass allow_banned=True to initialize() to run it in FP32"
)


# Called with the name of a banned function when a policy with `allow_banned` lets it run.
banned_subscribers: list[Callable[[str], Any]] = []


def _banned(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    low = next((tensor.dtype for tensor in _tensors((args, kwargs)) if _is_low(tensor)), None)
    if low is not None and not policy.allow_banned:
        # Apex raises NotImplementedError, torch RuntimeError, its base class: handlers of either catch this.
        raise NotImplementedError(
            f"{function.__name__}: got a {low} tensor; the logarithms of low-precision probabilities overflow. "
            f"{INSTEAD_OF_BANNED}"
        )
    if not is_dynamo_compiling():
        if low is not None:
            in_fp32.look(args, kwargs)
        for subscriber in tuple(banned_subscribers) if policy.allow_banned else ():
            subscriber(function.__name__)
    return _fp32(function, args, kwargs, policy)


def _rnn_input(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    if len(args) > 1 and isinstance(args[1], Tensor):
        module, given = args[0], args[1]
        wanted = module._flat_weights[0].dtype
        if given.dtype is not wanted and given.dtype in _WIDTH and wanted in _WIDTH:
            # The method reads only dtype and shape: an expanded tensor of one element replaces the cast tensor.
            args = (module, given.new_empty((), dtype=wanted).expand(given.shape), *args[2:])
    return function(*args, **kwargs)


# torch.jit compiles a function once for each set of device types (CPU, CUDA) whose autocast is enabled, and the code
# contains the autocast dtypes of that moment. Code compiled under FP16 would run in FP16 under BF16 too, and its
# backward fails. So each set has the same dtypes at each call: one device type alone has torch's default dtype, as
# under torch.autocast, and both device types together have the other dtypes.
_OTHER_DTYPES = {"cpu": torch.float16, "cuda": torch.bfloat16}


def _under_autocast(function: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Call `function(*args, **kwargs)` as inside a torch.autocast to `dtype`, for the device of its first tensor.

    torch.autocast's cache of cast weights is off during the call. Otherwise torch would use a cached weight until the
    outermost torch.autocast ends, also after an optimizer has updated the weight.
    """
    device = next((tensor.device.type for tensor in tensors((args, kwargs))), None)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = {device: dtype} if _OTHER_DTYPES.get(device) is not dtype else _OTHER_DTYPES
    before = [(kind, is_enabled(kind), torch.get_autocast_dtype(kind)) for kind in wanted]
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        for kind, low in wanted.items():
            torch.set_autocast_dtype(kind, low)
            set_enabled(kind, True)
        return function(*args, **kwargs)
    finally:
        for kind, enabled, earlier in before:
            set_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, earlier)
        torch.set_autocast_cache_enabled(cached)


def _scripted(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    if outside():  # the call may be made by the export of an FP32 copy of the model, which must contain no casts
        return function(*args, **kwargs)
    return _under_autocast(function, args, kwargs, policy.dtype)


def _disabled(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    return False


def _user(one: CastOne, dtype: torch.dtype | None = None) -> Apply:
    def cast(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
        args, kwargs = _cast_trees((args, kwargs), one, policy.dtype if dtype is None else dtype)
        return function(*args, **kwargs)

    return cast


def _user_promote(function: Callable[..., Any], args: Args, kwargs: Kwargs, policy: Policy) -> Any:
    seen = tensors((args, kwargs))
    if policy.op_lists == "apex":
        _refuse_fp64(seen, _name(function))
    widest = _widest(tuple(seen), {})
    if widest is not None:
        args, kwargs = _cast_trees((args, kwargs), _matched, widest)
    return function(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule that casts calls, with the properties that the wrappers, the compiled side and `explain` read.

    Attributes:
        name: as in the op lists; oplists.py describes each.
        apply: makes one call: (function, args, kwargs, policy) -> the function's result.
        shown: the name of the rule in `explain`. None: functions under this rule compute nothing and are not shown.
        registered_by: the function of `amp` that registers a user's function under this rule, or "". `explain` shows
            this name for registered functions.
        for_users: the rule is only for functions that users register or decorate. It casts tensors in all containers of
            the call, and the calls inside the function follow the op lists.
        alone: makes a call while no casts act, mostly at levels that cast the model: (function, args, kwargs) -> the
            function's result. None: the function is called unchanged.
        in_cpp: the extension implements the rule (csrc/casts/rules.h). If False, the C wrapper calls the Python
            wrapper.
    """

    name: str
    apply: Apply
    shown: str | None = None
    registered_by: str = ""
    for_users: bool = False
    alone: Alone | None = None
    in_cpp: bool = False


_HALF = "register_half_function"
PRODUCT = "product"  # the one rule that acts if `patch_torch_functions` is off
_TABLE = (
    Rule("none", _none, shown="none", registered_by="register_without_rule", in_cpp=True),
    Rule("lower", _lower, shown="lower", registered_by=_HALF, in_cpp=True),
    Rule(PRODUCT, _product, shown="lower", registered_by=_HALF, in_cpp=True),
    Rule("sparse", _sparse, shown="fp32 (sparse)"),
    Rule("einsum", _of_several(_lower), shown="lower (einsum)", registered_by=_HALF),
    Rule("fused", _lower, shown="lower"),
    Rule("rnn", _rnn, shown="lower (rnn)", registered_by=_HALF, alone=rnn_alone),
    Rule("fp32", _fp32, shown="fp32", in_cpp=True),
    Rule("loss", _loss, shown="fp32", alone=_loss_alone),
    Rule("norm", _norm, shown="fp32", in_cpp=True),
    Rule("sigmoid", _sigmoid, shown="fp32 (sigmoid)", in_cpp=True),
    Rule("direction", _direction, shown="fp32", alone=direction_alone),
    Rule("inexact", _fp32, shown="fp32", alone=inexact_alone),
    Rule("widest", _promote, shown="widest", in_cpp=True),
    Rule("match_self", _match_self, shown="match_self", in_cpp=True),
    Rule("banned", _banned, shown="banned", alone=cross_entropy_alone),
    Rule("scripted", _scripted, shown="torch.autocast"),
    Rule("rnn_input", _rnn_input),
    Rule("fused_input", _lower),
    Rule("disabled", _disabled),
    Rule("einsum_widest", _of_several(_promote), shown="widest (einsum)"),
    Rule("mixed_fp32", _mixed_fp32, shown="widest (mixed_fp32)", in_cpp=True),
    Rule("in_place_fp32", _in_place_fp32, shown="fp32 (in place)"),
    Rule("user_lower", _user(_lowered), shown="lower", registered_by=_HALF, for_users=True),
    Rule("user_fp32", _user(_raised, _FLOAT32), shown="fp32", registered_by="register_float_function", for_users=True),
    Rule("user_widest", _user_promote, shown="widest", registered_by="register_promote_function", for_users=True),
)
RULES = {rule.name: rule for rule in _TABLE}
