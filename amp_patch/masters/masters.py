"""The table of FP32 masters by low-precision parameter, and the functions that keep the two in sync.

`Masters.attach` (of_optimizer.py) creates a master when an optimizer enters a training; `connect` enters it here.
The table is one dictionary of the process, keyed by the id of the parameter, with weak references to the parameters.
(If the master were an attribute of its parameter, each pickle of the parameter would contain it.) A parameter that two
optimizers update has one master for both.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from amp_patch import multi_tensor
from amp_patch.masters import closed_master, on_host
from amp_patch.masters.closed_master import ClosedMaster, form_of, is_closed
from amp_patch.masters.conversions import refuse_conversions
from amp_patch.masters.grad_field import GRAD, with_gradient
from amp_patch.masters.grad_route import route_through
from amp_patch.masters.master import Master, take_masters
from amp_patch.masters.record import Record, SavedVersion, SavedVersions
from amp_patch.support.blocks import without_grad
from amp_patch.support.devices import by_device
from amp_patch.support.patches import Installation

Result = TypeVar("Result")


class LinkList:
    """Parameters that have masters, with their records, in order; iteration yields (param, record).

    Attributes:
        params, records, masters: lists of one length.
        versions: finds in one call the masters that were written since they were copied back.
        on_host: whether any master is on the host, and its parameter on a device.
    """

    __slots__ = ("masters", "on_host", "params", "records", "versions")

    def __init__(self, pairs: Iterable[tuple[Tensor, Record]] = ()) -> None:
        pairs = list(pairs)
        self.params = [param for param, _ in pairs]
        self.records = [record for _, record in pairs]
        self.masters = [record.master for record in self.records]
        self.versions = SavedVersions([record.version for record in self.records])
        self.on_host = on_host.used and any(record.host is not None for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[tuple[Tensor, Record]]:
        return zip(self.params, self.records, strict=True)

    def without(self, records: Container[Record]) -> LinkList:
        """Return the list without `records`; `self` if it has none of them."""
        kept = [pair for pair in self if pair[1] not in records]
        return self if len(kept) == len(self) else LinkList(kept)


# id(parameter) -> its record. When the parameter is freed, the callback of the weak reference `record.param` removes
# the entry, so that the id cannot match another object.
_records: dict[int, Record] = {}
_changes = 0  # the number of parameters that got a master, lost it, or were freed with it

# Classes whose `__torch_function__` is torch's or this package's.
PLAIN_TYPES = (Tensor, nn.Parameter, Master, ClosedMaster)

_FOREACH_TYPES = "_foreach_supported_types"  # torch's list of the classes that its optimizers choose foreach for
_installation = Installation()


def link_of(param: Tensor) -> Record | None:
    """Return the record of `param`; None if it has no master."""
    return _records.get(id(param))


def master_of(param: Tensor) -> Tensor | None:
    """Return the FP32 master of `param`; None if it has no master."""
    link = link_of(param)
    return None if link is None else link.master


def has_gradient(master: Tensor) -> bool:
    """Tell whether `master`, or a parameter without one, has a gradient of any type. Does not materialize it."""
    if not isinstance(master, Master):
        return master.grad is not None
    record = master.record()
    return (record is not None and record.half is not None) or GRAD.__get__(master) is not None


def add_gradients(masters: Sequence[Tensor]) -> None:
    """Where backward through a master itself has left a gradient, add the deferred one, if there is one; no sync."""
    for index in with_gradient([*masters]):
        if isinstance(master := masters[index], Master) and (record := master.record()) is not None:
            record.materialize()


def connect(param: Tensor, master: Tensor) -> Record:
    """Make `master` (FP32, the shape of `param`) the master of `param`, and return their record."""
    global _changes
    record = link_of(param)
    if record is None or record.master is not master:
        route_through(type(param), link_of)
        refuse_conversions(link_of)
        if type(master) is nn.Parameter and _install():
            take_masters()
            master.__class__ = Master
        record = Record(master)
        record.version = SavedVersion(master)
        if on_host.is_apart(param, master):
            record.host = on_host.OnHost()
        if isinstance(master, Master):
            master.record = weakref.ref(record)
        key = id(param)
        record.param = weakref.ref(param, functools.partial(_forget, _records, key))
        _records[key] = record
        _changes += 1
    return record


def disconnect(param: Tensor) -> None:
    """Remove the master of `param`, if it has one."""
    global _changes
    record = _records.pop(id(param), None)
    if record is not None:
        _changes += 1
        master = record.master
        if isinstance(master, ClosedMaster):
            closed_master.make_whole(master)
        if type(master) is Master:
            record.stop_waiting()
            vars(master).pop("record", None)
            master.__class__ = nn.Parameter  # type: ignore[assignment]


def _install() -> bool:
    """Let torch's optimizers choose their foreach form for masters, as for other parameters; idempotent.

    Returns:
        False if this torch does not have the list of classes to extend.
    """
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim has no attribute of this name
    types = getattr(module, _FOREACH_TYPES, None)
    if isinstance(types, list) and Master not in types:
        _installation.add(lambda patches: patches.set(module, _FOREACH_TYPES, [*types, Master, ClosedMaster]))
    return isinstance(types, list)


def links_of(params: Iterable[Tensor]) -> LinkList:
    """Return the records of the `params` that have a master."""
    return LinkList((param, record) for param in params if (record := link_of(param)) is not None)


def materialize(masters: Iterable[Tensor]) -> None:
    """Write the FP32 values of compressed masters into their memory, for a step; other masters stay. No sync."""
    if closed_master.used:
        closed_master.materialize(masters)


class Claim:
    """The masters that a step on `thread` is writing: other threads neither publish nor settle them.

    Otherwise a `state_dict()` on another thread, which settles, would take the old weights for edits and overwrite the
    step's masters. A step adds its claim to `running` under `lock`, so it first waits for the end of a `publish` or
    `settle` on another thread. There is no `__init__`, because it would cost a Python call per step.
    """

    lock: ClassVar = closed_master.lock
    running: ClassVar[weakref.WeakSet[Claim]] = weakref.WeakSet()
    links: LinkList
    thread: int


def _at_rest(links: LinkList) -> LinkList:
    """Return `links` without the links whose master is being written by a step of another thread."""
    for claim in Claim.running:
        if claim.thread != get_ident():
            links = links.without(set(claim.links.records))
    return links


class KernelTensors(NamedTuple):
    """The tensors that a kernel updates instead of the masters, and the arguments of stochastic rounding.

    The arguments are empty unless all tensors are stochastically rounded weights.

    Attributes:
        tensors: each master itself, or the storage of a compressed one: the low half (int16), or the weight.
        seed, draws: as in `multi_tensor_stochastic_round`.
    """

    tensors: list[Tensor]
    seed: int = 0
    draws: Sequence[int] = ()


def kernel_tensors(masters: list[Any]) -> KernelTensors:
    """Return the tensors that a kernel writes at a step of `masters`: of a compressed master its low half or weight."""
    if not closed_master.used:
        return KernelTensors(masters)
    tensors: list[Tensor] = []
    draws: list[Any] = []
    seed = 0
    for master in masters:
        tensor = master
        if type(master) is ClosedMaster and (form := master.form) is not None:
            if (half := master.low_half) is not None:
                tensor = half
            elif (weight := master.weight()) is not None:
                tensor, seed = weight, form.seed
                if not draws:
                    form.check_step()
                draws.append(master.draw)
        tensors.append(tensor)
    return KernelTensors(tensors, seed, draws) if len(draws) == len(masters) else KernelTensors(tensors)


def note_stepped(masters: list[Any]) -> None:
    """After a kernel's step of `masters`, advance `draw`, so that their next step rounds with other random bits."""
    for master in masters:
        master.draw, master.edits = master.draw + 1, 0


def without_materialized(masters: Iterable[Tensor], call: Callable[[], Result]) -> Result:
    """Free the FP32 memory of compressed `masters`, then call `call()`, which updates their `kernel_tensors`.

    If another tensor references such memory, the memory stays, and receives the new values afterwards, also after an
    exception.
    """
    if not closed_master.used:
        return call()
    with closed_master.lock:
        held = closed_master.release(masters)
        try:
            return call()
        finally:
            for master in held:  # a kernel counts no write here, and autograd may have saved a view
                torch.autograd.graph.increment_version(master)
            closed_master.follow(held)


@without_grad
def publish(links: LinkList) -> None:
    """Round every master into its parameter, in place; no sync. Skip masters that another thread's step is writing."""
    with closed_master.lock:
        links = _at_rest(links)
        round_into_weights(links)
        links.versions.save()


def round_into_weights(links: LinkList) -> None:
    """Round masters into parameters as `publish` does; the caller saves their versions. Call under no_grad."""
    closed, whole = _parted(links)
    if closed:
        with closed_master.lock:
            closed_master.store(closed)
    weights = on_host.twins(whole.params, whole.records) if whole.on_host else whole.params
    for params, masters in by_device(zip(weights, whole.masters, strict=True)).values():
        multi_tensor.multi_tensor_scale(masters, params, 1.0)
    if whole.on_host:
        on_host.send(whole.params, whole.records)


def publish_written(links: LinkList) -> set[Record]:
    """Publish the masters written since the last `publish`; no sync with the device. Return their records."""
    if not links.versions.written():
        return set()
    with closed_master.lock:
        written = links.versions.written()  # asked again, because another thread may have published them meanwhile
        publish(LinkList((links.params[index], links.records[index]) for index in written))
    return {links.records[index] for index in written}


@without_grad
def settle(links: LinkList) -> None:
    """Sync masters and parameters after edits by user code, in place; no sync with the device.

    If a master was written since it was last copied back, it is copied back. Otherwise its parameter may have edits. To
    find them the values are compared, since edits through `.data` do not change the version counter. If an element of
    the parameter differs from the rounded element of its master, user code has edited it (clamped weights,
    initialization), and the master takes its value. All other elements keep the master's precision.

    A compressed master is stored in the parameter, so an edit of the parameter has changed it already. Its FP32 memory
    is freed. Masters that another thread's step is writing are skipped. If a master is on the host and its parameter is
    on a device, counters of writes tell whether the values must be compared.
    """
    with closed_master.lock:
        links = _at_rest(links)
        if written := publish_written(links):
            links = links.without(written)
        closed, whole = _parted(links)
        if closed:
            closed_master.drop_joined(master for _, master in closed)
        if whole.on_host:
            whole = on_host.edited(whole)
        for params, masters in by_device(zip(whole.params, whole.masters, strict=True)).values():
            multi_tensor.multi_tensor_adopt(params, masters)
        links.versions.save()


@without_grad
def load(param: Tensor, link: Record, value: Tensor) -> None:
    """Set a parameter and its master to the value of a checkpoint, in place; no sync with the device.

    If the master's form stores only the weight, the value is rounded to nearest. Stochastic rounding is for updates.
    """
    form = form_of(link.master)
    if form is not None and not form.is_exact:
        param.copy_(value)  # first: `value` may share the memory of an open master, which is joined anew below
        closed_master.drop_joined([link.master])
        link.version.save()
        return
    link.master.copy_(value)
    publish(LinkList([(param, link)]))  # one by one, because this frees the FP32 memory of a compressed master


class ModelLinks:
    """The records of one model's parameters. The list is rebuilt after any parameter has got or lost a master."""

    __slots__ = ("_changes", "_links", "model")

    def __init__(self) -> None:
        self.model: weakref.ref[nn.Module] | None = None  # None for a copy that was never copied
        self._changes = -1
        self._links: LinkList | None = None

    def publish_written(self, model: nn.Module) -> None:
        """Publish the masters of `model` written since the last `publish`; no sync with the device."""
        if self._changes != _changes and not vars(model).get("_is_replica"):  # DataParallel's, which shares this object
            self._links, self._changes = links_of(dict.fromkeys(model.parameters())) or None, _changes
        if self._links is not None and self._links.versions.written():
            with torch.inference_mode(False):
                publish_written(self._links)


def _forget(records: dict[int, Record], key: int, reference: weakref.ref[Tensor]) -> None:
    global _changes
    # A parameter that was disconnected and connected again has another reference.
    record = records.get(key)
    if record is not None and record.param is reference:
        del records[key]
        _changes += 1


def _parted(links: LinkList) -> tuple[list[tuple[Tensor, Tensor]], LinkList]:
    """Split `links` in two: return (param, master) of each compressed master, and the records of all other masters."""
    closed = [(param, record) for param, record in links if is_closed(record.master)] if closed_master.used else []
    whole = links.without({record for _, record in closed}) if closed else links
    return [(param, record.master) for param, record in closed], whole
