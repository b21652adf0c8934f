"""Comparisons of tensors to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(actual: Any, expected: Any, name: str = "") -> None:
    """Assert equal types and bits, signs of zeros included. Any two NaNs are equal."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        assert actual.dtype is expected.dtype, (name, actual.dtype, expected.dtype)
        if not torch.equal(_bits(actual), _bits(expected)):
            same = (_bits(actual) == _bits(expected)) | (actual.isnan() & expected.isnan())
            assert same.all(), (name, actual, expected)
    else:
        assert type(actual) is type(expected) and actual == expected, (name, actual, expected)


def check_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, value in actual.items():
        check(value, expected[name], name)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def exact(actual: object, expected: object) -> None:
    """The same numbers and types; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
