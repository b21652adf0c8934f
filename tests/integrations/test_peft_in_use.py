"""peft's adapters with the Trainer, Lightning and two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import (
    CAST,
    LR,
    OLDER_NAME,
    base_model,
    every_training,
    frozen,
    lora,
    of_adapters,
    peft,
)
from checkpoints import (
    TOLERANCE,
    TRAININGS,
    Lit,
    loader,
    rows,
    same_by_name,
    types,
)
from frameworks import PACKAGES_WARN, hf_trainer, logged, trainer

from amp_patch import amp
from amp_patch.integrations.lightning import OptLevelPrecision
from amp_patch.masters.masters import master_of

pytestmark = [*PACKAGES_WARN, pytest.mark.filterwarnings(f"ignore:{OLDER_NAME}:FutureWarning")]


# ---------------------------------------------------------------------------------------------------------------------
# The Trainer and Lightning


def with_trainer(out: Path, training: str, model: Any, resume: Any = None, **options: Any) -> Any:
    amp_options = {**TRAININGS[training], "verbosity": 0}
    level = amp_options.pop("opt_level")
    made = hf_trainer(out, level, model=model, rows=rows("Llama"), amp_options=amp_options, **options)
    made.train(resume_from_checkpoint=resume)
    return made


@every_training
def test_the_trainer_trains_adapters(training, tmp_path):
    runs = []
    for model, options in ((lora().float(), {}), (lora(), {}), (lora(), {"gradient_checkpointing": True})):
        made = with_trainer(tmp_path, training, model, **options)
        assert all(master_of(p) is None for p in frozen(model))
        runs.append((logged(made), of_adapters(model.state_dict())))
        made.save_model(str(tmp_path / "saved"))
        amp.restore()
    back = peft.PeftModel.from_pretrained(base_model("BF16"), tmp_path / "saved")
    assert same_by_name(of_adapters(back.state_dict()), runs[1][1])
    assert runs[2][0] == runs[1][0] and same_by_name(runs[2][1], runs[1][1])
    if training in CAST:
        assert runs[1][0] == runs[0][0] and same_by_name(runs[1][1], runs[0][1])
    else:
        losses, wide = ([loss for loss, _ in run[0]] for run in (runs[1], runs[0]))
        assert losses == pytest.approx(wide, rel=TOLERANCE[training])


@every_training
def test_lightning_trains_adapters_and_restores_the_incoming_type(training):
    modules = [Lit(lora().float(), LR), Lit(lora(), LR)]
    before = [types(module) for module in modules]
    for module in modules:
        trainer(OptLevelPrecision(**TRAININGS[training], verbosity=0), max_epochs=1).fit(module, loader())
    assert [types(module) for module in modules] == before
    wide, module = modules
    assert same_by_name(of_adapters(module.state_dict()), of_adapters(module.ended))
    if training in CAST:
        assert module.losses == wide.losses
        assert same_by_name(of_adapters(module.ended), of_adapters(wide.ended))
    else:
        assert module.losses == pytest.approx(wide.losses, rel=TOLERANCE[training])
