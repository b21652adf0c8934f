"""Which FP32 master stands behind a low-precision parameter, and how the two are kept in step.

One dictionary of the process says so, by the id of the parameter, which it holds weakly. An attribute of the parameter
would be written into every pickle of it. A parameter that two optimizers update has one master for both.
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
from amp_patch.masters import closed_master
from amp_patch.masters.closed_master import ClosedMaster, form_of, is_closed
from amp_patch.masters.conversions import refuse_conversions
from amp_patch.masters.grad_field import GRAD, with_gradient
from amp_patch.masters.grad_route import GradRoute, route_through
from amp_patch.masters.master import Master, take_masters
from amp_patch.masters.recycled_memory import Recycled
from amp_patch.support.blocks import without_grad
from amp_patch.support.patches import Installation
from amp_patch.support.tensor_content import Again, hook_swaps, release_in_swaps

Result = TypeVar("Result")


class PlainSavedVersion:
    """A tensor, and its version counter when `save` was last called. In C++: csrc/masters/versions.cpp."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.save()

    def written(self) -> bool:
        """Whether the tensor was written since its version was saved."""
        return self.version is not None and self.tensor._version != self.version

    def save(self) -> None:
        self.version = None if self.tensor.is_inference() else self.tensor._version  # an inference tensor has none


class PlainSavedVersions:
    """Compares several `SavedVersion` at once; in C++ too."""

    def __init__(self, versions: list[PlainSavedVersion]) -> None:
        self.versions = versions

    def written(self) -> list[int]:
        """The indices of those that were written."""
        return [
            index
            for index, saved in enumerate(self.versions)
            if saved.version is not None and saved.tensor._version != saved.version
        ]

    def save(self) -> None:
        """Save those of all."""
        for saved in self.versions:
            saved.save()


_C: Any = multi_tensor.extension()
SavedVersion: Any = getattr(_C, "SavedVersion", PlainSavedVersion)
SavedVersions: Any = getattr(_C, "SavedVersions", PlainSavedVersions)


class Link:
    """The master of a parameter; it does not hold the parameter.

    Attributes:
        master: FP32, the parameter's shape.
        version: the master's, when its value was last published to the parameter.
        gradients: the memory that the master's gradients are made in.
        route: of the parameter's attribute `grad`.
        is_routed: whether an optimizer has the master, all of whose parameters share the route.
    """

    __slots__ = ("gradients", "is_routed", "master", "route", "version")

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.version = SavedVersion(master)
        self.gradients = Recycled()
        self.route, self.is_routed = GradRoute(), False


class LinkList:
    """Parameters that have masters, in their order, with their links; iteration gives (param, link).

    Attributes:
        params, links, masters: lists of one length.
        versions: tells at once which of the masters were written since they were published.
    """

    __slots__ = ("links", "masters", "params", "versions")

    def __init__(self, pairs: Iterable[tuple[Tensor, Link]] = ()) -> None:
        pairs = list(pairs)
        self.params = [param for param, _ in pairs]
        self.links = [link for _, link in pairs]
        self.masters = [link.master for link in self.links]
        self.versions = SavedVersions([link.version for link in self.links])

    def __len__(self) -> int:
        return len(self.links)

    def __iter__(self) -> Iterator[tuple[Tensor, Link]]:
        return zip(self.params, self.links, strict=True)

    def without(self, masters: Container[int]) -> LinkList:
        """Those whose master's id is not among `masters`; itself where none is."""
        kept = [pair for pair in self if id(pair[1].master) not in masters]
        return self if len(kept) == len(self) else LinkList(kept)


# id(parameter) -> a weak reference to it, and its link. When the parameter dies the callback of the reference takes the
# entry away, so that an id is never another object's.
_links: dict[int, tuple[weakref.ref[Tensor], Link]] = {}
_changes = 0  # how often a parameter got a master, lost it, or died with it

# Classes of tensors that nobody else's `__torch_function__` acts on.
PLAIN_TYPES = (Tensor, nn.Parameter, Master, ClosedMaster)

_FOREACH_TYPES = "_foreach_supported_types"  # torch's list of the classes that its optimizers choose foreach for
_installation = Installation()


def link_of(param: Tensor) -> Link | None:
    """The link of `param` to its master, or None where it has none."""
    entry = _links.get(id(param))
    return None if entry is None else entry[1]


def master_of(param: Tensor) -> Tensor | None:
    """The FP32 master of `param`, or None where `param` is its own."""
    link = link_of(param)
    return None if link is None else link.master


def has_gradient(master: Tensor) -> bool:
    """Whether `master`, or a parameter that is its own, has a gradient, in whichever type; none is made."""
    if not isinstance(master, Master):
        return master.grad is not None
    return bool(master.waiting and master in master.waiting) or GRAD.__get__(master) is not None


def add_gradients(masters: Sequence[Tensor]) -> None:
    """Where a backward pass through a master itself has left a gradient, add the one that waits to it; no sync."""
    for index in with_gradient([*masters]):
        if isinstance(master := masters[index], Master):
            master.materialize_grad()


def connect(param: Tensor, master: Tensor) -> Link:
    """Make `master` (FP32, the shape of `param`) the master of `param`."""
    global _changes
    link = link_of(param)
    if link is None or link.master is not master:
        route_through(type(param), link_of)
        refuse_conversions(link_of)
        if type(master) is nn.Parameter and _install():
            take_masters()
            master.__class__ = Master
        link = Link(master)
        _hold(param, link)
        _changes += 1
        hook_swaps()
    return link


def _hold(param: Tensor, link: Link) -> None:
    key = id(param)
    _links[key] = (weakref.ref(param, functools.partial(_forget, _links, key)), link)


@release_in_swaps
def _let_go(param: Tensor) -> Again | None:
    entry = _links.pop(id(param), None)
    if entry is None:
        return None
    _, link = entry
    closed_master.weight_is(link.master, None)

    def again() -> None:
        _hold(param, link)
        closed_master.weight_is(link.master, param)

    del entry  # the reference
    return again


def disconnect(param: Tensor) -> None:
    """Forget the master of `param`, if it has one."""
    global _changes
    entry = _links.pop(id(param), None)
    if entry is not None:
        _changes += 1
        master = entry[1].master
        if isinstance(master, ClosedMaster):
            closed_master.make_whole(master)
        if type(master) is Master:
            stop_waiting(master)
            vars(master).pop("stepped_grads", None)
            master.__class__ = nn.Parameter  # type: ignore[assignment]


def stop_waiting(master: Tensor) -> None:
    """Give `master` the FP32 gradient that waits for it, and let none wait from now on."""
    if isinstance(master, Master):
        master.materialize_grad()
        vars(master).pop("waiting", None)


def _install() -> bool:
    """Let torch's optimizers choose their foreach form for masters as for other parameters; idempotent.

    Returns whether they do: False where this torch has no such list.
    """
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim has no attribute of this name
    types = getattr(module, _FOREACH_TYPES, None)
    if isinstance(types, list) and Master not in types:
        _installation.add(lambda patches: patches.set(module, _FOREACH_TYPES, [*types, Master, ClosedMaster]))
    return isinstance(types, list)


def links_of(params: Iterable[Tensor]) -> LinkList:
    """The links of those `params` that have a master."""
    return LinkList((param, link) for param in params if (link := link_of(param)) is not None)


def materialize(masters: Iterable[Tensor]) -> None:
    """Have the FP32 value of each of `masters` in its memory, for a step of the optimizer's own; in place, no sync."""
    if closed_master.used:
        closed_master.materialize(masters)


class Claim:
    """The masters of `links`, while a step on `thread` writes them: no other thread publishes or settles them.

    Without it, a thread that calls `state_dict()` while another trains would undo what the step has written so far.
    A claim is added to `running` under `lock`, which waits for a thread that publishes. It has no `__init__`, which
    would take a Python call a step.
    """

    lock: ClassVar = closed_master.lock
    running: ClassVar[weakref.WeakSet[Claim]] = weakref.WeakSet()
    links: LinkList
    thread: int


def _at_rest(links: LinkList) -> LinkList:
    """Those of `links` that no step of another thread writes."""
    for claim in Claim.running:
        if claim.thread != get_ident():
            links = links.without(set(map(id, claim.links.masters)))
    return links


class KernelTensors(NamedTuple):
    """What a kernel steps in the place of masters, and the chance by which it rounds them: none unless all are weights.

    Attributes:
        tensors: each itself, or what is kept of one without memory of its own: the half (int16) beside the weight, or
            the weight.
        seed, draws, starts: as of `multi_tensor_stochastic_round`.
    """

    tensors: list[Tensor]
    seed: int = 0
    draws: Sequence[int] = ()
    starts: Sequence[int] = ()


def kernel_tensors(masters: list[Any]) -> KernelTensors:
    """What a kernel steps in the place of `masters`."""
    if not closed_master.used:
        return KernelTensors(masters)
    tensors: list[Tensor] = []
    draws: list[Any] = []
    starts: list[int] = []
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
                starts.append(master.start)
        tensors.append(tensor)
    return KernelTensors(tensors, seed, draws, starts) if len(draws) == len(masters) else KernelTensors(tensors)


def note_stepped(masters: list[Any]) -> None:
    """Let the next steps of `masters`, which a kernel has stepped, have other draws."""
    for master in masters:
        master.draw, master.edits = master.draw + 1, 0


def without_materialized(masters: Iterable[Tensor], call: Callable[[], Result]) -> Result:
    """`call()`, which steps the `kernel_tensors` of `masters`: their FP32 memory, if any, is given back before.

    Where somebody else holds such memory it is written anew afterwards, exception or not.
    """
    if not closed_master.used:
        return call()
    with closed_master.lock:
        held = closed_master.release(masters)
        try:
            return call()
        finally:
            for master in held:  # a graph may have saved a view of it
                torch.autograd.graph.increment_version(master)
            closed_master.follow(held)


@without_grad
def publish(links: LinkList) -> None:
    """Round every master into its parameter, in place, on the device; no sync. Not those that another thread steps."""
    with closed_master.lock:
        links = _at_rest(links)
        round_into_weights(links)
        links.versions.save()


def round_into_weights(links: LinkList) -> None:
    """`publish`, after which the masters still count as written; under no_grad."""
    closed, whole = _parted(links)
    if closed:
        with closed_master.lock:
            closed_master.store(closed)
    for params, masters in _by_device(whole):
        multi_tensor.multi_tensor_scale(masters, params, 1.0)


def publish_written(links: LinkList) -> set[int]:
    """Publish those masters that were written since they last were, and return their ids; no sync."""
    written = links.versions.written()
    if not written:
        return set()
    publish(LinkList((links.params[index], links.links[index]) for index in written))
    return {id(links.masters[index]) for index in written}


@without_grad
def settle(links: LinkList) -> None:
    """Bring masters and parameters in step after edits by the user, in place, on the device; no sync.

    A master that was written since it was published is published. For the others values decide, since no version
    counter tells of edits through `.data`: an element of the parameter that is not its master's, rounded, was edited
    (weights clamped, initialized by hand), and the master adopts it. All other elements keep the master's precision.

    Of a closed master the parameter is a part, so an edit is in the master by itself. Those that are open are closed.
    Masters that another thread steps are left to it.
    """
    with closed_master.lock:
        links = _at_rest(links)
        if written := publish_written(links):
            links = links.without(written)
        closed, whole = _parted(links)
        if closed:
            closed_master.drop_joined(master for _, master in closed)
        for params, masters in _by_device(whole):
            multi_tensor.multi_tensor_adopt(params, masters)
        links.versions.save()


@without_grad
def load(param: Tensor, link: Link, value: Tensor) -> None:
    """Give a parameter and its master the value of a checkpoint, in place; no sync.

    Where the weight is all that is kept, it is rounded to nearest: by chance would be an update.
    """
    form = form_of(link.master)
    if form is not None and not form.is_exact:
        closed_master.drop_joined([link.master])
        param.copy_(value)
        link.version.save()
        return
    link.master.copy_(value)
    publish(LinkList([(param, link)]))  # one by one: publishing frees a split master's joined memory


class ModelLinks:
    """The links of one model's parameters, which it does not hold; made anew when any parameter has got or lost one."""

    __slots__ = ("_changes", "_links", "_versions")

    def __init__(self) -> None:
        self._changes = -1
        self._links: list[tuple[int, Link]] = []  # by the parameter's id
        self._versions: Any = None

    def publish_written(self, model: nn.Module) -> None:
        """Publish those masters of `model` that were written since they last were; no sync, cheap where none was."""
        if self._changes != _changes:
            links = links_of(dict.fromkeys(model.parameters()))
            self._links = [(id(param), link) for param, link in links]
            self._versions = links.versions if links else None
            self._changes = _changes
        if self._versions is None or not (written := self._versions.written()):
            return
        known = [(_links.get(key), link) for key, link in (self._links[index] for index in written)]
        found = [(entry[0](), link) for entry, link in known if entry is not None]
        with torch.inference_mode(False):
            publish(LinkList((param, link) for param, link in found if param is not None))


def _forget(entries: dict[int, tuple[weakref.ref[Tensor], Link]], key: int, reference: weakref.ref[Tensor]) -> None:
    global _changes
    # A parameter that was disconnected and connected again has another reference by now.
    entry = entries.get(key)
    if entry is not None and entry[0] is reference:
        del entries[key]
        _changes += 1


def _parted(links: LinkList) -> tuple[list[tuple[Tensor, Tensor]], LinkList]:
    """The closed masters (param, master), and the others."""
    closed = [(param, link.master) for param, link in links if is_closed(link.master)] if closed_master.used else []
    return closed, links.without({id(master) for _, master in closed}) if closed else links


def _by_device(links: LinkList) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Per device the parameters and their masters."""
    devices = {param.device for param in links.params}
    if len(devices) == 1:
        return [(links.params, links.masters)]
    both = list(zip(links.params, links.masters, strict=True))
    of_devices = ([pair for pair in both if pair[0].device == device] for device in devices)
    return [([param for param, _ in pairs], [master for _, master in pairs]) for pairs in of_devices]
