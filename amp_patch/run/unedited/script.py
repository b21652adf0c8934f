"""Training of an unedited script, which uses torch alone, at an opt level.

Models: the level begins in the first call of a model, before its forward. At the first backward it would be too late:
the forward would have run in FP32, and a cast would change weights that the graph holds. A model is a module that
- is called with gradients enabled while no other module's call is running, and
- has parameters that an optimizer holds.
If a wrapper such as DistributedDataParallel is called, the model is the module inside.

Optimizers: each is recorded at construction. Models that share no optimizer (the two of a GAN) are separate trainings.
If one optimizer holds several models (an encoder and a decoder), each is found at its own first call. The models found
so far are then initialized again together, which keeps the masters' values.

Casts: O1's are installed before the script's first line, and do nothing until a model begins. Without this, they would
miss functions that the script binds early: by `from torch import einsum`, in class bodies, in default arguments, and in
`F.mse_loss(model(x), y)`, where Python looks up the loss function before it calls the model.

Losses: `torch.autograd.backward`, which `Tensor.backward` calls, runs in a `scale_loss` of all optimizers that hold
leaves of the loss. As in torch, a GAN's loss then adds gradients to both networks. A leaf that is no parameter (the
image of an adversarial attack) gets an unscaled gradient. A closure that an optimizer of torch would call at the
beginning of its step is called before the step, so that the check for overflow sees its gradients.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_patch.casts import install
from amp_patch.diagnose.recording.sizes import alive
from amp_patch.environment import overridden
from amp_patch.frontend import initialize_as, load_state_dict, state_dict
from amp_patch.policy import Options, resolve
from amp_patch.run.unedited import loose_tensors
from amp_patch.run.unedited.called_alone import CalledAlone
from amp_patch.run.unedited.decisions import install_arrays, kept_averages, report_banned_calls
from amp_patch.run.unedited.direct_forwards import DirectForwards
from amp_patch.run.unedited.empty_loaders import EmptyLoaders
from amp_patch.run.unedited.exports import Exports
from amp_patch.run.unedited.handmade import HandmadeSteps
from amp_patch.run.unedited.loose_tensors import unscaled
from amp_patch.run.unedited.native import NativePrecision, ScalerStates, before_scaling
from amp_patch.run.unedited.pickles import install_pickles
from amp_patch.run.unedited.processes import Processes, refuse_copies_of_shared, tell
from amp_patch.run.unedited.refusal import ScriptRefused, refuse_lbfgs, refuse_unknown_use, untrained, where
from amp_patch.run.unedited.source import chooses_its_level
from amp_patch.support import fsdp
from amp_patch.support.compiled import not_traced, uncompiled
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Patches
from amp_patch.support.reach import Reach, merged, reach_of
from amp_patch.training import observers
from amp_patch.training.arguments import ClosureAlreadyRun
from amp_patch.training.innermost import innermost
from amp_patch.training.scale_loss import scale_loss
from amp_patch.training.training import Dialect
from amp_patch.watch import questions


class _Initialized(NamedTuple):
    """The arguments of one call of `initialize`. An optimizer may be a wrapper, such as SAM, around another."""

    models: list[weakref.ref[nn.Module]]
    optimizers: list[weakref.ref[Any]]


class UneditedScript(observers.Observer):
    """A `with` block in which a script that uses torch alone is trained at `level`.

    A script that trains with amp_patch or Apex runs unchanged. At O0 losses and weights are the script's own, to the
    bit. The exit restores everything that was replaced in torch. Models and optimizers stay initialized, until
    `amp_patch.restore`.

    Args:
        level: the opt level. AMP_PATCH_OPT_LEVEL and AMP_PATCH_DTYPE override it, as in `initialize`.
        native: keep the script's own torch.autocast and GradScaler; only for "O0".

    Attributes:
        backwards: the number of losses that ran in a `scale_loss`.
        has_begun: whether a training has begun, the script's own or one of this object.
        native: the handler of the script's own autocasts and GradScalers.
        notes: a sentence for each decision that was taken for the script; also printed to stderr.
        processes, loaders: the counter of the processes that it starts, the detection of loaders without a batch.

    Raises:
        ValueError: the level is invalid.
        ScriptRefused: the script cannot be trained unedited. A SystemExit, raised from the line that prevents it.
    """

    def __init__(self, level: str, *, native: bool = False) -> None:
        self.level = level
        self.native = NativePrecision(native, self.applies)
        self.notes: list[str] = []
        self.has_begun = False
        self._alone = CalledAlone(self._models, self._join, self._say)
        self._scale: Tensor | None = None  # the scale of the script's own GradScaler in this backward
        self._policy = resolve(*overridden(level, Options()))
        self._scalers = ScalerStates(self._policy, self._trained_optimizers)
        self.backwards = 0
        self._left_alone = False  # whether the script calls `initialize` itself
        self._initializing = self._evaluated = False  # evaluated: a module was called without gradients
        self._optimizers_made: list[weakref.ref[Any]] = []  # in order
        self._initialized: list[_Initialized] = []
        self._groups_version = 0  # incremented by each new optimizer, param group and `initialize`
        # Module -> `_groups_version` when its parameters were last looked up in the optimizers. Without this, each
        # forward would look them up.
        self._checked = weakref.WeakKeyDictionary[nn.Module, int]()
        self._script_chooses: bool | None = None  # None until `_is_of_ours` reads the script
        self._owners: dict[int, list[int]] = {}  # id of a parameter -> ids of the optimizers that hold it or its master
        self._owners_version = -1  # the `_groups_version` of `_owners`
        self._thread = threading.local()
        self._handmade = HandmadeSteps()
        self._reached_low = False  # whether a backward has reached low-precision weights that no optimizer holds
        self.processes = Processes()
        self.loaders = EmptyLoaders()
        self._direct_forwards = DirectForwards(self._call)
        self._patches = Patches()

    def __enter__(self) -> UneditedScript:
        optimizer, patches = torch.optim.Optimizer, self._patches
        if self._policy.patch_torch_functions and not install.installed():
            patches.on_remove(lambda: None if self._initialized or self._left_alone else install.uninstall())
            install.install(self._policy.op_lists)
        patches.set(optimizer, "__init__", self._wrap_init(optimizer.__init__))
        patches.set(optimizer, "add_param_group", self._wrap_add_param_group(optimizer.add_param_group))
        patches.set(nn.Module, "__call__", self._wrap_call(nn.Module.__call__))
        patches.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward))
        parts = (self.native, self._scalers, self._alone, self._direct_forwards, self.processes)
        for part in (*parts, self.loaders):
            part.install(patches)
        install_pickles(patches, self._models, self.note_optimizer)
        report_banned_calls(patches, self._say)
        if self._policy.makes_low_tensors:
            install_arrays(patches, self._policy.dtype, self.applies)
        if not self._policy.changes_nothing:
            Exports(self._models, self._direct_forwards.undone).install(patches)
        hook = register_optimizer_step_pre_hook(self._step_begins)
        patches.on_remove(hook.remove)
        observers.add(self)
        patches.on_remove(lambda: observers.remove(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.remove()

    def missing(self) -> ScriptRefused | None:
        """Return the refusal of a script that has ended without a training: it says why.

        The result is None if something was trained, or if the script chooses its level by amp_patch or Apex.
        """
        if self._left_alone or self.backwards or self._is_of_ours():
            return None
        if not self._optimizers_made and (self._handmade.backwards or self.processes.started):
            return self._handmade.refused(line=False) if self._handmade.backwards else self.processes.refused()
        return untrained(self._optimizers_made, self._initialized, self._evaluated, self.loaders.words)

    def training_begun(self, training: Any) -> None:
        self.has_begun |= training is not None
        self._left_alone = self._left_alone or not self._initializing

    def body_begins(self, body: Any) -> None:
        if self._scale is not None:
            body.scale = self._scale

    def loss_given_to_scaler(self, scaler: Any, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        self.native.note_scaled(loss, scaled, scale)

    # Optimizers.

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.note_optimizer(optimizer)

        return __init__

    def note_optimizer(self, optimizer: Any) -> None:
        """Record an optimizer that the script has constructed or unpickled."""
        self._optimizers_made = [ref for ref in self._optimizers_made if ref() is not None]
        self._optimizers_made.append(weakref.ref(optimizer))
        self._groups_version += 1
        self._direct_forwards.watch(_params(innermost(optimizer)))

    def _wrap_add_param_group(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._groups_version += 1

        return add_param_group

    def _optimizers(self) -> dict[int, Any]:
        """Return {id of an innermost optimizer: its wrapper, such as SAM; without a wrapper the optimizer}."""
        found: dict[int, Any] = {}
        for ref in self._optimizers_made:
            if (optimizer := ref()) is not None:
                target = innermost(optimizer)
                if optimizer is not target or id(target) not in found:
                    found[id(target)] = optimizer
        return found

    def _holders(self, params: Iterable[int]) -> list[Any]:
        """Return the optimizers, each once, that hold parameters with these ids, or their masters."""
        optimizers = self._optimizers()
        if self._owners_version != self._groups_version:
            self._owners = {}
            for key, optimizer in optimizers.items():
                for param in _params(innermost(optimizer)):
                    self._owners.setdefault(id(param), []).append(key)
            self._owners_version = self._groups_version
        found = dict.fromkeys(owner for key in params for owner in self._owners.get(key, ()))
        return [optimizers[owner] for owner in found if owner in optimizers]

    def _is_of_ours(self) -> bool:
        if self._script_chooses is None:
            self._script_chooses = chooses_its_level(sys.modules.get("__main__"))
        return self._script_chooses

    def applies(self) -> bool:
        """Tell whether the script is trained here, and does not call `initialize` itself."""
        return not (self._left_alone or self._is_of_ours())

    def _say(self, note: str) -> None:
        if self.applies() and note not in self.notes:
            self.notes.append(note)
            tell(f"amp_patch: {note}")

    # Models.

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "inside", False):
                return original(module, *args, **kwargs)
            return self._call(module, functools.partial(original, module, *args, **kwargs))

        return __call__

    def _call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Run a call of `module`. If no other module's call is running, it may begin a level first."""
        thread = self._thread
        if getattr(thread, "inside", False):
            return call()
        thread.inside = True
        try:
            self._forward_begins(module)
            return call() if self._left_alone else self._alone.call(module, _inside(module), call)
        finally:
            thread.inside = False

    @not_traced
    def _forward_begins(self, module: nn.Module) -> None:
        if self._left_alone or not torch.is_grad_enabled():
            self._evaluated = True
            return
        seen = self._checked.get(module) == self._groups_version
        if seen or torch._C._get_tracing_state() is not None or torch._C._current_graph_task_id() != -1:
            return
        self._checked[module] = self._groups_version
        model = _inside(module)
        own = self._holders(map(id, model.parameters()))
        if not own:
            return
        known = {id(p) for each in self._models() for p in each.parameters()}
        fresh = not all(map(questions.policy_of, own))
        if not fresh and all(id(p) in known or id(p) not in self._owners for p in model.parameters()):
            return
        if self._is_of_ours():
            self._left_alone = True
            return
        if not self.native.kept and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise ScriptRefused(
                "it turns torch's autocast on in a way that a level cannot replace",
                "and remove the autocast and the GradScaler, which a level replaces",
            )
        self._initialize(model, own)

    def _initialize(self, model: nn.Module, optimizers: list[Any]) -> None:
        """Initialize `model`, and earlier models of its optimizers again. If these are one training, keep its scale."""
        for optimizer in optimizers:
            refuse_lbfgs(innermost(optimizer))
        refuse_copies_of_shared(model, self._policy)
        held = {id(innermost(optimizer)) for optimizer in optimizers}
        joined = [t for t in self._initialized if any(id(innermost(o)) in held for o in alive(t.optimizers))]
        earlier = [optimizer for taken in joined for optimizer in alive(taken.optimizers)]
        if any(map(questions.has_made_gradients, earlier)):
            raise ScriptRefused(
                f"{base_class(model).__name__} is called for the first time between backward() and step() of an "
                "optimizer that it shares with other models",
                "and pass all these models to initialize as a list",
            )
        models = list({id(m): m for m in (*(m for t in joined for m in alive(t.models)), model)}.values())
        optimizers = list({id(innermost(o)): o for o in (*earlier, *optimizers)}.values())
        self._initializing = True
        try:
            scales = state_dict(earlier) if len(joined) == 1 else None if joined else self._scalers.loaded
            options: dict[str, Any] = {"methods": self._alone.methods_of(models)}
            if self._policy.cast_model_type is not None:
                trained = (p for o in optimizers for p in _params(innermost(o)) if p.requires_grad)
                options["keep_fp32"] = kept_averages(models, trained, self._say)
            # Without this, a part that an evaluation calls first would get a loss scale that no later step can write.
            with torch.inference_mode(False):
                policy = resolve(*overridden(self.level, Options(allow_banned=True)))
                initialize_as(Dialect(takes_infinite_inputs=True), models, optimizers, policy, **options)
                if scales is not None:
                    load_state_dict(scales, optimizers)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ScriptRefused(f"{error}") from error
        finally:
            self._initializing = False
        self._initialized = [taken for taken in self._initialized if all(taken is not each for each in joined)]
        self._initialized.append(_Initialized([*map(weakref.ref, models)], [*map(weakref.ref, optimizers)]))
        self._groups_version += 1
        self._checked.update(dict.fromkeys(models, self._groups_version))

    def _join(self, part: nn.Module, model: nn.Module) -> None:
        """Make `part`, a module inside of `model`, a model too, with the optimizers of `model`."""
        given = (taken for taken in self._initialized if any(model is each for each in alive(taken.models)))
        self._initialize(part, [optimizer for taken in given for optimizer in alive(taken.optimizers)])

    def _models(self) -> list[nn.Module]:
        return [model for taken in self._initialized for model in alive(taken.models)]

    def _trained_optimizers(self) -> list[Any]:
        return [optimizer for taken in self._initialized for optimizer in alive(taken.optimizers)]

    # Losses.

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            # A graph task other than -1 means a nested backward pass, as of a checkpoint: the outer one is scaled.
            plain = (
                self._left_alone or getattr(self._thread, "backward", False) or torch._C._current_graph_task_id() != -1
            )
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if plain or not all(isinstance(loss, Tensor) for loss in losses):
                return original(losses, grad_tensors, *args, **kwargs)
            reach = self._with_shards(merged(reach_of(loss, kwargs.get("inputs")) for loss in losses))
            optimizers = self._optimizers_behind(reach)
            if not (self._optimizers_made or self._is_of_ours()):
                self._handmade.backward_begins(reach)
            if not optimizers:
                self._reached_low = self._reached_low or loose_tensors.reaches_low_weights(reach)
                return original(losses, grad_tensors, *args, **kwargs)
            if len(losses) > 1:
                raise ScriptRefused("torch.autograd.backward is given several losses", "and add them up first")
            loss, self._scale = before_scaling(losses[0])
            self._thread.backward = True
            try:
                with scale_loss(loss, optimizers) as scaled, unscaled(reach, self._owners, self._models(), optimizers):
                    scaled = scaled if self._scale is None else losses[0]
                    original(scaled, _as_type_of(grad_tensors, scaled), *args, **kwargs)
            finally:
                self._thread.backward = False
            self.backwards += 1

        return backward

    def _with_shards(self, reach: Reach) -> Reach:
        """Replace FSDP2's gathered parameters in `reach` by the sharded ones, which the optimizers hold."""
        whole = {id(whole): shard for whole, shard in fsdp.gathered(fsdp.fsdp_modules(self._models()))}
        found = [whole.get(key, leaf) for key, leaf in reach.leaves.items()] if whole else reach.leaves.values()
        return Reach({id(leaf): leaf for leaf in found}, reach.whole)

    def _optimizers_behind(self, reach: Reach) -> list[Any]:
        """Return the optimizers that hold leaves of `reach`: all if it is not `whole`; none if amp_patch is imported.

        Raises:
            ScriptRefused: one of them holds parameters of a module that was never initialized.
        """
        if not reach.whole:
            return self._trained_optimizers()
        found = self._holders(reach.leaves)
        if not (found and self._is_of_ours()):
            for optimizer in found:
                self._take_or_refuse(optimizer)
            return found
        self._left_alone = True
        return []

    def _take_or_refuse(self, optimizer: Any) -> None:
        """If an optimizer with tensors of no module has no training, begin one, which does not cast the tensors.

        Raises:
            ScriptRefused: the optimizer holds parameters of a module, or no model has been initialized yet.
        """
        if questions.policy_of(optimizer) is not None:
            return
        name = base_class(innermost(optimizer)).__name__
        loose = loose_tensors.steps_loose_tensors(optimizer)
        if self._reached_low or not (loose and self._initialized):  # without a model, a forward may have run in FP32
            raise loose_tensors.untrained(name, loose=loose, low=self._reached_low)
        self._initialize(loose_tensors.LooseTensors(), [optimizer])
        if not self._policy.changes_nothing:
            self._say(f"the tensors of the {name} here belong to no module and stay as they are{where()}")

    # Steps.

    @not_traced
    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._left_alone or all(ref() is not optimizer for ref in self._optimizers_made) or self._is_of_ours():
            return None
        name, result = base_class(optimizer).__name__, None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None and not isinstance(closure, ClosureAlreadyRun):
            refuse_unknown_use(optimizer)
            with torch.enable_grad():
                done = ClosureAlreadyRun(closure())
            result = ((args[0], done, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": done})
        if not questions.had_bodies(optimizer) and any(p.grad is not None for p in _params(innermost(optimizer))):
            self._take_or_refuse(optimizer)
            raise ScriptRefused(f"the gradients of {name} were made without backward()")
        return result


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside of DataParallel, DistributedDataParallel and torch.compile."""
    inner = uncompiled(module)
    if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = inner.module
    return module if inner is module else _inside(inner)


def _params(optimizer: Any) -> Iterator[Tensor]:
    """Return the parameters that the optimizer updates; for a master in its groups, the parameter of that master."""
    return (param for param, _ in questions.pairs_of(optimizer))


def _as_type_of(grad_tensors: Any, loss: Tensor) -> Any:
    """Return the initial gradients of a backward pass (None, a tensor or a list) in the type of the scaled loss."""
    if isinstance(grad_tensors, Tensor):
        return grad_tensors.to(loss.dtype)
    return [_as_type_of(each, loss) for each in grad_tensors] if isinstance(grad_tensors, list | tuple) else None
