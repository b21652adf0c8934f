"""The classes that models and kept modules are given: forward under the policy, FP32 state dict; and the way back."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.masters.masters import LinkList, connect, has_gradient, link_of, links_of, master_of, settle
from amp_patch.model import buffers, came, copies, fsdp, shielded_copies
from amp_patch.model.fast_path import forbid_fast_path
from amp_patch.model.keep_fp32 import is_batch_norm
from amp_patch.model.state import ModelState, followed_policy, running, untouched
from amp_patch.model.tensors import cast, load_masters, reflatten, refuse_changed, uncast, was_changed
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS, Policy
from amp_patch.support import generated_class, tree
from amp_patch.support.compiled import wraps
from amp_patch.support.forward_hook import NoHook
from amp_patch.support.generated_class import Generated
from amp_patch.support.patches import Attempts
from amp_patch.support.quantized import is_quantized

_NO_CASTS = OPT_LEVELS["O0"]
_DTYPE_ERROR = re.compile(
    r"same dtype|scalar type|should be the same|dtype mismatch|mixed dtype|must have the same type", re.I
)


class AmpModel(Generated):
    """Overrides of a model that went through `initialize`. Without `_amp` an instance behaves like its base."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        overrides = {name: _advising(name, function) for name, function in generated_class.own_methods(base)}
        return overrides | {name: _entering(base, name) for name in ("forward", *key)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        own: ModelState | None = vars(self).get("_amp")
        if own is not None:
            own.owner = weakref.ref(self)  # type: ignore[arg-type]
        return super().__reduce_ex__(protocol)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """torch's, with low-precision weights given as the FP32 values of their masters (without one: upcast).

        What came in low precision and has no master, a frozen weight say, is given as it is. Buffers that the cast
        rounded are given as they were before it, where nothing wrote them since.

        Like torch's its tensors share memory with the model where there are masters: what is written into them is
        rounded into the weights at the next forward.
        """
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        policy = followed_policy(self)
        if policy is None or policy.cast_model_type is None:
            return state
        module: nn.Module = self  # type: ignore[assignment]
        params = dict(module.named_parameters(prefix.removesuffix("."), remove_duplicate=False))
        own: ModelState = vars(self)["_amp"]
        if own.on_demand and policy.master_weights:
            with torch.inference_mode(False), torch.no_grad():
                for param in params.values():
                    if param.dtype in LOW_PRECISION and link_of(param) is None and came.type_of(param) is None:
                        connect(param, nn.Parameter(param.detach().float(), requires_grad=param.requires_grad))
        settle(links_of(set(params.values())))
        exact = buffers.exact_values(module, prefix)
        as_it_is = {name for name, param in params.items() if came.type_of(param) is not None or is_quantized(param)}
        if as_it_is:
            as_it_is |= {prefix + name for name in own.low_buffers}
        for name, value in state.items():
            if not (name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in LOW_PRECISION):
                continue
            master = master_of(params[name]) if name in params else None
            if master is None:
                if name not in as_it_is:
                    state[name] = exact[name] if name in exact else value.float()
            else:
                state[name] = master if kwargs.get("keep_vars", False) else master.detach()
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        # `load_state_dict` of this model, or of a wrapper such as DDP, calls this method here and then on the children.
        policy = followed_policy(self)
        cast = policy is not None and policy.cast_model_type is not None
        if cast and local_metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict: assign=True would put new tensors in place of the ones that the optimizer and the "
                "masters hold; use assign=False (torch's default), or load before initialize()"
            )
        module: nn.Module = self  # type: ignore[assignment]
        hook = module.register_load_state_dict_pre_hook(load_masters)  # behind the user's, which may rename
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]
        finally:
            hook.remove()
        load_masters(module, state_dict, prefix)  # where the user's class has loaded without torch's method
        if cast:
            buffers.load(module, state_dict, prefix, vars(self)["_amp"].low_buffers)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        # .to(device), .float() and .half() end here, also those of a wrapper around this model.
        policy = followed_policy(self)
        if policy is not None and policy.cast_model_type is not None:
            _refuse_another_type(self, fn, policy)
        return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, for the masters' gradients too."""
        module: nn.Module = self  # type: ignore[assignment]
        if (own := vars(module).get("_amp")) is not None:
            own.cleared += 1
        for _, link in links_of(module.parameters()):  # first: to be asked for `grad` would materialize it
            master = link.master
            live = not set_to_none and has_gradient(master)
            master.grad = torch.zeros_like(master.grad) if live else None  # type: ignore[arg-type]
        super().zero_grad(set_to_none)  # type: ignore[misc]


class KeptModule(Generated):
    """Overrides of a module that stays FP32: it computes in FP32; in a cast model it returns the type that came in."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        @wraps(base.forward)  # type: ignore[attr-defined]
        def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
            forward, policy = self._amp_base.forward, followed_policy(self)
            if policy is None:
                return forward(self, *args, **kwargs)
            came = None
            if policy.cast_model_type is not None:  # there the layers around take one type; those of O1 take any
                inside = running.policy is not None or _in_backward()
                came = _low_precision_of((args, kwargs)) or (policy.cast_model_type if inside else None)
            args, kwargs = tree.cast_floats((args, kwargs), torch.float32, LOW_PRECISION)
            # At O0, where nothing is cast, a torch.autocast that the script is in acts here as anywhere.
            claims = policy.patch_torch_functions or policy.cast_model_type is not None
            with regions.region(_NO_CASTS, claims):
                output = forward(self, *args, **kwargs)
            return output if came is None else tree.cast_floats(output, came, (torch.float32,))

        return {"forward": kept}


def cast_buffers(models: Iterable[nn.Module], owned: list[buffers.Owned], dtype: torch.dtype) -> None:
    """Cast the buffers of models of a training, and watch those that are FP32 no more."""
    buffers.cast(owned, dtype)
    for model in models:
        if isinstance(model, AmpModel) and (watch := buffers.BufferWatch(model, owned)).owned:
            vars(model)["_amp"].watch = watch


def low_buffers_of(model: nn.Module) -> frozenset[str]:
    """The names of the buffers of `model` that are low precision before any cast of ours."""
    if isinstance(model, AmpModel):
        state: ModelState | None = vars(model).get("_amp")
        if state is not None:
            return state.low_buffers
    return frozenset(name for name, buffer in model.named_buffers() if buffer.dtype in LOW_PRECISION)


def enter_training(
    models: list[nn.Module], kept: list[nn.Module], policy: Policy, methods: tuple[str, ...], on_demand: bool
) -> None:
    """Give the models, and the modules kept FP32 inside them, their generated classes and the policy."""
    for model in models:
        untouched.pop(model, None)
    stay = {id(module) for module in kept}
    for module in {id(m): m for model in models for m in model.modules()}.values():
        if isinstance(module, KeptModule) and id(module) not in stay:
            take(module)  # an earlier training kept it
    for module in kept:
        # torch's batch norms take low-precision inputs beside FP32 weights, in one kernel; others need casts.
        if type(module).forward is nn.BatchNorm1d.forward:
            continue
        give(module, KeptModule, ModelState(policy))
    layers = (m for model in models for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))
    fused = policy.cast_model_type is not None and any(id(m) in stay for layer in layers for m in layer.modules())
    if fused:
        forbid_fast_path()
    for model in models:
        if isinstance(model, KeptModule):
            continue  # it was given beside its parent, which keeps it
        state = ModelState(policy, low_buffers_of(model), on_demand, fast_path_off=fused)
        state.sharded = fsdp.is_fsdp(model)
        state.owner = weakref.ref(model)
        if policy.patch_torch_functions:
            # FSDP frees the gathered weights after a forward to save memory: their casts must go then too.
            state.handles = [m.register_forward_hook(_drop_casts) for m in fsdp.fsdp_modules([model])]
        give(model, AmpModel, state, tuple(name for name in methods if hasattr(model, name)))


def restore(model: nn.Module, *, give_back: bool = True) -> None:
    """Undo the cast and `enter_training`: FP32 weights (the masters' values), FP32 buffers, the model's own class.

    With `give_back` they have the types in which they came, if those were others.
    """
    untouched.pop(model, None)
    if isinstance(model, KeptModule):
        take(model)  # `keep_fp32` named the whole model, or the model was given beside its parent, which keeps it
    if not isinstance(model, AmpModel) or followed_policy(model) is None:
        return
    state, attempt = vars(model)["_amp"], Attempts()
    for handle in state.handles:
        attempt(handle.remove)
    for module in model.modules():
        if isinstance(module, Generated):
            attempt(take, module)
    links = links_of(set(model.parameters()))
    attempt(refuse_changed, model)
    attempt(settle, LinkList(pair for pair in links if not was_changed(pair[0], pair[1].master)))
    for name, param in model.named_parameters():
        attempt(functools.partial(uncast, param, name, give_back=give_back))
    attempt(functools.partial(buffers.uncast, model, but=state.low_buffers))
    if give_back:
        attempt(came.give_buffers_back, model)
    attempt(reflatten, model)
    attempt.finish()


def to_plain_fp32(model: nn.Module) -> None:
    """Undo every training inside `model`, and cast to FP32 what is still low precision: parts of cast models are."""
    for module in list(model.modules()):
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, NoHook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        if isinstance(module, AmpModel):
            restore(module, give_back=False)  # in BF16 again the values would be rounded
        elif isinstance(module, KeptModule | shielded_copies.FP32Copy):
            take(module)
    cast([p for p in model.parameters() if p.dtype in LOW_PRECISION and not is_quantized(p)], torch.float32)
    buffers.uncast(model)


def give_back(model: nn.Module) -> None:
    """Give the parameters and buffers of `model`, whose training has ended or never began, the types they came in."""
    attempt = Attempts()
    for name, param in model.named_parameters():
        if came.type_of(param) is not None:
            attempt(functools.partial(uncast, param, name, give_back=True))
    attempt(came.give_buffers_back, model)
    attempt.finish()


def is_copy(model: nn.Module) -> bool:
    """Whether `model` is a copy of a cast model, with FP32 weights that are cast while it is called."""
    return isinstance(model, AmpModel) and followed_policy(model) is not None and bool(vars(model)["_amp"].wide)


def policy_of(model: nn.Module | None) -> Policy | None:
    """The policy that `initialize` gave to `model`; None for any other."""
    if model is None:
        return None
    policy = followed_policy(model) if isinstance(model, AmpModel) else None
    return untouched[model][0].policy if policy is None and model in untouched else policy


def gradients_stay_local(model: nn.Module) -> bool:
    """Whether the backward of the last forward of `model` leaves its gradients on this process, cast or scaled."""
    return isinstance(model, AmpModel) and vars(model)["_amp"].local


def times_cleared(model: nn.Module) -> int:
    """How often `model.zero_grad()` was called on a model of `initialize`."""
    return vars(model)["_amp"].cleared if isinstance(model, AmpModel) else 0


def set_policy(model: nn.Module, policy: Policy) -> None:
    """Let `model`, which went through `initialize`, follow another policy that casts weights alike."""
    if isinstance(model, AmpModel) and followed_policy(model) is not None:
        vars(model)["_amp"].policy = policy


def _drop_casts(*_: Any) -> None:
    casts_state.drop_cache()


def _is_under_fsdp(module: nn.Module) -> bool:
    """Whether ours is not the outermost class of `module`, because `fully_shard` came later."""
    return "_amp_base" not in vars(type(module)) and fsdp.is_fsdp(module)


def give(module: nn.Module, mixin: type[Generated], state: ModelState, key: tuple[str, ...] = ()) -> None:
    if isinstance(module, Generated):
        take(module)
    if not isinstance(module, mixin):  # else it has the class beneath fully_shard's
        generated_class.give(module, mixin, key)
    elif (given := generated_class.key_of(module)) != key:
        raise ValueError(
            f"initialize: methods {key} of a {type(module).__name__} that was given {given} before "
            "fully_shard; name them in that call too"
        )
    vars(module)["_amp"] = state


def take(module: nn.Module) -> None:
    vars(module).pop("_amp", None)  # without it the module behaves as its base, even where it cannot lose its class
    if not _is_under_fsdp(module):
        generated_class.take(module)


def _entering(base: type, name: str) -> Callable[..., Any]:
    """The method `name` of a model under its training's policy: inputs cast in, outputs cast out."""

    @wraps(getattr(base, name))
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        method, policy = getattr(self._amp_base, name), followed_policy(self)
        if policy is None:
            return method(self, *args, **kwargs)
        own: ModelState = self.__dict__["_amp"]
        if own.wide:
            method = copies.on_casts(method, own.wide, own.calls)
        if running.policy is policy or _recomputed(policy, args, kwargs):
            return method(self, *args, **kwargs)
        # A compiled forward does without: what was written into the masters arrives with the next step. DataParallel's
        # replicas have it already.
        if not is_dynamo_compiling() and not getattr(self, "_is_replica", False):
            own.edits.publish(self)
        if (policy.cast_model_type is not None or policy.checks_gradients) and torch.is_grad_enabled():
            own.local = own.no_sync
        watch = own.watch if not is_dynamo_compiling() and self.training and torch.is_grad_enabled() else None
        before = [] if watch is None else watch.before()
        outer, running.policy = running.policy, policy
        given = args, kwargs
        try:
            with regions.region(policy):
                if policy.cast_model_type is not None:
                    args, kwargs = tree.cast_floats(given, policy.cast_model_type)
                edits = _Edits((*given[0], *given[1].values()), (*args, *kwargs.values()))
                del given  # the uncast inputs may go while forward runs
                output = method(self, *args, **kwargs)
        except RuntimeError as error:
            if outer is None and not is_dynamo_compiling():
                _explain_another_type(self, policy, error)
            raise
        finally:
            running.policy = outer
        if watch is not None and not watch.after(before):
            own.watch = None
        edits.give_back(lambda value: _cast_out(value, policy, outer))
        return _cast_out(output, policy, outer)

    return entering


def _in_backward() -> bool:
    """Whether autograd runs on this thread: a forward in it is one that activation checkpointing runs again."""
    return not is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


def _recomputed(policy: Policy, args: Any, kwargs: Any) -> bool:
    """Whether checkpointing runs this forward again, with inputs that its parent has already cast."""
    cast = policy.cast_model_type
    return cast is not None and _in_backward() and _low_precision_of((args, kwargs)) is cast


class _Edits:
    """What forward does to a dict argument is done to the caller's own dict too, though forward got a cast copy."""

    def __init__(self, given: tuple[Any, ...], passed: tuple[Any, ...]) -> None:
        self.copies = [
            (mine, copy, dict(copy))
            for mine, copy in zip(given, passed, strict=True)
            if copy is not mine and isinstance(copy, dict)
        ]

    def give_back(self, cast_out: Callable[[Any], Any]) -> None:
        for mine, copy, before in self.copies:
            for key in before.keys() - copy.keys():
                mine.pop(key, None)
            for key, value in copy.items():
                if key not in before or value is not before[key]:
                    mine[key] = cast_out(value)


def _cast_out(output: Any, policy: Policy, outer: Policy | None) -> Any:
    if policy.cast_model_outputs is not None:
        return tree.cast_floats(output, policy.cast_model_outputs)
    if policy.cast_model_type is None:
        return output
    # A model inside another training's model speaks that one's type.
    dtype = torch.float32 if outer is None or outer.cast_model_type is None else outer.cast_model_type
    return tree.cast_floats(output, dtype, LOW_PRECISION)


def _refuse_another_type(model: Any, fn: Callable[[Tensor], Tensor], policy: Policy) -> None:
    """Raise if `fn`, to be applied to all tensors of a cast model, changes their type, not just their device."""
    low = policy.cast_model_type
    for dtype in (torch.float32, low):
        try:
            became = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
        except Exception:  # `fn` wants a tensor of another kind: nothing can be told of it
            return
        if became is not dtype and became in (torch.float32, *LOW_PRECISION):
            raise RuntimeError(
                f"{type(model).__name__} went through initialize(opt_level={policy.opt_level!r}), which cast it to "
                f"{low} and made FP32 masters where it has any: a conversion to {became} would undo half of that. Call "
                "amp.restore() for the FP32 model, amp.fp32_copy(model) for an FP32 copy, initialize() again for "
                "another level or type; what is to stay FP32 is named in initialize(..., keep_fp32=...)"
            )


def _explain_another_type(model: nn.Module, policy: Policy, error: RuntimeError) -> None:
    """Raise `error` with the tensors that lost the type of the cast after `initialize`, if it is about types."""
    if policy.cast_model_type is None or not _DTYPE_ERROR.search(str(error)) or fsdp.is_fsdp(model):
        return
    norms = bool(policy.keep_batchnorm_fp32)
    kept = (m for m in model.modules() if isinstance(m, KeptModule) or (norms and is_batch_norm(m)))
    stay = {id(inner) for module in kept for inner in module.modules()}
    names = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_floating_point()
        if f"{path}.{name}".lstrip(".") not in vars(model)["_amp"].wide
        if tensor.dtype is not (torch.float32 if id(module) in stay else policy.cast_model_type)
    ]
    if names:
        shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise RuntimeError(
            f"{error}\n{type(model).__name__} was cast to {policy.cast_model_type} by initialize(), and {shown} "
            "got another type since: by .float(), .half() or .to(dtype) of a part, by torch.func.functional_call "
            "with values of another type, or as a new tensor. Name what is to stay FP32 in initialize(..., "
            "keep_fp32=...), give functional_call values of the types that model.named_parameters() has, or run "
            "amp.fp32_copy(model)"
        ) from error


def _advising(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with advice added to a dtype error, when it is called from outside of the model's forward."""

    @wraps(function)
    def advising(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except RuntimeError as error:
            policy = followed_policy(self)
            if policy is None or policy.cast_model_type is None or running.policy is not None:
                raise
            if not _DTYPE_ERROR.search(str(error)):
                raise
            raise RuntimeError(
                f"{error}\n{type(self).__name__}.{name}() was called by itself, so its inputs were not cast to "
                f"{policy.cast_model_type} as those of forward() are; name it: initialize(..., methods=({name!r},))"
            ) from error

    return advising


def _low_precision_of(value: Any) -> torch.dtype | None:
    # A loop: Dynamo of torch 2.6 does not know `next` with a default.
    for tensor in tree.tensors(value):
        if tensor.dtype in LOW_PRECISION:
            return tensor.dtype
    return None
