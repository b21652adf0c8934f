"""Properties of levels under any options and any environment."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hunts import hunt
from hypothesis import strategies as st

from amp_patch.environment import overridden
from amp_patch.policy import OPT_LEVELS, Options, Policy, resolve

LOW = (torch.float16, torch.bfloat16)
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": LOW,
    "cast_model_type": (*LOW, torch.float32, False),
    "patch_torch_functions": (True, False, "True"),
    "keep_batchnorm_fp32": (True, False, "False"),
    "master_weights": (True, False, "split", "stochastic"),
    "loss_scale": ("dynamic", 1.0, 128.0, "128.0"),
    "cast_model_outputs": (torch.float32, torch.float16),
    "skip_nonfinite": (True,),
    "low_precision_norms": (True,),
    "optimizer_state": ("8bit",),
    "saved_activations": ("8bit",),
    "master_device": ("cpu",),
    "fp32_state": (True,),
}
levels = st.sampled_from(list(OPT_LEVELS))
options = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()})
variables = st.fixed_dictionaries(
    {},
    optional={
        "AMP_PATCH_OPT_LEVEL": levels,
        "AMP_PATCH_DTYPE": st.sampled_from(["float16", "bfloat16"]),
    },
)


def resolved(level: str, given: Options) -> Policy | None:
    """None where the level refuses the options."""
    try:
        return resolve(level, given)
    except (TypeError, ValueError):
        return None


@hunt(100, level=levels, given=options, variables=variables)
def test_the_environment_gives_a_script_legal_options_of_its_level(level, given, variables) -> None:
    asked = Options(**given)
    with patch.dict(os.environ, variables):
        if resolved(level, asked) is None and set(variables) - {"AMP_PATCH_DTYPE"}:
            with pytest.raises((TypeError, ValueError)):
                resolve(*overridden(level, asked))
            return
        if resolved(level, asked) is None:
            return
        name, kept = overridden(level, asked)
        policy = resolve(name, kept)
    wanted = variables.get("AMP_PATCH_OPT_LEVEL", level)
    assert policy.opt_level == name == wanted
    if not variables:
        assert kept is asked
    if "AMP_PATCH_OPT_LEVEL" in variables and wanted == "O0":
        assert policy == OPT_LEVELS["O0"]
    elif wanted != level:  # the script did not ask for it: no option of the script's undoes it
        own = OPT_LEVELS[wanted]
        assert policy.patch_torch_functions == own.patch_torch_functions
        assert (policy.cast_model_type is None) == (own.cast_model_type is None)


@hunt(100, level=levels, given=options)
def test_a_policy_agrees_with_itself(level, given) -> None:
    policy = resolved(level, Options(**given))
    if policy is None:
        return
    assert policy == resolve(level, Options(**given)) and hash(policy) == hash(resolve(level, Options(**given)))
    assert policy.cast_model_type in (None, policy.dtype)
    assert not (policy.patch_torch_functions and policy.cast_model_type)
    assert policy.min_loss_scale <= policy.max_loss_scale
