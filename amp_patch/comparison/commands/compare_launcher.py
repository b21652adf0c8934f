"""Refusal of `compare` under torchrun, mpirun or srun, because each rank would make the whole comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Environment variables of launchers: (rank, number of ranks).
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_TORCHRUN = "TORCHELASTIC_RUN_ID"


def refuse_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Raise in a process that is one of several ranks, or that torchrun has started.

    Raises:
        ValueError: this is such a process; the message names the environment variables.
    """
    for rank, size in _RANKS:
        told = [f"{name}={environment[name]}" for name in (rank, size) if environment.get(name)]
        if _number(environment.get(size)) > 1 or _number(environment.get(rank)) > 0:
            _refuse(f"this process is one of several ranks ({', '.join(told)})", "each would compare by itself")
    if environment.get(_TORCHRUN):
        words = f"torchrun has started this process ({_TORCHRUN}={environment[_TORCHRUN]})"
        _refuse(words, "its rendezvous serves one training, and compare makes many")


def _refuse(what: str, why: str) -> None:
    raise ValueError(
        f"compare: {what}; {why}. Start compare in one process, without a launcher. To train several ranks at a level: "
        "AMP_PATCH_OPT_LEVEL=O2 torchrun --nproc-per-node 2 -m amp_patch run train.py"
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
