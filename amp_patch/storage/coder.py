"""Optimizer state as codes: encoded after a step, decoded for a step of the optimizer's own code; state of shards.

The state of a parameter that `fully_shard` has sharded has DTensors, whose local shards are codes or FP32. Its step
runs on plain tensors, the local shards, because strategies cannot step DTensors. An elementwise optimizer needs no
other elements, so the step uses the same kernels, and the same portions, as without sharding.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, MutableMapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.masters import has_gradient
from amp_patch.masters.recycled_memory import Recycled
from amp_patch.storage.coded_state import LEAST, Coded, codes_of, decode, encode, encoded, is_large
from amp_patch.support import tree
from amp_patch.support.blocks import block, without_grad
from amp_patch.support.distributed import is_dtensor, local
from amp_patch.support.generated_class import base_class
from amp_patch.support.interrupts import whole
from amp_patch.training.stash import known_stash
from amp_patch.ways.partial_step import PartialStep
from amp_patch.ways.per_parameter import is_registered

logger = logging.getLogger("amp_patch")

MOST_ROOM = 2**24  # elements of the largest buffer that is reused by the next step
_STATES = (dict, MutableMapping)
Entry = tuple[Any, str, Any]  # the state of a parameter, a name in it, the tensor of this name

# ----------------------------------------------------------------------------------------------------------------------
# Tensors in a state, and DTensors of them


def here(value: Any) -> Any:
    """Return the object that is the local shard of a DTensor; any other value as it is."""
    return value._local_tensor if isinstance(value, Tensor) and is_dtensor(value) else value  # type: ignore[attr-defined]  # noqa: SLF001


def with_shard(shard: Tensor, like: Any) -> Tensor:
    """Return a DTensor with this local shard and the placements of `like`; if that is no DTensor, `shard` itself."""
    if not is_dtensor(like):
        return shard
    # `from_local` would move shards that are offloaded to the CPU.
    made: Tensor = type(like)(shard, like._spec, requires_grad=False)  # noqa: SLF001
    return made


def in_fp32(value: Tensor) -> Tensor:
    """Return `value` decoded, if it is a Coded or a DTensor of one; else `value`."""
    shard = here(value)
    return with_shard(shard.decoded(), value) if isinstance(shard, Coded) else value


def stored(states: Iterable[Any]) -> list[Any]:
    """Return the tensors in `states`, for each that is stored as codes its codes and scales."""
    shards = map(here, tree.tensors(list(states)))
    return [t for each in shards for t in ([each.codes, each.scales] if isinstance(each, Coded) else [each])]


def coded_entries(states: Iterable[Any]) -> list[Entry]:
    """Return the entries of `states` that are stored as codes."""
    return [(s, name, v) for s in states if isinstance(s, _STATES) for name, v in s.items() if type(here(v)) is Coded]


def _by_device(entries: list[Entry]) -> Iterable[list[Entry]]:
    groups: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(here(entry[2]).codes.device, []).append(entry)
    return groups.values()


def are_alike(tensor: Any, param: Any) -> bool:
    """Tell whether the local shards of `tensor` and `param` match by index.

    Both are then DTensors of one shape, mesh and placements, none of which is partial.
    """
    return (
        isinstance(tensor, Tensor)
        and is_dtensor(tensor)
        and is_dtensor(param)
        and tensor.shape == param.shape
        and (tensor.placements, tensor.device_mesh) == (param.placements, param.device_mesh)  # type: ignore[attr-defined]
        and not any(placement.is_partial() for placement in param.placements)
    )


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
        params: during a step on plain tensors instead of DTensors, the tensor that is stepped -> its parameter.
    """

    def __init__(self, kind: str, in_fp32: Collection[str] = ()) -> None:
        self.kind, self._in_fp32 = kind, in_fp32
        self.has_stepped = self._has_reported = False
        self.is_pending = True
        self.seen: tuple[list[Any], list[type]] = [], []
        self.params: dict[Tensor, Tensor] = {}
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
                shard = here(value) if are_alike(value, param) else value
                if isinstance(shard, Coded) and shard.of_whole is not None:  # user code assigned a view of a state
                    shard = shard.decoded()
                if not is_large(shard, local(param)) or name in self._in_fp32:
                    continue
                named = stash.masters.param_of(self.params.get(param, param))
                dtype = codes_of(self.kind, name, state)
                if dtype is not None and not any(each is named for each in stash.fp32_state):
                    _replace(state, name, with_shard(encoded(shard, dtype), value), in_place=in_place)

    @block
    def in_fp32(self, optimizer: Any, params: list[Tensor]) -> Generator[None, None, None]:
        """In the `with` block, the states of `params` have no codes; at its end they are encoded."""
        get = getattr(optimizer.state, "get_by_master", optimizer.state.get)
        found = coded_entries(map(get, params))
        try:
            for entries in _by_device(found):
                self._open(entries)
            yield
        finally:
            _put_back(found)
            self.encode(optimizer, params, in_place=False)

    def _open(self, entries: list[Entry]) -> None:
        coded = [here(value) for *_, value in entries]
        values = decode(coded, self._room_for([each.codes for each in coded]))
        for (state, name, value), made in zip(entries, values, strict=True):
            state[name] = with_shard(made, value)

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
        elif is_dtensor(old):
            old._local_tensor = here(new)  # noqa: SLF001
        else:
            torch.utils.swap_tensors(old, new)
    except RuntimeError:  # a view of it, or autograd, references it
        state[name] = new


@whole
def _put_back(entries: list[Entry]) -> None:
    """Put each tensor of `entries` into its state again, with the value that is there now."""
    for group in _by_device(entries):
        found = []
        for state, name, value in group:
            now, coded = here(state.get(name)), here(value)
            if type(now) is Tensor and now.shape == coded.codes.shape and now.device == coded.codes.device:
                found.append((coded, now))
                state[name] = value
        if found:
            encode([coded for coded, _ in found], [now for _, now in found])


# ----------------------------------------------------------------------------------------------------------------------
# Steps on local shards

# Optimizers of torch.optim that are not elementwise, with the reason: stepping a shard of a parameter alone would give
# other numbers than stepping the parameter.
OVER_WHOLE_TENSORS = {
    "Adafactor": "it takes means over rows and columns of the gradient, and a norm of the whole",
    "Muon": "it multiplies the whole momentum by itself",
}


def check_shards(wanted: str, optimizer: Any, way_out: str) -> None:
    """Raise ValueError if this (innermost) optimizer cannot step a shard of a parameter alone."""
    base = base_class(optimizer)
    against = OVER_WHOLE_TENSORS.get(base.__name__)
    if is_registered(base):
        against = "it is a registered class, of which nothing tells what its step does to a part of a parameter"
    if against is not None:
        raise ValueError(
            f"{wanted} is not for this {base.__name__}, whose parameters fully_shard has sharded, so that each process "
            f"steps a part of each: {against}; {way_out}, or use an optimizer that steps each element by itself"
        )


class Parts:
    """A step of `optimizer` on plain parameters that share the memory of the local shards, with those of its state.

    It runs on a second optimizer object. The user's optimizer never holds the plain tensors, even after an exception.

    Attributes:
        partial: the step.
        params: the tensor that is stepped -> the parameter.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        chunks = [(group, group["params"]) for group in optimizer.param_groups]
        stepped_for = {param: _part_of(param) for _, params in chunks for param in params}
        self.params = {stepped: param for param, stepped in stepped_for.items()}
        self.partial = PartialStep(optimizer, chunks, stepped_for.__getitem__)
        self._states = self.partial.shell.state = defaultdict[Tensor, Any](dict)
        for stepped, param in self.params.items():
            if param in optimizer.state:
                state = optimizer.state[param].items()
                self._states[stepped] = {name: here(v) if are_alike(v, param) else v for name, v in state}

    @whole
    def give_back(self) -> None:
        """Give the optimizer the state and the attributes that the step has made."""
        self.partial.give_back()
        for stepped, state in self._states.items():
            own = self._optimizer.state[param := self.params[stepped]]
            for name in own.keys() - state.keys():
                del own[name]
            for name, value in state.items():
                if here(own.get(name)) is not value:
                    is_part = isinstance(value, Tensor) and value.shape == stepped.shape
                    own[name] = with_shard(value, param) if is_part else value


def of_parts(optimizer: Any) -> Parts | None:
    """Return a step on plain parameters that share the memory of the local shards.

    Return None if no parameter with a gradient is sharded, or if a gradient has other placements than its parameter, as
    tensor parallelism may leave it. All processes get a step, or all get None.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = [param for param in params if is_dtensor(param) and has_gradient(param)]
    if not sharded or not all(are_alike(param.grad, param) for param in sharded):
        return None
    return Parts(optimizer)


def _part_of(param: Tensor) -> Tensor:
    """Return a plain parameter that shares the memory of the local shard; if `param` is not sharded, `param` itself."""
    if not is_dtensor(param):
        return param
    part = nn.Parameter(local(param).detach(), requires_grad=False)
    part.grad = None if param.grad is None else local(param.grad)
    return part
