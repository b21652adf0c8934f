"""GraphConfig: the settings of a graph, with the methods of OneFlow's `graph.config`."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.policy import LOW_PRECISION

# Methods of OneFlow's config that GraphConfig does not have -> their replacement, for the error message.
_ELSEWHERE = {
    "enable_zero": "give add_optimizer a torch.distributed.optim.ZeroRedundancyOptimizer, or use fully_shard",
    "set_zero_redundancy_optimizer_mode": "give add_optimizer a torch.distributed.optim.ZeroRedundancyOptimizer",
    "enable_auto_parallel": "use torch.distributed",
    "enable_tensorrt": "config.compile(backend='tensorrt') with the package torch_tensorrt",
    "enable_xla_jit": "config.compile(backend='openxla') with the package torch_xla",
    "enable_openvino": "config.compile(backend='openvino') with the package openvino",
}


class GraphConfig:
    """The settings of a `Graph`, as `graph.config`. They can be changed until the first call of the graph."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._frozen = False
        self.training = False
        self.amp_dtype: torch.dtype | None = None
        self.accumulation_steps = 1
        self.compile_options: dict[str, Any] = {}

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Run `build` under `amp.autocast(dtype=dtype)`; `mode=False` undoes this.

        Do not call this for a model of `amp.initialize`: its opt level decides the casts.
        """
        self.check_open("enable_amp")
        if not isinstance(mode, bool):
            raise TypeError(f"enable_amp: mode is {mode!r}; wanted True or False, and the type as dtype=")
        if dtype not in LOW_PRECISION:
            raise ValueError(f"enable_amp: dtype is {dtype!r}; wanted {' or '.join(map(str, LOW_PRECISION))}")
        self.amp_dtype = dtype if mode else None

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Split the batch of each call into `value` micro-batches, with one optimizer step for all of them.

        Every tensor given to the graph, except those of shape [], is split along its first dimension; `value` must
        divide its size. The gradients are the sum over the micro-batches: if the loss is a mean, divide it by `value`,
        as in OneFlow. Tensors that `build` returns are concatenated along their first dimension. Tensors of shape []
        become one tensor of shape [value].
        """
        self.check_open("set_gradient_accumulation_steps")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"set_gradient_accumulation_steps: value is {value!r}; wanted a positive integer")
        self.accumulation_steps = value

    def compile(
        self,
        *,
        backend: Any = "inductor",
        mode: str | None = None,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
        disable: bool = False,
    ) -> None:
        """Set the arguments of `torch.compile`, by which `build` is compiled.

        The default mode is "reduce-overhead", which records CUDA graphs, if the backend is "inductor", `options` is not
        given, the graph's modules are on a CUDA device and gradients are not accumulated. Otherwise it is torch's. This
        also holds if `compile` is not called. `fullgraph=True` makes a graph break in `build` an error. `disable=True`
        and `backend="eager"` run without the compiler, for debugging.
        """
        self.check_open("compile")
        given = {"mode": mode, "dynamic": dynamic, "options": options}
        self.compile_options = {
            "backend": backend,
            "fullgraph": fullgraph,
            "disable": disable,
            **{name: value for name, value in given.items() if value is not None},
        }

    def _left_to_the_compiler(self, mode: Any = True) -> None:
        """Accept a call without effect: the compiler decides about fusion, order and algorithms."""

    allow_fuse_model_update_ops = _left_to_the_compiler
    allow_fuse_add_to_output = _left_to_the_compiler
    allow_fuse_cast_scale = _left_to_the_compiler
    enable_cudnn_conv_heuristic_search_algo = _left_to_the_compiler
    enable_straighten_algorithm = _left_to_the_compiler
    set_outputs_buffer_size = _left_to_the_compiler

    def check_open(self, call: str) -> None:
        """Raise if the graph has been called."""
        if self._frozen:
            raise RuntimeError(
                f"{call}: {self._owner} has been called already, and is compiled as it was then; set it up in "
                "__init__, or make another graph"
            )

    def freeze(self) -> None:
        """Record that the graph has been called: `check_open` raises after this."""
        self._frozen = True

    def __getattr__(self, name: str) -> Any:
        if name in _ELSEWHERE:
            raise AttributeError(f"GraphConfig.{name}: not served here; {_ELSEWHERE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
