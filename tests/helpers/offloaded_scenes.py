"""Trainings with masters on the host of other models and optimizers than those of offloaded.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from offloaded import CPU, net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import backward

from amp_patch import amp
from amp_patch.masters import on_host


def _inputs(step: int, device: torch.device) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)


def _iterate(model: nn.Module, optimizers: list[Any], inputs: Callable[[int], Tensor], given: Any = None) -> None:
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model(inputs(step)).float().square().mean(), optimizers if given is None else given)
        for optimizer in optimizers:
            optimizer.step()


def _weights(model: nn.Module) -> list[Tensor]:
    found = [param.detach().cpu().clone() for param in model.parameters()]
    amp.restore()
    return found + [param.detach().cpu().clone() for param in model.parameters()]


def of_low_precision(device: torch.device, **options: Any) -> list[Tensor]:
    """A model that is in low precision at `initialize`."""
    model = net(norm=False).to(device, torch.float16 if options["opt_level"] == "O2" else torch.bfloat16)
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters(), 1e-2), verbosity=0, **options)
    _iterate(model, [optimizer], lambda step: _inputs(step, device))
    return _weights(model)


def of_two_optimizers(device: torch.device, **options: Any) -> list[Tensor]:
    """Two optimizers, one of which gets a second loss of its own."""
    model = net(norm=False).to(device)
    both = [torch.optim.AdamW(model[:2].parameters(), 1e-2), torch.optim.SGD(model[2:].parameters(), 0.1)]
    model, both = amp.initialize(model, both, verbosity=0, **options)
    for step in range(3):
        _iterate(model, both, lambda step: _inputs(step, device))
        backward(model(_inputs(step + 9, device)).float().square().mean(), both[0])
        both[0].step()
    return _weights(model)


def of_shared_weights(device: torch.device, **options: Any) -> list[Tensor]:
    """Two optimizers that hold the same parameters."""
    model = net(norm=False).to(device)
    both = [torch.optim.AdamW(model.parameters(), 1e-2), torch.optim.SGD(model[2:].parameters(), 0.1)]
    model, both = amp.initialize(model, both, verbosity=0, **options)
    _iterate(model, both, lambda step: _inputs(step, device))
    return _weights(model)


def of_parts(device: torch.device, **options: Any) -> list[Tensor]:
    """A weight of two layers, whose gradient comes in two parts: a reentrant checkpoint runs a backward in backward."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second).to(device)
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters(), 1e-2), verbosity=0, **options)

    def run(inputs: Tensor) -> Tensor:
        half = checkpoint(first, inputs.to(first.weight.dtype).requires_grad_(), use_reentrant=True)
        return second(half.tanh())

    for step in range(4):
        optimizer.zero_grad()
        backward(run(_inputs(step, device)).float().square().mean(), optimizer)
        optimizer.step()
    return _weights(model)


def with_sparse_gradients(device: torch.device, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)).to(device)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), verbosity=0, **options)
    _iterate(model, [optimizer], lambda step: torch.arange(step, step + 5).to(device))
    return _weights(model)


class Around(torch.optim.Optimizer):
    """SAM of two passes, as its public implementation."""

    def __init__(self, base: Any) -> None:
        self.base_optimizer = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        self.before = {p: p.detach().clone() for p in params}
        for p in params:
            p.add_(p.grad * (0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, value in self.before.items():
            p.copy_(value)
        self.base_optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)


def with_sam(device: torch.device, **options: Any) -> list[Tensor]:
    model = net(norm=False).to(device)
    model, optimizer = amp.initialize(
        model, Around(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)), verbosity=0, **options
    )
    for step in range(4):
        for end in (optimizer.first_step, optimizer.step):
            optimizer.zero_grad()
            backward(model(_inputs(step, device)).float().square().mean(), optimizer)
            end()
    return _weights(model)


def of_frozen_and_idle_weights(device: torch.device, **options: Any) -> list[Tensor]:
    """A weight that is frozen at `initialize`; edits of weights that get no gradient; writes of new memory."""
    low = torch.float16 if options["opt_level"] == "O2" else torch.bfloat16
    model = net(norm=False).to(device, low)
    model[0].bias.requires_grad_(False)
    model.idle = nn.Linear(4, 4).to(device, low)
    nn.init.ones_(model.idle.weight)
    model.idle.forward = lambda value: value
    params = [param for param in model.parameters() if param is not model.idle.bias]
    model, optimizer = amp.initialize(model, torch.optim.AdamW(params, 1e-2), verbosity=0, **options)
    for value in (2.0, 3.0, 4.0):
        with torch.no_grad():
            model.idle.weight.fill_(value)
        model[2].weight.data = model[2].weight.data * 0.5
        _iterate(model, [optimizer], lambda step: _inputs(step, device))
    del model.idle.forward
    return [*(master.detach().clone().cpu() for master in amp.master_params(optimizer)), *_weights(model)]


def with_gaps(device: torch.device, **options: Any) -> list[Tensor]:
    """A low-precision weight whose elements have gaps between them."""
    model = net(norm=False).to(device, torch.bfloat16)
    model[0].weight = nn.Parameter(torch.arange(32 * 32, device=device).view(32, 32).cos().bfloat16()[:, ::2])
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters(), 1e-2), verbosity=0, **options)
    _iterate(model, [optimizer], lambda step: _inputs(step, device))
    return [master.detach().clone() for master in amp.master_params(optimizer)]


def cleared_in_the_body(device: torch.device, **options: Any) -> list[Tensor]:
    """Gradients that code reads, writes and clears between two backwards of one body."""
    model = net(norm=False).to(device)
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters(), 1e-2), verbosity=0, **options)
    for step in range(4):
        optimizer.zero_grad()
        with amp.scale_loss(model(_inputs(step, device)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            model.zero_grad()
            scaled_loss.backward()
            for param in model.parameters():
                param.grad.mul_(0.5)
        optimizer.step()
    return _weights(model)


# The last one is not for the device of the tests, which has no sparse tensors.
SCENES = (
    *(of_low_precision, of_two_optimizers, of_shared_weights, of_parts, with_sam, of_frozen_and_idle_weights),
    *(cleared_in_the_body, with_sparse_gradients),
)
RELEASED = (
    of_low_precision,
    of_two_optimizers,
    of_parts,
    cleared_in_the_body,
    with_sparse_gradients,
)  # with gradient_release too


def scene(way: Callable[..., list[Tensor]], device: torch.device = CPU, apart: bool = False, **options: Any) -> Any:
    """Return the results of a scene; if `apart`, as if the CPU's weights were on a device."""
    if apart:
        on_host.is_apart = lambda param, master: True
    try:
        return way(device, cpu_half="native", **options)
    finally:
        amp.restore()
        on_host.is_apart = lambda param, master: param.device != master.device
