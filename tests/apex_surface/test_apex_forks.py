"""Additions of living forks to NVIDIA's Apex: ROCm's types, Huawei's arguments. And DeepSpeed, which calls Apex."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from apexed import (
    apex_amp,  # noqa: F401
    make,
)
from paths import ROOT
from torch import nn
from training import linear, mm_dtype

# --- ROCm ------------------------------------------------------------------------------------------------------------


def test_a_type_of_the_patched_functions_is_refused(amp):
    """The level has it: O4 is O1 in BF16."""
    with pytest.raises(TypeError, match="initialize: there is no argument 'patch_torch_functions_type'"):
        make(amp, "O4", patch_torch_functions_type=torch.bfloat16)
    with pytest.raises(TypeError, match="patch_type"):
        amp.init(patch_type=torch.bfloat16)
    assert mm_dtype() is torch.float32


# --- Huawei ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["combine_ddp", "combine_grad", "dynamic_init_scale", "user_cast_preferred"])
def test_an_argument_of_huaweis_is_refused_and_nothing_changed(amp, name):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=f"initialize: there is no argument '{name}'"):
        amp.initialize(model, optimizer, opt_level="O2", **{name: True})
    assert type(model) is nn.Linear and model.weight.dtype is torch.float32


def test_deepspeed_in_several_processes_is_refused(amp, monkeypatch):
    """A module of DeepSpeed's name calls `initialize`, as the first of two ranks."""
    engine = {"__name__": "deepspeed.runtime.engine", "initialize": amp.initialize}
    exec("def configure(*given): return initialize(*given, opt_level='O2')", engine)
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="DeepSpeed averages gradients over the processes too late"):
        engine["configure"](model, optimizer)
    assert type(model) is nn.Linear and model.weight.dtype is torch.float32


# --- DeepSpeed -------------------------------------------------------------------------------------------------------

# Apart from what the other tests import: accelerate takes a DeepSpeed that it finds.
DEEPSPEED = Path(sys.prefix, "deepspeed")
needs_deepspeed = pytest.mark.skipif(
    not DEEPSPEED.exists(), reason="`make test-all` installs deepspeed==0.18.2, which still has apex.amp, for itself"
)
TRAINING = """
import json, os, sys
import deepspeed, torch
import apex.amp

level, micros, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {
    "train_batch_size": 4 * micros * world,
    "gradient_accumulation_steps": micros,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    "amp": {"enabled": True, "opt_level": level, **options},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

def steps(count, start=0):
    losses = []
    for step in range(start, start + count):
        for micro in range(micros):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(4, 8, generator=generator)
            loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses

losses = steps(60)
folder = sys.argv[4]
engine.save_checkpoint(folder, tag="t", client_state={"amp": apex.amp.state_dict()})
after = steps(3, 60)
masters = [p.tolist() for p in apex.amp.master_params(optimizer)]
_, state = engine.load_checkpoint(folder, tag="t")
apex.amp.load_state_dict(state["amp"])
resumed = steps(3, 60) == after and masters == [p.tolist() for p in apex.amp.master_params(optimizer)]
seen = {"losses": losses, "resumed": resumed, "lr": engine.get_lr(), "masters": masters}
with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
    json.dump(seen, file)
"""


def deepspeed_run(folder, level, micros=1, options="{}", processes=1, port=29611):
    (folder / "train.py").write_text(TRAINING)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(DEEPSPEED), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        # What DeepSpeed compiles at its first use: elsewhere a run that was killed would leave it locked.
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [sys.executable, "-m", "amp_patch", "run", str(folder / "train.py"), level, str(micros), options]
    started = [
        subprocess.Popen(
            [*arguments, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    return [(process, process.communicate(timeout=300)[0]) for process in started]


def deepspeed_seen(folder, *arguments, **options):
    started = deepspeed_run(folder, *arguments, **options)
    for process, printed in started:
        assert process.returncode == 0, printed[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(started))]


def learned(losses):
    return sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_deepspeed_trains_by_its_config(tmp_path, level):
    """engine.backward in micro-batches, clipping, the schedule, checkpoints: DeepSpeed as it is, through `run`."""
    (seen,) = deepspeed_seen(tmp_path, level, 2)
    assert learned(seen["losses"]) and seen["lr"] == [0.01] and seen["resumed"]
