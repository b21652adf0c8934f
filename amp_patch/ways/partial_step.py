"""Running an optimizer's own step on some of its parameters, or on other tensors instead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from amp_patch.support.generated_class import base_class
from amp_patch.support.tree import same

Group = dict[str, Any]

NOT_SETTINGS = ("params",)
NOT_ATTRIBUTES = ("param_groups", "state")


def new_of_class(optimizer: Any) -> Any:
    """Return an object of the optimizer's own class, made without `__init__`: it has no attributes yet."""
    return object.__new__(base_class(optimizer))


class PartialStep:
    """A second optimizer object, `shell`, whose groups hold some of the parameters, or other tensors instead of them.

    The class's own code runs on `shell`, so an exception leaves groups and gradients of the optimizer unchanged. The
    `state` dict is the optimizer's.

    Args:
        optimizer: the user's optimizer.
        chunks: (group, parameters of this group to step).
        replace: maps each parameter to the tensor that is stepped instead.

    Settings and attributes that the code writes into `shell` reach the optimizer by `give_back`, or by `Written`.
    """

    def __init__(
        self,
        optimizer: Any,
        chunks: Iterable[tuple[Group, list[Tensor]]],
        replace: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.groups: list[Group] = []
        self.shell = shell = new_of_class(optimizer)
        vars(shell).update(vars(optimizer))
        shell.param_groups = []
        for group, params in chunks:
            self.groups.append(group)
            shell.param_groups.append({**group, "params": params if replace is None else list(map(replace, params))})

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of `shell` that the class's own code has set or replaced."""
        return changed(vars(self.optimizer), vars(self.shell), NOT_ATTRIBUTES)

    def give_back(self) -> None:
        """Copy the settings and attributes that the class's own code has set on `shell` to the user's optimizer."""
        for group, after in zip(self.groups, self.shell.param_groups, strict=True):
            group.update(changed(group, after, NOT_SETTINGS))
        vars(self.optimizer).update(self.attributes())


class PortionsDisagreeError(RuntimeError):
    """Two portions of a step have written different numbers into the group or the optimizer."""


class Written:
    """Settings and attributes that the partial steps of one step have written, until `write_back`.

    They are collected because each partial step must begin with the values from before the step.
    """

    def __init__(self) -> None:
        self._attributes: dict[str, Any] | None = None
        self._settings: list[tuple[Group, Group]] = []  # (group, settings)

    def _of(self, group: Group) -> Group | None:
        return next((settings for known, settings in self._settings if known is group), None)

    def has(self, group: Group) -> bool:
        """Return whether `note` has received a partial step with this group."""
        return self._of(group) is not None

    def note(self, partial: PartialStep) -> None:
        """Collect the settings and attributes that `partial` has written.

        Raises:
            PortionsDisagreeError: an earlier partial step has written other values.
        """
        optimizer, attributes = partial.optimizer, partial.attributes()
        self._refuse_if_different(optimizer, self._attributes, attributes, "optimizer")
        for group, after in zip(partial.groups, partial.shell.param_groups, strict=True):
            settings = changed(group, after, NOT_SETTINGS)
            self._refuse_if_different(optimizer, earlier := self._of(group), settings, "group")
            if earlier is None:
                self._settings.append((group, settings))
        self._attributes = attributes

    @staticmethod
    def _refuse_if_different(optimizer: Any, before: dict[str, Any] | None, now: dict[str, Any], where: str) -> None:
        if before is None or same(before, now):
            return
        name = next(name for name in [*before, *now] if not same(before.get(name), now.get(name)))
        kind = base_class(optimizer).__name__
        raise PortionsDisagreeError(
            f"{kind}.step: {kind} was registered by register_per_parameter_optimizer, but its step has left {name!r} "
            f"of the {where} at {before.get(name)} with some parameters and at {now.get(name)} with others: it does "
            "not step each parameter by itself. Some parameters are stepped: go back to a checkpoint, and leave the "
            "registration out"
        )

    def write_back(self, optimizer: Any) -> None:
        """Write the collected settings and attributes into the optimizer and its groups."""
        for group in optimizer.param_groups:
            group.update(self._of(group) or {})
        vars(optimizer).update(self._attributes or {})


def changed(before: dict[str, Any], after: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in after.items()
        if name not in without and not (name in before and before[name] is value)
    }
