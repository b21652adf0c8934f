"""Pickles of an unedited script: they hold models of the script's own classes with FP32 values, as without a level.

`torch.save`, `pickle.dump` and `pickle.dumps` replace each object that `initialize` has changed by its plain form, at
any depth: models, their modules and parameters, and optimizers. The opcodes equal plain torch's too, so that
`torch.load(weights_only=True)` with the script's own safe globals accepts the file. `deepcopy` and multiprocessing do
not use these functions: a copy that they make still belongs to the training.

A model that the script loads during a training does not belong to it, and is excluded from the casts of the process,
like an FP32 copy. An optimizer that it loads is recorded like one that it constructs.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.master import Master
from amp_patch.masters.masters import link_of, links_of, settle
from amp_patch.masters.states import HeldStates, MasterStates
from amp_patch.model import buffers, fp32_copies, incoming
from amp_patch.model.forward import AmpModel, low_buffers_of, policy_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.forward_hook import ForwardHook, NoHook
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.patches import Patches
from amp_patch.support.quantized import is_quantized
from amp_patch.training import observers

_PICKLER: Any = pickle._Pickler
_STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage)
_FRAMES = 4  # frames of Python's pickler for one level of recursion of the pickler in C


class Pickles:
    """Makes the script save plain objects, and records the models and optimizers that it loads, while it is installed.

    Args:
        models: returns the models that are trained at a level now. If there are none, saved objects are not changed.
        optimizer_loaded: called with each unpickled optimizer.
    """

    def __init__(self, models: Callable[[], list[nn.Module]], optimizer_loaded: Callable[[Any], None]) -> None:
        self._models = models
        self._optimizer_loaded = optimizer_loaded
        self._loading = _Loading()
        self._lock = threading.Lock()  # guards `_loads` and `_noting_patches`
        self._loads = 0
        self._noting_patches = Patches()

    def install(self, patches: Patches) -> None:
        """Replace functions of torch and pickle, until `patches` are removed."""
        save, load = self._saving(torch.save), self._taking(torch.load)
        for owner in torch, torch.serialization:
            patches.set(owner, "save", save)
            patches.set(owner, "load", load)
        for name in "dump", "dumps":
            patches.set(pickle, name, self._pickling(name))
        for name in "load", "loads":
            patches.set(pickle, name, self._taking(getattr(pickle, name)))

    def _saving(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def save(obj: Any, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> None:
            models = self._models()
            # pickle.dumps calls torch.save for each storage in the object: these need no search.
            ours = pickle_module is pickle and models and not isinstance(obj, _STORAGES) and _holds_ours(obj, models)
            if not ours:
                return original(obj, f, pickle_module, *args, **kwargs)
            kind = _pickler_of(models)
            module = SimpleNamespace(__name__="pickle", Pickler=kind, dump=functools.partial(_dump, kind))
            with _deep_enough():
                original(obj, f, module, *args, **kwargs)

        return save

    def _pickling(self, name: str) -> Callable[..., Any]:
        original = getattr(pickle, name)

        @functools.wraps(original)
        def pickling(obj: Any, *args: Any, **kwargs: Any) -> Any:
            models = self._models()
            if not models or not _holds_ours(obj, models):
                return original(obj, *args, **kwargs)
            kind, file = _pickler_of(models), io.BytesIO()
            with _deep_enough():
                if name == "dump":
                    return _dump(kind, obj, *args, **kwargs)
                _dump(kind, obj, file, *args, **kwargs)
                return file.getvalue()

        return pickling

    def _taking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            outer, self._loading.found = self._loading.found, []
            try:
                with self._noted():
                    loaded = original(*args, **kwargs)
                found = self._loading.found
            finally:
                self._loading.found = outer
            self._take(found)
            return loaded

        return load

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Record the modules and optimizers that are unpickled in the body. Loads of several threads may overlap.

        `__setstate__` is replaced in the body only. Trainings at O0 also replace `Optimizer.__setstate__`, until
        `restore`. If this replacement lasted longer than the body, undoing one of the two could remove the other.
        """
        with self._lock:
            self._loads += 1
            for kind in (nn.Module, torch.optim.Optimizer) if self._loads == 1 else ():
                self._noting_patches.set(kind, "__setstate__", self._noting(vars(kind)["__setstate__"]))
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
                if not self._loads:
                    self._noting_patches.remove()

    def _noting(self, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        @functools.wraps(original)
        def __setstate__(loaded: Any, state: Any) -> None:
            original(loaded, state)
            if self._loading.found is not None:
                self._loading.found.append(loaded)

        return __setstate__

    def _take(self, loaded: list[Any]) -> None:
        modules = [each for each in loaded if isinstance(each, nn.Module)]
        inside = {id(child) for module in modules for child in module.modules() if child is not module}
        if self._models():
            for module in modules:
                if id(module) not in inside and not isinstance(module, Generated):
                    fp32_copies.hold_casts_off(module)
        for each in loaded:
            if isinstance(each, torch.optim.Optimizer) and observers.policy_of(each) is None:
                self._optimizer_loaded(each)


class _Loading(threading.local):
    """The modules and optimizers unpickled by the running load of this thread; None if no load is running."""

    found: list[Any] | None = None


def _pickler_of(models: list[nn.Module]) -> Any:
    """Return a subclass of Python's pickler that replaces each object by its plain form (`PlainForms`).

    The result is a class, because torch.save derives another class from it. It derives from the pickler in Python,
    because the one in C has no method `save` to override.

    Args:
        models: the models of the trainings.
    """

    class Pickler(_PICKLER):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.plain = PlainForms(models)

        def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
            super().save(self.plain.of(obj), *args, **kwargs)

    return Pickler


class PlainForms:
    """The plain forms of objects that belong to trainings: of the script's own classes, with FP32 values.

    Each plain form is made once and referenced here: pickle identifies objects by id, and an id may not be reused
    during a dump.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> the object, its plain form
        self._params: dict[int, Tensor] = {}  # id of a master -> its parameter
        self._cast: set[int] = set()  # ids of the parameters of cast models
        for model in models:
            self._note(model)

    def of(self, obj: Any) -> Any:
        """Return the plain form of `obj`. If `initialize` has not changed `obj`, that is `obj` itself."""
        known = self._made.get(id(obj))
        if known is not None:
            return known[1]
        form = self._form(obj)
        if form is not obj:
            self._made[id(obj)] = obj, form
        return form

    def _form(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self._tensor(obj) if isinstance(obj, nn.Parameter) else obj
        if isinstance(obj, type):
            return vars(obj).get("_amp_base", obj)
        if isinstance(obj, nn.Module):
            return self._module(obj)
        has_stash = isinstance(getattr(obj, "__dict__", None), dict) and "_amp_stash" in vars(obj)
        if has_stash or (isinstance(obj, Generated) and "_amp_base" in vars(type(obj))):
            return self._optimizer(obj, has_stash)
        return obj

    def _tensor(self, param: nn.Parameter) -> Any:
        if isinstance(param, Master) and id(param) in self._params:
            return self.of(self._params[id(param)])
        if type(param) is not nn.Parameter or param.dtype not in LOW_PRECISION:
            return nn.Parameter(param.detach(), param.requires_grad) if isinstance(param, Master) else param
        link = link_of(param)
        if link is None and (id(param) not in self._cast or incoming.type_of(param) is not None):
            return param
        form = nn.Parameter((param if link is None else link.master).detach().float(), param.requires_grad)
        vars(form).update(vars(param))
        return form

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        given = isinstance(module, Generated) and "_amp_base" in vars(type(module))
        ours = [name for name in ("_amp", buffers.EXACT) if name in vars(module)]
        hooks = {key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, ForwardHook | NoHook)}
        if not (given or ours or hooks):
            return module
        if isinstance(module, AmpModel):
            self._note(module)
        form: nn.Module = object.__new__(base_class(module) if given else type(module))
        own = {name: value for name, value in vars(module).items() if name not in ours}
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            if hooks:
                own[name] = type(own[name])((key, hook) for key, hook in own[name].items() if key not in hooks)
        vars(form).update(own)
        return form

    def _optimizer(self, optimizer: Any, has_stash: bool) -> Any:
        if has_stash:
            self._note_masters(param for param, _ in observers.pairs_of(optimizer))
        form: Any = object.__new__(base_class(optimizer))
        own = dict(vars(optimizer))
        own.pop("_amp_stash", None)
        state = own.get("state")
        if isinstance(state, dict):
            own["state"] = defaultdict() if isinstance(state, MasterStates | HeldStates) else type(state)()
            if hasattr(state, "default_factory"):
                own["state"].default_factory = state.default_factory
            own["state"].update((param, _widened(param, each)) for param, each in state.items())
        vars(form).update(own)
        return form

    def _note(self, model: nn.Module) -> None:
        policy = policy_of(model)
        if policy is None or policy.cast_model_type is None:
            return
        self._note_masters(model.parameters())
        self._cast.update(map(id, model.parameters()))
        exact, low = buffers.exact_values(model, ""), low_buffers_of(model)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.dtype in LOW_PRECISION and name not in low and id(buffer) not in self._made:
                self._made[id(buffer)] = buffer, exact[name] if name in exact else buffer.float()

    def _note_masters(self, params: Iterable[Tensor]) -> None:
        links = links_of(params)
        settle(links)
        self._params.update((id(link.master), param) for param, link in links)


def _widened(param: Any, state: Any) -> Any:
    """Return the optimizer's state of `param`, with FP32 copies of its low-precision tensors.

    Without masters an optimizer makes its state in the low-precision type of the parameter. The state of a parameter
    that is FP32, that was in low precision before `initialize`, or that is quantized, is returned as it is.
    """
    if not (isinstance(state, dict) and isinstance(param, Tensor) and param.dtype in LOW_PRECISION):
        return state
    if is_quantized(param) or incoming.type_of(param) is not None:
        return state
    low = {key for key, value in state.items() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION}
    return {key: value.float() if key in low else value for key, value in state.items()}


class _Found(Exception):
    """Ends the search of `_holds_ours` at the first object that `initialize` has changed."""


class _Looking(pickle.Pickler):
    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__(_Nowhere(), pickle.HIGHEST_PROTOCOL)
        self._plain = PlainForms(models)

    def persistent_id(self, obj: Any) -> str | None:
        return "storage" if isinstance(obj, _STORAGES) else None  # skips the bytes of the storage

    def reducer_override(self, obj: Any) -> Any:
        if self._plain.of(obj) is not obj:
            raise _Found
        return NotImplemented


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _holds_ours(obj: Any, models: list[nn.Module]) -> bool:
    """Return whether `obj` is or contains, at any depth, an object that `initialize` has changed.

    The pickler in C visits the contents, because a search in Python would be slower. If it raises, the result is False:
    the script's own pickling raises the same error.
    """
    try:
        _Looking(models).dump(obj)
    except _Found:
        return True
    except Exception:  # the pickling itself will raise it again, in the script
        return False
    return False


def _dump(pickler: Callable[..., Any], obj: Any, file: Any, protocol: int | None = None, **kwargs: Any) -> None:
    pickler(file, protocol, **kwargs).dump(obj)


@contextmanager
def _deep_enough() -> Iterator[None]:
    """Raise the recursion limit, so that Python's pickler can descend as deep into nested objects as the one in C."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_FRAMES * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
