"""accelerate and transformers' Trainer train at a level as the plain loop does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

EXTRAS = "pip install amp_patch[lightning,transformers]; `make test-all` does"
pytest.importorskip("lightning", reason=EXTRAS)
pytest.importorskip("transformers", reason=EXTRAS)
pytest.importorskip("accelerate", reason=EXTRAS)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network

import lightning.pytorch as pl  # noqa: E402
import transformers  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from frameworks import INPUTS, PACKAGES_WARN, adam, gpt, hf_trainer, network  # noqa: E402
from paths import EXAMPLES  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from training import LEVELS, same, weights  # noqa: E402

from amp_patch import amp  # noqa: E402
from amp_patch.integrations.transformers import OptLevelTrainer  # noqa: E402

pytestmark = PACKAGES_WARN


INTEGRATIONS = EXAMPLES / "integrations"
AUTO = {"dtype" if transformers.__version__ >= "5" else "torch_dtype": "auto"}  # the type that the config says


def example(name: str) -> Any:
    sys.path.insert(0, str(INTEGRATIONS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(INTEGRATIONS))


@pytest.mark.parametrize("level", LEVELS)
def test_fabric_does_what_the_loop_does(level):
    """The recipe, beside itself with a stand-in for Fabric that does nothing."""

    class NoFabric:
        device = "cpu"
        launch = staticmethod(lambda: None)
        setup = staticmethod(lambda model, optimizer: (model, optimizer))
        setup_dataloaders = staticmethod(lambda loader: loader)
        backward = staticmethod(lambda loss: loss.backward())

        def clip_gradients(self, model, optimizer, max_norm):
            torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), max_norm)

    recipe = example("fabric_loop")
    model, losses = recipe.train(level, accelerator="cpu", devices=1)
    amp.restore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "Fabric", NoFabric)
        expected, expected_losses = recipe.train(level)
    assert losses == expected_losses
    assert same(weights(model), weights(expected))


@pytest.fixture
def accelerate_state(monkeypatch):
    """Accelerate's settings are process-wide, and the Trainer's are not a script's."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    classes = (AcceleratorState, GradientState, PartialState)
    for each in classes:
        each._reset_state()
    yield
    for each in classes:
        each._reset_state()


@pytest.mark.parametrize("level", LEVELS)
def test_accelerate_does_what_the_loop_does(level, accelerate_state):
    recipe = example("accelerate_loop")
    model, losses = recipe.train(level)
    amp.restore()

    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 8), torch.randint(3, (32,))
    expected = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, eps=1e-4)
    expected, optimizer = amp.initialize(expected, optimizer, opt_level=level)
    expected_losses = []
    for step in range(8):
        rows = slice(step % 4 * 8, step % 4 * 8 + 8)
        loss = nn.functional.cross_entropy(expected(inputs[rows]), targets[rows])
        expected_losses.append(loss.item())
        with amp.scale_loss(loss, optimizer, delay_unscale=step % 2 == 0) as scaled_loss:
            (scaled_loss / 2).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert losses == expected_losses
    assert same(weights(model), weights(expected))


def logged_of(trainer: transformers.Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_the_trainer_at_o0_is_the_trainer(tmp_path):
    ours, theirs = hf_trainer(tmp_path, "O0"), hf_trainer(tmp_path, None)
    ours.train()
    theirs.train()
    for name in ("loss", "grad_norm"):
        assert logged_of(ours, name) == logged_of(theirs, name)
    assert same(weights(ours.model), weights(theirs.model))


@pytest.mark.parametrize("level", LEVELS)
def test_the_trainer_does_what_the_loop_does(level, tmp_path):
    """Losses and norms are logged unscaled; clipping is of the masters."""
    trainer = hf_trainer(tmp_path, level)
    batches, collate = [], trainer.data_collator
    trainer.data_collator = lambda rows: batches.append(collate(rows)) or batches[-1]
    trainer.train()
    amp.restore()

    model = gpt()
    optimizer = transformers.Trainer(model, trainer.args).create_optimizer()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 5)
    losses, norms = [], []
    for first, second in zip(batches[:10:2], batches[1:10:2], strict=True):
        both = []
        for batch in (first, second):
            loss = model(**batch, num_items_in_batch=torch.tensor(64)).loss
            both.append(loss.detach().double())
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in amp.master_params(optimizer)]).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # at O2 the masters' gradients, in the Trainer's order
        losses.append(sum(both).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert logged_of(trainer, "loss") == pytest.approx(losses, rel=1e-6)
    assert logged_of(trainer, "grad_norm") == pytest.approx(norms, rel=1e-6)
    amp.restore()
    assert same(weights(trainer.model), weights(model))


class ScaleOf512(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("callbacks_too", [False, True])
def test_the_trainer_resumes_to_the_same_bits(level, callbacks_too, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": callbacks_too}
    whole = hf_trainer(tmp_path, level, callbacks=[ScaleOf512()] if level != "O5" else [], **saves)
    whole.train()
    state = amp.state_dict()
    resumed = hf_trainer(tmp_path, level, **saves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged_of(resumed, "loss") == logged_of(whole, "loss")
    assert same(weights(resumed.model), weights(whole.model))
    assert amp.state_dict() == state
    assert state["loss_scaler0"] == ({"loss_scale": 1.0, "unskipped": 0} if level == "O5" else state["loss_scaler0"])
    if level != "O5":
        assert state["loss_scaler0"] == {"loss_scale": 512.0, "unskipped": 7 + 10}


def test_a_checkpoint_of_the_trainer_is_fp32_and_loads_in_another(tmp_path):
    trainer = hf_trainer(tmp_path, "O2", save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    masters = dict(trainer.model.state_dict())
    assert saved and all(
        value.dtype is torch.float32 and torch.equal(value, masters[name]) for name, value in saved.items()
    )
    hf_trainer(tmp_path / "resumed", None).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # And the way here, from a checkpoint without a loss scale.
    hf_trainer(tmp_path / "plain", None, save_strategy="steps", save_steps=2, max_steps=2).train()
    ours = hf_trainer(tmp_path, "O2", save_strategy="steps", save_steps=2)
    ours.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert ours.state.global_step == 5


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_the_trainer_s_saved_files_say_fp32_and_load_as_fp32(level, tmp_path):
    trainer = hf_trainer(tmp_path, level, save_strategy="steps", save_steps=2, max_steps=2)
    before = {**vars(trainer.model.config), "architectures": ["GPT2LMHeadModel"]}  # which transformers writes in
    trainer.train()
    assert vars(trainer.model.config) == before
    trainer.save_model(str(tmp_path / "whole"))
    assert vars(trainer.model.config) == before
    assert trainer.model.dtype is not torch.float32, "of a model in FP32 this shows nothing"
    masters = weights(trainer.model)
    for folder in (tmp_path / "checkpoint-2", tmp_path / "whole"):
        saved = json.loads((folder / "config.json").read_text())
        assert {saved[name] for name in ("dtype", "torch_dtype") if name in saved} == {"float32"}
        back = transformers.GPT2LMHeadModel.from_pretrained(folder, **AUTO)
        assert back.dtype is torch.float32 and same(weights(back), masters)


@pytest.mark.parametrize(
    ("given", "way_out"),
    [({"opt_level": "O5"}, "O5 is enough"), ({}, "and give opt_level='O4' or 'O5'")],
)
def test_the_trainer_refuses_a_second_mixed_precision_and_says_what_to_leave_out(given, way_out, tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, report_to=[])
    message = f"args has bf16=True, .*; leave bf16=True out of TrainingArguments: {way_out}$"
    with pytest.raises(ValueError, match=message):
        OptLevelTrainer(gpt(), arguments, **given)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path, accelerate_state):
    """Accumulation under no_sync, and clipping: the ranks agree to the bit, and with one process within rounding."""
    import ddp_integrations

    worker = Path(ddp_integrations.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = ddp_integrations.run_rank(0, 1, tmp_path)
    assert len(first) == 6
    for name, values in first.items():
        assert same(values, second[name]), name
        for value, expected in zip(values, alone[name], strict=True):
            torch.testing.assert_close(
                value, expected, rtol=0, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}"
            )


def gradients_left(level: str) -> tuple[nn.Module, Any]:
    model = network()
    model, optimizer = amp.initialize(model, adam(model), opt_level=level, verbosity=0)
    with amp.scale_loss(model(INPUTS).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_lightnings_norms_of_gradients_are_of_all_parameters(level):
    model, _ = gradients_left(level)
    norms = pl.utilities.grad_norm(model, 2)
    assert len(norms) == 1 + len(list(model.parameters()))
    expected = pl.utilities.grad_norm(gradients_left("O0")[0], 2)["grad_2.0_norm_total"]
    if level != "O3":  # where gradients are FP16's own, unscaled
        assert float(norms["grad_2.0_norm_total"]) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_accelerates_clipping_of_model_parameters_reaches_the_step(level):
    model, optimizer = gradients_left(level)
    before = [param.detach().clone() for param in model.parameters()]
    PartialState(cpu=True)
    transformers.trainer.Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
