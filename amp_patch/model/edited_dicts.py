"""Edits that a forward makes in the dicts and objects that it receives: its cast copies are copied back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from amp_patch.model.forward import cast_out
from amp_patch.model.joints import Call, Entry, ForwardGuest
from amp_patch.support import tree

_COPIES = "edited dicts"  # in `Call.notes`


class EditedDicts(ForwardGuest):
    """Gives callers the edits that a forward makes in cast copies of their dicts and objects."""

    def cast_in(self, call: Call) -> None:
        """Store the cast copies of dicts and objects, and their content before the call."""
        if call.kind[-1]:
            call.state.guests.dismiss(self, call.kind)
            return
        given, passed = (*call.given[0], *call.given[1].values()), (*call.args, *call.kwargs.values())
        call.notes[_COPIES] = [
            (mine, copy, dict(copy))
            for whole, cast in zip(given, passed, strict=True)
            if cast is not whole and not isinstance(cast, Tensor)
            for mine, copy in tree.edited_places(whole, cast)
        ]

    def cast_out(self, call: Call, output: Any, result: Any) -> Any:
        """Copy forward's edits of the copies back into the caller's dicts; new values are cast as outputs are."""
        for mine, copy, before in call.notes.get(_COPIES, ()):
            for key in before.keys() - copy.keys():
                mine.pop(key, None)
            for key, value in copy.items():
                if key not in before or value is not before[key]:
                    mine[key] = cast_out(value, call.state.policy, call.outer)
        return result


def choose(model: nn.Module, entry: Entry) -> EditedDicts | None:
    """Return a guest if the training casts inputs."""
    return None if entry.policy.cast_model_type is None else EditedDicts()
