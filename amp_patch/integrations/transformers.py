"""A `transformers.Trainer` that trains at an opt level::

    from transformers import TrainingArguments
    from amp_patch.integrations.transformers import OptLevelTrainer

    trainer = OptLevelTrainer(model, TrainingArguments("out"), train_dataset=dataset, opt_level="O2")
    trainer.train()

For other Trainers make a class: `class MyTrainer(OptLevelTrainer, Seq2SeqTrainer)`. Written for transformers 4.46 or
newer.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from amp_patch.frontend import initialize
from amp_patch.model.forward import policy_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.files import write_whole
from amp_patch.training.arguments import Level
from amp_patch.training.innermost import innermost
from amp_patch.training.scale_loss import scale_loss
from amp_patch.training.stash import stash_of
from amp_patch.watch.rounded_saves import corrects_config

_AMP_OPTIONS = inspect.signature(initialize).parameters.keys() - {"models", "optimizers", "opt_level"}


class OptLevelTrainer(Trainer):
    """`transformers.Trainer` at an opt level, on one device or under DDP; only public methods are overridden.

    Losses and gradient norms are logged unscaled, and clipping acts on the masters. A checkpoint contains FP32 weights,
    a config with the type float32, and the loss scale. A training resumed by `resume_from_checkpoint` has the same bits
    as an uninterrupted one. After the training the model is still a model of `amp.initialize`. Save it with
    `save_model`, or save `amp.fp32_copy(trainer.model)`, a plain model. (`save_pretrained` of the cast model would
    write the low-precision type into the config, and `from_pretrained` would round the weights to it.) A step that is
    skipped on overflow still advances the learning rate's schedule.

    Args:
        opt_level: as in `amp.initialize`.
        args, kwargs: as in `transformers.Trainer`, and options of `amp.initialize` by name (`master_weights="split"`).

    Raises:
        ValueError: the TrainingArguments request a mixed precision (`fp16`, `bf16`) in addition to the opt level.
    """

    def __init__(self, *args: Any, opt_level: Level | None = None, **kwargs: Any) -> None:
        named = {name: kwargs.pop(name) for name in _AMP_OPTIONS if name in kwargs}
        super().__init__(*args, **kwargs)
        for name, casts, level in (("fp16", "O1", "O2"), ("bf16", "O4", "O5")):
            if getattr(self.args, name):
                instead = (
                    f"and give opt_level={casts!r} or {level!r}" if opt_level is None else f"{opt_level} is enough"
                )
                raise ValueError(
                    f"OptLevelTrainer: args has {name}=True, a second mixed precision beside the opt level; leave "
                    f"{name}=True out of TrainingArguments: {instead}"
                )
        self._amp_options = {"opt_level": opt_level or "O1", **named}
        self.add_callback(LossScale())

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's optimizer, and pass it to `amp.initialize` with the model."""
        super().create_optimizer(*args, **kwargs)
        model: Any = self.model  # declared optional, as the optimizer is; both are there now
        optimizer: Any = self.optimizer
        if stash_of(innermost(optimizer)) is None:
            initialize(model, optimizer, **self._amp_options)
        return optimizer

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does.

        The Trainer loads a checkpoint before it makes the optimizer. If the model came in low precision, its weights
        would round the values. So in this case the optimizer, and with it the masters, are made first.
        """
        stays = isinstance(self.model, nn.Module) and self.model_init is None  # `model_init` makes another model
        trained = (p for p in self.model.parameters() if p.requires_grad) if stays else ()
        if resume_from_checkpoint and any(p.dtype in LOW_PRECISION for p in trained):
            self.create_optimizer()
        with _adapters_keep_their_type(self.model):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save FP32 weights and a config with the type float32, also if the model's parameters are low precision."""
        policy, config = policy_of(self.model), getattr(self.model, "config", None)
        if policy is None or policy.cast_model_type is None or config is None:
            super().save_model(output_dir, _internal_call)
            return
        # `save_pretrained` saves the state dict, which is FP32, but writes the parameters' type into the config.
        before = {name: vars(config)[name] for name in _DTYPES if name in vars(config)}
        token = corrects_config.set(True)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            corrects_config.reset(token)
            vars(config).update(before)
        if self.args.should_save:
            _says_fp32(Path(output_dir or self.args.output_dir or "", "config.json"), policy.cast_model_type)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's step with an `accelerator.backward` that scales the loss."""
        plain = self.accelerator.backward  # receives the loss, also that of a subclass's `compute_loss`

        def backward(loss: Tensor, **options: Any) -> None:
            optimizer: Any = self.optimizer  # declared optional
            with scale_loss(loss, optimizer) as scaled:
                plain(scaled, **options)

        self.accelerator.backward = backward
        try:
            return super().training_step(model, *args, **kwargs)
        finally:
            del self.accelerator.backward


@contextmanager
def _adapters_keep_their_type(model: Any) -> Iterator[None]:
    """Make `load_adapter` of a cast PeftModel keep the type of adapters that the model has already.

    The Trainer calls `load_adapter` to resume, and for `load_best_model_at_end`. By default PEFT casts the loaded
    adapters to FP32. Then the masters, which have the exact values, would treat the parameters' rounded values as edits
    by the user.
    """
    load = getattr(model, "load_adapter", None)
    if load is None or "autocast_adapter_dtype" not in inspect.signature(load).parameters:
        yield
        return
    # A partial, and not a closure: deepcopy of the model copies the partial's argument, so the copy loads its own.
    model.load_adapter = functools.partial(_load_adapter, model)
    try:
        yield
    finally:
        del model.load_adapter


def _load_adapter(model: Any, path: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    policy = policy_of(model)
    if policy is not None and policy.cast_model_type is not None and adapter_name in model.peft_config:
        kwargs.setdefault("autocast_adapter_dtype", False)
    return type(model).load_adapter(model, path, adapter_name, *args, **kwargs)


_DTYPES = ("dtype", "torch_dtype")  # a config's keys for the dtype, today's first


def _says_fp32(path: Path, low: torch.dtype) -> None:
    """Rewrite the type `low` in the saved config at `path` to float32. Without a file (PEFT's adapters) do nothing."""
    config = json.loads(path.read_text()) if path.exists() else {}
    named = {name: "float32" for name in _DTYPES if config.get(name) == str(low).removeprefix("torch.")}
    if named:
        write_whole(path, json.dumps({**config, **named}, indent=2, sort_keys=True) + "\n")


class LossScale(TrainerCallback, ExportableState):
    """A callback that stores the loss scale in the Trainer's checkpoints, and loads it when a training resumes."""

    scalers: Any = ()

    def state(self) -> dict[str, Any]:
        """Return the scalers' state dicts for the Trainer's checkpoint. Syncs with the device."""
        return {"args": {}, "attributes": {"saved": [scaler.state_dict() for scaler in self.scalers]}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the optimizer's loss scalers. If a checkpoint is resumed, load their state from it."""
        stash = stash_of(innermost(kwargs["optimizer"]))
        self.scalers = () if stash is None else stash.scalers
        # A checkpoint of another Trainer has no such state; the present state is then loaded, which changes nothing.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"]["saved"]
        for scaler, entry in zip(self.scalers, saved, strict=False):
            scaler.load_state_dict(entry)
