"""The state after steps in one pass equals that of the optimizer's own step, so that both may alternate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import training
from crossed import crossed
from python_forks import python
from three_ways import SGD, LateNet, Recipe, both_levels, ends, every_recipe, go_on, loss_of, spied_kernels, trained
from torch import nn

from amp_patch import amp
from amp_patch.multi_tensor import backend
from amp_patch.optimizers import FusedSGD

pytestmark = pytest.mark.skipif(backend() != "cpp", reason="in plain torch optimizers step by themselves")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return spied_kernels(monkeypatch)


def plain(recipe: Recipe) -> tuple[LateNet, Any]:
    """Without amp_patch."""
    model = LateNet()
    early = [{"params": [*model.first.parameters(), *model.norm.parameters()]}, {"params": model.last.parameters()}]
    return model, recipe(early)


@both_levels
@every_recipe
def test_the_state_is_torch_s(level, recipe):
    _, optimizer = trained(level, recipe)
    model, torchs = plain(recipe)
    loss_of(model, torchs, 0).backward()
    torchs.step()
    shapes = [
        {
            index: {name: (type(v), v.shape, v.dtype, v.stride()) for name, v in state.items()}
            for index, state in s.items()
        }
        for s in (optimizer.state_dict()["state"], torchs.state_dict()["state"])
    ]
    assert shapes[0] == shapes[1]
    names = [[list(group) for group in o.param_groups] for o in (optimizer, torchs)]
    assert names[0] == names[1]


@crossed(every_recipe, {"level": training.LEVELS}, meet=1)
def test_the_state_goes_through_torch_s_optimizer_and_back(level, recipe):
    recipe = recipe._replace(
        options=recipe.options | ({"eps": 1e-4} if not issubclass(recipe.make, (SGD, FusedSGD)) else {})
    )
    options = {} if level in ("O0", "O3") else {"keep_fp32": nn.LayerNorm}
    models = []
    for travels in (False, True):
        model = LateNet()
        optimizer = recipe(list(model.parameters()))
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        go_on(model, optimizer, range(3))
        if travels:
            torchs = recipe(LateNet().parameters())
            torchs.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(torchs.state_dict())
        go_on(model, optimizer)
        models.append(ends(model, optimizer))
    training.assert_unchanged(*models)


@crossed(
    pytest.mark.parametrize("duplicate", [copy.deepcopy, training.through_pickle], ids=["deepcopy", "pickle"]),
    every_recipe,
    both_levels,
    meet=1,
)
def test_a_copy_goes_on_in_one_pass(level, recipe, duplicate, kernels):
    both = trained(level, recipe)
    twins = duplicate(both)
    kernels.clear()
    go_on(*both)
    calls = kernels.copy()
    go_on(*twins)
    assert calls and kernels == calls * 2
    training.assert_unchanged(ends(*both), ends(*twins))


IN_A_FRESH_PROCESS = """
import sys, torch
from amp_patch import amp
model, optimizer = torch.load(sys.argv[1], weights_only=False)
def closure():
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
if sys.argv[2] == "closure":
    optimizer.step(closure)
else:
    closure()
    optimizer.step()
assert model.weight.tolist() == [[0.5, 1.5]], model.weight
"""


@pytest.mark.parametrize("how", ["closure", "plain"])
def test_a_pickle_goes_on_in_a_process_that_has_made_no_optimizer(how, tmp_path):
    model = training.linear([[1.0, 2.0]])
    both = amp.initialize(model, SGD(model.parameters(), lr=0.5), opt_level="O5", verbosity=0)
    torch.save(both, tmp_path / "both.pt")
    python("-c", IN_A_FRESH_PROCESS, tmp_path / "both.pt", how).check_returncode()
