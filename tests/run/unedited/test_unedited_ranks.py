"""Unedited scripts over two processes: they train as with the three lines of amp_patch."""

from __future__ import annotations

import ast
import contextlib
from typing import Any

import pytest
import torch
from scripts import edited, run_source, start_script
from training import LEVELS, same

from amp_patch import amp
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript

pytestmark = pytest.mark.program

# Each leaves its losses in `losses`. The comments are the lines that our own script has there.
NET = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head, self.other = nn.Linear(144, 5), nn.Linear(144, 5)

    def forward(self, x):
        return self.head(self.body(x)) + (0 if UNUSED else self.other(self.body(x)))

torch.manual_seed(dist.get_rank())
losses = []
net = Net()
"""
WRAP = """
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
ddp = DistributedDataParallel(net, **OPTIONS)
prepare(ddp)
"""
# The optimizer is made last, of the parameters that the wrapper has.
WRAP_FIRST = """
ddp = DistributedDataParallel(net, **OPTIONS) #ddp = net
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
#ddp = DistributedDataParallel(net, **OPTIONS)
prepare(ddp)
"""
# In the third step the loss of the second rank overflows.
TRAIN = """
torch.manual_seed(10 + dist.get_rank())
for step in range(5):
    loss = F.cross_entropy(ddp(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,)))
    loss = loss * (FACTOR if step == 2 and dist.get_rank() == 1 else 1.0)
    optimizer.zero_grad()
    loss.backward() #optimizer
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.detach())
"""
# Its first micro-batches are the first calls of the model.
ACCUMULATE = """
import contextlib
torch.manual_seed(10 + dist.get_rank())
for step in range(9):
    with contextlib.nullcontext() if step % 3 == 2 else ddp.no_sync():
        loss = F.cross_entropy(ddp(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,))) / 3
        loss.backward() #optimizer
    losses.append(loss.detach())
    if step % 3 == 2:
        optimizer.step()
        ddp.zero_grad()
"""
# nanoGPT's loop: its flag is set at each micro-batch.
BY_FLAG = ACCUMULATE.replace(
    "with contextlib.nullcontext() if step % 3 == 2 else ddp.no_sync():",
    "ddp.require_backward_grad_sync = step % 3 == 2\n    with contextlib.nullcontext():",
)
RESUME = """
saved = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
assert all(name.startswith("module.") and value.dtype in (torch.float32, torch.int64)
           for name, value in saved["model"].items())
net = Net()
"""
LOAD = """
ddp.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
"""


def compress(ddp: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp.register_comm_hook(None, fp16_compress_hook)


def builtin_hook(ddp: Any) -> None:
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)


# The script, the options of DDP, a function that prepares the DDP model, and whether parameters stay unused.
SCRIPTS: dict[str, tuple[str, dict[str, Any], Any, bool]] = {
    "plain": (NET + WRAP + TRAIN, {}, None, False),
    "optimizer last": (NET + WRAP_FIRST + TRAIN, {}, None, False),
    "no_sync": (NET + WRAP + ACCUMULATE, {}, None, False),
    "flag": (NET + WRAP + BY_FLAG, {}, None, False),
    "unused": (NET + WRAP + TRAIN, {"find_unused_parameters": True}, None, True),
    "static": (NET + WRAP + TRAIN, {"static_graph": True}, None, True),
    "views": (NET + WRAP + TRAIN, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}, None, False),
    "hook": (NET + WRAP + TRAIN, {}, compress, False),
    "builtin hook": (NET + WRAP + TRAIN, {}, builtin_hook, False),
    "resumed": (NET + WRAP + TRAIN + RESUME + WRAP + LOAD + TRAIN, {}, None, False),
}


def trained(script: str, level: str | None, ours: bool, options: Any, prepare: Any, unused: bool) -> dict[str, Any]:
    """Losses, weights and scales of this rank; None: plain torch, without an UneditedScript."""
    names = {"OPTIONS": options, "prepare": prepare or (lambda ddp: None), "UNUSED": unused}
    # If no step may be skipped, FP16 must hold all values: weights (O3), or gradients between ranks (hooks).
    names["FACTOR"] = 1.0 if level == "O3" or (prepare and level not in ("O1", "O2")) else 1e6
    run_at_level = contextlib.nullcontext() if ours or level is None else UneditedScript(level)
    with run_at_level:
        found = run_source(edited(script) if ours else script, amp=amp, LEVEL=level, **names)
    if isinstance(run_at_level, UneditedScript):
        assert run_at_level.missing() is None and run_at_level.backwards == len(found["losses"])
    state = found["ddp"].state_dict()
    weights = [state[name].clone() for name, _ in found["ddp"].named_parameters()]
    return {"losses": found["losses"], "weights": weights, "scales": {} if level is None else amp.state_dict()}


# All levels for the first script. For the others, one that scales and one that casts weights, in turns.
CASES = [
    (name, level)
    for number, name in enumerate(SCRIPTS)
    for level in (LEVELS if number == 0 else ("O1", "O5") if number % 2 else ("O2", "O4"))
]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_an_unedited_script_under_ddp_trains_as_with_three_lines(ranks, name, level):
    script, *rest = SCRIPTS[name]
    found, expected = ranks(trained, script, level, False, *rest), ranks(trained, script, level, True, *rest)
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours["losses"], theirs["losses"]) and same(ours["weights"], theirs["weights"])
        assert ours["scales"] == theirs["scales"]
    assert same(found[0]["weights"], found[1]["weights"]), "the ranks differ"
    assert not same(found[0]["losses"], found[1]["losses"])
    scaled = level in ("O1", "O2") and name not in ("no_sync", "flag")
    assert found[0]["scales"] == found[1]["scales"]
    assert not scaled or found[0]["scales"]["loss_scaler0"]["loss_scale"] < 65536.0, "no step was skipped"
    if name == "flag":
        assert same(found[0]["weights"], ranks(trained, SCRIPTS["no_sync"][0], level, False, *rest)[0]["weights"])
    if level == "O0":
        plain = ranks(trained, script, None, False, *rest)
        assert [each["losses"] for each in plain] == [each["losses"] for each in found]


SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
mesh = init_device_mesh("cpu", (2,))
if POLICY == "FSDP1":
    net = ddp = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
else:
    options = {} if POLICY is None else {"mp_policy": amp.fsdp_policy(POLICY)}
    fully_shard(net.body[1], mesh=mesh)
    fully_shard(net.head, mesh=mesh, **options)
    net = ddp = fully_shard(net, mesh=mesh, **options)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
"""
NET_SHARDED = NET.replace("manual_seed(dist.get_rank())", "manual_seed(0)")  # fully_shard does not broadcast weights


def sharded(level: str, ours: bool, policy: str | None) -> Any:
    """The losses and shards of this rank, or the message of a refusal."""
    names = {"POLICY": policy, "UNUSED": False, "FACTOR": 1e6, "amp": amp, "LEVEL": level}
    script = NET_SHARDED + SHARDED + TRAIN
    try:
        with contextlib.nullcontext() if ours else UneditedScript(level) as run_at_level:
            found = run_source(edited(script) if ours else script, **names)
    except ScriptRefused as refused:
        return str(refused)
    assert ours or (run_at_level.missing() is None and run_at_level.backwards == 5)
    return found["losses"] + [p.to_local().detach().clone() for p in found["net"].parameters()]


fsdp2 = pytest.mark.skipif(
    torch.__version__.startswith(("2.6.", "2.8.")), reason="fully_shard of torch 2.6 and 2.8 does not average on CPUs"
)


@fsdp2
@pytest.mark.parametrize(("level", "policy"), [("O0", None), ("O1", None), ("O4", None), ("O2", "O2"), ("O5", "O5")])
def test_an_unedited_script_under_fully_shard_trains_as_with_three_lines(ranks, level, policy):
    found, expected = ranks(sharded, level, False, policy), ranks(sharded, level, True, policy)
    assert all(same(*each) for each in zip(found, expected, strict=True))


@fsdp2
@pytest.mark.parametrize(
    ("level", "policy", "words"),
    [
        ("O2", None, "shard with fully_shard(..., mp_policy=amp.fsdp_policy('O2', dtype=torch.float16))"),
        ("O5", None, "shard with fully_shard(..., mp_policy=amp.fsdp_policy('O5', dtype=torch.bfloat16))"),
        ("O3", None, "choose opt_level='O2'"),
        ("O1", "FSDP1", "shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"),
    ],
)
def test_unsupported_shards_are_refused_with_the_way_out(ranks, level, policy, words):
    for said in ranks(sharded, level, False, policy):
        assert words in said and "train.py, line" in said


SCRIPT = f"""
import os
import torch.distributed as dist
dist.init_process_group("gloo")
UNUSED, OPTIONS, FACTOR, prepare = False, {{}}, 1.0, lambda ddp: None
{NET}{WRAP}
if "COMPILED" in os.environ:
    ddp = torch.compile(ddp, backend="aot_eager")
{TRAIN}
with open(f"losses{{dist.get_rank()}}", "w") as file:
    file.write(repr([loss.item() for loss in losses]))
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort a process that has done all its work
"""


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"COMPILED": "1"}], ids=["eager", "compiled"])
@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_an_unedited_script_under_torchrun_trains_close_to_fp32(tmp_path, level, environment):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def losses(*command: str, **more: str) -> list[list[float]]:
        done = start_script(tmp_path, SCRIPT, *launcher, *command, **environment, **more)
        assert done.returncode == 0, done.stderr
        return [ast.literal_eval((tmp_path / f"losses{rank}").read_text()) for rank in range(2)]

    plain, found = losses(), losses("-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL=level)
    assert (found == plain) is (level == "O0")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=0.02, atol=0.02)
