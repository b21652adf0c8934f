"""`compare` under a launcher: refused by name in a rank, one run at a time where a port is shared."""

from __future__ import annotations

import socket

import pytest
from scripts import start_script

from amp_patch.__main__ import main
from amp_patch.comparison.commands.compare_arguments import refuse_ranks

RANKS = {
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "WORLD_SIZE=2"),
    "the first of them": ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
    "srun": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2"),
    "torchrun of one": ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, "TORCHELASTIC_RUN_ID=none"),
}
ONE = [
    {},
    {"RANK": "", "WORLD_SIZE": ""},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
    {"LOCAL_RANK": "0"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
]


@pytest.mark.parametrize("launcher", RANKS)
def test_a_rank_is_refused_by_its_variables(launcher):
    environment, words = RANKS[launcher]
    with pytest.raises(ValueError, match=rf"(?s){words}.*torchrun --nproc-per-node 2 -m amp_patch run"):
        refuse_ranks(environment)


@pytest.mark.parametrize("environment", ONE)
def test_a_single_process_is_no_rank(environment):
    refuse_ranks(environment)


def test_compare_in_a_rank_is_refused_before_any_run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main(["compare", "train.py"])
    assert end.value.code == 2 and "a launcher has started this process (WORLD_SIZE=2)" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [tmp_path / "train.py"]


RANKS_OF_ITS_OWN = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    dist.barrier()  # gloo's thread aborts a rank whose peer has closed the connection in its last collective
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (PORT,), nprocs=2)
"""


@pytest.mark.slow
def test_compare_refuses_a_script_that_spawns_ranks_and_run_trains_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = RANKS_OF_ITS_OWN.replace("PORT", str(server.getsockname()[1]))
    done = start_script(tmp_path, script, "-m", "amp_patch", "compare", "--seeds", "1")
    assert done.returncode == 2 and "it started 2 more, whose steps are not seen here" in done.stderr, done.stderr
    done = start_script(tmp_path, script, "-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL="O2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("O2 FP16 trained Linear by SGD: 4 steps") == 1  # the first rank speaks for both
