"""The types of what users give to `initialize` and its siblings, as a type checker and an editor see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, TypedDict, TypeVar

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


T_co = TypeVar("T_co", covariant=True)


class No(Protocol[T_co]):
    """The type of no value, as `No[NoReturn]`. Without it mypy names no argument: it prints all overloads, 3 kB.

    Where no overload matches, mypy looks for one that does with `Any` for all type variables. `No[Any]` is the type of
    every value. So mypy finds one, and says which argument of it is wrong.
    """

    def __sizeof__(self) -> T_co: ...  # type: ignore[override]


Else = No[NoReturn]


class Keywords(TypedDict, total=False):
    """What the overloads of `initialize` take by keyword; a test holds it equal to its own arguments."""

    cast_model_type: torch.dtype | Else | None
    patch_torch_functions: Flag | Else | None
    keep_batchnorm_fp32: Flag | Else | None
    master_weights: Flag | Closed | Else | None
    loss_scale: float | str | Else | None
    cast_model_outputs: torch.dtype | Else | None
    num_losses: int | Else
    verbosity: int | Else
    min_loss_scale: float | Else | None
    max_loss_scale: float | Else
    dtype: torch.dtype | LowName | ProductFormat | str | Else | None
    keep_fp32: KeepFP32 | Iterable[KeepFP32] | Else
    keep_high: KeepFP32 | Iterable[KeepFP32] | Else | None
    allow_banned: bool | Else
    cpu_half: CpuHalf | Else
    cpu_fp16: CpuHalf | Else | None
    process_group: Any
    methods: tuple[str, ...] | Else
    skip_nonfinite: Flag | Else
    low_precision_norms: Flag | Else
    optimizer_state: State | Else | None
    gradient_release: Flag | Else
