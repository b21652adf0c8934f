"""apex.amp as scripts call it: names, signatures, calling forms and private names, on real small models."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from apexed import INF, LEVELS, apex_amp, backward_by, make, train_by  # noqa: F401  the fixture `amp`
from torch import nn
from training import SGD, linear

NAMES = {
    "apex.amp": "init half_function float_function promote_function register_half_function register_float_function "
    "register_promote_function initialize scale_loss disable_casts master_params load_state_dict state_dict _amp_state",
    "apex.amp.frontend": "Properties initialize state_dict load_state_dict",
    "apex.amp.scaler": "LossScaler",
    "apex.amp.handle": "scale_loss disable_casts AmpHandle NoOpHandle",
    "apex.amp.opt": "OptimWrapper",
    "apex.amp._amp_state": "_amp_state AmpState maybe_print master_params warn_or_err",
    "apex.amp._process_optimizer": "AmpOptimizerState",
    "apex.amp.amp": "init half_function float_function promote_function register_half_function register_float_function "
    "register_promote_function",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_in_its_module(amp, module):
    found = importlib.import_module(module)
    names = NAMES[module].split()
    assert set(names) <= vars(found).keys() and set(names) <= set(found.__all__)


def test_the_state_is_an_object_in_the_package_and_in_its_module(amp):
    scope: dict[str, object] = {}
    exec("from apex import amp\nimport apex.amp\nfrom apex.amp import _amp_state as in_package", scope)
    exec("from apex.amp._amp_state import _amp_state as in_module, maybe_print, master_params, warn_or_err", scope)
    assert scope["in_package"] is scope["in_module"] is scope["amp"]._amp_state is scope["apex"].amp._amp_state
    assert type(scope["in_module"]).__name__ == "AmpState"


def test_signatures_are_apexs(amp):
    def positional(function):
        found = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found)

    assert positional(amp.initialize) == (
        "models optimizers=None enabled=True opt_level='O1' cast_model_type=None patch_torch_functions=None "
        "keep_batchnorm_fp32=None master_weights=None loss_scale=None cast_model_outputs=None num_losses=1 verbosity=1 "
        "min_loss_scale=None max_loss_scale=16777216.0"
    )
    assert positional(amp.scale_loss) == (
        "loss optimizers loss_id=0 model=None delay_unscale=False delay_overflow_check=False"
    )
    assert positional(amp.state_dict) == "destination=None" and positional(amp.load_state_dict) == "state_dict"
    assert positional(amp.master_params) == "optimizer" and positional(amp.init).startswith("enabled=True")


@pytest.mark.parametrize("level", LEVELS)
def test_the_returned_form_is_that_of_the_arguments(amp, level):
    def fresh():
        net = linear([[1.0]])
        return net, SGD(net.parameters())

    (a, opt_a), (b, opt_b) = fresh(), fresh()
    [net_d, net_g], [opt_d, opt_g] = amp.initialize([a, b], [opt_a, opt_b], opt_level=level, num_losses=3)
    assert (net_d, net_g, opt_d, opt_g) == (a, b, opt_a, opt_b) and len(amp._amp_state.loss_scalers) == 3
    c, opt_c = fresh()
    assert amp.initialize(models=c, optimizers=opt_c, opt_level=level) == (c, opt_c)
    d, opt_d = fresh()
    assert amp.initialize([d], opt_d, opt_level=level) == ([d], opt_d)
    assert isinstance(amp.initialize(fresh()[0], None, opt_level=level), nn.Linear)  # progan
    nets = [fresh()[0] for _ in range(5)]
    assert amp.initialize(nets, opt_level=level) == nets  # stylegan2: five models in one list
    e, opt_e = fresh()
    assert amp.initialize(e, opt_e, True, level, None, None, None, None, 128.0)[1] is opt_e
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0


def test_disabled_leaves_everything_as_it_is(amp):
    model = linear([[1.0]])
    plain = SGD(model.parameters())
    model, optimizer = amp.initialize(model, plain, enabled=False, opt_level="O2")
    assert optimizer is plain and model.weight.dtype is torch.float32
    assert amp._amp_state.opt_properties.enabled is False
    loss = model(torch.ones(1, 1)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    unseen = SGD(linear([[1.0]]).parameters())
    with amp.scale_loss(loss, unseen) as scaled_loss:
        assert scaled_loss is loss
    amp.initialize(model, None, None, "O2")
    assert model.weight.dtype is torch.float32


def test_a_second_training_that_is_disabled_leaves_the_first_one_on(amp):
    _model, optimizer = make(amp, "O1", loss_scale=4.0)
    other = linear([[1.0]])
    other, other_optimizer = amp.initialize(other, SGD(other.parameters()), enabled=False)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 4.0
    with amp.scale_loss(torch.ones(()), other_optimizer) as scaled_loss:
        assert scaled_loss.item() == 1.0


@pytest.mark.parametrize(
    ("name", "value"), [("keep_batchnorm_fp32", True), ("master_weights", True), ("cast_model_type", torch.float16)]
)
def test_contradictions_of_o1_are_errors_or_by_hard_override_messages(amp, name, value, capsys):
    model = linear([[1.0]])
    with pytest.raises(RuntimeError, match=rf"{name}=.* contradicts opt_level 'O1'"):
        amp.initialize(model, opt_level="O1", **{name: value})
    assert type(model) is nn.Linear
    amp._amp_state.hard_override = True
    amp.initialize(model, opt_level="O1", **{name: value})
    assert f"Warning:  initialize: {name}=" in capsys.readouterr().out
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_models_that_are_half_already_come_in_when_allowed(amp, level):
    """Apex's own test suite and custom half layers."""

    def half():
        model = linear([[1.0]]).half()
        return model, torch.optim.SGD(model.parameters(), lr=0.25)

    with pytest.raises(ValueError, match="wanted a model in FP32"):
        amp.initialize(*half(), opt_level=level)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model, optimizer = amp.initialize(*half(), opt_level=level, cast_model_type=False, loss_scale=4.0)
    amp._amp_state.allow_incoming_model_not_fp32 = False
    assert model.weight.dtype is torch.float16
    (master,) = amp.master_params(optimizer)
    assert master.dtype is (torch.float32 if level == "O2" else torch.float16)
    with amp.scale_loss(model(torch.ones(1, 1).half()).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 0.75


def test_cast_model_type_false_leaves_the_weights(amp):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", cast_model_type=False)
    assert model.weight.dtype is torch.float32 and next(amp.master_params(optimizer)) is model.weight
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"


def test_verbosity_decides_the_printed_lines_and_announces_overflows(amp, capsys, caplog):
    make(amp, "O1", verbosity=False)
    assert capsys.readouterr().out == ""
    model, optimizer = make(amp, "O1")
    assert "O1" in capsys.readouterr().out
    amp._amp_state.verbosity = 0
    backward_by(amp, model, optimizer, INF)
    optimizer.step()
    assert not caplog.records
    amp._amp_state.verbosity = 1
    backward_by(amp, model, optimizer, INF)
    optimizer.step()
    assert "Gradient overflow" in caplog.text
