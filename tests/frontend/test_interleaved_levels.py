"""Trainings at several levels in one process, and the way back from each."""

from __future__ import annotations

import pkgutil

import pytest
import torch
import training
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import ADAM, LEVELS, SGD, convnet, same, train

from amp_patch import amp
from amp_patch.casts import oplists


class Checkpointed(training.ConvNet):
    def forward(self, images):
        features = checkpoint(self.body, images, use_reentrant=self.reentrant)
        return self.head(features.flatten(1))


def interleaved(levels, steps, make_model):
    """Each level's losses, trained one step of each in turn. A level may be "O2 native": with this cpu_half."""
    runs = []
    for level, *cpu_half in map(str.split, levels):
        model = make_model()
        mode = {"cpu_half": cpu_half[0]} if cpu_half else {}
        runs.append((*amp.initialize(model, SGD(model.parameters()), opt_level=level, **mode), []))
    for step in range(steps):
        for model, optimizer, losses in runs:
            inputs, targets = training.images(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.requires_grad_()), targets)
            training.backward(loss, optimizer)
            optimizer.step()
            losses.append(loss.item())
    return [losses for _, _, losses in runs]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["stored", "reentrant", "non-reentrant"])
def test_interleaved_trainings_give_the_losses_that_each_gives_alone(reentrant):
    def make_model():
        torch.manual_seed(0)
        model = Checkpointed() if reentrant is not None else training.ConvNet()
        model.reentrant = reentrant
        return model

    alone = []
    for level in LEVELS:
        alone += interleaved([level], 6, make_model)
        amp.restore()
    assert len({tuple(losses) for losses in alone}) >= 4  # the levels do differ (O1 and O2 agree here, O4 and O5 too)
    assert interleaved(LEVELS, 6, make_model) == alone


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_never_given_to_initialize_is_untouched_at_o2_and_o3(level):
    bystander, inputs = convnet(seed=5).eval(), training.images(0)[0]
    expected = bystander(inputs)
    amp.initialize(convnet(), opt_level=level)
    assert torch.equal(bystander(inputs), expected)


def namespaces():
    listed = [pkgutil.resolve_name(address) for address in oplists.OPLISTS]
    owners = (*listed, torch, torch.Tensor, nn.functional, torch._VF, nn.utils, nn.utils.clip_grad, nn.modules.rnn)
    owners = (*owners, torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction)
    cells = {
        name: getattr(nn.utils, name).__closure__[0].cell_contents for name in ("clip_grad_norm_", "clip_grad_value_")
    }
    return [*(dict(vars(owner)) for owner in owners), cells]


def traces(thing):
    return {name for name in vars(thing) if "amp" in name}


@pytest.mark.parametrize("level", LEVELS)
def test_restore_leaves_nothing_of_amp_patch(level):
    model = convnet()
    optimizer = ADAM(model.parameters())  # a process's first imports torch._dynamo, which puts names into torch
    before = namespaces()
    torch._VF.lstm  # noqa: B018
    params, names = list(model.parameters()), sorted(vars(model))
    classes = [type(m) for m in model.modules()], type(optimizer)
    amp.initialize(model, optimizer, opt_level=level, keep_fp32="head")
    train(model, optimizer, 3)
    masters = [p.detach().float().clone() for p in amp.master_params(optimizer)]

    amp.restore()

    for now, then in zip(namespaces(), before, strict=True):
        assert now.keys() == then.keys()
        assert [name for name in now if now[name] is not then[name] and not name.startswith("__")] == []
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        assert clip.__closure__[0].cell_contents is clip.__wrapped__
    assert ([type(m) for m in model.modules()], type(optimizer)) == classes
    assert sorted(vars(model)) == names
    assert not any(traces(m) for m in model.modules()) and not traces(optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in params]
    assert same([p.detach() for p in params], masters)
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.int64}
    assert all(s["exp_avg"].dtype is torch.float32 for s in optimizer.state.values())
    assert set(optimizer.state) == set(params)

    optimizer.zero_grad()
    inputs, targets = training.images(9)
    nn.functional.cross_entropy(model(inputs), targets).backward()  # trains on, in plain FP32
    optimizer.step()
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_a_model_can_change_its_level_in_mid_training(first, second):
    model = convnet()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=first)
    train(model, optimizer, 3)
    values = [p.detach().float().clone() for p in amp.master_params(optimizer)]
    model, optimizer = amp.initialize(model, optimizer, opt_level=second)
    if second != "O3":
        assert same([p.detach() for p in amp.master_params(optimizer)], values)
    losses = train(model, optimizer, 20, lambda step: training.images(0))
    assert losses[-1] < losses[0]
