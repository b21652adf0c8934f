"""Sharpness-aware minimization (Foret et al. 2021): two backward passes for a step, the second at moved weights.

Two usual shapes: an Optimizer that shares its groups with the `.base_optimizer` inside, puts the weights back with
`p.data = ...` and steps that one; and a plain object around an optimizer that copies them back. Both were written for
FP32, and train at every level as they do there.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import training
from crossed import crossed
from torch import nn
from training import LEVELS, backward, convnet, images, linear, skipped

from amp_patch import amp

SCALED = ("O1", "O2")


class Sam(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)).to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class PlainSam:
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        self.base_optimizer = base_optimizer(params, **kwargs)
        self.param_groups, self.rho, self.moves = self.base_optimizer.param_groups, rho, []

    def zero_grad(self):
        self.base_optimizer.zero_grad()

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in params).sqrt() + 1e-12
        self.moves = [(p, p.detach().clone()) for p in params]
        for p, old in self.moves:
            p.copy_(old + p.grad * (self.rho / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p, old in self.moves:
            p.data.copy_(old)
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure):
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


KINDS = (Sam, PlainSam)


def given(sam, whole):
    return sam if whole else sam.base_optimizer


def iterate(model, sam, scaled_by, batch):
    for step in (sam.first_step, sam.second_step):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        backward(loss, scaled_by)
        step(zero_grad=True)
    return loss.item()


def curve(level, kind, whole=True, steps=12):
    model = convnet()
    sam = kind(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.9)
    model, returned = amp.initialize(model, given(sam, whole), opt_level=level, verbosity=0)
    assert returned is given(sam, whole)
    return [iterate(model, sam, sam, images(0)) for _ in range(steps)]


def plain_curve(kind, steps=12):
    model = convnet()
    sam = kind(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        inputs, targets = images(0)
        for step in (sam.first_step, sam.second_step):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            step(zero_grad=True)
        losses.append(loss.item())
    return losses


@crossed(
    {"level": LEVELS}, pytest.mark.parametrize("whole", [True, False], ids=["the wrapper", "its base"]), {"kind": KINDS}
)
def test_it_trains_as_in_fp32(level, whole, kind):
    losses, expected = curve(level, kind, whole), plain_curve(kind)
    if level == "O0":
        assert losses == expected
    else:
        assert expected[-1] < 0.8 * expected[0]
        low = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        # Rounding moves the curves of these levels by so much at most, the dynamic scale's first skips aside.
        assert losses == pytest.approx(expected, abs=12 * torch.finfo(low).eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_second_pass_is_at_the_moved_weights(level, kind):
    model = linear([[1.0]])
    sam = kind(model.parameters(), torch.optim.SGD, rho=2.0, lr=1.0)
    model, sam = amp.initialize(model, sam, opt_level=level, loss_scale=64.0)
    seen = []
    for step in (sam.first_step, sam.second_step):
        out = model(torch.full((1, 1), 0.5))
        seen.append(out.item())
        backward(out.sum(), sam)
        step(zero_grad=True)
    assert seen == [0.5, 1.5]  # weights 1 and 1 + rho
    assert next(amp.master_params(sam)).item() == 0.5 and model(torch.ones(1, 1)).item() == 0.5


@crossed(
    {"level": SCALED},
    pytest.mark.parametrize("overflows", [(True, False), (False, True), (True, True)], ids=["first", "second", "both"]),
    pytest.mark.parametrize("whole", [True, False], ids=["the wrapper", "its base"]),
    {"kind": KINDS},
)
def test_an_overflow_in_either_pass_changes_nothing(level, overflows, whole, kind):
    model = convnet()
    sam = kind(model.parameters(), torch.optim.Adam, lr=0.01, rho=0.1)
    amp.initialize(model, given(sam, whole), opt_level=level, loss_scale="dynamic", verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}})
    iterate(model, sam, sam, images(0))
    before = training.weights(model), *map(snapshot, (sam.base_optimizer, sam.base_optimizer.state_dict()["state"]))
    for overflow, step in zip(overflows, (sam.first_step, sam.second_step), strict=True):
        inputs, targets = images(1)
        factor = math.inf if overflow else 1.0
        backward(nn.functional.cross_entropy(model(inputs), targets) * factor, sam)
        step(zero_grad=True)
    assert skipped(sam.base_optimizer)
    after = training.weights(model), *map(snapshot, (sam.base_optimizer, sam.base_optimizer.state_dict()["state"]))
    for earlier, later in zip(before, after, strict=True):
        names = [i for i, (a, b) in enumerate(zip(earlier, later, strict=True)) if not torch.equal(a, b)]
        # Statistics of batch norms count forward passes, skipped or not, and are finite.
        assert len(earlier) == len(later) and all(later[i].isfinite().all() for i in names)
        assert set(names) <= (buffers(model) if earlier is before[0] else set())
    clean = iterate(model, sam, sam, images(1))
    assert math.isfinite(clean) and not skipped(sam.base_optimizer)


def buffers(model):
    names = {name for name, _ in model.named_buffers()}
    return {index for index, name in enumerate(model.state_dict()) if name in names}


def snapshot(source):
    """Copies of the tensors of an optimizer's parameters, or of a state."""
    if isinstance(source, torch.optim.Optimizer):
        return [p.detach().clone() for group in source.param_groups for p in group["params"]]
    return [v.clone() for state in source.values() for v in state.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", SCALED)
def test_a_closure_under_scaling_is_refused_before_anything_moves(level, kind):
    model = linear([[1.0]])
    sam = kind(model.parameters(), torch.optim.SGD, lr=1.0)
    model, sam = amp.initialize(model, sam, opt_level=level, loss_scale=64.0)
    backward(model(torch.ones(1, 1)).sum(), sam)
    with pytest.raises(RuntimeError, match=r"step: a closure .*first_step.*second_step.*recipes/sam.py"):
        sam.step(lambda: None)
    assert next(amp.master_params(sam)).item() == 1.0
    sam.first_step()
    assert next(amp.master_params(sam)).item() != 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_its_state_dict_resumes(level):
    def start():
        model = convnet()
        sam = Sam(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.9)
        return amp.initialize(model, sam, opt_level=level, loss_scale=64.0)

    model, sam = start()
    for step in range(2):
        iterate(model, sam, sam, images(step))
    saved = copy.deepcopy([model.state_dict(), sam.state_dict(), sam.base_optimizer.state_dict()])
    expected = [iterate(model, sam, sam, images(step)) for step in (2, 3)]
    other, resumed = start()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.base_optimizer.load_state_dict(saved[2])
    resumed.param_groups = resumed.base_optimizer.param_groups
    assert [iterate(other, resumed, resumed, images(step)) for step in (2, 3)] == expected


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_its_state_for_parameters_moves_to_the_masters_and_back(level):
    model = linear([[1.0]])
    sam = Sam(model.parameters(), torch.optim.SGD, lr=1.0)
    model(torch.ones(1, 1)).sum().backward()
    sam.first_step(zero_grad=True)
    old = sam.state[model.weight]["old"]
    amp.initialize(model, sam, opt_level=level)
    (master,) = amp.master_params(sam)
    assert sam.state[model.weight]["old"] is sam.state[master]["old"] is old
    assert list(map(id, sam.state)) == [id(master)]
    sam.load_state_dict(sam.state_dict())
    assert "old" in sam.state[model.weight] and list(map(id, sam.state)) == [id(master)]
    del old  # `load_state_dict` has copied it
    amp.restore()
    assert "old" in sam.state[model.weight] and master not in sam.state
