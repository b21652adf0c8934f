"""The environment variables of an opt level, and how they override a script's own level and options."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest
import torch
import training
from apexed import apex_amp  # noqa: F401  the fixture `amp`: Apex's
from crossed import crossed
from torch import nn

import amp_patch as native
from amp_patch.environment import RUNGS, asked_level, name_of, named_level
from amp_patch.model.forward import policy_of
from amp_patch.policy import OPT_LEVELS, resolve

HALF, BF16 = torch.float16, torch.bfloat16


def policy(make=None, **options):
    """What a script's `initialize(**options)` ends up with."""
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = (make or native.initialize)(model, optimizer, verbosity=0, **options)
    found = policy_of(model)
    return None if found is None else dataclasses.replace(found, cpu_half="auto", op_lists="torch")


@pytest.fixture(params=["native", "apex"])
def initialize(request, amp):
    """Both front doors."""
    return native.initialize if request.param == "native" else amp.initialize


@pytest.fixture
def environment(monkeypatch):
    names = ("AMP_PATCH_OPT_LEVEL", "AMP_PATCH_DTYPE", "AMP_PATCH_ALLOW_BANNED")

    def set_to(level=None, dtype=None, banned=None):
        monkeypatch.delenv("AMP_PATCH_METHODS", raising=False)
        for name, value in zip(names, (level, dtype, banned), strict=True):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    set_to()
    return set_to


@crossed({"asked": ["O2", "O0", "O1"], "level": training.LEVELS}, meet=1)
def test_the_level_of_the_environment_is_used(initialize, environment, asked, level):
    environment(level)
    assert policy(initialize, opt_level=asked) == resolve(level)
    environment("")  # as none
    assert policy(initialize, opt_level=asked) == resolve(asked)


@pytest.mark.parametrize("asked", [None, BF16])
def test_the_dtype_of_the_environment_acts_where_a_level_has_either(initialize, environment, asked):
    for level in training.LEVELS:
        environment(level, "bfloat16")
        assert policy(initialize, dtype=asked) == resolve(level, dtype=BF16 if level in ("O1", "O2", "O3") else None)
    environment(None, "float16")
    assert policy(initialize, opt_level="O2", dtype=asked) == resolve("O2", dtype=HALF)
    environment(None, "bfloat16")
    assert policy(initialize, opt_level="O0") == resolve("O0")
    assert policy(initialize, opt_level="O5") == resolve("O5")


@pytest.mark.parametrize("form", ["split", "stochastic"])
def test_a_rung_behind_the_level_is_its_option(initialize, environment, form, caplog):
    environment(f"O5+{form}")
    with caplog.at_level(logging.INFO, logger="amp_patch"):
        assert policy(initialize, opt_level="O1", dtype=HALF) == resolve("O5", master_weights=form)
    assert any(f"by AMP_PATCH_OPT_LEVEL it is O5+{form};" in record.getMessage() for record in caplog.records)
    assert policy(initialize, opt_level="O5", master_weights=True) == resolve("O5", master_weights=form)
    assert asked_level() == f"O5+{form}"
    environment(f"O2+{form}")  # the type of O2 may be the script's, or the environment's
    assert policy(initialize, opt_level="O2", dtype=BF16) == resolve("O2", dtype=BF16, master_weights=form)
    environment(f"O2+{form}", "bfloat16")
    assert policy(initialize, opt_level="O1") == resolve("O2", dtype=BF16, master_weights=form)
    environment(f"O2+{form}")
    said = (
        f"AMP_PATCH_OPT_LEVEL=O2.{form}: master_weights='{form}' contradicts float16 weights.*AMP_PATCH_DTYPE=bfloat16"
    )
    with pytest.raises(ValueError, match=said):
        policy(initialize, opt_level="O2")


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("O5+splt", f"level 'O5+splt' has 'splt' behind its +; wanted {', '.join(RUNGS)}, as in 'O5+split'"),
        ("O99+split", f"level 'O99' is none of {', '.join(OPT_LEVELS)} (the letter O, not zero)"),
        ("O5+split+split", "level 'O5+split+split' has both split and split, which set master_weights; give one"),
        (
            "O1+split",
            "level 'O1+split' cannot be: O1 has FP32 weights, and +split says how masters of BF16 weights are kept; "
            "take O5+split, or O1 as it is",
        ),
    ],
)
def test_a_rung_that_cannot_be_is_refused_with_the_way_out(environment, level, said):
    environment(level)
    with pytest.raises(ValueError, match=f"^initialize: .*{re.escape(said)}$"):
        policy(opt_level="O5")


def test_a_scripts_own_level_may_have_rungs_as_the_environments_has(initialize, environment):
    for name in ("O5+split", "O5+stochastic+8bit", "O0+8bit", "O6+mxfp8", "O7+nvfp4+split"):
        environment(name)
        wanted = policy(initialize, opt_level="O1")
        environment()
        assert policy(initialize, opt_level=name) == wanted == named_level(name).policy()
    assert policy(initialize, opt_level="O2+split", dtype=BF16) == resolve("O2", dtype=BF16, master_weights="split")
    assert policy(opt_level="O6+8bit", dtype="mxfp8") == resolve("O6", dtype="mxfp8", optimizer_state="8bit")
    environment("O0")
    assert policy(initialize, opt_level="O5+split") == resolve("O0")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("O5+split", {"master_weights": False}, "means master_weights='split' and got master_weights=False; give one"),
        ("O5+split", {"master_weights": "stochastic"}, "means master_weights='split' and got master_weights='stoch"),
        ("O6+mxfp8", {"dtype": "fp8"}, "means dtype='mxfp8' and got dtype='fp8'; give one"),
        ("O1+split", {}, "cannot be: O1 has FP32 weights"),
        ("O2+fp8", {}, "cannot be: fp8 is a format of the products of O6 or O7"),
        ("O5+splt", {}, "has 'splt' behind its +"),
    ],
)
def test_a_scripts_own_rung_that_cannot_be_is_refused_by_name(initialize, environment, name, options, said):
    with pytest.raises(ValueError, match=f"^initialize: opt_level {re.escape(f'{name!r} {said}')}"):
        policy(initialize, opt_level=name, **options)


def test_the_name_of_a_policy_is_that_of_its_level_and_rungs():
    for name in (*training.LEVELS, "O5+split", "O5+stochastic", "O5+stochastic+8bit", "O4+8bit"):
        assert name_of(named_level(name).policy()) == name
    assert name_of(resolve("O2", dtype=BF16, master_weights="split")) == "O2+split"
    assert name_of(resolve("O0", master_weights="split")) == "O0", "an FP32 model has no masters"


def test_a_level_of_the_environment_with_a_rung_of_state_acts_where_it_is_fp32(initialize, environment):
    for level in ("O0", "O1", "O2", "O4", "O5"):
        environment(f"{level}+8bit")
        assert policy(initialize, opt_level="O5") == resolve(level, optimizer_state="8bit")
    environment("O3+8bit")
    with pytest.raises(ValueError, match=r"level 'O3\+8bit' cannot be"):
        policy(initialize, opt_level="O5")


OF_A_ROW = {
    "optimizer_state": "8bit",
    "skip_nonfinite": True,
    "allow_banned": True,
    "cpu_half": "emulate",
    "min_loss_scale": 2.0,
    "max_loss_scale": 2.0**10,
    "low_precision_norms": True,
    "cast_model_outputs": HALF,
}


@pytest.mark.parametrize("field", OF_A_ROW)
def test_arguments_that_are_not_given_keep_a_level_s_own_value(environment, monkeypatch, field):
    row = dataclasses.replace(OPT_LEVELS["O1"], opt_level="O9", **{field: OF_A_ROW[field]})
    monkeypatch.setitem(OPT_LEVELS, "O9", row)
    assert resolve("O9") == row
    model, _ = native.initialize(training.convnet(), torch.optim.SGD(training.convnet().parameters()), opt_level="O9")
    assert getattr(policy_of(model), field) == OF_A_ROW[field]
    assert getattr(resolve("O9", skip_nonfinite=False, low_precision_norms=False), field) == (
        False if field in ("skip_nonfinite", "low_precision_norms") else OF_A_ROW[field]
    )


def test_a_scripts_own_optimizer_state_is_not_the_baselines(environment):
    environment("O0")
    assert policy(opt_level="O5", optimizer_state="8bit") == resolve("O0")
    environment("O4")
    assert policy(opt_level="O5", optimizer_state="8bit") == resolve("O4", optimizer_state="8bit")


def test_at_o0_nothing_is_left_of_the_scripts_options(initialize, environment):
    environment("O0")
    options = {"loss_scale": "128.0", "keep_batchnorm_fp32": "True", "master_weights": True, "dtype": BF16}
    found = policy(initialize, opt_level="O2", cast_model_type=BF16, cast_model_outputs=HALF, **options)
    assert found == resolve("O0")
    assert policy(initialize, opt_level="O0", loss_scale=128.0) == resolve("O0")


def test_options_that_the_level_accepts_are_kept_and_others_dropped_with_a_log_line(initialize, environment, caplog):
    environment("O1")
    with caplog.at_level(logging.INFO, logger="amp_patch"):
        found = policy(initialize, opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32=True, dtype=HALF)
    assert found == resolve("O1", loss_scale=128.0, dtype=HALF)
    (said,) = [record.getMessage() for record in caplog.records if "asked for" in record.getMessage()]
    assert "asked for O2, by AMP_PATCH_OPT_LEVEL it is O1; dropped: keep_batchnorm_fp32=True" in said
    caplog.clear()
    environment("O2")
    with caplog.at_level(logging.INFO, logger="amp_patch"):
        policy(initialize, opt_level="O2")
    assert not [record for record in caplog.records if "asked for" in record.getMessage()], "nothing else was asked for"
    environment("O5")
    assert policy(initialize, opt_level="O1", dtype=HALF, loss_scale="dynamic") == resolve("O5", loss_scale="dynamic")
    environment("O3")
    assert policy(initialize, opt_level="O2", dtype=BF16, keep_batchnorm_fp32=True) == resolve(
        "O3", dtype=BF16, keep_batchnorm_fp32=True
    )
    environment("O2", "float16")
    assert policy(initialize, opt_level="O2", cast_model_type=BF16) == resolve("O2", dtype=HALF)


def test_an_option_that_would_undo_the_level_is_dropped(amp, environment):
    environment("O1")
    assert policy(opt_level="O2", patch_torch_functions="False") == resolve("O1")
    environment("O2")
    assert policy(opt_level="O1", cast_model_type=torch.float32) == resolve("O2")
    assert policy(amp.initialize, opt_level="O1", cast_model_type=False) == resolve("O2")
    # At its own level the script's word holds.
    assert policy(opt_level="O2", cast_model_type=torch.float32) == resolve("O2", cast_model_type=torch.float32)


def test_off_stays_off(initialize, environment):
    environment("O2")
    assert policy(initialize, enabled=False) is None


def test_bad_values_name_the_variable_and_the_choices(initialize, environment):
    environment("O99")
    with pytest.raises(ValueError, match="AMP_PATCH_OPT_LEVEL: level 'O99' is none of O0, O1, O2, O3, O4, O5"):
        policy(initialize)
    environment("O1", "half")
    with pytest.raises(ValueError, match="AMP_PATCH_DTYPE is 'half'; wanted float16, bfloat16"):
        policy(initialize)
    environment("O2")
    with pytest.raises(ValueError, match="loss_scale is -1"):  # the script's own mistake
        policy(initialize, opt_level="O1", loss_scale=-1)


def losses(make=None, **options):
    model = training.convnet()
    optimizer = training.SGD(model.parameters())
    if make is not None:
        model, optimizer = make(model, optimizer, verbosity=0, **options)
        return training.train(model, optimizer, 2)
    out = []
    for step in range(2):
        inputs, targets = training.images(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def test_an_overridden_script_has_the_losses_of_its_new_level_to_the_bit(initialize, environment):
    plain, o5 = losses(), losses(initialize, opt_level="O5")
    environment("O0")
    assert losses(initialize, opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32=True) == plain
    environment("O5")
    assert losses(initialize, opt_level="O1") == o5 != plain


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_banned_functions_by_the_environment(initialize, environment, level):
    environment(banned="1")
    assert policy(initialize, opt_level=level).allow_banned
    environment(banned="0")
    assert not policy(initialize, opt_level=level, allow_banned=True).allow_banned
    environment("O4", banned="1")
    assert policy(initialize, opt_level=level).allow_banned
    environment(banned="yes")
    with pytest.raises(ValueError, match="AMP_PATCH_ALLOW_BANNED is 'yes'; wanted 1, 0"):
        policy(initialize, opt_level=level)


class Coder(nn.Linear):
    def encode(self, x):
        return self(x)

    def decode(self, x):
        return nn.functional.linear(x, self.weight)


def test_methods_by_the_environment_join_the_scripts(initialize, environment, monkeypatch, caplog):
    environment()
    caplog.set_level(logging.INFO, "amp_patch")
    monkeypatch.setenv("AMP_PATCH_METHODS", "decode, nothing")
    net = initialize(Coder(2, 2), opt_level="O2", methods=("encode",), verbosity=0)
    assert (net.decode(torch.ones(1, 2)).dtype, net.encode(torch.ones(1, 2)).dtype) == (torch.float32, torch.float32)
    assert "AMP_PATCH_METHODS names nothing, which Coder does not have" in caplog.text
