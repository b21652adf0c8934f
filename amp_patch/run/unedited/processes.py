"""Child processes of a script, and weights in memory that processes share."""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
from typing import Any

from torch import Tensor, nn

from amp_patch.policy import OPT_LEVELS, Policy
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.support.patches import Patches


def tell(line: str) -> None:
    """Write a line to stderr in one call. print() writes the newline separately: other processes may write between."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Processes:
    """Counts the processes that the script starts by multiprocessing, except the workers of a DataLoader.

    Attributes:
        started: the number of these processes so far.
    """

    def __init__(self) -> None:
        self.started = 0

    def install(self, patches: Patches) -> None:
        """Replace `Process.start`, until `patches` are removed."""
        kind = multiprocessing.process.BaseProcess
        original = kind.start

        @functools.wraps(original)
        def start(process: Any) -> None:
            target = getattr(vars(process).get("_target"), "__module__", None) or ""  # `start` deletes it
            original(process)
            self.started += not target.startswith("torch.utils.data.")

        patches.set(kind, "start", start)

    def refused(self) -> ScriptRefused:
        """Return the error for a script that has constructed no optimizer, but has started processes that may train."""
        return ScriptRefused(
            f"it made no optimizer of torch.optim in this process, and it started {self.started} more, whose steps are "
            "not seen here",
            line=False,
            lines="",
            then="AMP_PATCH_OPT_LEVEL=O2 python -m amp_patch run trains them at a level, and each reports its training",
        )


def refuse_copies_of_shared(model: nn.Module, policy: Policy) -> None:
    """Raise ScriptRefused if processes share the weights (`share_memory()`) and the level would train a private copy.

    A level with masters in FP32 is accepted. The master takes over the weight's FP32 memory, so the optimizers of all
    processes step the same master, and each process rounds the master into its own low-precision weight.
    """
    own = policy.cast_model_type is not None and (not policy.master_weights or policy.closes_masters)
    if own and any(map(_is_shared, model.parameters())):
        others = ", ".join(level for level, each in OPT_LEVELS.items() if each.keeps_fp32_weights)
        masters = f"master_weights={policy.master_weights!r}" if policy.master_weights else "no FP32 weights"
        raise ScriptRefused(
            f"processes share the weights of {type(model).__name__} (share_memory()), and {policy.opt_level} with "
            f"{masters} would train a copy in each",
            lines="",
            then=f"Train it at one of {others}",
        )


def _is_shared(param: Tensor) -> bool:
    return param.device.type == "cpu" and param.is_shared()
