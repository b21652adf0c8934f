"""Files of an unedited script: they hold models of the script's own classes with FP32 values, as without a level.

`torch.save` and `pickle.dump` replace each object that `initialize` has changed by its plain form, at any depth:
models, their modules and tensors, and optimizers. They look for models and optimizers in the first levels of the object
alone (`_parts`); if there are none, the original function saves it. `deepcopy`, `pickle.dumps` and multiprocessing do
not use these functions: a copy that they make still belongs to the training.

A model in a loaded file does not belong to the training, and is excluded from the casts of the process, like an FP32
copy. An optimizer in a loaded file is recorded like one that the script constructs.
"""

from __future__ import annotations

import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.model import buffers, fp32_copies
from amp_patch.model.copies import low_weights
from amp_patch.model.forward import AmpModel, low_buffers_of, policy_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import tree
from amp_patch.support.forward_hook import ForwardHook, NoHook
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.patches import Patches
from amp_patch.watch import questions


def install_pickles(
    patches: Patches, models: Callable[[], list[nn.Module]], optimizer_loaded: Callable[[Any], None]
) -> None:
    """Make the script save plain objects, and record the models and optimizers that it loads, until `patches` end.

    Args:
        models: returns the models that are trained at a level now. If there are none, saved objects are not changed.
        optimizer_loaded: called with each unpickled optimizer.
    """

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            trained, name = models(), original.__name__
            if not trained or not any(isinstance(part, nn.Module | nn.Parameter | Optimizer) for part in _parts(obj)):
                return original(obj, *args, **kwargs)
            made = {id(tensor): (tensor, form) for model in trained for tensor, form in _fp32_tensors(model)}
            kind = type("Pickler", (_PlainPickler,), {"models": trained, "made": made})
            if name == "save":
                if len(args) < 2 and kwargs.get("pickle_module", pickle) is pickle:
                    kwargs["pickle_module"] = SimpleNamespace(__name__="pickle", Pickler=kind, dump=pickle.dump)
                return original(obj, *args, **kwargs)
            return kind(*args, **kwargs).dump(obj)

        return save

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            for part in _parts(loaded):
                if isinstance(part, nn.Module) and not isinstance(part, Generated) and models():
                    fp32_copies.hold_casts_off(part)
                elif isinstance(part, Optimizer) and questions.policy_of(part) is None:
                    optimizer_loaded(part)
            return loaded

        return load

    for owner, name in (torch, "save"), (torch, "load"), (pickle, "dump"), (pickle, "load"), (pickle, "loads"):
        patches.set(owner, name, (loading if "load" in name else saving)(getattr(owner, name)))


def _parts(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield `value`, and the contents of containers and attributes of objects in it, but not those of torch's.

    Args:
        depth: how many levels of containers and attributes are looked at.
    """
    yield value
    if depth and not isinstance(value, nn.Module | Optimizer | Tensor | type):
        inner = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
        for each in value if isinstance(value, list | tuple) else inner:
            # Faster than a generator for each number of a long list.
            if isinstance(each, dict | list | tuple) or hasattr(each, "__dict__"):
                yield from _parts(each, depth - 1)


class _PlainPickler(pickle._Pickler):  # the one in C has no `save` to override
    """Pickles the plain form of each object. torch.save derives another class from this one.

    Attributes:
        models: the models in training.
        made: by id an object and its plain form; from the beginning those of the tensors of `models`.

    Pickle identifies objects by id, so objects and forms are referenced here: an id may not be reused during a dump.
    """

    models: list[nn.Module]
    made: dict[int, tuple[Any, Any]]

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        if id(obj) not in self.made and (form := self._form(obj)) is not obj:
            self.made[id(obj)] = obj, form
        super().save(self.made.get(id(obj), (obj, obj))[1], *args, **kwargs)  # type: ignore[misc]

    def _form(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return vars(obj).get("_amp_base", obj)
        if isinstance(obj, nn.Module) and not isinstance(obj, torch.jit.ScriptModule):
            if isinstance(obj, AmpModel) and obj not in self.models:  # a copy of a model
                self.made.update((id(tensor), (tensor, form)) for tensor, form in _fp32_tensors(obj))
            return _plain_module(obj)
        return _plain_optimizer(obj) if "_amp_stash" in getattr(obj, "__dict__", ()) else obj


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
    """Return a module of the script's class with the attributes of `module`, but those that `initialize` has added."""
    own = {name: value for name, value in vars(module).items() if name not in ("_amp", buffers.EXACT)}
    hooks = {key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, ForwardHook | NoHook)}
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs") if hooks else ():
        own[name] = type(own[name])((key, hook) for key, hook in own[name].items() if key not in hooks)
    form: nn.Module = object.__new__(base_class(module))
    vars(form).update(own)
    return form


def _plain_optimizer(optimizer: Any) -> Any:
    """Return an optimizer of the script's class with the attributes of `optimizer`, which is trained."""
    params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
    state = {params.get(key, key): value for key, value in optimizer.state_dict()["state"].items()}
    # At O3 the state has the type to which the parameters were cast.
    if (policy := questions.policy_of(optimizer)) is not None and policy.loses_updates:
        state = tree.cast_floats(state, torch.float32, LOW_PRECISION)
    form: Any = object.__new__(base_class(optimizer))
    vars(form).update({name: value for name, value in vars(optimizer).items() if name != "_amp_stash"})
    form.state = defaultdict(dict, state)
    return form
