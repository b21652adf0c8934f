"""Registers the optional features, in the order of their calls.

Those of a training are at the joints of training/joints.py, those of a model's forward at the ones of model/joints.py.
"""

from __future__ import annotations

from torch.nn.modules.module import register_module_module_registration_hook

from amp_patch.around import captured, ddp, fsdp, named_states, wrappers, zero_redundancy
from amp_patch.around.shared_backward import SharedBackward
from amp_patch.casts import in_fp32
from amp_patch.masters import clipping
from amp_patch.model import (
    copies,
    edited_dicts,
    incoming,
    keep_high,
    kept_module,
    masks,
    mixed_calls,
    saved_activations,
)
from amp_patch.model import joints as of_forward
from amp_patch.policy import SPLIT, STOCHASTIC
from amp_patch.storage import coded_steps, compressed_states, host_masters
from amp_patch.storage.split_master import HALVES
from amp_patch.storage.stochastic_master import ROUNDING, beside_scale
from amp_patch.training import joints, observers
from amp_patch.training.joints import Option
from amp_patch.watch import (
    captured_rates,
    first_inputs,
    left_out,
    rounded_saves,
    saturated,
    scaler_events,
    slips,
    small_eps,
    thawed,
    written_buffers,
)
from amp_patch.ways import gradient_release, per_parameter, portions
from amp_patch.ways.one_pass import IN_ONE_PASS
from amp_patch.ways.portions import IN_PORTIONS


def enter() -> None:
    """Register all features; called once, at the import of amp_patch."""
    in_order = saved_activations, mixed_calls, written_buffers, edited_dicts, kept_module, first_inputs, masks
    of_forward.choosers += [guest.choose for guest in in_order]
    of_forward.overrides += [rounded_saves.warning_methods]
    of_forward.copied += [copies.copied, incoming.copied]
    joints.options += [
        Option("keep_high", keep_high.check, keep_high.enter),
        Option("gradient_release", gradient_release.check, gradient_release.enter),
        Option("fp32_state", coded_steps.named_params, coded_steps.leave_in_fp32),
    ]
    joints.forms |= {SPLIT: lambda beside: HALVES, STOCHASTIC: lambda beside: beside.get(ROUNDING)}
    joints.beside_scale += [beside_scale]
    joints.of_state += [coded_steps.overrides]
    joints.ways += [IN_ONE_PASS, IN_PORTIONS]
    joints.check_models += [fsdp.check_shards, ddp.check_ddp]
    joints.enter_models += [small_eps.look, ddp.enter_models, left_out.watch, thawed.watch_unowned, slips.watch_scalers]
    joints.retyped += [ddp.reduce_anew]
    register_module_module_registration_hook(ddp.note_ddp)
    joints.unpickled += [ddp.install]
    clipping.before_clipping.append(slips.warn_of_scaled)
    in_fp32.probability_checks.append(saturated.look)
    joints.first_loss += [slips.refuse_scaled]
    joints.first_body += [slips.look_in]
    joints.dropped += [slips.warn_of_dropped]
    joints.body_left += [slips.look_back]
    joints.nothing_unscaled += [slips.warn_of_untrained]
    joints.doubtful_step += [slips.look_at_step]
    joints.no_body += [slips.warn_of_no_body]
    observers.installers += [scaler_events.install]
    joints.regrouped += [zero_redundancy.repartition]
    joints.wrapped += [wrappers.enter_wrappers]
    joints.shared_backward += [SharedBackward]
    joints.captured += [captured.refuse_first_step, captured_rates.look, host_masters.refuse_capture]
    joints.check_optimizer += [
        zero_redundancy.check_zero,
        per_parameter.register_asked,
        portions.check_lbfgs,
        coded_steps.check,
        host_masters.check,
    ]
    joints.check_group += [fsdp.check_group]
    joints.enter_optimizer += [
        compressed_states.enter,
        coded_steps.enter,
        thawed.watch,
        named_states.enter,
        host_masters.enter,
    ]
    joints.group_added += [thawed.watch, host_masters.enter]
    joints.leave_optimizer += [coded_steps.make_whole]
