"""The step strategy of the optimizers in `KERNELS`: unscale, clip, moments, master and weight in one pass over memory.

For each class, `KERNELS` has a function that passes its state and settings to a kernel. The state has torch's format,
so each step may use either the kernels or torch's own code. If the kernels do not support a case (sparse gradients,
capturable=True, a state that user code has replaced), the optimizer's own code makes the step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import multi_tensor
from amp_patch.masters import on_host
from amp_patch.masters.held_gradients import can_wait
from amp_patch.masters.masters import (
    PLAIN_TYPES,
    LinkList,
    add_gradients,
    kernel_tensors,
    materialize,
    note_stepped,
    publish_written,
    settle,
    without_materialized,
)
from amp_patch.multi_tensor import backends
from amp_patch.optimizers.adam import FusedAdam
from amp_patch.optimizers.sgd import FusedSGD
from amp_patch.support import device_sync
from amp_patch.support.blocks import without_grad
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import is_untouched
from amp_patch.training.joints import Strategy
from amp_patch.training.stash import Stash
from amp_patch.training.step import WHOLE, Plain, Step
from amp_patch.ways.batch import SENT_TOGETHER, Batch, Group, NotKnown
from amp_patch.ways.partial_step import PartialStep

# ----------------------------------------------------------------------------------------------------------------------
# The optimizers that the kernels know


def kernel_of(optimizer: Any) -> Kernel | None:
    """Return the function (optimizer, batch, overflow flag) that steps a batch.

    None if there is none for the class, or if the optimizer has a setting that the function does not read: another
    release of torch may add one.
    """
    kernel = KERNELS.get(getattr(type(optimizer), "_amp_base", type(optimizer)))
    return kernel if kernel is not None and optimizer.defaults.keys() <= _SETTINGS[kernel] else None


def counts(optimizer: Any) -> list[int]:
    """Return `group["step"]` after this step for each group of a FusedAdam; [] for an optimizer of another class."""
    groups = optimizer.param_groups if isinstance(optimizer, FusedAdam) else []
    return [0 if isinstance(step := group.get("step", 0), Tensor) else int(step) + 1 for group in groups]


Kernel = Callable[[Any, Batch, Tensor | None], None]

# The names of torch's check for CUDA graphs: a capture would record the current learning rate and step count.
_CAPTURE_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")


def _adam(optimizer: Any, batch: Batch, found_inf: Tensor | None) -> None:
    for name in _CAPTURE_CHECKS:
        if (check := getattr(optimizer, name, None)) is not None:
            check()
            break
    group = batch.group
    names = ("exp_avg", "exp_avg_sq", "step") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    averages, squares, steps, *largest = _state_lists(optimizer, batch, names)
    multi_tensor.multi_tensor_adam(
        batch.grads,
        batch.stepped,
        averages,
        squares,
        largest[0] if largest else None,
        steps,
        **_adam_settings(batch),
        decoupled=group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
        maximize=group["maximize"],
        found_inf=found_inf,
    )


def _settings(batch: Batch) -> dict[str, Any]:
    """Return the arguments that every kernel takes: {name: weights, factors, seed and draws of rounding}."""
    low = None if batch.draws else batch.weights or None
    chance = {"seed": batch.seed, "draws": batch.draws}
    return {"low": low, "factors": batch.factors, **chance, **batch.extra}


def _adam_settings(batch: Batch) -> dict[str, Any]:
    """Return the kernel's arguments for settings that torch's Adam, AdamW and FusedAdam name alike."""
    beta1, beta2 = batch.group["betas"]
    numbers = {name: batch.group[name] for name in ("eps", "weight_decay")}
    return {"lr": _number(batch.group["lr"], batch), "beta1": beta1, "beta2": beta2, **numbers, **_settings(batch)}


def _sgd(optimizer: Any, batch: Batch, found_inf: Tensor | None) -> None:
    group = batch.group
    buffers = None
    if group["momentum"]:
        if batch.first_run:
            buffers = batch.made(optimizer, "momentum_buffer")
        else:
            buffers = list(
                map(
                    batch.getter("momentum_buffer"),
                    map(getattr(optimizer.state, "get_by_master", optimizer.state.get), batch.masters),
                )
            )
    try:
        multi_tensor.multi_tensor_sgd(
            batch.grads,
            batch.stepped,
            buffers,
            lr=_number(group["lr"], batch),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group.get("maximize", False),
            first_run=batch.first_run,
            found_inf=found_inf,
            **_settings(batch),
        )
    except BaseException:  # the kernel has written nothing
        if batch.first_run:
            for master in batch.masters:
                optimizer.state[master].pop("momentum_buffer", None)
        raise


def _fused_sgd(optimizer: Any, batch: Batch, found_inf: Tensor | None) -> None:
    if optimizer.wd_after_momentum and batch.group["weight_decay"]:
        raise NotKnown  # FusedSGD's own decay is more exact than the kernel's
    _sgd(optimizer, batch, found_inf)


def _fused_adam(optimizer: Any, batch: Batch, found_inf: Tensor | None) -> None:
    group = batch.group
    decoupled = optimizer.adam_w_mode and group["weight_decay"]  # the own decay is more exact
    count = group.get("step", 0)
    if decoupled or device_sync.is_capturing():  # in a capture FusedAdam.step raises, since it counts on the host
        raise NotKnown
    multi_tensor.multi_tensor_adam(
        batch.grads,
        batch.stepped,
        batch.averages(optimizer, "exp_avg"),
        batch.averages(optimizer, "exp_avg_sq"),
        None,
        float(count),
        **_adam_settings(batch),
        decoupled=False,
        bias_correction=bool(group["bias_correction"]),
        found_inf=found_inf,
    )


def _number(value: Any, batch: Batch) -> Any:
    """Return a setting as the kernel takes it: a number (read from a CPU tensor), or a tensor on its device."""
    if not isinstance(value, Tensor) or value.device == batch.masters[0].device:
        return value
    return value.item() if value.device.type == "cpu" else value.to(batch.masters[0].device)


def _state_lists(optimizer: Any, batch: Batch, names: tuple[str, ...]) -> list[list[Tensor]]:
    """Return for each name the list of the masters' state tensors; torch's own code creates missing states."""
    state = optimizer.state
    states = list(map(getattr(state, "get_by_master", state.get), batch.masters))
    if not all(states):
        make_state(
            optimizer, batch.group, [master for master, its in zip(batch.masters, states, strict=True) if not its]
        )
        states = [state[master] for master in batch.masters]
    try:
        if states[0]["step"].dtype is torch.float64:
            for its in states:  # with FP64 as default dtype torch makes FP64 counts; checkpoints may have them too
                its["step"] = its["step"].float()
        return [list(map(batch.getter(name), states)) for name in names]
    except KeyError as error:
        raise NotKnown from error


def make_state(optimizer: Any, group: Group, masters: list[Tensor]) -> None:
    """Let torch's `_init_group` create the state of `masters`, in place."""
    state = optimizer.state
    # `_init_group` needs a gradient. Without stand-ins, the masters' deferred gradients would be materialized.
    stand_ins = {nn.Parameter(master.detach(), requires_grad=False): master for master in masters}
    try:
        for stand_in in stand_ins:
            stand_in.grad = stand_in.detach()
        _, *names = inspect.signature(optimizer._init_group).parameters
        # The other arguments are lists to be filled; only torch 2.6's AdamW also takes the group's `amsgrad`.
        others = [group.get(name, []) for name in names]
        optimizer._init_group({**group, "params": list(stand_ins)}, *others)
        for stand_in, master in stand_ins.items():
            state[master] = state[stand_in]
    except Exception as error:  # the optimizer's own step will raise it again
        raise NotKnown from error
    finally:
        for stand_in in stand_ins:
            state.pop(stand_in, None)


KERNELS: dict[type, Kernel] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    FusedAdam: _fused_adam,
    FusedSGD: _fused_sgd,
}
# The keys of `optimizer.defaults` that a kernel reads, or that `_is_ordinary` refuses, or that choose between
# implementations of the same step (foreach, fused).
_OF_ALL = {"lr", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable"}
_OF_ADAM = _OF_ALL | {"betas", "eps", "amsgrad"}
_OF_SGD = _OF_ALL | {"momentum", "dampening", "nesterov"}
_SETTINGS: dict[Kernel, set[str]] = {
    _adam: _OF_ADAM | {"decoupled_weight_decay"},
    _sgd: _OF_SGD,
    _fused_adam: _OF_ADAM | {"bias_correction"},
    _fused_sgd: _OF_SGD,
}


# ----------------------------------------------------------------------------------------------------------------------
# The step

_NUMBERS = ("weight_decay", "momentum", "dampening", "eps")  # settings that the kernels do not read from the device


class InOnePass(Strategy):
    """A step in one pass over memory: unscale, clip, moments, master and weight.

    At O1 and O4 the parameters are FP32 and have no masters. There it reads the unscaled FP32 gradients.
    """

    waits = False  # without masters no gradient is deferred
    batch = Batch

    def suits_class(self, base: Any) -> bool:
        """Return whether `base` is exactly a class of `KERNELS`, and its `step` has not been replaced."""
        return base in KERNELS and is_untouched(base.step)

    def knows(self, optimizer: Any, stash: Stash) -> bool:
        return kernel_of(optimizer) is not None and can_wait()

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        # With the backend "torch", torch's own step is closer to torch's numbers.
        if given or backends.active is None:
            return False
        if stash.masters.waiting is not None:
            return True
        if not stash.policy.patch_torch_functions:
            return False
        for group in optimizer.param_groups:  # as far as its settings and its first trained parameter tell
            if group.get("capturable") or group.get("differentiable"):
                return False
            for param in group["params"]:
                if param.requires_grad:
                    if type(param) not in PLAIN_TYPES or param.dtype is not torch.float32:
                        return False
                    break
        return True

    @without_grad
    def run(self, step: Step, plain: Plain) -> None:
        optimizer = step.optimizer
        if step.links.params:
            sync = settle if step.links.on_host else publish_written  # counters tell which weights were written
            sync(step.links)
        try:
            batches = _batches(optimizer, step.stash, self.batch)
        except NotKnown:
            WHOLE.run(step, plain)
            return
        step.writes = True
        _step_all(step, batches, counts(optimizer) if batches else [], plain)


IN_ONE_PASS = InOnePass()


def _step_all(step: Step, batches: list[Batch], counted: list[int], plain: Plain) -> None:
    """Step the batches: by kernels, or by the optimizer's own code if the kernels refuse a batch."""
    optimizer, links = step.optimizer, step.links
    masters = (master for batch in batches for master in batch.masters)
    left = without_materialized(masters, partial(_run_kernels, step, batches))
    others = None
    if left or sum([len(batch.weights) for batch in batches]) < len(links.params):
        others = links.without({record for batch in batches if batch not in left for record in batch.records})
        settle(others)
    if not left:
        for group, count in zip(optimizer.param_groups, counted, strict=False):
            group["step"] = count
        done(step)
        return
    records = {record for batch in left for record in batch.records}
    step.unpublished = LinkList(pair for pair in links if pair[1] in records)
    _step_with_torch(optimizer, left, plain)
    done(step, others)


def done(step: Step, left: LinkList | None = None) -> None:
    """Record that the step is made, and that all weights except those of `left` are in sync with their masters."""
    step.stepped = True
    links = step.links if left is None else step.links.without(set(left.records))
    links.versions.save()


def _run_kernels(step: Step, batches: list[Batch]) -> list[Batch]:
    """Run the kernels. Return the batches that they refuse, before the first write."""
    optimizer, flag = step.optimizer, step.overflow
    kernel, left = kernel_of(optimizer), []
    for batch in batches:
        try:
            if kernel is None or not _is_ordinary(optimizer, batch.group, flag):
                raise NotKnown
            with torch._C.DisableTorchFunctionSubclass():  # kernels read no values of closed masters, only metadata
                kernel(optimizer, batch, None if flag is None else flag.to(batch.grads[0].device))
        except (NotKnown, TypeError, ValueError) as error:
            if isinstance(error, getattr(backends.active, "Refused", ())):
                warnings.warn(
                    f"step: the extension refuses tensors of {base_class(optimizer).__name__} that its contract takes "
                    f"({error}). torch's own code makes the step, which is slower. Please report this",
                    RuntimeWarning,
                    stacklevel=2,
                )
            left.append(batch)
            continue
        if batch.draws:
            note_stepped(batch.masters)
        if step.links.on_host:
            on_host.send([param for record in batch.records if (param := record.param()) is not None], batch.records)
    return left


def _is_ordinary(optimizer: Any, group: Group, flag: Tensor | None) -> bool:
    """Return whether the kernels support all settings of the group: numbers, not tensors, and no `capturable`."""
    if group.get("capturable") or group.get("differentiable") or getattr(optimizer, "grad_scale", None) is not None:
        return False
    if flag is None and getattr(optimizer, "found_inf", None) is not None:  # a GradScaler's
        return False
    settings = (*map(group.get, _NUMBERS), *group.get("betas", ()))
    return not [setting for setting in settings if isinstance(setting, Tensor)]


def _batches(optimizer: Any, stash: Stash, kind: type[Batch]) -> list[Batch]:
    """Return batches of the parameters that have a gradient.

    A group has up to three batches on a device: parameters with deferred gradients, other parameters with a master, and
    parameters without one.

    Raises:
        NotKnown: a gradient is sparse.
    """
    waiting = stash.masters.waiting
    if waiting:
        if on_host.used:
            on_host.arrive()
        add_gradients(stash.masters.links.masters)
    factors = [] if waiting is None else waiting.factors
    apart = stash.masters.links.on_host
    held, made, start = stash.masters.of_some(optimizer.param_groups), list[Batch](), 0
    for group in optimizer.param_groups:
        end = start + len(group["params"])
        params, records = held.params[start:end], held.records[start:end]
        start = end
        weights = on_host.twins(params, records) if apart else params
        grads = [record.half for record in records if record.half is not None]
        if grads and len(grads) == len(records):  # the usual case
            size = SENT_TOGETHER if apart else len(grads)
            for first in range(0, len(grads), size):
                part = slice(first, first + size)
                lists = group["params"][part], grads[part], weights[part], records[part]
                made += _by_age(optimizer, kind(group, factors, *lists))
            continue
        batches: dict[tuple[Any, ...], Batch] = {}
        for param, weight, record in zip(params, weights, records, strict=True):
            waits, master = record.half is not None, record.master
            grad = record.half if waits else master.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise NotKnown  # sparse: torch's own step takes it or raises, before any parameter is stepped
            which = (waits, param is master, grad.device)
            batch = batches.setdefault(which, kind(group, factors if waits else ()))
            batch.masters.append(master)
            batch.grads.append(grad)
            if param is not master:
                batch.weights.append(weight)
                batch.records.append(record)
        for batch in batches.values():
            made += _by_age(optimizer, batch)
    return made


def _ready(batch: Batch) -> Batch:
    """Set the tensors that the kernel writes, and the arguments of stochastic rounding; return the complete batch."""
    batch.stepped, batch.seed, batch.draws = kernel_tensors(batch.masters)
    return batch


def _by_age(optimizer: Any, batch: Batch) -> list[Batch]:
    """Return the batch. With momentum, split it into parameters with and without a momentum buffer.

    A kernel treats the two parts differently, because the first momentum is a copy of the gradient.
    """
    if not batch.group.get("momentum"):
        return [_ready(batch)]
    fresh = [optimizer.state[master].get("momentum_buffer") is None for master in batch.masters]
    made = []
    for first_run in set(fresh):
        chosen = [is_fresh is first_run for is_fresh in fresh]
        masters, grads = list(compress(batch.masters, chosen)), list(compress(batch.grads, chosen))
        weights, records = list(compress(batch.weights, chosen)), list(compress(batch.records, chosen))
        made.append(_ready(type(batch)(batch.group, batch.factors, masters, grads, weights, records, first_run)))
    return made


def _step_with_torch(optimizer: Any, batches: list[Batch], plain: Plain) -> None:
    """Step the parameters of `batches` with the optimizer's own code."""
    chunks = ((group, [b.masters for b in batches if b.group is group]) for group in optimizer.param_groups)
    partial = PartialStep(optimizer, [(group, list(chain(*masters))) for group, masters in chunks])
    for batch in batches:
        materialize(batch.masters)
    try:
        plain(partial.shell)
    finally:
        partial.give_back()
    for batch in batches:
        for master in batch.masters:  # torch's fused kernels do not increment version counters
            torch.autograd.graph.increment_version(master)
