"""Optimizer state as codes: encoded after a step, decoded for a step of the optimizer's own code."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, MutableMapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters.recycled_memory import Recycled
from amp_patch.storage.coded_state import LEAST, Coded, codes_of, decode, encode, encoded, is_large
from amp_patch.support import tree
from amp_patch.support.blocks import block, without_grad
from amp_patch.support.interrupts import whole
from amp_patch.training.stash import known_stash

logger = logging.getLogger("amp_patch")

MOST_ROOM = 2**24  # elements of the largest buffer that is reused by the next step
_STATES = (dict, MutableMapping)
Entry = tuple[Any, str, Any]  # the state of a parameter, a name in it, the tensor of this name

# ----------------------------------------------------------------------------------------------------------------------
# Tensors in a state


def in_fp32(value: Tensor) -> Tensor:
    """Return `value` decoded, if it is a Coded; else `value`."""
    return value.decoded() if isinstance(value, Coded) else value


def stored(states: Iterable[Any]) -> list[Any]:
    """Return the tensors in `states`, for each that is stored as codes its codes and scales."""
    found = tree.tensors(list(states))
    return [t for each in found for t in ([each.codes, each.scales] if isinstance(each, Coded) else [each])]


def coded_entries(states: Iterable[Any]) -> list[Entry]:
    """Return the entries of `states` that are stored as codes."""
    return [(s, name, v) for s in states if isinstance(s, _STATES) for name, v in s.items() if type(v) is Coded]


def _by_device(entries: list[Entry]) -> Iterable[list[Entry]]:
    groups: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry[2].codes.device, []).append(entry)
    return groups.values()


# ----------------------------------------------------------------------------------------------------------------------
# The state of one optimizer


class Coder:
    """The encoder and decoder of one optimizer's state.

    Args:
        kind: the name of the optimizer's class.
        in_fp32: names of further state tensors that stay FP32, next to `IN_FP32`.

    Attributes:
        seen: the values in the states at the last `encode_changed`, and their types.
        is_pending: whether the state may be from before `initialize` or from a checkpoint, in FP32.
        has_stepped: whether a step with at least one gradient was begun.
    """

    def __init__(self, kind: str, in_fp32: Collection[str] = ()) -> None:
        self.kind, self._in_fp32 = kind, in_fp32
        self.has_stepped = self._has_reported = False
        self.is_pending = True
        self.seen: tuple[list[Any], list[type]] = [], []
        self._room = Recycled()  # the FP32 memory of the states that one step decodes
        self._most = 0  # the number of elements in `_room`

    def encode_changed(self, optimizer: Any, params: list[Tensor]) -> None:
        """Encode what was put into the states of `params` since the last call, with `in_place`."""
        get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
        states = [state for state in map(get, params) if isinstance(state, _STATES)]
        values = list(chain.from_iterable(map(methodcaller("values"), states)))
        kinds = list(map(type, values))  # the kind of a tensor changes if user code assigns its `data`
        if kinds != self.seen[1] or not all(map(is_, values, self.seen[0])):
            self.encode(optimizer, params, in_place=True)
            self.seen = values, kinds

    @without_grad
    def encode(self, optimizer: Any, params: Iterable[Any], *, in_place: bool) -> None:
        """Store the large FP32 tensors in the states of `params` as codes.

        Args:
            in_place: whether the tensors themselves become codes, also for user code that holds them.
        """
        stash = known_stash(optimizer)
        get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
        for param in params:
            state = get(param)
            for name, value in state.items() if isinstance(state, _STATES) else ():
                kind = type(value)
                if value.numel() < LEAST if kind is Tensor else kind is Coded and value.of_whole is None:
                    continue
                plain = value.decoded() if isinstance(value, Coded) else value  # user code assigned a view of a state
                if not is_large(plain, param) or name in self._in_fp32:
                    continue
                named = stash.masters.param_of(param)
                dtype = codes_of(self.kind, name, state)
                if dtype is not None and not any(each is named for each in stash.fp32_state):
                    _replace(state, name, encoded(plain, dtype), in_place=in_place)

    @block
    def in_fp32(self, optimizer: Any, params: list[Tensor]) -> Generator[None, None, None]:
        """In the `with` block, the states of `params` have no codes; at its end they are encoded."""
        get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
        found = coded_entries(map(get, params))
        try:
            for entries in _by_device(found):
                coded = [value for *_, value in entries]
                values = decode(coded, self._room_for([each.codes for each in coded]))
                for (state, name, _), made in zip(entries, values, strict=True):
                    state[name] = made
            yield
        finally:
            _put_back(found)
            self.encode(optimizer, params, in_place=False)

    def _room_for(self, codes: list[Tensor]) -> list[Tensor]:
        """Return uninitialized FP32 tensors with the shapes and strides of `codes`; on a CPU in the reused buffer."""
        counts = [-(-t.numel() // 16) * 16 for t in codes]
        size = sum(counts)
        if codes[0].device.type == "cpu" and size <= MOST_ROOM:
            self._most = max(self._most, size)
            memory = self._room.flat(self._most)[:size]
        else:
            memory = torch.empty(size, dtype=torch.float32, device=codes[0].device)
        return [part.as_strided(t.shape, t.stride()) for t, part in zip(codes, memory.split(counts), strict=True)]

    def report(self, optimizer: Any) -> None:
        """After the first step, log a warning if no state is stored as codes."""
        if self._has_reported or not self.has_stepped:
            return
        self._has_reported = True
        tensors = stored(optimizer.state.values())
        if not coded_entries(optimizer.state.values()):
            logger.warning(
                "optimizer_state='8bit' keeps no state of this %s in 8 bits, and saves no memory: its largest state "
                "tensor has %d elements. Quantized are FP32 tensors of the parameter's shape with at least %d "
                "elements, but for those that fp32_state or docs/ladder.md names",
                self.kind,
                max([tensor.numel() for tensor in tensors], default=0),
                LEAST,
            )


def _replace(state: Any, name: str, new: Tensor, *, in_place: bool) -> None:
    old = state[name]
    try:
        if not in_place:
            state[name] = new
        else:
            torch.utils.swap_tensors(old, new)
    except RuntimeError:  # a view of it, or autograd, references it
        state[name] = new


@whole
def _put_back(entries: list[Entry]) -> None:
    """Put each tensor of `entries` into its state again, with the value that is there now."""
    for group in _by_device(entries):
        found = []
        for state, name, coded in group:
            now = state.get(name)
            if type(now) is Tensor and now.shape == coded.codes.shape and now.device == coded.codes.device:
                found.append((coded, now))
                state[name] = coded
        if found:
            encode([coded for coded, _ in found], [now for _, now in found])
