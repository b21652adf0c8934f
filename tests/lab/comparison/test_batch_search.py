"""The search for the largest batch: exact if memory grows evenly, and close otherwise."""

from __future__ import annotations

import json
import math

import pytest
import torch
from compared_runs import importable_fixture  # noqa: F401  the fixture `importable`
from python_forks import python

from amp_patch import multi_tensor
from amp_patch.__main__ import main
from amp_patch.lab.comparison.batch_search import Search, Trial, lines, search, size_in_bytes

GIB = 2**30


def found(memory, limit=GIB, *, out_above=math.inf, data=math.inf, fails_at=None, near=None, micro=1):
    """Search in a training whose batches take `memory(batch)` bytes."""

    def trial(batch):
        samples = min(micro * batch, data)
        if batch == fails_at:
            return Trial(batch, error="ValueError: too many"), "bfloat16"
        if batch > out_above:
            return Trial(batch, error="out of memory: CUDA", ran_out=True), None
        return Trial(batch, int(memory(samples // micro)), samples, 100.0), "bfloat16"

    return search("O5", limit, trial, near)


@pytest.mark.parametrize(
    ("memory", "largest", "trials"),
    [
        (lambda n: 2**28 + n * 2**20, 768, 4),  # evenly
        (lambda n: 2**28 + n * 2**28, 3, 4),  # the first batch, 8, is too large
        (lambda n: 2**28 + n * 2**14, 3 * 2**14, 4),
        (lambda n: 2**28 + max(2**27, n * 2**20), 768, 7),  # with small batches, other memory dominates
        (lambda n: n**2 * 2**10, 1024, 8),
        (lambda n: GIB - 1 + n, 1, 3),
    ],
)
def test_a_search_finds_the_largest_batch_that_fits(memory, largest, trials):
    result = found(memory)
    assert result.best.batch == largest and len(result.tried) <= trials
    assert memory(largest) <= GIB < memory(largest + 1)
    assert result.best.memory == memory(largest) and result.problem is None and result.name == "O5 BF16"
    assert result.over is not None or result.next_memory() > GIB, "neither tried nor reckoned"


def test_a_search_starts_at_half_of_the_answer_of_another_level():
    base = found(lambda n: 2**28 + n * 2**20)
    result = found(lambda n: 2**28 + n * 2**19, near=base)
    assert [trial.batch for trial in result.tried] == [384, 768, 1536]


def test_a_search_treats_a_batch_that_runs_out_of_memory_as_too_large():
    result = found(lambda n: n * 2**20, out_above=700)  # fragmentation, which no count includes
    assert result.best.batch == 700 and result.over.batch == 701 and result.over.memory is None
    assert found(lambda n: n * 2**20, out_above=0).problem == "a batch of 1 runs out"
    assert found(lambda n: n * 2 * GIB).problem == "a batch of 1 takes 2 GiB"


def test_a_search_without_an_answer_says_why():
    assert found(lambda n: 4096).best.batch > 2**10, "with small batches, other memory may dominate"
    assert "changes nothing: 8 and 16 take the same" in found(lambda n: 4096, data=8).problem
    ended = found(lambda n: n * 2**10, data=1797, micro=2)
    assert ended.problem == "the data gave no more than 1797 samples" and ended.best.samples == 1797
    assert found(lambda n: n, fails_at=8).problem == "failed with 8: ValueError: too many"
    later = found(lambda n: n, fails_at=16)
    assert later.problem == "failed with 16: ValueError: too many" and later.best.batch == 8


@pytest.mark.parametrize(
    ("given", "dim", "samples"),
    [
        (lambda batch: (35, batch), 1, lambda batch: batch),  # (time, batch), as of a recurrent network
        (lambda batch: (batch, 3, 8), 0, lambda batch: batch),
        (lambda batch: (20 + batch % 7, batch), 1, lambda batch: batch),  # padded to the longest
        (lambda batch: (3 * batch, 5), 0, lambda batch: 3 * batch),  # flattened: three rows a sample
        (lambda batch: (35, 4), None, lambda batch: 35),  # the batch is no size of the first tensor
    ],
)
def test_samples_are_counted_in_the_dimension_that_changes_with_the_batch(given, dim, samples):
    def trial(batch):
        sizes = given(batch)
        return Trial(batch, 2**28 + batch * 2**20, 2 * sizes[0], 100.0 * sizes[0], given=sizes), None

    result = search("O0", GIB, trial)
    assert (result.best.batch, result.problem, result.batch_dim) == (768, None, dim)
    assert result.rate == pytest.approx(100.0 * samples(768)) == result.to_dict()["samples_per_second"]
    assert result.to_dict()["batch_dim"] == dim


def test_data_that_ends_is_noticed_in_the_dimension_of_the_batch():
    def trial(batch):
        sizes = (35, min(batch, 100))
        return Trial(batch, sizes[1] * 2**10, sizes[0], 1.0, given=sizes), None

    assert search("O0", GIB, trial).problem == "the data gave no more than 100 samples"


def test_the_table_of_a_search_says_which_answers_were_tried():
    base = Search("O0", None, GIB, [Trial(8, 2**27, 8, 10.0), Trial(64, GIB, 64, 123.456)])
    level = Search("O5", "bfloat16", GIB, [Trial(100, 2**29, 100, 9e9), Trial(101, 2 * GIB, 101)])
    none = Search("O2", "float16", GIB, [Trial(1, 3 * GIB, 1)])
    assert lines([base, none, level], "--batch-size") == [
        "The largest --batch-size in 1 GiB",
        "level    batch  memory, GiB  samples/s",
        "O0          64            1      123.5",
        "O2 FP16   none",
        "O5 BF16    100          0.5      9e+09",
        "O2 FP16: a batch of 1 takes 3 GiB.",
        "Each batch above was run for a few steps; samples/s are of these.",
        "One more does not fit: tried at O5 BF16.",
        "One more does not fit by the line through two trials: O0.",
        "O5 BF16 takes 1.56 times O0's batch.",
    ]


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * GIB), ("1.5 MiB", 3 * 2**19), ("8GB", 8 * 10**9), ("7k", 7000), ("64B", 64)]
)
def test_a_size_with_a_unit_is_read_as_bytes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8parsec", "-1GiB", "0MiB", "GiB", "nan"])
def test_a_text_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"--batch-search is .*; wanted a size, as 8GiB or 512MiB"):
        size_in_bytes(text)


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
# (time, batch), 35 steps of time each.
RECURRENT = """
import sys
import torch

rows = int(sys.argv[2])
net = torch.nn.LSTM(8, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    loss = net(torch.randn(35, rows, 8))[0].square().mean()
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
    limit = held["O0"] + 100 * a_sample["O0"] + 77
    done = compare(tmp_path, "--batch-search", f"{limit}B", "--batch-flag", "--rows", "--levels", "O0,O5")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "batch_search.json").read_text())
    for level in report["levels"]:
        name, batch = level["level"], level["batch"]
        assert batch == (limit - held[name]) // a_sample[name]
        assert level["memory_bytes"] == held[name] + batch * a_sample[name]
        assert level["samples_per_second"] > 0
        assert level["tried"][-1]["batch"] == batch, "the answer was run"
    assert report["levels"][0]["batch"] == 100 and report["flag"] == "--rows" and report["limit_bytes"] == limit
    assert "O0         100" in done.stdout and "times O0's batch." in done.stdout


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
    assert ended.value.code == 2 and said.out == ""
    assert message in said.err and said.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("told", [[], ["--batch-dim", "1"]])
def test_a_batch_search_counts_samples_in_a_later_dimension(told, tmp_path):
    options = ["--batch-search", "2MiB", "--batch-flag", "--rows", "--levels", "O0,O4", *told]
    done = compare(tmp_path, *options, script=RECURRENT)
    assert done.returncode == 0 and "the data gave" not in done.stdout, done.stdout + done.stderr
    for level in json.loads((tmp_path / "report" / "batch_search.json").read_text())["levels"]:
        assert level["problem"] is None and level["batch"] > 8 and level["batch_dim"] == (None if told else 1)
        best = next(trial for trial in level["tried"] if trial["batch"] == level["batch"])
        assert best["samples"] == (level["batch"] if told else 35)
        assert level["samples_per_second"] == pytest.approx(
            best["samples_per_second"] * level["batch"] / best["samples"]
        )
