"""The names of Apex as a table: which object of amp_patch serves each, and how it differs. `check` and docs/apex.md
print it.

A difference is one that a script could notice. The rows list every public name of `amp_patch.apex`, and the private
names that scripts use. Whether a name is served is not read from here: apex_served.py looks it up in the modules.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One or more names of Apex in one owner. The owner is a module, or the path by which scripts reach an object."""

    owner: str
    names: str  # separated by spaces
    served_by: str
    difference: str = ""

    def paths(self) -> list[str]:
        """Return the full names, for example "apex.amp.initialize"."""
        return [f"{self.owner}.{name}" for name in self.names.split()]


# The owner of private names that scripts read from an optimizer: `check` recognises them on any object.
OPTIMIZER = "optimizer"

ROWS = (
    Row(
        "apex.amp",
        "initialize",
        "amp_patch.initialize",
        "runs on the CPU too, and any number of times; masters exist at once, not from the first backward pass on; the "
        "loss scale stays above 2**-24 unless min_loss_scale says otherwise; optimizer.step(closure) is refused where "
        "losses are scaled; at O2 too a gradient that the script sets to None before the step is not applied",
    ),
    Row(
        "apex.amp.initialize()",
        "patch_torch_functions_type",
        "the level's type",
        "ROCm's; by name only; with dtype=torch.bfloat16 O1 takes torch.bfloat16",
    ),
    Row(
        "apex.amp.initialize()",
        "dynamic_init_scale scale_growth_factor scale_backoff_factor scale_window",
        "amp_patch.training.loss_scaler.LossScaler",
        "Huawei's; by name only; the start too lies between min_loss_scale and max_loss_scale",
    ),
    Row(
        "apex.amp.initialize()",
        "combine_ddp",
        "torch.distributed, at the end of scale_loss",
        "Huawei's; by name only; needs no combine_grad, and works at every level; gradients are sent after the "
        "backward pass, not during it",
    ),
    Row(
        "apex.amp.initialize()",
        "combine_grad ddp_replica_count user_cast_preferred check_combined_tensors",
        "accepted",
        "Huawei's; without effect, which the log says: gradients are unscaled in one pass, and a registered function "
        "has the registered rule alone, in any case",
    ),
    Row(
        "apex.amp",
        "scale_loss",
        "amp_patch.scale_loss",
        "where gradients add up, only the first overflow before a step moves the scale; a static one skips steps too",
    ),
    Row("apex.amp", "disable_casts", "amp_patch.disable_casts", "acts on its own thread only; works at every level"),
    Row("apex.amp", "master_params state_dict load_state_dict", "amp_patch, functions of these names"),
    Row(
        "apex.amp",
        "half_function float_function promote_function "
        "register_half_function register_float_function register_promote_function",
        "amp_patch, functions of these names",
        "act at any time, before initialize and after it",
    ),
    Row(
        "apex.amp",
        "bfloat16_function register_bfloat16_function",
        "amp_patch.casts.functions",
        "ROCm's; to bfloat16 at every level, while half_function casts to the type of the level",
    ),
    Row(
        "apex.amp",
        "init",
        "amp_patch.casts",
        "verbose prints no casts; weights are cast once a forward in any case; ROCm's patch_type by name only",
    ),
    Row("apex.amp.handle", "AmpHandle NoOpHandle", "amp_patch.casts", "enable_caching=False changes nothing"),
    Row("apex.amp.opt", "OptimWrapper", "amp_patch.scale_loss"),
    Row("apex.amp.frontend", "Properties O0 O1 O2 O3 O4 O5 opt_levels", "amp_patch.policy"),
    Row(
        "apex.amp.lists.functional_overrides",
        "MODULE FP16_FUNCS BFLOAT16_FUNCS FP32_FUNCS BANNED_FUNCS",
        "amp_patch.casts.oplists",
        "hold torch's newer functions as well; edits act from the next initialize on, those of FP16_FUNCS in bfloat16 "
        "too",
    ),
    *(
        Row(owner, "MODULE FP16_FUNCS BFLOAT16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS", "the same", "the same")
        for owner in ("apex.amp.lists.torch_overrides", "apex.amp.lists.tensor_overrides")
    ),
    Row("apex.amp._amp_state", "_amp_state AmpState maybe_print warn_or_err", "the newest initialize"),
    Row(
        "apex.amp._amp_state",
        "loss_scalers opt_properties handle verbosity allow_incoming_model_not_fp32 hard_override "
        "min_loss_scale max_loss_scale",
        "the newest initialize, read and written",
        "of opt_properties only `enabled` acts when it is written",
    ),
    Row(
        "apex.amp.scaler",
        "LossScaler",
        "amp_patch.training.loss_scaler.LossScaler",
        "min_loss_scale is 2**-24 unless given",
    ),
    Row(
        "apex.amp._amp_state.loss_scalers[]",
        "loss_scale update_scale clear_overflow_state unscale unscale_with_stashed "
        "_loss_scale _unskipped _scale_seq_len _has_overflow _overflow_buf _min_loss_scale _max_loss_scale",
        "amp_patch.training.loss_scaler.LossScaler, read and written",
        "reading one waits for the device; scale_loss does not call unscale(), so overriding it has no effect",
    ),
    Row("apex.amp._process_optimizer", "AmpOptimizerState", "amp_patch.training.stash.Stash"),
    Row(
        OPTIMIZER,
        "_amp_stash _amp_lazy_init _lazy_init_maybe_master_weights _master_params_to_model_params "
        "_prepare_amp_backward _post_amp_backward",
        "the optimizer that initialize returned",
    ),
    Row(
        f"{OPTIMIZER}._amp_stash",
        "lazy_init_called already_patched params_have_scaled_gradients",
        "amp_patch.training.stash.Stash",
        "lazy_init_called is True from the start",
    ),
    Row(
        f"{OPTIMIZER}._amp_stash",
        "all_fp16_params all_fp32_params all_fp32_from_fp16_params all_fp32_from_fp32_params "
        "fp16_groups fp32_from_fp16_groups fp32_from_fp32_groups",
        "amp_patch.training.stash.Stash",
        "rebuilt at each read: edit the tensors, not the lists",
    ),
    Row(
        "apex.parallel",
        "DistributedDataParallel",
        "torch's DistributedDataParallel",
        "torch decides when to reduce what: delay_allreduce, allreduce_trigger_params, num_allreduce_streams and their "
        "like have no effect; find_unused_parameters is True unless given",
    ),
    Row("apex.parallel", "Reducer ReduceOp", "torch.distributed"),
    Row("apex.parallel.distributed", "flat_dist_call", "torch.distributed"),
    Row("apex.parallel.multiproc", "main", "amp_patch run, once a GPU"),
    Row(
        "apex.parallel",
        "SyncBatchNorm convert_syncbn_model create_syncbn_process_group",
        "torch's SyncBatchNorm; on the CPU torch.distributed",
    ),
    Row("apex.parallel.LARC", "LARC", "amp_patch.apex.parallel.LARC", "schedulers take it for an optimizer"),
    Row(
        "apex.optimizers",
        "FusedAdam",
        "torch's fused Adam and AdamW",
        "master_weights needs no capturable, and its masters are in the state; the old step(grads=...) is refused",
    ),
    Row("apex.optimizers", "FusedSGD", "torch's fused SGD", "materialize_master_grads has no effect"),
    Row(
        "apex.optimizers",
        "FusedLAMB FusedNovoGrad FusedAdagrad",
        "amp_patch.optimizers",
        "state is FP32; gradients are only read: Apex's FusedLAMB overwrites them",
    ),
    Row(
        "apex.optimizers",
        "FusedMixedPrecisionLamb",
        "amp_patch.optimizers",
        "the FP32 copies are in the state, so that a checkpoint resumes to the bit; gradients are only read; weights "
        "of a group may differ in type",
    ),
    Row(
        "apex.normalization",
        "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
        "torch.nn.functional.layer_norm and rms_norm",
        "memory_efficient has no effect; weights and inputs may differ in type",
    ),
    Row(
        "apex.normalization.fused_layer_norm",
        "fused_layer_norm fused_layer_norm_affine mixed_dtype_fused_layer_norm_affine fused_rms_norm "
        "fused_rms_norm_affine mixed_dtype_fused_rms_norm_affine manual_rms_norm FusedLayerNormFunction "
        "FusedLayerNormAffineFunction FusedLayerNormAffineMixedDtypesFunction FusedRMSNormFunction "
        "FusedRMSNormAffineFunction FusedRMSNormAffineMixedDtypesFunction",
        "the same",
        "memory_efficient has no effect",
    ),
    Row(
        "apex.fp16_utils",
        "network_to_half convert_network convert_module BN_convert_float tofp16 FP16Model prep_param_lists "
        "model_grads_to_master_grads master_params_to_model_params clip_grad_norm to_python_float",
        "amp_patch.apex.fp16_utils",
    ),
    Row(
        "apex.fp16_utils",
        "FP16_Optimizer LossScaler DynamicLossScaler",
        "amp_patch.apex.fp16_utils",
        "a closure whose loss is never finite is an error, not an endless loop",
    ),
    Row(
        "apex.multi_tensor_apply",
        "multi_tensor_applier MultiTensorApply",
        "amp_patch.apex.multi_tensor_apply",
        "available is True without the extension too; the chunk size has no effect",
    ),
    Row(
        "amp_C",
        "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp multi_tensor_l2norm_scale "
        "multi_tensor_unscale_l2norm multi_tensor_norm_out update_scale_hysteresis",
        "amp_patch.multi_tensor",
        "a product that overflows on its cast raises the flag too",
    ),
    Row(
        "amp_C",
        "multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master "
        "multi_tensor_adagrad multi_tensor_novograd multi_tensor_lamb multi_tensor_lamb_stage1_cuda "
        "multi_tensor_lamb_stage2_cuda",
        "amp_patch.optimizers",
        "gradients are only read: Apex's multi_tensor_lamb leaves the update in them",
    ),
    Row("apex_C", "flatten unflatten", "torch._utils"),
)

_AUTOCAST = (
    "the casts of O1, by CUDA's op lists on every device; inside it torch.is_autocast_enabled(), which reports torch's "
    "own autocast, is False"
)
_SCALER = (
    "takes half gradients too; no gradient at all is no error; a gradient that another scaler or "
    "scale_loss has scaled is one"
)

# torch's own mixed precision, for scripts that never used Apex: amp_patch has the same names under its own package.
# A name of torch that amp_patch does not have gets no row.
NATIVE = (
    *(
        Row(module, name, f"amp_patch.{name}", advice)
        for module in ("torch", "torch.amp", "torch.cuda.amp", "torch.cpu.amp")
        for name, advice in (("autocast", _AUTOCAST), ("GradScaler", _SCALER))
    ),
    Row("torch.amp", "custom_fwd custom_bwd is_autocast_available", "amp_patch, functions of these names"),
    Row("torch.cuda.amp", "custom_fwd custom_bwd", "amp_patch, functions of these names"),
    Row(
        "torch",
        "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype get_autocast_gpu_dtype "
        "set_autocast_gpu_dtype is_autocast_cache_enabled set_autocast_cache_enabled clear_autocast_cache",
        "torch",
        "stays torch's: it does not see amp_patch's autocast",
    ),
)


def names_of(owner: str, rows: tuple[Row, ...] = ROWS) -> frozenset[str]:
    """Return the names that the rows list for an owner."""
    return frozenset(name for row in rows if row.owner == owner for name in row.names.split())
