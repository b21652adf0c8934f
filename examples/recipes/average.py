"""An average of the weights (EMA, SWA), in FP32. A low-precision one would hardly move.

At O2 and O5 the model's weights are roundings; `model.state_dict()` has the FP32 values that training moves. So the
average is one of a plain FP32 model that is given them. That is right with any library: `EMA(values)` of ema-pytorch,
`ExponentialMovingAverage(values.parameters())` of torch-ema, a deepcopy of `values` and `lerp_`. torch's AveragedModel
does as much by itself when it is given the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY = 0.8


def native(amp: Any, run: Run) -> list[float]:
    model = run.model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        with torch.no_grad():
            losses.append(F.cross_entropy(average(images), labels).item())
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=run.dtype)
    values = amp.fp32_copy(model)
    average = AveragedModel(values, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        values.load_state_dict(model.state_dict())  # the masters' values, exact, at the levels that have masters
        average.update_parameters(values)
        with torch.no_grad(), amp.disable_casts():  # O1's act on loss functions too, outside of models
            losses.append(F.cross_entropy(average(images), labels).item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)
