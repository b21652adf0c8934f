"""The agreement of levels in nats: log-probabilities of the targets with the first weights of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.plan import BASELINE
from amp_patch.diagnose import wording
from amp_patch.diagnose.output_distance import compare_outputs
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.support import tree


class FirstBatch:
    """The first weights and the first batch of a comparison, if its targets are classes.

    The weights are on the host: on a GPU they would count as memory of the levels.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held: tuple[nn.Module, Any, tuple[Any, ...], Tensor] | None = None

    def see(self, model: nn.Module, inputs: Iterable[Any], targets: Any) -> None:
        """Copy the model, its inputs and targets at the first call."""
        if self.asked:
            return
        self.asked = True
        weight = next(model.parameters(), None)
        if weight is not None and isinstance(targets, Tensor) and targets.dtype is torch.int64 and targets.dim():
            given = tuple(tree.map_tensors(Tensor.clone, [*inputs]))
            self._held = fp32_copy(model).cpu(), weight.device, given, targets.clone()

    def in_words(self, levels: Iterable[LevelResult]) -> str:
        """Return a line on the levels that have runs; "" if the model returns no logits of the targets."""
        if self._held is None:
            return ""
        model, device, inputs, targets = self._held
        model.to(device)
        said = []
        for level in levels:
            if not level.runs or level.level == BASELINE:
                continue
            options = {} if level.other_dtype is None else {"dtype": getattr(torch, level.other_dtype)}
            try:
                found = compare_outputs(model, inputs, [level.level], targets=targets, **options).distances[0]
            except ValueError:  # the outputs are no logits, or have another shape than the targets
                return ""
            if found.nats is None or found.largest_nats is None:
                return ""
            words = f"{level.name} {wording.two(found.nats)} ({wording.two(found.largest_nats)}"
            said.append(words + (")" if found.sequence is None else f"; 1 ± {wording.two(found.sequence)})"))
        of_sequence = "; ratio of a whole sequence" * (targets.dim() > 1)
        what = "Log-probabilities of the targets differ from O0's, with the first weights, in the mean by nats (at most"
        return f"{what}{of_sequence}): {', '.join(said)}." if said else ""
