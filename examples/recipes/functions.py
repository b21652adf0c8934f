"""Custom autograd functions: one of ordinary operations, that follows the casts, and one that is written for FP32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main
from torch import Tensor, nn


def functions(amp: Any, device: str) -> tuple[Any, Any]:
    class MatMul(torch.autograd.Function):  # several inputs, operations that amp casts: backward casts like forward
        @staticmethod
        @amp.custom_fwd(device_type=device)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x.mm(weight.t())

        @staticmethod
        @amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad.mm(weight), grad.t().mm(x)

    class Softplus(torch.autograd.Function):  # stands for a kernel that takes FP32 alone
        @staticmethod
        @amp.custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype is torch.float32, x.dtype
            ctx.save_for_backward(x)
            return x.exp().log1p()

        @staticmethod
        @amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].sigmoid()

    return MatMul.apply, Softplus.apply


class Kernel(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Reader(nn.Module):
    def __init__(self, run: Run, matmul: Any, softplus: Any) -> None:
        super().__init__()
        layers = run.model()
        self.features, self.hidden, self.head = layers[:3], layers[3], layers[5]
        self.matmul, self.kernel = matmul, Kernel(softplus)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.matmul(self.features(images), self.hidden.weight) + self.hidden.bias
        return self.head(self.kernel(hidden))


def native(amp: Any, run: Run) -> list[float]:
    model = Reader(run, *functions(amp, run.device))
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
        losses.append(loss.item())
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    model = Reader(run, *functions(amp, run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # `cast_inputs` acts where functions are cast: at O1 and O4. In a model that is cast itself (O2, O3, O5) the module
    # that calls the kernel is kept: given FP32, and what it returns is cast back. At O1 this does no harm.
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=run.dtype, keep_fp32=Kernel)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)
