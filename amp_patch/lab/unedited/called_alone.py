"""What a script calls of a cast model, or does in it, that fails on types: called again with casts.

FP32 meets half weights where a script calls a method of a cast model by itself (`model.decode(z)`), or a module inside
of it, and where a forward makes FP32 tensors (time embeddings, masks, positions). The first such call fails, and is
made again with casts; from then on the method or the module is one that `initialize` was given, or the model's calls
that mix types are cast as at O1. What works as it is stays as it is: a method that computes a loss of the model's
outputs, or drives the model, is not cast, and no call is asked about.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from amp_patch.casts.mixed_operands import MixedOperands
from amp_patch.lab.unedited.refusal import frames
from amp_patch.model.forward import cast_method, policy_of
from amp_patch.model.state import running
from amp_patch.model.type_errors import advising, is_about_types, method_subscribers
from amp_patch.support.patches import Patches
from amp_patch.support.random_states import random_states, restore_random_states
from amp_patch.support.scripts_line import raised_at

_NOTHING = nullcontext()


class CalledAlone:
    """The methods and modules of a script's models that are called by themselves, and the models that mix types.

    Args:
        models: gives the models that are trained at a level now.
        join: is told of a module that shall be a model too, and of the model that it is inside of.
        say: is told, once for a model, that its calls that mix types are cast.
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
        """Have methods that fail on types called again, until `patches` are removed."""
        patches.apply(lambda: method_subscribers.append(self._method), lambda: method_subscribers.remove(self._method))

    def methods_of(self, models: list[nn.Module]) -> tuple[str, ...]:
        """The methods of these models that were called by themselves, for `initialize`."""
        return tuple(dict.fromkeys(name for model in models for name in self._methods.get(model, ())))

    def _method(self, model: nn.Module, name: str) -> bool:
        if all(each is not model for each in self._models()):
            return False
        self._methods[model] = (*self._methods.get(model, ()), name)
        cast_method(model, name)
        return True

    def call(self, module: nn.Module, model: nn.Module, call: Callable[[], Any]) -> Any:
        """`call()`, a call of `module` inside of no other; made again if it fails on types that can be cast.

        The second call draws what the first one has drawn, if that was the first of `module`.

        Args:
            model: what is inside of DDP and its like.
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
        """The cast model that `part` is inside of, if its call failed on types because it was called by itself.

        None while a method of that model runs: `_method` has the whole of it called again.
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
        """What the forward of `model` is to run in: a `MixedOperands` where it has failed without."""
        policy = policy_of(model) if model in self._mixing else None
        return _NOTHING if policy is None or policy.cast_model_type is None else MixedOperands(policy)

    def _mixes(self, model: nn.Module, error: RuntimeError) -> bool:
        """Whether a call of `model`, one that is cast, has failed on types for the first time."""
        policy = policy_of(model)
        if policy is None or policy.cast_model_type is None or model in self._mixing or not is_about_types(error):
            return False
        self._mixing.add(model)
        self._say(
            f"a forward mixes FP32 with {policy.cast_model_type}{raised_at(error)}: functions that are given both are "
            "cast as at O1"
        )
        return True
