"""FP32 copies of low-precision logits, as models and scripts make them: a loss of the copy saves no second one."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from torch.nn import functional
from training import SGD

from amp_patch import amp
from amp_patch.casts import lean_loss, sources

torchs = functional.cross_entropy  # torch's own function, which no training replaces here
ROWS, CLASSES = 12, 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Upcasts of small logits are noted, and blocks have a few rows."""
    for module in (lean_loss, sources):
        monkeypatch.setattr(module, "SMALLEST", 1)
    monkeypatch.setattr(lean_loss, "BLOCK", 150)
    yield
    gc.collect()
    assert not sources._notes


class Model(nn.Module):
    def __init__(self, inside: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.inside = nn.Linear(4, CLASSES), inside

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.head(x)
        return logits if self.inside is None else self.inside(logits, target)


WAYS = {  # (what the model returns, the loss of it)
    "a tensor": (None, lambda y, t: functional.cross_entropy(y, t)),
    "flattened": (None, lambda y, t: functional.cross_entropy(y.float().view(-1, CLASSES), t)),
    "a dict": (lambda y, t: {"logits": y}, lambda y, t: functional.cross_entropy(y["logits"], t)),
}


def batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[3] = -100
    return torch.randn(ROWS, 4, generator=generator).to(device), target.to(device)


def large_types(loss: Callable[[], Tensor]) -> tuple[Tensor, set[torch.dtype]]:
    """Return `loss()`, and the types in which it saves the logits."""
    found = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == ROWS * CLASSES:
            found.add((tensor.dtype, tensor.data_ptr()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    assert len(found) == 1
    return result, {dtype for dtype, _ in found}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_loss_and_the_gradient_are_torch_s_to_the_bit(level, way, device):
    inside, outside = WAYS[way]
    x, target = batch(device)
    model = Model(inside).to(device)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=1.0)
    loss, saved = large_types(lambda: outside(model(x, target), target))
    low = torch.float16 if level == "O2" else torch.bfloat16
    assert saved == {torch.float32}, "the low-precision logits are freed, so that their FP32 copy is saved"
    weight, bias = (p.detach().to(low).requires_grad_() for p in (model.head.weight, model.head.bias))
    expected = torchs(functional.linear(x.to(low), weight, bias).float(), target)
    expected.backward()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(model.head.bias.grad.to(low), bias.grad) and torch.equal(
        model.head.weight.grad.to(low), weight.grad
    )


def returned(level: str = "O5") -> tuple[Model, Tensor, Tensor]:
    x, target = batch("cpu")
    model = amp.initialize(Model(), opt_level=level)
    return model, model(x, target).float(), target


def gradient_of(logits: Tensor, target: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    torchs(leaf, target).backward()
    return leaf.grad


def test_a_hook_before_or_after_the_loss_gets_the_fp32_gradient():
    for before in (True, False):
        _, logits, target = returned()
        seen: list[Tensor] = []
        loss = None if before else functional.cross_entropy(logits, target)
        logits.register_hook(seen.append)
        logits.retain_grad()
        loss = functional.cross_entropy(logits, target) if loss is None else loss
        loss.backward()
        assert torch.equal(seen[0], gradient_of(logits, target)) and torch.equal(logits.grad, seen[0])


def test_gradients_that_are_asked_for_by_tensor():
    model, logits, target = returned()
    loss = functional.cross_entropy(logits, target)
    weight = model.head.weight
    asked = torch.autograd.grad(loss, [logits, weight], retain_graph=True)
    assert torch.equal(asked[0], gradient_of(logits, target))
    (alone,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    loss.backward()
    assert torch.equal(alone, asked[1]) and torch.equal(weight.grad, asked[1])
    model, logits, target = returned()
    (first,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits, create_graph=True)
    first.square().sum().backward()
    assert model.head.weight.grad.any()


def written(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits.mul_(3)
    return logits


def written_view(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits[:, 0] = -9
    return logits.view(-1, CLASSES)


@pytest.mark.parametrize(
    "edit", [written, written_view, lambda y: y * 3, lambda y: y.detach().requires_grad_(), lambda y: y.flip(1)]
)
def test_logits_that_were_changed_are_no_upcasts_any_more(edit):
    _, logits, target = returned()
    logits = edit(logits)
    loss = functional.cross_entropy(logits, target)
    assert torch.equal(loss, torchs(logits, target))
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.equal(found, gradient_of(logits, target))


def test_views_in_another_order_are_not_taken_for_the_logits():
    x, _ = batch("cpu")
    model = amp.initialize(Model(), opt_level="O5")
    logits = model(x, None)
    turned = logits.T
    target = torch.arange(CLASSES) % ROWS
    loss = functional.cross_entropy(turned, target)
    assert torch.equal(loss, torchs(turned, target))
    assert torch.equal(torch.autograd.grad(loss, turned)[0], gradient_of(turned, target))


def test_returned_logits_can_be_saved_and_hold_no_low_precision_tensor():
    _, logits, _ = returned()
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), logits)
    note = sources._notes[id(logits)]
    assert note.low() is None and note.place is not None and note.place.untyped_storage().nbytes() == 2


def test_outputs_in_containers_are_freed_without_a_garbage_collection():
    x, target = batch("cpu")
    model = amp.initialize(Model(lambda logits, _: (logits.sum(), logits)), opt_level="O5")
    gc.disable()
    try:
        model(x, target)
        assert not sources._notes
    finally:
        gc.enable()
