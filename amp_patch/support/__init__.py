"""How amp_patch touches torch's objects: undo stacks, generated classes, containers, compiled and distributed code."""

from __future__ import annotations
