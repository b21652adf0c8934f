"""Lightning trains at a level as the plain loop does."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from crossed import crossed
from torch import nn

EXTRAS = "pip install amp_patch[lightning,transformers]; `make test-all` does"
pytest.importorskip("lightning", reason=EXTRAS)
pytest.importorskip("transformers", reason=EXTRAS)
pytest.importorskip("accelerate", reason=EXTRAS)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network

import lightning.pytorch as pl  # noqa: E402
from frameworks import INPUTS, PACKAGES_WARN, Classifier, adam, loader, network, trainer  # noqa: E402
from split_masters import opened  # noqa: E402
from three_ways import spied_kernels  # noqa: E402
from training import LEVELS, same, weights  # noqa: E402

from amp_patch import amp  # noqa: E402
from amp_patch.integrations.lightning import OptLevelPrecision  # noqa: E402
from amp_patch.watch import questions  # noqa: E402

pytestmark = PACKAGES_WARN


def by_hand(level: str, *, clip: Any = None, every: int = 1, inputs: torch.Tensor = INPUTS) -> tuple[Any, list[float]]:
    """What Classifier's training is, in two epochs of a plain loop."""
    model = network()
    optimizer = adam(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses = []
    for _ in range(2):
        for step, (batch, classes) in enumerate(loader(inputs), 1):
            loss = nn.functional.cross_entropy(model(batch), classes)
            losses.append(loss.item())
            with amp.scale_loss(loss / every, optimizer) as scaled_loss:
                scaled_loss.backward()
            if step % every == 0:
                if clip:
                    clip(list(amp.master_params(optimizer)), 0.05)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    scale = questions.loss_scale_of(optimizer)
    amp.restore()
    return model, [*losses, scale]


CLIPS = {
    None: ({}, None),
    "norm": ({"gradient_clip_val": 0.05}, torch.nn.utils.clip_grad_norm_),
    "value": ({"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, torch.nn.utils.clip_grad_value_),
}


@crossed({"level": LEVELS, "clip": list(CLIPS), "every": [1, 2]})
def test_lightning_does_what_the_loop_does(level, clip, every):
    options, function = CLIPS[clip]
    module, precision = Classifier(), OptLevelPrecision(level)
    trainer(precision, accumulate_grad_batches=every, **options).fit(module, loader())
    expected, losses = by_hand(level, clip=function, every=every)
    assert [*module.losses, precision.scalers[0].loss_scale()] == losses
    assert same(weights(module.net), weights(expected))


def test_lightning_steps_split_masters_though_it_gives_each_step_a_closure():
    module = Classifier()
    trainer(OptLevelPrecision("O5", master_weights="split")).fit(module, loader())
    model = network()
    model, optimizer = amp.initialize(model, adam(model), opt_level="O5", master_weights="split")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for _ in range(2):
        for batch, classes in loader(INPUTS):
            with amp.scale_loss(nn.functional.cross_entropy(model(batch), classes), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    amp.restore()
    assert same(weights(module.net), weights(model))


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_lightning_evaluates_at_the_level_and_leaves_the_weights(function):
    module = Classifier()
    before = weights(module)
    result = getattr(trainer(OptLevelPrecision("O2")), function)(module, loader())
    assert module.dtypes == {torch.float16}
    assert same(weights(module), before)
    if function == "predict":
        assert {output.dtype for output in result} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lightning_skips_what_overflows(level):
    """Sixteen rows that overflow make two steps, which change only the scale. No scheduler warns."""
    spoilt = torch.cat([torch.full((16, 8), float("inf")), INPUTS[16:]])
    module, precision = Classifier(), OptLevelPrecision(level)
    module.net[1] = nn.Identity()  # a batch norm's statistics would keep the infinity
    before = weights(module)
    fit = trainer(precision, max_steps=2)
    fit.fit(module, loader(spoilt))
    assert precision.scalers[0].loss_scale() == 2.0**14
    assert same(weights(module), before)
    assert fit.optimizers[0].state_dict()["state"] == {}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_lightning_resumes_to_the_same_bits(level, tmp_path):
    def scale_of_512(precision: OptLevelPrecision) -> pl.Callback:
        class Begin(pl.Callback):
            def on_train_start(self, trainer, module):
                if level in ("O1", "O2"):
                    precision.scalers[0].load_state_dict({"loss_scale": 512.0, "unskipped": 7})

        return Begin()

    first, whole = OptLevelPrecision(level), Classifier()
    saves = pl.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    trainer(first, callbacks=[saves, scale_of_512(first)]).fit(whole, loader())
    path = tmp_path / "epoch=0.ckpt"
    saved = torch.load(path, weights_only=True)
    assert {value.dtype for value in saved["state_dict"].values()} <= {torch.float32, torch.int64}

    again, resumed = OptLevelPrecision(level), Classifier()
    trainer(again, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path)]).fit(resumed, loader(), ckpt_path=path)
    assert resumed.losses == whole.losses[4:]
    assert same(weights(resumed), weights(whole))
    assert again.state_dict() == first.state_dict()
    if level in ("O1", "O2"):
        assert saved["OptLevelPrecision"]["loss_scaler0"] == {"loss_scale": 512.0, "unskipped": 11}


class Adversaries(pl.LightningModule):
    """Two optimizers by hand, in the order of Lightning's own example of a GAN: gradients are cleared after a step, and
    `toggle_optimizer` is to keep the one's loss out of the other's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.nets = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)])
        self.toggled = True

    def training_step(self, batch, index):
        for position, optimizer in enumerate(self.optimizers()):
            if self.toggled:
                self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.nets[1](self.nets[0](batch[0])), batch[1])
            self.manual_backward(loss if position else -loss)
            optimizer.step()
            optimizer.zero_grad()
            if self.toggled:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]


@pytest.mark.parametrize("level", LEVELS)
def test_lightning_steps_several_optimizers(level):
    module = Adversaries()
    trainer(OptLevelPrecision(level)).fit(module, loader())

    by_hand = Adversaries()
    optimizers = by_hand.configure_optimizers()
    nets, optimizers = amp.initialize(list(by_hand.nets), optimizers, opt_level=level)
    for _ in range(2):
        for batch, classes in loader():
            for sign, optimizer in zip((-1, 1), optimizers, strict=True):
                loss = sign * nn.functional.cross_entropy(nets[1](nets[0](batch)), classes)
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()
    amp.restore()
    assert same(weights(module), weights(by_hand))


@pytest.mark.extension
@crossed({"level": ["O2", "O5", "O5+split"], "clip": [None, "norm"]})
def test_lightning_defers_gradients_and_steps_in_one_pass(level, clip, monkeypatch):
    """Gradients keep two bytes an element until the kernel takes them, and no split master is joined."""
    seen = []

    class Seen(pl.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            kernels.clear()

        def on_before_optimizer_step(self, trainer, module, optimizer):
            grads = questions.gradients_of([master for _, master in questions.pairs_of(optimizer)])
            seen.append(sum(grad.nbytes for grad in grads if grad.dtype is not torch.float32) / count(module))

        def on_train_batch_end(self, trainer, module, *_):
            (optimizer,) = trainer.optimizers
            assert sum(kernels) == len(list(module.parameters())) and opened(optimizer) == 0

    count = lambda module: sum(p.numel() for p in module.parameters() if p.dtype is not torch.float32)  # noqa: E731
    kernels = spied_kernels(monkeypatch)
    opt_level, _, form = level.partition("+")
    precision = OptLevelPrecision(opt_level, **({"master_weights": form} if form else {}))
    options, _ = CLIPS[clip]
    trainer(precision, callbacks=[Seen()], enable_checkpointing=False, **options).fit(Classifier(), loader())
    assert seen and set(seen) == {2.0}


@pytest.mark.parametrize("level", [*LEVELS, "O5+split"])
def test_averaged_weights_are_those_of_the_masters_and_stay_when_the_fit_ends(level):
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="since lightning 2.5.5")
    averages = callbacks.EMAWeightAveraging(decay=0.5)
    masters: list[list[torch.Tensor]] = []

    class Noted(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            masters.append([p.detach().float().clone() for p in amp.master_params(trainer.optimizers[0])])

    module = Classifier()
    trainer(OptLevelPrecision(level), callbacks=[Noted(), averages], enable_checkpointing=False).fit(module, loader())
    expected = masters[0]
    for found in masters[1:]:
        expected = [0.5 * mean + 0.5 * value for mean, value in zip(expected, found, strict=True)]
    kept = averages._average_model.module.parameters()
    for mean, held, left in zip(expected, kept, module.parameters(), strict=True):
        torch.testing.assert_close(held.float(), mean, rtol=1e-6, atol=1e-7)
        # The callback copies its FP32 averages into weights of the level's type.
        torch.testing.assert_close(left.float(), mean, rtol=0 if level in ("O0", "O1", "O4") else 2**-7, atol=1e-7)
