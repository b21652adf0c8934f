"""Parameters and buffers of a model: checks before a cast, the cast and its undo, loading of checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.grad_field import own_grad, set_own_grad
from amp_patch.masters.masters import disconnect, link_of, load, master_of
from amp_patch.model import buffers, incoming
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import distributed, flat_rnn, fsdp
from amp_patch.support.generated_class import base_class
from amp_patch.support.quantized import is_quantized
from amp_patch.support.tensor_content import set_data
from amp_patch.support.words import of_class


def check_model(model: Any, methods: Collection[str] = ()) -> None:
    """Raise if `model` is no module, is wrapped (DDP, FSDP1), scripted, or has no `forward` in its class."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        kind, way = of_class(model), ""
        if hasattr(model, "param_groups"):
            kind, way = f"{kind}, an optimizer", "; the model comes first: initialize(model, optimizer)"
        elif isinstance(model, Tensor | Iterator):
            way = "; give it the model itself in place of model.parameters(): initialize(model, optimizer)"
        raise TypeError(f"initialize: models holds {kind}; wanted a torch.nn.Module or a list of them{way}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"initialize: the model is wrapped in {name}; pass the model itself and wrap what initialize() returns"
        )
    wrapped = next((key for key, module in model.named_modules() if fsdp.is_fsdp1(module)), None)
    if wrapped is not None:
        raise ValueError(
            f"initialize: {repr(wrapped) + ' of ' if wrapped else ''}the model is wrapped in "
            "FullyShardedDataParallel, whose flattened shards have no common overflow check here; "
            "shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead, then call initialize()"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"initialize: {name} is a ScriptModule, whose class and forward cannot be extended; pass the model that it "
            "was made from (torch.jit.trace or script the trained FP32 copy: amp.fp32_copy)"
        )
    if "forward" in vars(model):
        raise ValueError(
            f"initialize: this {name} has a `forward` in its __dict__, which hides the one of its class; "
            "define forward on the class, or call initialize() before something replaces it"
        )
    cls: Any = base_class(model)
    if cls.forward is nn.Module.forward and cls.__call__ is not nn.Module.__call__ and "__call__" not in methods:
        raise ValueError(
            f"initialize: {name} defines __call__ and no forward, around which casts and hooks act; rename it "
            "forward, or name it: initialize(..., methods=('__call__',))"
        )


def check_methods(models: list[nn.Module], methods: Collection[str]) -> None:
    """Raise if a name in `methods` is no method of any model, or a static or class method."""
    if isinstance(methods, str):
        raise TypeError(
            f"initialize: methods is the string {methods!r}; wanted a tuple of names: methods=({methods!r},)"
        )
    for name in methods:
        if any(isinstance(inspect.getattr_static(model, name, None), (staticmethod, classmethod)) for model in models):
            raise ValueError(f"initialize: methods names {name!r}, a static or class method, which has no model to run")
        if not any(callable(getattr(model, name, None)) for model in models):
            kinds = ", ".join(type(model).__name__ for model in models)
            raise ValueError(f"initialize: methods names {name!r}, which {kinds} does not have")


def check_types(model: nn.Module, policy: Policy, kept: list[nn.Module], *, takes_any: bool) -> None:
    """Raise if a floating parameter of `model` has a type that `initialize` does not take.

    FP64 parameters are taken if the policy does not cast them. FP16 and BF16 parameters are taken if `takes_any`;
    `ranges.check_models` then tests that no value is lost.
    """
    stays = {p for module in kept for p in module.parameters()}
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"initialize: parameter {name!r} of {type(model).__name__} is lazy and has no values yet; run one "
                "forward pass first"
            )
        if param.dtype in LOW_PRECISION and not takes_any:
            raise ValueError(
                f"initialize: parameter {name!r} of {type(model).__name__} is {param.dtype}; wanted a model in FP32, "
                "which the opt level then casts: call model.float() first and leave out .half() and .bfloat16()"
            )
        if (
            param.dtype is torch.float64
            and not is_quantized(param)
            and policy.cast_model_type is not None
            and param not in stays
        ):
            raise ValueError(
                f"initialize: parameter {name!r} of {type(model).__name__} is torch.float64 and opt_level "
                f"{policy.opt_level!r} casts FP32 models: call model.float() first, or name its module in keep_fp32"
            )


def check_steps(model: nn.Module, policy: Policy) -> None:
    """Raise if an optimizer steps parameters of `model` in backward, before `policy` has their gradients unscaled."""
    if not (policy.checks_gradients or policy.cast_model_type is not None):
        return
    for name, param in model.named_parameters():
        if getattr(param, "_in_backward_optimizers", None):
            raise ValueError(
                f"initialize: an optimizer steps parameter {name!r} of {type(model).__name__} during backward "
                f"(_apply_optimizer_in_backward), with gradients that opt_level {policy.opt_level!r} could not "
                "unscale, check or move to masters; make an ordinary optimizer and step after `scale_loss`, or use "
                "O0 or O4 (without skip_nonfinite)"
            )


def to_cast(
    models: list[nn.Module], kept: list[nn.Module], policy: Policy
) -> tuple[list[nn.Parameter], list[buffers.Owned]]:
    """Return the parameters and the buffers of `models` that the policy's cast changes, without those inside `kept`.

    Sharded parameters are not cast: fully_shard gathers their FP32 shards in the type of its own policy.

    Returns:
        Parameters, each once: FP32, or low precision before `initialize` in another type than the policy's.
        FP32 buffers, each as (module, name).
    """
    stay = {module for root in kept for module in root.modules()}
    modules = dict.fromkeys(m for model in models for m in model.modules() if m not in stay)
    params = {
        p: None
        for m in modules
        for p in m._parameters.values()
        if p is not None and not distributed.is_dtensor(p) and not is_quantized(p)
        if p.dtype is torch.float32 or (p.dtype is not policy.cast_model_type and incoming.type_of(p) is not None)
    }
    owned = [
        (m, name)
        for m in modules
        for name, buffer in m._buffers.items()
        if buffer is not None and buffer.dtype is torch.float32 and not policy.keep_buffers_fp32
    ]
    return list(params), owned


def not_cast_to(model: nn.Module, kept: list[nn.Module], policy: Policy) -> list[nn.Parameter]:
    """Return the FP32, FP16 and BF16 parameters of `model` that are not of the type that `policy` wants for them."""
    stays = {p for module in kept for p in module.parameters()}
    widened = incoming.has_widened(model)
    return [
        p
        for p in model.parameters()
        if (p.dtype is torch.float32 or p.dtype in LOW_PRECISION) and not is_quantized(p)
        if p.dtype is not incoming.wanted_type(p, p in stays, policy, widened=widened)
    ]


def cast(params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast parameters and their gradients in place: a parameter stays the same object."""
    for param in params:
        grad = own_grad(param)
        set_own_grad(param, None)
        set_data(param, param.data.to(dtype))
        if grad is not None:
            set_own_grad(param, grad.to(dtype))


def use_cpu(models: Iterable[nn.Module]) -> bool:
    """Tell whether any tensor of the models is on a CPU. True if they have no tensors, since they may run anywhere."""
    devices = {tensor.device.type for model in models for tensor in (*model.parameters(), *model.buffers())}
    return not devices or "cpu" in devices


def reflatten(model: nn.Module) -> None:
    """Make the weights of RNNs one block of memory again: cuDNN needs this, and a cast undoes it."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not any(map(distributed.is_dtensor, module.parameters())):
            flat_rnn.flatten_module(module)


def uncast(param: nn.Parameter, name: str = "", *, give_back: bool = False) -> None:
    """Make `param` FP32, with the value of its master if it has one. If user code has made it FP64, it stays FP64.

    A frozen parameter without a master returns to the low-precision type that it had before `initialize`. With
    `give_back`, all parameters return to that type, which rounds their FP32 values.

    Raises:
        RuntimeError: the parameter was FP16, and its value is beyond FP16's range now. It is FP32 then.
    """
    master, low = master_of(param), incoming.type_of(param)
    if master is not None:
        set_own_grad(param, None)
        value = master.data.to(param.device, torch.promote_types(param.dtype, torch.float32))
        rounds = give_back and low is not None and value.dtype is torch.float32 and _fits(value, low)
        set_data(param, value.to(low) if rounds else value)
        del value  # the FP32 value of a compressed master has its own memory: free it before the master
        disconnect(param)
    else:
        was_cast = param.dtype in LOW_PRECISION and param.dtype is not low and not is_quantized(param)
        if was_cast:
            cast([param], torch.float32)
            if low is torch.float16 and not param.requires_grad:  # BF16 has rounded FP16's largest, 65504, up
                set_data(param, torch.where(param.data.abs() == 65536, param.data.sign() * 65504, param.data))
        back = give_back or (was_cast and not param.requires_grad)
        if back and low is not None and param.dtype is torch.float32 and _fits(param.data, low):
            cast([param], low)
    if give_back and low is not None and param.dtype is torch.float32:
        raise RuntimeError(f"restore: parameter {name!r} came in {low}, which cannot hold its value now: it stays FP32")


def _fits(value: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether every finite element of FP32 `value` stays finite in `dtype`. Syncs if that is FP16."""
    return dtype is torch.bfloat16 or value.is_meta or bool((value.to(dtype).isfinite() | ~value.isfinite()).all())


def was_changed(param: Tensor, master: Tensor) -> bool:
    """Tell whether user code has changed the type, shape or device of `param`, so that its master is stale."""
    known = param.dtype is torch.float32 or param.dtype in LOW_PRECISION
    moved = param.device != master.device and ((link := link_of(param)) is None or link.host is None)
    return not known or param.shape != master.shape or moved


def refuse_changed(model: nn.Module) -> None:
    """Raise if user code has changed the type, shape or device of a parameter with a master since `initialize`."""
    for name, param in model.named_parameters():
        master = master_of(param)
        if master is not None and was_changed(param, master):
            raise RuntimeError(
                f"restore: parameter {name!r} of this {type(model).__name__} became {param.dtype} of shape "
                f"{list(param.shape)} on {param.device} after initialize(), and its master is {list(master.shape)} on "
                f"{master.device}; it has the master's value again, and later writes into it are lost: call restore() "
                "first, then model.double() and similar conversions"
            )


# Each function receives a model before a load of its parameters, and gives unfrozen ones FP32 values; watch/ adds one.
before_load: list[Callable[[nn.Module], None]] = []


def load_masters(model: nn.Module, state_dict: Any, prefix: str, *_: Any, parts: bool = False) -> None:
    """Load the values of `state_dict` into the masters of `model`, and store the weights in `state_dict` instead.

    Torch's `load_state_dict` made the dictionary, so it is changed in place. Without the replacement torch would then
    copy the loaded value, rounded to nearest even, over the weight that this function has written. A split master
    rounds ties the other way, and stores the rest of the value in its low half.

    Args:
        parts: whether values of the weight's own type are left to torch. The `state_dict()` of a module inside a model
            has such values, and a load of them must not round the masters.
    """
    for listener in before_load:
        listener(model)
    for name, param in model.named_parameters(remove_duplicate=False):
        value, link = state_dict.get(prefix + name), link_of(param)
        if link is None or value is param or not isinstance(value, Tensor) or value.shape != param.shape:
            continue
        if parts and value.dtype is param.dtype:
            continue
        load(param, link, value)
        state_dict[prefix + name] = param
