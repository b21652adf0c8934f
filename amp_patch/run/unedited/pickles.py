"""Pickles of an unedited script: they hold models of the script's own classes with FP32 values, as without a level.

`torch.save`, `pickle.dump` and `pickle.dumps` replace each object that `initialize` has changed by its plain form, at
any depth: models, their modules and tensors, and optimizers. They look for models and optimizers in the first levels
of the object alone (`_parts`); if there are none, the original function saves it. `deepcopy` and multiprocessing do not
use these functions: a copy that they make still belongs to the training.

A model in a loaded file does not belong to the training, and is excluded from the casts of the process, like an FP32
copy. An optimizer in a loaded file is recorded like one that the script constructs.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.model import buffers, fp32_copies, incoming
from amp_patch.model.copies import low_weights
from amp_patch.model.forward import AmpModel, low_buffers_of, policy_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.forward_hook import ForwardHook, NoHook
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.patches import Patches
from amp_patch.watch import questions

_PICKLER: Any = pickle._Pickler  # the pickler in C has no method `save` to override
_DEPTH = 4  # levels of containers and attributes in which `_parts` looks
_EMPTY = frozenset((bool, bytes, float, int, str))  # types of values without contents


class Pickles:
    """Makes the script save plain objects, and records the models and optimizers that it loads, while it is installed.

    Args:
        models: returns the models that are trained at a level now. If there are none, saved objects are not changed.
        optimizer_loaded: called with each unpickled optimizer.
    """

    def __init__(self, models: Callable[[], list[nn.Module]], optimizer_loaded: Callable[[Any], None]) -> None:
        self._models = models
        self._optimizer_loaded = optimizer_loaded

    def install(self, patches: Patches) -> None:
        """Replace functions of torch and pickle, until `patches` are removed."""
        save, load = self._saving(torch.save, "pickle_module"), self._loading(torch.load)
        for owner in torch, torch.serialization:
            patches.set(owner, "save", save)
            patches.set(owner, "load", load)
        for name in "dump", "dumps":
            patches.set(pickle, name, self._saving(getattr(pickle, name), name))
        for name in "load", "loads":
            patches.set(pickle, name, self._loading(getattr(pickle, name)))

    def _saving(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            models = self._models()
            if not models or not any(isinstance(part, nn.Module | nn.Parameter | Optimizer) for part in _parts(obj)):
                return original(obj, *args, **kwargs)
            kind = type("Pickler", (_PlainPickler,), {"models": models})
            if name == "dump":
                return _dump(kind, obj, *args, **kwargs)
            if name == "dumps":
                _dump(kind, obj, file := io.BytesIO(), *args, **kwargs)
                return file.getvalue()
            if len(args) < 2 and kwargs.get(name, pickle) is pickle:
                kwargs[name] = SimpleNamespace(__name__="pickle", Pickler=kind, dump=functools.partial(_dump, kind))
            return original(obj, *args, **kwargs)

        return save

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            for part in _parts(loaded):
                if isinstance(part, nn.Module) and not isinstance(part, Generated) and self._models():
                    fp32_copies.hold_casts_off(part)
                elif isinstance(part, Optimizer) and questions.policy_of(part) is None:
                    self._optimizer_loaded(part)
            return loaded

        return load


def _parts(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield `value`, and the contents of containers and attributes of objects in it, but not those of torch's."""
    yield value
    if depth and not isinstance(value, nn.Module | Optimizer | Tensor | type):
        inner = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
        for each in value if isinstance(value, list | tuple) else inner:
            if type(each) not in _EMPTY:  # faster than a generator for each number of a long list
                yield from _parts(each, depth - 1)


def _dump(kind: Callable[..., Any], obj: Any, file: Any, protocol: int | None = None, **kwargs: Any) -> None:
    kind(file, protocol, **kwargs).dump(obj)


class _PlainPickler(_PICKLER):
    """Pickles the plain form of each object. torch.save derives another class from this one.

    Pickle identifies objects by id, so objects and forms are referenced here: an id may not be reused during a dump.
    """

    models: list[nn.Module]

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        known = self._made.get(id(obj))
        form = self._form(obj) if known is None else known[1]
        if form is not obj:
            self._made[id(obj)] = obj, form
        super().save(form, *args, **kwargs)

    @functools.cached_property
    def _made(self) -> dict[int, tuple[Any, Any]]:
        """By id an object and its plain form, from the beginning those of the tensors of `models`."""
        return {id(tensor): (tensor, form) for model in self.models for tensor, form in _fp32_tensors(model)}

    def _form(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return vars(obj).get("_amp_base", obj)
        if isinstance(obj, nn.Module) and not isinstance(obj, torch.jit.ScriptModule):
            if isinstance(obj, AmpModel) and obj not in self.models:  # a copy of a model
                self._made.update((id(tensor), (tensor, form)) for tensor, form in _fp32_tensors(obj))
            return _plain_module(obj)
        return _plain_optimizer(obj) if isinstance(obj, Optimizer) else obj


def _fp32_tensors(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each weight of `model` that `initialize` has cast, each master and cast buffer, with its plain form."""
    policy = policy_of(model)
    if policy is None or policy.cast_model_type is None:
        return
    for param, _, master in low_weights(model, on_demand=False)[1]:
        form = nn.Parameter((param if master is None else master).detach().float(), param.requires_grad)
        vars(form).update(vars(param))
        yield from ((tensor, form) for tensor in (param, master) if tensor is not None)
    exact, low = buffers.exact_values(model, ""), low_buffers_of(model)
    for name, buffer in model.named_buffers():
        if buffer.dtype in LOW_PRECISION and name not in low:
            yield buffer, exact[name] if name in exact else buffer.float()


def _plain_module(module: nn.Module) -> nn.Module:
    """Return `module`, or a module of the script's class with its attributes, if `initialize` has added some."""
    own = {name: value for name, value in vars(module).items() if name not in ("_amp", buffers.EXACT)}
    hooks = {key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, ForwardHook | NoHook)}
    if len(own) == len(vars(module)) and base_class(module) is type(module) and not hooks:
        return module
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs") if hooks else ():
        own[name] = type(own[name])((key, hook) for key, hook in own[name].items() if key not in hooks)
    form: nn.Module = object.__new__(base_class(module))
    vars(form).update(own)
    return form


def _plain_optimizer(optimizer: Any) -> Any:
    """Return `optimizer`, or one of the script's class with its attributes and FP32 state, if it is trained."""
    if "_amp_stash" not in vars(optimizer):
        return optimizer
    params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
    state = {params.get(key, key): value for key, value in optimizer.state_dict()["state"].items()}
    for param in state:
        # Without masters an optimizer makes its state in the type to which `initialize` has cast the parameter.
        if isinstance(param, Tensor) and param.dtype in LOW_PRECISION and incoming.type_of(param) is None:
            low = {key: value for key, value in state[param].items() if getattr(value, "dtype", None) in LOW_PRECISION}
            state[param] = {**state[param], **{key: value.float() for key, value in low.items()}}
    form: Any = object.__new__(base_class(optimizer))
    vars(form).update({name: value for name, value in vars(optimizer).items() if name != "_amp_stash"})
    form.state = defaultdict(dict, state)
    return form
