"""Optimizers and averages that others wrote, at the opt levels: the real packages, as their users install them.

The gradients here are exact in FP16 and BF16 and do not depend on the weights. So whatever an optimizer computes,
element by element or not, it must do to the masters, to the bit, what it does to the weights of the FP32 script.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import training
from torch import Tensor, nn
from training import assert_unchanged, skipped, snapshot

EXTRAS = "pip install amp_patch[ecosystem,transformers]; `make test-all` does"
pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason=EXTRAS)
schedulefree = pytest.importorskip("schedulefree", reason=EXTRAS)
lion_pytorch = pytest.importorskip("lion_pytorch", reason=EXTRAS)
prodigyopt = pytest.importorskip("prodigyopt", reason=EXTRAS)
torch_ema = pytest.importorskip("torch_ema", reason=EXTRAS)
ema_pytorch = pytest.importorskip("ema_pytorch", reason=EXTRAS)
transformers_optimizers = pytest.importorskip("transformers.optimization", reason=EXTRAS)

from amp_patch import amp  # noqa: E402
from amp_patch.testing import check_per_parameter_optimizer  # noqa: E402
from amp_patch.ways import gradient_release, partial_step, portions  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # What the packages warn of, on any script.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pytorch_optimizer"),
]

# pytorch_optimizer's, all but these.
LEFT_OUT = {
    "adahessian": "differentiates the gradients again: loss.backward(create_graph=True)",
    "sophiah": "differentiates the gradients again: loss.backward(create_graph=True)",
    "alig": "takes a closure",
    "lbfgs": "takes a closure",
    "bsam": "takes a closure",
    "lomo": "steps during backward",
    "adalomo": "steps during backward",
    "demo": "wants einops, and a process group",
    "distributedmuon": "wants a process group",
    "lorarite": "wants pairs of low-rank matrices",
    "sara": "wants low-rank matrices",
    "spectralsphere": "wants matrices alone",
}
ARGUMENTS: dict[str, dict[str, Any]] = {"adashift": {"keep_num": 2}, "ranger21": {"num_iterations": 20}}
MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")  # these want to be told which parameters are matrices
STEPS = 8


class LinearInEach(nn.Module):
    """Parameters of one, two and three dimensions; the output is linear in each."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.square, self.conv = nn.Linear(4, 8), nn.Linear(4, 4, bias=False), nn.Conv1d(2, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wide(x), self.square(x), self.conv(x.view(-1, 2, 2)).flatten(1)], 1)


def network(seed: int = 0) -> LinearInEach:
    torch.manual_seed(seed)
    return LinearInEach()


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Its gradients are multiples of 1/128 below 1/4."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(-2, 3, (4, 4), generator=generator) / 2
    weights = torch.randint(-2, 3, (4, 15), generator=generator) / 64
    return (model(x).float() * weights).sum()


def step(model: nn.Module, optimizer: Any, number: int, *, factor: float = 1.0, plain: bool = False) -> None:
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):  # some draw noise, or lots
        seed(number)
    optimizer.zero_grad()
    if plain:
        with amp.disable_casts():  # those of O1 hold for the whole process
            (loss_of(model, number) * factor).backward()
            optimizer.step()
    else:
        training.backward(loss_of(model, number) * factor, optimizer)
        optimizer.step()


def of_pytorch_optimizer(name: str) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        cls = pytorch_optimizer.load_optimizer(name)
        if name == "adammini":
            return cls(model)
        params: Any = model.parameters()
        if name in MUONS:
            params = [
                {"params": [p for p in model.parameters() if (p.dim() == 2) is muon], "use_muon": muon}
                for muon in (True, False)
            ]
        fused = {"fused": True} if cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) else {}  # torch's own
        return cls(params, **ARGUMENTS.get(name, {}), **fused)

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    f"pytorch_optimizer {name}": of_pytorch_optimizer(name)
    for name in pytorch_optimizer.get_supported_optimizers()
    if name not in LEFT_OUT
}
OPTIMIZERS |= {
    "schedulefree AdamW": lambda m: schedulefree.AdamWScheduleFree(m.parameters(), lr=0.1, warmup_steps=2),
    "schedulefree RAdam": lambda m: schedulefree.RAdamScheduleFree(m.parameters(), lr=0.1),
    "schedulefree SGD": lambda m: schedulefree.SGDScheduleFree(m.parameters(), lr=0.1, weight_decay=0.1),
    "lion_pytorch": lambda m: lion_pytorch.Lion(m.parameters(), lr=1e-2, weight_decay=0.1),
    "prodigyopt": lambda m: prodigyopt.Prodigy(m.parameters(), weight_decay=0.1),
    "transformers Adafactor": lambda m: transformers_optimizers.Adafactor(m.parameters()),
    "transformers Adafactor momentum": lambda m: transformers_optimizers.Adafactor(
        m.parameters(), lr=0.1, beta1=0.9, relative_step=False, scale_parameter=False
    ),
    "Lookahead": lambda m: pytorch_optimizer.Lookahead(torch.optim.Adam(m.parameters(), lr=0.1), k=3),
    "TRAC": lambda m: pytorch_optimizer.TRAC(torch.optim.Adam(m.parameters(), lr=0.1), s_prev=0.1),
    "OrthoGrad": lambda m: pytorch_optimizer.OrthoGrad(torch.optim.Adam(m.parameters(), lr=0.1)),
    "schedulefree wrapper": lambda m: pytorch_optimizer.ScheduleFreeWrapper(torch.optim.Adam(m.parameters(), lr=0.1)),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def start_of(name: str, level: str | None, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model and its optimizer, ready to train; `level` None is the script without amp_patch."""
    model = network(seed)
    optimizer = OPTIMIZERS[name](model)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    mode(optimizer, "train")
    return model, optimizer


def mode(optimizer: Any, name: str) -> None:
    """Schedule-free optimizers swap the weights for their averages in `eval()`, and back in `train()`."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def check(level: str, model: nn.Module, optimizer: Any, plain: nn.Module, plain_optimizer: Any) -> None:
    """Masters and state equal the weights and state of the FP32 script; the model has the rounded masters."""
    masters, weights = list(amp.master_params(optimizer)), list(amp.master_params(plain_optimizer))
    assert_unchanged([m.detach() for m in masters], [w.detach() for w in weights])
    assert_unchanged([dict(optimizer.state[m]) for m in masters], [dict(plain_optimizer.state[w]) for w in weights])
    loss_of(model, 0)  # a forward publishes what was written since the step
    low = {"O2": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    assert_unchanged([p.detach() for p in model.parameters()], [p.detach().to(low) for p in plain.parameters()])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@every_optimizer
def test_it_steps_masters_like_the_weights_of_the_fp32_script(name, level):
    (model, optimizer), (plain, plain_optimizer) = start_of(name, level), start_of(name, None)
    for number in range(STEPS):
        step(model, optimizer, number)
        step(plain, plain_optimizer, number, plain=True)
        if number == 3 and level in ("O1", "O2"):
            before = snapshot(model, optimizer)
            step(model, optimizer, number, factor=math.inf)
            assert skipped(optimizer)
            assert_unchanged(before, snapshot(model, optimizer))
        if number == 5:
            check(level, model, optimizer, plain, plain_optimizer)
            for both in (optimizer, plain_optimizer):
                mode(both, "eval")
            check(level, model, optimizer, plain, plain_optimizer)
            for both in (optimizer, plain_optimizer):
                mode(both, "train")
    check(level, model, optimizer, plain, plain_optimizer)
    assert not skipped(optimizer)
    assert any(not torch.equal(now, then) for now, then in zip(plain.parameters(), network().parameters(), strict=True))


# Those that look at several parameters at once, draw random numbers, keep state that is no parameter's, or cannot be
# made anew of the parts of another one; FAdam takes FP32 alone.
NOT_BY_THEMSELVES = {
    *("adagc", "adai", "adams", "adashift", "asgd", "avagrad", "conda", "dadaptadagrad", "dadaptadam", "dadaptadan"),
    *("dadaptlion", "dadaptsgd", "dash", "fadam", "flashadamw", "gravity", "kron", "madgrad", "magma"),
    *("prodigy", "ranger21", "scalableshampoo", "shampoo", "spam"),
    *("prodigyopt", "Lookahead", "TRAC", "OrthoGrad", "schedulefree wrapper"),
}
TORCHS_OWN = {"adam", "adamw", "nadam", "rmsprop", "sgd"}  # classes of torch.optim, which need no registration


SHORT = {name: name.removeprefix("pytorch_optimizer ") for name in OPTIMIZERS}
REFUSED = [name for name, short in SHORT.items() if short in NOT_BY_THEMSELVES]
BY_THEMSELVES = [name for name, short in SHORT.items() if short not in NOT_BY_THEMSELVES | TORCHS_OWN]


def registered(name: str, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """As `start_of` at O5, registered, with the state that holds weights named as the check wants it."""
    optimizer = OPTIMIZERS[name](model)
    mode(optimizer, "train")
    amp.register_per_parameter_optimizer(type(optimizer))
    try:
        check_per_parameter_optimizer(optimizer)
    except AssertionError as error:
        named = re.search(r"register it with fp32_state=(\[.*\])$", str(error))
        if named is None:
            raise
        amp.register_per_parameter_optimizer(type(optimizer), fp32_state=ast.literal_eval(named[1]))
        check_per_parameter_optimizer(optimizer)
    return amp.initialize(model, optimizer, **{"opt_level": "O5", "verbosity": 0, **options})


def test_the_names_in_the_refused_list_are_optimizers():
    assert len(REFUSED) == len(NOT_BY_THEMSELVES)


@pytest.mark.parametrize("name", REFUSED)
def test_a_registered_one_that_reads_several_parameters_is_refused(name, registrations):
    with pytest.raises(AssertionError, match="registered by register_per_parameter_optimizer: "):
        registered(name, network())


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_a_registered_one_steps_in_portions_and_in_backward_to_the_bit(name, release, registrations, monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 1)
    monkeypatch.setattr(gradient_release, "TOGETHER", 1)
    model, optimizer = registered(name, network(), gradient_release=release)
    plain, plain_optimizer = start_of(name, None)
    assert any(getattr(master, "waiting", None) is not None for master in amp.master_params(optimizer))
    for number in range(STEPS):
        step(model, optimizer, number)
        step(plain, plain_optimizer, number, plain=True)
        check("O5", model, optimizer, plain, plain_optimizer)
    settings = [[{**group, "params": ()} for group in one.param_groups] for one in (optimizer, plain_optimizer)]
    assert partial_step.same(*settings)
