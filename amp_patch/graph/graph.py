"""Graph, the class of this folder: its set-up, the checks of its first call, and the step that each call runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from amp_patch.casts import regions
from amp_patch.casts.autocast import autocast
from amp_patch.grad_scaler import GradScaler
from amp_patch.graph.config import GraphConfig
from amp_patch.graph.micro_batches import joined, micro_batches
from amp_patch.graph.noted_losses import NotedLosses
from amp_patch.model import tensors as model_tensors
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import tree
from amp_patch.support.words import of_class
from amp_patch.training.innermost import innermost
from amp_patch.training.scale_loss import scale_loss
from amp_patch.training.stash import Stash, stash_of


class Graph:
    """Base class of a compiled training step, or inference; each call of an instance runs it once::

        class TrainGraph(amp.graph.Graph):
            def __init__(self):
                super().__init__()
                self.model, self.loss_fn = model, loss_fn
                self.config.enable_amp(True, dtype=torch.float16)
                self.add_optimizer(optimizer)
                self.set_grad_scaler(amp.GradScaler(init_scale=3000, growth_interval=1000))

            def build(self, inputs, targets):
                loss = self.loss_fn(self.model(inputs), targets)
                loss.backward()
                return loss

        graph = TrainGraph()
        loss = graph(inputs, targets)

    A call does these things in this order: it runs the compiled `build`; runs a backward of the losses that called
    `backward()` in `build`, times the scale; unscales and clips the gradients; steps each optimizer, unless a gradient
    is not finite; updates the scale; clears the gradients; steps the learning-rate schedulers (also after a skipped
    step, as in OneFlow). If losses are scaled, the optimizers' steps sync with the device once. Nothing else syncs.

    - The gradients are those of this call alone. `backward()` in `build` only records the loss; the backward runs after
      `build`, so code in `build` sees no gradient. Several losses have one backward, that of their sum.
    - As in OneFlow, a parameter group with the entry `clip_grad_max_norm` has its unscaled gradients clipped to that
      norm. `clip_grad_norm_type` is the type of the norm, by default 2.0.
    - With a model and optimizer of `amp.initialize`, at any level, do not call `enable_amp` and `set_grad_scaler`: the
      graph uses `amp.scale_loss`, with the scale of the training's first loss (`loss_id=0`).
    - A graph without optimizers is an inference: it runs under `torch.no_grad`.
    - The tensors that `build` returns are detached for the caller. A returned loss is not scaled.
    - `build` is compiled at the first call, and again if torch.compile requires it (another number of dimensions of an
      input; `model.eval()`). Python code in it that depends on values of tensors works, and breaks the graph there.

    Raises:
        RuntimeError: `super().__init__()` was not called; the graph has an optimizer, and `build` calls no
            `backward()`; it has none, and `build` calls one; a loss is no scalar; the set-up is changed after the first
            call.
        NotImplementedError: `build` is not overridden.

    Source: OneFlow's `oneflow.nn.Graph`. Not supported: `Graph.trace`, nested graphs, and functions of OneFlow's own
    runtime (placements, pipeline stages, job protos).
    """

    _made: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        kind = type(self).__name__
        count = Graph._made.get(kind, 0)
        Graph._made[kind] = count + 1
        self._name = f"{kind}_{count}"
        self.config = GraphConfig(self._name)
        self._optimizers: list[tuple[Any, Any]] = []  # (optimizer, its scheduler or None)
        self._grad_scaler: torch.amp.GradScaler | None = None
        self._noted = NotedLosses()
        self._run: Callable[..., Any] | None = None
        self._casts: AbstractContextManager[Any] = nullcontext()
        self._by_level = False  # whether the optimizers went through `initialize`, whose loss scales are used
        self._cuda_graphs = False

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the step. Subclasses override this: they call modules and, for training, `loss.backward()`."""
        raise NotImplementedError(f"{type(self).__name__}.build must be overridden: it says what the graph computes")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph with the arguments of `build`; return the result of `build`, detached."""
        if self._run is None:
            self._run = self._prepared()
        return self._called(args, kwargs)

    def add_optimizer(self, optim: Any, *, lr_sch: Any = None) -> None:
        """Make each call step `optim`, and after it `lr_sch`, a learning-rate scheduler for `optim`.

        Args:
            optim: a torch optimizer, one that went through `amp.initialize`, or an object with `param_groups`, `step`
                and `zero_grad`.
            lr_sch: any scheduler whose `step()` takes no metric.
        """
        self.config.check_open("add_optimizer")
        kind = type(optim).__name__
        if not (isinstance(getattr(optim, "param_groups", None), list) and _can(optim, "step", "zero_grad")):
            raise TypeError(f"add_optimizer: optim is {of_class(optim)}; wanted a torch.optim.Optimizer")
        if isinstance(optim, torch.optim.LBFGS):
            raise ValueError("add_optimizer: LBFGS evaluates the loss inside step(), which a graph calls once")
        if any(optim is known for known, _ in self._optimizers):
            raise ValueError(f"add_optimizer: this {kind} was added before")
        if lr_sch is not None:
            name = type(lr_sch).__name__
            if not _can(lr_sch, "step"):
                raise TypeError(
                    f"add_optimizer: lr_sch is {of_class(lr_sch)}; wanted a torch.optim.lr_scheduler.LRScheduler"
                )
            if isinstance(lr_sch, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "add_optimizer: ReduceLROnPlateau steps by a metric, which a graph does not have; step it yourself"
                )
            if getattr(lr_sch, "optimizer", optim) not in (optim, innermost(optim)):
                raise ValueError(f"add_optimizer: this {name} was made for another optimizer than the {kind} given")
        self._optimizers.append((optim, lr_sch))
        self.config.training = True

    def set_grad_scaler(self, grad_scaler: torch.amp.GradScaler) -> None:
        """Scale losses by `grad_scaler`: any `amp.GradScaler`, or torch's GradScaler if parameters are FP32."""
        self.config.check_open("set_grad_scaler")
        if not isinstance(grad_scaler, torch.amp.GradScaler):
            raise TypeError(
                f"set_grad_scaler: grad_scaler is {of_class(grad_scaler)}; wanted an amp.GradScaler, such as "
                "amp.GradScaler(init_scale=3000, growth_interval=1000)"
            )
        self._grad_scaler = grad_scaler

    @property
    def name(self) -> str:
        """The class's name with a number, unique in the process."""
        return self._name

    @property
    def training(self) -> bool:
        """Whether the graph has an optimizer."""
        return self.config.training

    @property
    def is_compiled(self) -> bool:
        """Whether the graph has been called."""
        return self._run is not None

    def debug(self, *_: Any, **__: Any) -> None:
        """Raise: torch prints what it compiles."""
        raise NotImplementedError(
            "Graph.debug: not served; with TORCH_LOGS=recompiles,graph_breaks in the environment torch prints what it "
            "compiles, and why a graph breaks"
        )

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state of all objects of the graph, in `destination` if given. Syncs with the device.

        Each module's state dict has the name of its attribute as key. The keys "graph.optimizers",
        "graph.lr_schedulers", "graph.grad_scaler" and "graph.loss_scalers" (of `initialize`) hold the state of the
        other objects, if the graph has any.
        """
        state = {} if destination is None else destination
        for name, part in self._parts().items():
            state[name] = [each.state_dict() for each in part] if isinstance(part, list) else part.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a result of `state_dict`, before the first call or after it.

        Args:
            strict: raise unless the keys are those of this graph and of its modules; if False, load the common keys.

        Raises:
            RuntimeError: the keys differ, or a list has another length. Nothing is loaded then.
        """
        parts = self._parts()
        missing, unexpected = parts.keys() - state_dict.keys(), state_dict.keys() - parts.keys()
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"load_state_dict: {self._name} wants {sorted(parts)}; missing {sorted(missing)}, unexpected "
                f"{sorted(unexpected)}; strict=False loads the others"
            )
        chosen = {name: part for name, part in parts.items() if name in state_dict}
        for name, part in chosen.items():
            if isinstance(part, list) and len(part) != len(state_dict[name]):
                raise RuntimeError(f"load_state_dict: {name} has {len(state_dict[name])} states; wanted {len(part)}")
        for name, part in chosen.items():
            if isinstance(part, list):
                for each, state in zip(part, state_dict[name], strict=True):
                    each.load_state_dict(state)
            elif isinstance(part, nn.Module):
                part.load_state_dict(state_dict[name], strict=strict)
            else:
                part.load_state_dict(state_dict[name])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}  # `_run` is bound to this graph, so a copy must compile its own

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "_run", "_optimizers", "_name"):
            raise RuntimeError(f"{type(self).__name__}: call super().__init__() first in its __init__")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # The first call: checks, and the compiled `build`.

    def _prepared(self) -> Callable[..., Any]:
        """Check the setup, and return the compiled `build`."""
        if type(self).build is Graph.build:
            self.build()
        for name, value in vars(self).items():
            if isinstance(value, Graph):
                raise TypeError(f"{self._name}: attribute {name!r} is a Graph, and graphs cannot be nested")
        stashes = self._stashes()
        config = self.config
        self._by_level = self._grad_scaler is None and bool(stashes)
        self._check_scaling(stashes)
        modules = self._modules().values()
        on_cpu = model_tensors.use_cpu(modules)
        if config.amp_dtype is not None:
            self._casts = autocast("cpu" if on_cpu else "cuda", config.amp_dtype)
        elif stashes:
            self._casts = regions.region(stashes[0].policy)
        options = {"backend": "inductor", **config.compile_options}
        self._cuda_graphs = options["backend"] == "inductor" and not on_cpu
        if self._cuda_graphs and config.accumulation_steps == 1 and not options.keys() & {"mode", "options"}:
            options["mode"] = "reduce-overhead"
        config.freeze()
        return torch.compile(self.build, **options)

    def _check_scaling(self, stashes: list[Stash]) -> None:
        """Raise if casts or scales come both from an opt level and from this graph; warn if float16 has no scale."""
        scaler, config = self._grad_scaler, self.config
        if stashes and scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                f"{self._name}: torch's GradScaler does not know the optimizers of amp.initialize; leave "
                "set_grad_scaler out (the level scales), or set an amp.GradScaler"
            )
        if stashes and config.amp_dtype is not None:
            raise RuntimeError(
                f"{self._name}: enable_amp, but its optimizers went through amp.initialize, whose opt level decides "
                "what is cast, and to what; leave enable_amp out"
            )
        if 0 < len(stashes) < len(self._optimizers) and scaler is None:
            raise RuntimeError(
                f"{self._name}: some of its optimizers went through amp.initialize and some did not; give all to it, "
                "or set one amp.GradScaler for all"
            )
        if config.amp_dtype is torch.float16 and config.training and scaler is None and not self._by_level:
            warnings.warn(
                f"{self._name}: trains in float16 without a grad scaler, so small gradients are lost; call "
                "self.set_grad_scaler(amp.GradScaler()), or enable_amp(dtype=torch.bfloat16)",
                stacklevel=4,
            )

    def _modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in vars(self).items() if isinstance(value, nn.Module)}

    def _stashes(self) -> list[Stash]:
        """Return the stashes of the optimizers that went through `initialize`."""
        found = [stash_of(innermost(optim)) for optim, _ in self._optimizers]
        return [stash for stash in found if stash is not None and stash.enabled]

    def _parts(self) -> dict[str, Any]:
        """Return {key in `state_dict`: an object that has a state dict, or a list of one or more such objects}."""
        scalers = {id(scaler): scaler for stash in self._stashes() for scaler in stash.scalers}
        parts: dict[str, Any] = {
            **self._modules(),
            "graph.optimizers": [optim for optim, _ in self._optimizers],
            "graph.lr_schedulers": [lr_sch for _, lr_sch in self._optimizers if lr_sch is not None],
            "graph.grad_scaler": self._grad_scaler,
            "graph.loss_scalers": list(scalers.values()),
        }
        return {name: part for name, part in parts.items() if part is not None and part != []}

    # Every call.

    def _called(self, args: Any, kwargs: Any) -> Any:
        """Run one inference, or one iteration of training. `_prepared` was called before."""
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if not self._optimizers:
            with torch.no_grad():
                outputs, losses = self._built(args, kwargs)
            if losses:
                raise RuntimeError(
                    f"{self._name}: build calls backward(), but the graph has no optimizer; call "
                    "self.add_optimizer(optimizer) in __init__, or leave backward() out"
                )
            return self._given_back(outputs)
        steps = self.config.accumulation_steps
        results = []
        for index, (some_args, some_kwargs) in enumerate(micro_batches(args, kwargs, steps)):
            outputs, losses = self._built(some_args, some_kwargs)
            total = self._total(losses)
            if index == 0:
                self._zero_grad()
            self._backward(total, last=index == steps - 1)
            results.append(self._given_back(outputs))
            del outputs, losses, total
        self._step()
        self._zero_grad()
        for _, lr_sch in self._optimizers:
            if lr_sch is not None:
                lr_sch.step()
        return results[0] if steps == 1 else joined(results)

    def _built(self, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Run `build`; return its result, and the list of losses whose `backward()` it called."""
        assert self._run is not None
        noted = self._noted
        try:
            # The two contexts are entered outside of the compiled code. Inside it, a graph break would end them.
            with self._casts, noted:
                outputs = self._run(*args, **kwargs)
            if noted.arguments:
                raise RuntimeError(
                    f"{self._name}: build calls backward({', '.join(noted.arguments)}); in a graph backward() takes "
                    "none of these: it is that of a scalar loss, into the optimizers' parameters"
                )
            return outputs, list(noted.losses)
        finally:
            noted.losses.clear()
            noted.arguments.clear()

    def _total(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of the losses that called `backward()`, in FP32 or FP64.

        Raises:
            RuntimeError: there is no loss, or a loss is no scalar or requires no gradient.
        """
        if not losses:
            raise RuntimeError(
                f"{self._name}: the graph has an optimizer, but build calls no loss.backward(); call it there (by the "
                "tensor's method, unscaled), or leave add_optimizer out for inference"
            )
        for loss in losses:
            if loss.numel() != 1:
                raise RuntimeError(
                    f"{self._name}: build calls backward() on a tensor of shape {list(loss.shape)}; wanted a scalar: "
                    "take its mean() or sum() first"
                )
            if not loss.requires_grad:
                raise RuntimeError(
                    f"{self._name}: build calls backward() on a loss that requires no grad; is its model frozen, or is "
                    "the graph called under torch.no_grad()?"
                )
        device = losses[0].device
        wide = [loss.reshape(()).float() if loss.dtype in LOW_PRECISION else loss.reshape(()) for loss in losses]
        return wide[0] if len(wide) == 1 else torch.stack([loss.to(device) for loss in wide]).sum()

    def _backward(self, loss: Tensor, last: bool) -> None:
        if self._by_level:
            optimizers = [optim for optim, _ in self._optimizers]
            with scale_loss(loss, optimizers, delay_overflow_check=not last) as scaled_loss:
                scaled_loss.backward()
        elif self._grad_scaler is not None:
            self._grad_scaler.scale(loss).backward()
        else:
            loss.backward()

    def _step(self) -> None:
        """Unscale and clip the groups with `clip_grad_max_norm`, step every optimizer, and update the scale."""
        scaler = self._grad_scaler
        for optim, _ in self._optimizers:
            clipped = [group for group in optim.param_groups if group.get("clip_grad_max_norm") is not None]
            if clipped and scaler is not None:
                scaler.unscale_(optim)
            for group in clipped:
                norm_type = group.get("clip_grad_norm_type", 2.0)
                torch.nn.utils.clip_grad_norm_(group["params"], group["clip_grad_max_norm"], norm_type)
            if scaler is None:
                optim.step()
            else:
                scaler.step(optim)
        if scaler is not None:
            scaler.update()

    def _zero_grad(self) -> None:
        for optim, _ in self._optimizers:
            optim.zero_grad()
            # If an exception ended the last call before `update()`, the scaler still has a record of these gradients.
            if self._grad_scaler is not None:
                self._grad_scaler._per_optimizer_states.pop(id(optim), None)

    def _given_back(self, outputs: Any) -> Any:
        """Return the outputs detached. If CUDA graphs are used, copy them: the next call overwrites their memory."""
        copied = self._cuda_graphs
        return tree.map_tensors(lambda tensor: tensor.detach().clone() if copied else tensor.detach(), outputs)


def _can(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
