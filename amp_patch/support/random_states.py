"""Reading and restoring the states of the global random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_states() -> list[Any]:
    """Return the states of the generators of Python, torch, NumPy (None: not imported) and CUDA (None: not used)."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None
    if numpy is not None:
        kind, keys, *more = numpy.random.get_state()
        of_numpy = (kind, keys.tolist(), *more)  # a list: `==` of arrays gives an array
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return [random.getstate(), torch.get_rng_state(), of_numpy, on_cuda]


def restore_random_states(found: list[Any]) -> None:
    """Restore the states `found`, a result of `random_states`."""
    of_python, of_torch, of_numpy, on_cuda = found
    random.setstate(of_python)
    torch.set_rng_state(of_torch)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    if on_cuda is not None:
        torch.cuda.set_rng_state_all(on_cuda)


@contextmanager
def restored_random_states(inside: list[Any] | None = None) -> Iterator[list[Any]]:
    """Yield the states of the global random generators, and restore these states at the end of the block.

    Args:
        inside: the states at the beginning of the block, a result of `random_states`; None: the present ones.
    """
    found = random_states()
    try:
        if inside is not None:
            restore_random_states(inside)
        yield found
    finally:
        restore_random_states(found)
