"""A record of torch's kernels that compute in a low-precision type."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KERNELS = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|_?convolution|_?convolution_backward|slow_conv.*|thnn_conv.*"
    r"|mkldnn_.*|conv_tbc.*|_scaled_dot_product.*_for_cpu.*|_trilinear|im2col|col2im)$"
)
NAMES = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}


def half_kernels(run: Callable[[], Any], dtype: torch.dtype = torch.float16) -> list[str]:
    """The names of the GEMM-like ops that get a tensor of `dtype` while `run` runs, and are not emulated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            run()
    events = recorded.profiler.kineto_results.events()
    emulated = [e for e in events if e.name() == "amp_patch::emulated"]

    def is_native(event: Any) -> bool:
        inside = (event.start_ns() <= e.start_ns() <= event.end_ns() for e in emulated)
        return not any(inside)

    return [e.name() for e in events if KERNELS.match(e.name()) and NAMES[dtype] in e.dtypes() and is_native(e)]
