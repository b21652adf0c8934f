"""Warnings before calls of transformers and PEFT that round a training's weights, or save them to be rounded later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

from amp_patch.model.of_model import followed_policy
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.compiled import wraps
from amp_patch.support.distributed import is_first_rank

logger = logging.getLogger("amp_patch")

# True while an integration calls `save_pretrained` and writes the right type into the saved config itself: no warning.
corrects_config: ContextVar[bool] = ContextVar("corrects_config", default=False)

_MERGES = ("merge_and_unload", "merge_adapter")


def warning_methods(base: type, methods: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return {name: override} for methods of `base` that round weights: PEFT's merges, and transformers' save.

    Each override warns, then calls the original method.

    Args:
        base: the user's class.
        methods: the own methods of `base`, by name.
    """
    found = {name: _warning(methods[name], _of_merge(name)) for name in _MERGES if name in methods}
    if hasattr(base, "get_base_model"):  # PeftModel, whose __getattr__ reaches these methods of its tuner
        found |= {name: _warning(_of_tuner(name), _of_merge(name)) for name in _MERGES if not hasattr(base, name)}
    if "save_pretrained" in methods and any(cls.__name__ == "PreTrainedModel" for cls in base.__mro__):
        found["save_pretrained"] = _warning(methods["save_pretrained"], _of_save)
    return found


def _of_tuner(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.base_model, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _warning(method: Callable[..., Any], words_of: Callable[[Any], str | None]) -> Callable[..., Any]:
    @wraps(method)
    def warned(self: Any, *args: Any, **kwargs: Any) -> Any:
        if followed_policy(self) is not None and (words := words_of(self)) is not None and is_first_rank():
            logger.warning("%s.%s", type(self).__name__, words)
        return method(self, *args, **kwargs)

    return warned


def _of_save(model: Any) -> str | None:
    policy = followed_policy(model)
    adapters_alone = getattr(model, "_hf_peft_config_loaded", False)  # saved without a config of the model
    if policy is None or policy.cast_model_type is None or adapters_alone or corrects_config.get():
        return None
    return (
        "save_pretrained() writes FP32 weights, and a config that names the type of the cast weights, "
        f"{policy.cast_model_type}: from_pretrained(folder, dtype='auto') would round the weights to it. Save "
        "amp.fp32_copy(model).save_pretrained(folder), or load with dtype=torch.float32"
    )


def _of_merge(name: str) -> Callable[[nn.Module], str | None]:
    def words(model: nn.Module) -> str | None:
        low = next((p.dtype for p in model.parameters() if p.dtype in LOW_PRECISION), None)
        if low is None:
            return None
        return (
            f"{name}() adds the adapters to weights in {low}, and rounds the sums to it. Call amp.restore() first, "
            "then model.float() if the sums are to be exact"
        )

    return words
