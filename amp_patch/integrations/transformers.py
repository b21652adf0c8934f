"""An opt level for the Trainer of `transformers`::

    from transformers import TrainingArguments
    from amp_patch.integrations.transformers import OptLevelTrainer

    trainer = OptLevelTrainer(model, TrainingArguments("out"), train_dataset=dataset, opt_level="O2")
    trainer.train()

Other Trainers: `class MyTrainer(OptLevelTrainer, Seq2SeqTrainer)`. Written for transformers 4.46 or newer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from amp_patch.initialize import initialize, scale_loss
from amp_patch.optimizer import innermost


class OptLevelTrainer(Trainer):
    """`transformers.Trainer` at an opt level, on one device or under DDP; only public methods are overridden.

    Losses and gradient norms are logged unscaled, clipping acts on the masters, and checkpoints hold FP32 weights and
    the loss scale: `resume_from_checkpoint` goes on to the same bits. The model stays one of `amp.initialize` when the
    training ends; `amp.fp32_copy(trainer.model)` is a plain one. A step skipped on overflow moves the schedule of the
    learning rate nonetheless.

    Args:
        opt_level: as of `amp.initialize`.
        amp_options: the other arguments of `amp.initialize`, by name.
        args, kwargs: as of `transformers.Trainer`.

    Raises:
        ValueError: the TrainingArguments ask for a mixed precision of their own (`fp16`, `bf16`).
    """

    def __init__(
        self, *args: Any, opt_level: str = "O1", amp_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for name in ("fp16", "bf16"):
            if getattr(self.args, name):
                raise ValueError(
                    f"OptLevelTrainer: args has {name}=True, a second mixed precision; leave it out, and say "
                    f"opt_level={'O1' if name == 'fp16' else 'O4'!r} for the like"
                )
        self._amp_options = {"opt_level": opt_level, **(amp_options or {})}
        self.add_callback(LossScale())

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        super().create_optimizer(*args, **kwargs)
        if not hasattr(innermost(self.optimizer), "_amp_stash"):
            initialize(self.model, self.optimizer, **self._amp_options)
        return self.optimizer

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        plain = self.accelerator.backward  # whatever loss a subclass's compute_loss has made arrives there

        def backward(loss: Tensor, **options: Any) -> None:
            # Under DDP's no_sync the sum stays scaled in the model.
            wait = not getattr(model, "require_backward_grad_sync", True)
            with scale_loss(loss, self.optimizer, delay_unscale=wait) as scaled:
                plain(scaled, **options)

        self.accelerator.backward = backward
        try:
            return super().training_step(model, *args, **kwargs)
        finally:
            del self.accelerator.backward


class LossScale(TrainerCallback, ExportableState):
    """Writes the loss scale into the Trainer's state, and takes it from there when a training begins."""

    scalers: Any = ()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": [scaler.state_dict() for scaler in self.scalers]}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scalers = innermost(kwargs["optimizer"])._amp_stash.scalers
        # A checkpoint of another Trainer has none.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"]["saved"]
        for scaler, entry in zip(self.scalers, saved, strict=False):
            scaler.load_state_dict(entry)
