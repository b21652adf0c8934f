"""State dicts of a script's GradScalers, which a level replaces: torch's keys, and numbers that torch can load."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from scripts import run_source
from training import LEVELS

from amp_patch import amp
from amp_patch.run.unedited.script import UneditedScript

DYNAMIC = ("O1", "O2")
INIT = {"scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 0}
# At step 1 the loss overflows; `states` has the state before the training and after each step.
SCRIPT = """
torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = KIND("cpu", init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
if LOADED is not None:
    scaler.load_state_dict(LOADED)
states = [scaler.state_dict()]
for step in range(STEPS):
    factor = 1e38 if step == 1 else 2.0**-8
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 8)).float().square().mean() * factor
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    states.append(scaler.state_dict())
"""


class Subclass(torch.amp.GradScaler):
    def state_dict(self):
        return {**super().state_dict(), "own": 1}


def train(level: str, steps: int = 3, kind: type = torch.amp.GradScaler, loaded: dict | None = None) -> dict:
    with UneditedScript(level):
        found = run_source(SCRIPT, KIND=kind, STEPS=steps, LOADED=loaded)
        if found["states"][0]:  # while the training lasts
            found["ours"] = amp.state_dict(found["optimizer"])["loss_scaler0"]
            found["pickled"] = pickle.dumps(found["scaler"])
            found["copied"] = copy.deepcopy(found["scaler"]).state_dict()
    amp.restore()
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_has_torch_s_keys_and_the_scale_of_the_level(level):
    found = train(level)
    first, *_, last = found["states"]
    assert first == INIT
    if level in DYNAMIC:
        assert last == {**INIT, "scale": found["ours"]["loss_scale"], "_growth_tracker": found["ours"]["unskipped"]}
        assert [state["scale"] for state in found["states"]] == [1024.0, 2.0**16, 2.0**15, 2.0**15]
    else:
        assert last == INIT
    assert found["copied"] == last
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(last)
    assert theirs.state_dict() == last == pickle.loads(found["pickled"]).state_dict()
    assert found["scaler"].get_scale() == 1.0 and not found["scaler"].is_enabled()  # `scale` returns the loss itself


def test_the_counter_stays_below_the_interval_of_the_script():
    """torch's scale would not grow from a counter past its interval, and the level counts to 2000."""
    assert [state["_growth_tracker"] for state in train("O2", steps=12)["states"]][-6:] == [5, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("level", LEVELS)
def test_a_loaded_state_is_kept_and_its_scale_is_the_level_s(level):
    loaded = {**INIT, "scale": 2.0**9, "growth_interval": 100, "_growth_tracker": 5}
    first, second = train(level, 1, loaded=loaded)["states"]
    assert first == loaded
    assert second == ({**loaded, "_growth_tracker": 6} if level in DYNAMIC else loaded)


def test_a_state_that_is_loaded_during_the_training_is_the_level_s():
    with UneditedScript("O2"):
        found = run_source(SCRIPT, KIND=torch.amp.GradScaler, STEPS=3, LOADED=None)
        found["scaler"].load_state_dict({**INIT, "scale": 2.0**9, "_growth_tracker": 5})
        assert amp.state_dict(found["optimizer"]) == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 5}}
        found["scaler"].load_state_dict({})  # of a disabled scaler
        assert found["scaler"].state_dict()["scale"] == 2.0**9
    amp.restore()


@pytest.mark.parametrize("level", LEVELS)
def test_an_unpickled_scaler_does_not_scale_beside_the_level(level):
    pickled = pickle.dumps(torch.amp.GradScaler("cpu", **{k: v for k, v in INIT.items() if k[0] == "g"}))
    expected = train(level, 1)["model"].weight
    found = train(level, 1, kind=lambda *_, **__: pickle.loads(pickled))
    assert torch.equal(found["model"].weight, expected) and found["states"][0]["scale"] == 2.0**16


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_subclasses_have_the_keys_too_and_scalers_that_the_script_disables_have_none(level):
    assert train(level, kind=Subclass)["states"][0] == {**INIT, "own": 1}
    off = train(level, kind=lambda *args, **kwargs: torch.amp.GradScaler(*args, **kwargs, enabled=False))
    assert off["states"] == [{}] * 4


def test_each_scaler_has_the_scale_of_the_optimizer_that_it_steps():
    with UneditedScript("O2"):
        one = run_source(SCRIPT, KIND=torch.amp.GradScaler, STEPS=1, LOADED=None)
        other = run_source(SCRIPT, KIND=torch.amp.GradScaler, STEPS=3, LOADED=None)
        assert [found["scaler"].state_dict()["scale"] for found in (one, other)] == [2.0**16, 2.0**15]
    amp.restore()
