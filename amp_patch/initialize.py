"""The public calls: initialize, scale_loss, master_params, state_dict, restore. This file composes the others."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import optimizer as optimizer_side
from amp_patch import replicas
from amp_patch.backward import ScaledBackward
from amp_patch.casts import dynamo, install, regions
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_fp16 import settle
from amp_patch.explain import at_next_forward
from amp_patch.masters import clipping, masters
from amp_patch.masters.masters import linked, master_of, reconcile
from amp_patch.model import averages, fast_path, fsdp, shielded_copies
from amp_patch.model import forward as model_forward
from amp_patch.model import state as model_state
from amp_patch.model import tensors as model_tensors
from amp_patch.model.keep_fp32 import kept_modules
from amp_patch.optimizer import AmpOptimizer, Stash
from amp_patch.override import overridden
from amp_patch.policy import OPT_LEVELS, Policy, resolve, scale_number
from amp_patch.scaler import LossScaler
from amp_patch.support import blocks, compiled
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Attempts

logger = logging.getLogger("amp_patch")


@dataclass(frozen=True)
class Dialect:
    """Whose names the objects of a training answer to, beside ours; the drop-in for Apex has subclasses of its own.

    Attributes:
        scaler: made once per loss, by its `of`.
        stash: `optimizer._amp_stash`.
        optimizer: what `initialize` adds to an optimizer's class.
        models_may_be_low_precision: take models whose parameters are float16 or bfloat16 already.
    """

    scaler: type[LossScaler] = LossScaler
    stash: type[Stash] = Stash
    optimizer: type[AmpOptimizer] = AmpOptimizer
    models_may_be_low_precision: bool = False


@dataclass
class Training:
    """What one call of `initialize` made. Models and optimizers are held weakly: a training keeps nothing alive."""

    policy: Policy
    scalers: list[LossScaler]
    dialect: Dialect
    models: list[weakref.ref[nn.Module]]
    optimizers: list[weakref.ref[Any]]

    def alive(self) -> bool:
        return any(ref() is not None for ref in (*self.models, *self.optimizers))


# Oldest first. `restore` undoes all; `state_dict` without arguments speaks of the last.
_trainings: list[Training] = []


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
    keep_fp32: Any = (),
    allow_banned: bool = False,
    cpu_fp16: str = "auto",
    process_group: Any = None,
    methods: tuple[str, ...] = (),
) -> Any:
    """Prepare models and optimizers for mixed-precision training at an opt level, in place.

    Call it after the model is on its device and before it is wrapped (DataParallel, DDP). It may be called any number
    of times: each call makes a training with its own policy and loss scalers. A model given again keeps the values of
    its masters; at another level it is cast anew, and its earlier optimizers must be given again too.

    A model for torch's `fully_shard` (FSDP2) is sharded first, with `mp_policy=amp.fsdp_policy(opt_level)`, then its
    optimizer is made, then this is called. At O2 its FP32 shards are the masters; O3 is refused.

    The environment has the last word, so that a script can be tried at another level without an edit:
    ``AMP_PATCH_OPT_LEVEL`` ("O0" to "O5") takes the place of `opt_level`, ``AMP_PATCH_DTYPE`` ("float16", "bfloat16")
    that of `dtype` at O1, O2 and O3. By it O0 is the plain FP32 script, whatever else is passed here; at another level
    the options that contradict it are dropped, and the log says which. Both are read at each call; `enabled=False`
    stays off.

    Args:
        models: a module, or a list or tuple of them (a module and its child may both be in it). FP32.
        optimizers: an optimizer, a list or tuple, or None (inference: no masters). Objects with `param_groups` and
            `step` are accepted, and wrappers with an `.optim`, `.optimizer` or `.base_optimizer` (SAM) inside.
            Parameters that belong to none of the models are left as they are, and get masters at O2 if they are float16
            or bfloat16.
        enabled: False makes this call and every `scale_loss` of these optimizers a no-op.
        opt_level: "O0" FP32; "O1" casts around torch's functions; "O2" low-precision model, FP32 masters; "O3"
            low-precision model alone; "O4", "O5": O1, O2 in bfloat16.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale: override what the
            level sets; None keeps it. Strings ("True", "dynamic", "128.0") are understood.
        cast_model_outputs: dtype of the models' floating outputs. None: FP32 for a cast model, else untouched.
        num_losses: how many losses have a scale of their own; `scale_loss(loss_id=...)` chooses.
        verbosity: 0 silences the messages about overflow (logger "amp_patch"; only rank 0 speaks). 2: the next forward
            of each model prints what ran in which type, and why, to stdout (`explain`).
        min_loss_scale, max_loss_scale: range of a dynamic scale. Defaults 2**-24 and 2**24.
        dtype: torch.float16 (default; bfloat16 at O4 and O5) or torch.bfloat16, whose loss scale is 1 unless given.
        keep_fp32: modules that stay FP32 at any level, with their children: qualified names, classes, or a predicate
            over (name, module); one or several. Such a module is given FP32; in a cast model (O2, O3) it returns the
            dtype that came in. So does, by itself, each module in a cast model that has FP32 buffers and no parameters.
        allow_banned: run functions without a safe low-precision form (binary_cross_entropy) in FP32 under O1's casts
            instead of refusing them.
        cpu_fp16: how FP16 tensors on a CPU are multiplied. "emulate": GEMMs, convolutions, attention and recurrent
            networks compute in FP32 and round their results to FP16 once, forward and backward, inside the models'
            forward and the body of `scale_loss`: what a tensor core does, at FP32's speed. "native": torch's half
            kernels, much slower where the CPU has no FP16 arithmetic. "auto": "emulate" there, else "native"
            (`python -m amp_patch info` tells). Without effect for bfloat16, and for models with nothing on a CPU.
        process_group: reduce the overflow flag over this torch.distributed group, for gradients that DDP does not.
        methods: names of methods, beside `forward`, that users call on the models directly ("encode", "generate").

    Returns:
        The same objects, in Apex's form: the model, or (model, optimizer) if optimizers were given; lists for lists.

    Raises:
        ValueError, TypeError: an argument that cannot be honoured; nothing was changed then.
    """
    if not isinstance(enabled, bool | int):
        raise TypeError(
            f"initialize: enabled is {enabled!r}; the third positional argument is `enabled`, so name the level: "
            "opt_level='O1'"
        )
    policy = None
    if enabled:
        opt_level, options = overridden(
            opt_level,
            {
                "dtype": dtype,
                "cast_model_type": cast_model_type,
                "patch_torch_functions": patch_torch_functions,
                "keep_batchnorm_fp32": keep_batchnorm_fp32,
                "master_weights": master_weights,
                "loss_scale": loss_scale,
                "cast_model_outputs": cast_model_outputs,
                "min_loss_scale": min_loss_scale,
                "max_loss_scale": max_loss_scale,
                "allow_banned": allow_banned,
                "cpu_fp16": cpu_fp16,
            },
        )
        policy = resolve(opt_level, **options)
    result = initialize_as(
        Dialect(), models, optimizers, policy, num_losses, verbosity, keep_fp32, process_group, methods
    )
    if (training := newest_training()) is not None and enabled and is_first_rank():
        logger.info("amp_patch: %s", training.policy)
    return result


def initialize_as(
    dialect: Dialect,
    models: Any,
    optimizers: Any,
    policy: Policy | None,
    num_losses: int = 1,
    verbosity: int = 1,
    keep_fp32: Any = (),
    process_group: Any = None,
    methods: tuple[str, ...] = (),
) -> Any:
    """`initialize` in a dialect, at a resolved policy; None is `enabled=False`."""
    model_list, optimizer_list = [compiled.uncompiled(model) for model in _as_list(models)], _as_list(optimizers)
    for module in fsdp.fsdp_modules(m for m in model_list if isinstance(m, nn.Module)):
        module.reshard()  # after a forward its parameters may be the gathered ones, which no optimizer holds
    targets = [optimizer_side.innermost(optimizer) for optimizer in optimizer_list]
    if policy is None:
        _leave_alone(dialect, targets)
        return _apex_form(models, optimizers, optimizer_list)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"initialize: num_losses is {num_losses!r}; wanted a positive integer")
    kept = _check(model_list, targets, policy, keep_fp32, methods, dialect, process_group)
    policy = settle(policy, on_cpu=model_tensors.use_cpu(model_list))

    _leave_earlier_trainings(model_list, targets, kept, policy)
    begin_training(
        dialect,
        policy,
        model_list,
        targets,
        num_losses,
        verbosity=int(verbosity),
        kept=kept,
        methods=tuple(methods),
        process_group=process_group,
    )
    for optimizer in optimizer_list:
        optimizer_side.enter_wrappers(optimizer)
    if int(verbosity) > 1:
        for model in model_list:
            at_next_forward(model)
    return _apex_form(models, optimizers, optimizer_list)


def begin_training(
    dialect: Dialect,
    policy: Policy,
    models: list[nn.Module],
    targets: list[Any],
    num_losses: int,
    *,
    verbosity: int,
    kept: list[nn.Module] | None = None,
    methods: tuple[str, ...] = (),
    process_group: Any = None,
) -> Training:
    """Make a training of checked models and innermost optimizers, none of which is in another one."""
    scalers = [dialect.scaler.of(policy, loss_id=loss_id, verbosity=verbosity) for loss_id in range(num_losses)]
    _trainings[:] = [training for training in _trainings if training.alive()]
    training = Training(policy, scalers, dialect, [weakref.ref(m) for m in models], [weakref.ref(t) for t in targets])
    _trainings.append(training)
    try:
        _enter(training, models, targets, kept or [], methods, process_group)
    except BaseException:
        Attempts()(leave, models, targets)  # the error to tell of is the one that came first
        _trainings.remove(training)
        raise
    return training


@compiled.eager_only
@blocks.block
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Generator[Tensor, None, None]:
    """Scale the loss for backward, and leave unscaled FP32 gradients for the optimizers.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    Inside the body the model's gradients are the raw scaled ones of this backward, and of delayed ones before it. On
    exit the masters' gradients are unscaled (FP32; added to what earlier exits left, which was away meanwhile and is
    not checked again), the model's low-precision ones become None, and what overflowed is recorded on the device;
    nothing here waits for the device. `optimizer.step()` then skips on overflow, which costs one sync; or
    none with an optimizer that skips on the device itself: torch's `fused=True`, FusedSGD, FusedAdam(capturable=True).

    Args:
        loss: a floating tensor, any shape.
        optimizers: the optimizer, or a list of those, whose gradients this backward makes.
        loss_id: which scale, below `initialize(num_losses=...)`.
        model: unused; Apex has it.
        delay_unscale: leave the gradients scaled where they are, for the next micro-batch to add to. The last
            micro-batch of an iteration has it False. (A step with gradients still scaled unscales them itself.)
            Implied for a model that is cast, or whose loss is scaled, where its forward ran under
            DistributedDataParallel's `no_sync()`: DDP reduces the model's gradients, so their sum stays there until the
            backward that does so, and all processes see an overflow at once. And where fully_shard holds gradients
            back (`set_requires_gradient_sync(False)`).
        delay_overflow_check: unscale, but leave moving the scale to a later exit of this `loss_id`. The optimizer
            skips all the same if it overflowed.

    Yields:
        The loss times the scale, FP32 (FP64 for an FP64 loss); `loss` itself where the level does not scale.

    Raises:
        RuntimeError: an optimizer that `initialize` never saw; or, from `optimizer.step()` in the body, that it belongs
            after it. (At O0 and O4 an optimizer may step there, in a hook of backward too.)
        TypeError, ValueError: a loss or loss_id that cannot be. Gradients are untouched then.

    An exception in the body leaves no scaled gradient behind, and the scale and earlier gradients as they were. To
    clear gradients inside the body call `zero_grad()` of the optimizer or of the model given to `initialize`.
    """
    targets = _targets(optimizers)
    stashes = [target._amp_stash for target in targets]
    targets = [target for target in targets if target._amp_stash.enabled]
    if not targets:
        yield loss
        return
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        came = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(f"scale_loss: loss is {came}; wanted a floating-point tensor")
    stash = next(stash for stash in stashes if stash.enabled)
    model_state.refuse_sharded_since((ref() for stash in stashes for ref in stash.models), "scale_loss")
    scaler = _scaler(stash, loss_id).to(loss.device)

    with ScaledBackward(targets, scaler, scaler.scales) as backward:
        with regions.everywhere(stash.policy):
            yield backward.scaled(loss)
        backward.now.local = any(map(_gradients_stay_local, targets))
        delay_unscale = backward.must_delay() or delay_unscale or backward.now.local
        if delay_unscale:
            backward.delay()
        else:
            backward.finish()
    if not (delay_unscale or delay_overflow_check):
        scaler.update()


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that the optimizer updates: masters where it has them, else the model's own parameters."""
    for group in optimizer_side.innermost(optimizer).param_groups:
        yield from group["params"]


def loss_scale(optimizers: Any, loss_id: int = 0) -> Tensor:
    """What `scale_loss(loss, optimizers, loss_id)` multiplies by now, for gradients of `torch.autograd.grad`::

        scale = amp.loss_scale(optimizer)
        scaled = torch.autograd.grad(loss * scale, inputs, create_graph=True)
        grads = [grad.float() / scale for grad in scaled]

    `scale_loss` unscales `.grad` alone. Without the scale small FP16 gradients vanish on their way; gradients that
    overflowed stay infinite, and a loss made of them skips its step as ever.

    Args:
        optimizers: the optimizer, or a list of those, of the loss.
        loss_id: which scale, below `initialize(num_losses=...)`.

    Returns:
        FP32, shape [], on the device of the newest loss (the CPU before the first); a copy, which does not move with
        the scale. 1 where the level does not scale. Does not sync.

    Raises:
        RuntimeError: an optimizer that `initialize` never saw. ValueError: a loss_id that cannot be.
    """
    stashes = [target._amp_stash for target in _targets(optimizers, "loss_scale")]
    stash = next((stash for stash in stashes if stash.enabled), None)
    return torch.ones(()) if stash is None else _scaler(stash, loss_id, "loss_scale").scale_tensor.clone()


def state_dict(optimizers: Any = None, *, destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales of the training that these optimizers belong to, in Apex's form. Syncs with the device.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; written into `destination` if given.

    Args:
        optimizers: the optimizer, or a list of those, of one `initialize` call. None: of the newest call, as in Apex.
            A dict is Apex's `destination`.

    Raises:
        RuntimeError: an optimizer that `initialize` never saw. ValueError: optimizers of several trainings.
    """
    if isinstance(optimizers, dict):
        optimizers, destination = None, optimizers
    state = {} if destination is None else destination
    for index, scaler in enumerate(_scalers_of(optimizers, "state_dict")):
        state[f"loss_scaler{index}"] = scaler.state_dict()
    return state


def load_state_dict(state_dict: dict[str, Any], optimizers: Any = None) -> None:
    """Load what `state_dict` gave, into the loss scalers of the training that these optimizers belong to.

    Another number of scalers is accepted, as in Apex: those that both have are loaded.

    Args:
        state_dict: the state.
        optimizers: as for `state_dict`. None: the newest `initialize`, as in Apex.

    Raises:
        RuntimeError: a key that is no loss scaler's, an optimizer that `initialize` never saw; ValueError: a scale that
            cannot be, optimizers of several trainings. Nothing is loaded then.
    """
    unexpected = [key for key in state_dict if not (key.startswith("loss_scaler") and key[11:].isdigit())]
    if unexpected:
        raise RuntimeError(
            f"load_state_dict: unexpected keys {', '.join(map(repr, unexpected))}; wanted what amp.state_dict() gave: "
            "'loss_scaler0', 'loss_scaler1', ..."
        )
    scalers = _scalers_of(optimizers, "load_state_dict")
    if len(scalers) != len(state_dict):
        logger.warning("load_state_dict: %d loss scalers in the state, %d here", len(state_dict), len(scalers))
    chosen = [(s, state_dict[f"loss_scaler{i}"]) for i, s in enumerate(scalers) if f"loss_scaler{i}" in state_dict]
    for _, entry in chosen:
        if not {"loss_scale", "unskipped"} <= set(entry):
            raise RuntimeError(f"load_state_dict: a loss scaler has {sorted(entry)}; wanted loss_scale and unskipped")
        scale_number("load_state_dict: loss_scale", entry["loss_scale"])
    for scaler, entry in chosen:
        scaler.load_state_dict(entry)


def fp32_copy(model: nn.Module) -> nn.Module:
    """An FP32 deep copy of `model`, without any trace of amp_patch, for EMA, export or evaluation.

    Weights are the masters' exact values where there are masters, else the low-precision ones upcast; buffers those
    from before the cast, where nothing wrote them since.

    The casts of an O1 or O4 training, which hold for all that is called outside of models, do not reach the copy: it
    and its parts (torch's own layers inside it aside, called by themselves) run, trace and export in FP32. As long as
    such a training lives they have generated classes for that, as trained models have; copies by `deepcopy` too.
    Pickles are of the plain classes always. What the caller enters around the copy, `amp.autocast` or a model's
    forward, acts in it as in any module.
    """
    reconcile(linked(set(model.parameters())))
    plain = copy.deepcopy(model)
    model_forward.to_plain_fp32(plain)
    with torch.no_grad():
        for copied, param in zip(plain.parameters(), model.parameters(), strict=True):
            master = master_of(param)
            if master is not None:
                copied.copy_(master)
    shielded_copies.note(plain, shielded=casts_state.default() is not None)
    return plain


def restore() -> None:
    """Undo every `initialize`: torch's namespace, the models' and optimizers' classes, hooks and parameters.

    Weights are FP32 again and equal the masters; optimizers hold the models' parameters, with their state. Gradients
    that were still scaled (`delay_unscale`) are unscaled.

    Raises:
        RuntimeError: a model or optimizer that was changed meanwhile so that it cannot be restored whole, by name. All
            others are, torch is, and no training is left: a second call does nothing.
    """
    attempt = Attempts()
    attempt(_leave_all, _trainings)
    _trainings.clear()
    attempt(casts_state.set_default, None)
    for room in (install, clipping, replicas, masters, averages):
        attempt(room.uninstall)
    attempt(fast_path.allow_fast_path)
    attempt(shielded_copies.unshield)
    attempt.finish()


@contextmanager
def restored() -> Iterator[None]:
    """Undo every `initialize` of the body when that ends, and leave the trainings from before it as they are."""
    before, default = [training for training in _trainings if training.alive()], casts_state.default()
    try:
        yield
    finally:
        attempt = Attempts()
        attempt(_leave_all, [made for made in _trainings if all(made is not known for known in before)])
        _trainings[:] = before
        if before:  # these need torch's namespace as it is
            casts_state.set_default(default)
        else:
            attempt(restore)
        attempt.finish()


def _leave_all(trainings: list[Training]) -> None:
    """`leave` what is alive of these, last first."""
    attempt = Attempts()
    for training in reversed(trainings):
        models = [model for ref in training.models if (model := ref()) is not None]
        optimizers = [optimizer for ref in training.optimizers if (optimizer := ref()) is not None]
        attempt(leave, models, optimizers)
    attempt.finish()


def _check(
    models: list[nn.Module],
    targets: list[Any],
    policy: Policy,
    keep_fp32: Any,
    methods: tuple[str, ...],
    dialect: Dialect,
    process_group: Any,
) -> list[nn.Module]:
    """Validate everything that can be wrong with models and optimizers; returns the modules that stay FP32."""
    if not models:
        raise ValueError("initialize: models is empty; wanted a torch.nn.Module or a list of them")
    for model in models:
        model_tensors.check(model, methods)
    for target in targets:
        optimizer_side.check(target, policy)
    if len({id(target) for target in targets}) < len(targets):
        raise ValueError("initialize: an optimizer is in optimizers twice; give each once")
    model_tensors.check_methods(models, methods)
    kept = kept_modules(models, policy, keep_fp32)
    for model in models:
        if model_forward.policy_of(model) is None and not dialect.models_may_be_low_precision:
            model_tensors.check_fp32(model, policy, kept)
        model_tensors.check_steps(model, policy)
    fsdp.check(models, policy, kept)
    retyped = {id(p) for model in models for p in model_tensors.not_cast_to(model, kept, policy.cast_model_type)}
    replicas.check(models, retyped, policy, process_group)
    return kept


def _leave_earlier_trainings(
    models: list[nn.Module], targets: list[Any], kept: list[nn.Module], policy: Policy
) -> None:
    """Undo what earlier calls did to these objects, as far as this one wants it otherwise."""
    again = [model for model in models if model_forward.policy_of(model) is not None]
    recast = [model for model in again if model_tensors.not_cast_to(model, kept, policy.cast_model_type)]
    if recast:
        params = {id(p) for model in recast for p in model.parameters()}
        earlier = [o for t in _trainings for ref in t.optimizers if (o := ref()) is not None]
        initialized = (o for o in earlier if getattr(o, "_amp_stash", None) is not None)
        holders = [o for o in initialized if any(id(p) in params for p, _ in o._amp_stash.masters.linked())]
        leave(recast, list({id(o): o for o in holders}.values()))
    for target in targets:
        if getattr(target, "_amp_stash", None) is not None:
            optimizer_side.restore(target, recast_state=False)


def _enter(
    training: Training,
    models: list[nn.Module],
    targets: list[Any],
    kept: list[nn.Module],
    methods: tuple[str, ...],
    process_group: Any,
) -> None:
    policy = training.policy
    params, buffers = model_tensors.to_cast(models, kept) if policy.cast_model_type is not None else ([], [])
    about_to_be_cast = {id(p) for p in params}
    owned = {id(p) for target in targets for group in target.param_groups for p in group["params"]}
    everything = {id(p): p for model in models for p in model.parameters()}
    unowned: list[Tensor] = [p for key, p in everything.items() if key not in owned and p.requires_grad]
    sharded = [(module, {id(p) for p in module.parameters()}) for module in fsdp.fsdp_modules(models)]
    for target in targets:
        held = {id(p) for group in target.param_groups for p in group["params"]}
        stash = training.dialect.stash(
            policy,
            training.scalers,
            siblings=training.optimizers,
            unowned=unowned,
            process_group=process_group,
            # With those of no optimizer yet, whose parameters may be added to this one.
            sharded=[weakref.ref(module) for module, inside in sharded if held & inside or not owned & inside],
        )
        optimizer_side.name_parameters(stash, models)
        stash.models = [weakref.ref(m) for m in models if any(id(p) in held for p in m.parameters())]
        optimizer_side.enter_training(target, stash, about_to_be_cast, training.dialect.optimizer)
    if len(targets) > 1:
        optimizer_side.note_sharing(targets)
    model_forward.enter_training(models, kept, policy, methods, on_demand=not targets)
    if policy.cast_model_type is not None:
        model_tensors.cast(params, policy.cast_model_type)
        model_forward.cast_buffers(models, buffers, policy.cast_model_type)
    for model in models:
        model_tensors.reflatten(model)
    for target in targets:
        optimizer_side.state_follows_params(target)
        optimizer_side.warn_of_small_eps(target)
    if policy.master_weights and targets:
        clipping.install()
    if targets and (policy.master_weights or policy.scales_loss):
        replicas.follow(models, training.scalers)
    if policy.cast_model_type is not None:
        averages.install(fp32_copy)
    dynamo.hook()
    if policy.patch_torch_functions or policy.emulates:
        install.install(policy.op_lists)
    if policy.patch_torch_functions:
        casts_state.set_default(policy)
        shielded_copies.shield()


def _leave_alone(dialect: Dialect, targets: list[Any]) -> None:
    """Let `scale_loss` know these optimizers as ones that it does nothing for."""
    for target in targets:
        if getattr(target, "_amp_stash", None) is None:
            target._amp_stash = dialect.stash(OPT_LEVELS["O0"], [], enabled=False)


def leave(models: list[nn.Module], targets: list[Any]) -> None:
    """Undo `initialize` for these models and innermost optimizers; what went through none is passed over.

    Raises:
        RuntimeError: one that cannot be restored, by name, when all others are.
    """
    attempt = Attempts()
    steps = ((optimizer_side.settle, targets), (model_forward.restore, models), (optimizer_side.restore, targets))
    for undo, subjects in steps:
        for subject in subjects:
            attempt(_by_name, undo, subject)
    attempt.finish()


def _by_name(undo: Callable[[Any], None], subject: Any) -> None:
    """`undo(subject)`, whose errors all say what could not be restored."""
    name = base_class(subject).__name__
    try:
        undo(subject)
    except Exception as error:
        if str(error).startswith("restore: "):
            raise
        raise RuntimeError(
            f"restore: this {name} could not be restored whole ({type(error).__name__}: {error}), everything else is; "
            "it was changed after initialize() in a way from which none is known back: call restore() first"
        ) from error


def _targets(optimizers: Any, caller: str = "scale_loss") -> list[Any]:
    """The innermost optimizers, each once."""
    targets = {id(t): t for t in map(optimizer_side.innermost, _as_list(optimizers))}
    if not targets:
        raise TypeError(f"{caller}: optimizers is empty; wanted the optimizer, or a list of those, of this loss")
    for target in targets.values():
        if getattr(target, "_amp_stash", None) is None:
            raise RuntimeError(
                f"{caller}: this {type(target).__name__} never went through initialize(); call "
                "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` first"
            )
    for optimizer in _as_list(optimizers):
        if id(optimizer) not in targets:  # `initialize` may have been given the one inside
            optimizer_side.enter_wrappers(optimizer)
    return list(targets.values())


def _gradients_stay_local(optimizer: Any) -> bool:
    """Whether the gradients of the last backward wait for a later one to be reduced: `no_sync()`."""
    models = [model for ref in optimizer._amp_stash.models if (model := ref()) is not None]
    return any(map(model_forward.gradients_stay_local, models))


def _scaler(stash: Stash, loss_id: int, caller: str = "scale_loss") -> LossScaler:
    count = len(stash.scalers)
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < count:
        raise ValueError(
            f"{caller}: loss_id is {loss_id!r}; initialize(num_losses={count}) made 0 to {count - 1}, so raise it"
        )
    return stash.scalers[loss_id]


def newest_training() -> Training | None:
    """What the latest `initialize` made."""
    return _trainings[-1] if _trainings else None


def _scalers_of(optimizers: Any, caller: str) -> list[LossScaler]:
    """The loss scalers of the optimizers' training; of the newest one without any."""
    if optimizers is None:
        return [] if (training := newest_training()) is None else training.scalers
    stashes = [stash for target in _targets(optimizers, caller) if (stash := target._amp_stash).enabled]
    found = {id(stash.scalers): stash.scalers for stash in stashes}
    if len(found) > 1:
        raise ValueError(
            f"{caller}: these optimizers belong to {len(found)} trainings, whose loss scales are saved and loaded "
            f"apart; call {caller} for the optimizers of one initialize() call at a time"
        )
    return next(iter(found.values()), [])


def _as_list(one_or_many: Any) -> list[Any]:
    if one_or_many is None:
        return []
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]


def _apex_form(models: Any, optimizers: Any, optimizer_list: list[Any]) -> Any:
    model = list(models) if isinstance(models, list | tuple) else models
    if optimizers is None:
        return model
    return model, optimizer_list if isinstance(optimizers, list | tuple) else optimizers
