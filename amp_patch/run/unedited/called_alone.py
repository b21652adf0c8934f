"""Calls that fail because they mix FP32 with a cast model's weights: each is repeated with casts.

This happens if a script calls a method of a cast model directly (`model.decode(z)`), or a module inside the model, or
if a forward creates FP32 tensors (time embeddings, masks, positions). The first such call raises an error about types.
It is then made again with casts, and later calls are cast from the start:
- a method is cast as one of `initialize(methods=...)`; if it fails again, its mixed calls are cast as at O1;
- a module inside the model becomes a model too;
- a forward that creates FP32 tensors has its mixed calls cast as at O1.

A call that does not fail is never changed. So a method that computes a loss from the model's outputs, or that itself
calls the model, is not cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from amp_patch.casts.mixed_operands import MixedOperands
from amp_patch.model.forward import cast_method, policy_of
from amp_patch.model.mixed_calls import cast_mixed_calls
from amp_patch.model.of_model import running
from amp_patch.model.type_errors import advising, is_about_types, method_subscribers
from amp_patch.policy import Policy
from amp_patch.support.generated_class import key_of
from amp_patch.support.patches import Patches
from amp_patch.support.random_states import random_states, restore_random_states
from amp_patch.support.scripts_line import frames, raised_at

_NOTHING = nullcontext()


class CalledAlone:
    """Repeats failed calls with casts, and remembers which methods, modules and models need them.

    Args:
        models: returns the models that are trained at a level now.
        join: called with a module that must become a model too, and the model that contains it.
        say: called once for a model whose mixed calls are cast from now on, with a message.
    """

    def __init__(
        self,
        models: Callable[[], list[nn.Module]],
        join: Callable[[nn.Module, nn.Module], None],
        say: Callable[[str], None],
    ) -> None:
        self._models, self._join, self._say = models, join, say
        self._methods = weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]]()
        self._mixing = weakref.WeakSet[nn.Module]()
        self._called = weakref.WeakSet[nn.Module]()

    def install(self, patches: Patches) -> None:
        """Subscribe to errors about types in methods of cast models, until `patches` are removed.

        If a method of a model in training fails on types, it is made a cast method, and is called again.
        """
        patches.apply(lambda: method_subscribers.append(self._method), lambda: method_subscribers.remove(self._method))

    def methods_of(self, models: list[nn.Module]) -> tuple[str, ...]:
        """Return the names of the methods of these models that needed casts, for `initialize(methods=...)`."""
        return tuple(dict.fromkeys(name for model in models for name in self._methods.get(model, ())))

    def _method(self, model: nn.Module, name: str, error: RuntimeError) -> bool:
        if all(each is not model for each in self._models()):
            return False
        if name in key_of(model):  # type: ignore[arg-type]
            if mixes := cast_mixed_calls(model, name):
                self._say_mixed(f"{name}()", policy_of(model), error)
            return mixes
        self._methods[model] = (*self._methods.get(model, ()), name)
        cast_method(model, name)
        return True

    def _say_mixed(self, what: str, policy: Policy | None, error: RuntimeError) -> None:
        place = f"{what} mixes FP32 with {None if policy is None else policy.cast_model_type}{raised_at(error)}"
        self._say(f"{place}: functions that receive both are cast as at O1")

    def call(self, module: nn.Module, model: nn.Module, call: Callable[[], Any]) -> Any:
        """Run `call`, an outermost call of `module`; if it fails on types that casts can mend, run it again with casts.

        If it is the first call of `module`, the second run starts from the same states of the random generators, and
        so draws the same numbers.

        Args:
            model: `module` itself, or the model inside if `module` is a wrapper such as DDP.
        """
        states = None if module in self._called else random_states()
        self._called.add(module)
        try:
            with self._casts_of(model):
                return call()
        except RuntimeError as error:
            if (around := self._model_around(module, error)) is not None:
                self._join(module, around)
            elif not self._mixes(model, error):
                raise
        if states is not None:
            restore_random_states(states)
        with self._casts_of(model):
            return call()

    def _model_around(self, part: nn.Module, error: RuntimeError) -> nn.Module | None:
        """Return the cast model that contains `part`, if `error` shows that the direct call of `part` failed on types.

        None otherwise, and while a method of that model runs: `_method` then repeats the whole method.
        """
        if running.policy is not None or policy_of(part) is not None or not is_about_types(error):
            return None
        for model in self._models():
            policy = policy_of(model)
            if policy is None or policy.cast_model_type is None or all(part is not each for each in model.modules()):
                continue
            asking = (f for f in frames() if f.f_globals.get("__name__") == advising.__module__)
            return None if any(frame.f_locals.get("self") is model for frame in asking) else model
        return None

    def _casts_of(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which to run the forward of `model`.

        It is `MixedOperands`, which casts mixed calls as at O1, if a forward of `model` has failed without that;
        otherwise it does nothing.
        """
        policy = policy_of(model) if model in self._mixing else None
        return _NOTHING if policy is None or policy.cast_model_type is None else MixedOperands(policy)

    def _mixes(self, model: nn.Module, error: RuntimeError) -> bool:
        """Return whether `error` is the first error about types in the forward of a cast model.

        If so, the model's mixed calls are cast from now on, and a message says so.
        """
        policy = policy_of(model)
        if policy is None or policy.cast_model_type is None or model in self._mixing or not is_about_types(error):
            return False
        self._mixing.add(model)
        self._say_mixed("a forward", policy, error)
        return True
