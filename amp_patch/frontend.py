"""The public calls: initialize, master_params, state_dict, load_state_dict, restore."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from amp_patch import guests
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_half import resolve_cpu_half
from amp_patch.environment import overridden, with_asked_methods, with_asked_modules
from amp_patch.model import incoming, ranges
from amp_patch.model import tensors as model_tensors
from amp_patch.model.keep_fp32 import KeepFP32, ParamRule, with_mixed_types
from amp_patch.policy import Closed, CpuHalf, Flag, LowName, Options, Policy, ProductFormat, State, resolve
from amp_patch.support import compiled, fsdp
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.patches import Attempts, installations
from amp_patch.support.words import names_arguments
from amp_patch.training import joints
from amp_patch.training.arguments import Else, Keywords, Level, M, Optimizers, S, Steps
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.scale_loss import groups_of
from amp_patch.training.training import (
    Dialect,
    Setup,
    begin_training,
    check_arguments,
    forget,
    leave_all,
    leave_earlier,
    mark_disabled,
    newest_training,
    scalers_of,
    trainings,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("amp_patch")
guests.enter()


# Only two overloads: for one wrong keyword mypy prints all overloads, a page of arguments each.
@overload
def initialize(
    models: M,
    optimizers: None = None,
    enabled: bool | Else = True,
    opt_level: Level | Else = "O1",
    **options: Unpack[Keywords],
) -> M: ...
@overload
def initialize(
    models: M,
    optimizers: S,
    enabled: bool | Else = True,
    opt_level: Level | Else = "O1",
    **options: Unpack[Keywords],
) -> tuple[M, S]: ...
@names_arguments
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: Level = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: Flag | None = None,
    keep_batchnorm_fp32: Flag | None = None,
    master_weights: Flag | Closed | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = None,
    *,
    dtype: torch.dtype | LowName | ProductFormat | str | None = None,
    keep_fp32: KeepFP32 | Iterable[KeepFP32] = (),
    keep_high: KeepFP32 | Iterable[KeepFP32] | None = None,
    allow_banned: bool | None = None,
    cpu_half: CpuHalf | None = None,
    process_group: Any = None,
    methods: tuple[str, ...] = (),
    skip_nonfinite: Flag | None = None,
    low_precision_norms: Flag | None = None,
    optimizer_state: State | None = None,
    saved_activations: State | None = None,
    master_device: Literal["cpu"] | None = None,
    fp32_state: ParamRule | Iterable[ParamRule] = (),
    gradient_release: Flag = False,
) -> Any:
    """Prepare models and optimizers for mixed-precision training at an opt level, in place::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    Call it after the model is on its device and before it is wrapped (DataParallel, DDP). Each call makes a training
    with its own policy and loss scalers, and any number of calls is allowed. A model that is passed again keeps the
    values of its masters. If it is passed at another level, it is cast again, and its earlier optimizers must be passed
    again too.

    For torch's `fully_shard` (FSDP2), first shard the model with `mp_policy=amp.fsdp_policy(opt_level)`, then make the
    optimizer, then call this. At O2 the FP32 shards are the masters; O3 is refused.

    Environment variables override arguments, so that a script runs at another level without an edit:
    ``AMP_PATCH_OPT_LEVEL`` ("O0" to "O7", "O5+split") and ``AMP_PATCH_DTYPE`` (at O1, O2, O3). They are read at each
    call, and do not override `enabled=False`. If they set O0, all other arguments here are ignored; if another level,
    options that contradict it are dropped and logged.

    Args:
        models: a module, or a list or tuple of them (a module and its child may both be in it). Parameters may be FP32,
            FP16 or BF16, also mixed: training begins with exactly these values. At O0 the types do not change. At O1
            and O4 trained weights become FP32. At O2 and O5 frozen weights have no master. Frozen quantized weights
            (FP8, integers, torchao's, bitsandbytes') are not changed; trained ones are refused.
        optimizers: an optimizer, a list or tuple, or None (inference: no masters). An object with `param_groups` and
            `step` is an optimizer; a wrapper may hold one as `.optim`, `.optimizer` or `.base_optimizer` (SAM).
            A parameter that is in no model is not cast; at O2 it gets a master if it is float16 or bfloat16.
        enabled: False makes this call and every `scale_loss` of these optimizers a no-op.
        opt_level: "O0" FP32; "O1" casts around torch's functions; "O2" low-precision model, FP32 masters; "O3"
            low-precision model without masters; "O4", "O5": O1, O2 in bfloat16; "O6", "O7": O4, O5 with products
            (`linear`, `matmul`, `bmm`; not convolutions or fused attention) in FP8 or FP4, emulated: this shows the
            numerical result, not the speed. Values of options may follow: "O5+split+8bit". A low-precision model casts
            its inputs: at first, infinite results raise ValueError and changed whole numbers warn; masks stay finite.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale: override the level's
            values; None keeps them, here and in all options below. Strings ("True", "dynamic", "128.0") are accepted.
            master_weights="split" stores only the 16 bits of each FP32 master that its bfloat16 weight does not hold: 2
            bytes per parameter instead of 4 (at O5, and at O2 in bfloat16; not for sharded parameters). Weights are
            then rounded to nearest with ties away from zero. "stochastic" stores no masters: each step reads the
            bfloat16 weight as FP32 and rounds the result stochastically, up with a probability in proportion to the
            distance (at the same levels; shards must be bfloat16). `state_dict` contains the seed.
        cast_model_outputs: dtype of the models' floating outputs. None: FP32 for a cast model, else unchanged.
        num_losses: the number of losses with their own scale; `scale_loss(loss_id=...)` selects one.
        verbosity: 0 silences messages about overflow (logger "amp_patch"; only rank 0 logs). Apex's 2 is 1:
            `explain` shows which calls run in which type.
        min_loss_scale, max_loss_scale: range of a dynamic scale. Defaults 2**-24 and 2**24.
        dtype: torch.float16 (default; bfloat16 at O4 and O5) or torch.bfloat16, whose loss scale is 1 by default; also
            by name ("bfloat16"). At O6 and O7 the format of products: "fp8" (default; E4M3, a scale for each row),
            "fp8_tensorwise" (one scale; gradients E5M2), "mxfp8" (blocks of 32, scales rounded up), "mxfp8_floor"
            (OCP's scales), "nvfp4" (blocks of 16; NVIDIA's recipe), "nvfp4_naive" (the format without the recipe).
        keep_fp32: modules that stay FP32 at any level, with their children: qualified names, classes, or a predicate
            over (name, module); one or several. Inputs of such a module are cast to FP32, outputs back in a cast model.
            There modules with FP32 buffers and no parameters are treated the same way. "buffers": all buffers of the
            model stay FP32, and calls that receive FP32 and low precision are cast as at O1.
        keep_high: modules whose products stay bfloat16 at O6 and O7, named as in `keep_fp32`. None: the first layer
            and the head of each model; only the head, if the first is an embedding or a convolution. (): none.
        allow_banned: run functions without a safe low-precision form (binary_cross_entropy) in FP32 under O1's casts
            instead of refusing them.
        cpu_half: how FP16 and BF16 tensors on a CPU are multiplied. "emulate": GEMMs, convolutions and attention
            compute in FP32 and round their results once, as a tensor core does, in the models' forward and in backward
            passes, at about FP32's speed. "native": torch's kernels, much slower if the CPU has no arithmetic for the
            type. "auto": "emulate" if the CPU has none; otherwise "native" with FP16's slow convolutions emulated
            (`python -m amp_patch info` prints the decision). Except with "native", gradients of low-precision
            layer norms, embeddings and `x[indices]` are summed in FP32 and rounded once. Without effect if no model is
            on a CPU.
        process_group: reduce the overflow flag over this torch.distributed group, for gradients that DDP does not
            reduce.
        methods: names of methods other than `forward` that users call on the models directly ("encode", "generate").
        skip_nonfinite: True checks gradients if the loss is not scaled (O0, O3, O4, O5): `scale_loss` checks them
            without a sync, and the optimizer skips its step, with a message, if one is NaN or infinite. The step
            syncs once. Closures and steps inside the body of `scale_loss` are refused, as under loss scaling. False:
            non-finite gradients reach the weights, unless the loss is scaled.
        low_precision_norms: True makes `layer_norm`, `rms_norm` and `group_norm` return the type of an FP16 or BF16
            input at O1 and O4 (refused elsewhere), and save this input for backward instead of an FP32 copy. On a CPU
            they compute in FP32 and round once; on other devices torch's kernels of the type run. False: they return
            FP32, as under torch.autocast.
        optimizer_state: "8bit" quantizes the optimizers' large FP32 state to 8 bits; reads of the state return FP32.
            Refused by name at O3, and for optimizers other than torch.optim's, FusedAdam and FusedSGD.
        saved_activations: "8bit" stores the floating tensors of 4,096 elements or more that autograd saves in the
            models' forwards as E4M3 codes with a scale for each 256 elements, and decodes them in backward (the idea of
            ActNN, 2021). At O1, O2, O4 and O5; refused under `fully_shard`. Parameters and statistics stay exact.
        master_device: "cpu" keeps masters and optimizer state in the host's memory, where the step runs: the device has
            low-precision weights and gradients alone. At O2 and O5 with whole masters; refused by name under
            `fully_shard`, ZeRO, CUDA graphs and closures. Without effect for a model on a CPU.
        fp32_state: parameters whose state stays FP32 under optimizer_state="8bit" (embeddings, heads): the parameters,
            their qualified names, or their modules, named as in `keep_fp32`.
        gradient_release: step each parameter during backward, with the same bits as a step afterwards, and free its
            gradient. At O4 and O5, for torch's optimizers and registered classes; refused if a step needs several
            gradients at once.

    Returns:
        The same objects, in Apex's form: the model, or (model, optimizer) if optimizers were passed; lists for lists.

    Raises:
        ValueError, TypeError: an argument that cannot be honored; nothing was changed then.
    """
    given = locals()
    if not isinstance(enabled, bool | int):
        raise TypeError(
            f"initialize: enabled is {enabled!r}; the third positional argument is `enabled`, so name the level: "
            "opt_level='O1'"
        )
    policy = None
    if enabled:
        named = not isinstance(fp32_state, list | tuple) or bool(fp32_state)
        opt_level, options = overridden(opt_level, Options.of(given | {"fp32_state": named}))
        policy = resolve(opt_level, options)
        given["fp32_state"] = fp32_state if options.fp32_state else ()
    others = keep_fp32, process_group, methods, given
    result = initialize_as(Dialect(), models, optimizers, policy, num_losses, verbosity, *others)
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
    given: dict[str, Any] | None = None,
) -> Any:
    """Do the work of `initialize` with a resolved policy (None: `enabled=False`) and the classes of `dialect`.

    `given` has the arguments of features (`joints.options`) by their names; without it these features are off.
    """
    model_list, optimizer_list = [compiled.uncompiled(model) for model in as_list(models)], as_list(optimizers)
    for module in fsdp.fsdp_modules(m for m in model_list if isinstance(m, nn.Module)):
        module.reshard()  # after a forward the module may hold gathered parameters, which are in no optimizer
    targets = [innermost(optimizer) for optimizer in optimizer_list]
    if policy is None:
        mark_disabled(dialect, targets)
        return _apex_form(models, optimizers)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"initialize: num_losses is {num_losses!r}; wanted a positive integer")
    given = dict(given or {})
    keep_fp32, given["keep_high"] = with_asked_modules(keep_fp32, given.get("keep_high"), model_list)
    kept = check_arguments(model_list, targets, policy, keep_fp32, methods, dialect, process_group)
    values = [(option, given.get(option.name)) for option in joints.options]
    checked = [(option, option.check(value, model_list, optimizer_list, targets, policy)) for option, value in values]
    methods = with_asked_methods(methods, model_list)
    policy = with_mixed_types(policy, keep_fp32, kept)
    ranges.check_models(model_list, kept, policy)
    policy = resolve_cpu_half(policy, on_cpu=model_tensors.use_cpu(model_list))
    leave_earlier(model_list, targets, kept, policy)
    setup = Setup(kept, tuple(methods), process_group)
    begin_training(dialect, policy, model_list, targets, num_losses, int(verbosity), setup)
    for optimizer in optimizer_list:
        joints.tell(joints.wrapped, optimizer)
    for option, value in checked:
        option.enter(targets, value)
    return _apex_form(models, optimizers)


def master_params(optimizer: Steps) -> Iterator[Tensor]:
    """Return the tensors that the optimizer updates: masters, and parameters without a master."""
    return (param for group in groups_of(optimizer, "master_params") for param in group["params"])


def state_dict(
    optimizers: Optimizers | dict[str, Any] | None = None, *, destination: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the loss scales of the training of these optimizers, in Apex's form. Syncs with the device.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; written into `destination` if it is passed. With
    `master_weights="stochastic"` the first entry also has "stochastic_rounding": the seed and the step counts of
    rounding.

    Args:
        optimizers: the optimizer, or a list of optimizers, of one `initialize` call. None: the newest call's, as in
            Apex. A dict is Apex's `destination`.

    Raises:
        RuntimeError: an optimizer that was not passed to `initialize`.
        ValueError: optimizers of several trainings.
    """
    if isinstance(optimizers, dict):
        optimizers, destination = None, optimizers
    state = {} if destination is None else destination
    for index, scaler in enumerate(scalers_of(optimizers, "state_dict")):
        state[f"loss_scaler{index}"] = scaler.state_dict()
    return state


def load_state_dict(state_dict: dict[str, Any], optimizers: Optimizers | None = None) -> None:
    """Load a result of `state_dict` into the loss scalers of the training of these optimizers.

    Another number of scalers is accepted, as in Apex: the scalers that both have are loaded.

    Args:
        optimizers: as for `state_dict`. None: the newest `initialize` call's, as in Apex.

    Raises:
        RuntimeError: a key of another form, an optimizer that was not passed to `initialize`, or no `initialize`
            before. Nothing is loaded then.
        ValueError: an invalid scale, or optimizers of several trainings. Nothing is loaded then.
    """
    unexpected = [key for key in state_dict if not (key.startswith("loss_scaler") and key[11:].isdigit())]
    if unexpected:
        raise RuntimeError(
            f"load_state_dict: unexpected keys {', '.join(map(repr, unexpected))}; wanted what amp.state_dict() gave: "
            "'loss_scaler0', 'loss_scaler1', ..."
        )
    scalers = scalers_of(optimizers, "load_state_dict")
    if len(scalers) != len(state_dict):
        logger.warning("load_state_dict: %d loss scalers in the state, %d here", len(state_dict), len(scalers))
    chosen = [(s, state_dict[f"loss_scaler{i}"]) for i, s in enumerate(scalers) if f"loss_scaler{i}" in state_dict]
    for scaler, entry in chosen:
        if not {"loss_scale", "unskipped"} <= set(entry):
            raise RuntimeError(f"load_state_dict: a loss scaler has {sorted(entry)}; wanted loss_scale and unskipped")
        scaler.check(entry)
    for scaler, entry in chosen:
        scaler.load_state_dict(entry)


def restore() -> None:
    """Undo every `initialize`: restore torch's namespace, and classes, hooks and parameters of models and optimizers.

    Weights become FP32 and equal the masters. Weights that were FP16 or BF16 before `initialize` are rounded to that
    type. Optimizers hold the models' parameters again, with their state. Gradients that are still scaled
    (`delay_unscale`) are unscaled.

    A second call does nothing.

    Raises:
        RuntimeError: a model or optimizer was changed so that it cannot be restored completely (named in the message),
            or a weight that was FP16 has grown beyond FP16's range and stays FP32. Everything else is restored.
    """
    attempt = Attempts()
    attempt(leave_all, trainings)
    forget()
    incoming.forget_types()
    attempt(casts_state.set_default, None)
    for installation in installations():
        attempt(installation.uninstall)
    attempt.finish()


@contextmanager
def restored() -> Iterator[None]:
    """Undo, at the end of the body, every `initialize` called in the body; earlier trainings are left alone."""
    before, default = [training for training in trainings if training.alive()], casts_state.default()
    try:
        yield
    finally:
        attempt = Attempts()
        attempt(leave_all, [made for made in trainings if all(made is not known for known in before)])
        trainings[:] = before
        if before:  # the trainings from before need the installed casts
            casts_state.set_default(default)
        else:
            attempt(restore)
        attempt.finish()


def _apex_form(models: Any, optimizers: Any) -> Any:
    """Return the result of `initialize`: (models, optimizers), or models alone without optimizers; lists are new."""
    model, optimizer = (list(given) if isinstance(given, list) else given for given in (models, optimizers))
    return model if optimizers is None else (model, optimizer)
