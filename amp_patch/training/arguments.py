"""The types of the arguments of `initialize`, `scale_loss` and similar functions, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, Protocol, TypedDict, TypeVar

import torch

from amp_patch.model.keep_fp32 import KeepFP32, ParamRule
from amp_patch.policy import Closed, CpuHalf, Flag, LowName, OptLevel, ProductFormat, State


class Steps(Protocol):
    """An optimizer of any package, or a wrapper around one: a type checker requires only its attribute `step`."""

    @property
    def step(self) -> Callable[..., Any]: ...


Optimizers = Steps | Sequence[Steps]
# A model, or several. Any callable is accepted: to a type checker, the result of `torch.compile` is no nn.Module.
M = TypeVar("M", bound=Callable[..., Any] | Sequence[Callable[..., Any]])
S = TypeVar("S", bound=Optimizers)
Level = OptLevel | str  # `str` too: a literal type has neither "O5+split" nor a command-line argument


T_co = TypeVar("T_co", covariant=True)


class No(Protocol[T_co]):
    """A protocol that no value matches in the form `No[NoReturn]`. It shortens mypy's errors about `initialize`.

    If no overload matches a call, mypy compares the arguments again, with `Any` for all type arguments. `No[Any]`
    matches every value, so now one overload matches, and mypy reports only the wrong argument. Without this class,
    mypy prints all overloads, which are 3 kB of text.
    """

    def __sizeof__(self) -> T_co: ...  # type: ignore[override]


Else = No[NoReturn]


class Keywords(TypedDict, total=False):
    """The keyword arguments of the overloads of `initialize`; a test compares them with the function's own."""

    cast_model_type: torch.dtype | Else | None
    patch_torch_functions: Flag | Else | None
    keep_batchnorm_fp32: Flag | Else | None
    master_weights: Flag | Closed | Else | None
    loss_scale: float | str | Else | None
    cast_model_outputs: torch.dtype | Else | None
    num_losses: int | Else
    verbosity: int | Else
    min_loss_scale: float | Else | None
    max_loss_scale: float | Else | None
    dtype: torch.dtype | LowName | ProductFormat | str | Else | None
    keep_fp32: KeepFP32 | Iterable[KeepFP32] | Else
    keep_high: KeepFP32 | Iterable[KeepFP32] | Else | None
    allow_banned: bool | Else | None
    cpu_half: CpuHalf | Else | None
    process_group: Any
    methods: tuple[str, ...] | Else
    skip_nonfinite: Flag | Else | None
    low_precision_norms: Flag | Else | None
    optimizer_state: State | Else | None
    saved_activations: State | Else | None
    master_device: Literal["cpu"] | Else | None
    fp32_state: ParamRule | Iterable[ParamRule] | Else
    gradient_release: Flag | Else


class ClosureAlreadyRun:
    """A closure for `step` that user code has run already: a call returns the result of that run."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self) -> Any:
        return self.result
