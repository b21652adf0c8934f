"""`apex.amp.frontend`: `initialize` with Apex's arguments, `Properties`, and the state dict of the loss scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from amp_patch.apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
from amp_patch.apex.amp.handle import AmpHandle, dialect
from amp_patch.apex.amp.lists import register_edits
from amp_patch.apex.fp16_utils import FP16_Optimizer
from amp_patch.environment import overridden, without_rungs
from amp_patch.frontend import initialize_as
from amp_patch.frontend import load_state_dict as load_scales
from amp_patch.frontend import state_dict as scales
from amp_patch.policy import Options, Policy, resolve
from amp_patch.support.scripts_line import frames
from amp_patch.support.words import names_arguments
from amp_patch.training.innermost import as_list
from amp_patch.training.stash import stash_of
from amp_patch.training.training import newest_training

_CASTS_FUNCTIONS = ("O1", "O4")
# Options that a level sets, in the order of reported contradictions.
_CONSTRAINED = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights")

__all__ = ["Properties", "initialize", "load_state_dict", "state_dict"]


class Properties:
    """The options of an opt level, as attributes and in the dict `options`.

    Setting an option to a value that contradicts the level raises RuntimeError (see `warn_or_err`).

    Source: Apex's class of this name, with its options and its order of constraints.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        vars(self)["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["options"][name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            super().__setattr__(name, value)
            return
        if (objection := _objection(self.opt_level, name, value)) is not None:
            warn_or_err(f"{name}={value} contradicts opt_level {self.opt_level!r}: {objection}")
        if name == "keep_batchnorm_fp32":
            value = {"True": True, "False": False}.get(value, value)
        if name == "loss_scale" and value != "dynamic":
            value = float(value)
        self.options[name] = value


def _objection(opt_level: str | None, name: str, value: Any) -> str | None:
    """Return the reason why an option cannot have this value at this level; None if it can."""
    if name == "patch_torch_functions":
        return "only O1 patches torch's functions" if value and opt_level not in _CASTS_FUNCTIONS else None
    if opt_level not in _CASTS_FUNCTIONS or value is None:
        return None
    if name == "cast_model_type" and value is not False and value is not torch.float32:
        return "O1 casts around functions and leaves the weights in FP32; O2 and O3 cast the model"
    if name == "keep_batchnorm_fp32":
        return "batch norms have FP32 weights and statistics there; leave it at None"
    if name == "master_weights":
        return "the model's weights are FP32 there; leave it at None"
    return None


@names_arguments
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
    keep_fp32: Any = (),
    allow_banned: bool | None = None,
    cpu_half: str | None = None,
    process_group: Any = None,
    methods: tuple[str, ...] = (),
) -> Any:
    """Do `amp_patch.initialize` with Apex's arguments; the models and optimizers get Apex's private names too.

    The arguments from `dtype` to `methods`, and the environment variables ``AMP_PATCH_OPT_LEVEL`` and
    ``AMP_PATCH_DTYPE``, are those of amp_patch. After the call `amp._amp_state` describes this training.

    Raises:
        RuntimeError: an option contradicts the level (with `_amp_state.hard_override` it is reported and ignored
            instead); an optimizer is an FP16_Optimizer; DeepSpeed calls this in one of several processes.
        ValueError, TypeError: any other invalid argument. Nothing was changed then.
    """
    arguments = locals()
    if isinstance(enabled, str):
        raise TypeError(f"initialize: enabled, the third argument, is {enabled!r}; name the level: opt_level='O1'")
    if not enabled:
        _amp_state.opt_properties = Properties()
        return initialize_as(dialect(), models, optimizers, None)
    _refuse_fp16_optimizers(optimizers)
    _refuse_ranks_of_deepspeed()
    opt_level, given = without_rungs(opt_level, Options.of(arguments))
    options = _without_contradictions(opt_level, vars(given))
    policy = _resolved(opt_level, options)
    register_edits()
    out = initialize_as(dialect(), models, optimizers, policy, num_losses, verbosity, keep_fp32, process_group, methods)
    _present_newest_training(verbosity, min_loss_scale, max_loss_scale)
    return out


def _refuse_fp16_optimizers(optimizers: Any) -> None:
    for optimizer in as_list(optimizers):
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "initialize: optimizers holds an FP16_Optimizer, which keeps masters and a loss scale by itself; pass "
                "the optimizer that it was made from"
            )


def _refuse_ranks_of_deepspeed() -> None:
    """Raise if DeepSpeed has called `initialize` in one of several processes.

    It averages `param.grad` after `scale_loss` has unscaled and checked it: one process could skip a step that another
    makes, and at O2 the masters would not receive the average.
    """
    together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if together and any(frame.f_globals.get("__name__") == "deepspeed.runtime.engine" for frame in frames()):
        raise RuntimeError(
            "initialize: DeepSpeed averages gradients over the processes too late for apex.amp; train in one process, "
            'or replace "amp" in its config by DeepSpeed\'s own "bf16" or "fp16"'
        )


def _without_contradictions(opt_level: str, options: dict[str, Any]) -> dict[str, Any]:
    """Report each option that contradicts the level, by `warn_or_err`. Return {name of an option: value}.

    The value of a reported option is None in the result.
    """
    kept = dict(options)
    for name in _CONSTRAINED:
        if (objection := _objection(opt_level, name, options[name])) is not None:
            warn_or_err(f"initialize: {name}={options[name]} contradicts opt_level {opt_level!r}: {objection}")
            kept[name] = None
    return kept


def _resolved(opt_level: str, options: dict[str, Any]) -> Policy:
    """Return the policy of a level with `options` and Apex's op lists. The environment overrides level and options."""
    opt_level, given = overridden(opt_level, Options(**options))
    policy = replace(resolve(opt_level, given), op_lists="apex")
    if given.cast_model_type is False:
        # `cast_model_type=False`: weights keep their type. FP16 and BF16 weights get masters all the same.
        policy = replace(policy, cast_model_type=None)
    return policy


def _present_newest_training(verbosity: int, min_loss_scale: float | None, max_loss_scale: float) -> None:
    """Make `_amp_state` and the stashes describe the newest training, and print its policy."""
    _amp_state.verbosity = verbosity
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    training = newest_training()
    assert training is not None
    _amp_state.opt_properties = properties = _describe(training.policy, Properties())
    _amp_state.handle = AmpHandle(training.policy.loss_scale, verbose=verbosity == 2, training=training)
    for optimizer in (optimizer for ref in training.optimizers if (optimizer := ref()) is not None):
        stash: Any = stash_of(optimizer)
        stash.properties = properties
    maybe_print(f"amp_patch (apex.amp): {training.policy}", rank0=True)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the loss scales of the newest `initialize`, in `destination` if given, as in Apex."""
    return scales(destination=destination)


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load a result of `state_dict` into the loss scalers of the newest `initialize`, as in Apex."""
    load_scales(state_dict)


def _describe(policy: Policy, properties: Properties) -> Properties:
    """Set `properties` to the values that Apex would have for `policy`; return `properties`."""
    known = (name for name in properties.options if name != "enabled" and hasattr(policy, name))
    options = {name: getattr(policy, name) for name in known}
    if policy.opt_level not in _CASTS_FUNCTIONS:  # if no function is cast, Apex sets this to a type and False
        options["cast_model_type"] = options["cast_model_type"] or torch.float32
        options["master_weights"] = bool(options["master_weights"])
    properties.options.update(options, enabled=True)
    return properties
