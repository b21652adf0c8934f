"""Compare kernels that no GPU has run with the CPU's kernels, to the bit, and time the steps where memory is the limit.

    python benchmarks/first_look.py [--device cuda] [--small] [--json PATH]

Each question has one line of output as soon as it is answered: "differ" has the number of elements that are not equal,
by case, and is empty if all are equal. A part that fails says so, and the next part runs. The times are those of one
tensor of 2^27 elements, 20 calls between two CUDA events. "of copy" is the throughput over that of a copy in FP32.
With `--device cpu --small` the CPU is compared with itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import timing
import torch
from torch import Tensor

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor.plain_random import philox

ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-4, "nesterov": False}
BLOCK = 256  # elements that share a scale
# Rung of the optimizer's half -> bytes that a step of Adam with BF16 gradients reads and writes for an element.
RUNGS = {"FP32": 28.0, "BF16": 30.0, "split": 26.0, "stochastic": 22.0, "split, 8 bits": 14.06}
RUNGS |= {"stochastic, 8 bits": 10.06}
SIZES = (8, 248, 256, 264, 4096, 4360, 70_000)
OFFSETS = (0, 1, 4)  # of the first element from an aligned address
SEED, DRAW = 3, 12345 << 40 | 7  # of stochastic rounding

Parts = dict[str, Tensor]  # role -> tensor; "m scales" and "v scales" are there for state in eight bits


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy that begins `offset` elements behind an aligned address."""
    base = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
    base[offset:] = tensor
    return base[offset:]


def parameter(rung: str, count: int) -> Parts:
    """Return the tensors of one parameter on the CPU, the same at each call."""
    random = torch.Generator().manual_seed(0)
    master = torch.randn(count, generator=random)
    m, v = torch.randn(count, generator=random) * 0.01, (torch.randn(count, generator=random) * 0.01) ** 2
    parts = {"grad": (torch.randn(count, generator=random) * 0.1).bfloat16(), "param": master, "m": m, "v": v}
    if rung.startswith("BF16"):
        parts["low"] = master.bfloat16()
    if rung.startswith("stochastic"):
        parts["param"] = master.bfloat16()
    if rung.startswith("split"):
        parts["low"], parts["param"] = master.bfloat16(), torch.empty(count, dtype=torch.int16)
        mt.multi_tensor_split([master], [parts["low"]], [parts["param"]])
    if rung.endswith("8 bits"):
        codes = [torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)]
        scales = [torch.zeros(-(-count // BLOCK)) for _ in codes]
        mt.multi_tensor_encode([m, v], codes, scales)
        parts |= {"m": codes[0], "v": codes[1], "m scales": scales[0], "v scales": scales[1]}
    return parts


def placed(parts: Parts, device: str, offset: int) -> Parts:
    return {
        role: each.to(device).clone() if role.endswith("scales") else at_offset(each.to(device), offset)
        for role, each in parts.items()
    }


def step(parts: Parts, optimizer: str = "Adam", found_inf: Tensor | None = None) -> Tensor:
    """Step once, with the gradient halved. Return Adam's count of steps, which was 3 before."""
    device = parts["param"].device
    is_stochastic = parts["param"].dtype == torch.bfloat16
    scales = [[parts[role]] for role in ("m scales", "v scales") if role in parts]
    more: dict[str, Any] = {"seed": SEED, "found_inf": found_inf, "factors": [torch.tensor(0.5, device=device)]}
    if is_stochastic:
        more["draws"] = [DRAW]
    gradients, params, m = [parts["grad"]], [parts["param"]], [parts["m"]]
    low = [parts["low"]] if "low" in parts else None
    count = torch.tensor(3.0, device=device)
    if optimizer == "SGD":
        mt.multi_tensor_sgd(gradients, params, m, low, scales=scales[:1], **SGD, **more)
    else:
        mt.multi_tensor_adam(gradients, params, m, [parts["v"]], None, [count], low, scales=scales, **ADAM, **more)
    return count


def differing(some: list[Tensor], others: list[Tensor]) -> int:
    """Return the number of elements whose bits are not equal."""
    count = 0
    for one, other in zip(some, others, strict=True):
        one, other = (each.cpu().reshape(-1, 1).view(torch.uint8) for each in (one, other))
        count += int((one != other).any(1).sum())
    return count


def written(parts: Parts) -> list[Tensor]:
    return [each for role, each in parts.items() if role != "grad"]


def found(cases: dict[str, int]) -> dict[str, Any]:
    return {"differ": {name: count for name, count in cases.items() if count}, "cases": len(cases)}


def codes(device: str, small: bool) -> dict[str, dict[str, Any]]:
    """Encode and decode values of all sizes, with zeros, subnormal numbers and NaN."""
    cases = {}
    for count, offset, dtype in product(
        (1, 255, 256, 257, 4095, 4096, 4352, 100_003), (0, 1, 3), (torch.int8, torch.uint8)
    ):
        values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * torch.logspace(35, -45, count)
        values[-1] = float("nan") if count % 2 else 0.0
        results = []
        for place in ("cpu", device):
            source = at_offset(values.to(place), offset)
            coded = at_offset(torch.full((count,), 9, dtype=dtype, device=place), offset)
            scales, back = torch.zeros(-(-count // BLOCK), device=place), torch.zeros(count, device=place)
            mt.multi_tensor_encode([source], [coded], [scales])
            mt.multi_tensor_decode([coded], [back], [scales])
            results.append([coded, scales, back.nan_to_num(7.0)])
        cases[f"{dtype} {count}+{offset}"] = differing(*results)
    return {"codes": found(cases)}


def skipped(device: str, small: bool) -> dict[str, dict[str, Any]]:
    """Step with `found_inf` 1, which changes nothing."""
    cases = {}
    for rung in RUNGS:
        parts = placed(parameter(rung, 5000), device, 0)
        before = [each.clone() for each in written(parts)]
        count = step(parts, found_inf=torch.ones((), device=device))
        cases[rung] = differing(before, written(parts)) + int(count.item() != 3)
    return {"a skipped step": found(cases)}


def scale_updates(device: str, small: bool) -> dict[str, dict[str, Any]]:
    cases = {}
    tables = (
        (65536.0, 2.0**-127, 3e38),
        (0.0, 1.0, float("nan"), float("inf")),
        (None, 0.0, 1.0),
        (0, 1999),
        (None, 2, 1),
    )
    for scale, now, earlier, tracker, patience in product(*tables):
        results = []
        for place in ("cpu", device):
            numbers = [torch.tensor(scale, device=place), torch.tensor(tracker, dtype=torch.int32, device=place)]
            more: dict[str, Any] = {}
            if earlier is not None:
                more["earlier_inf"] = torch.tensor(earlier, device=place)
            if patience is not None:
                more |= {"hysteresis": 2}
                more["hysteresis_tracker"] = torch.tensor(patience, dtype=torch.int32, device=place)
            flag = torch.tensor(now, device=place)
            mt.update_scale(*numbers, flag, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, **more)
            results.append([*numbers, *(each for each in more.values() if isinstance(each, Tensor))])
        cases[f"{scale} {now} {earlier} {tracker} {patience}"] = differing(*results)
    return {"update_scale": found(cases)}


def steps(device: str, small: bool) -> dict[str, dict[str, Any]]:
    """Step twice in each rung, on the CPU and two times on the device: a difference of the latter two is a race."""
    lines = {}
    for rung, optimizer in product(RUNGS, ("Adam", "SGD")):
        cases = {}
        for count, offset in product(SIZES if small else (*SIZES, 1_000_000), OFFSETS):
            start, results = parameter(rung, count), []
            for place in ("cpu", device, device):
                parts = placed(start, place, offset)
                for _ in range(2):
                    step(parts, optimizer)
                results.append(written(parts))
            cases[f"{count}+{offset}"] = differing(*results[:2])
            cases[f"{count}+{offset} twice"] = differing(*results[1:])
        lines[f"{optimizer}, {rung}"] = found(cases)
    return lines


def beyond_31_bits(device: str, small: bool) -> dict[str, dict[str, Any]]:
    """Step a tensor of more than 2^31 elements; and its last elements in FP32, which plain torch then rounds."""
    tail = 8192
    count = (2**16 if small else 2**31) + tail
    whole = {"grad": torch.full((count,), 0.1, dtype=torch.bfloat16, device=device)}
    whole["param"] = torch.ones(count, dtype=torch.bfloat16, device=device)
    whole |= {"m": torch.full((count,), 3, dtype=torch.int8, device=device)}
    whole |= {"v": torch.full((count,), 9, dtype=torch.uint8, device=device)}
    whole |= {f"{role} scales": torch.full((count // BLOCK,), 0.01, device=device) for role in "mv"}
    ends = {role: each[-tail // BLOCK if role.endswith("scales") else -tail :] for role, each in whole.items()}
    part = {role: each.clone() for role, each in ends.items()}
    part["param"] = part["param"].float()
    step(whole)
    step(part)
    groups = torch.arange((count - tail) // 8, count // 8, device=device)  # of elements with one random counter
    words = philox([groups, *(torch.full_like(groups, word) for word in (0, DRAW & 0xFFFFFFFF, DRAW >> 32))], SEED)
    random = torch.stack(words, 1).to(torch.int32).view(torch.int16).flatten().int() & 0xFFFF
    part["param"] = (part["param"].view(torch.int32) + random >> 16).to(torch.int16).view(torch.bfloat16)
    return {"more than 2^31 elements": found({"stochastic, 8 bits": differing(written(ends), written(part))})}


def speed(device: str, small: bool) -> dict[str, dict[str, Any]]:
    count, lines = 2**12 if small else 2**27, {}
    source, target = torch.zeros(count, device=device), torch.zeros(count, device=device)

    def throughput(call: Callable[[], Any], size: float) -> tuple[float, float]:
        timing.timer(call, device, runs=3)()
        ms = timing.timer(call, device, runs=20)() / 1e3
        return ms, size * count / ms

    _, copied = throughput(partial(target.copy_, source), 8)
    del source, target
    weight = torch.zeros(count, device=device, requires_grad=True)
    weight.grad = torch.full_like(weight, 0.1)
    rival = torch.optim.AdamW([weight], fused=True).step
    ms, moved = throughput(rival, 28)
    lines["torch's fused AdamW, FP32"] = {"ms": round(ms, 3), "of copy": round(moved / copied, 3)}
    del weight, rival
    for rung, size in RUNGS.items():
        base = parameter(rung, min(count, 2**20))
        parts = {role: each.to(device).repeat(count // base["param"].numel()) for role, each in base.items()}
        ms, moved = throughput(partial(step, parts), size)
        lines[f"Adam, {rung}"] = {"ms": round(ms, 3), "of copy": round(moved / copied, 3)}
    return lines


PARTS = (codes, skipped, scale_updates, steps, beyond_31_bits, speed)


def main() -> None:
    parser = timing.parser(__doc__, repeats=1)
    parser.add_argument("--small", action="store_true", help="tensors of a few thousand elements")
    options = parser.parse_args()
    timing.need_kernels(options.device)
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        try:
            with torch.no_grad():
                lines = part(options.device, options.small)
        except Exception as error:
            lines = {part.__name__: {"failed": f"{type(error).__name__}: {error}"[:600]}}
        for question, answer in lines.items():
            rows.append({"question": question, **answer})
            print(rows[-1], flush=True)
        timing.write_json(options, rows)
    if bad := [row["question"] for row in rows if row.get("differ") or "failed" in row]:
        sys.exit(f"first_look: differences or failures in: {'; '.join(bad)}")


if __name__ == "__main__":
    main()
