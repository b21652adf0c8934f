"""Weights of recurrent networks in one block of memory.

If the weights are elsewhere, cuDNN copies them into a block at each call, and warns.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Function -> (its number in cuDNN's enum cudnnRNNMode_t, its gates).
_KINDS = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 4), "gru": (3, 3)}


def flatten_module(module: nn.RNNBase) -> None:
    """Call `module.flatten_parameters()`, and do the same for BF16 weights: torch's method ignores them."""
    module.flatten_parameters()
    weights = [weight for weight in module._flat_weights if isinstance(weight, Tensor)]
    if len(weights) == len(module._flat_weights):
        flatten(module.mode.lower(), weights, module.bias, module.num_layers, bool(module.bidirectional))


def flatten_casts(function: str, args: tuple[Any, ...], cast: tuple[Any, ...]) -> None:
    """Move the casts of an RNN's weights into one block of memory. If a weight was not cast, nothing changes.

    Args:
        function: as in `flatten`.
        args: the arguments of a call.
        cast: `args` after the casts. A tensor that was not cast is the same object as in `args`.
    """
    if len(args) < 9:
        return  # arguments by keyword: the weights stay where they are
    index = 3 if isinstance(args[3], (list, tuple)) else 2  # 3 in a call with a packed sequence
    if args[index] and all(map(operator.is_not, args[index], cast[index])):
        has_biases, num_layers, _, _, bidirectional = args[index + 1 : index + 6]
        flatten(function, cast[index], has_biases, num_layers, bidirectional)


def flatten(function: str, weights: Sequence[Tensor], has_biases: bool, num_layers: int, bidirectional: bool) -> None:
    """Move the data of `weights` into one block of memory, in cuDNN's order.

    The tensors stay the same objects, with the same values, gradients and version counters. If cuDNN does not serve
    their type or device, if they are in one block, or if two of them share memory, nothing changes.

    Args:
        function: "lstm", "gru", "rnn_relu" or "rnn_tanh".
        weights: in the order of `module._flat_weights`.
    """
    first = weights[0]
    if not torch.cudnn_is_acceptable(first) or len({weight.dtype for weight in weights}) > 1:
        return
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        return
    if len({weight.data_ptr() for weight in weights}) < len(weights):
        return
    mode, gates = _KINDS[function]
    hidden = first.shape[0] // gates
    projected = weights[1].shape[1] if weights[1].shape[1] != hidden else 0
    of_a_layer = (4 if has_biases else 2) + (1 if projected else 0)
    with torch.no_grad(), torch.cuda.device_of(first):
        # torch's function replaces the storage of the tensors that it gets. For a tensor that autograd has saved, this
        # would be an edit in place, and backward would fail. So the function gets aliases.
        moved = [weight.data for weight in weights]
        torch._cudnn_rnn_flatten_weight(
            moved, of_a_layer, first.shape[1], mode, hidden, projected, num_layers, False, bidirectional
        )
        for weight, data in zip(weights, moved, strict=True):
            weight.data = data
