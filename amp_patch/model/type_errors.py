"""Errors about tensors of another type than the cast made: refusals, and advice added to torch's errors."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode

from amp_patch.model.keep_fp32 import is_batch_norm
from amp_patch.model.of_model import followed_policy, running
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import fsdp
from amp_patch.support.compiled import wraps
from amp_patch.support.generated_class import key_of
from amp_patch.support.scripts_line import frames_of, raised_at

# oneDNN's error names no types. Without the last pattern, the error of a recurrent network in BF16 with an FP32 state
# would get no advice.
_DTYPE_ERROR = re.compile(
    r"same dtype|scalar type|should be the same|dtype mismatch|mixed dtype|must have the same type"
    r"|dtypes must be the same|self\.dtype to be equal|dtypes match|expected dtype .* but got|Found dtype \w+ but"
    r"|type promoting not supported|to have the same type"
    r"|could not create a primitive descriptor for the (LSTM|GRU|RNN|vanilla)",
    re.I,
)
_FLOAT_NORMS = "amp.register_float_function(torch.nn.functional, 'batch_norm')"
_OVERFLOW = re.compile(r"cannot be converted to type (\S+) without overflow")
# Errors of functions without a kernel for a low-precision type.
_NO_KERNEL = re.compile(
    r"not implemented for '(Complex)?(Half|BFloat16)'|Unsupported dtype (Half|BFloat16)"
    r"|Low precision dtypes not supported|must be either float or double dtype"
    r"|support tensors of type: (Half|BFloat16)|\((Half|BFloat16)\{"
    r"|handle types other than float and double|Expected both inputs to be Half, Float or Double tensors"
    r"|only supported for half, float and double tensors"
)

# torch's names of integer types in these errors: "got Long and Half", "Input type (unsigned char) and ...".
_INTEGER = re.compile(r"\b(bool|byte|char|short|int|long)\b", re.I)


def refuse_another_type(model: Any, fn: Callable[[Tensor], Tensor], policy: Policy) -> None:
    """Raise if `fn`, to be applied to all tensors of a model, would change their type and not only their device.

    At O0 this is allowed, as in the plain script.
    """
    if policy.changes_nothing:
        return
    low = policy.cast_model_type
    for dtype in (torch.float32,) if low is None else (torch.float32, low):
        try:
            became = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
        except Exception:  # `fn` fails on an empty CPU tensor: its result is unknown
            return
        if low is None and became in LOW_PRECISION:
            raise RuntimeError(
                f"{type(model).__name__} went through initialize(opt_level={policy.opt_level!r}), which trains FP32 "
                f"weights: in {became} small updates would be rounded away. Call amp.restore() before a conversion of "
                "the model, convert an FP32 copy, amp.fp32_copy(model), or take opt_level='O2', which casts the model "
                "and keeps FP32 masters"
            )
        if became is not dtype and became in (torch.float32, *LOW_PRECISION):
            raise RuntimeError(
                f"{type(model).__name__} went through initialize(opt_level={policy.opt_level!r}), which cast it to "
                f"{low}, with FP32 masters if the level has any: a conversion to {became} would undo half of that. "
                "Call amp.restore() for the FP32 model, amp.fp32_copy(model) for an FP32 copy, initialize() again for "
                "another level or type; name modules that must stay FP32 in initialize(..., keep_fp32=...)"
            )


def explain_types(model: nn.Module, policy: Policy, error: RuntimeError | KeyError, kept_class: type) -> None:
    """If `error` of the forward of `model` is about types, raise it again with the line, opt level and way out.

    Otherwise return, so that the caller raises `error` unchanged.
    """
    if isinstance(error, KeyError) and error.args != (policy.dtype,):
        return
    if policy.cast_model_type is not None:
        if fsdp.is_fsdp(model) and (is_about_types(error) or _names_integers(error)):
            return
        _refuse_integers(model, error)
        if is_about_types(error):
            _refuse_changed_types(model, policy, error, kept_class)
    _raise_with_advice(f"The forward of {_place(model, error)}", policy, error)


def explain_types_in_body(policy: Policy, error: RuntimeError | KeyError) -> None:
    """If `error` of a body of `scale_loss` is about types, raise it with line, opt level and way out; else return."""
    part = ""
    if policy.cast_model_type is not None and is_about_types(error):
        part = (
            ". The inputs of a part of the model that is called outside of forward, model.body(x), are not cast: call "
            "the model, or move the call into a method and name it: initialize(..., methods=('encode',))"
        )
    _raise_with_advice(f"The body of scale_loss{raised_at(error)}", policy, error, part)


def _raise_with_advice(where: str, policy: Policy, error: RuntimeError | KeyError, more: str = "") -> None:
    if policy.makes_low_tensors and (advice := _advice(policy, error)) is not None:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else RuntimeError
        raise kind(f"{error}\n{where} {advice}{more}") from error


def _advice(policy: Policy, error: RuntimeError | KeyError) -> str | None:
    """Return the cause of torch's `error` at this level, and the ways out; None if it is not about types."""
    low, level, casts_model = policy.dtype, policy.opt_level, policy.cast_model_type is not None
    if _OVERFLOW.search(str(error)):
        return (
            f"fills a tensor with a number that is beyond its range: {level} makes tensors {low}. Take the smallest "
            "number of its type, torch.finfo(x.dtype).min, or the largest, in place of a fixed one such as -1e9"
        )
    if _NO_KERNEL.search(str(error)) or isinstance(error, KeyError):
        kept = ", or name its module in initialize(..., keep_fp32=[...])" if casts_model else ""
        if isinstance(error, KeyError) and not casts_model:  # a function in Python, whose products O1 casts
            kept = " in `with amp.disable_casts():`"
        wide = "z.to(torch.complex64)" if "'Complex" in str(error) else "x.float()"
        return f"calls a function that torch does not have for {low}, the type of {level}: give it {wide}{kept}"
    if not is_about_types(error):
        return None
    if casts_model and _in_autocast(error):
        return (
            f"mixes types: initialize() cast the model to {low}, and a torch.autocast around it casts to types of its "
            "own. Remove that autocast; of Accelerate's it is Accelerator(mixed_precision='no')"
        )
    if any(frame.f_code.co_name == "batch_norm" for frame, _ in frames_of(error)):
        way = "pass keep_batchnorm_fp32=False to" if casts_model else f"call {_FLOAT_NORMS} before"
        return f"runs a batch norm under torch.vmap, where its tensors must have one type: {way} initialize()"
    if casts_model:
        return (
            f"mixes types: initialize() cast the model to {low}, and a tensor here is another type, such as one that "
            "forward makes (torch.arange, torch.ones, a mask). Make it in the type of an input (x.new_ones(8), "
            "dtype=x.dtype, other.to(x.dtype)), register it as a buffer, name the module in initialize(..., "
            "keep_fp32=...), or take O1 or O4, whose functions cast what they are given"
        )
    return (
        f"mixes types: {level} makes tensors {low} and does not cast the function here. Give it x.float(), or name "
        "it to amp.register_float_function(module, name) before initialize(). If a local variable holds a function of "
        "torch (loss_fn = F.mse_loss), assign it after initialize()"
    )


def _in_autocast(error: RuntimeError | KeyError) -> bool:
    """Return whether a torch.autocast is on around the forward, or around the function that replaces it."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return True
    return any(frame.f_code.co_filename == autocast_mode.__file__ for frame, _ in frames_of(error))


def _refuse_changed_types(model: nn.Module, policy: Policy, error: RuntimeError | KeyError, kept_class: type) -> None:
    """If user code has changed the type of weights since `initialize`, raise `error` with their names; else return."""
    norms, buffers = bool(policy.keep_batchnorm_fp32), policy.keep_buffers_fp32
    kept = (m for m in model.modules() if isinstance(m, kept_class) or (norms and is_batch_norm(m)))
    stay = {inner for module in kept for inner in module.modules()}
    retyped = {name for guest in vars(model)["_amp"].guests.all for name in guest.retyped}
    names = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_floating_point()
        if f"{path}.{name}".lstrip(".") not in retyped
        if tensor.dtype
        is not (torch.float32 if module in stay or (buffers and name in module._buffers) else policy.cast_model_type)
    ]
    if not names:
        return
    _refuse_new_modules(model, policy, error, names)
    shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    raise RuntimeError(
        f"{error}\n{type(model).__name__} was cast to {policy.cast_model_type} by initialize(), and {shown} "
        "got another type since: by .float(), .half() or .to(dtype) of a part, by torch.func.functional_call "
        "with values of another type, or as a new tensor. Name modules that must stay FP32 in "
        "initialize(..., keep_fp32=...), give functional_call values of the types that model.named_parameters() has, "
        "or run amp.fp32_copy(model)"
    ) from error


# Model of a training -> the modules inside it at `initialize`. A copy of a model is not in the table.
_modules: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def note_modules(model: nn.Module) -> None:
    """Store the modules inside `model`, which enters a training, for errors about modules that are added later."""
    _modules[model] = weakref.WeakSet(model.modules())


def _refuse_new_modules(model: nn.Module, policy: Policy, error: RuntimeError | KeyError, names: list[str]) -> None:
    """If tensors in `names` are in modules added since `initialize`, raise `error` with the modules; else return."""
    known = _modules.get(model) or set(model.modules())
    new = [path for path, module in model.named_modules() if module not in known]
    outermost = [path for path in new if path.rpartition(".")[0] not in new]
    if added := [path for path in outermost if any(name.startswith(f"{path}.") for name in names)]:
        raise RuntimeError(
            f"{error}\n{type(model).__name__} was cast to {policy.cast_model_type} by initialize(), and has got new "
            f"modules since, which were not: {', '.join(map(repr, added))}. Add their parameters to the optimizer "
            "(optimizer.add_param_group, or a new one) and call amp.initialize(model, optimizer, opt_level="
            f"{policy.opt_level!r}) again; or cast them, model.get_submodule({added[0]!r}).to("
            f"{policy.cast_model_type}), before optimizer.add_param_group"
        ) from error


def _refuse_integers(model: nn.Module, error: RuntimeError | KeyError) -> None:
    """If `error` is about integers with floats, an error of the script at any level, raise it with the way out."""
    if _names_integers(error) and error.__cause__ is None:  # else an inner model has explained it
        raise RuntimeError(
            f"{error}\nIn {_place(model, error)} integers meet floats, which fails in FP32 too: the cause is the "
            "input, not the opt level (initialize() casts only floating tensors). Pass x.float() for numbers, and "
            "int64 for indices"
        ) from error


# If user code calls a method of a cast model directly and torch raises an error about types, each subscriber is called
# with the model, the method's name and the error. If one returns True, the method casts more, and is called again.
method_subscribers: list[Callable[[nn.Module, str, RuntimeError], bool]] = []


def is_about_types(error: RuntimeError | KeyError) -> bool:
    """Tell whether the text of torch's error says that tensors of two floating types met."""
    words = str(error)
    return bool(_DTYPE_ERROR.search(words)) and not (_NO_KERNEL.search(words) or _names_integers(error))


def _names_integers(error: RuntimeError | KeyError) -> bool:
    words = str(error).partition("\n")[0]  # the rest is our advice, with names of modules
    return _DTYPE_ERROR.search(words) is not None and _INTEGER.search(words) is not None


def _place(model: nn.Module, error: RuntimeError | KeyError) -> str:
    """Return the innermost module of `model` that raised `error`, and the line."""
    names = {module: name for name, module in model.named_modules()}
    owners = (frame.f_locals.get("self") for frame, _ in frames_of(error))
    inside = [names[own] for own in owners if isinstance(own, nn.Module) and own in names]
    where = f"module {inside[-1]!r} of {type(model).__name__}" if inside and inside[-1] else type(model).__name__
    return f"{where}{raised_at(error)}"


def advising(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, a method of a cast model: outside of a forward, its errors about types get advice added.

    If a subscriber of `method_subscribers` returns True, the method is called again instead. Inside a forward errors
    pass unchanged: `explain_types` adds the advice.
    """

    @wraps(function)
    def advised(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except RuntimeError as error:
            policy = followed_policy(self)
            if policy is None or policy.cast_model_type is None or running.policy is not None:
                raise
            _refuse_integers(self, error)
            if not is_about_types(error):
                raise
            if any(subscriber(self, name, error) for subscriber in tuple(method_subscribers)):
                return getattr(self, name)(*args, **kwargs)
            if name in key_of(self):
                raise
            raise RuntimeError(
                f"{error}\n{type(self).__name__}.{name}() was called directly, so its inputs were not cast to "
                f"{policy.cast_model_type} as those of forward() are; name it: initialize(..., methods=({name!r},))"
            ) from error

    return advised
