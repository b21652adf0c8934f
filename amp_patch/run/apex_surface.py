"""Differences between names of Apex and their objects in amp_patch, for `check`. docs/apex.md shows them too.

A difference is one that a script could notice. Whether a name is served is not read from here: apex_served.py looks it
up in the modules.
"""

from __future__ import annotations

# Pattern of full names of Apex -> the difference. `initialize()` is followed by an argument, `loss_scalers[]` is an
# element, and `optimizer` is any object.
DIFFERENCES = {
    r"apex\.amp\.initialize": "runs on the CPU too, and any number of times; masters exist at once, not from the first "
    "backward pass on; the loss scale stays above 2**-24 unless min_loss_scale says otherwise; optimizer.step(closure) "
    "is refused where losses are scaled; at O2 too a gradient that the script sets to None before the step is not "
    "applied",
    r"apex\.amp\.scale_loss": "where gradients add up, only the first overflow before a step moves the scale; a static "
    "one skips steps too",
    r"apex\.amp\.disable_casts": "acts on its own thread only; works at every level",
    r"apex\.amp\.(register_)?(half_|float_|promote_)function": "act at any time, before initialize and after it",
    r"apex\.amp\.init": "verbose prints no casts; weights are cast once a forward in any case",
    r"apex\.amp\.handle\.(AmpHandle|NoOpHandle)": "enable_caching=False changes nothing",
    r"apex\.amp\.lists\.\w+\.\w+": "hold torch's newer functions as well; edits act from the next initialize on, those "
    "of FP16_FUNCS in bfloat16 too",
    r"apex\.amp(\._amp_state)+\.opt_properties": "only `enabled` acts when it is written",
    r"apex\.amp\.scaler\.LossScaler": "min_loss_scale is 2**-24 unless given",
    r"apex\.amp(\._amp_state)+\.loss_scalers\[\]\.\w+": "reading one waits for the device; scale_loss does not call "
    "unscale(), so overriding it has no effect",
    r"optimizer\._amp_stash\.lazy_init_called": "True from the start",
    r"optimizer\._amp_stash\.(all_)?fp(16|32)_\w+": "rebuilt at each read: edit the tensors, not the lists",
    r"apex\.parallel\.DistributedDataParallel": "torch decides when to reduce what: delay_allreduce, "
    "allreduce_trigger_params, num_allreduce_streams and their like have no effect; find_unused_parameters is True "
    "unless given",
    r"apex\.parallel\.LARC\.LARC": "schedulers take it for an optimizer",
    r"apex\.optimizers\.FusedAdam": "capturable and master_weights are refused, and the old step(grads=...)",
    r"apex\.optimizers\.FusedSGD": "materialize_master_grads has no effect",
    r"apex\.optimizers\.Fused(LAMB|NovoGrad|Adagrad)": "state is FP32; gradients are only read: Apex's FusedLAMB "
    "overwrites them",
    r"apex\.optimizers\.FusedMixedPrecisionLamb": "the FP32 copies are in the state, so that a checkpoint resumes to "
    "the bit; gradients are only read; weights of a group may differ in type; steps are counted on the host",
    r"apex\.normalization\.(Mixed)?Fused(Layer|RMS)Norm": "memory_efficient has no effect; weights and inputs may "
    "differ in type",
    r"apex\.normalization\.fused_layer_norm\.\w+": "memory_efficient has no effect",
    r"apex\.fp16_utils\.FP16_Optimizer": "step(closure) is refused",
    r"apex\.fp16_utils\.(prep_param_lists|model_grads_to_master_grads|master_params_to_model_params)": (
        "flat_master=True is refused"
    ),
    r"apex\.multi_tensor_apply\.(multi_tensor_applier|MultiTensorApply)": "available is True without the extension "
    "too; the chunk size has no effect",
    r"amp_C\.multi_tensor_adam_capturable\w*": "is refused when it is called",
    r"amp_C\.multi_tensor_(sgd|adam|lamb)": "gradients are only read: Apex's multi_tensor_lamb "
    "leaves the update in them",
    r"amp_C\.\w+": "a product that overflows on its cast raises the flag too",
}
