"""`make test-arm` without qemu: how its checks read the machine code and what `info` says."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import arm

LISTING = """
0000000000001000 <amp::step(long)>:
    1000:\tfadd\tv0.4s, v1.4s, v2.4s
    1004:\tldr\tq3, [x1, #16]
    1008:\tfadd\ts0, s1, s2
    100c:\tret

0000000000001010 <amp::other()>:
    1010:\tmov\tx0, x1
"""


def test_instructions_on_whole_registers_are_counted_by_function():
    assert arm.vectors(LISTING) == {"amp::step(long)": (2, 4), "amp::other()": (0, 1)}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (r"step\(", []),
        ("other", ["other: 0 of 1 instructions are NEON's; wanted at least 50%"]),
        ("gone", ["gone: 0 of 0 instructions are NEON's; wanted at least 50%"]),
    ],
)
def test_loops_without_vectors_and_loops_that_are_gone_are_told(kind, told, monkeypatch):
    monkeypatch.setattr(arm, "HOT", {kind: 0.5})
    assert arm.not_vectors(LISTING) == told


@pytest.mark.parametrize("lying", [False, True])
def test_arithmetic_that_info_names_wrongly_is_told(lying, monkeypatch):
    def emulated(*arguments, processor, STDOUT):
        fp16, bf16 = arm.ARITHMETIC[processor]
        words = {
            name: f"this CPU has {'no ' * (not has)}{name} arithmetic" for name, has in (("FP16", fp16), ("BF16", bf16))
        }
        if lying and processor == "neoverse-n1":
            words["BF16"] = "this CPU has BF16 arithmetic"
        return SimpleNamespace(stdout="\n".join(words.values()))

    monkeypatch.setattr(arm, "emulated", emulated)
    told = list(arm.wrong_arithmetic())
    assert len(told) == lying and all("wanted 'this CPU has no BF16 arithmetic'" in line for line in told)
