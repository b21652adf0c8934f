"""Saved and exported models of unedited scripts: the files equal those without a level."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import textwrap
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from python_forks import python
from torch import nn
from training import LEVELS

from amp_patch import amp
from amp_patch.run.unedited.script import UneditedScript

NET = """
import pickle
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.rnn = nn.LSTM(8, 8)
        self.head, self.tied, self.again = nn.Linear(8, 4), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("third", torch.tensor([1 / 3]))

    def forward(self, x):
        y, _ = self.rnn(self.body(x)[None])
        return self.head(self.again(self.tied(self.frozen(y[0]))) * self.third)

def steps(model, optimizer, schedule):
    for _ in range(3):
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss
"""
TRAINS = """
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
steps(model, optimizer, schedule)
"""
SAVES = """
torch.save(model, f"{folder}/model.pt")
parts = {"class": type(model), "head": model.head, "params": list(model.parameters())}
torch.save({"model": model, "optimizer": optimizer, "schedule": schedule, **parts}, f"{folder}/all.pt")
torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}/states.pt")
torch.save(model.body, f"{folder}/part.pt")
torch.save(model, f"{folder}/old.pt", _use_new_zipfile_serialization=False)
with open(f"{folder}/model.pkl", "wb") as file:
    pickle.dump({"model": model}, file)
with open(f"{folder}/optimizer.pkl", "wb") as file:
    pickle.dump(optimizer, file, 5)
"""
# Loads the files in a process without amp_patch.
LOADS = (
    """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "amp_patch":
            raise ImportError(f"{name} is wanted here")

sys.meta_path.insert(0, Refuses())
"""
    + NET
    + """
def same(found, state):
    assert [*found] == [*state]
    assert all(torch.equal(found[name], value) and found[name].dtype is value.dtype for name, value in state.items())
    assert {value.dtype for value in found.values()} == {torch.float32, torch.int64}

def check(model, state):
    assert type(model) is Net and model.tied.weight is model.again.weight and model.third.dtype is torch.float32
    assert {type(module).__module__.partition(".")[0] for module in model.modules()} == {"torch", "__main__"}
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("_amp" in name for module in model.modules() for name in vars(module))
    same(model.state_dict(), state)
    model(torch.randn(16, 4)).sum().backward()

for folder in sys.argv[1:]:
    state, optimizer_state = torch.load(f"{folder}/states.pt", weights_only=True)
    for name in ("model.pt", "old.pt"):
        check(torch.load(f"{folder}/{name}", weights_only=False), state)
    with open(f"{folder}/model.pkl", "rb") as file:
        check(pickle.load(file)["model"], state)
    part = torch.load(f"{folder}/part.pt", weights_only=False)
    assert type(part[1]) is nn.BatchNorm1d
    same(part.state_dict(), {name[5:]: value for name, value in state.items() if name.startswith("body.")})
    found = torch.load(f"{folder}/all.pt", weights_only=False)
    model, optimizer = found["model"], found["optimizer"]
    check(model, state)
    assert found["class"] is Net and found["head"] is model.head and type(optimizer) is torch.optim.Adam
    held = optimizer.param_groups[0]["params"]
    assert all(map(lambda a, b: a is b, held, model.parameters())) and len(held) == len(found["params"])
    assert all(map(lambda a, b: a is b, held, found["params"])) and {*optimizer.state} <= {*held}
    with open(f"{folder}/optimizer.pkl", "rb") as file:
        alone = pickle.load(file)
    for each in optimizer, alone:
        values = [value for state in each.state.values() for value in state.values()]
        assert len(values) == 3 * 11 and {value.dtype for value in values} == {torch.float32}
        assert type(each) is torch.optim.Adam and not any("_amp" in name for name in vars(each))
    assert found["schedule"].optimizer is optimizer
    steps(model, optimizer, found["schedule"])
"""
)

# torch's old format keeps the source of classes, which this script, run from a string, has not.
pytestmark = pytest.mark.filterwarnings("ignore:Couldn't retrieve source code:UserWarning")


@pytest.fixture
def main(monkeypatch, tmp_path) -> types.ModuleType:
    """The main module, in whose names `pickle` looks for a script's classes."""
    module = types.ModuleType("__main__")
    vars(module)["folder"] = str(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.delenv("AMP_PATCH_OPT_LEVEL", raising=False)
    return module


def run_in(main: types.ModuleType, script: str, folder: Path | None = None) -> dict[str, Any]:
    if folder is not None:
        folder.mkdir()
        vars(main)["folder"] = str(folder)
    exec(compile(textwrap.dedent(script), "train.py", "exec"), vars(main))
    return vars(main)


def run_without_us(folder: Path, script: str, *arguments: str) -> None:
    (folder / "loads.py").write_text(script)
    done = python("loads.py", *arguments, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_a_saved_model_loads_without_amp_patch(main, tmp_path):
    for level in LEVELS:
        with UneditedScript(level):
            run_in(main, NET + TRAINS + SAVES, tmp_path / level)
        amp.restore()
    run_without_us(tmp_path, LOADS, *LEVELS)


def opcodes(path: Path) -> bytes:
    """Return the pickle of a file of torch.save, which has no bytes of tensors."""
    with zipfile.ZipFile(path) as file:
        return next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))


# --- what the script loads --------------------------------------------------------------------------------------------

EVALUATES = """
safe = [Net, nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.LSTM]
with torch.serialization.safe_globals([*safe, set]):
    best = torch.load(f"{folder}/model.pt")
best.eval()
x = torch.randn(16, 4)
with torch.no_grad():
    result = best(x)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_loaded_model_is_evaluated_in_fp32(main, level):
    with UneditedScript(level):
        names = run_in(main, NET + TRAINS + SAVES + EVALUATES)
    assert isinstance(names["best"], names["Net"]) and names["result"].dtype is torch.float32
    amp.restore()
    assert type(names["best"]) is names["Net"]
    with torch.no_grad():
        assert torch.equal(names["result"], names["best"](names["x"]))
    assert names["best"].state_dict().keys() == names["model"].state_dict().keys()


GOES_ON = """
found = torch.load(f"{folder}/all.pt", weights_only=False)
model, optimizer, schedule = found["model"], found["optimizer"], found["schedule"]
loss = steps(model, optimizer, schedule).detach()
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_training_resumes_from_a_loaded_checkpoint(main, level):
    with UneditedScript(level) as trained:
        names = run_in(main, NET + TRAINS + SAVES + GOES_ON)
    low = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    assert names["model"].head.weight.dtype is low and trained.backwards == 6
    assert {*map(float, [state["step"] for state in names["optimizer"].state.values()])} <= {4.0, 5.0, 6.0}
    if level == "O0":
        plain = run_in(main, NET + TRAINS + SAVES + GOES_ON)
        assert torch.equal(names["loss"], plain["loss"])


def test_a_loaded_model_trains_at_the_level_with_a_new_optimizer(main):
    again = "optimizer = torch.optim.SGD(best.train().parameters(), lr=0.01)\nloss = steps(best, optimizer, schedule)"
    with UneditedScript("O1") as trained:
        names = run_in(main, NET + TRAINS + SAVES + EVALUATES + again)
    assert trained.backwards == 6 and amp.state_dict(names["optimizer"])["loss_scaler0"]["loss_scale"] > 1.0


class Trainer:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def dumped(value: Any) -> bytes:
    pickle.dump(value, file := io.BytesIO(), 5)
    return file.getvalue()


@pytest.mark.parametrize("level", [*LEVELS, "O5+split"])
def test_models_and_schedules_in_the_scripts_own_objects_are_pickled_plainly(main, level):
    with UneditedScript(level):
        names = run_in(main, NET + TRAINS)
        model, schedule = names["model"], names["schedule"]
        whole = dumped(Trainer(first=[{"params": [*model.parameters()]}], model=model, schedule=schedule))
        saved = [whole, dumped(schedule), dumped((copy.deepcopy(model), names["optimizer"]))]
        state = model.state_dict()
    amp.restore()
    assert not any(b"amp_patch" in each for each in saved)
    found = pickle.loads(whole)
    assert all(torch.equal(value, state[name]) for name, value in found.model.state_dict().items())
    params = [*found.model.parameters()]
    for others in found.first[0]["params"], found.schedule.optimizer.param_groups[0]["params"]:
        assert [*map(id, others)] == [*map(id, params)]


def test_functions_of_pickle_and_torch_are_restored(main):
    owners = [(torch, "save"), (torch, "load"), (pickle, "dump")]
    owners += [
        (pickle, "load"),
        (pickle, "loads"),
    ]
    owners += [(torch.jit, "script"), (torch.jit, "trace"), (torch.export, "export")]
    before = [vars(owner)[name] for owner, name in owners]
    states = [vars(kind)["__setstate__"] for kind in (nn.Module, torch.optim.Optimizer)]
    with UneditedScript("O0"):
        run_in(main, NET + TRAINS + SAVES + GOES_ON)
    amp.restore()
    assert [vars(kind)["__setstate__"] for kind in (nn.Module, torch.optim.Optimizer)] == states
    with UneditedScript("O2"):
        run_in(main, NET + TRAINS)
        assert all(vars(owner)[name] is not each for (owner, name), each in zip(owners, before, strict=True))
    assert [vars(owner)[name] for owner, name in owners] == before


def test_a_failed_pickle_leaves_the_model_in_its_training(main, tmp_path):
    with UneditedScript("O2"):
        names = run_in(main, NET + TRAINS)
        kind, model = type(names["model"]), names["model"]
        model.callback = lambda: None
        with pytest.raises((pickle.PicklingError, AttributeError)):
            torch.save(model, tmp_path / "model.pt")
        assert type(model) is kind and sys.getrecursionlimit() < 10000
        del model.callback
        names["steps"](model, names["optimizer"], names["schedule"])


# --- exports ----------------------------------------------------------------------------------------------------------

EXPORTS = """
from torch.package import PackageExporter, PackageImporter

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
steps(model, optimizer, schedule)
model.eval()
x = torch.randn(16, 4)
found = {"scripted": torch.jit.script(model), "traced": torch.jit.trace(model, x), "part": torch.jit.script(model[0])}
for name, each in found.items():
    torch.jit.save(each, f"{folder}/{name}.pt")
torch.export.save(torch.export.export(model, (x,)), f"{folder}/exported.pt2")
with PackageExporter(f"{folder}/package.pt") as package:
    package.extern("torch.**")
    package.save_pickle("net", "net.pkl", model)
"""


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_exports_equal_the_fp32_copy(main, tmp_path, level):
    with UneditedScript(level):
        names = run_in(main, NET + EXPORTS)
    plain = amp.fp32_copy(names["model"])
    amp.restore()
    x = names["x"]
    imported = torch.package.PackageImporter(str(tmp_path / "package.pt")).load_pickle("net", "net.pkl")
    assert type(imported) is nn.Sequential
    loaded = {
        "scripted": torch.jit.load(tmp_path / "scripted.pt"),
        "traced": torch.jit.load(tmp_path / "traced.pt"),
        "exported": torch.export.load(tmp_path / "exported.pt2").module(),
        "package": imported,
    }
    with torch.no_grad():
        for name, each in loaded.items():
            torch.testing.assert_close(each(x), plain(x), msg=name)
        torch.testing.assert_close(torch.jit.load(tmp_path / "part.pt")(x), plain[0](x))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torch_jit_resolves_names_of_its_caller(main):
    def doubled(value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    class Doubles:  # torch.jit.script resolves the names of a class in the frame of its caller
        def call(self, value: torch.Tensor) -> torch.Tensor:
            return doubled(value)

    with UneditedScript("O2"):
        run_in(main, NET + TRAINS)
        assert torch.jit.script(Doubles)().call(torch.ones(2)).tolist() == [2.0, 2.0]


# --- in scripts that call initialize ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_an_edited_script_gets_a_weights_only_error_with_the_way_out(main, tmp_path, level):
    names = run_in(main, NET + "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    model, _ = amp.initialize(names["model"], names["optimizer"], opt_level=level)
    torch.save(model, tmp_path / "model.pt")
    if level == "O0":
        assert b"amp_patch" not in opcodes(tmp_path / "model.pt")
    else:
        words = "needs_weights_only_false_or_save_fp32_copy"
        with pytest.raises(pickle.UnpicklingError, match=rf"GLOBAL amp_patch\.support\.generated_class\.{words}"):
            torch.load(tmp_path / "model.pt", weights_only=True)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(loaded, names["Net"])
    torch.save(amp.fp32_copy(model), tmp_path / "copy.pt")
    torch.save(copy.deepcopy(model).state_dict(), tmp_path / "states.pt")
    torch.load(tmp_path / "states.pt", weights_only=True)
    script = LOADS.partition("for folder")[0] + "check(*(torch.load(f, weights_only=False) for f in sys.argv[1:]))"
    if level in ("O1", "O2"):
        run_without_us(tmp_path, script, "copy.pt", "states.pt")
