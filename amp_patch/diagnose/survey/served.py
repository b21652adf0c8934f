"""What `run` and `compare` serve in the forward of an unedited script: mixed types, and averages of the weights."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from amp_patch.casts.mixed_operands import MixedOperands
from amp_patch.diagnose.survey.calls import Call
from amp_patch.diagnose.survey.kinds import Kind
from amp_patch.model.type_errors import is_about_types
from amp_patch.policy import OPT_LEVELS
from amp_patch.watch.averages import averages_in


def mends(call: Call, kind: Kind, error: Exception, args: Any, kwargs: Any) -> bool:
    """Return whether `run` mends the `error` of a call with the arguments of `kind`.

    It does so in forwards of cast models, if types mix: it repeats the forward, in which such calls are cast as at O1.
    """
    if not (call.inside and kind.casts and isinstance(error, RuntimeError) and is_about_types(error)):
        return False
    if call.in_place and kind not in call.low():
        return False  # the arguments share memory with the script's own
    try:
        with torch.no_grad(), torch._C._EnableTorchFunction(), MixedOperands(OPT_LEVELS[kind.levels[0]]):
            call.func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False
    return True


def averages_that_run_keeps(model: nn.Module, held: Container[int]) -> set[str]:
    """Return the names of the parameters and buffers in averages of the weights, which `run` keeps in FP32.

    Args:
        held: ids of the parameters that optimizers hold.
    """
    kept = {
        id(tensor) for average in averages_in([model], held) for tensor in average.state_dict(keep_vars=True).values()
    }
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if id(tensor) in kept}
