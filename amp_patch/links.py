"""Which FP32 master stands behind a low-precision parameter, and keeping the two in step.

The association is one weak dictionary, keyed by the parameter's identity: an attribute on the parameter would be
written into every pickle of it. A parameter that two optimizers update has one master, as it has one value in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch import multi_tensor


class _Link:
    __slots__ = ("master", "version")

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.version = master._version  # of the master when its value was last published to the parameter


_links: WeakIdKeyDictionary = WeakIdKeyDictionary()


def master_of(param: Tensor) -> Tensor | None:
    """The FP32 master of `param`, or None where `param` is its own."""
    link = _links.get(param)
    return None if link is None else link.master


def link(param: Tensor, master: Tensor) -> None:
    """Make `master` (FP32, the shape of `param`) the master of `param`."""
    _links[param] = _Link(master)


def unlink(param: Tensor) -> None:
    """Forget the master of `param`, if it has one."""
    _links.pop(param, None)


def with_masters(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The pairs (param, master) of those `params` that have one."""
    return [(param, master) for param in params if (master := master_of(param)) is not None]


def publish(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Round every master into its parameter, in place, on the device; no sync."""
    for params, masters in _by_device(pairs):
        multi_tensor.multi_tensor_scale(masters, params, 1.0)
    _mark_published(pairs)


def reconcile(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Bring masters and parameters in step after edits by the user, in place, on the device; no sync.

    A master that was written since it was published is published. Elsewhere each element of a parameter that is no
    longer its master's rounded value was edited (weights clamped, initialized by hand), also through `.data`, which no
    version counter tells: the master adopts it. All other elements keep the master's precision.
    """
    written = [pair for pair in pairs if pair[1]._version != _links[pair[0]].version]
    publish(written)
    published = {id(param) for param, _ in written}
    rest = [pair for pair in pairs if id(pair[0]) not in published]
    for params, masters in _by_device(rest):
        multi_tensor.multi_tensor_adopt(params, masters)
    _mark_published(rest)


def _mark_published(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for param, master in pairs:
        _links[param].version = master._version


def _by_device(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for param, master in pairs:
        params, masters = groups.setdefault(param.device, ([], []))
        params.append(param)
        masters.append(master)
    return groups.values()
