"""Running an optimizer's own step on some of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from amp_patch.support.generated_class import base_class

Group = dict[str, Any]

NOT_SETTINGS = ("params",)
NOT_ATTRIBUTES = ("param_groups", "state")


def new_of_class(optimizer: Any) -> Any:
    """Return an object of the optimizer's own class, made without `__init__`: it has no attributes yet."""
    return object.__new__(base_class(optimizer))


class PartialStep:
    """A second optimizer object, `shell`, whose groups hold some of the parameters.

    The class's own code runs on `shell`, so an exception leaves groups and gradients of the optimizer unchanged. The
    `state` dict is the optimizer's.

    Args:
        optimizer: the user's optimizer.
        chunks: (group, parameters of this group to step).

    Settings and attributes that the code writes into `shell` reach the optimizer by `give_back`.
    """

    def __init__(self, optimizer: Any, chunks: Iterable[tuple[Group, list[Tensor]]]) -> None:
        self.optimizer = optimizer
        self.groups: list[Group] = []
        self.shell = shell = new_of_class(optimizer)
        vars(shell).update(vars(optimizer))
        shell.param_groups = []
        for group, params in chunks:
            self.groups.append(group)
            shell.param_groups.append({**group, "params": params})

    def written(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (group, settings) and (attributes of the optimizer, attributes): what the code has set on `shell`."""
        own, pairs = vars(self.optimizer), zip(self.groups, self.shell.param_groups, strict=True)
        settings = [(group, changed(group, after, NOT_SETTINGS)) for group, after in pairs]
        return [*settings, (own, changed(own, vars(self.shell), NOT_ATTRIBUTES))]

    def give_back(self) -> None:
        """Copy to the optimizer what the class's own code has set on `shell`."""
        for owner, entries in self.written():
            owner.update(entries)


class PortionsDisagreeError(RuntimeError):
    """Two portions of a step have written different numbers into the group or the optimizer."""


def changed(before: dict[str, Any], after: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in after.items()
        if name not in without and not (name in before and before[name] is value)
    }
