"""How many loads a kernel has in flight: what `nvdisasm -hex -c` prints of a cubin, read from standard input.

A memory-bound kernel is as fast as the loads that it issues before it waits for the first. Each load names one of six
barriers and each instruction those that it waits for (in bits 110 to 112 and 116 to 121 of its 128; from Volta on), so
the count is what the GPU does, whatever the compiler put between. For each kernel: the fewest 16-byte loads, over its
loops, that are in flight together. Fails where one of MAIN has fewer than it wants, and where the cubin has kernels of
a source but not all that the source should have.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Four of 16 bytes by each of the 1,024 threads of a multiprocessor are 64 KiB, about three times what covers the
# latency of an H100's memory at its full rate.
MAIN = {
    **dict.fromkeys(("Scale", "Copy", "CheckFinite", "Norm", "CheckedNorm", "ScaleNorm", "Axpby", "Adopt"), 4),
    "Sgd": 3,
    "Adam": 4,  # a gradient, the states, the master
}
_STEPS = {f"{kernel}<{rule}>" for kernel in ("run_steps", "run_coded_steps") for rule in ("Sgd", "Adam")}
# A kernel of a source -> all kernels that the source should have.
NEEDED = {
    "run_chunks": {f"run_chunks<{name}>" for name in MAIN if name not in ("Sgd", "Adam")},
    "run_conversion": _STEPS,
}
_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;.*/\* 0x([0-9a-f]{16}) \*/")
_CONTROL = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_NAME = re.compile(
    r"\b(run_chunks|run(?:_coded)?_steps|run_conversion)<(?:[^<>]*?\b[0-9]+, )?([A-Za-z]+)(<[^<>]*>)?(?:, (\w*Row)\b)?"
)
_NONE = 7  # the barrier of an instruction that sets none


class Instruction(NamedTuple):
    name: str
    operands: str
    predicated: bool
    sets: int  # the barrier that is free when its result is there
    waits: int  # a bit a barrier


def kernels(lines: Iterable[str]) -> Iterator[tuple[str, list[Instruction], dict[str, int]]]:
    """(mangled name, its instructions, where its labels stand)."""
    name, code, labels, pending = "", [], {}, None
    for line in lines:
        if line.startswith("\t.section\t"):
            if code:
                yield name, code, labels
            section = line.split("\t")[2].split(",")[0]
            name, code, labels = section.removeprefix(".text."), [], {}
        elif match := re.match(r"^(\.L\w+):", line):
            labels[match[1]] = len(code)
        elif match := _CODE.match(line):
            pending = match
        elif pending and (match := _CONTROL.match(line)):
            control = int(match[1], 16) >> 41  # bits 105 and up
            sets, waits = control >> 5 & 7, control >> 11 & 63
            code.append(Instruction(pending[2], pending[3], bool(pending[1]), sets, waits))
            pending = None
    if code:
        yield name, code, labels


def batches(code: list[Instruction], labels: dict[str, int]) -> dict[int, int]:
    """By the 16-byte load that is the first in flight: the most that are with it before one is waited for."""
    found: dict[int, int] = {}
    # A way through the code: where it is, the first load, the barriers of those in flight and their registers.
    ways = [(0, -1, 0, frozenset[str]())]
    seen = set(ways)
    while ways:
        at, first, barriers, registers = ways.pop()
        while at < len(code):
            one = code[at]
            if one.waits & barriers:
                found[first] = max(found.get(first, 0), len(registers))
                first, barriers, registers = -1, 0, frozenset()
            parts = one.name.split(".")
            if parts[0] in ("LDG", "LD") and ("128" in parts or ("64" in parts and registers)) and one.sets != _NONE:
                first = at if first < 0 else first
                barriers |= 1 << one.sets
                registers |= {one.operands.split(",")[0]}  # two under opposite predicates have one register
            if parts[0] in ("EXIT", "RET") and not one.predicated:
                break
            if parts[0] == "BRA" and (match := re.search(r"\((\.L\w+)\)", one.operands)):
                way = (labels[match[1]], first, barriers, registers)
                if way not in seen:
                    seen.add(way)
                    ways.append(way)
                if not one.predicated:
                    break
                way = (at + 1, first, barriers, registers)
                if way in seen:
                    break
                seen.add(way)
            at += 1
    return found


def main() -> int:
    counts: dict[str, list[int]] = {}
    wanted: dict[str, int] = {}
    seen: set[str] = set()
    for mangled, code, labels in kernels(sys.stdin):
        said = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
        said = re.sub(r"amp_patch::|\(anonymous namespace\)::", "", said)
        match = _NAME.search(said)
        if match is None or match[4] == "StridedRow" or "double" in (match[3] or ""):
            continue
        kernel = f"{match[1]}<{match[2]}{match[3] or ''}>"
        counts.setdefault(kernel, []).extend(batches(code, labels).values() or [0])
        seen |= {match[1], f"{match[1]}<{match[2]}>"}
        # Codes are read by 4 bytes.
        wanted[kernel] = 0 if match[1] == "run_coded_steps" else MAIN.get(match[2], 0)
    few = [name for name, found in counts.items() if min(found) < wanted[name]]
    for name, found in counts.items():
        print(f"  {name:<32} {min(found)} to {max(found)} loads of 16 bytes in flight together")
    for name in few:
        print(f"loads.py: {name}: {min(counts[name])} loads in flight, {wanted[name]} are wanted", file=sys.stderr)
    missing = sorted(set().union(*(needed for kernel, needed in NEEDED.items() if kernel in seen)) - seen)
    for name in missing:
        print(f"loads.py: {name} is not in what nvdisasm said", file=sys.stderr)
    if not counts:
        print("loads.py: no kernel in what nvdisasm said", file=sys.stderr)
    return 1 if few or missing or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
