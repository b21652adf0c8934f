"""`gradient_release=True`: parameters are stepped in backward, one after the other, to the bits of a step behind it.

tests/optimizers/test_every_optimizer.py has the numbers of ordinary trainings.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import scripts
import torch
from crossed import crossed
from interrupts import Interrupt
from released import LEVELS, MAKERS, OPTIM, numbers, start, twice_checkpointed
from split_masters import loss_of, net
from torch import Tensor, nn
from training import backward, same, through_pickle

from amp_patch import amp, multi_tensor
from amp_patch.ways import gradient_release

most_bytes = scripts.load("timing").most_bytes

one_of_each_way = pytest.mark.parametrize("make", [MAKERS["AdamW"], MAKERS["NAdam"]], ids=["AdamW", "NAdam"])


@pytest.mark.parametrize("level", LEVELS)
@one_of_each_way
def test_weights_have_moved_and_gradients_are_gone_when_backward_is_over(make, level):
    model, optimizer = start(make, level)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    before = [p.detach().clone() for p in model.parameters()]
    with amp.scale_loss(loss_of(model, 0), optimizer) as loss:
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
    stepped = [p.detach().clone() for p in model.parameters()]
    assert not any(map(torch.equal, before[:2], stepped[:2])) and not called
    assert all(master.grad is None for master in amp.master_params(optimizer))
    optimizer.step()
    assert same(model.parameters(), stepped) and called == ["before", "after"]


def bytes_a_parameter(level: str, mark: str, **options: Any) -> float:
    """Return the peak bytes a parameter in the second block `mark`: a whole "iteration", or the optimizer's "step"."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        model, optimizer = start(MAKERS["AdamW"], level, model, **options)
        for _ in range(2):
            with torch.profiler.record_function("iteration"):
                backward(model(torch.ones(2, 256)).square().mean(), optimizer)
                with torch.profiler.record_function("step"):
                    optimizer.step()
                optimizer.zero_grad()
        amp.restore()

    return most_bytes(train, mark) / (8 * 256 * 256)


@pytest.mark.parametrize(
    ("level", "most", "less"),
    # At O4 the weights' casts, 2 bytes a parameter, are there until backward is over.
    # Products by AMX have a copy of one weight (0.25), and 0.03 more.
    [("O4", 14.6, 1.9), ("O5", 14.6, 1.45), ("O5+split", 12.6, 1.45), ("O5+stochastic", 10.6, 1.45)],
)
@pytest.mark.extension
def test_the_gradients_of_the_model_are_never_there_at_once(level, most, less):
    """One gradient of eight is."""
    # What emulated products keep in backward is the machine's own.
    released, ordinary = (
        bytes_a_parameter(level, "iteration", gradient_release=release, cpu_half="native") for release in (True, False)
    )
    assert most - 0.7 < released < most and ordinary - released > less


@pytest.mark.parametrize("cpu_half", ["native", "emulate"])
@pytest.mark.parametrize(
    ("level", "expected"),
    [("O5", 16), ("O5+split", 14), ("O5+stochastic", 12), ("O5+split+8bit", 8), ("O5+stochastic+8bit", 6)],
)
@pytest.mark.extension
def test_a_parameter_takes_the_bytes_of_the_ladder_at_the_step(level, expected, cpu_half):
    found = bytes_a_parameter(level, "step", gradient_release=False, cpu_half=cpu_half)
    assert expected <= found < expected + 0.1


def test_a_step_behind_a_bare_backward_holds_no_scratch_of_emulated_products():
    class Marked(OPTIM.AdamW):
        def step(self, closure: Any = None) -> Any:
            with torch.profiler.record_function("inside"):
                return super().step(closure)

    def train() -> None:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        optimizer = Marked(model.parameters(), fused=True)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O4", cpu_half="emulate", verbosity=0)
        for _ in range(2):
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = most_bytes(train, "inside") / (8 * 256 * 256)
    assert 16 <= found < 16.1, "FP32 weights, gradients and state"


@one_of_each_way
def test_a_gradient_with_another_layout_is_stepped_among_others_like_alone(make, monkeypatch):
    def train(together: int) -> list[Tensor]:
        monkeypatch.setattr(gradient_release, "TOGETHER", together)
        model = net()
        model[3].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.t().contiguous().t()))
        model, optimizer = start(make, "O5", model)
        for step in range(2):
            backward(loss_of(model, step), optimizer)
            optimizer.step()
        found = numbers(model, optimizer)
        amp.restore()
        return found

    assert same(train(1), train(2**16))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_steps_behind_backward_to_the_same_bits(copied):
    model, optimizer = start(MAKERS["AdamW"], "O5+split")
    backward(loss_of(model, 0), optimizer)
    optimizer.step()
    twin, its_optimizer = copied((model, optimizer))
    for each in ((model, optimizer), (twin, its_optimizer)):
        backward(loss_of(each[0], 1), each[1])
        each[1].step()
    assert same(numbers(twin, its_optimizer), numbers(model, optimizer))
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)


def raw(param: Tensor) -> Tensor | None:
    """The gradient in torch's own field."""
    return torch.Tensor.grad.__get__(param)  # type: ignore[attr-defined]


# Without the extension torch's own Python makes AdamW's step, which an interrupt cuts between the decay and the update.
INTERRUPTED = ["AdamW", "RMSprop"] if multi_tensor.backend() == "cpp" else ["RMSprop"]


@crossed(
    {
        "make": {name: MAKERS[name] for name in INTERRUPTED},
        "together": [1, gradient_release.TOGETHER],
        "level": ["O5", "O5+split"],
    }
)
def test_an_interrupt_at_some_calls_of_a_backward_leaves_each_parameter_stepped_or_not(
    make, level, together, monkeypatch
):
    monkeypatch.setattr(gradient_release, "TOGETHER", together)

    def train(at: int) -> tuple[list[list[Tensor]], list[list[Tensor]], int]:
        model, optimizer = start(make, level)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        before = found(model, optimizer)
        raised = Interrupt(at)(lambda: backward(loss_of(model, 1), optimizer))
        model(torch.ones(1, 16))  # a step whose end was cut off is published
        after = found(model, optimizer)
        amp.restore()
        return before, after, raised.count

    def found(model: nn.Module, optimizer: Any) -> list[list[Tensor]]:
        pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
        return [[tensor.detach().clone() for tensor in pair] for pair in pairs]

    before, stepped, count = train(0)
    assert not any(map(same, before, stepped))
    for at in range(1, count, max(13, count // 12)):
        for reached, old, new in zip(train(at)[1], before, stepped, strict=True):
            assert same(reached, old) or same(reached, new), at


def test_small_parameters_are_stepped_in_one_call_and_large_ones_at_once(monkeypatch):
    stepped: list[list[int]] = []
    own = gradient_release.step_some
    monkeypatch.setattr(
        gradient_release,
        "step_some",
        lambda *args: stepped.append([param.numel() for _, param in args[2]]) or own(*args),
    )
    small = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model, optimizer = start(MAKERS["AdamW"], "O5", nn.Sequential(small, nn.Linear(16, 4096), nn.Linear(4096, 16)))
    for _ in range(2):
        stepped.clear()
        backward(model(torch.ones(2, 16)).square().mean(), optimizer)
        optimizer.step()
    assert stepped == [[16, 65536], [4096, 65536], [16, 256] * 4]


def test_gradients_of_another_optimizers_loss_and_of_a_backward_elsewhere_are_not_stepped():
    model, other = net(), nn.Linear(5, 5)
    optimizers = [OPTIM.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    amp.initialize([model, other], optimizers, opt_level="O4", gradient_release=True, verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    inputs = torch.randn(3, 16)
    with amp.scale_loss(other(model(inputs)).square().mean(), optimizers[1]) as loss:
        loss.backward()
    assert same(model.parameters(), before) and all(p.grad is None for p in other.parameters())
    optimizers[1].step()
    optimizers[0].zero_grad()
    model(inputs).square().mean().backward()
    assert same(model.parameters(), before), "outside of scale_loss"
    optimizers[0].step()
    assert not same(model.parameters(), before)


EDITS: dict[str, Any] = {
    "reversed": lambda groups: groups.reverse(),
    "moved": lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
    "taken out": lambda groups: groups[0]["params"].pop(0),
    "without a group": lambda groups: groups.pop(1),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_groups_that_the_script_has_edited_are_stepped_with_their_settings(level, edit):
    """A parameter that is in no group is not stepped, and its gradient stays, as in torch."""

    def train(**options: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        def make(params: Any) -> OPTIM.Optimizer:
            params = list(params)
            return OPTIM.SGD([{"params": params[::2], "lr": 0.5}, {"params": params[1::2], "lr": 0.125}])

        model, optimizer = start(make, level, **options)
        for step in range(3):
            if step == 1:
                optimizer.zero_grad()
                EDITS[edit](optimizer.param_groups)
            backward(loss_of(model, step), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found = [p.detach().clone() for p in model.parameters()]
        gradients = [raw(p) for p in model.parameters()]
        amp.restore()
        return found, gradients

    (released, gradients), (ordinary, wanted) = train(), train(gradient_release=False)
    assert same(released, ordinary)
    assert [grad is None for grad in gradients] == [grad is None for grad in wanted]
    assert same([g for g in gradients if g is not None], [g for g in wanted if g is not None])


def test_a_weight_of_two_checkpoints_is_stepped_once_with_the_whole_gradient():
    """With use_reentrant=False; the other kind is refused (test_gradient_release_refused.py)."""

    def train(**options: Any) -> list[Tensor]:
        model, optimizer = start(MAKERS["AdamW"], "O5", **options)
        for step in range(2):
            backward(loss_of(lambda x: twice_checkpointed(model, x, use_reentrant=False), step), optimizer)
            optimizer.step()
        return numbers(model, optimizer)

    assert same(train(), train(gradient_release=False))
