"""amp_patch: the opt-level switch for mixed-precision training. See `initialize` and `scale_loss`.

`from amp_patch import amp` and `import amp_patch as amp` give the same names. Importing patches nothing. Parts that a
training does not need (recording, comparison, diagnosis, the graph) are imported at the first use of their names.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    needed = (
        f"amp_patch: there is no torch in this Python ({sys.executable}). Install it first, by "
        "`pip install torch numpy` or the command that https://pytorch.org/get-started/locally has for your CUDA; it "
        "must be 2.6 or newer"
    )
    if sys.argv[:1] == ["-m"]:  # `python -m amp_patch`: Python imports the package before __main__.py
        sys.exit(needed)
    raise ModuleNotFoundError(needed, name="torch") from None

from torch.amp import is_autocast_available

from amp_patch import amp, cpu, cuda, multi_tensor
from amp_patch.around.fsdp import fsdp_policy
from amp_patch.casts.autocast import autocast, disable_casts
from amp_patch.casts.functions import (
    custom_bwd,
    custom_fwd,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_patch.frontend import (
    initialize,
    load_state_dict,
    master_params,
    restore,
    state_dict,
)
from amp_patch.grad_scaler import GradScaler
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.storage.compressed_states import compress_state_dict, decompress_state_dict
from amp_patch.training.scale_loss import loss_scale, scale_loss
from amp_patch.ways.per_parameter import register_per_parameter_optimizer

if TYPE_CHECKING:
    from amp_patch import graph
    from amp_patch.comparison.notebook import assert_level, compare
    from amp_patch.diagnose.explain import explain
    from amp_patch.diagnose.find_loss_scale import find_loss_scale
    from amp_patch.diagnose.inspect import inspect
    from amp_patch.diagnose.output_distance import compare_outputs
    from amp_patch.diagnose.recording.recorder import log, record
    from amp_patch.diagnose.survey.survey import survey

__version__ = "0.4.0"

__all__ = [
    "GradScaler",
    "amp",
    "assert_level",
    "autocast",
    "compare",
    "compare_outputs",
    "compress_state_dict",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "decompress_state_dict",
    "disable_casts",
    "explain",
    "find_loss_scale",
    "float_function",
    "fp32_copy",
    "fsdp_policy",
    "graph",
    "half_function",
    "initialize",
    "inspect",
    "is_autocast_available",
    "load_state_dict",
    "log",
    "loss_scale",
    "master_params",
    "multi_tensor",
    "promote_function",
    "record",
    "register_float_function",
    "register_half_function",
    "register_per_parameter_optimizer",
    "register_promote_function",
    "restore",
    "scale_loss",
    "state_dict",
    "survey",
]

# Name -> the module that defines it, which is imported at the first use of the name. `graph` is a module itself.
_LAZY = {
    "assert_level": "amp_patch.comparison.notebook",
    "compare": "amp_patch.comparison.notebook",
    "compare_outputs": "amp_patch.diagnose.output_distance",
    "explain": "amp_patch.diagnose.explain",
    "find_loss_scale": "amp_patch.diagnose.find_loss_scale",
    "graph": "amp_patch.graph",
    "inspect": "amp_patch.diagnose.inspect",
    "log": "amp_patch.diagnose.recording.recorder",
    "record": "amp_patch.diagnose.recording.recorder",
    "survey": "amp_patch.diagnose.survey.survey",
}


if not TYPE_CHECKING:  # a type checker has the names of `_LAZY` from imports above, and must refuse others

    def __getattr__(name: str) -> Any:
        """Import a name of `_LAZY`, and store it in this module, so that Python does not call this function again."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_LAZY[name])
        value = globals()[name] = module if name == "graph" else getattr(module, name)
        return value


def __dir__() -> list[str]:
    """Return the public names and the dunder names of every module."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
