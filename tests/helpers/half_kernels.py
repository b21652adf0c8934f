"""Which of torch's kernels compute in FP16."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

KERNELS = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|_?convolution|_?convolution_backward|slow_conv.*|thnn_conv.*"
    r"|mkldnn_.*|conv_tbc.*|_?scaled_dot_product.*|_native_multi_head.*|_transformer_encoder.*|bilinear|_trilinear"
    r"|_thnn_fused_.*_cell|lstm|gru|lstm_cell|gru_cell|rnn_.*|im2col|col2im)$"
)


def half_kernels(run: Callable[[], Any]) -> list[str]:
    """The names of the GEMM-like kernels that get a half tensor while `run` runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            run()
    events = recorded.profiler.kineto_results.events()
    return [e.name() for e in events if KERNELS.match(e.name()) and "c10::Half" in e.dtypes()]
