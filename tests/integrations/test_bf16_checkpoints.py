"""Models that `from_pretrained` gives in BF16 train as `model.float()` would, to the bit: in a plain loop, Lightning,
Accelerate, Fabric and the Trainer of transformers."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed

EXTRAS = "pip install amp_patch[lightning,transformers]; `make test-all` does"
lightning = pytest.importorskip("lightning", reason=EXTRAS)
pytest.importorskip("lightning.pytorch", reason=EXTRAS)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network
pytest.importorskip("transformers", reason=EXTRAS)

# After the skips: these import the packages.
from checkpoints import (  # noqa: E402
    MODELS,
    TOLERANCE,
    TRAININGS,
    adamw,
    by_name,
    iterate,
    loaded,
    rows,
    same_by_name,
    types,
    written,
)
from frameworks import PACKAGES_WARN, hf_trainer, logged  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from training import masters_of, same  # noqa: E402

from amp_patch import amp  # noqa: E402

pytestmark = [
    *PACKAGES_WARN,
    # Its newer name is that of transformers 5.23, and scripts have this one.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]

LOW = {"O2": "float16", "O5": "bfloat16", "O5, split": "bfloat16"}
every_model = pytest.mark.parametrize("name", MODELS)
every_training = pytest.mark.parametrize("training", TRAININGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints in BF16 are written."""
    return tmp_path_factory.mktemp("checkpoints")


def begun(folder: Path, name: str, training: str, *, widen: bool = False) -> tuple[Any, Any]:
    model = loaded(written(name, folder), name)
    if widen:
        model.float()
    return amp.initialize(model, adamw(model), **TRAININGS[training], verbosity=0)


@functools.lru_cache
def expected(folder: Path, name: str, training: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and masters of a loop with `model.float()`."""
    model, optimizer = begun(folder, name, training, widen=True)
    losses = iterate(model, optimizer, name)
    found = masters_of(optimizer)
    amp.restore()
    return losses, found


@functools.lru_cache
def plain(folder: Path, name: str) -> list[float]:
    """The losses of FP32."""
    model = loaded(written(name, folder), name).float()
    return iterate(*amp.initialize(model, adamw(model), enabled=False), name)


# ---------------------------------------------------------------------------------------------------------------------
# A plain loop


@every_model
@every_training
def test_a_loop_has_the_bits_of_the_model_in_fp32(training, name, folder):
    fp32, (losses, wide) = plain(folder, name), expected(folder, name, training)
    assert losses == pytest.approx(fp32, rel=TOLERANCE[training]) and losses[-1] < losses[0]
    model, optimizer = begun(folder, name, training)
    assert iterate(model, optimizer, name) == losses
    assert same(masters_of(optimizer), wide)
    amp.restore()
    assert set(types(model).values()) <= {torch.bfloat16, torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@crossed(every_training, every_model, meet=1)
def test_save_pretrained_writes_fp32_and_from_pretrained_reads_it_back(training, name, folder, tmp_path):
    model, optimizer = begun(folder, name, training)
    iterate(model, optimizer, name, 3)
    exact = by_name(model)
    assert {value.dtype for value in exact.values()} == {torch.float32}
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")  # a ViT's weights have other names there
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert same_by_name(by_name(loaded(tmp_path / "model", name, torch.float32)), exact)
    # Its config names the type of the cast weights; of a plain copy FP32.
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == LOW.get(training, "float32")
    amp.fp32_copy(model).save_pretrained(tmp_path / "copy")
    assert same_by_name(by_name(loaded(tmp_path / "copy", name, "auto")), exact)
    # And in BF16 again, as it came.
    amp.restore()
    assert {value.dtype for value in by_name(model).values()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "came")
    rounded = {key: value.bfloat16() for key, value in exact.items()}
    assert same_by_name(by_name(loaded(tmp_path / "came", name, "auto")), rounded)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_value_that_fp16_cannot_hold_is_refused_with_the_line_that_works(level, folder):
    model = loaded(written("Llama", folder), "Llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.up_proj.weight' of LlamaForCausalLM .*opt_level='O5'"):
        amp.initialize(model, optimizer, opt_level=level)
    amp.initialize(model, optimizer, opt_level="O5")


# ---------------------------------------------------------------------------------------------------------------------
# The Trainer of transformers


def with_trainer(
    folder: Path, out: Path, name: str, training: str, *, widen: bool = False, resume: Any = None, **options: Any
) -> Any:
    model = loaded(written(name, folder), name)
    if widen:
        model.float()
    level, amp_options = TRAININGS[training]["opt_level"], {**TRAININGS[training], "verbosity": 0}
    del amp_options["opt_level"]
    made = hf_trainer(out, level, model=model, rows=rows(name), amp_options=amp_options, **options)
    made.train(resume_from_checkpoint=resume)
    return made


@crossed(every_training, every_model, meet=1)
def test_the_trainer_has_the_bits_of_the_model_in_fp32(training, name, folder, tmp_path):
    runs = []
    checkpointing = [{"gradient_checkpointing": True}] if name == "Llama" else []
    for options in ({"widen": True}, {}, *checkpointing):
        made = with_trainer(folder, tmp_path, name, training, **options)
        runs.append((logged(made), by_name(made.model)))
        if not options:
            made.save_model(str(tmp_path / "saved"))
            assert same_by_name(by_name(loaded(tmp_path / "saved", name, "auto")), runs[-1][1])
        amp.restore()
    for losses, state in runs[1:]:
        assert losses == runs[0][0] and len(losses) == 5
        assert same_by_name(state, runs[0][1])
