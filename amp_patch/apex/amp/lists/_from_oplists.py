"""Apex's lists for one owner of functions (torch, torch.Tensor ...), read off `amp_patch.casts.oplists`."""

from __future__ import annotations

from amp_patch.casts.oplists import rules_by_name
from amp_patch.casts.rules import INSTEAD_OF_BANNED

# Apex's list -> our rules whose functions are on it. BFLOAT16_FUNCS is ROCm's.
KINDS: dict[str, tuple[str, ...]] = {
    "FP16_FUNCS": ("lower", "product", "einsum", "fused", "rnn"),
    "BFLOAT16_FUNCS": ("lower", "product", "einsum", "fused", "rnn"),
    "FP32_FUNCS": ("fp32", "norm", "direction", "inexact"),
    "CASTS": ("widest", "einsum_widest", "mixed_fp32"),
    "BANNED_FUNCS": ("banned",),
}


def names(address: str, kind: str) -> list[str]:
    """The names of one of `KINDS` at `address` ("torch.nn.functional"), in a new list."""
    rules = rules_by_name("apex").items()
    return [name for (owner, name), rule in rules if owner == address and rule in KINDS[kind]]


def banned(address: str) -> list[tuple[str, str]]:
    """The banned names, each with what to do instead."""
    return [(name, INSTEAD_OF_BANNED) for name in names(address, "BANNED_FUNCS")]
