"""Functions that make Apex's lists for one owner (torch, torch.Tensor ...) from `amp_patch.casts.oplists`."""

from __future__ import annotations

from amp_patch.casts.oplists import rules_by_name
from amp_patch.casts.rules import INSTEAD_OF_BANNED

# Apex's list -> the rules of oplists.py whose functions are on it.
KINDS: dict[str, tuple[str, ...]] = {
    "FP16_FUNCS": ("lower", "product", "einsum", "fused", "rnn"),
    "FP32_FUNCS": ("fp32", "loss", "norm", "direction", "inexact"),
    "CASTS": ("widest", "einsum_widest", "mixed_fp32"),
    "BANNED_FUNCS": ("banned",),
}


def names(address: str, kind: str) -> list[str]:
    """Return a new list of the names of one of `KINDS` at `address` ("torch.nn.functional")."""
    rules = rules_by_name("apex").items()
    return [name for (owner, name), rule in rules if owner == address and rule in KINDS[kind]]


def casts_of(address: str) -> tuple[list[str], ...]:
    """Return FP16_FUNCS, FP32_FUNCS and CASTS of `address`."""
    return tuple(names(address, kind) for kind in KINDS if kind != "BANNED_FUNCS")


def banned(address: str) -> list[tuple[str, str]]:
    """Return (banned name, advice what to use instead) for each banned function at `address`."""
    return [(name, INSTEAD_OF_BANNED) for name in names(address, "BANNED_FUNCS")]
