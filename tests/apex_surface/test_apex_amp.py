"""apex.amp as scripts call it: names, signatures, calling forms and private names, on real small models."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import pickle

import pytest
import torch
import training
from apexed import LEVELS, apex_amp  # noqa: F401  the fixture `amp`
from conftest import DEVICES
from syncs import Syncs
from torch import nn
from torch.nn import functional as F
from training import ADAM, SGD, convnet, images, linear, same, weights

INF = float("inf")


def make(amp, level, lr=0.25, value=1.0, **kwargs):
    """One weight whose gradient is the input, and its optimizer."""
    model = linear([[value]])
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), opt_level=level, **kwargs)


def backward(amp, model, optimizer, grad=0.125, **kwargs):
    loss = (model(torch.ones(1, 1)).float() * grad).sum()
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def train(amp, model, optimizer, steps=20):
    losses = []
    for step in range(steps):
        inputs, targets = images(step % 4, next(model.parameters()).device.type)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- names and signatures --------------------------------------------------------------------------------------------

NAMES = {
    "apex.amp": "init half_function float_function promote_function register_half_function register_float_function "
    "register_promote_function initialize scale_loss disable_casts master_params load_state_dict state_dict _amp_state",
    "apex.amp.frontend": "Properties O0 O1 O2 O3 opt_levels initialize state_dict load_state_dict",
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
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]

    required = inspect.Parameter.empty
    assert positional(amp.initialize) == [
        ("models", required),
        ("optimizers", None),
        ("enabled", True),
        ("opt_level", "O1"),
        ("cast_model_type", None),
        ("patch_torch_functions", None),
        ("keep_batchnorm_fp32", None),
        ("master_weights", None),
        ("loss_scale", None),
        ("cast_model_outputs", None),
        ("num_losses", 1),
        ("verbosity", 1),
        ("min_loss_scale", None),
        ("max_loss_scale", 2.0**24),
    ]
    assert positional(amp.scale_loss) == [
        ("loss", required),
        ("optimizers", required),
        ("loss_id", 0),
        ("model", None),
        ("delay_unscale", False),
        ("delay_overflow_check", False),
    ]
    assert positional(amp.state_dict) == [("destination", None)]
    assert positional(amp.load_state_dict) == [("state_dict", required)]
    assert positional(amp.master_params) == [("optimizer", required)]
    assert positional(amp.init)[:1] == [("enabled", True)]


# --- initialize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_training_gives_the_losses_of_plain_fp32(amp, level, device):
    plain = convnet(device=device)
    optimizer = ADAM(plain.parameters())
    expected = []
    for step in range(20):
        inputs, targets = images(step % 4, device)
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model = convnet(device=device)
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level)
    losses = train(amp, model, optimizer)
    tolerance = {"O0": 0.0, "O1": 0.02, "O2": 0.02, "O3": 0.25}[level]
    assert losses == pytest.approx(expected, abs=tolerance)


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


def test_the_default_level_is_o1(amp):
    model = linear([[1.0]])
    amp.initialize(model, SGD(model.parameters()))
    assert amp._amp_state.opt_properties.opt_level == "O1"
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16


@pytest.mark.parametrize("fp16", [True, False])
def test_inference_as_uniter_has_it(amp, fp16):
    model = convnet().eval()
    inputs, _ = images(0)
    expected = model(inputs)
    model = amp.initialize(model, enabled=fp16, opt_level="O2")
    assert next(model.parameters()).dtype is (torch.float16 if fp16 else torch.float32)
    assert torch.allclose(model(inputs), expected, atol=5e-3 if fp16 else 0.0)


@pytest.mark.parametrize("loss_scale", [0, 64])
def test_o2_with_half_batch_norms_and_a_scale_from_argparse(amp, loss_scale):
    model = convnet()
    optimizer = ADAM(model.parameters())
    amp.initialize(
        model,
        optimizers=optimizer,
        opt_level="O2",
        keep_batchnorm_fp32=False,
        loss_scale="dynamic" if loss_scale == 0 else loss_scale,
    )
    assert model.body[1].weight.dtype is torch.float16
    assert amp._amp_state.loss_scalers[0].dynamic is (loss_scale == 0)
    assert train(amp, model, optimizer)[-1] < 1.7


@pytest.mark.parametrize("level", LEVELS)
def test_a_parent_and_its_child_in_one_list(amp, level):
    """OpenNMT-py."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.generator = nn.Linear(4, 3)
    optimizer = SGD(model.parameters())
    [model, model.generator], optimizer = amp.initialize(
        [model, model.generator], optimizer, opt_level=level, loss_scale=128.0, keep_batchnorm_fp32=None
    )
    before = weights(model.generator)
    loss = model.generator(torch.ones(2, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not same(weights(model.generator), before)


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


def test_an_optimizer_that_nobody_initialized_is_named(amp):
    make(amp, "O1")
    unseen = SGD(linear([[1.0]]).parameters())
    with pytest.raises(RuntimeError, match=r"never went through initialize"), amp.scale_loss(torch.ones(()), unseen):
        pass


def test_a_second_training_that_is_disabled_leaves_the_first_one_on(amp):
    _model, optimizer = make(amp, "O1", loss_scale=4.0)
    other = linear([[1.0]])
    other, other_optimizer = amp.initialize(other, SGD(other.parameters()), enabled=False)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 4.0
    with amp.scale_loss(torch.ones(()), other_optimizer) as scaled_loss:
        assert scaled_loss.item() == 1.0


def test_a_level_in_the_place_of_enabled_is_explained(amp):
    model = linear([[1.0]])
    with pytest.raises(TypeError, match=r"name the level: opt_level='O1'"):
        amp.initialize(model, SGD(model.parameters()), "O1")


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


def test_arguments_of_ours_pass_too(amp):
    model = convnet()
    amp.initialize(model, ADAM(model.parameters()), opt_level="O2", dtype=torch.bfloat16, keep_fp32="head")
    assert (model.body[0].weight.dtype, model.head.weight.dtype) == (torch.bfloat16, torch.float32)
    assert amp._amp_state.opt_properties.cast_model_type is torch.bfloat16


def test_cast_model_outputs(amp):
    model = amp.initialize(convnet(), opt_level="O2", cast_model_outputs=torch.float16)
    assert model(images(0)[0]).dtype is torch.float16


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


def test_verbosity_decides_what_is_printed_and_says_at_overflows(amp, capsys, caplog):
    make(amp, "O1", verbosity=False)
    assert capsys.readouterr().out == ""
    model, optimizer = make(amp, "O1")
    assert "O1" in capsys.readouterr().out
    amp._amp_state.verbosity = 0
    backward(amp, model, optimizer, INF)
    optimizer.step()
    assert not caplog.records
    amp._amp_state.verbosity = 1
    backward(amp, model, optimizer, INF)
    optimizer.step()
    assert "Gradient overflow" in caplog.text


# --- scale_loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_list_of_optimizers_delayed(amp, level):
    """XLM."""
    nets = [linear([[1.0]]) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.25) for net in nets]
    nets, optimizers = amp.initialize(nets, optimizers, opt_level=level, loss_scale=4.0)
    opt_a, opt_b = optimizers
    for delay in (True, False):
        loss = sum(net(torch.ones(1, 1)).sum() for net in nets)
        with amp.scale_loss(loss, [opt_a, opt_b], delay_unscale=delay) as s:
            s.backward()
        assert opt_a._amp_stash.params_have_scaled_gradients is delay
    for optimizer in optimizers:
        optimizer.step()
    assert [net.weight.item() for net in nets] == [0.5, 0.5]


@pytest.mark.parametrize("level", LEVELS)
def test_one_scaler_for_each_task_and_the_reduction_inside_of_the_body(amp, level):
    """UNITER: gradients are reduced in the body, where they are the raw scaled ones of the model."""
    model = linear([[1.0]])
    tasks = {"mlm": 0, "itm": 1}
    model, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.25),
        num_losses=len(tasks),
        enabled=True,
        opt_level=level,
        loss_scale=8.0,
    )
    for name in ("mlm", "itm"):
        for micro in range(2):
            loss = model(torch.ones(1, 1)).sum() / 2
            with amp.scale_loss(loss, optimizer, delay_unscale=micro == 0, loss_id=tasks[name]) as s:
                s.backward()
                if micro == 1:
                    grads = [p.grad.data for p in model.parameters() if p.requires_grad and p.grad is not None]
                    assert [g.item() for g in grads] == [8.0]
                    grads[0].mul_(0.5)  # an average over two ranks
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("level", LEVELS)
def test_loss_id_by_position(amp, level):
    _model, optimizer = make(amp, level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**4
    with amp.scale_loss(torch.ones(()), optimizer, 1) as scaled_loss:
        assert scaled_loss.item() == 16.0


class Wrapper:
    """As Apex's LARC: no Optimizer, holds one as `.optim`."""

    def __init__(self, optimizer):
        self.optim = optimizer

    @property
    def param_groups(self):
        return self.optim.param_groups

    def step(self):
        for group in self.optim.param_groups:
            for p in group["params"]:
                p.grad.data *= 0.5
        self.optim.step()

    def zero_grad(self):
        self.optim.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapper_like_larc(amp, level):
    model = linear([[1.0]])
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0)
    backward(amp, model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_is_refused_where_the_loss_is_scaled(amp, level):
    _model, optimizer = make(amp, level, loss_scale=2.0)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)


# --- loss scalers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_scale_takes_effect_when_written_and_is_current_when_read(amp, level):
    """The BERT and ViT family, at whatever level the command line says."""
    model, optimizer = make(amp, level)
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * 2**-10, optimizer) as scaled_loss:
        assert scaled_loss.item() == 2**10
        scaled_loss.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2**20
    optimizer.step()
    assert model.weight.item() == pytest.approx(1 - 2**-12, abs=1e-3)
    amp._amp_state.loss_scalers[0]._loss_scale /= 2
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 2**19
    assert amp._amp_state.loss_scalers[0]._loss_scale == 2**19


@pytest.mark.parametrize("level", LEVELS)
def test_a_scale_written_in_mid_iteration_keeps_the_gradients_that_wait(amp, level):
    model, optimizer = make(amp, level, loss_scale=4.0)
    backward(amp, model, optimizer, 1.0, delay_unscale=True)
    amp._amp_state.loss_scalers[0]._loss_scale *= 2
    backward(amp, model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.5


def test_a_scale_written_at_o0_holds_wherever_scaling_matters(amp):
    model, optimizer = make(amp, "O0")
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
    backward(amp, model, optimizer, 1.0, delay_unscale=True)
    grown = nn.Parameter(torch.ones(1))
    grown.grad = torch.full((1,), 8.0)  # of the backward pass above
    optimizer.add_param_group({"params": [grown]})
    assert grown.grad is None
    optimizer.step()
    assert model.weight.item() == 0.75


def test_a_static_scaler_reports_an_overflow_and_asks_for_no_skip(amp):
    scaler = amp.scaler.LossScaler(4.0)
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is False and scaler._has_overflow is True and scaler.loss_scale() == 4.0


def test_a_scale_that_cannot_be_is_refused_and_the_old_one_kept(amp):
    scaler = amp.scaler.LossScaler("dynamic")
    for value in (0, -1.0, INF, float("nan")):
        with pytest.raises(ValueError, match="_loss_scale"):
            scaler._loss_scale = value
    assert scaler._loss_scale == 2.0**16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_growth_interval_and_the_count_are_honoured(amp, level):
    """GNMT: loss_scaler._scale_seq_len = 128."""
    model, optimizer = make(amp, level)
    loss_scaler = amp._amp_state.loss_scalers[0]
    assert loss_scaler._scale_seq_len == 2000
    loss_scaler._scale_seq_len = 3
    seen = []
    for _ in range(3):
        backward(amp, model, optimizer)
        seen.append((loss_scaler._unskipped, loss_scaler.loss_scale()))
    assert seen == [(1, 2.0**16), (2, 2.0**16), (0, 2.0**17)]
    loss_scaler._unskipped = 2
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 2}}
    backward(amp, model, optimizer)
    assert loss_scaler.loss_scale() == 2.0**18
    loss_scaler._max_loss_scale, loss_scaler._unskipped = 2.0**18, 2
    backward(amp, model, optimizer)
    assert loss_scaler.loss_scale() == 2.0**18
    loss_scaler._min_loss_scale = 2.0**18
    backward(amp, model, optimizer, INF)
    assert loss_scaler.loss_scale() == 2.0**18


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_shows_in_the_scaler_and_in_the_stash_until_it_is_over(amp, level):
    """NVIDIA's BERT counts steps by `_has_overflow` after the step, others ask `already_patched` before it."""
    model, optimizer = make(amp, level)
    loss_scaler = amp._amp_state.loss_scalers[0]
    for grad, overflow in ((0.125, False), (INF, True), (0.125, False)):
        before = model.weight.item()
        optimizer.zero_grad()
        backward(amp, model, optimizer, grad)
        assert optimizer._amp_stash.already_patched is overflow
        optimizer.step()
        assert optimizer._amp_stash.already_patched is False
        assert loss_scaler._has_overflow is overflow and bool(loss_scaler._overflow_buf.item()) is overflow
        assert (model.weight.item() == before) is overflow


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("overflow", [False, True])
def test_overflow_checked_by_the_script_after_its_own_reduction(amp, level, overflow):
    """NVIDIA's BERT with allreduce_post_accumulation: its buffer in the scaler's place, then update_scale()."""
    _amp_state = importlib.import_module("apex.amp._amp_state")._amp_state
    model, optimizer = make(amp, level)
    overflow_buf = torch.zeros(1, dtype=torch.int32)
    steps = 0
    for iteration in range(3):
        for _ in range(2):
            backward(amp, model, optimizer, delay_overflow_check=True)
        loss_scale = _amp_state.loss_scalers[0].loss_scale()
        master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in master_grads]).float() * loss_scale
        if overflow and iteration == 1:
            flat.fill_(INF)
        overflow_buf.zero_()
        overflow_buf.copy_((~torch.isfinite(flat)).any())
        master_grads[0].copy_((flat / loss_scale).view_as(master_grads[0]))
        scaler = _amp_state.loss_scalers[0]
        scaler._overflow_buf = overflow_buf
        had_overflow = scaler.update_scale()
        if had_overflow == 0:
            optimizer.step()
            steps += 1
        elif _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
        for param in model.parameters():
            param.grad = None
    assert steps == (2 if overflow else 3)
    assert model.weight.item() == 1.0 - steps * 0.25 * 0.25
    assert scaler.loss_scale() == (2.0**15 if overflow else 2.0**16)
    assert scaler._unskipped == (1 if overflow else 3)


def test_has_overflow_and_the_buffer_may_be_written(amp):
    scaler = amp.scaler.LossScaler("dynamic", init_scale=2.0**10, scale_window=2)
    scaler._has_overflow = True
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0**9
    scaler.clear_overflow_state()
    assert scaler._has_overflow is False and scaler.update_scale() is False
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is True and scaler._has_overflow is True and scaler.loss_scale() == 2.0**8
    scaler.clear_overflow_state()
    assert scaler._overflow_buf.tolist() == [0]
    assert [scaler.update_scale() for _ in range(2)] == [False, False] and scaler.loss_scale() == 2.0**9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_scaler_by_itself_unscales(amp, device, dtype):
    scaler = amp.scaler.LossScaler(4.0)
    model_grads = [torch.tensor([4.0, 8.0], dtype=dtype, device=device), None]
    master_grads = [torch.empty(2, device=device), None]
    scaler.unscale(model_grads, master_grads, scaler.loss_scale())
    assert master_grads[0].tolist() == [1.0, 2.0]
    stashed = [torch.tensor([0.5, 0.5], device=device)]
    scaler.unscale_with_stashed(model_grads[:1], stashed, master_grads[:1])
    assert master_grads[0].tolist() == [1.5, 2.5]
    scaler.unscale_with_stashed(model_grads[:1], stashed, master_grads[:1], scale_override=(2.0, 0.5, 1.0))
    assert master_grads[0].tolist() == [3.0, 5.0]
    assert scaler.update_scale() is False and scaler._has_overflow is False


@pytest.mark.parametrize("stashed", [False, True])
def test_a_scaler_by_itself_finds_overflows_and_then_waits_to_be_cleared(amp, stashed):
    scaler = amp.scaler.LossScaler("dynamic")
    bad, good, out = torch.tensor([INF]), torch.tensor([2.0**16]), torch.tensor([7.0])
    if stashed:
        scaler.unscale_with_stashed([bad], [torch.zeros(1)], [out])
    else:
        scaler.unscale([bad], [out], None)
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0**15
    out.fill_(7.0)
    scaler.unscale([good], [out], None)
    assert out.item() == 7.0
    scaler.clear_overflow_state()
    scaler.unscale([good], [out], None)
    assert out.item() == 2.0 and scaler.update_scale() is False


@pytest.mark.parametrize("start", [1, 2**14, "dynamic"])
def test_a_scaler_by_itself_scales_a_gradient_penalty(amp, start):
    """progan: the scale of its own WGAN-GP term."""
    scaler = amp.scaler.LossScaler(start)
    inputs = torch.ones(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad((inputs**2).sum() * scaler.loss_scale(), inputs, create_graph=True)
    assert torch.equal(grad / scaler.loss_scale(), 2 * inputs)
    before = scaler.loss_scale()
    scaler._loss_scale /= 2
    assert scaler.loss_scale() == before / 2


def test_a_static_scale_of_1_leaves_gradients_that_are_masters_alone(amp):
    scaler = amp.scaler.LossScaler(1.0)
    grad = torch.tensor([INF])
    scaler.unscale([grad], [grad], None, models_are_masters=True)
    assert grad.item() == INF and not scaler._overflow_buf.any()


def test_the_list_of_scalers_may_be_written(amp):
    """Plug-ins for other devices put scalers of their own there."""
    with pytest.raises(AttributeError, match="loss_scalers"):
        _ = amp._amp_state.loss_scalers
    amp._amp_state.loss_scalers = []
    amp._amp_state.loss_scalers.append(amp.scaler.LossScaler(1.0))
    assert len(amp._amp_state.loss_scalers) == 1
    _model, optimizer = make(amp, "O2")
    amp._amp_state.loss_scalers[0] = amp.scaler.LossScaler(32.0)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 32.0
    amp._amp_state.loss_scalers = [amp.scaler.LossScaler(64.0)]
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 64.0


def test_scalers_survive_copies(amp):
    scaler = amp.scaler.LossScaler("dynamic")
    scaler._loss_scale = 8.0
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        other._loss_scale /= 2
        assert (other._loss_scale, scaler._loss_scale) == (4.0, 8.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_private_names_cost_no_wait_for_the_device(amp, level, device):
    """One in the step, as without them."""
    model = convnet(device=device)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    train(amp, model, optimizer, 2)
    inputs, targets = images(0, device)
    syncs = Syncs(device)
    for delayed in (False, True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with syncs.counting():
            context = amp.scale_loss(loss, optimizer, delay_overflow_check=delayed)
            scaled_loss = context.__enter__()
        assert syncs.count == 0
        scaled_loss.backward()
        with syncs.counting():
            context.__exit__(None, None, None)
        assert syncs.count == 0
        with syncs.counting():
            optimizer.step()
        assert syncs.count == 1


# --- state dict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_round_trip(amp, level, caplog):
    make(amp, level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[1]._loss_scale, amp._amp_state.loss_scalers[1]._unskipped = 8.0, 5
    destination = {}
    state = amp.state_dict(destination)
    assert state is destination and state == {
        "loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 8.0, "unskipped": 5},
    }
    make(amp, level, num_losses=3, loss_scale="dynamic")
    amp.load_state_dict(state)
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**16, 8.0, 2.0**16]
    with pytest.raises(RuntimeError, match="unexpected keys 'surprise'"):
        amp.load_state_dict({**state, "surprise": 1})


# --- the optimizer's private names -----------------------------------------------------------------------------------


def test_the_stash_lists_parameters_and_masters_in_the_order_of_the_groups(amp):
    model = convnet()
    groups = [{"params": model.head.parameters()}, {"params": model.body.parameters()}]
    model, optimizer = amp.initialize(model, torch.optim.SGD(groups, lr=0.1), opt_level="O2")
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    halves, masters = stash.all_fp16_params, stash.all_fp32_from_fp16_params
    expected = [p for m in (model.head, model.body) for p in m.parameters() if p.dtype is torch.float16]
    assert list(map(id, halves)) == list(map(id, expected)) and len(masters) == len(halves)
    assert all(torch.equal(m.half(), p) and m.dtype is torch.float32 for p, m in zip(halves, masters, strict=True))
    own = [p for p in model.parameters() if p.dtype is torch.float32]
    assert list(map(id, stash.all_fp32_from_fp32_params)) == list(map(id, own)) and len(own) == 2
    for flat, groups in (
        (halves, stash.fp16_groups),
        (masters, stash.fp32_from_fp16_groups),
        (own, stash.fp32_from_fp32_groups),
    ):
        assert len(groups) == 2 and [id(p) for group in groups for p in group] == list(map(id, flat))
    added = nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": [added]})
    assert stash.all_fp16_params[-1] is added
    model.head.requires_grad_(False)
    assert len(stash.all_fp16_params) == len(stash.all_fp32_from_fp16_params) == len(halves) - 1
    for parameter in stash.all_fp32_from_fp16_params:
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad = None
    assert not hasattr(stash, "all_fp32_params")


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_without_masters_the_stash_has_no_lists_of_them(amp, level):
    """fairseq's SlowMo asks hasattr(stash, "fp16_groups")."""
    _model, optimizer = make(amp, level)
    stash = optimizer._amp_stash
    assert not hasattr(stash, "fp16_groups") and not hasattr(stash, "all_fp32_from_fp16_params")
    assert len(stash.all_fp16_params) == (level == "O3") and len(stash.all_fp32_params) == (level != "O3")


@pytest.mark.parametrize("level", LEVELS)
def test_resume_as_nvidias_bert_does(amp, level):
    """The model before initialize; then the optimizer twice around lazy init; then the masters by value."""

    def fresh(checkpoint=None):
        model = convnet()
        if checkpoint is not None:
            model.load_state_dict(checkpoint["model"], strict=False)
        optimizer = ADAM(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**12
        return model, optimizer

    model, optimizer = fresh()
    train(amp, model, optimizer, 5)
    checkpoint = copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
            "amp": amp.state_dict(),
        }
    )
    expected = train(amp, model, optimizer, 5)

    resumed, optimizer = fresh(checkpoint)
    optimizer.load_state_dict(checkpoint["optimizer"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
        param.data.copy_(saved_param.data)
    amp.load_state_dict(checkpoint["amp"])
    assert train(amp, resumed, optimizer, 5) == expected
    assert same(weights(resumed), weights(model))


def test_a_lazy_init_of_the_scripts_own_is_called_when_asked_for(amp):
    _model, optimizer = make(amp, "O2")
    calls = []
    optimizer._lazy_init_maybe_master_weights = lambda: calls.append(1)
    optimizer._amp_lazy_init()
    assert calls == []
    optimizer._amp_stash.lazy_init_called = False
    optimizer._amp_lazy_init()
    optimizer._amp_lazy_init()
    assert calls == [1] and optimizer._amp_stash.lazy_init_called is True


def test_masters_written_by_the_script_are_published(amp):
    """BMUF averages amp.master_params through .data, which no version counter tells."""
    model, optimizer = make(amp, "O2")
    for param in amp.master_params(optimizer):
        param.data.copy_(param + 2.0)
    if hasattr(optimizer, "_master_params_to_model_params"):
        optimizer._master_params_to_model_params()
    assert model.weight.item() == 3.0
    backward(amp, model, optimizer, 0.5)
    optimizer.step()
    assert model.weight.item() == 2.875


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scale_loss_of_the_scripts_own_on_the_private_methods(amp, level, overflow):
    """Prepare, backward, clear, post; the second micro-batch adds up."""
    _amp_state = importlib.import_module("apex.amp._amp_state")._amp_state
    model, optimizer = make(amp, level, loss_scale=4.0)
    loss_scaler = _amp_state.loss_scalers[0]
    for micro in range(2):
        loss = model(torch.ones(1, 1)).sum()
        if not optimizer._amp_stash.params_have_scaled_gradients:
            optimizer._prepare_amp_backward()
        (loss.float() * loss_scaler.loss_scale() * (INF if overflow and micro else 1.0)).backward()
        loss_scaler.clear_overflow_state()
        optimizer._post_amp_backward(loss_scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
        if _amp_state.opt_properties.patch_torch_functions:
            _amp_state.handle._clear_cache()
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == (INF if overflow else 2.0)
    optimizer.step()
    assert model.weight.item() == (1.0 if overflow else 0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_flagged_by_hand_as_scaled_are_unscaled_by_the_step(amp, level):
    model, optimizer = make(amp, level, loss_scale=4.0)
    backward(amp, model, optimizer, 1.0, delay_unscale=True)
    stash = optimizer._amp_stash
    assert stash.params_have_scaled_gradients is True
    stash.params_have_scaled_gradients = False
    assert stash.params_have_scaled_gradients is False
    stash.params_have_scaled_gradients = True
    optimizer.step()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("level", LEVELS)
def test_models_and_optimizers_survive_copies(amp, level):
    model, optimizer = make(amp, level, loss_scale=4.0)
    for copied, copied_optimizer in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        assert len(copied_optimizer._amp_stash.all_fp16_params) == len(optimizer._amp_stash.all_fp16_params)
        backward(amp, copied, copied_optimizer, 1.0)
        copied_optimizer.step()
        assert (copied.weight.item(), model.weight.item()) == (0.75, 1.0)


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "cast", "patch", "keep", "masters", "scale"),
    [
        ("O0", torch.float32, False, None, False, 1.0),
        ("O1", None, True, None, None, "dynamic"),
        ("O2", torch.float16, False, True, True, "dynamic"),
        ("O3", torch.float16, False, False, False, 1.0),
        ("O4", None, True, None, None, 1.0),
        ("O5", torch.bfloat16, False, True, True, 1.0),
    ],
)
def test_opt_properties_say_what_apexs_say(amp, level, cast, patch, keep, masters, scale):
    make(amp, level)
    properties = amp._amp_state.opt_properties
    options = {
        "enabled": True,
        "opt_level": level,
        "cast_model_type": cast,
        "patch_torch_functions": patch,
        "patch_torch_functions_type": {"O1": torch.float16, "O4": torch.bfloat16}.get(level),
        "keep_batchnorm_fp32": keep,
        "master_weights": masters,
        "loss_scale": scale,
        "combine_grad": None,
        "combine_ddp": None,
        "ddp_replica_count": 4,
        "user_cast_preferred": None,
        "check_combined_tensors": None,
    }
    assert properties.options == options
    assert {name: getattr(properties, name) for name in options} == options
    assert properties.options.get("cast_model_outputs", torch.float32) is torch.float32  # Catalyst
    assert amp.frontend.opt_levels[level](amp.frontend.Properties()).options == options
    assert amp.frontend.opt_levels[level].brief.startswith(level)


def test_opt_properties_show_overrides(amp):
    make(amp, "O2", keep_batchnorm_fp32="False", loss_scale="128.0")
    properties = amp._amp_state.opt_properties
    assert properties.keep_batchnorm_fp32 is False and properties.loss_scale == 128.0


def test_enabled_may_be_written(amp):
    _model, optimizer = make(amp, "O2")
    amp._amp_state.opt_properties.enabled = False
    loss = torch.ones(())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    amp._amp_state.opt_properties = amp.frontend.Properties()  # plug-ins for other devices
    assert amp._amp_state.opt_properties.enabled is False


def test_properties_by_themselves(amp):
    properties = amp.frontend.Properties()
    assert properties.enabled is False and properties.loss_scale == 1.0
    properties.opt_level = "O1"
    with pytest.raises(RuntimeError, match="master_weights=True contradicts opt_level 'O1'"):
        properties.master_weights = True
    properties.opt_level, properties.keep_batchnorm_fp32, properties.loss_scale = "O2", "True", "64"
    assert properties.options["keep_batchnorm_fp32"] is True and properties.options["loss_scale"] == 64.0
    with pytest.raises(RuntimeError, match="only O1"):
        properties.patch_torch_functions = True
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = properties.nonsense
    assert copy.deepcopy(properties).options == properties.options


# --- casts -----------------------------------------------------------------------------------------------------------


def mm_dtype():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_disable_casts_reaches_into_models(amp):
    """progan's penalty, ONNX export, evaluation "in pure fp32"."""
    model, optimizer = make(amp, "O1")
    inputs = torch.full((1, 1), 1 + 2**-12)
    assert model(inputs).dtype is torch.float16
    with amp.disable_casts():
        assert mm_dtype() is torch.float32
        output = model(inputs)
        assert output.dtype is torch.float32 and output.item() == 1 + 2**-12
        with amp.scale_loss(output.sum(), optimizer) as scaled_loss:
            assert model(inputs).dtype is torch.float32
            assert mm_dtype() is torch.float32
            scaled_loss.backward()
        assert mm_dtype() is torch.float32
    assert mm_dtype() is torch.float16 and model(inputs).dtype is torch.float16

    @amp.disable_casts()
    def evaluate():
        raise KeyError(str(model(inputs).dtype))

    with pytest.raises(KeyError, match="float32"):
        evaluate()
    assert model(inputs).dtype is torch.float16
    with amp.handle.disable_casts(), amp._amp_state.handle._disable_casts():
        assert mm_dtype() is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_disable_casts_is_legal_at_every_level(amp, level):
    model, _ = make(amp, level)
    with amp.disable_casts():
        assert model(torch.ones(1, 1)).item() == 1.0


def test_decorators_and_registrations(amp):
    """DCNv2 and detectron forms: float_function(_C.nms), a static forward, half_function(F.apply)."""
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        @amp.half_function
        def forward(ctx, inputs):
            seen.append(inputs.dtype)
            return inputs * 2

        @staticmethod
        @amp.float_function
        def backward(ctx, grad):
            seen.append(grad.dtype)
            return grad * 2

    nms = amp.float_function(lambda boxes: boxes)
    apply = amp.half_function(Function.apply)
    promote = amp.promote_function(lambda a, b: (a, b))
    module = type("Module", (), {"score": staticmethod(lambda x: x)})
    assert nms(torch.ones(1).half()).dtype is torch.float16, "before initialize nothing is cast"
    amp.register_half_function(torch, "einsum")
    amp.register_float_function(torch, "sigmoid")
    amp.register_promote_function(module, "score")
    with pytest.raises(ValueError, match="no function named"):
        amp.register_half_function(torch, "does_not_exist")
    make(amp, "O1")
    assert nms(torch.ones(1).half()).dtype is torch.float32
    inputs = torch.ones(1, requires_grad=True)
    assert apply(inputs).dtype is torch.float16
    apply(inputs).sum().float().backward()
    assert inputs.grad.dtype is torch.float32 and seen[0] is torch.float16
    assert [t.dtype for t in promote(torch.ones(1).half(), torch.ones(1))] == [torch.float32] * 2
    assert torch.einsum("i,i->", torch.ones(2), torch.ones(2)).dtype is torch.float16
    assert torch.sigmoid(torch.ones(2).half()).dtype is torch.float32


def test_the_op_lists_are_apexs_and_their_edits_act(amp):
    half = torch.ones(2).half()
    with pytest.MonkeyPatch.context() as patch:
        lists = importlib.import_module("apex.amp.lists")
        edited = [*lists.torch_overrides.FP32_FUNCS, "sort"]
        patch.setattr(lists.torch_overrides, "FP32_FUNCS", edited)
        make(amp, "O1")
        assert torch.sort(half).values.dtype is torch.float32
    assert torch.softmax(half, 0).dtype is torch.float16, "Apex's lists had F.softmax alone"
    assert F.softmax(half, 0).dtype is torch.float32
    training.amp.restore()
    handle = amp.init()
    assert torch.softmax(half, 0).dtype is torch.float16
    handle._deactivate()


def test_the_handle_of_an_o1_training_deactivates_it(amp):
    """fairseq's pre_export; the tearDown of Apex's own tests."""
    model, optimizer = make(amp, "O1")
    other = linear([[1.0]])
    handle = amp._amp_state.handle
    assert handle.is_active() is True and handle.has_cache is True and handle.verbose is False
    handle._clear_cache()
    handle._deactivate()
    assert handle.is_active() is False
    assert mm_dtype() is torch.float32 and model(torch.ones(1, 1)).dtype is torch.float32
    with amp.scale_loss(model(torch.ones(1, 1)).sum() / 8, optimizer) as scaled_loss:
        assert mm_dtype() is torch.float32
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 / 8
    other, _ = amp.initialize(other, SGD(other.parameters()), opt_level="O1")
    assert amp._amp_state.handle is not handle
    assert other(torch.ones(1, 1)).dtype is torch.float16 and model(torch.ones(1, 1)).dtype is torch.float32


def test_is_active_of_the_handle_may_be_written(amp):
    model, _ = make(amp, "O1")
    amp._amp_state.handle._is_active = False
    assert mm_dtype() is torch.float32 and model(torch.ones(1, 1)).dtype is torch.float32
    amp._amp_state.handle._is_active = True
    assert mm_dtype() is torch.float16 and model(torch.ones(1, 1)).dtype is torch.float16


def test_no_casts_inside_of_the_optimizers_step(amp):
    """Apex disables them there: Muon, Shampoo and K-FAC multiply matrices."""

    class Shampoo(torch.optim.SGD):
        seen: list[torch.dtype] = []  # noqa: RUF012

        def step(self, closure=None):
            self.seen.append(mm_dtype())
            if self.fails:
                raise KeyError("planted")
            return super().step(closure)

        fails = False

    model = linear([[1.0]])
    optimizer = Shampoo(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    backward(amp, model, optimizer)
    optimizer.step()
    scheduler.step()
    assert Shampoo.seen == [torch.float32] and mm_dtype() is torch.float16
    optimizer.fails = True
    backward(amp, model, optimizer)
    with pytest.raises(KeyError):
        optimizer.step()
    backward(amp, model, optimizer)
    assert mm_dtype() is torch.float16


def test_a_closure_that_step_calls_has_the_casts_of_the_training(amp):
    model = linear([[1.0]])
    seen = []
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O4")  # bfloat16: nothing is scaled
    optimizer.step(lambda: seen.append(mm_dtype()))
    assert seen == [torch.bfloat16]


# --- the API before initialize ---------------------------------------------------------------------------------------


def test_init_casts_and_deactivate_undoes_it(amp):
    handle = amp.init(enabled=True)
    assert amp._amp_state.handle is handle and handle.is_active()
    assert mm_dtype() is torch.float16 and torch.exp(torch.ones(1).half()).dtype is torch.float32
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        F.binary_cross_entropy(torch.ones(1).half(), torch.ones(1).half())
    handle._deactivate()
    assert mm_dtype() is torch.float32 and not handle.is_active()
    handle = amp.init(enabled=True, allow_banned=True)
    assert F.binary_cross_entropy(torch.ones(1).half(), torch.ones(1).half()).dtype is torch.float32
    handle._deactivate()


def test_init_disabled_does_nothing(amp):
    handle = amp.init(enabled=False)
    assert not handle.is_active() and mm_dtype() is torch.float32
    model = linear([[1.0]])
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.25))
    loss = model(torch.ones(1, 1)).sum()
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 0.75
    with handle.scale_loss(loss, optimizer) as scaled_loss, handle._disable_casts():
        assert scaled_loss is loss
    handle._clear_cache()
    handle._deactivate()


@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_a_wrapped_optimizer_scales_each_of_its_losses(amp, overflow):
    model = linear([[1.0]])
    handle = amp.init(loss_scale=4.0)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), num_loss=2)
    assert isinstance(optimizer, amp.opt.OptimWrapper) and optimizer.param_groups[0]["lr"] == 0.25
    expected = 1.0
    for iteration in range(2):
        optimizer.zero_grad()
        for index in range(2):
            with optimizer.scale_loss(model(torch.ones(1, 1)).sum()) as scaled_loss:
                assert scaled_loss.item() == 4.0 * model.weight.item()
                (scaled_loss * (INF if overflow == index and iteration == 0 else 1.0)).backward()
        optimizer.step()
        expected -= 0.0 if overflow is not None and iteration == 0 else 0.5
        assert model.weight.item() == expected
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25


def test_an_initialized_optimizer_can_be_wrapped(amp):
    model, optimizer = make(amp, "O1")
    wrapped = amp._amp_state.handle.wrap_optimizer(optimizer, num_loss=2)
    assert len(optimizer._amp_stash.scalers) == 2
    for _ in range(2):
        with wrapped.scale_loss(model(torch.ones(1, 1)).float().sum() / 8) as scaled_loss:
            scaled_loss.backward()
    wrapped.step()
    assert model.weight.item() == 1 - 0.25 / 4


def test_more_losses_than_announced_are_refused(amp):
    model = linear([[1.0]])
    optimizer = amp.init().wrap_optimizer(SGD(model.parameters()))
    with optimizer.scale_loss(model(torch.ones(1, 1)).sum() / 8) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="num_loss=2"), optimizer.scale_loss(model(torch.ones(1, 1)).sum()):
        pass


def test_the_handles_own_scale_loss(amp):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    handle = amp.init(loss_scale=8.0)
    for expected in (0.75, 0.5):
        optimizer.zero_grad()
        with handle.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            assert scaled_loss.item() == 8.0 * model.weight.item()
            scaled_loss.backward()
        optimizer.step()
        assert model.weight.item() == expected
    handle._deactivate()
    loss = torch.ones(())
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss


def test_restore_undoes_the_old_api_too(amp):
    model = linear([[1.0]])
    optimizer = SGD(model.parameters())
    plain = type(optimizer)
    amp.init().wrap_optimizer(optimizer)
    assert type(optimizer) is not plain
    training.amp.restore()
    assert type(optimizer) is plain and not hasattr(optimizer, "_amp_stash") and mm_dtype() is torch.float32


def test_an_fp16_optimizer_is_refused(amp):
    model = nn.Linear(2, 2).half()
    optimizer = importlib.import_module("apex.fp16_utils").FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), verbose=False
    )
    with pytest.raises(RuntimeError, match="pass the optimizer that it was made from"):
        amp.initialize(nn.Linear(2, 2), [optimizer])


def test_a_scale_written_before_a_delayed_step_leaves_its_gradients_their_own(amp):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level="O1", loss_scale=128.0
    )
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    optimizer.step()
    assert model.weight.item() == 0.75


def test_an_overflow_before_a_scale_was_written_is_not_charged_to_the_next_iteration(amp):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level="O1", verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * math.inf, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    scaler._loss_scale = 2.0**12
    optimizer.step()
    assert scaler._has_overflow and model.weight.item() == 1.0
    after = scaler.loss_scale()
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert scaler.loss_scale() == after and scaler._unskipped == 1 and not scaler._has_overflow


def test_an_old_handle_leaves_a_newer_training_alone(amp):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    handle = amp._amp_state.handle
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    handle._deactivate()
    assert optimizer._amp_stash.policy.opt_level == "O2"
    assert len(optimizer._amp_stash.all_fp32_from_fp16_params) == 1


def test_already_patched_can_be_written(amp):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level="O2", verbosity=0)
    for factor, written, moved in ((1.0, True, 0.0), (1.0, False, 0.25)):
        with amp.scale_loss(model(torch.ones(1, 1)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer._amp_stash.already_patched = written
        assert optimizer._amp_stash.already_patched is written
        optimizer.step()
        assert model.weight.item() == 1.0 - moved


def test_the_level_is_said_once_in_rank_0_s_words(amp, caplog, capsys):
    with caplog.at_level("INFO"):
        amp.initialize(nn.Linear(1, 1), opt_level="O1")
    assert capsys.readouterr().out.count("O1") + caplog.text.count("O1 (") == 1
