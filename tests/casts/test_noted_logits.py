"""FP32 copies of low-precision logits, as models and scripts make them: a loss of the copy saves no second one."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import SGD

from amp_patch import amp, multi_tensor
from amp_patch.casts import lean_loss


def torchs(*args: Any, **kwargs: Any) -> Tensor:
    """Call torch's own function; one that a module holds by a name is replaced by the casts."""
    return inspect.unwrap(functional.cross_entropy)(*args, **kwargs)


ROWS, CLASSES = 12, 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits are served, and blocks have a few rows."""
    monkeypatch.setattr(lean_loss, "SMALLEST", 1)
    monkeypatch.setattr(lean_loss, "BLOCK", 150)


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


# ---------------------------------------------------------------------------------------------------------------------
# Copies that scripts make


def hooked(tensor: Tensor) -> Tensor:
    tensor.register_hook(lambda grad: grad * 3)
    return tensor


def penalty(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean() / 64


def edited(logits: Tensor) -> Tensor:
    logits.data.mul_(1.01)  # no counter of writes sees it
    return logits


Loss = Callable[[Tensor, Tensor], Tensor]
UPCASTS: dict[str, tuple[Callable[[Tensor, Tensor, Loss], Tensor], bool]] = {  # -> (script, goes around the cast)
    "float": (lambda y, t, loss: loss(y.float().view(-1, CLASSES), t.flatten()), True),
    "to": (lambda y, t, loss: loss(y.to(dtype=torch.float32).flatten(0, 1), t.flatten()), True),
    "type": (lambda y, t, loss: loss(y.type(torch.float32).reshape(-1, CLASSES), t.flatten()), True),
    "type_as": (
        lambda y, t, loss: loss(y.type_as(t[0, :1].float()).view(-1, CLASSES), t.flatten()),
        True,
    ),
    "shifted": (
        lambda y, t, loss: loss(y.float()[..., :-1, :].contiguous().view(-1, CLASSES), t[:, 1:].flatten()),
        True,
    ),
    "slices": (
        lambda y, t, loss: loss(y.float()[1:, ::2, 3:].reshape(-1, CLASSES - 3), t[1:, ::2].flatten() - 3),
        True,
    ),
    "transposed": (lambda y, t, loss: loss(y.float().transpose(1, 2), t), True),
    "four dimensions": (lambda y, t, loss: loss(y.float().transpose(1, 2).unsqueeze(3), t.unsqueeze(2)), True),
    "a write by autograd": (lambda y, t, loss: loss(y.float().mul_(1.5).view(-1, CLASSES), t.flatten()), False),
    "a write beside autograd": (lambda y, t, loss: loss(edited(y.float()).view(-1, CLASSES), t.flatten()), True),
    "a hook": (lambda y, t, loss: loss(hooked(y.float()).view(-1, CLASSES), t.flatten()), False),
    "a hook between": (lambda y, t, loss: loss(hooked(y.float()[:, :-1]).flatten(0, 1), t[:, 1:].flatten()), False),
    "two losses": (lambda y, t, loss: twice(y.float().view(-1, CLASSES), t.flatten(), loss), False),
    "a penalty": (lambda y, t, loss: penalized(y.float(), t, loss), False),
    "two casts": (lambda y, t, loss: loss(y.float().flatten(0, 1), t.flatten()) + penalty(y.float()), True),
    "two types": (lambda y, t, loss: loss(y.double().float().flatten(0, 1), t.flatten()), False),
}


def twice(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    return loss(logits, target) + loss(logits, target.roll(1)) * 0.3


def penalized(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    return loss(logits.view(-1, CLASSES), target.flatten()) + penalty(logits)


class Trunk(nn.Module):
    def __init__(self, script: Callable[[Tensor, Tensor, Loss], Tensor] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.script = nn.Linear(4, CLASSES), script

    def forward(self, x: Tensor, target: Tensor, loss: Loss) -> Tensor:
        logits = self.head(x)
        return logits if self.script is None else self.script(logits, target, loss)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", UPCASTS)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_script_s_own_copy_has_torch_s_gradient_to_the_bit(wrappers, level, inside, script, device, monkeypatch):
    call, goes_around = UPCASTS[script]
    went: list[bool] = []
    if (extension := multi_tensor.extension()) is not None:
        tells = extension.Upcast.is_alone
        monkeypatch.setattr(extension.Upcast, "is_alone", lambda self: went.append(tells(self)) or went[-1])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, 4, generator=generator).to(device)
    target = torch.randint(3, CLASSES, (3, 8), generator=generator).to(device)
    low = torch.float16 if level in ("O1", "O2") else torch.bfloat16
    model = Trunk(call if inside else None).to(device)
    outputs = {} if inside or level in ("O1", "O4") else {"cast_model_outputs": low}
    model, _ = amp.initialize(model, SGD(model.parameters()), opt_level=level, **outputs)
    found = []
    for loss in (torchs, lambda y, t: functional.cross_entropy(y, t)):
        made = model(x, target, loss)
        made = made if inside else call(made, target, loss)
        made.backward()
        found.append((made.detach(), *[p.grad for p in model.parameters()]))
        model.zero_grad()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    if extension is not None:
        assert any(went) is goes_around


# ---------------------------------------------------------------------------------------------------------------------
# What autograd saves, and the memory of the gradient


in_cpp = pytest.mark.skipif(multi_tensor.extension() is None, reason="plain torch saves the logits themselves")


HELD: dict[
    str, tuple[Callable[[Tensor], Any], bool]
] = {  # what user code holds -> whether the gradient is written there
    "nothing": (lambda y: None, True),
    "a weak reference": (weakref.ref, True),
    "the logits": (lambda y: y, False),
    "a view": (lambda y: y[:, :1], False),
    "a detached tensor": (lambda y: y.detach(), False),
    "the memory": (lambda y: y.untyped_storage(), False),
    "a function's saved tensor": (lambda y: y.sigmoid().square().sum() + y.square().sum(), False),
}


@in_cpp
@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (3, CLASSES, 4), (2, CLASSES, 2, 3)])
def test_the_gradient_is_written_over_logits_that_nobody_can_read(kind, shape):
    amp.initialize(nn.Linear(1, 1), opt_level="O4")
    hold, is_written = HELD[kind]
    low = torch.randn(shape).bfloat16()
    target = torch.randint(CLASSES, low[:, 0].shape)
    leaf = low.clone().requires_grad_()
    wide = low.float().requires_grad_()
    torchs(wide, target).backward()
    logits = leaf * 1
    grads: list[Tensor] = []
    logits.register_hook(grads.append)
    address, held = logits.data_ptr(), hold(logits)
    loss = functional.cross_entropy(logits, target)
    del logits
    loss.backward()
    assert (grads[0].data_ptr() == address) is is_written
    assert torch.equal(leaf.grad, wide.grad.bfloat16())
    if isinstance(held, Tensor) and held.shape == low.shape:
        assert torch.equal(held, low)


def saved_by(loss: Tensor, size: int) -> list[Tensor]:
    """Return the tensors of `size` elements that the terms of `loss` have saved."""
    node: Any = loss.grad_fn
    while "Terms" not in node.name():
        node = node.next_functions[0][0]
    return [tensor for tensor in node.saved_tensors if tensor is not None and tensor.numel() == size]


@pytest.mark.parametrize("is_copy", [False, pytest.param(True, marks=in_cpp)])
@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (3, CLASSES, 4), (2, CLASSES, 2, 3)])
def test_what_saved_tensors_and_hooks_have_shown_stays_as_it_is(shape, is_copy):
    amp.initialize(nn.Linear(1, 1), opt_level="O4")
    low, target = torch.randn(shape).bfloat16(), torch.randint(CLASSES, (shape[0], *shape[2:]))
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    wide = low.float().requires_grad_()
    torchs(wide, target).backward()
    for context in (contextlib.nullcontext(), hooks):
        leaf = low.clone().requires_grad_()
        logits = leaf * 1
        with context:
            loss = functional.cross_entropy(logits.float() if is_copy else logits, target)
        del logits
        seen = saved_by(loss, low.numel())[0]
        found = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2)]
        loss.backward()
        assert all(torch.equal(grad, wide.grad.bfloat16()) for grad in (*found, leaf.grad))
        assert torch.equal(seen.reshape(shape).bfloat16(), low)
    assert any(torch.equal(tensor.reshape(shape).bfloat16(), low) for tensor in kept if tensor.numel() == low.numel())


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_a_gradient_that_the_backward_is_given_for_the_fp32_logits_is_added_before_the_rounding(level):
    x, target = batch("cpu")
    model = amp.initialize(Model(), opt_level=level)
    for given in (lambda y: y, lambda y: y[1:]):
        found = []
        for call in (functional.cross_entropy, torchs):
            wide = model(x, None).float()
            seen = given(wide)
            loss = call(wide[:, 1:].mT.contiguous().mT, target % 7)
            torch.autograd.backward([loss, seen], [None, torch.full_like(seen, 1 / 3)])
            found.append([p.grad for p in model.parameters()])
            model.zero_grad()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("again", [False, True])
def test_low_precision_logits_whose_memory_was_freed_are_not_saved(again):
    amp.initialize(nn.Linear(1, 1), opt_level="O4")
    leaf, target = torch.randn(ROWS, CLASSES).bfloat16().requires_grad_(), torch.arange(ROWS)
    logits = leaf * 1
    wide = logits.float()
    expected = torchs(wide.detach(), target)
    logits.untyped_storage().resize_(0)
    if again:
        logits.untyped_storage().resize_(2 * ROWS * CLASSES)  # with other values
    loss = functional.cross_entropy(wide, target)
    loss.backward()
    assert torch.equal(loss, expected) and leaf.grad.any()


@in_cpp
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_the_low_precision_logits_are_saved_while_user_code_holds_them(level, inside):
    x, target = batch("cpu")
    held: list[Tensor] = []

    def script(logits: Tensor, target: Tensor) -> Tensor:
        held.append(logits)
        return functional.cross_entropy(logits.float()[1:].view(-1, CLASSES), target[1:])

    model = amp.initialize(Model(script if inside else None), opt_level=level)
    loss = model(x, target) if inside else script(model(x, target), target)
    assert [tensor.dtype for tensor in saved_by(loss, (ROWS - 1) * CLASSES)] == [held[0].dtype]
    wide = held[0].detach().float().requires_grad_()
    torchs(wide[1:], target[1:]).backward()
    (found,) = torch.autograd.grad(loss, held[0], retain_graph=True)
    assert torch.equal(found, wide.grad.to(found.dtype))
    loss = functional.cross_entropy(held[0].float(), target)
    with torch.no_grad():
        held[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def edited_low(y: Tensor) -> Tensor:
    wide = y.float()
    y.data.mul_(2)
    return wide


@pytest.mark.parametrize(
    "copy", [lambda y: edited(y.float()), edited_low, lambda y: y.float(), lambda y: y.float()[1:]]
)
def test_second_derivatives_and_writes_by_way_of_data_beside_low_precision_logits(copy):
    amp.initialize(nn.Linear(1, 1), opt_level="O4")
    results = []
    for call in (functional.cross_entropy, torchs):
        torch.manual_seed(0)
        leaf = torch.randn(ROWS, CLASSES).bfloat16().requires_grad_()
        logits = leaf * 1
        wide = copy(logits)
        loss = call(wide, torch.arange(len(wide)))
        (first,) = torch.autograd.grad(loss, wide, retain_graph=True, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), wide, retain_graph=True)
        loss.backward()
        results.append((loss, first, second, leaf.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_view_by_negative_dimensions_and_without_bounds_is_found_in_the_graph(level):
    x, _ = batch("cpu")
    for view in (
        lambda y: y.transpose(-1, -2),
        lambda y: y.narrow(-1, 0, 12).mT,
        lambda y: torch.ops.aten.slice(y.mT, -2),
        lambda y: y.T,
    ):
        model, found = amp.initialize(Model(), opt_level=level), []
        for call in (functional.cross_entropy, torchs):
            logits = view(model(x, None))
            loss = call(logits, torch.arange(logits.shape[0]) % logits.shape[1])
            loss.backward()
            found.append((loss, model.head.weight.grad))
            model.zero_grad()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_checkpoint_saves_the_same_types_when_it_computes_again(level, reentrant):
    x, target = batch("cpu")
    model = amp.initialize(Model(), opt_level=level)
    kept = model(x, target)
    loss = checkpoint(functional.cross_entropy, kept.float(), target, use_reentrant=reentrant)
    truth = torchs(kept.detach().float(), target)
    del kept
    loss.backward()
    assert torch.equal(loss, truth) and model.head.weight.grad.any()
