"""Masters that somebody edits between steps: the next forward sees it, whoever wrote, and in whichever way.

Schedule-free optimizers write in `eval()` and `train()`, Lookahead after a step, SAM before one, scripts whenever they
like. Weights are small multiples of 1/8, which both low-precision types hold.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import threading

import pytest
import torch
from conftest import DEVICES
from torch import nn
from training import LEVELS, backward, convnet, images, linear

from amp_patch import amp
from amp_patch.masters.master import Master
from amp_patch.masters.masters import Noted, PlainNoted, PlainWatch, Watch

CAST = ("O2", "O5")
MASTERED = [level for level in LEVELS if level != "O3"]


def start(level="O2", weight=1.0, device="cpu", optimizer=torch.optim.SGD):
    model = linear([[weight]], device)
    return amp.initialize(model, optimizer(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0)


def add(p):
    p.add_(1.0)


def copy_into(p):
    p.copy_(torch.full_like(p, 2.0))


def data_copy(p):
    p.data.copy_(torch.full_like(p, 2.0))


def data_add(p):
    p.data.add_(1.0)


def data_assigned(p):
    p.data = torch.full_like(p, 2.0)


def data_assigned_where_it_was(p):
    """Twice, so that the memory of the first may be that of the second."""
    p.data = torch.full_like(p, 3.0)
    p.data = torch.full_like(p, 2.0)


def foreach(p):
    torch._foreach_add_([p], 1.0)


EDITS = (add, copy_into, data_copy, data_add, data_assigned, data_assigned_where_it_was, foreach)


def output(model):
    device = model.weight.device
    with torch.no_grad():
        return model(torch.ones(1, 1, device=device)).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("edit", EDITS)
def test_a_forward_sees_what_was_written_into_the_optimizer_s_parameters(edit, level, device):
    model, optimizer = start(level, device=device)
    assert output(model) == 1.0
    with torch.no_grad():
        for p in amp.master_params(optimizer):
            edit(p)
    assert output(model) == 2.0
    # The step neither takes it back nor makes it twice.
    backward(model(torch.full((1, 1), 0.5, device=device)).sum(), optimizer)
    optimizer.step()
    assert output(model) == 1.5
    assert next(amp.master_params(optimizer)).item() == 1.5


class Own(torch.optim.SGD):
    """A script's own optimizer, whose steps are neither made in one pass nor in portions."""


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Own])
@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("edit", EDITS)
def test_a_step_without_a_forward_before_it_keeps_the_edit(edit, level, optimizer):
    model, optimizer = start(level, optimizer=optimizer)
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizer)
    with torch.no_grad():
        edit(next(amp.master_params(optimizer)))
    optimizer.step()
    assert output(model) == 1.5


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_every_grad_mode(level, mode):
    model, optimizer = start(level)
    with mode():
        for p in amp.master_params(optimizer):
            p.data.add_(1.0)
        assert model(torch.ones(1, 1)).item() == 2.0
    assert model.weight.is_inference() is False
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizer)
    optimizer.step()
    assert output(model) == 1.5


@pytest.mark.parametrize("level", CAST)
def test_an_alias_that_somebody_keeps_is_followed_for_good(level):
    model, optimizer = start(level)
    kept = [p.data for p in amp.master_params(optimizer)]
    for expected in (2.0, 3.0, 4.0):
        kept[0].add_(1.0)
        assert output(model) == expected


@pytest.mark.parametrize("level", CAST)
def test_edits_of_the_model_s_own_weights_stand_beside_those_of_other_masters(level):
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level)
    model[0].weight.data.fill_(0.5)  # a clamp, as of a WGAN
    _, second = amp.master_params(optimizer)
    second.data.fill_(4.0)
    with torch.no_grad():
        assert model(torch.ones(1, 1)).item() == 2.0
    optimizer.step()
    assert [p.item() for p in amp.master_params(optimizer)] == [0.5, 4.0]


def test_masters_that_come_later_are_seen_too():
    model = nn.Sequential(linear([[1.0]]))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O2")
    assert model(torch.ones(1, 1)).item() == 1.0
    model.append(linear([[1.0]]).half())
    optimizer.add_param_group({"params": model[1].weight})
    list(amp.master_params(optimizer))[1].data.fill_(2.0)
    assert model(torch.ones(1, 1)).item() == 2.0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_follow_their_own_masters(how):
    model, optimizer = how(start())
    next(amp.master_params(optimizer)).data.fill_(2.0)
    assert output(model) == 2.0


def test_a_method_that_was_named_sees_them():
    class Coder(nn.Linear):
        def encode(self, x):
            return self(x)

    model = Coder(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", methods=("encode",))
    next(amp.master_params(optimizer)).data.fill_(2.0)
    assert model.encode(torch.ones(1, 1)).item() == 2.0


def test_a_forward_on_another_thread_sees_them():
    model, optimizer = start()
    next(amp.master_params(optimizer)).data.fill_(2.0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(output(model)))
    thread.start()
    thread.join()
    assert seen == [2.0]


def test_dataparallel_copies_what_was_edited(monkeypatch):
    before, copied = nn.DataParallel.replicate, []
    model, optimizer = start()
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(module, "replicate", lambda module, *args, **kwargs: copied.append(module.weight.item()))
    parallel = nn.DataParallel(model)
    next(amp.master_params(optimizer)).data.fill_(2.0)
    parallel.replicate(model, [0])
    assert copied == [2.0]
    amp.restore()
    assert nn.DataParallel.replicate is before


# --- what stays as it is ----------------------------------------------------------------------------------------------


def test_nothing_is_written_where_nothing_was_edited():
    model, optimizer = start()
    output(model)
    version = model.weight._version
    for _ in range(3):
        output(model)
        next(amp.master_params(optimizer)).data.norm()  # a look is no edit
    assert model.weight._version == version


def test_torch_chooses_the_foreach_form_for_masters_as_for_parameters(monkeypatch):
    module = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    before = module._foreach_supported_types
    _, optimizer = start()
    masters = list(amp.master_params(optimizer))
    assert isinstance(masters[0], Master)
    assert module._default_to_fused_or_foreach(masters, False) == (False, True)
    amp.restore()
    assert module._foreach_supported_types is before
    assert type(masters[0]) is nn.Parameter  # whoever kept one has what a script without amp_patch has


def test_a_torch_that_keeps_no_such_list_gets_plain_masters(monkeypatch):
    monkeypatch.delattr(importlib.import_module("torch.optim.optimizer"), "_foreach_supported_types")
    model, optimizer = start(optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, foreach=False))
    master = next(amp.master_params(optimizer))
    assert type(master) is nn.Parameter
    with torch.no_grad():
        master.add_(1.0)
    assert output(model) == 2.0


@pytest.mark.parametrize("kinds", [(Noted, Watch), (PlainNoted, PlainWatch)], ids=["default", "python"])
def test_versions_tell_which_of_many_tensors_were_written(kinds):
    noted_kind, watch_kind = kinds
    tensors = [torch.zeros(2) for _ in range(5)]
    with torch.inference_mode():
        tensors.append(torch.zeros(2))
    noted = [noted_kind(tensor) for tensor in tensors]
    watch = watch_kind(noted)
    assert watch.written() == []
    tensors[1].add_(1)
    tensors[3].detach().zero_()
    assert watch.written() == [1, 3]
    assert [n.written() for n in noted] == [False, True, False, True, False, False]
    noted[1].note()
    assert watch.written() == [3]
    assert watch_kind([]).written() == []


# --- Lookahead and schedule-free optimizers ---------------------------------------------------------------------------


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
    """The same as an Optimizer that never initialized itself as one, as the public ones are."""


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


@pytest.mark.parametrize("put", [put_copy, put_data_copy, put_data])
@pytest.mark.parametrize("kind", [Lookahead, LookaheadOptimizer])
@pytest.mark.parametrize("when", ["given", "put around afterwards"])
@pytest.mark.parametrize("level", LEVELS)
def test_lookahead_is_what_it_is_in_fp32(level, when, kind, put):
    model = linear([[4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if when == "given":
        model, lookahead = amp.initialize(model, kind(optimizer, put), opt_level=level, loss_scale=64.0)
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0)
        lookahead = kind(optimizer, put)
    # 4 - 3/4 = 3.25 is met half way, at 3.625; so is that less 5/8, at 3.3125.
    assert four_steps(model, lookahead) == [3.5, 3.625, 3.125, 3.3125]


@pytest.mark.parametrize("level", CAST)
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
    """What schedule-free optimizers have in common: between training and evaluation the weights are others."""

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
def test_schedule_free_optimizers_evaluate_what_they_say(level):
    model, optimizer = start(level, weight=4.0, optimizer=Free)
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
