"""The search for the largest batch, by doubling."""

from __future__ import annotations

import argparse
import json
from typing import ClassVar

import pytest
import torch
from compared_runs import importable_fixture  # noqa: F401  the fixture `importable`
from python_forks import python

from amp_patch import multi_tensor
from amp_patch.__main__ import main
from amp_patch.comparison.commands import batch_search
from amp_patch.comparison.commands.interrupts import Interrupts
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import OUT_OF_MEMORY, loads

MIB = 2**20


@pytest.fixture(name="trials")
def trials_fixture(monkeypatch):
    """A training that takes 4 MiB, and 1 MiB a sample at O0 or half of it at O5; `trials` has its changes."""
    changes = {}

    class Trains:
        made: ClassVar[list[str]] = []

        def __init__(self, plan, args, run, load, more):
            self.run, (self.name, (_, batch)) = run, more
            samples = min(int(batch), changes.get("data", 10**9))
            self.run.dtype = None if run.level == "O0" else "bfloat16"
            self.run.device, self.run.weights = "cpu", 4 * MIB
            self.run.activations = samples * MIB // (1 if run.level == "O0" else 2)
            self.run.samples, self.run.seconds, self.run.loss = [samples] * 4, [0.25] * 4, [1.0] * 4
            if int(batch) > changes.get("out above", 10**9):
                self.run.error, self.run.error_kind = "out of memory", OUT_OF_MEMORY
            if int(batch) == changes.get("fails at"):
                self.run.error = "ValueError: too many"

        def train_alone(self, check):
            self.made.append(self.name)

    monkeypatch.setattr(batch_search, "Child", Trains)
    changes["made"] = Trains.made
    return changes


def search(folder, size):
    """Return the exit status, and {level: its entry} of the report."""
    args = argparse.Namespace(script="t.py", arguments=[], batch_search=size, batch_flag="--batch", out=folder)
    status = batch_search.run(args, Plan(("O0", "O5"), seeds=1), Interrupts())
    path = folder / "batch_search.json"
    return status, {each["name"]: each for each in loads(path.read_text())["levels"]} if path.exists() else {}


def test_the_batch_is_doubled_until_it_does_not_fit(trials, tmp_path, capsys):
    status, found = search(tmp_path, "100MiB")
    assert status == 0 and [(name, each["batch"]) for name, each in found.items()] == [("O0", 64), ("O5 BF16", 128)]
    assert [found[name]["memory_bytes"] for name in found] == [68 * MIB, 68 * MIB]
    assert [found[name]["samples_per_second"] for name in found] == [256, 512]
    assert [trial["batch"] for trial in found["O0"]["tried"]] == [8, 16, 32, 64, 128]
    assert trials["made"][:2] == ["batch-O0-8", "batch-O0-16"]
    table = capsys.readouterr().out.splitlines()[-4:-1]
    assert table[0].split() == ["level", "batch", "MiB", "samples/s"]
    assert table[2].split() == ["O5", "BF16", "128", "68", "512"]


@pytest.mark.parametrize(("size", "batch"), [("12MiB", 8), ("11MiB", 4), ("7MiB", 2), ("5MiB", 1)])
def test_the_batch_is_halved_until_it_fits(trials, size, batch, tmp_path):
    status, found = search(tmp_path, size)
    assert (status, found["O0"]["batch"], found["O0"]["problem"]) == (0, batch, None)


def test_a_search_without_an_answer_says_why(trials, tmp_path):
    status, found = search(tmp_path, "4MiB")
    assert status == 1 and found["O0"]["batch"] is None and found["O0"]["problem"] == "a batch of 1 does not fit"
    assert [trial["batch"] for trial in found["O0"]["tried"]] == [8, 4, 2, 1]


def test_a_batch_that_runs_out_of_memory_does_not_fit(trials, tmp_path):
    trials["out above"] = 20
    _, found = search(tmp_path, "1GiB")
    assert [each["batch"] for each in found.values()] == [16, 16] and found["O0"]["problem"] is None


def test_data_that_ends_ends_the_search(trials, tmp_path):
    trials["data"] = 40
    status, found = search(tmp_path, "1GiB")
    assert status == 0 and found["O0"]["batch"] == 64
    assert found["O0"]["problem"] == "128 takes no more memory: the data ends, or the option changes nothing"


def test_a_failure_ends_the_level_and_with_the_first_batch_of_the_first_level_the_search(trials, tmp_path, capsys):
    trials["fails at"] = 16
    status, found = search(tmp_path, "1GiB")
    assert status == 0 and found["O0"]["batch"] == 8
    assert found["O0"]["problem"] == "failed with 16: ValueError: too many"
    trials["fails at"] = 8
    assert search(tmp_path / "no", "1GiB") == (2, {})
    assert capsys.readouterr().err == "compare: O0 failed with 8: ValueError: too many\n"


@pytest.mark.parametrize("text", ["", "8parsec", "-1GiB", "0MiB", "GiB", "nan", "8GB"])
def test_a_text_that_is_no_size_is_refused(text, tmp_path, capsys):
    assert search(tmp_path, text) == (2, {})
    assert "; wanted a size, as 8GiB or 512MiB" in capsys.readouterr().err


SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, required=True)
rows = parser.parse_args().rows
net = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for inputs in torch.randn(100_000, 8).split(rows):
    loss = net(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PARAMS = 8 * 256 + 256 + 256 * 8 + 8


def compare(folder, *options, script=SCRIPT):
    (folder / "train.py").write_text(script)
    return python("-m", "amp_patch", "compare", "--out", "report", *options, "train.py", cwd=folder)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this torch does not tell whose saved-tensor hooks are there",
)
@pytest.mark.slow
def test_a_search_of_a_script_finds_the_batch_that_its_tensor_sizes_allow(tmp_path):
    a_sample = {"O0": 4 * (256 + 8), "O5": 2 * (256 + 8) + 4 * 8}  # ReLU's and the squares'; the cast batch
    gradient = 2 if multi_tensor.backend() == "cpp" else 4  # plain torch steps masters by FP32 ones
    held = {"O0": 4 * 2 * PARAMS, "O5": (2 + 4 + gradient) * PARAMS}  # weights and gradients; and masters
    limit = held["O0"] + 100 * a_sample["O0"]
    size = f"{limit / 2**10:.4f}KiB"
    done = compare(tmp_path, "--batch-search", size, "--batch-flag", "--rows", "--levels", "O0,O5")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "batch_search.json").read_text())
    for level, name in zip(report["levels"], ("O0", "O5"), strict=True):
        fits = [batch for batch in (2**n for n in range(20)) if held[name] + batch * a_sample[name] <= limit]
        assert level["batch"] == max(fits)
        assert level["memory_bytes"] == held[name] + level["batch"] * a_sample[name]
        assert level["samples_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["1GiB"], "needs the script's own option for its batch: add --batch-flag=--batch-size"),
        (["8parsec", "--batch-flag", "--rows"], "--batch-search is '8parsec'; wanted a size"),
        (["1GiB", "--batch-flag", "--columns"], "O0 failed with 8: the script exited with status 2: train.py: error: "),
    ],
)
def test_a_batch_search_with_wrong_arguments_prints_one_error(options, message, tmp_path, monkeypatch, capfd):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--batch-search", *options, "train.py"])
    said = capfd.readouterr()
    assert ended.value.code == 2
    assert message in said.err and said.err.count("\n") == 1
