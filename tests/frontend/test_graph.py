"""amp.graph.Graph: a call equals an iteration of the eager loop; refusals name the cause."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from captured_steps import (
    LOW,
    F,
    Step,
    cleared_fixture,  # noqa: F401  the fixture `cleared`
    scaler_on,
)
from conftest import DEVICES
from torch import Tensor, nn
from training import LEVELS, SGD, backward, convnet, images, linear, same, train, weights

from amp_patch import amp
from amp_patch.graph import Graph


def batches(count: int, device: str, poisoned: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    """`count` batches; the gradients of a poisoned one are not finite."""
    drawn = [images(step, device) for step in range(count)]
    return [(x * torch.inf if step in poisoned else x, y) for step, (x, y) in enumerate(drawn)]


def numbers(tensors: list[Tensor]) -> list[Tensor]:
    """For comparison: a poisoned batch leaves NaN in its loss and in the batch norm's statistics."""
    return [tensor.nan_to_num(nan=-1.0) for tensor in tensors]


def eager(model: nn.Module, optimizer: Any, scaler: Any, dtype: torch.dtype, data: list[Any]) -> list[Tensor]:
    """The typical loop of torch's AMP tutorial."""
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        with amp.autocast(inputs.device.type, dtype=dtype):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_calls_are_iterations_of_the_eager_loop_to_the_bit(device, dtype):
    data = batches(8, device, poisoned=(4,))
    ours, theirs = convnet(device=device), convnet(device=device)
    scaler, eager_scaler = scaler_on(device), scaler_on(device)
    graph = Step(ours, SGD(ours.parameters()), scaler=scaler, dtype=dtype)
    losses = [graph(*batch) for batch in data]
    expected = eager(theirs, SGD(theirs.parameters()), eager_scaler, dtype, data)
    assert same(numbers(losses), numbers(expected))
    assert same(numbers(weights(ours)), numbers(weights(theirs)))
    # Grown by three clean steps, halved by the poisoned one, grown by three more.
    assert scaler.get_scale() == eager_scaler.get_scale() == 6000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_training_of_initialize_gives_its_own_losses(level, device):
    def training() -> Any:
        model = convnet(device=device)
        return amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0)

    model, optimizer = training()
    expected = train(model, optimizer, 6, lambda step: images(step, device))
    trained = weights(model)
    model, optimizer = training()
    graph = Step(model, optimizer)
    assert [graph(*images(step, device)).item() for step in range(6)] == expected
    assert same(weights(model), trained)


class Micro(Step):
    def build(self, inputs: Tensor, targets: Tensor, weight: float = 1.0) -> Any:
        outputs = self.model(inputs)
        loss = weight * F.cross_entropy(outputs, targets)
        loss.backward()
        return loss, outputs, weight


@pytest.mark.parametrize("form", ["native", "O2"])
def test_accumulation_takes_a_call_in_micro_batches(form):
    model, other = convnet(), convnet()
    optimizer, other_optimizer = SGD(model.parameters()), SGD(other.parameters())
    scalers = [scaler_on("cpu", init_scale=1024) for _ in range(2)] if form == "native" else [None, None]
    if form != "native":
        for pair in ((model, optimizer), (other, other_optimizer)):
            amp.initialize(*pair, opt_level=form, verbosity=0)
    graph = Micro(model, optimizer, scaler=scalers[0], steps=4, dtype=torch.float16 if scalers[0] else None)
    for step in range(3):
        inputs, targets = images(step)
        losses, outputs, weight = graph(inputs, targets, weight=0.25)
        expected = []
        for index, (x, y) in enumerate(zip(inputs.chunk(4), targets.chunk(4), strict=True)):
            if scalers[1] is None:
                loss = 0.25 * F.cross_entropy(other(x), y)
                backward(loss, other_optimizer, delay_overflow_check=index < 3)
            else:
                with amp.autocast(dtype=torch.float16):
                    loss = 0.25 * F.cross_entropy(other(x), y)
                scalers[1].scale(loss).backward()
            expected.append(loss.detach())
        if scalers[1] is None:
            other_optimizer.step()
        else:
            scalers[1].step(other_optimizer)
            scalers[1].update()
        other_optimizer.zero_grad()
        assert (tuple(losses.shape), tuple(outputs.shape), weight) == ((4,), (8, 5), 0.25)
        assert torch.equal(losses, torch.stack(expected))
    assert same(weights(model), weights(other))


@pytest.mark.parametrize("device", DEVICES)
def test_without_an_optimizer_it_infers(device):
    model = convnet(device=device).eval()

    class Infer(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.config.enable_amp(dtype=torch.bfloat16)
            self.config.compile(backend="eager")

        def build(self, batch: dict[str, Tensor]) -> tuple[Tensor, bool]:
            return self.model(batch["images"]), torch.is_grad_enabled()

    graph = Infer()
    inputs = images(0, device)[0]
    outputs, grad_enabled = graph({"images": inputs})
    with torch.no_grad(), amp.autocast(device, dtype=torch.bfloat16):
        assert same([outputs], [model(inputs)])
    assert outputs.dtype is torch.bfloat16
    assert not outputs.requires_grad and not grad_enabled and not graph.training
    assert not torch.is_inference(outputs), "it can be trained on"


def test_schedulers_step_with_each_call_skipped_or_not():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    graph = Step(model, optimizer, scaler=scaler_on("cpu"), dtype=torch.float16, lr_sch=schedule)
    rates = []
    for batch in batches(3, "cpu", poisoned=(0, 1)):
        graph(*batch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("form", ["plain", "scaler", "O2"])
def test_groups_are_clipped_by_their_unscaled_norm(form):
    # Before: gradient [3, 4] of norm 5, clipped to 1; the step is the clipped gradient.
    model = linear([[0.0, 0.0]])
    group = {"params": list(model.parameters()), "clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}
    optimizer = torch.optim.SGD([group], lr=1.0)
    if form == "O2":
        amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)

    class Sum(Step):
        def build(self, x: Tensor) -> Any:
            loss = self.model(x).float().sum()
            loss.backward()
            return loss

    graph = Sum(model, optimizer, scaler=scaler_on("cpu") if form == "scaler" else None, fullgraph=True)
    graph(torch.tensor([[3.0, 4.0]]))
    (stepped,) = amp.master_params(optimizer)
    torch.testing.assert_close(stepped.detach(), torch.tensor([[-0.6, -0.8]]), rtol=0, atol=1e-6)


# A cast model whose state dict was taken breaks the graph, to look for edits of it; the warning is as below.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("form", ["native", "O2"])
def test_a_saved_graph_goes_on_with_the_same_bits(form):
    def made() -> Step:
        model = convnet()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        if form == "O2":
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
            return Step(model, optimizer, lr_sch=schedule)
        return Step(model, optimizer, lr_sch=schedule, scaler=scaler_on("cpu"), dtype=torch.float16)

    data = batches(6, "cpu", poisoned=(1,))
    whole = made()
    for batch in data[:3]:
        whole(*batch)
    saved = io.BytesIO()
    torch.save(whole.state_dict(), saved)
    expected = [whole(*batch).item() for batch in data[3:]]
    resumed = made()
    saved.seek(0)
    resumed.load_state_dict(torch.load(saved))
    assert [resumed(*batch).item() for batch in data[3:]] == expected
    assert same(numbers(weights(resumed.model)), numbers(weights(whole.model)))


def test_load_state_dict_refuses_what_differs_before_it_writes():
    model = convnet()
    graph = Step(model, SGD(model.parameters()))
    before = weights(model)
    state = Step(convnet(seed=1)).state_dict()
    with pytest.raises(RuntimeError, match=r"missing \['graph\.optimizers'\], unexpected \[\]; strict=False"):
        graph.load_state_dict(state)
    assert same(weights(model), before)
    with pytest.raises(RuntimeError, match=r"graph\.optimizers has 0 states; wanted 1"):
        graph.load_state_dict({**state, "graph.optimizers": []})
    assert same(weights(model), before)
    graph.load_state_dict(state, strict=False)
    assert same(weights(model), weights(convnet(seed=1)))


def test_float16_without_a_scaler_is_warned_of():
    model = convnet()
    graph = Step(model, SGD(model.parameters()), dtype=torch.float16)
    with pytest.warns(UserWarning, match="trains in float16 without a grad scaler"):
        graph(*images(0))
