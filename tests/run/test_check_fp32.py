"""`python -m amp_patch check` of scripts in FP32: it says how `compare` would train them."""

from __future__ import annotations

import json

import pytest

from amp_patch.__main__ import main

FP32 = """
import torch
import torch.optim as optim
model = torch.nn.Linear(4, 1)
optimizer = optim.AdamW(model.parameters())
loss = model(x).sum()
loss.backward()
optimizer.step()
"""
TAKEN = "trains it unedited at O0, O1, O2, O4 and O5"
TOLD = {
    "an optimizer": (FP32, [TAKEN]),
    "imported by name": (
        FP32.replace("import torch.optim as optim", "from torch.optim import AdamW").replace("optim.A", "A"),
        [TAKEN],
    ),
    "lbfgs": (FP32.replace("AdamW", "LBFGS"), [" refuses:", "{}:5: LBFGS evaluates"]),
    "by hand": (
        "import torch\nloss.backward()\nfor p in params: p.data.add_(p.grad, alpha=-1)",
        ["without an optimizer", "optimizer = torch.optim.SGD(model.parameters(), lr=lr)", "backward: {}:2"],
    ),
    "processes": (
        FP32 + "import torch.multiprocessing as mp\nmp.spawn(train)",
        [" refuses:", "{}:10: it trains in child processes: run trains these"],
    ),
    "only a log": (FP32 + "from amp_patch import amp\namp.log(accuracy=1.0)", [TAKEN]),
    "lightning": ("import lightning as L\nL.Trainer().fit(model)", [TAKEN]),
}
SILENT = {
    "no training": "import json\nprint(json.dumps({}))",
    "ours": FP32 + "from amp_patch import amp\nmodel, optimizer = amp.initialize(model, optimizer)",
    "native": FP32 + "scaler = torch.amp.GradScaler()",
    "a broken file": "import torch\nloss.backward(",
}


@pytest.mark.parametrize("name", TOLD)
def test_check_says_what_compare_does_with_an_fp32_script(name, tmp_path, capsys):
    script, lines = TOLD[name]
    path = tmp_path / "train.py"
    path.write_text(script)
    with pytest.raises(SystemExit) as end:
        main(["check", str(path)])
    told = capsys.readouterr().out
    assert end.value.code == 0 and "an FP32 script" in told
    assert f"python -m amp_patch compare {path}" in told
    assert all(line.format(path) in told for line in lines), told


@pytest.mark.parametrize("name", SILENT)
def test_check_mentions_compare_for_no_other_script(name, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SILENT[name])
    with pytest.raises(SystemExit):
        main(["check", str(path)])
    assert "FP32 script" not in capsys.readouterr().out


def test_check_lists_places_of_losses_in_json(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(FP32)
    with pytest.raises(SystemExit):
        main(["check", "--json", str(path)])
    found = json.loads(capsys.readouterr().out)["fp32"]
    assert found["steps"] is True and found["losses"] == [f"{path}:7"]
    assert found["scripts"] == [str(path)] and found["refused"] == {} and found["of_ours"] is False
