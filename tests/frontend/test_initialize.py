"""What initialize takes, returns and refuses; whatever it refuses, it changes nothing."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
import training
from small_trainings import LEVELS_WITH_MASTERS
from torch import nn
from training import LEVELS, SGD, backward, convnet, linear

from amp_patch import amp
from amp_patch.apex.amp import frontend as apex
from amp_patch.optimizers import FusedAdam


def pair():
    model = convnet()
    return model, SGD(model.parameters())


def picture(model, optimizer):
    """Everything that a refused call must leave alone."""
    return (
        [type(m) for m in model.modules()],
        [(id(p), p.dtype, p._version) for p in model.parameters()],
        sorted(vars(model)),
        type(optimizer),
        sorted(vars(optimizer)),
        [id(p) for group in optimizer.param_groups for p in group["params"]],
        torch.mm,
        torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents,
    )


def test_the_calling_forms_of_apex_return_their_arguments():
    a, b, c = convnet(), convnet(), convnet()
    opt, other = SGD(a.parameters()), SGD(b.parameters())
    assert amp.initialize(a, opt, opt_level="O2") == (a, opt)
    assert amp.initialize(a, optimizers=opt, opt_level="O2", keep_batchnorm_fp32=False, loss_scale="dynamic") == (
        a,
        opt,
    )
    assert amp.initialize([a, b], [opt, other], opt_level="O1", num_losses=3) == ([a, b], [opt, other])
    assert amp.initialize((a, b), opt, opt_level="O1") == ((a, b), opt)
    assert amp.initialize([a], [opt]) == ([a], [opt])
    assert amp.initialize(c, opt_level="O2") is c
    assert amp.initialize(c, None, opt_level="O2", enabled=1) is c
    assert amp.initialize([c], opt_level="O2", verbosity=False) == [c]
    assert amp.initialize([c], enabled=False) == [c]
    assert amp.initialize(a, [], opt_level="O2") == (a, [])


@pytest.mark.parametrize("initialize", [amp.initialize, apex.initialize])
def test_a_misspelt_argument_is_refused_with_the_arguments_that_are_similar(initialize):
    for slip, meant in ("master_weight", "master_weights"), ("opt_levl", "opt_level"), ("keepfp32", "keep_fp32"):
        with pytest.raises(TypeError, match=f"^initialize: there is no argument '{slip}'; did you mean .*'{meant}'"):
            initialize(*pair(), **{slip: True})
    with pytest.raises(TypeError, match=r"^initialize: there is no argument 'colour'$"):
        initialize(*pair(), colour=3)


def test_the_default_level_is_o1():
    model, _ = amp.initialize(*pair())
    assert model(training.images(0)[0]).dtype is torch.float16


BAD = {
    "unknown level": ({"opt_level": "O9"}, ValueError, "none of O0, O1"),
    "zero for O": ({"opt_level": "01"}, ValueError, "letter O"),
    "small o": ({"opt_level": "o1"}, ValueError, "letter O"),
    "scale 0": ({"loss_scale": 0}, ValueError, "loss_scale is 0"),
    "scale -1": ({"loss_scale": -1.0}, ValueError, "loss_scale is -1.0"),
    "scale NaN": ({"loss_scale": math.nan}, ValueError, "loss_scale is nan"),
    "scale auto": ({"loss_scale": "auto"}, ValueError, "loss_scale is 'auto'"),
    "no losses": ({"num_losses": 0}, ValueError, "num_losses is 0"),
    "half a loss": ({"num_losses": 1.5}, ValueError, "num_losses is 1.5"),
    "norms at O1": ({"opt_level": "O1", "keep_batchnorm_fp32": True}, ValueError, "keep_batchnorm_fp32=True"),
    "unknown module": ({"keep_fp32": "hed"}, ValueError, "keep_fp32 names 'hed'"),
    "unused class": ({"keep_fp32": [nn.LSTM]}, ValueError, "LSTM.*matches no module"),
    "bad rule": ({"keep_fp32": [3]}, TypeError, "keep_fp32 holds 3"),
    "class of no module": ({"keep_fp32": int}, TypeError, "keep_fp32 holds <class 'int'>"),
    "unknown method": ({"methods": ("generate",)}, ValueError, "methods names 'generate'"),
    "static method": ({"methods": ("classes",)}, ValueError, "methods names 'classes', a static"),
    "methods as a string": ({"methods": "encode"}, TypeError, r"methods=\('encode',\)"),
    "level as third argument": ({"enabled": "O1"}, TypeError, "opt_level='O1'"),
    "integer outputs": ({"cast_model_outputs": torch.int32}, TypeError, "cast_model_outputs"),
    "unknown keyword": ({"opt_levle": "O1"}, TypeError, "opt_levle"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_get_a_clear_error_and_change_nothing(case):
    kwargs, error, words = BAD[case]
    model, optimizer = pair()
    before = picture(model, optimizer)
    with pytest.raises(error, match=words):
        amp.initialize(model, optimizer, **{"opt_level": "O2", **kwargs})
    assert picture(model, optimizer) == before
    with pytest.raises(RuntimeError, match="never went through"):
        backward(torch.ones(()), optimizer)


class OwnForward(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.forward = super().forward


BAD_MODELS = {
    "bfloat16 beyond FP16": (
        lambda: linear([[1e5]]).bfloat16(),
        ValueError,
        "'weight' of Linear is torch.bfloat16 and holds 99840",
    ),
    "double": (lambda: nn.Linear(2, 2).double(), ValueError, "is torch.float64"),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(2, 2)), ValueError, "wrapped in DataParallel"),
    "script": (lambda: torch.jit.script(nn.Linear(2, 2)), TypeError, "ScriptModule"),
    "own forward": (OwnForward, ValueError, "`forward` in its __dict__"),
    "lazy": (lambda: nn.LazyLinear(2), ValueError, "is lazy"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:.*jit.script.*")
@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_model_that_cannot_be_taken_is_refused_with_the_others_unchanged(case):
    make, error, words = BAD_MODELS[case]
    good, optimizer = pair()
    bad = make()
    before, kind = picture(good, optimizer), type(bad)
    with pytest.raises(error, match=words):
        amp.initialize([good, bad], optimizer, opt_level="O2")
    assert picture(good, optimizer) == before and type(bad) is kind


def test_arguments_other_than_models_and_optimizers_are_refused():
    model, optimizer = pair()
    for models, optimizers, words in (
        ("model", optimizer, "models holds a str; wanted a torch.nn.Module or a list of them$"),
        (optimizer, model, r"models holds an SGD, an optimizer; .*the model comes first: initialize\(model, opt.*\)$"),
        ([optimizer], [model], "models holds an SGD, an optimizer; .*the model comes first"),
        (optimizer, None, "models holds an SGD, an optimizer; .*the model comes first"),
        ([], optimizer, "models is empty"),
        (None, None, r"models is empty \(None, .*wanted a torch.nn.Module .*: initialize\(model, optimizer\)$"),
        (None, optimizer, r"models is empty \(None, "),
        (OrderedDict(model=model), optimizer, "models holds an OrderedDict; wanted a torch.nn.Module"),
        (model.parameters(), optimizer, r"models holds a generator; .* in place of model.parameters\(\)"),
        (list(model.parameters()), optimizer, "models holds a Parameter; .*the model itself"),
        (model, "O2", "optimizers holds a str; .*; if it is a level, name it: opt_level='O2'$"),
        (model, [optimizer, optimizer], "twice"),
        (model, object(), "optimizers holds an object"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            amp.initialize(models, optimizers, opt_level="O2")
    assert type(model) is training.ConvNet


@pytest.mark.parametrize(("level", "refused"), [("O0", False), ("O1", True), ("O2", True), ("O4", False), ("O5", True)])
def test_lbfgs_is_refused_where_its_closure_would_need_scaling_or_masters(level, refused):
    model = linear([[1.0]])
    optimizer = torch.optim.LBFGS(model.parameters())
    if refused:
        with pytest.raises(ValueError, match="LBFGS"):
            amp.initialize(model, optimizer, opt_level=level)
    else:
        amp.initialize(model, optimizer, opt_level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_of_no_given_model_stay_as_they_are_and_have_masters_only_if_half(level):
    model, outsider = linear([[1.0]]), nn.Parameter(torch.ones(2))
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([*model.parameters(), outsider, half], lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0)
    assert (outsider.dtype, half.dtype) == (torch.float32, torch.float16)
    held = list(amp.master_params(optimizer))
    assert held[1] is outsider
    assert (held[2] is half) == (level not in LEVELS_WITH_MASTERS)
    backward(model(torch.ones(1, 1)).sum().float() + outsider.sum() + half.float().sum(), optimizer)
    optimizer.step()
    assert outsider.tolist() == half.tolist() == [0.0, 0.0]
    amp.restore()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model.weight), id(outsider), id(half)]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = nn.Linear(2, 2)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(2))
        self.index = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

    def forward(self, inputs):
        return self.real(inputs * self.mask)


@pytest.mark.parametrize("level", LEVELS)
def test_complex_and_integer_parameters_and_buffers_are_left_alone(level):
    model = Mixed()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    assert model.phase.dtype is torch.complex64 and model.index.dtype is model.count.dtype is torch.int64
    assert model.mask.dtype is model.real.weight.dtype
    backward(model(torch.ones(1, 2)).sum() / 4, optimizer)
    optimizer.step()
    amp.restore()
    assert model.mask.dtype is torch.float32


def test_eps_that_rounds_to_0_in_o3_s_type_is_warned_about_by_name():
    model = convnet()
    with pytest.warns(UserWarning, match=r"eps=1e-08 of Adam's group 0 is 0 in torch.float16"):
        amp.initialize(model, torch.optim.Adam(model.parameters()), opt_level="O3")


@pytest.mark.parametrize(("level", "dtype"), [("O0", None), ("O1", None), ("O2", None), ("O3", torch.bfloat16)])
def test_eps_is_not_warned_about_where_it_holds(level, dtype):
    model = convnet()
    amp.initialize(model, torch.optim.Adam(model.parameters()), opt_level=level, dtype=dtype)


def test_eps_is_not_warned_about_where_the_optimizer_computes_in_fp32():
    model = convnet()
    amp.initialize(model, FusedAdam(model.parameters()), opt_level="O3")


@pytest.mark.parametrize("stage", ["enter_training", "cast"])
def test_a_failure_half_way_is_undone(monkeypatch, stage):
    from amp_patch.model import forward, tensors

    owner = {"enter_training": forward, "cast": tensors}[stage]

    model, optimizer = pair()
    before = [(id(p), p.dtype) for p in model.parameters()]
    monkeypatch.setattr(owner, stage, lambda *a, **k: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        amp.initialize(model, optimizer, opt_level="O2")
    assert [(id(p), p.dtype) for p in model.parameters()] == before
    assert type(optimizer) is torch.optim.SGD
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [key for key, _ in before]


def test_importing_patches_nothing_touches_no_cuda_and_leaves_apex_and_fsdp_alone():
    import subprocess
    import sys

    code = (
        "import torch; before = dict(vars(torch)), dict(vars(torch.Tensor)), dict(vars(torch.nn.functional));"
        "from amp_patch import amp; import amp_patch as again; assert amp is again; import sys;"
        "assert not any('apex' in m.split('.') or m.startswith('torch.distributed.fsdp') for m in sys.modules);"
        "assert not any(m.startswith('torch.distributed.tensor') for m in sys.modules);"
        "after = vars(torch), vars(torch.Tensor), vars(torch.nn.functional);"
        "assert all(b[k] is a[k] for b, a in zip(before, after) for k in b);"
        "assert not torch.cuda.is_initialized();"
        "assert all(hasattr(amp, name) for name in amp.__all__);"
        "assert not sys.modules.keys() & {'torch._dynamo', 'lightning', 'accelerate', 'transformers'}"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


class Called(nn.Module):
    """Defines __call__ in place of forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __call__(self, inputs):
        return self.layer(inputs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_defines_only_call_is_refused_by_name_or_named(level):
    with pytest.raises(ValueError, match=r"Called defines __call__ and no forward.*methods=\('__call__',\)"):
        amp.initialize(Called(), opt_level=level)
    model = amp.initialize(Called(), opt_level=level, methods=("__call__",))
    assert model(torch.ones(1, 2)).dtype is {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
