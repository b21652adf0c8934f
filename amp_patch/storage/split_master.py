"""FP32 masters in two halves: the BF16 weight is the high one, and an int16 tensor keeps the other 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters.closed_master import ClosedMaster, Form


class Halves(Form):
    """Of each master the low half is kept beside the weight, as int16: every number comes back to the bit."""

    def begin(self, param: Tensor, master: ClosedMaster, value: Tensor | None) -> None:
        master.low_half = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
        if value is not None:
            self.write([(param, master, value)])

    def read(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        weights, halves, values = _lists(masters)
        multi_tensor.multi_tensor_join(weights, halves, values)

    def write(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        weights, halves, values = _lists(masters)
        multi_tensor.multi_tensor_split(values, weights, halves)


HALVES = Halves()


def _lists(masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    halves = [half for _, master, _ in masters if (half := master.low_half) is not None]
    return [weight for weight, _, _ in masters], halves, [value for _, _, value in masters]
