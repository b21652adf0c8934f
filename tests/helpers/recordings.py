"""Recordings on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable

from amp_patch.lab.recording.run import Event, loads


def read_lines(lines: Iterable[str]) -> list[Event]:
    """The events of a recording; a last line that was cut off (the process was killed) is left out."""
    events = []
    for line in lines:
        try:
            events.append(loads(line))
        except json.JSONDecodeError:
            break
    return events
