"""Which FP32 master stands behind a low-precision parameter, and keeping the two in step.

The association is one dictionary, keyed by the parameter's identity and holding it weakly: an attribute on the
parameter would be written into every pickle of it. A parameter that two optimizers update has one master, as it has one
value in FP32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.memory import Recycled


class Link:
    """The master of a parameter; it does not hold the parameter.

    Attributes:
        master: FP32, the parameter's shape.
        version: the master's version counter when its value was last published to the parameter.
        gradients: where the master's gradients are made.
    """

    __slots__ = ("gradients", "master", "version")

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.version = master._version
        self.gradients = Recycled()


# A parameter with the link to its master.
Linked = tuple[Tensor, Link]

# By the parameter's id, which is its own until it dies, and then the reference takes the entry away.
_links: dict[int, tuple[weakref.ref[Tensor], Link]] = {}


def link_of(param: Tensor) -> Link | None:
    """The link of `param` to its master, or None where it has none."""
    entry = _links.get(id(param))
    return None if entry is None else entry[1]


def master_of(param: Tensor) -> Tensor | None:
    """The FP32 master of `param`, or None where `param` is its own."""
    link = link_of(param)
    return None if link is None else link.master


def connect(param: Tensor, master: Tensor) -> Link:
    """Make `master` (FP32, the shape of `param`) the master of `param`."""
    link = link_of(param)
    if link is None or link.master is not master:
        link = Link(master)
        key = id(param)
        _links[key] = (weakref.ref(param, functools.partial(_forget, _links, key)), link)
    return link


def disconnect(param: Tensor) -> None:
    """Forget the master of `param`, if it has one."""
    _links.pop(id(param), None)


def linked(params: Iterable[Tensor]) -> list[Linked]:
    """Those `params` that have a master, with their links."""
    return [(param, link) for param in params if (link := link_of(param)) is not None]


@torch.no_grad()
def publish(pairs: Sequence[Linked]) -> None:
    """Round every master into its parameter, in place, on the device; no sync."""
    for params, masters in _by_device(pairs):
        multi_tensor.multi_tensor_scale(masters, params, 1.0)
    _mark_published(pairs)


def publish_written(pairs: Sequence[Linked]) -> list[Linked]:
    """Publish those masters that were written since they last were, and return them; no sync."""
    written = [pair for pair in pairs if pair[1].master._version != pair[1].version]
    if written:
        publish(written)
    return written


@torch.no_grad()
def reconcile(pairs: Sequence[Linked]) -> None:
    """Bring masters and parameters in step after edits by the user, in place, on the device; no sync.

    A master that was written since it was published is published. Elsewhere each element of a parameter that is no
    longer its master's rounded value was edited (weights clamped, initialized by hand), also through `.data`, which no
    version counter tells: the master adopts it. All other elements keep the master's precision.
    """
    written = publish_written(pairs)
    if written:
        published = {id(link) for _, link in written}
        pairs = [pair for pair in pairs if id(pair[1]) not in published]
    for params, masters in _by_device(pairs):
        multi_tensor.multi_tensor_adopt(params, masters)
    _mark_published(pairs)


def _forget(entries: dict[int, tuple[weakref.ref[Tensor], Link]], key: int, reference: weakref.ref[Tensor]) -> None:
    # Disconnected and connected again, the parameter has another reference by now.
    entry = entries.get(key)
    if entry is not None and entry[0] is reference:
        del entries[key]


def _mark_published(pairs: Sequence[Linked]) -> None:
    for _, link in pairs:
        link.version = link.master._version


def _by_device(pairs: Sequence[Linked]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Per device the parameters and their masters."""
    devices = {param.device for param, _ in pairs}
    if len(devices) == 1:
        return [([param for param, _ in pairs], [link.master for _, link in pairs])]
    return [group for device in devices for group in _by_device([pair for pair in pairs if pair[0].device == device])]
