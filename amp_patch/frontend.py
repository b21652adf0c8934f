"""The public calls: initialize, master_params, state_dict, restore, fsdp_policy. The work is done below."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from amp_patch import guests
from amp_patch.around.fsdp import no_masters, stay_fp32
from amp_patch.around.wrappers import enter_wrappers
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_half import renamed, resolve_cpu_half
from amp_patch.environment import overridden, with_asked_methods, with_asked_modules, without_rungs
from amp_patch.model import incoming
from amp_patch.model import tensors as model_tensors
from amp_patch.model.keep_fp32 import KeepFP32, kept_modules
from amp_patch.model.keep_high import enter_high, kept_high
from amp_patch.policy import (
    Closed,
    CpuHalf,
    Flag,
    LowName,
    Options,
    Policy,
    ProductFormat,
    State,
    resolve,
    scale_number,
)
from amp_patch.support import compiled, fsdp
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.patches import Attempts, installations
from amp_patch.training.arguments import Keywords, Level, M, Optimizers, S, Steps
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.scale_loss import groups_of
from amp_patch.training.training import (
    Dialect,
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
from amp_patch.ways import gradient_release as release

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from typing_extensions import Unpack

logger = logging.getLogger("amp_patch")
guests.enter()

# Called with each model of an `initialize` whose verbosity is 2 or more.
verbose_subscribers: list[Callable[[nn.Module], None]] = []


# Two overloads and no more: mypy prints all of each, a page of arguments, behind one wrong keyword.
@overload
def initialize(
    models: M, optimizers: None = None, enabled: bool = True, opt_level: Level = "O1", **options: Unpack[Keywords]
) -> M: ...
@overload
def initialize(
    models: M, optimizers: S, enabled: bool = True, opt_level: Level = "O1", **options: Unpack[Keywords]
) -> tuple[M, S]: ...
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
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype | LowName | ProductFormat | str | None = None,
    keep_fp32: KeepFP32 | Iterable[KeepFP32] = (),
    keep_high: KeepFP32 | Iterable[KeepFP32] | None = None,
    allow_banned: bool = False,
    cpu_half: CpuHalf = "auto",
    cpu_fp16: CpuHalf | None = None,
    process_group: Any = None,
    methods: tuple[str, ...] = (),
    skip_nonfinite: Flag = False,
    low_precision_norms: Flag = False,
    optimizer_state: State | None = None,
    gradient_release: Flag = False,
) -> Any:
    """Prepare models and optimizers for mixed-precision training at an opt level, in place.

    Call it after the model is on its device and before it is wrapped (DataParallel, DDP). It may be called any number
    of times: each call makes a training with its own policy and loss scalers. A model given again keeps the values of
    its masters; at another level it is cast anew, and its earlier optimizers must be given again too.

    A model for torch's `fully_shard` (FSDP2) is sharded first, with `mp_policy=amp.fsdp_policy(opt_level)`, then its
    optimizer is made, then this is called. At O2 its FP32 shards are the masters; O3 is refused.

    The environment has the last word, so that a script can be tried at another level without an edit:
    ``AMP_PATCH_OPT_LEVEL`` ("O0" to "O7", "O5+split") takes the place of `opt_level`, ``AMP_PATCH_DTYPE`` ("float16",
    "bfloat16") that of `dtype` at O1, O2 and O3, ``AMP_PATCH_MASTER_WEIGHTS`` ("split", "stochastic") that of
    `master_weights` where the weights are bfloat16, ``AMP_PATCH_OPTIMIZER_STATE`` ("8bit") that of `optimizer_state`.
    By the first O0 is the plain FP32 script, whatever else is passed here; at another level the options that contradict
    it are dropped, and the log says which. All are read at each call; `enabled=False` stays off.

    Args:
        models: a module, or a list or tuple of them (a module and its child may both be in it). FP32, FP16 or BF16, in
            part too: a training begins with the values that came, exactly. At O0 such a model stays as it is. At O1
            and O4 trained weights become FP32. At O2 and O5 frozen ones have no master. Quantized weights (FP8,
            integers, torchao's, bitsandbytes') are left alone where they are frozen, and refused where they are not.
        optimizers: an optimizer, a list or tuple, or None (inference: no masters). Objects with `param_groups` and
            `step` are accepted, and wrappers with an `.optim`, `.optimizer` or `.base_optimizer` (SAM) inside.
            Parameters that belong to none of the models are left as they are, and get masters at O2 if they are float16
            or bfloat16.
        enabled: False makes this call and every `scale_loss` of these optimizers a no-op.
        opt_level: "O0" FP32; "O1" casts around torch's functions; "O2" low-precision model, FP32 masters; "O3"
            low-precision model alone; "O4", "O5": O1, O2 in bfloat16; "O6", "O7": O4, O5 with products in FP8 or FP4,
            emulated: the numbers of such a training, not its speed. Those are `linear`, `matmul`, `bmm` and their like,
            in forward and backward; convolutions, `einsum` and fused attention stay bfloat16. Values of options may
            follow a level: "O5+split+8bit" is O5 with master_weights="split" and optimizer_state="8bit", "O6+mxfp8" is
            O6 with dtype="mxfp8".
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale: override what the
            level sets; None keeps it. Strings ("True", "dynamic", "128.0") are understood. master_weights="split" keeps
            of each FP32 master the 16 bits that its bfloat16 weight is not: 2 bytes a parameter in place of 4 (O5, and
            O2 in bfloat16; not for sharded parameters). Weights are then rounded to nearest with ties away from zero.
            "stochastic" keeps nothing: each step reads the bfloat16 weight as FP32, and rounds what it becomes up or
            down by chance, in proportion (the same levels; shards must be bfloat16). `state_dict` has the seed of it.
        cast_model_outputs: dtype of the models' floating outputs. None: FP32 for a cast model, else untouched.
        num_losses: how many losses have a scale of their own; `scale_loss(loss_id=...)` chooses.
        verbosity: 0 silences the messages about overflow (logger "amp_patch"; only rank 0 speaks). 2: the next forward
            of each model prints what ran in which type, and why, to stdout (`explain`).
        min_loss_scale, max_loss_scale: range of a dynamic scale. Defaults 2**-24 and 2**24.
        dtype: torch.float16 (default; bfloat16 at O4 and O5) or torch.bfloat16, whose loss scale is 1 unless given.
            Their names ("bfloat16") are understood. At O6 and O7 the format of products: "fp8" (default; E4M3, a scale
            for each row), "fp8_tensorwise" (one scale; gradients E5M2), "mxfp8" (blocks of 32, scales rounded up),
            "mxfp8_floor" (OCP's scales), "nvfp4" (blocks of 16; NVIDIA's recipe), "nvfp4_naive" (without its help).
        keep_fp32: modules that stay FP32 at any level, with their children: qualified names, classes, or a predicate
            over (name, module); one or several. Such a module is given FP32; in a cast model (O2, O3) it returns the
            dtype that came in. So does, by itself, each module in a cast model that has FP32 buffers and no parameters.
        keep_high: modules whose products stay bfloat16 at O6 and O7, named as in `keep_fp32`. None: the first layer
            and the head, those that each model defines first and last; where the first is an embedding or a convolution
            the head alone, be it a product by an embedding's weight. (): none.
        allow_banned: run functions without a safe low-precision form (binary_cross_entropy) in FP32 under O1's casts
            instead of refusing them.
        cpu_half: how FP16 and BF16 tensors on a CPU are multiplied. "emulate": GEMMs, convolutions and attention
            compute in FP32 and round their results once, in the models' forward and in backward passes: what a tensor
            core does, at about FP32's speed. "native": torch's kernels, much slower where the CPU has no arithmetic for
            the type. "auto": "emulate" there; else "native", with FP16's slow convolutions emulated (`python -m
            amp_patch info` tells). Without effect on models with nothing on a CPU.
        cpu_fp16: the older name of `cpu_half`; warns.
        process_group: reduce the overflow flag over this torch.distributed group, for gradients that DDP does not.
        methods: names of methods, beside `forward`, that users call on the models directly ("encode", "generate").
        skip_nonfinite: True has gradients checked where the loss is not scaled (O0, O3, O4, O5): `scale_loss` looks at
            them, without a sync, and the optimizer skips its step if one is NaN or infinite, which a message says. It
            asks the device once a step, as under loss scaling; nothing is multiplied. Then closures, and steps inside
            of the body of `scale_loss`, are refused as under loss scaling. False: they reach the weights, as without
            amp_patch. Where the loss is scaled they are checked in any case.
        low_precision_norms: True has `layer_norm`, `rms_norm` and `group_norm` give the type of an FP16 or BF16 input
            at O1 and O4, as batch norms do, and save that input for backward in place of an FP32 copy; refused at
            other levels. An FP32 input gives FP32. On a CPU they compute in FP32, forward and backward, and round
            their results once; elsewhere torch's kernels of that type run, on weights cast to it. False: they give
            FP32, as under torch.autocast.
        optimizer_state: "8bit" keeps the optimizers' large FP32 state as 8-bit codes; who reads it finds FP32. Refused
            by name at O3, and for optimizers that are neither torch.optim's nor FusedAdam and FusedSGD.
        gradient_release: step each parameter in backward, to the same bits, and free its gradient. At O4 and O5, for
            torch's optimizers and registered classes; refused where gradients are needed together.

    Returns:
        The same objects, in Apex's form: the model, or (model, optimizer) if optimizers were given; lists for lists,
        tuples for tuples.

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
        options = Options(
            dtype=dtype,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            cast_model_outputs=cast_model_outputs,
            skip_nonfinite=skip_nonfinite,
            low_precision_norms=low_precision_norms,
            optimizer_state=optimizer_state,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            allow_banned=allow_banned,
            cpu_half=renamed(cpu_half, cpu_fp16),
        )
        policy = resolve(*overridden(opt_level, options))
    others = keep_fp32, process_group, methods, keep_high, gradient_release
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
    keep_high: Any = None,
    gradient_release: Any = False,
) -> Any:
    """`initialize` in a dialect, at a resolved policy; None is `enabled=False`."""
    model_list, optimizer_list = [compiled.uncompiled(model) for model in as_list(models)], as_list(optimizers)
    for module in fsdp.fsdp_modules(m for m in model_list if isinstance(m, nn.Module)):
        module.reshard()  # after a forward its parameters may be the gathered ones, which no optimizer holds
    targets = [innermost(optimizer) for optimizer in optimizer_list]
    if policy is None:
        mark_disabled(dialect, targets)
        return _apex_form(models, optimizers)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"initialize: num_losses is {num_losses!r}; wanted a positive integer")
    keep_fp32, keep_high = with_asked_modules(keep_fp32, keep_high, model_list)
    kept = check_arguments(model_list, targets, policy, keep_fp32, methods, dialect, process_group)
    high = kept_high(model_list, policy, keep_high)
    releases = release.check(gradient_release, optimizer_list, targets, policy)
    methods = with_asked_methods(methods, model_list)
    policy = resolve_cpu_half(policy, on_cpu=model_tensors.use_cpu(model_list))

    leave_earlier(model_list, targets, kept, policy)
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
    enter_high(model_list, policy, high)
    for optimizer in optimizer_list:
        enter_wrappers(optimizer)
    release.enter(targets if releases else ())
    if int(verbosity) > 1:
        for subscriber in verbose_subscribers:
            for model in model_list:
                subscriber(model)
    return _apex_form(models, optimizers)


def master_params(optimizer: Steps) -> Iterator[Tensor]:
    """The tensors that the optimizer updates: masters where it has them, else the model's own parameters."""
    return (param for group in groups_of(optimizer, "master_params") for param in group["params"])


def state_dict(
    optimizers: Optimizers | dict[str, Any] | None = None, *, destination: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The loss scales of the training that these optimizers belong to, in Apex's form. Syncs with the device.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; written into `destination` if given. With
    `master_weights="stochastic"` the first has "stochastic_rounding" too: the seed and the steps that it rounds by.

    Args:
        optimizers: the optimizer, or a list of those, of one `initialize` call. None: of the newest call, as in Apex.
            A dict is Apex's `destination`.

    Raises:
        RuntimeError: an optimizer that `initialize` never saw. ValueError: optimizers of several trainings.
    """
    if isinstance(optimizers, dict):
        optimizers, destination = None, optimizers
    state = {} if destination is None else destination
    for index, scaler in enumerate(scalers_of(optimizers, "state_dict")):
        state[f"loss_scaler{index}"] = scaler.state_dict()
    return state


def load_state_dict(state_dict: dict[str, Any], optimizers: Optimizers | None = None) -> None:
    """Load what `state_dict` gave, into the loss scalers of the training that these optimizers belong to.

    Another number of scalers is accepted, as in Apex: those that both have are loaded.

    Args:
        optimizers: as for `state_dict`. None: the newest `initialize`, as in Apex.

    Raises:
        RuntimeError: a key that is no loss scaler's, an optimizer that `initialize` never saw, no `initialize` before;
            ValueError: a scale that cannot be, optimizers of several trainings. Nothing is loaded then.
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
        scale_number("load_state_dict: loss_scale", entry["loss_scale"])
        scaler.check_beside(entry)
    for scaler, entry in chosen:
        scaler.load_state_dict(entry)


def restore() -> None:
    """Undo every `initialize`: torch's namespace, the models' and optimizers' classes, hooks and parameters.

    Weights are FP32 again and equal the masters; those that came in FP16 or BF16 are that again, rounded. Optimizers
    hold the models' parameters, with their state. Gradients that were still scaled (`delay_unscale`) are unscaled.

    Raises:
        RuntimeError: a model or optimizer that was changed meanwhile so that it cannot be restored whole, by name; a
            weight that came in FP16 and has grown beyond it, which stays FP32. All others are, torch is, and no
            training is left: a second call does nothing.
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
    """Undo every `initialize` of the body when that ends, and leave the trainings from before it as they are."""
    before, default = [training for training in trainings if training.alive()], casts_state.default()
    try:
        yield
    finally:
        attempt = Attempts()
        attempt(leave_all, [made for made in trainings if all(made is not known for known in before)])
        trainings[:] = before
        if before:  # the trainings from before need the casts that are installed
            casts_state.set_default(default)
        else:
            attempt(restore)
        attempt.finish()


def _apex_form(models: Any, optimizers: Any) -> Any:
    """Give the result of `initialize`, in Apex's form: new lists for lists, the models alone without optimizers."""
    model, optimizer = (list(given) if isinstance(given, list) else given for given in (models, optimizers))
    return model if optimizers is None else (model, optimizer)


def fsdp_policy(
    opt_level: Level = "O1",
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    models: nn.Module | Sequence[nn.Module] | None = None,
    keep_fp32: KeepFP32 | Iterable[KeepFP32] = (),
    keep_batchnorm_fp32: Flag | None = None,
) -> MixedPrecisionPolicy:
    """torch's `MixedPrecisionPolicy` of an opt level, for `fully_shard(module, mp_policy=...)`::

        fully_shard(model, mp_policy=amp.fsdp_policy(level))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)

    At O2 and O5 the modules compute in the level's type while their shards stay FP32: these are the masters, and no
    others are made. At O0, O1 and O4 it is FP32.

    A module that stays FP32 inside a cast model (a batch norm, `keep_fp32`) is gathered in FP32. From torch 2.15
    `amp.fsdp_policy(level, models=model, keep_fp32=...)` does that, whatever it is sharded with. In an older torch,
    whose policies know no single parameters, it is sharded for itself, before the modules around it, with
    `amp.fsdp_policy("O0")`.

    Args:
        opt_level, dtype: as in `initialize`, from the environment too (save where O0 is asked for).
        reduce_dtype: the type in which gradients are summed over the processes. None: FP32.
        models: the module, or a list of those, that will be sharded with this policy, before it is: what stays FP32 in
            them is noted. Without effect before torch 2.15.
        keep_fp32, keep_batchnorm_fp32: as in `initialize`; of use with `models`.

    Raises:
        ValueError: O3, which keeps no FP32 weights; a level or dtype that cannot be; `keep_fp32` without `models`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = Options(dtype=dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
    opt_level, options = without_rungs(opt_level, options)
    if opt_level != "O0":  # asked for here, O0 is for modules that stay FP32 at any level
        opt_level, options = overridden(opt_level, options)
    policy = resolve(opt_level, options)
    low = policy.cast_model_type
    if low is not None and not policy.master_weights:
        raise ValueError(f"fsdp_policy: {no_masters(policy)}")
    if models is None and keep_fp32:
        raise ValueError(
            f"fsdp_policy: keep_fp32 is {keep_fp32!r} and models is None; name the modules' model too: "
            "amp.fsdp_policy(level, models=model, keep_fp32=...)"
        )
    model_list = [compiled.uncompiled(model) for model in as_list(models)]
    kept = kept_modules(model_list, policy, keep_fp32, "fsdp_policy")
    overrides: dict[str, Any] = {}
    if kept and low is not None and "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}:
        overrides["param_dtype_override_fn"] = stay_fp32(kept)
    if low is not None and reduce_dtype is None:
        reduce_dtype = torch.float32
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype, **overrides)
