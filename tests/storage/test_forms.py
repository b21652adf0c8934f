"""The ways from one form of storage to another: checkpoints, `initialize` again, `restore`. Values are kept.

What happens to a training that keeps its form is in tests/training/test_events.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from any_optimizer import Each
from coded_states import MAKERS, coded, go_on, loss_of, start, state_of, through_file
from crossed import crossed
from torch import Tensor, nn
from training import masters_of, same

from amp_patch import amp
from amp_patch.masters.closed_master import form_of
from amp_patch.storage.split_master import HALVES
from amp_patch.storage.stochastic_master import Rounding

FORMS: dict[str, dict[str, Any]] = {
    f"{masters}{', 8 bit' if state else ''}": {"master_weights": given, "optimizer_state": state}
    for masters, given in (("whole", None), ("split", "split"), ("stochastic", "stochastic"))
    for state in (None, "8bit")
}
ONE_OF_EACH_WAY = {name: MAKERS[name] for name in ("AdamW", "SGD", "NAdam")} | {"registered": Each}
ways = crossed({"first": FORMS, "second": FORMS, "make": ONE_OF_EACH_WAY})


@pytest.fixture(autouse=True)
def registered(registrations):
    amp.register_per_parameter_optimizer(Each)


def trained(make: Any, form: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    model, optimizer = start(make, **options, **form)
    go_on(model, optimizer, range(3))
    assert_is(form, optimizer)
    return model, optimizer


def assert_is(form: dict[str, Any], optimizer: Any) -> None:
    """Assert that masters and state are stored in this form, and that nothing beside it is in memory."""
    forms = [form_of(master) for master in amp.master_params(optimizer)]
    wanted = form["master_weights"]
    assert all(isinstance(each, Rounding) is (wanted == "stochastic") for each in forms)
    assert all((each is HALVES) is (wanted == "split") for each in forms)
    assert bool(coded(optimizer)) is (form["optimizer_state"] is not None)


def values_in(form: dict[str, Any], masters: list[Tensor]) -> list[Tensor]:
    return [m.bfloat16().float() for m in masters] if form["master_weights"] == "stochastic" else masters


@ways
def test_a_checkpoint_goes_to_a_training_in_another_form(make, first, second):
    model, optimizer = trained(make, first)
    assert all(type(state) is dict for state in optimizer.state_dict()["state"].values())
    states = through_file([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    wanted = [values_in(second, masters_of(optimizer)), [state.clone() for state in state_of(optimizer)]]
    assert same(states[0].values(), masters_of(optimizer))
    amp.restore()
    again, its_optimizer = start(make, **second)
    for load, state in zip((again, its_optimizer, amp), states, strict=True):
        load.load_state_dict(state)
    assert same(masters_of(its_optimizer), wanted[0]) and same(state_of(its_optimizer), wanted[1])
    go_on(again, its_optimizer, range(3, 5))
    assert_is(second, its_optimizer)


@ways
def test_initialize_again_keeps_the_values_in_another_form(make, first, second):
    model, optimizer = trained(make, first)
    wanted = [values_in(second, masters_of(optimizer)), [state.clone() for state in state_of(optimizer)]]
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **second)
    assert same(masters_of(optimizer), wanted[0]) and same(state_of(optimizer), wanted[1])
    go_on(model, optimizer, range(3, 5))
    assert_is(second, optimizer)
    if second["master_weights"] == "stochastic":
        assert amp.state_dict()["loss_scaler0"]["stochastic_rounding"]["steps"] == [2] * 8


@crossed({"form": FORMS, "make": ONE_OF_EACH_WAY})
def test_restore_leaves_a_plain_training_in_fp32(make, form):
    model, optimizer = trained(make, form)
    wanted = masters_of(optimizer), state_of(optimizer)
    amp.restore()
    assert same(model.parameters(), wanted[0]) and same(state_of(optimizer), wanted[1])
    assert all(type(p) is nn.Parameter and p.dtype is torch.float32 for p in model.parameters())
    assert all(type(state) is dict for state in optimizer.state.values())
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["split", "stochastic", "whole, 8 bit"])
def test_o2_in_bfloat16_takes_it(form):
    _, optimizer = trained(MAKERS["AdamW"], FORMS[form], opt_level="O2", dtype=torch.bfloat16)
    assert_is(FORMS[form], optimizer)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"opt_level": "O2", "master_weights": "split"}, ValueError, "='split' contradicts float16 weights.*'O5'"),
        ({"cast_model_type": torch.float16, "master_weights": "split"}, ValueError, "float16"),
        ({"opt_level": "O4", "master_weights": "split"}, ValueError, "master_weights=split contradicts opt_level 'O4'"),
        ({"opt_level": "O2", "master_weights": "stochastic"}, ValueError, "='stochastic' contradicts float16 w.*'O5'"),
        ({"opt_level": "O4", "master_weights": "stochastic"}, ValueError, "=stochastic contradicts opt_level 'O4'"),
        ({"master_weights": "halves"}, TypeError, "'halves'; wanted 'split', 'stochastic', True, False"),
        ({"optimizer_state": "4bit"}, ValueError, "optimizer_state is '4bit'; wanted '8bit' or None"),
        ({"optimizer_state": True}, ValueError, "optimizer_state is True; wanted '8bit' or None"),
        ({"opt_level": "O3", "optimizer_state": "8bit"}, ValueError, "contradicts opt_level 'O3' w.*'stochastic'"),
        ({"master_weights": False, "optimizer_state": "8bit"}, ValueError, "contradicts opt_level 'O5' without"),
    ],
)
def test_forms_that_a_level_cannot_have_are_refused_by_name(options, error, match):
    with pytest.raises(error, match=match):
        start(MAKERS["AdamW"], model := nn.Linear(48, 5), **{"optimizer_state": None} | options)
    assert all(param.dtype is torch.float32 for param in model.parameters())
