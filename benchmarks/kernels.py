"""Each kernel of amp_patch.multi_tensor beside the best that torch's foreach functions do for the same result.

Both sides are timed in turns and their medians compared, so that a busy machine slows both. A ratio above 1 is ours
being faster. `python benchmarks/kernels.py [--threads N] [--device cuda] [--repeats N] [--json PATH]`
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from amp_patch import multi_tensor as mt

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {
    "4,000 of 8": [(8,)] * 4000,
    "200 of 64x64": [(64, 64)] * 200,
    "20 of 512x512": [(512, 512)] * 20,
    "mixed": [(1024, 1024), *[(256, 128)] * 20, *[(256,)] * 60],
}


def subjects(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> dict[str, tuple[Callable, Callable]]:
    """{kernel: (ours, torch's)}. Factors are 1, so that repeating a call in place changes nothing."""
    low = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    wide = [t.to(torch.float32, copy=True) for t in low]
    other, scratch = [torch.randn_like(t) for t in wide], [torch.zeros_like(t) for t in wide]
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    found_one, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    tracker = torch.zeros(1, dtype=torch.int32, device=device)

    def check(tensors: list[torch.Tensor]) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)

    def torch_scale() -> None:
        torch._foreach_copy_(wide, low)
        check(wide)

    def torch_unscale() -> None:
        if dtype == torch.float32:
            return check(low)
        torch._foreach_copy_(scratch, low)  # torch unscales no FP16 gradients
        check(scratch)
        torch._foreach_copy_(low, scratch)

    def torch_axpby() -> None:
        torch._foreach_copy_(wide, low)
        check(wide)
        torch._foreach_add_(wide, other, alpha=0.0)

    def torch_check() -> None:
        if dtype != torch.float32:
            torch._foreach_copy_(scratch, low)
        check(low if dtype == torch.float32 else scratch)

    def torch_norm() -> None:
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(low, 2, dtype=torch.float32)))

    def torch_unscale_norm() -> None:
        torch_unscale()
        torch_norm()

    def torch_adopt() -> None:
        for p, m in zip(low, wide, strict=True):
            m.copy_(torch.where(m.to(p.dtype) == p, m, p.float()))

    return {
        "scale": (lambda: mt.multi_tensor_scale(low, wide, 1.0, found), torch_scale),
        "cast": (lambda: mt.multi_tensor_scale(wide, low, 1.0), lambda: torch._foreach_copy_(low, wide)),
        "unscale": (lambda: mt.multi_tensor_unscale(low, one, found), torch_unscale),
        "axpby": (lambda: mt.multi_tensor_axpby(1.0, low, 0.0, other, wide, found), torch_axpby),
        "check_finite": (lambda: mt.multi_tensor_check_finite(low, found), torch_check),
        "l2norm": (lambda: mt.multi_tensor_l2norm(low), torch_norm),
        "unscale_l2norm": (lambda: mt.multi_tensor_unscale_l2norm(low, one, found), torch_unscale_norm),
        "adopt": (lambda: mt.multi_tensor_adopt(low, wide), torch_adopt),
        "update_scale": (
            lambda: mt.update_scale(scale, tracker, found_one),
            lambda: torch._amp_update_scale_(scale, tracker, found_one, 2.0, 0.5, 2000),
        ),
    }


def medians(ours: Callable, theirs: Callable, repeats: int, device: str) -> tuple[float, float]:
    """Microseconds a call, the two in turns; the first calls are for the caches."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 2):
        for side, call in enumerate((ours, theirs)):
            start = time.perf_counter()
            call()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= 2:
                times[side].append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = []
    print(f"backend {mt.backend()}, torch {torch.__version__}, {options.device}, {options.threads} threads; us a call")
    print(f"{'kernel':15}{'dtype':10}{'tensors':15}{'ours':>10}{'torch':>10}{'ratio':>8}")
    for name, shapes in SHAPES.items():
        for dtype in DTYPES:
            for kernel, (ours, theirs) in subjects(shapes, dtype, options.device).items():
                a, b = medians(ours, theirs, options.repeats, options.device)
                kind = str(dtype).removeprefix("torch.")
                print(f"{kernel:15}{kind:10}{name:15}{a:10.1f}{b:10.1f}{b / a:8.2f}", flush=True)
                rows.append({"kernel": kernel, "dtype": kind, "tensors": name, "ours_us": a, "torch_us": b})
    if options.json:
        about = {"torch": torch.__version__, "backend": mt.backend(), "machine": platform.machine()}
        result = {**about, "device": options.device, "threads": options.threads, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
