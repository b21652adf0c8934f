"""Results of modules that stay FP32: what a cast model returns of them, and what the layers after them get."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from low_models import CAST
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import SGD, backward

from amp_patch import amp
from amp_patch.support import tree

RUNGS = [*CAST, "O5+split"]


class Headed(nn.Module):
    """A model that returns `how(head, hidden)`. It stores the hidden states: with them the FP32 result is known."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.how = nn.Linear(4, 8), nn.Linear(8, 16), how

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.body(x)
        return self.how(self.head, self.hidden)

    def logits(self) -> Tensor:
        return nn.functional.linear(self.hidden.detach().float(), self.head.weight.detach(), self.head.bias.detach())


def headed(how: Any, level: str = "O5", device: str = "cpu", **options: Any) -> tuple[Headed, Any]:
    model = Headed(how).to(device)
    optimizer = SGD(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, keep_fp32="head", **options)


def batch(device: str = "cpu") -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(device)


@dataclass
class Output:
    logits: Any
    count: int = 3


OUTPUTS = {
    "tensor": (lambda y: y, lambda y: y),
    "tuple": (lambda y: (3, y), lambda y: y),
    "dict": (lambda y: {"logits": [y]}, lambda y: y),
    "dataclass": (lambda y: Output(y), lambda y: y),
    "slice": (lambda y: y[-1:], lambda y: y[-1:]),
    "copied slice": (lambda y: y[:, :-1].contiguous(), lambda y: y[:, :-1]),
    "view": (lambda y: y[1:].view(-1), lambda y: y[1:].reshape(-1)),
    "halves": (lambda y: y.chunk(2, -1)[1], lambda y: y[:, 8:]),
    "transposed": (lambda y: y.T, lambda y: y.T),
    "upcast": (lambda y: y.float(), lambda y: y),
    "upcast view": (lambda y: y.view(-1).to(dtype=torch.float32), lambda y: y.reshape(-1)),
    "upcast scaled": (lambda y: y.to("cpu" if y.device.type == "cpu" else "cuda", torch.float32) * 2, lambda y: y * 2),
}


@crossed({"level": RUNGS, "output": OUTPUTS, "device": DEVICES})
def test_a_result_that_reaches_the_output_is_returned_in_fp32(level, output, device):
    wrapped, expected = output
    model, optimizer = headed(lambda head, x: wrapped(head(x)), level, device)
    returned = model(batch(device))
    (logits,) = tree.tensors(returned)
    assert type(logits) is Tensor and torch.equal(logits, expected(model.logits()))
    reference = Headed(None).to(device)
    hidden = model.hidden.detach().float()
    expected(reference.head(hidden)).square().sum().backward()
    backward(logits.square().sum(), optimizer)
    torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad, rtol=1e-6, atol=1e-6)
    assert model.body.weight.grad is not None


def test_one_result_at_two_places_stays_one_tensor():
    model, _ = headed(lambda head, x: [y := head(x), y])
    first, second = model(batch())
    assert first is second


@pytest.mark.parametrize("outputs", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_has_the_type_that_cast_model_outputs_asks_for(outputs):
    model, _ = headed(lambda head, x: head(x), cast_model_outputs=outputs)
    logits = model(batch())
    exact = model.logits()
    expected = exact.to(outputs) if outputs.itemsize > 2 else exact.bfloat16().to(outputs)
    assert type(logits) is Tensor and torch.equal(logits, expected)


def edited(head: nn.Module, x: Tensor) -> Tensor:
    y = head(x)
    y[:, 0] = 3
    return y


def edited_view(head: nn.Module, x: Tensor) -> Tensor:
    y = head(x)
    y[0].unsqueeze(0).mul_(2)
    return y


def edited_data(head: nn.Module, x: Tensor) -> Tensor:
    y = head(x)
    y.data.mul_(2)
    return y


def edited_copy(head: nn.Module, x: Tensor) -> Tensor:
    y = head(x)
    y.float().mul_(0)
    return y


def edited_second(head: nn.Module, x: Tensor) -> Tensor:
    y = head(x)
    first, second = y.float(), y.float()
    first.mul_(0)
    return second


def _first_is_3(y: Tensor) -> Tensor:
    y[:, 0] = 3
    return y


def _first_row_doubled(y: Tensor) -> Tensor:
    y[0] *= 2
    return y


EDITS = {
    "item": (edited, _first_is_3),
    "view": (edited_view, _first_row_doubled),
    "data": (edited_data, lambda y: y * 2),
    "upcast": (edited_copy, lambda y: y),
    "one of two upcasts": (edited_second, lambda y: y),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("edit", EDITS)
def test_a_write_into_the_result_is_returned(edit, mode):
    how, expected = EDITS[edit]
    model, _ = headed(how)
    with mode():
        logits = model(batch())
        rounded = expected(model.logits().bfloat16()).float()
        torch.testing.assert_close(logits, rounded, rtol=2**-8, atol=0)
        if edit in ("item", "view", "data"):
            assert torch.equal(logits, rounded)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_hooks_and_gradients_of_the_result_are_those_of_the_fp32_tensor(level):
    seen, results = [], []

    def how(head, x):
        y = head(x)
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(grad.clone()))
        results.append(y)
        return y

    model, _ = headed(how, level)
    (model(batch()) * 3).sum().backward()
    assert torch.equal(seen[0], torch.full((6, 16), 3.0)) and torch.equal(results[0].grad, seen[0])


def test_a_hook_of_the_module_s_backward_still_runs():
    seen = []
    model, _ = headed(lambda head, x: head(x))
    model.head.register_full_backward_hook(lambda module, given, got: seen.append(got[0]))
    logits = model(batch())
    logits.sum().backward()
    assert len(seen) == 1 and torch.equal(logits, model.logits().bfloat16().float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_head_trains(reentrant):
    model, _ = headed(lambda head, x: checkpoint(head, x, use_reentrant=reentrant))
    logits = model(batch())
    exact = model.logits()
    assert torch.equal(logits, exact.bfloat16().float() if reentrant else exact)
    logits.sum().backward()
    assert torch.equal(model.head.bias.grad, torch.full((16,), 6.0)) and model.body.weight.grad.any()


class Middle(nn.Module):
    """A layer norm in the middle, whose FP32 result is looked at after the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.leave(self.norm(self.enter(x)))
        self.freed = self.fp32() is None
        return x


def test_in_the_middle_of_a_model_the_fp32_result_is_freed_after_the_next_layer(monkeypatch):
    model = amp.initialize(Middle(), opt_level="O5", keep_fp32="norm")
    original = nn.functional.layer_norm

    def layer_norm(*args, **kwargs):
        result = original(*args, **kwargs)
        model.fp32 = weakref.ref(result)
        return result

    monkeypatch.setattr(nn.functional, "layer_norm", layer_norm)
    output = model(batch())
    assert output.requires_grad and model.freed


def test_kept_modules_in_a_row_pass_fp32_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model = amp.initialize(model, opt_level="O5", keep_fp32=["1", "2"])
    hidden = model[0](batch().bfloat16()).float()
    expected = nn.functional.linear(nn.functional.layer_norm(hidden, (4,)), model[2].weight, model[2].bias)
    assert torch.equal(model(batch()), expected)


def test_an_inner_model_s_result_reaches_the_outer_model_s_output():
    inner = Headed(lambda head, x: head(x))
    outer = nn.Sequential(nn.Linear(4, 4), inner)
    (outer, inner), _ = amp.initialize([outer, inner], SGD(outer.parameters()), opt_level="O5", keep_fp32=[inner.head])
    assert torch.equal(outer(batch()), inner.logits())


def test_copies_and_pickles_of_a_model_that_stores_its_result():
    def how(head, x):
        head.last = head(x)
        return head.last

    model, _ = headed(how)
    with torch.no_grad():
        model(batch())
    copied = copy.deepcopy(model)
    assert type(copied.head.last) is Tensor and copied.head.last.dtype is torch.bfloat16
    assert torch.equal(copied(batch()), copied.logits())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own look
@pytest.mark.parametrize("part", ["model", "head", "body"])
@pytest.mark.parametrize("output", ["tensor", "tuple", "slice", "view", "upcast"])
def test_compiled_forwards_return_fp32_too(output, part):
    wrapped, expected = OUTPUTS[output]
    model, optimizer = headed(lambda head, x: wrapped(head(x)))
    inner = model if part == "model" else getattr(model, part)
    inner.compile(backend="aot_eager", fullgraph=part == "model")
    (logits,) = tree.tensors(model(batch()))
    assert type(logits) is Tensor and torch.equal(logits, expected(model.logits()))
    backward(logits.square().sum(), optimizer)
    assert model.head.weight.grad.any() and model.body.weight.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["item", "view"])
def test_compiled_forwards_return_what_was_written(edit):
    how, expected = EDITS[edit]
    model, _ = headed(how)
    logits = torch.compile(model, backend="aot_eager")(batch())
    assert torch.equal(logits, expected(model.logits().bfloat16()).float())
