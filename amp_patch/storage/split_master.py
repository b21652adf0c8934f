"""FP32 masters stored in two halves: the BF16 weight is the high half, an int16 tensor holds the low 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters.closed_master import ClosedMaster, Form


class Halves(Form):
    """The form of a master stored as the weight and an int16 low half: the FP32 value is restored bit for bit."""

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
