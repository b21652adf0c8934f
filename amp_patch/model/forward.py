"""Generated classes of models and modules of `keep_fp32`: forward under the policy, and FP32 values in checkpoints."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import install, low_bit, regions
from amp_patch.casts import state as casts_state
from amp_patch.masters.masters import LinkList, connect, has_gradient, link_of, links_of, master_of, settle
from amp_patch.model import buffers, incoming, joints
from amp_patch.model.joints import Call, ForwardGuest
from amp_patch.model.kept_module import InnerModule, KeptModule, low_precision_of
from amp_patch.model.kept_result import plain
from amp_patch.model.of_model import ModelState, followed_policy, running, untouched
from amp_patch.model.ranges import load_in_range
from amp_patch.model.tensors import cast, reflatten, refuse_changed, uncast, was_changed
from amp_patch.model.type_errors import advising, explain_types, note_modules, refuse_another_type
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import fsdp, generated_class, tree
from amp_patch.support.compiled import in_backward, wraps
from amp_patch.support.forward_hook import NoHook
from amp_patch.support.generated_class import Generated
from amp_patch.support.patches import Attempts
from amp_patch.support.quantized import is_quantized


class AmpModel(Generated):
    """The overrides that `initialize` adds to a model's class. In an instance without `_amp` they change nothing."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        overrides = {name: advising(name, function) for name, function in generated_class.own_methods(base)}
        for overriding in joints.overrides:
            overrides |= overriding(base, overrides)
        overrides |= {name: advising(name, _entering(base, name)) for name in key}
        return overrides | {"forward": _entering(base, "forward")} | fsdp.without_fsdp(base)

    def __reduce_ex__(self, protocol: Any) -> Any:
        own: ModelState | None = vars(self).get("_amp")
        if own is not None:
            own.links.model = weakref.ref(self)  # type: ignore[arg-type]
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if "_amp" in vars(self) and vars(self)["_amp"].policy.makes_low_tensors:
            # In another process, pickle has looked up the functions before the casts were installed.
            cast_held_functions([self])  # type: ignore[list-item]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's state dict with FP32 values for low-precision weights: the masters', else the upcast weights.

        A weight that was low precision before `initialize` and has no master, for example a frozen one, keeps its type.
        A buffer that the cast has rounded has its value from before the cast, if nothing has written it since.

        As with torch's state dict, a write into a tensor reaches the model: the tensor shares memory with a master,
        which the next forward rounds into the weight.
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
                    if param.dtype in LOW_PRECISION and link_of(param) is None and incoming.type_of(param) is None:
                        connect(param, nn.Parameter(param.detach().float(), requires_grad=param.requires_grad))
        settle(links_of(set(params.values())))
        exact = buffers.exact_values(module, prefix)
        as_it_is = {
            name for name, param in params.items() if incoming.type_of(param) is not None or is_quantized(param)
        }
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
        # `load_state_dict` of this model, or of a wrapper such as DDP, calls this method, and then the children's.
        policy = followed_policy(self)
        cast = policy is not None and policy.cast_model_type is not None
        if cast and local_metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict: assign=True would put new tensors in place of the ones that the optimizer and the "
                "masters hold; use assign=False (torch's default), or load before initialize()"
            )
        module: nn.Module = self  # type: ignore[assignment]
        hook = module.register_load_state_dict_pre_hook(load_in_range)  # last: users' hooks may rename keys
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]
        finally:
            hook.remove()
        load_in_range(module, state_dict, prefix)  # a user's override may skip torch's method and its hook
        if cast:
            buffers.load(module, state_dict, prefix, vars(self)["_amp"].low_buffers)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        # `.to(device)`, `.float()` and `.half()` call `_apply`, also through a wrapper around this model.
        policy = followed_policy(self)
        if policy is not None:
            refuse_another_type(self, fn, policy)
        return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients as torch does, and the gradients of their masters."""
        module: nn.Module = self  # type: ignore[assignment]
        for body in list(bodies):
            body.forget_taken(set(module.parameters()))
        # First, because `super().zero_grad()` reads `.grad`, which would materialize the masters' gradients.
        for _, link in links_of(module.parameters()):
            master = link.master
            live = not set_to_none and has_gradient(master)
            master.grad = torch.zeros_like(master.grad) if live else None  # type: ignore[arg-type]
        super().zero_grad(set_to_none)  # type: ignore[misc]


def low_buffers_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers of `model` that were low precision before `initialize`."""
    if isinstance(model, AmpModel):
        state: ModelState | None = vars(model).get("_amp")
        if state is not None:
            return state.low_buffers
    return frozenset(name for name, buffer in model.named_buffers() if buffer.dtype in LOW_PRECISION)


def enter_training(models: list[nn.Module], entry: joints.Entry, methods: tuple[str, ...], *, on_demand: bool) -> None:
    """Give the models, and the modules inside them that stay FP32, their generated classes, the policy and guests."""
    policy, kept = entry.policy, entry.kept
    for model in models:
        untouched.pop(model, None)
    stay = set(kept)
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        if isinstance(module, InnerModule) and module not in stay:
            take(module)  # its class is from an earlier training
    for module in kept:
        # torch's batch norms take low-precision inputs with FP32 weights, in one kernel. A user's forward may not.
        if type(module).forward is nn.BatchNorm1d.forward:
            continue
        give(module, KeptModule, ModelState(policy))
    for model in models:
        if isinstance(model, KeptModule):
            continue  # this model is inside another one of the list, whose `keep_fp32` names it
        for handle in vars(model)["_amp"].handles if isinstance(model, AmpModel) and "_amp" in vars(model) else ():
            handle.remove()  # the hook is from an earlier training
        state = ModelState(policy, low_buffers_of(model), on_demand, guests=joints.choose(model, entry))
        state.links.model = weakref.ref(model)
        note_modules(model)
        if policy.patch_torch_functions:
            # FSDP frees the gathered weights after a forward to save memory. Without the hook, cached casts would keep
            # as much.
            state.handles = [m.register_forward_hook(_drop_casts) for m in fsdp.fsdp_modules([model])]
        give(model, AmpModel, state, tuple(name for name in methods if hasattr(model, name)))


def cast_held_functions(models: list[nn.Module]) -> None:
    """Cast calls of torch's functions that models hold in attributes (`self.act = F.softplus`), until `restore`."""
    for model in models:
        if isinstance(model, AmpModel):
            vars(model)["_amp"].handles.append(install.replace_in_attributes(model.modules()))


def restore(model: nn.Module, *, give_back: bool = True) -> None:
    """Undo the cast and `enter_training`: FP32 weights (the masters' values), FP32 buffers, the model's own class.

    With `give_back`, weights and buffers return to their types from before `initialize`.
    """
    untouched.pop(model, None)
    if isinstance(model, KeptModule):
        take(model)  # `keep_fp32` named the whole model, at its own `initialize` or an outer model's
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
        low_bit.release(param)
        attempt(functools.partial(uncast, param, name, give_back=give_back))
    attempt(functools.partial(buffers.uncast, model, but=state.low_buffers))
    if give_back:
        attempt(incoming.give_buffers_back, model)
    attempt(reflatten, model)
    attempt.finish()


def to_plain_fp32(model: nn.Module) -> None:
    """Undo every training inside `model`, then cast weights to FP32 that are left: parts of other trainings' models."""
    for module in list(model.modules()):
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, NoHook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        if isinstance(module, AmpModel):
            restore(module, give_back=False)  # returning to BF16 would round the values
        elif isinstance(module, InnerModule):
            take(module)
    cast([p for p in model.parameters() if p.dtype in LOW_PRECISION and not is_quantized(p)], torch.float32)
    buffers.uncast(model)


def give_back(model: nn.Module) -> None:
    """Return parameters and buffers of `model`, which is in no training, to their types from before `initialize`."""
    attempt = Attempts()
    for name, param in model.named_parameters():
        if incoming.type_of(param) is not None:
            attempt(functools.partial(uncast, param, name, give_back=True))
    attempt(incoming.give_buffers_back, model)
    attempt.finish()


def is_copy(model: nn.Module) -> bool:
    """Tell whether `model` is a copy of a cast model, with FP32 weights that are cast during calls."""
    inside = isinstance(model, AmpModel) and followed_policy(model) is not None
    return inside and any(guest.retyped for guest in vars(model)["_amp"].guests.all)


def policy_of(model: nn.Module | None) -> Policy | None:
    """Return the policy that `initialize` gave to `model`; None for other models."""
    if model is None:
        return None
    policy = followed_policy(model) if isinstance(model, AmpModel) else None
    return untouched[model][0].policy if policy is None and model in untouched else policy


# The bodies of `scale_loss` that have set gradients aside: a model's `zero_grad()` drops those of its parameters.
bodies: weakref.WeakSet[Any] = weakref.WeakSet()


def set_policy(model: nn.Module, policy: Policy) -> None:
    """Replace the policy of a cast model by `policy`, whose type of weights is the same; the weights do not change."""
    if isinstance(model, AmpModel) and followed_policy(model) is not None:
        vars(model)["_amp"].follow(policy)


def _drop_casts(*_: Any) -> None:
    casts_state.drop_cache()


def give(module: nn.Module, mixin: type[Generated], state: ModelState, key: tuple[str, ...] = ()) -> None:
    """Give `module` a generated class with the overrides of `mixin`, and `state`; they replace earlier ones.

    Args:
        key: names of methods other than `forward` that run under the policy.

    Raises:
        ValueError: `fully_shard` was called between two trainings, and the second has another `key`.
    """
    if isinstance(module, Generated):
        take(module)
    if not isinstance(module, mixin):  # False if `fully_shard` has subclassed the earlier class
        generated_class.give(module, mixin, key)
    elif (given := generated_class.key_of(module)) != key:
        raise ValueError(
            f"initialize: methods {key} of a {type(module).__name__} that was given {given} before "
            "fully_shard; name them in that call too"
        )
    vars(module)["_amp"] = state


def cast_method(model: nn.Module, name: str) -> None:
    """Add the method `name` of a training's model to the methods that run under the policy, as `forward` does."""
    if isinstance(model, AmpModel):
        key = generated_class.key_of(model)
        give(model, AmpModel, vars(model)["_amp"], key if name in key else (*key, name))


def take(module: nn.Module) -> None:
    """Undo `give`: remove the state, and the generated class unless `fully_shard` has subclassed it."""
    # Without `_amp` the module behaves like its base class, even if the generated class stays.
    vars(module).pop("_amp", None)
    if "_amp_base" in vars(type(module)) or not fsdp.is_fsdp(module):
        generated_class.take(module)


def _entering(base: type, name: str) -> Callable[..., Any]:
    """Return the method `name` of a model under its training's policy: inputs are cast in, outputs are cast out.

    At the events of joints.py the model's guests act. Without guests, the loops over them are empty.
    """

    @wraps(getattr(base, name))
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        method, own = getattr(self._amp_base, name), self.__dict__.get("_amp")
        if own is None:
            return method(self, *args, **kwargs)
        policy, outer, compiling = own.policy, running.policy, is_dynamo_compiling()
        low, guests, entered = policy.cast_model_type, own.guests.all, 0
        alone = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
        call: Any = None
        if guests:
            kind = name, self.training, torch.is_grad_enabled(), alone
            if compiling:
                guests = tuple([guest for guest in guests if guest.traced])
            else:
                guests = own.guests.of_kind.get(kind, guests)
            call = Call(self, own, kind, args, kwargs, outer) if guests else None
        if outer is policy or (low is not None and in_backward() and low_precision_of((args, kwargs)) is low):
            for guest in reversed(guests):  # a nested call, or a recomputation: the inputs are cast already
                method = guest.call(call, method)
            return method(self, *args, **kwargs)
        if not compiling:  # compiled code does not copy written masters back into weights; the next step does
            own.links.publish_written(self)
        try:
            for guest in guests:
                guest.enter(call)
                entered += 1
            running.policy = policy
            try:
                with regions.region(policy) if compiling else own.region:
                    if guests:
                        args, kwargs = call.args, call.kwargs
                    if alone:
                        x = args[0]
                        if low is not None and x.dtype is not low and x.dtype.is_floating_point:
                            args = (cast_one(x, low),)
                    elif low is not None:
                        args, kwargs = tree.cast_floats((args, kwargs), low)
                    if guests:
                        call.args, call.kwargs = args, kwargs
                    for guest in guests:
                        guest.cast_in(call)
                    for guest in reversed(guests):
                        method = guest.call(call, method)
                    output = method(self, *args, **kwargs)
            except (RuntimeError, KeyError) as error:  # a function with a table of types raises KeyError
                if outer is None and not compiling:
                    explain_types(self, policy, error, KeptModule)
                raise
            finally:
                running.policy = outer
            result = output if low is None and policy.cast_model_outputs is None else cast_out(output, policy, outer)
            for guest in reversed(guests):
                result = guest.cast_out(call, output, result)
            return result
        finally:
            if entered:
                _leave(guests[:entered], call)

    return entering


def _leave(guests: tuple[ForwardGuest, ...], call: Call) -> None:
    """Call `leave` of each guest, the last one first, also if one raises."""
    try:
        guests[-1].leave(call)
    finally:
        if len(guests) > 1:
            _leave(guests[:-1], call)


def cast_one(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an input or output that is one tensor; `explain` replaces this function to see the call."""
    return tensor.to(dtype)


def cast_out(output: Any, policy: Policy, outer: Policy | None) -> Any:
    """Return the output of a model's forward as its caller gets it: another model's forward under `outer`, or a script.

    A model inside another training's model returns the outer model's type.
    """
    only, dtype = None, policy.cast_model_outputs
    if dtype is None:
        only = LOW_PRECISION
        dtype = torch.float32 if outer is None or outer.cast_model_type is None else outer.cast_model_type
    if isinstance(output, Tensor):  # the common case
        changes = output.dtype.is_floating_point if only is None else output.dtype in only
        result = cast_one(output, dtype) if changes and output.dtype is not dtype else output
    else:
        result = tree.cast_floats(output, dtype, only)
    return tree.map_tensors(plain, result) if outer is None and dtype in LOW_PRECISION else result
