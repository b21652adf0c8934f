"""initialize with Apex's arguments, what an opt level means as a `Properties`, and the state of the loss scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from amp_patch.apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
from amp_patch.apex.amp.handle import AmpHandle, dialect
from amp_patch.apex.amp.lists import register_edits
from amp_patch.apex.fp16_utils import FP16_Optimizer
from amp_patch.initialize import initialize_as, newest_training
from amp_patch.initialize import load_state_dict as load_scales
from amp_patch.initialize import state_dict as scales
from amp_patch.override import overridden
from amp_patch.policy import OPT_LEVELS, Policy, resolve

_CASTS_FUNCTIONS = ("O1", "O4")

__all__ = ["O0", "O1", "O2", "O3", "Properties", "initialize", "load_state_dict", "opt_levels", "state_dict"]


class Properties:
    """The options of an opt level, as attributes and in the dict `options`; contradictions to the level are refused.

    Source: Apex's class of this name, its options and the order in which they constrain each other.
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
    """Why an option cannot have this value at this level; None if it can."""
    if name == "patch_torch_functions":
        return "only O1 patches torch's functions" if value and opt_level not in _CASTS_FUNCTIONS else None
    if opt_level not in _CASTS_FUNCTIONS or value is None:
        return None
    if name == "cast_model_type" and value is not False and value is not torch.float32:
        return "O1 casts around functions and leaves the weights in FP32; O2 and O3 cast the model"
    if name == "keep_batchnorm_fp32":
        return "batch norms run in FP32 there by the op lists; leave it at None"
    if name == "master_weights":
        return "the model's weights are FP32 there; leave it at None"
    return None


class _Level:
    """An opt level: called with a `Properties` it fills that in, and returns it."""

    brief: str
    more: str

    def __call__(self, properties: Properties) -> Properties:
        return _describe(OPT_LEVELS[type(self).__name__], properties)


class O3(_Level):
    brief = "O3:  Pure FP16 training."
    more = "Weights, inputs and batch norms are FP16. How fast a model can be; rarely how well it trains."


class O2(_Level):
    brief = "O2:  FP16 training with FP32 batchnorm and FP32 master weights."
    more = "Weights and inputs are FP16, batch norms FP32; the optimizer updates FP32 copies of the weights."


class O1(_Level):
    brief = "O1:  Insert automatic casts around Pytorch functions and Tensor methods."
    more = "Weights stay FP32; each function of torch's gets the type that is fast or safe for it. The default."


class O0(_Level):
    brief = "O0:  Pure FP32 training."
    more = "The baseline: nothing is cast and nothing is scaled."


opt_levels = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0()}


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
    allow_banned: bool = False,
    cpu_fp16: str = "auto",
    process_group: Any = None,
    methods: tuple[str, ...] = (),
) -> Any:
    """`amp_patch.initialize` with Apex's arguments, whose models and optimizers answer to Apex's private names too.

    The arguments behind the star are amp_patch's own, and so are the environment variables ``AMP_PATCH_OPT_LEVEL`` and
    ``AMP_PATCH_DTYPE``. `amp._amp_state` then speaks of this training.

    Raises:
        RuntimeError: an override that contradicts the level (printed while `_amp_state.hard_override`, and dropped); an
            FP16_Optimizer.
        ValueError, TypeError: any other argument that cannot be honoured. Nothing was changed then.
    """
    if isinstance(enabled, str):
        raise TypeError(f"initialize: enabled, the third argument, is {enabled!r}; name the level: opt_level='O1'")
    if not enabled:
        _amp_state.opt_properties = Properties()
        return initialize_as(dialect(), models, optimizers, None)
    for optimizer in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "initialize: optimizers holds an FP16_Optimizer, which keeps masters and a loss scale by itself; pass "
                "the optimizer that it was made from"
            )
    overrides: dict[str, Any] = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
    }
    for name, value in overrides.items():
        if (objection := _objection(opt_level, name, value)) is not None:
            warn_or_err(f"initialize: {name}={value} contradicts opt_level {opt_level!r}: {objection}")
            overrides[name] = None
    opt_level, options = overridden(
        opt_level,
        {
            "dtype": dtype,
            "loss_scale": loss_scale,
            "cast_model_outputs": cast_model_outputs,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
            "allow_banned": allow_banned,
            "cpu_fp16": cpu_fp16,
            **overrides,
        },
    )
    policy = resolve(opt_level, **options)
    policy = replace(policy, op_lists="apex")
    if options["cast_model_type"] is False:
        # Weights stay as they came, and those that came in half get masters all the same.
        policy = replace(policy, cast_model_type=None)
    register_edits()
    result = initialize_as(
        dialect(), models, optimizers, policy, num_losses, verbosity, keep_fp32, process_group, methods
    )
    training = newest_training()
    assert training is not None
    _amp_state.opt_properties = properties = _describe(training.policy, Properties())
    _amp_state.verbosity = verbosity
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    _amp_state.handle = AmpHandle(training.policy.loss_scale, verbose=verbosity == 2, training=training)
    for ref in training.optimizers:
        if (optimizer := ref()) is not None:
            optimizer._amp_stash.properties = properties
    maybe_print(f"amp_patch (apex.amp): {training.policy}", rank0=True)
    return result


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales of the newest `initialize`, written into `destination` if given, as in Apex."""
    return scales(destination=destination)


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load what `state_dict` gave, into the loss scalers of the newest `initialize`, as in Apex."""
    load_scales(state_dict)


def _describe(policy: Policy, properties: Properties) -> Properties:
    """Fill `properties` in with a policy as Apex would describe it."""
    options = {name: getattr(policy, name) for name in properties.options if name != "enabled"}
    if policy.opt_level not in _CASTS_FUNCTIONS:  # where nothing is cast Apex says so with a type and a False
        options["cast_model_type"] = options["cast_model_type"] or torch.float32
        options["master_weights"] = bool(options["master_weights"])
    properties.options.update(options, enabled=True)
    return properties
