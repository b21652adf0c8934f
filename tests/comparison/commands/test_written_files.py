"""Files that `compare` writes into its folder: a link in the folder is replaced, and not followed."""

from __future__ import annotations

import json
import os

import pytest
from paths import ROOT

from amp_patch.__main__ import main

SCRIPT = """
import sys
import torch
from amp_patch import amp
model = torch.nn.Linear(4, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
for step in range(4):
    with amp.scale_loss(model(torch.ones(8, 4)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
WRITTEN = ("report.json", "report.html", "runs/O0-seed0.log", "runs/O0-seed0.jsonl", "runs/O1-seed0.jsonl")
OF_SEARCH = ("batch_search.json", "runs/batch-O0-8.log", "runs/batch-O0-8.jsonl")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a script and the folder of a report."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "out" / "runs").mkdir(parents=True)
    return tmp_path


def compare(*options: str) -> None:
    try:
        main(["compare", "--levels", "O0,O1", "--seeds", "1", "--out", "out", *options, "train.py"])
    except SystemExit as left:
        assert left.code in (0, 1), left.code  # 1: the batch of this script changes nothing


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--batch-search", "1GiB", "--batch-flag", "--batch")])
def test_compare_replaces_links_in_its_folder(options, folder):
    names = OF_SEARCH if options else WRITTEN
    (folder / "theirs").mkdir()
    for index, name in enumerate(names):
        (folder / "theirs" / str(index)).write_text("theirs")
        (folder / "out" / name).symlink_to(folder / "theirs" / str(index))
    compare(*options)
    for index, name in enumerate(names):
        assert (folder / "theirs" / str(index)).read_text() == "theirs", name
        assert (folder / "out" / name).is_file() and not (folder / "out" / name).is_symlink(), name
    assert json.loads((folder / "out" / names[0]).read_text())


@pytest.mark.slow
def test_compare_replaces_a_link_at_its_folder_of_runs(folder):
    (folder / "theirs").mkdir()
    (folder / "out" / "runs").rmdir()
    (folder / "out" / "runs").symlink_to(folder / "theirs")
    compare()
    assert not os.listdir(folder / "theirs") and (folder / "out" / "runs" / "O1-seed0.jsonl").is_file()
