"""Watches a script that trains with torch alone, and trains it at an opt level.

The level begins in the call of a model, before its forward, not at the first backward: by then the first forward has
run in FP32, on weights that a cast would change under the graph, and the first step would be another level's. A model
is a module that is called with gradients enabled while no other module's call is running, and that has parameters
which an optimizer holds; of DistributedDataParallel and its kin it is the module inside. Optimizers are seen as they
are made. Models with optimizers of their own (a GAN's two) are trainings of their own. Where one optimizer holds
several models (an encoder's and a decoder's), these come one after another in the first forward; each time they are
initialized again, together, which keeps the masters' values. O1's casts are installed with the first optimizer, where
`initialize` would do it, and do nothing yet: in `F.mse_loss(model(x), y)` Python looks the loss function up before it
calls the model.

`torch.autograd.backward`, to which `Tensor.backward` leads, runs in a `scale_loss` of all optimizers that hold what the
loss reaches: as in torch, a GAN's loss leaves gradients of both networks. What is no parameter (the image of an
adversarial attack) gets the gradient that it would have without the scale. A closure that one of torch's optimizers
would call at the beginning of its step is called before it, where the check for overflow can see its gradients.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_patch.casts import install
from amp_patch.environment import overridden
from amp_patch.frontend import initialize, load_state_dict, loss_scale, state_dict
from amp_patch.lab.unedited.native import NativePrecision, before_scaling
from amp_patch.lab.unedited.reach import Reach, reach_of
from amp_patch.lab.unedited.refusal import ScriptRefused
from amp_patch.lab.unedited.source import names_us
from amp_patch.model import fsdp
from amp_patch.policy import OPT_LEVELS, Options, resolve
from amp_patch.support.compiled import not_traced, uncompiled
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Patches
from amp_patch.training import ddp, observers
from amp_patch.training.innermost_optimizer import innermost
from amp_patch.training.observers import Observer
from amp_patch.training.scale_loss import scale_loss
from amp_patch.training.stash import stash_of
from amp_patch.training.step import ClosureAlreadyRun


class _Taken(NamedTuple):
    """What one `initialize` was given: models, and optimizers, wrappers too."""

    models: list[weakref.ref[nn.Module]]
    optimizers: list[weakref.ref[Any]]


class Watch(Observer):
    """In its `with` block what torch alone would train is trained at `level`; a script of ours is left to itself.

    At O0 the losses and the weights are the script's own, to the bit. On leaving, all that is replaced in torch is put
    back; models and optimizers stay as they are, for `amp_patch.restore`.

    Args:
        level: "O0" to "O5"; as for `initialize`, AMP_PATCH_OPT_LEVEL and AMP_PATCH_DTYPE have the last word.
        native: leave the script its own torch.autocast and GradScaler; for "O0" alone.

    Attributes:
        backwards: how many losses were taken.
        native: what the script does of torch's own mixed precision, which a level takes the place of.

    Raises:
        ValueError: a level that cannot be.
        ScriptRefused (a SystemExit): from the line of the script that cannot be taken.
    """

    def __init__(self, level: str, *, native: bool = False) -> None:
        if level not in OPT_LEVELS:
            raise ValueError(f"Watch: level {level!r} is none of {', '.join(OPT_LEVELS)} (the letter O, not zero)")
        self.level = level
        self.native = NativePrecision(native, lambda: not (self._aside or self._is_of_ours()))
        self._scale: Tensor | None = None  # by which the script's own GradScaler has scaled the loss of this backward
        self._policy = resolve(*overridden(level, Options()))
        self.backwards = 0
        self._aside = False  # whether the script calls `initialize` itself
        self._entering = False
        self._made: list[weakref.ref[Any]] = []  # all optimizers, in the order in which they were made
        self._taken: list[_Taken] = []
        self._groups = 0  # how often an optimizer was given parameters
        # The modules that were looked at -> what `_groups` was then.
        self._looked = weakref.WeakKeyDictionary[nn.Module, int]()
        self._knows_us: bool | None = None  # whether the script does, once that was looked at
        self._owners: dict[int, list[int]] = {}  # id of a parameter -> of the optimizers that hold it or its master
        self._owners_of = -1  # what `_groups` was then
        self._thread = threading.local()
        self._patches = Patches()

    def __enter__(self) -> Watch:
        optimizer, patches = torch.optim.Optimizer, self._patches
        patches.set(optimizer, "__init__", self._telling_of_optimizers(optimizer.__init__))
        patches.set(optimizer, "add_param_group", self._telling_of_groups(optimizer.add_param_group))
        patches.set(nn.Module, "__call__", self._telling_of_forwards(nn.Module.__call__))
        patches.set(torch.autograd, "backward", self._scaling(torch.autograd.backward))
        self.native.install(patches)
        if not ddp.installed():  # else a `no_sync()` that is entered before the first forward would not be known
            ddp.install()
            patches.on_remove(lambda: None if self._taken else ddp.uninstall())
        hook = register_optimizer_step_pre_hook(self._step_begins)
        patches.on_remove(hook.remove)
        observers.add(self)
        patches.on_remove(lambda: observers.remove(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.remove()

    def missing(self) -> ScriptRefused | None:
        """Why nothing was trained at the level, if nothing was and the script should have been; for its end."""
        if self._aside or self.backwards or self._is_of_ours():
            return None
        if not self._made:
            return ScriptRefused("it made no optimizer of torch.optim in this process", line=False)
        if not self._taken:
            return ScriptRefused("it called no module whose parameters an optimizer holds", line=False)
        return ScriptRefused("it never called backward() of a loss of its model", line=False)

    def training_begun(self, training: Any) -> None:
        self._aside = self._aside or not self._entering

    def body_begins(self, body: Any) -> None:
        if self._scale is not None:
            body.scale = self._scale

    def loss_given_to_scaler(self, scaler: Any, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        self.native.note_scaled(loss, scaled, scale)

    # Optimizers.

    def _telling_of_optimizers(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made = [ref for ref in self._made if ref() is not None]
            self._made.append(weakref.ref(optimizer))
            self._groups += 1
            if self._policy.patch_torch_functions and not (install.installed() or self._is_of_ours()):
                install.install(self._policy.op_lists)
                self._patches.on_remove(lambda: None if self._taken else install.uninstall())

        return __init__

    def _telling_of_groups(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._groups += 1

        return add_param_group

    def _optimizers(self) -> dict[int, Any]:
        """Those that step, by id, each in what wraps it (SAM)."""
        found: dict[int, Any] = {}
        for ref in self._made:
            if (optimizer := ref()) is not None:
                target = innermost(optimizer)
                if optimizer is not target or id(target) not in found:
                    found[id(target)] = optimizer
        return found

    def _holders(self, params: Iterable[int]) -> list[Any]:
        """The optimizers, each once, that hold parameters of these ids, or their masters."""
        optimizers = self._optimizers()
        if self._owners_of != self._groups:
            self._owners = {}
            for key, optimizer in optimizers.items():
                for param in _params(innermost(optimizer)):
                    self._owners.setdefault(id(param), []).append(key)
            self._owners_of = self._groups
        found = dict.fromkeys(owner for key in params for owner in self._owners.get(key, ()))
        return [optimizers[owner] for owner in found if owner in optimizers]

    def _is_of_ours(self) -> bool:
        if self._knows_us is None:
            self._knows_us = names_us(sys.modules.get("__main__"))
        return self._knows_us

    # Models.

    def _telling_of_forwards(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "inside", False):
                return original(module, *args, **kwargs)
            thread.inside = True
            try:
                self._forward_begins(module)
                return original(module, *args, **kwargs)
            finally:
                thread.inside = False

        return __call__

    @not_traced
    def _forward_begins(self, module: nn.Module) -> None:
        if self._aside or not torch.is_grad_enabled() or self._looked.get(module) == self._groups:
            return
        if torch._C._get_tracing_state() is not None or torch._C._current_graph_task_id() != -1:
            return
        self._looked[module] = self._groups
        model = _inside(module)
        own = self._holders(map(id, model.parameters()))
        if not own:
            return
        known = {id(p) for each in self._models() for p in each.parameters()}
        fresh = any(stash_of(innermost(optimizer)) is None for optimizer in own)
        if not fresh and all(id(p) in known or id(p) not in self._owners for p in model.parameters()):
            return
        if self._is_of_ours():
            self._aside = True
            return
        if not self.native.kept and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise ScriptRefused(
                "it turns torch's autocast on in a way of its own",
                "and take out torch.autocast and GradScaler, whose part a level has",
            )
        self._take(model, own)

    def _take(self, model: nn.Module, optimizers: list[Any]) -> None:
        """Initialize these, with all that belongs to the same optimizers already; the loss scale goes on."""
        for optimizer in optimizers:
            _refuse_lbfgs(innermost(optimizer))
        held = {id(innermost(optimizer)) for optimizer in optimizers}
        joined = [t for t in self._taken if any(id(innermost(o)) in held for o in _alive(t.optimizers))]
        earlier = [optimizer for taken in joined for optimizer in _alive(taken.optimizers)]
        if any(stash.gathered for o in earlier if (stash := stash_of(innermost(o))) is not None):
            raise ScriptRefused(
                f"{base_class(model).__name__} is called for the first time between backward() and step() of an "
                "optimizer that it shares with other models",
                "and give initialize all these models, as a list",
            )
        models = list({id(m): m for m in (*(m for t in joined for m in _alive(t.models)), model)}.values())
        optimizers = list({id(innermost(o)): o for o in (*earlier, *optimizers)}.values())
        self._entering = True
        try:
            scales = state_dict(earlier) if len(joined) == 1 else None
            initialize(models, optimizers, opt_level=self.level)
            if scales is not None:
                load_state_dict(scales, optimizers)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ScriptRefused(f"{error}") from error
        finally:
            self._entering = False
        self._taken = [taken for taken in self._taken if all(taken is not each for each in joined)]
        self._taken.append(_Taken([*map(weakref.ref, models)], [*map(weakref.ref, optimizers)]))
        self._groups += 1
        for each in models:
            self._looked[each] = self._groups

    def _models(self) -> list[nn.Module]:
        return [model for taken in self._taken for model in _alive(taken.models)]

    # Losses.

    def _scaling(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            # -1: else this is a backward pass inside of another, which recomputes a part of it.
            plain = self._aside or getattr(self._thread, "backward", False) or torch._C._current_graph_task_id() != -1
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if plain or not all(isinstance(loss, Tensor) for loss in losses):
                return original(losses, grad_tensors, *args, **kwargs)
            reach = self._with_shards(_merged(reach_of(loss, kwargs.get("inputs")) for loss in losses))
            optimizers = self._reached(reach)
            if not optimizers:
                return original(losses, grad_tensors, *args, **kwargs)
            if len(losses) > 1:
                raise ScriptRefused("torch.autograd.backward is given several losses", "and add the losses up before")
            loss, self._scale = before_scaling(losses[0])
            self._thread.backward = True
            try:
                with scale_loss(loss, optimizers) as scaled, self._others_unscaled(reach, optimizers):
                    scaled = scaled if self._scale is None else losses[0]
                    original(scaled, _as_type_of(grad_tensors, scaled), *args, **kwargs)
            finally:
                self._thread.backward = False
            self.backwards += 1

        return backward

    def _with_shards(self, reach: Reach) -> Reach:
        """`reach` with the parameters that FSDP2 has sharded in the place of those that it has gathered."""
        whole = fsdp.shards(fsdp.fsdp_modules(self._models()))
        found = [whole.get(key, leaf) for key, leaf in reach.leaves.items()] if whole else reach.leaves.values()
        return Reach({id(leaf): leaf for leaf in found}, reach.whole)

    def _reached(self, reach: Reach) -> list[Any]:
        """The optimizers that hold what the backward pass reaches.

        Raises:
            ScriptRefused: one of them went through no `initialize`.
        """
        if not reach.whole:
            return [optimizer for taken in self._taken for optimizer in _alive(taken.optimizers)]
        found = self._holders(reach.leaves)
        if not (found and self._is_of_ours()):
            for optimizer in found:
                self._refuse_unknown(optimizer)
            return found
        self._aside = True
        return []

    def _refuse_unknown(self, optimizer: Any) -> None:
        if stash_of(innermost(optimizer)) is None:
            raise ScriptRefused(
                f"the {base_class(innermost(optimizer)).__name__} here holds tensors of no module that was called "
                "since it was made, with gradients enabled"
            )

    @contextmanager
    def _others_unscaled(self, reach: Reach, optimizers: list[Any]) -> Iterator[None]:
        """Let the leaves that belong to no model and no optimizer have their gradients as without a scale."""
        others = [leaf for key, leaf in reach.leaves.items() if key not in self._owners]
        if others:  # nearly never: to ask the models for their parameters takes a while
            known = {id(p) for each in self._models() for p in each.parameters()}
            others = [leaf for leaf in others if id(leaf) not in known]
        earlier = [leaf.grad for leaf in others]
        scale = loss_scale(optimizers) if others else None
        for leaf in others:
            leaf.grad = None
        yield
        for leaf, before in zip(others, earlier, strict=True):
            grad = leaf.grad
            if grad is not None:
                assert scale is not None
                grad = grad if self._unscaled(optimizers) else grad / scale.to(grad.device, grad.dtype)
            leaf.grad = grad if before is None else before if grad is None else before + grad

    @staticmethod
    def _unscaled(optimizers: list[Any]) -> bool:
        return not any((stash := stash_of(innermost(o))) is not None and stash.scales_loss for o in optimizers)

    # Steps.

    @not_traced
    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._aside or all(ref() is not optimizer for ref in self._made) or self._is_of_ours():
            return None
        name, result = base_class(optimizer).__name__, None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None and not isinstance(closure, ClosureAlreadyRun):
            _refuse_unknown_use(optimizer)
            with torch.enable_grad():
                done = ClosureAlreadyRun(closure())
            result = ((args[0], done, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": done})
        stash = stash_of(optimizer)
        if (stash is None or not stash.bodies) and any(p.grad is not None for p in _params(innermost(optimizer))):
            self._refuse_unknown(optimizer)
            raise ScriptRefused(f"the gradients of {name} were made without backward()")
        return result


def _inside(module: nn.Module) -> nn.Module:
    """The module that trains inside of those that torch wraps around one."""
    inner = uncompiled(module)
    if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = inner.module
    return module if inner is module else _inside(inner)


def _refuse_lbfgs(optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScriptRefused(
            "LBFGS evaluates its closure again and again inside of step()",
            "inside of the closure, and compare --levels O0,O4: no other level can train so",
        )


def _refuse_unknown_use(optimizer: Any) -> None:
    """Raise unless the optimizer is known to call its closure once, before all else, as torch's do save for LBFGS."""
    _refuse_lbfgs(optimizer)
    base = base_class(optimizer)
    if base.__module__.partition(".")[0] != "torch":
        raise ScriptRefused(
            f"step() is given a closure, and what a {base.__name__} does with it is not known",
            "and call what the closure does before step(), and step() without it",
        )


def _params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that the optimizer updates, itself or by their masters."""
    if (stash := stash_of(optimizer)) is not None:
        yield from (param for param, _ in stash.masters.pairs(optimizer.param_groups))
    else:
        for group in optimizer.param_groups:
            yield from group["params"]


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [value for ref in refs if (value := ref()) is not None]


def _merged(reaches: Iterable[Reach]) -> Reach:
    leaves: dict[int, Tensor] = {}
    whole = True
    for reach in reaches:
        leaves.update(reach.leaves)
        whole = whole and reach.whole
    return Reach(leaves, whole)


def _as_type_of(grad_tensors: Any, loss: Tensor) -> Any:
    """What backward begins with, in the type of the scaled loss."""
    if isinstance(grad_tensors, Tensor):
        return grad_tensors.to(loss.dtype)
    return [_as_type_of(each, loss) for each in grad_tensors] if isinstance(grad_tensors, list | tuple) else None
