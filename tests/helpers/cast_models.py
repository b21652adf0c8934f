"""Trainings whose models are cast, of each kind, and copies of their values."""

from __future__ import annotations

from training import SGD, convnet

from amp_patch import amp

CAST = {
    "O2": {"opt_level": "O2", "loss_scale": 64.0},
    "O3": {"opt_level": "O3"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
MASTERED = ("O2", "O5", "split")


def start_kind(kind, model=None, make_optimizer=SGD):
    model = convnet() if model is None else model
    return amp.initialize(model, make_optimizer(model.parameters()), **CAST[kind])


def values(model):
    return [p.detach().clone() for p in model.parameters()]
