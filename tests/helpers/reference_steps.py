"""One step by amp_patch's kernels, and the same step by torch's fused kernels with the code that they need around."""

from __future__ import annotations

import reference
import torch

from amp_patch import multi_tensor as mt

SIZES = [0, *range(1, 41), 100, 511, 16384, 16385, 3 * 16384 + 13]  # around vectors and chunks
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


def draw(sizes, seed, device="cpu", spread=2.0):
    """Return numbers of many magnitudes, with which another order of roundings changes the result."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [
        (torch.randn(s, generator=generator) * torch.exp(spread * torch.randn(s, generator=generator))).to(device)
        for s in shapes
    ]


class State:
    """Masters, states, weights and gradients; one step of ours, and the same by torch."""

    def __init__(self, sizes=SIZES, low=None, device="cpu", seed=0, steps=0, layout=lambda t: t):
        self.sizes, self.device, self.layout = sizes, device, layout
        self.params = [layout(t) for t in draw(sizes, seed, device)]
        self.m, self.v, self.most = ([torch.zeros_like(p) for p in self.params] for _ in range(3))
        self.steps = [torch.tensor(float(steps), device=device) for _ in self.params]
        self.low = None if low is None else [p.to(low) for p in self.params]

    def gradients(self, seed, dtype=torch.float32):
        self.grads = [self.layout(t).to(dtype) for t in draw(self.sizes, seed, self.device)]

    def adam(self, amsgrad=False, **options):
        most = self.most if amsgrad else None
        mt.multi_tensor_adam(self.grads, self.params, self.m, self.v, most, self.steps, self.low, **options)

    def sgd(self, **options):
        buffers = self.m if options["momentum"] else None
        mt.multi_tensor_sgd(self.grads, self.params, buffers, self.low, **options)

    def prepare(self, factors):
        """Do what a user must do before torch's step: adopt edited weights and unscale gradients."""
        if self.low:
            self.params = [reference.adopt(w, p) for w, p in zip(self.low, self.params, strict=True)]
        grads = [g.float() for g in self.grads]
        for factor in factors:
            grads = [g * factor for g in grads]
        return grads

    def reference_adam(self, amsgrad=False, factors=(), decoupled=True, maximize=False, **options):
        grads = self.prepare(factors)
        torch._foreach_add_(self.steps, 1)
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            *(self.params, grads, self.m, self.v, self.most if amsgrad else [], self.steps),
            **(options | {"amsgrad": amsgrad, "maximize": maximize}),
        )
        self.publish()

    def reference_sgd(self, factors=(), maximize=False, first_run=False, **options):
        grads = self.prepare(factors)
        torch._fused_sgd_(
            *(self.params, grads, self.m if options["momentum"] else []),
            **(options | {"maximize": maximize, "is_first_step": first_run}),
        )
        self.publish()

    def publish(self):
        if self.low:
            self.low = [p.to(w.dtype) for p, w in zip(self.params, self.low, strict=True)]

    def everything(self):
        return [*self.params, *self.m, *self.v, *self.most, *self.steps, *(self.low or [])]
