"""Each kernel of amp_patch.multi_tensor beside the best that torch's own functions do for the same result.

`of torch` is our time over torch's, below 1 is ours being faster. `of copy` is the bytes that a kernel has to read and
write a second, over what a copy of as many bytes reaches in the same turns: 1 is the speed of the memory.
`python benchmarks/kernels.py [--threads N] [--device cuda] [--repeats N] [--elements N] [--only NAMES] [--json PATH]`
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor

from amp_patch import multi_tensor as mt

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = {"kernel": -16, "dtype": -10, "tensors": -14, "us": 10, "of copy": 9, "of torch": 10}

Subject = tuple[int, Callable[[], Any], Callable[[], Any]]  # bytes read and written, ours, torch's


def shapes_of(kind: str, elements: int) -> list[tuple[int, ...]]:
    if kind == "one":
        return [(elements,)]
    if kind == "4,000 of 256":
        return [(256,)] * 4000
    width, vocabulary, length = 384, 512, 128  # "gpt": of 11 M parameters
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,)]
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *vectors]
    return [(vocabulary, width), (length, width), *block * 6]


def subjects(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> dict[str, Subject]:
    """Factors are 1, so that repeating a call in place changes nothing."""
    low = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    wide = [t.to(torch.float32, copy=True) for t in low]
    scratch = [torch.zeros_like(t) for t in wide]
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    scale, found_one = torch.ones(1, device=device), torch.zeros(1, device=device)
    tracker = torch.zeros(1, dtype=torch.int32, device=device)
    elements = sum(t.numel() for t in low)
    narrow, full = elements * dtype.itemsize, elements * 4

    def check(tensors: list[Tensor]) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)

    def torch_gather() -> None:
        torch._foreach_copy_(scratch, low)
        check(scratch)

    def torch_add() -> None:
        torch_gather()
        torch._foreach_add_(wide, scratch, alpha=0.0)

    def torch_norm() -> None:
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(low, 2)))

    def torch_unscale_norm() -> None:
        check(low)
        torch_norm()

    def torch_adopt() -> None:
        for p, m in zip(low, wide, strict=True):
            m.copy_(torch.where(m.to(p.dtype) == p, m, p.float()))

    return {
        "gather": (narrow + full, lambda: mt.multi_tensor_scale(low, scratch, one, found), torch_gather),
        "unscale": (2 * narrow, lambda: mt.multi_tensor_unscale(low, one, found), lambda: check(low)),
        "publish": (
            narrow + full,
            lambda: mt.multi_tensor_scale(wide, low, 1.0),
            lambda: torch._foreach_copy_(low, wide),
        ),
        "accumulate": (
            narrow + 2 * full,
            lambda: mt.multi_tensor_axpby(0.0, low, 1.0, wide, wide, found, check="x"),
            torch_add,
        ),
        "check_finite": (narrow, lambda: mt.multi_tensor_check_finite(low, found), lambda: check(low)),
        "l2norm": (narrow, lambda: mt.multi_tensor_l2norm(low), torch_norm),
        "unscale_l2norm": (2 * narrow, lambda: mt.multi_tensor_unscale_l2norm(low, one, found), torch_unscale_norm),
        "adopt": (narrow + full, lambda: mt.multi_tensor_adopt(low, wide), torch_adopt),
        "update_scale": (
            0,
            lambda: mt.update_scale(scale, tracker, found_one),
            lambda: torch._amp_update_scale_(scale, tracker, found_one, 2.0, 0.5, 2000),
        ),
    }


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--elements", type=int, default=50_000_000, help="of the one large tensor")
    parser.add_argument("--only", default="one,gpt,4,000 of 256", help="of the three sets of tensors: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = []
    print(timing.heading(options))
    print(timing.line(list(WIDTHS), WIDTHS))
    for kind in [kind for kind in ("one", "gpt", "4,000 of 256") if kind in options.only]:
        for dtype in DTYPES:
            for kernel, (size, ours, theirs) in subjects(
                shapes_of(kind, options.elements), dtype, options.device
            ).items():
                if kernel == "update_scale" and (kind != "gpt" or dtype != torch.float32):
                    continue  # it knows nothing of tensors
                source = torch.ones(max(size // 8, 1), device=options.device)
                target = torch.empty_like(source)
                calls = {"ours": ours, "torch": theirs, "copy": lambda a=target, b=source: a.copy_(b)}
                timers = {name: timing.timer(call, options.device) for name, call in calls.items()}
                times = timing.in_turns(timers, options.repeats)
                row = {
                    "kernel": kernel,
                    "dtype": str(dtype).removeprefix("torch."),
                    "tensors": kind,
                    "us": round(statistics.median(times["ours"]), 1),
                    "of copy": timing.ratio(times["copy"], times["ours"]) if size else "",
                    "of torch": timing.ratio(times["ours"], times["torch"]),
                }
                print(timing.line([*row.values()], WIDTHS), flush=True)
                rows.append(row)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()
