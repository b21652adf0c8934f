"""Checkpoints of optimizers with 8-bit codes: a state dict with codes and scales instead of FP32 tensors, and back.

`optimizer.state_dict()` has FP32 tensors, which every training can load. If a tensor was stored as codes, its numbers
are numbers of the codes, and encoding it again loses no bit. `compress_state_dict` checks this for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_patch.storage.coded_state import Coded, encoded, is_large
from amp_patch.support.distributed import stateful
from amp_patch.support.words import of_class
from amp_patch.training.stash import Stash

# The name of a format in a file -> the dtype of its codes. Another codec needs another name.
FORMATS = {"e5m3 in blocks of 256": torch.uint8, "e4m3fn in blocks of 256": torch.int8}
_KEYS = {"format", "codes", "scales"}


def compress_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with 8-bit codes, for a smaller checkpoint::

        torch.save(amp.compress_state_dict(optimizer.state_dict()), path)
        optimizer.load_state_dict(torch.load(path))

    Under `optimizer_state="8bit"` the state is then about a quarter of the size. An FP32 tensor is replaced by a dict
    of codes and scales only if the dict decodes to the same bits. So no number changes. All other tensors are left as
    they are: the state of a training with FP32 state, `fp32_state`, and the DTensors of `fully_shard`. Syncs with the
    device.

    Every torch.optim.Optimizer that went through `initialize`, with any state, loads the result by its
    `load_state_dict`. For other readers, `decompress_state_dict` gives the FP32 tensors.

    Args:
        state_dict: what `optimizer.state_dict()` returns. It is not changed.

    Raises:
        TypeError: `state_dict` is something else.
    """
    return _with_values(state_dict, _in_codes, "compress_state_dict")


def decompress_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Undo `compress_state_dict`: return its result with the FP32 tensors again, to the bit.

    Other state dicts are returned unchanged.

    Args:
        state_dict: what `compress_state_dict` or `optimizer.state_dict()` returns. It is not changed.

    Raises:
        TypeError: `state_dict` is something else.
        ValueError: the codes are in a format of another version of amp_patch.
    """
    return _with_values(state_dict, _in_fp32, "decompress_state_dict")


def enter(optimizer: Any, stash: Stash) -> None:
    """Let the `load_state_dict` of `optimizer` accept a result of `compress_state_dict`; decode one loaded before."""
    if isinstance(optimizer, torch.optim.Optimizer):
        _decode(optimizer)
        # prepend=True: it runs first, so that user code's hooks receive FP32 tensors.
        stash.neighbours.undo.append(optimizer.register_load_state_dict_pre_hook(_before_load, prepend=True).remove)


def _before_load(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    if stateful(optimizer) is not optimizer:  # ZeRO gives its inner optimizer the values before torch's hooks
        _decode(optimizer)
    return decompress_state_dict(state_dict)


def _decode(optimizer: Any) -> None:
    states = stateful(optimizer).state
    states.update(_changed(states, _in_fp32))


def _with_values(state_dict: Any, made: Callable[[Any], Any], caller: str) -> dict[str, Any]:
    if not isinstance(state_dict, dict) or not isinstance(states := state_dict.get("state"), dict):
        keys = f" with the keys {list(state_dict)[:5]}" if isinstance(state_dict, dict) else ""
        raise TypeError(
            f"{caller}: state_dict is {of_class(state_dict)}{keys}; wanted what optimizer.state_dict() returns, "
            "with the keys 'state' and 'param_groups'"
        )
    changed = _changed(states, made)
    return {**state_dict, "state": {**states, **changed}} if changed else state_dict


def _changed(states: dict[Any, Any], made: Callable[[Any], Any]) -> dict[Any, Any]:
    """Return {key: a copy of the state, its entries replaced by `made(entry)`} for each state that `made` changes."""
    found: dict[Any, Any] = {}
    for key, state in states.items():
        if isinstance(state, dict):
            values = {name: made(value) for name, value in state.items()}
            if any(values[name] is not state[name] for name in values):
                found[key] = values
    return found


def _in_codes(value: Any) -> Any:
    """Return a dict of codes and scales, if `value` is a large FP32 tensor to whose bits it decodes; else `value`."""
    for name, dtype in FORMATS.items() if is_large(value, value) else ():
        coded = encoded(value, dtype)
        if torch.equal(coded.decoded().view(torch.int32), value.view(torch.int32)):
            return {"format": name, "codes": coded.codes, "scales": coded.scales}
    return value


def _in_fp32(value: Any) -> Any:
    """Return the FP32 tensor if `value` is a dict of codes and scales; else `value`."""
    if not isinstance(value, dict) or set(value) != _KEYS:
        return value
    codes = value["codes"]
    if codes.is_floating_point():
        # torch has cast them, because they were loaded into an optimizer in no training, and has overwritten the name
        # of the format. The largest number of a block has the code 240 if it is uint8, and at most 120 if it is int8.
        codes = codes.to(torch.uint8 if (codes > 127).any() else torch.int8)
    elif value["format"] not in FORMATS:
        raise ValueError(
            f"load_state_dict: state in the format {value['format']!r}; wanted {' or '.join(map(repr, FORMATS))}; "
            "decompress it by amp.decompress_state_dict() of the version of amp_patch that has saved it"
        )
    return Coded(codes, value["scales"].float()).decoded()
