"""Optimizer state stored in 8 bits per element, and read and written by user code in FP32.

The state of a parameter is a dict, as in torch, whose large tensors are stored as codes: 8-bit integers with an FP32
scale per block (`multi_tensor_encode`). A read decodes the codes into an FP32 tensor. Before the next backward or step
this tensor is encoded again, with all writes into it. Decoding and encoding again gives the same codes, so a read alone
loses nothing. A copy or a pickle of the dict is a plain dict of FP32 tensors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters.recycled_memory import Recycled, holders, lone_holders
from amp_patch.multi_tensor.checks import BLOCK
from amp_patch.support.blocks import without_grad
from amp_patch.support.distributed import local
from amp_patch.support.interrupts import whole

logger = logging.getLogger("amp_patch")

LEAST = 4096  # elements of the smallest tensor that is stored as codes
MOST_ROOM = 2**24  # elements of the largest buffer that is reused by the next step

# ----------------------------------------------------------------------------------------------------------------------
# Which tensors are stored as codes

# State tensors that are never negative, by their names in torch's and amp_patch's optimizers: uint8 codes.
UNSIGNED = {"exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum", "variance", "step_size"}

# State tensors that stay FP32, with the reason. The key: the class, or "" for every class; the name of the state; the
# name of another state that must be present too, or "".
IN_FP32: dict[tuple[str, str, str], str] = {
    ("", "max_exp_avg_sq", ""): "a running maximum never takes back what was once rounded up",
    ("ASGD", "ax", ""): "it is the average of the weights, which the script takes for its result",
    ("RMSprop", "square_avg", "grad_avg"): "centered=True takes the root of square_avg - grad_avg ** 2, which "
    "rounding would make negative",
    ("RMSprop", "grad_avg", ""): "as square_avg beside it",
}


def codes_of(kind: str, name: str, beside: Iterable[str]) -> torch.dtype | None:
    """Return the dtype of a state tensor's codes; None if it stays FP32.

    Args:
        kind: the name of the optimizer's class.
        name: the name of the state tensor.
        beside: the names of all state tensors of the parameter.
    """
    for (of_class, state, other), _ in IN_FP32.items():
        if state == name and of_class in ("", kind) and (not other or other in beside):
            return None
    return torch.uint8 if name in UNSIGNED else torch.int8


def is_large(value: Any, param: Tensor) -> bool:
    """Return whether `value`, a state entry of `param`, can be stored as codes and has `LEAST` elements or more."""
    return (
        type(value) is Tensor
        and value.dtype is torch.float32
        and value.numel() >= LEAST
        and value.shape == param.shape
        and value.layout is torch.strided
        and not value.requires_grad
        and torch.ops.aten.is_non_overlapping_and_dense(value)
    )


# ----------------------------------------------------------------------------------------------------------------------
# One tensor, and one parameter's state


class Coded:
    """One state tensor, stored as codes.

    Attributes:
        codes: int8 or uint8, with the tensor's shape and strides.
        scales: FP32, shape [ceil(elements / 256)].
        value: the FP32 tensor that a read or a step works on, until the next `encode`; else None. While it is set, the
            codes are stale.
        is_lent: whether `value` was made for a step alone, so that `encode` may free it without looking for references
            in user code.
    """

    __slots__ = ("codes", "is_lent", "scales", "value")

    def __init__(self, like: Tensor, dtype: torch.dtype, value: Tensor | None = None) -> None:
        self.value, self.is_lent = value, True
        self._make_codes(like, dtype)

    def _make_codes(self, like: Tensor, dtype: torch.dtype) -> None:
        self.codes = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        self.scales = torch.zeros(-(-like.numel() // BLOCK), dtype=torch.float32, device=like.device)

    def decoded(self) -> Tensor:
        """Return the value in FP32, in newly allocated memory."""
        if self.value is not None:
            return self.value.detach().clone()
        made = torch.empty_like(self.codes, dtype=torch.float32)
        multi_tensor.multi_tensor_decode([self.codes], [made], [self.scales])
        return made

    def to_encode(self) -> Tensor:
        """Return `value` with the strides of the codes. If its device or shape has changed, allocate new codes."""
        value = self.value
        assert value is not None
        if value.device != self.codes.device or value.shape != self.codes.shape:
            self._make_codes(value, self.codes.dtype)
        if value.stride() == self.codes.stride():
            return value
        return torch.empty_like(self.codes, dtype=torch.float32).copy_(value)

    def is_held(self) -> bool:
        """Return whether user code references `value` or its storage, so that it must not be freed."""
        if self.is_lent or self.value is None:
            return False
        storage = self.value.untyped_storage()
        return sys.getrefcount(self.value) > 2 or holders(storage) != lone_holders()

    def follow(self) -> None:
        """Decode the codes into `value`, if it is set: user code that references it reads the new numbers."""
        if self.value is not None:
            value, self.value = self.value, None
            value.copy_(self.decoded())
            self.value = value


class CodedState(dict[str, Any]):
    """The state dict of one parameter, whose large tensors are stored as `Coded`: a read decodes them to FP32.

    Attributes:
        coder: the encoder and decoder of the optimizer's state.
        stays_fp32: whether no tensor of this state becomes codes.
    """

    __slots__ = ("coder", "stays_fp32")

    def __init__(self, coder: Coder, state: dict[str, Any]) -> None:
        super().__init__(state)
        self.coder, self.stays_fp32 = coder, False

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return self.coder.open(value) if type(value) is Coded else value

    def __setitem__(self, name: str, value: Any) -> None:
        kept = super().get(name)
        if type(kept) is Coded and value is not None and value is kept.value:
            return  # assigned by `state["exp_avg"] *= 0.5`, which has multiplied `kept.value` in place
        if isinstance(value, Tensor) and value.numel() >= LEAST:
            self.coder.is_up_to_date = False
        super().__setitem__(name, value)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # Without this method, `dict(state)` would copy the `Coded` objects

    # These call `__getitem__` and `__setitem__`, which the methods of dict do not.
    get: Any = MutableMapping.get
    setdefault: Any = MutableMapping.setdefault
    update: Any = MutableMapping.update
    items: Any = MutableMapping.items
    values: Any = MutableMapping.values
    __eq__: Any = MutableMapping.__eq__

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(name, *default)
        if type(value) is not Coded:
            return value
        return value.decoded() if value.value is None else value.value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(list(self)))
        return name, self.pop(name)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # dict's does not call `__setitem__`
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def kept(self, name: str) -> Any:
        """Return the stored entry without decoding it: a `Coded`, or the value itself."""
        return super().__getitem__(name)

    def in_fp32(self) -> dict[str, Any]:
        """Return the state as a plain dict, where each `Coded` is decoded into newly allocated memory."""
        return {name: value.decoded() if type(value) is Coded else value for name, value in dict.items(self)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.in_fp32(),)

    def __repr__(self) -> str:
        return repr(self.in_fp32())


def stored(state: Any) -> Any:
    """Return the state of a parameter with codes and scales instead of decoded tensors, for counting its bytes."""
    if not isinstance(state, CodedState):
        return state
    return {name: [v.codes, v.scales] if type(v) is Coded else v for name, v in dict.items(state)}


# ----------------------------------------------------------------------------------------------------------------------
# All states of one optimizer


class Coder:
    """The encoder and decoder of one optimizer's state. The caller calls `close` before each backward and each step.

    Args:
        kind: the name of the optimizer's class.
        state_of: takes this coder, a parameter and its state dict, and returns the CodedState.
        in_fp32: names of further state tensors that stay FP32, next to `IN_FP32`.

    Attributes:
        is_up_to_date: whether `close` has run, and no tensor of `LEAST` elements or more was put into a state since.
        has_stepped: whether a step with at least one gradient was begun.
        stepper: the id of the thread that steps plain tensors instead of DTensors (stand_ins.py); None outside of such
            a step.
    """

    def __init__(
        self,
        kind: str,
        state_of: Callable[[Coder, Tensor, dict[str, Any]], CodedState],
        in_fp32: Collection[str] = (),
    ) -> None:
        self.kind, self.state_of, self._in_fp32 = kind, state_of, in_fp32
        self.is_up_to_date = self.has_stepped = self._has_reported = False
        self.stepper: int | None = None
        self._opened: list[Coded] = []
        self._lock = RLock()
        self._room = Recycled()  # the FP32 memory of the states that one step decodes
        self._most = 0  # the number of elements in `_room`

    @property
    def is_stepping(self) -> bool:
        """Tell whether this thread steps plain tensors instead of DTensors. If so, ShardState returns plain tensors."""
        return self.stepper == get_ident()

    @whole
    def open(self, coded: Coded) -> Tensor:
        """Return the FP32 value of a state tensor. Until the next `encode`, the codes are stale."""
        with self._lock:
            value = coded.value
            if value is None:
                with torch.inference_mode(False):
                    value = coded.decoded()
                self._hand_out(coded, value, is_lent=False)
            return value

    @without_grad
    def open_all(self, states: Iterable[Any]) -> None:
        """Decode, for a step, every `Coded` in `states` whose `value` is not set by an earlier read."""
        with self._lock:
            kept = (value for state in states if isinstance(state, CodedState) for value in dict.values(state))
            closed = [value for value in kept if type(value) is Coded and value.value is None]
            by_device: dict[torch.device, list[Coded]] = {}
            for coded in closed:
                by_device.setdefault(coded.codes.device, []).append(coded)
            for group in by_device.values():
                values = self._room_for([coded.codes for coded in group])
                codes, scales = [coded.codes for coded in group], [coded.scales for coded in group]
                multi_tensor.multi_tensor_decode(codes, values, scales)
                for coded, value in zip(group, values, strict=True):
                    self._hand_out(coded, value, is_lent=True)

    def _hand_out(self, coded: Coded, value: Tensor, is_lent: bool) -> None:
        """List `coded` in `_opened`, and set its value."""
        self._opened.append(coded)
        coded.is_lent = is_lent
        coded.value = value

    def _room_for(self, codes: list[Tensor]) -> list[Tensor]:
        """Return uninitialized FP32 tensors with the shapes and strides of `codes`; on a CPU in the reused buffer."""
        if codes[0].device.type != "cpu":
            return [torch.empty_like(t, dtype=torch.float32) for t in codes]
        counts = [-(-t.numel() // 16) * 16 for t in codes]
        if sum(counts) <= MOST_ROOM:
            self._most = max(self._most, sum(counts))
            memory = self._room.flat(self._most)
        else:
            memory = torch.empty(sum(counts), dtype=torch.float32, device="cpu")
        parts = memory[: sum(counts)].split(counts)
        return [part.as_strided(t.shape, t.stride()) for t, part in zip(codes, parts, strict=True)]

    def close(self, optimizer: Any) -> None:
        """Encode all values that user code has read from, or put into, the states of `optimizer`; no sync.

        A tensor that user code has put into a state becomes the `value` of a `Coded`. While user code references it,
        each step writes the new numbers into it.
        """
        states = optimizer.state
        if not self.is_up_to_date or dict in map(type, states.values()):
            with self._lock:
                self.adopt(optimizer, list(states), is_lent=False)
                self._forget_replaced(states.values())
                self.encode()
            self.is_up_to_date = True
        elif self._opened:
            self.encode()

    @without_grad
    def take(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """After a step on `params`, encode the tensors that it has added to states, and each set `Coded.value`."""
        with self._lock:
            self.adopt(optimizer, params, is_lent=True)
            self.encode()

    @without_grad
    def adopt(self, optimizer: Any, params: Iterable[Tensor], *, is_lent: bool) -> None:
        """Replace the large FP32 tensors in the states of `params` by `Coded` objects; the next `encode` encodes them.

        Args:
            is_lent: becomes `Coded.is_lent` of each new `Coded`.
        """
        states = optimizer.state
        with self._lock:
            for param in params:
                state = states.get(param)
                if isinstance(state, CodedState) and state.coder is not self:
                    state = state.in_fp32()  # assigned from another optimizer's state
                if type(state) is dict and state:
                    state = states[param] = self.state_of(self, param, state)
                if isinstance(state, CodedState):
                    self._adopt(local(param), state, is_lent)

    def _adopt(self, param: Tensor, state: CodedState, is_lent: bool) -> None:
        for name in list(state):
            value = state.kept(name)
            if not is_large(value, param) or (dtype := self._codes_of(state, name)) is None:
                continue
            coded = Coded(value, dtype, value)
            coded.is_lent = is_lent
            self._opened.append(coded)
            dict.__setitem__(state, name, coded)

    def _forget_replaced(self, states: Iterable[Any]) -> None:
        """Drop each `Coded` that is in no state any more: its reference would keep its value from being freed."""
        kept = {id(value) for state in states if isinstance(state, CodedState) for value in dict.values(state)}
        self._opened = [coded for coded in self._opened if id(coded) in kept]

    def _codes_of(self, state: CodedState, name: str) -> torch.dtype | None:
        return None if state.stays_fp32 or name in self._in_fp32 else codes_of(self.kind, name, [*state, name])

    def fresh(self, optimizer: Any, param: Tensor, name: str) -> None:
        """Add a state tensor `name` for `param`: codes that decode to 0, or an uninitialized FP32 tensor."""
        state = optimizer.state[param]
        if type(state) is dict:
            state = optimizer.state[param] = self.state_of(self, param, state)
        value: Any = torch.empty_like(param, requires_grad=False)
        if is_large(value, param) and (dtype := self._codes_of(state, name)) is not None:
            value = Coded(value, dtype)
        dict.__setitem__(state, name, value)

    @without_grad
    def encode(self) -> None:
        """Encode each `Coded.value` that is set, and free it, unless user code references it: then decode into it."""
        with self._lock:
            groups: dict[torch.device, list[Coded]] = {}
            for coded in self._opened:
                if coded.value is not None:
                    groups.setdefault(coded.value.device, []).append(coded)
            for group in groups.values():
                _encode(group)
            self._opened = [coded for group in groups.values() for coded in group if coded.value is not None]
            self.follow()

    @without_grad
    def follow(self) -> None:
        """Decode the codes, changed by a step, into each `Coded.value`, which user code references."""
        for coded in self._opened:
            coded.follow()

    def report(self, optimizer: Any) -> None:
        """After the first step, log a warning if no state is stored as codes."""
        if self._has_reported or not self.has_stepped:
            return
        self._has_reported = True
        states = [state for state in optimizer.state.values() if isinstance(state, CodedState)]
        kept = [value for state in states for value in dict.values(state)]
        if any(type(value) is Coded for value in kept):
            return
        largest = max([value.numel() for value in kept if isinstance(value, Tensor)], default=0)
        logger.warning(
            "optimizer_state='8bit' keeps no state of this %s in 8 bits, and saves no memory: its largest state tensor "
            "has %d elements. Quantized are FP32 tensors of the parameter's shape with at least %d elements, but for "
            "those that fp32_state or docs/ladder.md names",
            self.kind,
            largest,
            LEAST,
        )

    def make_whole(self, optimizer: Any) -> None:
        """Replace the states of `optimizer` by plain dicts of FP32 tensors, in place."""
        for param, state in list(optimizer.state.items()):
            if isinstance(state, CodedState):
                optimizer.state[param] = state.in_fp32()


def _encode(group: list[Coded]) -> None:
    values = [coded.to_encode() for coded in group]
    multi_tensor.multi_tensor_encode(values, [coded.codes for coded in group], [coded.scales for coded in group])
    del values
    for coded in group:
        if not coded.is_held():
            coded.value = None
