"""Wrappers that write into masters: Lookahead, schedule-free optimizers."""

from __future__ import annotations

import pytest
import torch
from crossed import crossed
from small_trainings import LEVELS_WITH_MASTERS, output, start_scalar
from torch import nn
from training import LEVELS, backward, convnet, images, linear

from amp_patch import amp

MASTERED = [level for level in LEVELS if level != "O3"]


class Lookahead:
    """Zhang et al. 2019 (arXiv:1907.08610) with k = 2 and alpha = 1/2, around an optimizer that it keeps."""

    def __init__(self, optimizer, put):
        self.optimizer, self.put, self.steps, self.slow = optimizer, put, 0, {}
        self.param_groups = optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        slow = [self.slow.setdefault(id(p), p.detach().clone()) for p in self.param_groups[0]["params"]]
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for p, s in zip(self.param_groups[0]["params"], slow, strict=True):
                if p.grad is None:  # as of a frozen one
                    continue
                with torch.no_grad():
                    s.add_(p - s, alpha=0.5)
                    self.put(p, s)
                    self.slow[id(p)] = s.clone()


class LookaheadOptimizer(Lookahead, torch.optim.Optimizer):
    """The same, as an Optimizer whose constructor does not call `Optimizer.__init__`, as in public packages."""


def put_copy(p, slow):
    p.copy_(slow)


def put_data_copy(p, slow):
    p.data.copy_(slow)


def put_data(p, slow):
    p.data = slow


def four_steps(model, lookahead):
    seen = []
    for gradient in (0.5, 0.25, 0.5, 0.125):
        lookahead.zero_grad()
        out = model(torch.full((1, 1), gradient))
        backward(out.sum(), lookahead)
        lookahead.step()
        seen.append(output(model))
    return seen


@crossed(
    {
        "level": LEVELS,
        "when": ["given", "put around afterwards"],
        "kind": [Lookahead, LookaheadOptimizer],
        "put": [put_copy, put_data_copy, put_data],
    }
)
def test_lookahead_equals_fp32(level, when, kind, put):
    model = linear([[4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if when == "given":
        model, lookahead = amp.initialize(model, kind(optimizer, put), opt_level=level, loss_scale=64.0)
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0)
        lookahead = kind(optimizer, put)
    # 4 - 3/4 = 3.25 is met half way, at 3.625; so is that less 5/8, at 3.3125.
    assert four_steps(model, lookahead) == [3.5, 3.625, 3.125, 3.3125]


@pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
@pytest.mark.parametrize("scaled_by", ["scale_loss", "GradScaler"])
def test_gradients_that_a_wrapper_saw_are_gone_for_the_next_step(level, scaled_by):
    model = linear([[4.0]])
    lookahead = Lookahead(torch.optim.SGD(model.parameters(), lr=1.0), put_copy)
    model, lookahead = amp.initialize(model, lookahead, opt_level=level, loss_scale=64.0)
    scaler = amp.GradScaler("cpu", init_scale=64.0)
    (master,) = amp.master_params(lookahead)
    for expected in (3.5, 3.5, 3.0):  # the second is met half way: 4 - 1, and 4
        out = model(torch.full((1, 1), 0.5)).sum()  # nothing clears the gradients
        if scaled_by == "scale_loss":
            backward(out, lookahead)
        else:
            scaler.scale(out).backward()
            scaler.unscale_(lookahead.optimizer)
        lookahead.step()
        if scaled_by == "GradScaler":
            scaler.update()
        assert master.grad is not None and output(model) == expected
    lookahead.step()  # without a backward, nothing
    assert master.grad is None
    master.grad = torch.ones(1, 1)  # a gradient of the script's own
    lookahead.optimizer.step()
    assert output(model) == 2.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_a_wrapper_saw_are_not_another_optimizer_s(again, level):
    model = linear([[4.0]])
    optimizers = [Lookahead(torch.optim.SGD(model.parameters(), lr=0.0), put_copy)]
    optimizers.append(torch.optim.SGD(model.parameters(), lr=1.0))
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale=64.0)
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizers[0])
    optimizers[0].step()
    model.weight.grad = None  # the script's own way to clear it
    if again:
        backward(model(torch.ones(1, 1)).sum(), optimizers[1])
    optimizers[1].step()
    assert output(model) == 4.0 - again


class Free(torch.optim.SGD):
    """The common part of schedule-free optimizers: they use other weights for evaluation than for training."""

    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["z"] = p.clone()
            p.lerp_(torch.zeros_like(p), 0.5)

    @torch.no_grad()
    def train(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["z"])


@pytest.mark.parametrize("level", LEVELS)
def test_schedule_free_optimizers_evaluate_their_averages(level):
    model, optimizer = start_scalar(level, weight=4.0, optimizer=Free)
    for expected in (3.5, 3.0):
        backward(model(torch.full((1, 1), 0.5)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        assert output(model) == expected / 2
        optimizer.train()
        assert output(model) == expected


def assert_alike(level, make, averaged, trained):
    """Losses of the weights that `averaged(optimizer)` puts into the model, until `trained(optimizer)`: as in FP32."""

    def run(level):
        model = convnet()
        optimizer = make(model, level)
        seen = []
        for _ in range(6):
            inputs, targets = images(0)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            backward(loss, optimizer) if level is not None else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged(optimizer)
            model.eval()
            with torch.no_grad():
                seen.append(nn.functional.cross_entropy(model(inputs), targets).item())
            model.train()
            trained(optimizer)
        return seen

    losses, expected = run(level), run(None)
    if level == "O0":
        assert losses == expected
    else:
        low = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        assert len(set(expected)) > 2 and losses == pytest.approx(expected, abs=12 * torch.finfo(low).eps)


def initialized(model, optimizer, level):
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0)
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGDScheduleFree", {}), ("AdamWScheduleFree", {"eps": 1e-4}), ("RAdamScheduleFree", {"eps": 1e-4})],
)
def test_schedulefree_s(name, options, level):
    library = pytest.importorskip("schedulefree", reason="optimizers of schedulefree are tried where it is installed")

    def make(model, level):
        optimizer = getattr(library, name)(model.parameters(), lr=0.01, **options)
        optimizer.train()
        return initialized(model, optimizer, level)

    assert_alike(level, make, lambda optimizer: optimizer.eval(), lambda optimizer: optimizer.train())


@pytest.mark.slow
@pytest.mark.parametrize("level", MASTERED)
def test_pytorch_optimizer_s_lookahead(level):
    library = pytest.importorskip("pytorch_optimizer", reason="its Lookahead is tried where it is installed")

    def make(model, level):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return library.Lookahead(initialized(model, optimizer, level), k=2)

    assert_alike(
        level,
        make,
        lambda lookahead: lookahead.backup_and_load_cache(),
        lambda lookahead: lookahead.clear_and_load_backup(),
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z]*` is deprecated")  # at its import
@pytest.mark.parametrize("level", LEVELS)
def test_torchs_optimizer_by_names_trains_as_the_one_inside_it(level):
    from torch.distributed.optim import _NamedOptimizer

    def trained(named):
        model = linear([[2.0, 3.0]])
        inside = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        optimizer = inside
        if named:
            optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.SGD, None, model, lr=0.5, momentum=0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
        for _ in range(3):
            model.zero_grad()
            backward(model(torch.ones(2, 2)).sum(), optimizer)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        return model.state_dict()["weight"].tolist(), state["weight" if named else 0]["momentum_buffer"].tolist()

    assert trained(True) == trained(False)
