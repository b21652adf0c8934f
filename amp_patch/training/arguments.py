"""The types of what users give to `initialize` and its siblings, as a type checker and an editor see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypedDict, TypeVar

import torch

from amp_patch.model.keep_fp32 import KeepFP32
from amp_patch.policy import Closed, CpuHalf, Flag, LowName, OptLevel, ProductFormat, State


class Steps(Protocol):
    """An optimizer: torch's, somebody else's, or a wrapper around one."""

    @property
    def step(self) -> Callable[..., Any]: ...


Optimizers = Steps | Sequence[Steps]
# A model, or several. What `torch.compile` gives is no nn.Module to a type checker.
M = TypeVar("M", bound=Callable[..., Any] | Sequence[Callable[..., Any]])
S = TypeVar("S", bound=Optimizers)
Level = OptLevel | str  # "O5+split", and a string from a command line, are no literals


class Keywords(TypedDict, total=False):
    """What the overloads of `initialize` take by keyword; a test holds it equal to its own arguments."""

    cast_model_type: torch.dtype | None
    patch_torch_functions: Flag | None
    keep_batchnorm_fp32: Flag | None
    master_weights: Flag | Closed | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float
    dtype: torch.dtype | LowName | ProductFormat | str | None
    keep_fp32: KeepFP32 | Iterable[KeepFP32]
    keep_high: KeepFP32 | Iterable[KeepFP32] | None
    allow_banned: bool
    cpu_half: CpuHalf
    cpu_fp16: CpuHalf | None
    process_group: Any
    methods: tuple[str, ...]
    skip_nonfinite: Flag
    low_precision_norms: Flag
    optimizer_state: State | None
    gradient_release: Flag


class ClosureAlreadyRun:
    """A closure whose work was done before the step that it is given to: gives what that returned."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self) -> Any:
        return self.result
