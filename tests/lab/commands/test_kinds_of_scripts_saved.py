"""Scripts that save a whole model and evaluate the loaded one, and scripts with an optimizer for each layer."""

from __future__ import annotations

import re

import pytest
from scripts import start_script

from amp_patch.lab.recording.run import Run, loads

pytestmark = pytest.mark.slow

LEVELS = ["O0", "O1", "O2", "O4", "O5"]
# A recurrent language model over (time, batch) data: the better of two epochs is saved whole, and read for the test.
LANGUAGE = """
import torch
from torch import nn

torch.manual_seed(0)
TOKENS, BATCH, STEPS = 20, 8, 10
data = torch.randint(TOKENS, (3, 61, BATCH)).cumsum(1) % TOKENS

class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(TOKENS, 16)
        self.rnn = nn.LSTM(16, 16, 2, dropout=0.1)
        self.decoder = nn.Linear(16, TOKENS)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, TOKENS), dim=1), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return weight.new_zeros(2, BATCH, 16), weight.new_zeros(2, BATCH, 16)

model = RNNModel()
criterion = nn.NLLLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def batches(part):
    return [(part[i : i + STEPS], part[i + 1 : i + 1 + STEPS].reshape(-1)) for i in range(0, 60, STEPS)]

def evaluate(part):
    model.eval()
    total, hidden = 0.0, model.init_hidden()
    with torch.no_grad():
        for inputs, targets in batches(part):
            output, hidden = model(inputs, hidden)
            total += criterion(output, targets).item()
    return total / len(batches(part))

best = None
for epoch in range(2):
    model.train()
    hidden = model.init_hidden()
    for inputs, targets in batches(data[0]):
        model.zero_grad()
        hidden = tuple(each.detach() for each in hidden)
        output, hidden = model(inputs, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    validation = evaluate(data[1])
    if best is None or validation < best:
        with open("model.pt", "wb") as file:
            torch.save(model, file)
        best = validation

with open("model.pt", "rb") as file:
    kinds = [RNNModel, nn.Dropout, nn.Embedding, nn.LSTM, nn.Linear]
    with torch.serialization.safe_globals(kinds):
        model = torch.load(file)
    model.rnn.flatten_parameters()
output, _ = model.eval()(data[2][:STEPS], model.init_hidden())
print("loaded", isinstance(model, RNNModel), next(model.parameters()).dtype, output.dtype, evaluate(data[2]).hex())
"""
LAYERS = """
import torch
from torch import nn

torch.manual_seed(0)

class Layer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.relu = nn.ReLU()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03, eps=1e-4)

    def forward(self, x):
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

    def train(self, good, bad):
        for _ in range(120):
            goods, bads = (self.forward(x).pow(2).mean(1) for x in (good, bad))
            loss = torch.log(1 + torch.exp(torch.cat([2 - goods, bads - 2]))).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self.forward(good).detach(), self.forward(bad).detach()

x = torch.randn(16, 8), torch.randn(16, 8)
for layer in [Layer(8, 16), Layer(16, 16)]:
    x = layer.train(*x)
"""


def compared(tmp_path, script) -> list[Run]:
    done = start_script(tmp_path, script, "-m", "amp_patch", "compare", "--levels", ",".join(LEVELS), "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert [(run.level, run.error) for run in runs] == [(level, None) for level in LEVELS]
    o0, *others = runs
    for run in others:
        assert run.steps == o0.steps and run.loss != o0.loss == pytest.approx(run.loss, rel=0.1, abs=0.02)
    return runs


def test_a_saved_model_is_loaded_and_evaluated_in_fp32_at_every_level(tmp_path):
    alone = start_script(tmp_path, LANGUAGE)
    assert alone.returncode == 0, alone.stderr
    assert [run.steps for run in compared(tmp_path, LANGUAGE)] == [12] * len(LEVELS)
    for level in LEVELS:
        printed = (tmp_path / f"amp_compare/runs/{level}-seed0.log").read_text()
        found = re.search(r"^loaded True torch.float32 torch.float32 (.*)$", printed, re.MULTILINE)
        assert found, printed
        loss, expected = float.fromhex(found[1]), float.fromhex(alone.stdout.split()[-1])
        assert loss == expected if level == "O0" else loss == pytest.approx(expected, rel=0.05)


def test_layers_with_an_optimizer_each_are_compared(tmp_path):
    assert {run.steps for run in compared(tmp_path, LAYERS)} == {240}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_run_ends_with_a_summary_line(level, tmp_path):
    done = start_script(tmp_path, LANGUAGE, "-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL=level)
    last = done.stderr.splitlines()[-1]
    counted = r"; memory of weights, [^;]* [\d.]+ KiB, in FP32 about [\d.]+; peak of the process [\d.]+ \w+"
    name, memory = {"O0": ("O0", ""), "O2": ("O2 FP16", counted)}[level]
    assert re.fullmatch(rf"amp_patch: {name} trained RNNModel by AdamW: 12 steps, \d+ skipped{memory}", last), (
        done.stderr
    )
