"""Time each kernel of amp_patch.multi_tensor, and the fastest of torch's own functions for the same result.

`of torch` is our time over torch's: below 1, ours is faster. If torch's GradScaler cannot unscale a type (BF16 on CUDA
in torch 2.11), the rival multiplies by `_foreach_mul_`, and looks for infinities and NaN by `_foreach_norm`.
`of copy` is the throughput of a kernel (the bytes that it has to read and write, per second) over that of a copy of as
many bytes in the same turns: 1 is the speed of the memory. `host us` is the time until our call returns, and `launches`
the number of kernels that it launches on a GPU. On a GPU a sample is a series of calls, each on buffers that are not in
the L2 cache.
`python benchmarks/kernels.py [--threads N] [--device cuda] [--repeats N] [--elements N] [--only NAMES] [--json PATH]`
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import timing
import torch
from torch import Tensor

from amp_patch import multi_tensor as mt

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ("one", "gpt", "4,000 of 256")
WIDTHS = {"kernel": -16, "dtype": -10, "tensors": -14, "us": 10, "of copy": 9, "of torch": 10}
WIDTHS |= {"host us": 10, "launches": 10}
SAMPLE_US = 5000  # the wanted time of a sample on a GPU
MOST_CALLS = 20  # the most calls in a sample

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


def has_unscale(dtype: torch.dtype, device: str) -> bool:
    """Tell whether torch's kernel of GradScaler takes gradients of `dtype`. On CUDA torch 2.11's takes no BF16."""
    found, one = torch.zeros((), device=device), torch.ones((), device=device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1, dtype=dtype, device=device)], found, one)
    except NotImplementedError:
        return False
    return True


def check(tensors: list[Tensor], found: Tensor, factor: Tensor, by_kernel: bool, multiplies: bool = True) -> None:
    """Set `found` to 1 if a value is not finite, and multiply by `factor`, as torch's GradScaler does.

    by_kernel: use torch's kernel, which multiplies even if not `multiplies`. Otherwise use other functions of torch.
    """
    if by_kernel:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)
        return
    if multiplies:
        torch._foreach_mul_(tensors, factor)
    largest = torch.stack(torch._foreach_norm(tensors, math.inf))
    found.copy_(torch.maximum(found, 1.0 - largest.isfinite().all().float()))


def subjects(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> dict[str, Subject]:
    """Return kernel -> its calls on tensors of these shapes. All factors are 1, so a repeated call changes nothing."""
    low = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    wide = [t.to(torch.float32, copy=True) for t in low]
    scratch = [torch.zeros_like(t) for t in wide]
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    scale, found_one = torch.ones(1, device=device), torch.zeros(1, device=device)
    tracker = torch.zeros(1, dtype=torch.int32, device=device)
    elements = sum(t.numel() for t in low)
    narrow, full = elements * dtype.itemsize, elements * 4

    check_low = partial(check, low, found, one, has_unscale(dtype, device))

    def torch_gather() -> None:
        torch._foreach_copy_(scratch, low)
        check(scratch, found, one, True)

    def torch_add() -> None:
        torch_gather()
        torch._foreach_add_(wide, scratch, alpha=0.0)

    def torch_norm() -> None:
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(low, 2)))

    def torch_unscale_norm() -> None:
        check_low()
        torch_norm()

    def torch_adopt() -> None:
        for p, m in zip(low, wide, strict=True):
            m.copy_(torch.where(m.to(p.dtype) == p, m, p.float()))

    return {
        "gather": (narrow + full, lambda: mt.multi_tensor_scale(low, scratch, one, found), torch_gather),
        "unscale": (2 * narrow, lambda: mt.multi_tensor_unscale(low, one, found), check_low),
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
        "check_finite": (narrow, lambda: mt.multi_tensor_check_finite(low, found), lambda: check_low(multiplies=False)),
        "l2norm": (narrow, lambda: mt.multi_tensor_l2norm(low), torch_norm),
        "unscale_l2norm": (2 * narrow, lambda: mt.multi_tensor_unscale_l2norm(low, one, found), torch_unscale_norm),
        "adopt": (narrow + full, lambda: mt.multi_tensor_adopt(low, wide), torch_adopt),
        "update_scale": (
            0,
            lambda: mt.update_scale(scale, tracker, found_one),
            lambda: torch._amp_update_scale_(scale, tracker, found_one, 2.0, 0.5, 2000),
        ),
    }


def calls_in_a_sample(call: Callable[[], Any], device: str) -> int:
    """Return the calls of one sample: 1 on a CPU; on a GPU so many that the cost of starting the sample is small."""
    if device == "cpu":
        return 1
    call()  # warm-up: the first call loads kernels and allocates memory
    return max(1, min(MOST_CALLS, round(SAMPLE_US / timing.on_gpu(call, 1))))


def buffers(elements: int, itemsize: int, device: str) -> int:
    """Return how many sets of tensors a sample must rotate through, so that no set is in the L2 cache at its turn."""
    if device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_CALLS, -(-2 * cache // (elements * itemsize))))


def compare(
    kernel: str, sets: list[dict[str, Subject]], options: argparse.Namespace
) -> dict[str, float | int | str | None]:
    """Return the figures of one kernel. The sets have the same tensors at different addresses."""
    size = sets[0][kernel][0]
    sources = [torch.ones(max(size // 8, 1), device=options.device) for _ in sets]
    targets = [torch.empty_like(source) for source in sources]
    calls = {
        "ours": timing.rotating([subjects[kernel][1] for subjects in sets]),
        "torch": timing.rotating([subjects[kernel][2] for subjects in sets]),
        "copy": timing.rotating([partial(a.copy_, b) for a, b in zip(targets, sources, strict=True)]),
    }
    timers = {
        name: timing.timer(call, options.device, calls_in_a_sample(call, options.device))
        for name, call in calls.items()
    }
    times = timing.in_turns(timers, options.repeats)
    host = [timing.until_return(calls["ours"], options.device) for _ in range(options.repeats)]
    return {
        "us": round(statistics.median(times["ours"]), 1),
        "of copy": timing.ratio(times["copy"], times["ours"]) if size else None,
        "of torch": timing.ratio(times["ours"], times["torch"]),
        "host us": round(statistics.median(host), 1),
        "launches": timing.launches(calls["ours"], options.device),
    }


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--elements", type=int, default=50_000_000, help="of the one large tensor")
    parser.add_argument("--only", default=",".join(KINDS), help="of the three sets of tensors: %(default)s")
    options = parser.parse_args()
    timing.need_kernels(options.device)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = []
    print(timing.heading(options))
    print(timing.line(list(WIDTHS), WIDTHS))
    for kind in [kind for kind in KINDS if kind in options.only]:
        for dtype in DTYPES:
            shapes = shapes_of(kind, options.elements)
            count = buffers(sum(map(math.prod, shapes)), dtype.itemsize, options.device)
            sets = [subjects(shapes, dtype, options.device) for _ in range(count)]
            for kernel in sets[0]:
                if kernel == "update_scale" and (kind != "gpt" or dtype != torch.float32):
                    continue  # it takes no list of tensors, so it is measured once
                name = {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "tensors": kind}
                rows.append(name | compare(kernel, sets, options))
                print(timing.line([*rows[-1].values()], WIDTHS), flush=True)
                timing.write_json(options, rows)


if __name__ == "__main__":
    main()
