"""Shifted seeds: runs of one script with different seeds draw different random numbers."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_patch.support.patches import Patches
from amp_patch.support.random_states import restored_random_states

# Prime and large. With a stride of 1, seed 1 of a script that sets 42 would equal seed 0 of a script that sets 43.
_STRIDE = 1_000_003


@contextmanager
def seeded(seed: int, *, shift: bool = True) -> Iterator[None]:
    """Seed Python's, numpy's and torch's random numbers for the body, and restore their states at the end.

    Seed n seeds all three with 1,000,003 n. With `shift`, that number is also added to every integer that the body
    passes to `torch.manual_seed`, `torch.cuda.manual_seed` and `manual_seed_all`, `random.seed` or
    `numpy.random.seed`. A script's own seeds are therefore unchanged at seed 0, and differ for every other n.
    Generators that the script makes are not shifted, so that a data split that they draw stays the same.
    """
    offset = _STRIDE * seed
    numpy = importlib.import_module("numpy") if importlib.util.find_spec("numpy") is not None else None
    patches = Patches()
    with restored_random_states():
        try:
            random.seed(offset)
            torch.manual_seed(offset)
            if numpy is not None:
                numpy.random.seed(offset % 2**32)
            if offset and shift:
                _shift(patches, offset, numpy)
            yield
        finally:
            patches.remove()


def _shift(patches: Patches, offset: int, numpy: Any) -> None:
    def shifted(original: Callable[..., Any], limit: int) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            args = tuple((x + offset) % limit if isinstance(x, int) else x for x in args)
            kwargs = {
                k: (x + offset) % limit if k != "version" and isinstance(x, int) else x for k, x in kwargs.items()
            }
            return original(*args, **kwargs)

        return seed

    # torch.manual_seed calls torch.cuda's function, so CUDA's seed is shifted twice. This is harmless: all levels of a
    # seed get the same CUDA seed.
    torch_seed = shifted(torch.manual_seed, 2**64)
    patches.set(torch, "manual_seed", torch_seed)
    patches.set(torch.random, "manual_seed", torch_seed)
    for name in ("manual_seed", "manual_seed_all"):
        patches.set(torch.cuda, name, shifted(getattr(torch.cuda, name), 2**64))
    patches.set(random, "seed", shifted(random.seed, 2**64))
    if numpy is not None:
        patches.set(numpy.random, "seed", shifted(numpy.random.seed, 2**32))
