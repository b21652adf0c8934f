"""Puts models and optimizers into a training, for `initialize`, and takes them out again, for `restore`."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casts import dynamo, install
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_half import emulate
from amp_patch.masters import clipping
from amp_patch.masters.masters import disconnect, links_of, settle
from amp_patch.masters.of_optimizer import take_out_of_tables
from amp_patch.model import averages, fp32_copies, incoming, part_loads, untouched
from amp_patch.model import buffers as model_buffers
from amp_patch.model import forward as model_forward
from amp_patch.model import tensors as model_tensors
from amp_patch.model.joints import Entry
from amp_patch.model.keep_fp32 import kept_modules
from amp_patch.model.of_model import followed_policy
from amp_patch.policy import OPT_LEVELS, Policy
from amp_patch.support import fsdp
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Attempts
from amp_patch.training import joints, observers
from amp_patch.training import optimizer as optimizer_side
from amp_patch.training.joints import Optimizer
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.optimizer import AmpOptimizer
from amp_patch.training.scale_loss import targets_of
from amp_patch.training.stash import (
    ATTRIBUTE,
    Neighbours,
    Siblings,
    Stash,
    known_stash,
    note_sharing,
    siblings,
    stash_of,
)
from amp_patch.training.unscale import unscale_pending

logger = logging.getLogger("amp_patch")


@dataclass(frozen=True)
class Dialect:
    """The classes of a training's objects. The drop-in for Apex replaces them by subclasses with Apex's names.

    Attributes:
        scaler: the class of the loss scalers. Its `of` makes one for each loss.
        stash: the class of `optimizer._amp_stash`.
        optimizer: the methods that `initialize` adds to an optimizer's class.
        models_may_be_low_precision: whether models with float16 or bfloat16 parameters are accepted unchanged.
        takes_any_type: whether models with low-precision parameters are accepted and treated as FP32 models
            (`incoming.py`).
        takes_infinite_inputs: whether a number of a model's first inputs that the cast makes infinite is warned about,
            in place of an error (`first_inputs.py`). Apex's users expect the loss scale to fall then.
    """

    scaler: type[LossScaler] = LossScaler
    stash: type[Stash] = Stash
    optimizer: type[AmpOptimizer] = AmpOptimizer
    models_may_be_low_precision: bool = False
    takes_any_type: bool = True
    takes_infinite_inputs: bool = False


@dataclass
class Training:
    """The result of one call of `initialize`. Its references to models and optimizers are weak."""

    policy: Policy
    scalers: list[LossScaler]
    dialect: Dialect
    models: list[weakref.ref[nn.Module]]
    optimizers: list[weakref.ref[Any]]

    def alive(self) -> bool:
        return any(ref() is not None for ref in (*self.models, *self.optimizers))

    def own_optimizers(self) -> list[Any]:
        """Return the optimizers that still exist and are in no later training."""
        alive = [optimizer for ref in self.optimizers if (optimizer := ref()) is not None]
        return [o for o in alive if (stash := stash_of(o)) is not None and stash.scalers is self.scalers]


# Oldest first. `restore` undoes all; `state_dict` without arguments saves the last one's loss scales.
trainings: list[Training] = []
# Whether `initialize(enabled=False)` was called. If so, `load_state_dict` without a training does nothing.
_disabled = False


class Setup(NamedTuple):
    """What `begin_training` does beside the policy: the modules that stay FP32, and arguments of `initialize`."""

    kept: list[nn.Module]
    methods: tuple[str, ...]
    process_group: Any


def begin_training(
    dialect: Dialect,
    policy: Policy,
    models: list[nn.Module],
    targets: list[Any],
    num_losses: int,
    verbosity: int,
    setup: Setup,
) -> Training:
    """Make and enter a training of models and innermost optimizers that are checked and in no other training."""
    scalers = [dialect.scaler.of(policy, loss_id=loss_id, verbosity=verbosity) for loss_id in range(num_losses)]
    trainings[:] = [training for training in trainings if training.alive()]
    shared = Siblings(targets, models)
    shared.process_group = setup.process_group
    training = Training(policy, scalers, dialect, shared.models, list(shared))
    trainings.append(training)
    try:
        enter(training, shared, models, targets, setup)
        observers.tell("training_begun", training)
    except BaseException:
        Attempts()(leave, models, targets)  # without `Attempts`, an error of `leave` would hide the first error
        trainings.remove(training)
        raise
    return training


def all_optimizers() -> list[Any]:
    """Return the optimizers of all trainings."""
    return [optimizer for training in trainings for optimizer in training.own_optimizers()]


def training_of(optimizer: Optimizer) -> Training | None:
    """Return the training of `optimizer`; None if it is in no training, or is a copy of one that is."""
    return next((t for t in trainings if any(optimizer is own for own in t.own_optimizers())), None)


def leave_all(trainings: list[Training]) -> None:
    """Call `leave` for each of `trainings`, the last one first, with its models and optimizers that still exist."""
    attempt = Attempts()
    for training in reversed(trainings):
        models = [model for ref in training.models if (model := ref()) is not None]
        optimizers = [optimizer for ref in training.optimizers if (optimizer := ref()) is not None]
        attempt(leave, models, optimizers)
    attempt.finish()


def check_arguments(
    models: list[nn.Module],
    targets: list[Any],
    policy: Policy,
    keep_fp32: Any,
    methods: tuple[str, ...],
    dialect: Dialect,
    process_group: Any,
) -> list[nn.Module]:
    """Raise if `initialize` cannot take `models` and `targets`, its optimizers; return the modules that stay FP32."""
    if not models:
        raise ValueError(
            "initialize: models is empty (None, or a list without a model); wanted a torch.nn.Module or a list of "
            "them, before the optimizers: initialize(model, optimizer)"
        )
    for model in models:
        model_tensors.check_model(model, methods)
    for target in targets:
        optimizer_side.check_optimizer(target, policy)
    if any(one is other for one, other in itertools.combinations(targets, 2)):
        raise ValueError("initialize: an optimizer is in optimizers twice; give each once")
    model_tensors.check_methods(models, methods)
    if dialect.takes_any_type:
        known = [known for training in trainings for ref in training.models if (known := ref()) is not None]
        earlier = [model for model in known if model_forward.policy_of(model) is not None]  # without restored models
        # A copied model is in no training, but its state tells which of its parameters came in low precision.
        earlier += [m for model in models for m in model.modules() if followed_policy(m) is not None]
        incoming.arrive(models, {p for known in earlier for p in known.parameters()})
    kept = kept_modules(models, policy, keep_fp32, low_tables=any(map(incoming.came_low, models)))
    stays = {p for module in kept for p in module.parameters()}
    for model in models:
        if model_forward.policy_of(model) is None and not dialect.models_may_be_low_precision:
            model_tensors.check_types(model, policy, kept, takes_any=dialect.takes_any_type)
        if dialect.takes_any_type:
            incoming.check(model, policy, stays)
        model_tensors.check_steps(model, policy)
    retyped = {p for model in models for p in model_tensors.not_cast_to(model, kept, policy)}
    joints.tell(joints.check_models, models, policy, kept, retyped, process_group)
    return kept


def leave_earlier(models: list[nn.Module], targets: list[Any], kept: list[nn.Module], policy: Policy) -> None:
    """Undo earlier calls of `initialize` for `models` and `targets`, except casts that `policy` would make again."""
    again = [model for model in models if model_forward.policy_of(model) is not None]
    recast = [
        model for model in again if model_forward.is_copy(model) or model_tensors.not_cast_to(model, kept, policy)
    ]
    if recast:
        params = {p for model in recast for p in model.parameters()}
        holders = [o for o in all_optimizers() if not params.isdisjoint(known_stash(o).masters.links.params)]
        leave(recast, holders, give_back=False)
    for model in again if policy.keep_buffers_fp32 else ():
        model_buffers.uncast(model)
    for target in targets:
        if stash_of(target) is not None:
            optimizer_side.restore(target, recast_state=False)
    _supersede([param for target in targets for group in target.param_groups for param in group["params"]])
    if not policy.master_weights:  # without this, weights that stay cast keep masters that no optimizer steps
        left = links_of(dict.fromkeys(param for model in again for param in model.parameters()))
        settle(left)
        for param, _ in left:
            disconnect(param)


def _supersede(params: list[Tensor], new: Any = None) -> None:
    """Take the masters of `params` out of the tables of earlier optimizers, alive or freed; `new` keeps its own."""
    records = links_of(dict.fromkeys(params)).records
    for record in records:
        take_out_of_tables(record)
    for optimizer in all_optimizers():
        if optimizer is not new:
            known_stash(optimizer).masters.release(records)


def _supersede_by_group(optimizer: Optimizer, stash: Stash) -> None:
    """Call `_supersede` for the newest group, without parameters that siblings of `optimizer` hold."""
    others = [known.masters.of_groups(o.param_groups).params for o, known in siblings(stash) if o is not optimizer]
    held = {param for params in others for param in params}
    _supersede([param for param in optimizer.param_groups[-1]["params"] if param not in held], optimizer)


joints.group_gets_masters.append(_supersede_by_group)


def enter(training: Training, shared: Siblings, models: list[nn.Module], targets: list[Any], setup: Setup) -> None:
    """Put models and optimizers into `training`: classes, stashes, masters and casts; then patch torch."""
    policy, kept = training.policy, setup.kept
    retyped = _widen(models, kept, policy)
    low = policy.cast_model_type
    params, buffers = model_tensors.to_cast(models, kept, policy) if low is not None else ([], [])
    about_to_be_cast = set(params)
    held = [{p for group in target.param_groups for p in group["params"]} for target in targets]
    owned = set[Tensor]().union(*held)
    everything = dict.fromkeys(p for model in models for p in model.parameters())
    for form in training.scalers[0].beside.values():
        form.number(everything)
    shared.unowned = [p for p in everything if p not in owned and p.requires_grad]
    sharded = [(module, set(module.parameters())) for module in fsdp.fsdp_modules(models)]
    for target, own in zip(targets, held, strict=True):
        # Also FSDP modules without a parameter in any optimizer: user code may add their parameters to this optimizer.
        around = [weakref.ref(module) for module, inside in sharded if own & inside or not owned & inside]
        neighbours = Neighbours(siblings=shared, sharded=around)
        stash = training.dialect.stash(policy, training.scalers, neighbours=neighbours)
        optimizer_side.enter_training(target, stash, about_to_be_cast, training.dialect.optimizer)
    if len(targets) > 1:
        note_sharing(known_stash(targets[0]))
    if policy.changes_nothing:
        untouched.enter_training(models, policy, setup.methods)
    else:
        entry = Entry(policy, kept, buffers, training.dialect.takes_infinite_inputs)
        model_forward.enter_training(models, entry, setup.methods, on_demand=not targets)
    if policy.cast_model_type is not None:
        model_tensors.cast(params, policy.cast_model_type)
        for target in targets:
            known_stash(target).masters.keep(known_stash(target).master_form)
        model_buffers.cast(buffers, policy.cast_model_type)
    joints.tell(joints.retyped, about_to_be_cast | retyped)
    for model in models:
        model_tensors.reflatten(model)
    for target in targets:
        optimizer_side.state_follows_params(target)
    scales = any(scaler.scales for scaler in training.scalers)
    if targets and (policy.master_weights or scales):
        clipping.install()
    if policy.cast_model_type is not None:
        averages.install()
    if not policy.changes_nothing:
        part_loads.install()
    joints.tell(joints.enter_models, training, models, targets)
    dynamo.hook()
    emulate(policy)
    if policy.mixes_types:
        install.learn_rules()  # compiled code could not
    if policy.makes_low_tensors:
        install.install(policy.op_lists if policy.casts_calls else install.ALONE)
        model_forward.cast_held_functions(models)
    if policy.patch_torch_functions:
        casts_state.set_default(policy)
        fp32_copies.shield()
        untouched.shield()


def _widen(models: list[nn.Module], kept: list[nn.Module], policy: Policy) -> set[Tensor]:
    """Cast to FP32 the weights and buffers that came in low precision and that `policy` wants in FP32.

    Returns:
        The parameters that were cast.
    """
    widened = incoming.params_to_widen(models, kept, policy)
    model_tensors.cast(widened, torch.float32)
    incoming.widen_buffers(incoming.buffers_to_widen(models, kept, policy))
    for model in models if policy.changes_nothing else ():
        if not incoming.has_widened(model):
            incoming.give_buffers_back(model)  # an earlier training has cast them to FP32
    if widened and policy.patch_torch_functions and is_first_rank():
        logger.info(
            "initialize: %d trained weights that came in low precision are FP32 at %s, which takes %d bytes more; O5 "
            "leaves weights in BF16, and with master_weights='split' takes 2 bytes more for each",
            len(widened),
            policy.opt_level,
            2 * sum(param.numel() for param in widened),
        )
    return set(widened)


def mark_disabled(dialect: Dialect, targets: list[Any]) -> None:
    """Give each optimizer of `targets` a disabled stash, so that `scale_loss` accepts it and does nothing."""
    global _disabled
    _disabled = True
    for target in targets:
        if stash_of(target) is None:
            setattr(target, ATTRIBUTE, dialect.stash(OPT_LEVELS["O0"], []))
    observers.tell("training_begun", None)


def leave(models: list[nn.Module], targets: list[Any], *, give_back: bool = True) -> None:
    """Undo `initialize` for `models` and `targets`. Objects that are in no training are left alone.

    Args:
        models: models, each once.
        targets: innermost optimizers.
        give_back: cast weights back to the dtype that they had before `initialize`. If False, weights with FP32 values
            stay FP32, because another training continues with them.

    Raises:
        RuntimeError: an object cannot be restored. All others are restored before this error, which names it.
    """
    attempt = Attempts()
    types = {p: p.dtype for model in models for p in model.parameters()}
    steps: list[tuple[Callable[[Any], None], list[Any]]] = [
        (unscale_pending, targets),
        (functools.partial(model_forward.restore, give_back=give_back), models),
        (model_forward.give_back, models if give_back else []),
        (optimizer_side.restore, targets),
    ]
    for undo, subjects in steps:
        for subject in subjects:
            attempt(_by_name, undo, subject)
    attempt(joints.tell, joints.retyped, {p for p, dtype in types.items() if p.dtype is not dtype})
    attempt.finish()


def _by_name(undo: Callable[[Any], None], subject: Any) -> None:
    """Call `undo(subject)`; if it raises, name the subject in the error."""
    name = base_class(subject).__name__
    try:
        undo(subject)
    except Exception as error:
        if str(error).startswith("restore: "):
            raise
        raise RuntimeError(
            f"restore: this {name} could not be restored whole ({type(error).__name__}: {error}), everything else is; "
            "it was changed after initialize() in a way that restore() cannot undo: call restore() before that"
        ) from error


def forget() -> None:
    """Clear the list of trainings, and forget that `initialize(enabled=False)` was called."""
    global _disabled
    trainings.clear()
    _disabled = False


def newest_training() -> Training | None:
    """Return the training of the latest `initialize`; None if there is none."""
    return trainings[-1] if trainings else None


def scalers_of(optimizers: Any, caller: str) -> list[LossScaler]:
    """Return the loss scalers of the training of `optimizers`; if it is None, the newest training's.

    Raises:
        RuntimeError: `load_state_dict` before the first `initialize`, which would overwrite the loaded scale.
        ValueError: the optimizers belong to several trainings.
    """
    if optimizers is None:
        training = newest_training()
        if training is None and caller == "load_state_dict" and not _disabled:
            raise RuntimeError(
                "load_state_dict: there is no training to load into, and a later initialize() starts with a loss scale "
                "of its own; call amp.initialize(...) first, then amp.load_state_dict(state)"
            )
        return [] if training is None else training.scalers
    stashes = [stash for target in targets_of(optimizers, caller) if (stash := known_stash(target)).enabled]
    found = {id(stash.scalers): stash.scalers for stash in stashes}
    if len(found) > 1:
        raise ValueError(
            f"{caller}: these optimizers belong to {len(found)} trainings, whose loss scales are saved and loaded "
            f"apart; call {caller} for the optimizers of one initialize() call at a time"
        )
    return next(iter(found.values()), [])
