"""No native half GEMM is left in torch's modules, in forward, backward and double backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import training
from casting import half_kernels
from cpu_half_cases import double_differentiable
from crossed import crossed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from training import SGD

from amp_patch import amp


class Cells(nn.Module):
    """Each kind of recurrent cell, for two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.lstm(x)[0] + self.gru(x) + self.rnn(x)
        return x


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = nn.MultiheadAttention(8, 2, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


class Pair(nn.Bilinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)


class First(nn.Module):
    """The first result of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Checkpointed(nn.Sequential):
    reentrant: bool

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):  # it ends an op by an exception, before any kernel
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool) -> nn.Module:
    model = Checkpointed(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model.reentrant = reentrant
    return model


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "Bilinear": (lambda: Pair(4, 4, 4), (3, 4)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 2, 6)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 2, 6, 6)),
    "Conv2d, depthwise": (lambda: nn.Conv2d(2, 2, 3, groups=2, padding_mode="circular", padding=1), (2, 2, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 3), (2, 2, 4, 4, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 3), (2, 2, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3), (2, 2, 6, 6)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 3), (2, 2, 4, 4, 4)),
    "LSTM": (lambda: First(nn.LSTM(3, 4)), (5, 2, 3)),
    "GRU": (lambda: First(nn.GRU(3, 4, bidirectional=True)), (5, 2, 3)),
    "RNN": (lambda: First(nn.RNN(3, 4)), (5, 2, 3)),
    "cells": (Cells, (3, 4)),
    "MultiheadAttention": (lambda: SelfAttention(False), (2, 3, 8)),
    "MultiheadAttention, weights": (lambda: SelfAttention(True), (2, 3, 8)),
    "TransformerEncoderLayer": (encoder_layer, (2, 3, 8)),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), (2, 3, 8)),
    "reentrant checkpoint": (lambda: checkpointed(True), (3, 4)),
    "checkpoint": (lambda: checkpointed(False), (3, 4)),
}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]) -> None:
    """Forward, backward and, where the module has one, double backward, as a training does them; then evaluation."""
    inputs = torch.randn(shape, requires_grad=True)
    training.backward(model(inputs).float().pow(2).mean(), optimizer)
    if "checkpoint" not in type(model).__name__.lower():
        with double_differentiable():
            loss = model(inputs).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            (gradient,) = torch.autograd.grad(scaled_loss, inputs, create_graph=True)
            gradient.pow(2).mean().backward()
    model.eval()
    with torch.no_grad():
        model(inputs)


@crossed({"name": list(MODULES), "level": ["O1", "O2", "O3", "O4", "O5"]}, meet=1)
def test_no_native_half_gemm_is_left(name, level):
    make, shape = MODULES[name]
    model = make()
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, cpu_half="emulate", loss_scale=8.0)
    assert half_kernels(lambda: everything(model, optimizer, shape), model._amp.policy.dtype) == []


@pytest.mark.parametrize("cast_inputs", [None, torch.float16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_functions_of_the_user_s_are_emulated_in_backward_too(level, cast_inputs):
    class Product(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=cast_inputs)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient.half() @ weight.half().t(), x.half().t() @ gradient.half()

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.weight)

    for way, emulates in (("emulate", True), ("native", False)):
        model = Net(4, 4)
        optimizer = SGD(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, cpu_half=way, loss_scale=8.0)
        ran = half_kernels(lambda: training.backward(model(torch.ones(3, 4)).float().sum(), optimizer))  # noqa: B023
        assert (ran == []) is emulates
        amp.restore()


def test_the_count_sees_backward_and_double_backward():
    model = nn.Linear(4, 4, bias=False)
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", cpu_half="native", loss_scale=8.0)
    inputs = torch.randn(3, 4, requires_grad=True)
    assert len(half_kernels(lambda: model(inputs))) == 1
    out = model(inputs).sum()
    assert len(half_kernels(lambda: training.backward(out, optimizer))) == 2
    (gradient,) = torch.autograd.grad(model(inputs).pow(2).sum(), inputs, create_graph=True)
    assert len(half_kernels(lambda: training.backward(gradient.sum(), optimizer))) >= 3
