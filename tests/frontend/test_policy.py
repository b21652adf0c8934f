from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from amp_patch.policy import OPT_LEVELS, Policy, resolve

HALF, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("level", "dtype", "cast", "patch", "norms", "masters", "scale"),
    [
        ("O0", HALF, None, False, None, None, 1.0),
        ("O1", HALF, None, True, None, None, "dynamic"),
        ("O2", HALF, HALF, False, True, True, "dynamic"),
        ("O3", HALF, HALF, False, False, False, 1.0),
        ("O4", BF16, None, True, None, None, 1.0),
        ("O5", BF16, BF16, False, True, True, 1.0),
    ],
)
def test_each_level_means_what_the_table_says(level, dtype, cast, patch, norms, masters, scale):
    policy = resolve(level)
    assert (policy.opt_level, policy.dtype, policy.cast_model_type) == (level, dtype, cast)
    assert (policy.patch_torch_functions, policy.keep_batchnorm_fp32) == (patch, norms)
    assert (policy.master_weights, policy.loss_scale) == (masters, scale)


def test_a_policy_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve("O2").loss_scale = 1.0  # type: ignore[misc]
    assert resolve("O2", loss_scale=128) == dataclasses.replace(OPT_LEVELS["O2"], loss_scale=128.0)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bfloat16_needs_no_loss_scale_unless_given(level):
    policy = resolve(level, dtype=BF16)
    assert (policy.dtype, policy.loss_scale) == (BF16, 1.0)
    assert resolve(level, dtype="bfloat16") == policy
    assert policy.cast_model_type == (None if level == "O1" else BF16)
    assert resolve(level, dtype=BF16, loss_scale="dynamic").loss_scale == "dynamic"


def test_o4_and_o5_are_o1_and_o2_in_bfloat16():
    for name, partner in (("O4", "O1"), ("O5", "O2")):
        assert resolve(name) == dataclasses.replace(resolve(partner, dtype=BF16), opt_level=name)


def test_only_o3_keeps_no_fp32_weights_and_only_o0_changes_nothing():
    assert [level for level, policy in OPT_LEVELS.items() if not policy.keeps_fp32_weights] == ["O3"]
    assert [level for level, policy in OPT_LEVELS.items() if policy.changes_nothing] == ["O0"]
    assert not resolve("O2", master_weights=False).keeps_fp32_weights
    assert resolve("O5", master_weights="split").keeps_fp32_weights


@pytest.mark.parametrize("level", ["01", "o1", "O99", "", "O", None, 1])
def test_an_unknown_level_s_error_names_the_letter_o(level):
    with pytest.raises(ValueError, match="letter O") as error:
        resolve(level)
    for known in OPT_LEVELS:
        assert known in str(error.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("o2", "'O2'"),
        (2, "'O2'"),
        ("fp16", "'O1' or 'O2'"),
        ("16-mixed", "'O1' or 'O2'"),
        ("bf16", "'O4' or 'O5'"),
        ("fp32", "'O0'"),
        ("mxfp8", "'O6' or 'O7'"),
    ],
)
def test_another_word_for_a_level_is_answered_by_the_level(word, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant}[?]$"):
        resolve(word)


@pytest.mark.parametrize("dtype", ["fp8", "nvfp4", torch.float8_e4m3fn])
def test_a_format_of_products_at_other_levels_is_refused_and_the_error_names_its_levels(dtype):
    with pytest.raises(ValueError, match=r"dtype is .*; formats of products .* are for O6 and O7"):
        resolve("O2", dtype=dtype)
    with pytest.raises(ValueError, match=r"wanted torch\.float16 or torch\.bfloat16$"):
        resolve("O2", dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "parsed"), [("dynamic", "dynamic"), ("128.0", 128.0), (1, 1.0), (0.5, 0.5), (2.0**-24, 2.0**-24)]
)
def test_loss_scales_may_be_words_and_numbers_in_strings(value, parsed):
    assert resolve("O2", loss_scale=value).loss_scale == parsed


@pytest.mark.parametrize("value", [0, -1, -0.0, math.nan, math.inf, "auto", "", True, [1], 1e-45, 1e39])
def test_a_scale_that_cannot_be_inverted_is_refused_by_name(value):
    with pytest.raises(ValueError, match="loss_scale is"):
        resolve("O2", loss_scale=value)


@pytest.mark.parametrize(("value", "meant"), [("True", True), ("False", False), (True, True), (None, True)])
def test_booleans_may_be_words_as_argparse_gives_them(value, meant):
    assert resolve("O2", keep_batchnorm_fp32=value).keep_batchnorm_fp32 is meant
    assert resolve("O2", master_weights=value).master_weights is meant


def test_other_words_for_booleans_are_refused():
    with pytest.raises(TypeError, match="keep_batchnorm_fp32 is 'yes'"):
        resolve("O2", keep_batchnorm_fp32="yes")


@pytest.mark.parametrize(
    ("level", "override", "why"),
    [
        ("O1", {"keep_batchnorm_fp32": True}, "FP32 weights and statistics"),
        ("O1", {"keep_batchnorm_fp32": "False"}, "their input's type"),
        ("O1", {"master_weights": True}, "masters themselves"),
        ("O1", {"cast_model_type": HALF}, "leaves the weights in FP32"),
        ("O0", {"cast_model_type": HALF}, "FP32 baseline"),
        ("O2", {"patch_torch_functions": True}, "contradicts opt_level 'O2'"),
        ("O2", {"cast_model_type": HALF, "dtype": BF16}, "contradicts dtype"),
        ("O5", {"dtype": HALF}, "use opt_level='O2'"),
        ("O2", {"dtype": torch.float32}, "torch.float16 or torch.bfloat16"),
        ("O2", {"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "above max_loss_scale"),
    ],
)
def test_contradictions_say_why(level, override, why):
    with pytest.raises(ValueError, match=why):
        resolve(level, **override)


def test_overrides_that_agree_with_the_level_are_accepted():
    assert resolve("O1", patch_torch_functions=True) == resolve("O1")
    assert resolve("O1", cast_model_type=torch.float32) == resolve("O1")
    assert resolve("O2", cast_model_type=BF16) == resolve("O2", dtype=BF16) == resolve("O2", cast_model_type="bfloat16")
    assert resolve("O1", patch_torch_functions=False).patch_torch_functions is False
    assert resolve("O0", keep_batchnorm_fp32=True, master_weights=True).cast_model_type is None


def test_an_fp32_model_at_o2_has_no_masters():
    policy = resolve("O2", cast_model_type=torch.float32)
    assert (policy.cast_model_type, policy.master_weights, policy.loss_scale) == (None, None, "dynamic")


def test_the_scale_range_has_a_floor_that_mirrors_its_cap():
    assert (resolve("O2").min_loss_scale, resolve("O2").max_loss_scale) == (2.0**-24, 2.0**24)
    assert resolve("O2", max_loss_scale=2.0**-30).min_loss_scale == 2.0**-30


def test_outputs_can_only_be_cast_to_floating_types():
    assert resolve("O2", cast_model_outputs=HALF).cast_model_outputs is HALF
    with pytest.raises(TypeError, match=r"cast_model_outputs is torch\.int64"):
        resolve("O2", cast_model_outputs=torch.int64)


def test_a_policy_prints_its_decisions():
    assert str(Policy("O0")).startswith("O0 (torch.float16): cast_model_type=None")
