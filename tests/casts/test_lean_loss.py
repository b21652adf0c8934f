"""`cross_entropy` of low-precision logits: torch's FP32 numbers to the bit, and no FP32 copy of the logits is saved."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.casts import install, lean_loss

LOW = [torch.float16, torch.bfloat16]


def torchs(*args: Any, **kwargs: Any) -> Tensor:
    """Call torch's own function; one that a module holds by a name is replaced by the casts."""
    return inspect.unwrap(functional.cross_entropy)(*args, **kwargs)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that small logits have many."""
    monkeypatch.setattr(lean_loss, "SMALLEST", 1)
    monkeypatch.setattr(lean_loss, "BLOCK", 150)


@pytest.fixture
def patched() -> Iterator[Any]:
    install.install(install.ALONE)
    yield lambda *args, **kwargs: functional.cross_entropy(*args, **kwargs)


def same(found: Tensor, wanted: Tensor) -> bool:
    equal = torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)) and torch.equal(found.isnan(), wanted.isnan())
    return found.dtype is wanted.dtype and found.shape == wanted.shape and equal


def saved_types(loss: Any) -> tuple[Tensor, list[tuple[torch.dtype, int]]]:
    """Return `loss()`, and the types and sizes of the tensors that autograd has saved for it."""
    found: list[tuple[torch.dtype, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    return result, found


SHAPES: list[tuple[int, ...]] = [(37, 53), (300, 3), (3, 40, 130), (2, 5, 3, 4, 5), (9, 1), (1, 70)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", ["classes", "ignored", "all ignored", "probabilities", "low probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_are_torchs_in_fp32(
    patched: Any, shape: tuple[int, ...], reduction: str, targets: str, device: str
) -> None:
    classes, ignored = shape[1], shape[1] // 2 if targets == "ignored" else -100
    for seed, (smoothing, weighs, low) in enumerate((s, w, d) for s in (0.0, 0.1, 1.0) for w in (0, 1) for d in LOW):
        make = torch.Generator().manual_seed(seed)
        logits = (3 * torch.randn(shape, generator=make)).to(device, low)
        if seed % 3 == 0:
            logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
        target = torch.randint(classes, shape[:1] + shape[2:], generator=make)
        if "ignored" in targets:
            target[target % 3 == 0] = ignored
        if targets == "all ignored":
            target.fill_(ignored)
        if "probabilities" in targets:
            target = torch.rand(shape, generator=make).softmax(1).to(low if "low" in targets else torch.float32)
        target = target.to(device)
        weight = torch.rand(classes, generator=make).to(device) if weighs else None
        more: dict[str, Any] = {"weight": weight, "reduction": reduction, "ignore_index": ignored}
        mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
        wide = target.float() if target.is_floating_point() else target
        wanted = torchs(theirs.float(), wide, label_smoothing=smoothing, **more)
        found, saved = saved_types(lambda: patched(mine, target, label_smoothing=smoothing, **more))  # noqa: B023
        upstream = torch.rand(wanted.shape, generator=make).to(device) * 1024
        found.backward(upstream)
        wanted.backward(upstream)
        assert same(found, wanted), (smoothing, weighs, low)
        assert same(mine.grad, theirs.grad), (smoothing, weighs, low)  # type: ignore[arg-type]
        assert (low, logits.numel()) in saved, "it took torch's way"
        if target.shape != logits.shape and min(shape[:2]) > 1:
            assert (torch.float32, logits.numel()) not in saved


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("low", LOW)
def test_logits_that_are_not_finite(patched: Any, low: torch.dtype, value: float) -> None:
    logits, target = torch.randn(20, 30).to(low), torch.randint(30, (20,))
    logits[3, 4], logits[7] = value, value
    for smoothing in (0.0, 0.1):
        mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
        found = patched(mine, target, None, None, -100, None, "sum", smoothing)
        wanted = torchs(theirs.float(), target, reduction="sum", label_smoothing=smoothing)
        found.backward()
        wanted.backward()
        assert same(found, wanted)
        assert same(mine.grad, theirs.grad)  # type: ignore[arg-type]


def logits_and_target() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(20, 30).bfloat16(), torch.randint(30, (20,))


ODD: dict[str, Any] = {
    "a target out of range": lambda x, t: (x, t + 25),
    "a negative target": lambda x, t: (x, t - 25),
    "targets of another length": lambda x, t: (x, t[:-1]),
    "targets of int32": lambda x, t: (x, t.int()),
    "no targets": lambda x, t: (x,),
    "an argument too many": lambda x, t: (x, t, None, None, -100, None, "mean", 0.0, 1),
    "another reduction": lambda x, t: (x, t, None, None, -100, None, "most"),
    "too much smoothing": lambda x, t: (x, t, None, None, -100, None, "mean", 1.5),
    "an ignored index beside probabilities": lambda x, t: (x, x.float().softmax(1), None, None, 3),
    "weights of another length": lambda x, t: (x, t, torch.ones(29)),
    "integers in the shape of the logits": lambda x, t: (x, torch.zeros(20, 30, dtype=torch.long)),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_torch_refuses_raises_torchs_error(patched: Any, odd: str) -> None:
    given = ODD[odd](*logits_and_target())
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as wanted:
        torchs(*(each.float() if torch.is_tensor(each) and each.is_floating_point() else each for each in given))
    with pytest.raises(wanted.type) as found:
        patched(*given)
    assert str(found.value) == str(wanted.value)


SERVED_BY_TORCH: dict[str, Any] = {
    "one row without a batch": lambda x, t: (x[0], t[0]),
    "no rows": lambda x, t: (x[:0], t[:0]),
    "the older arguments": lambda x, t: (x, t, None, None, -100, False),
    "targets of uint8": lambda x, t: (x, t.byte()),
    "targets that learn": lambda x, t: (x, x.float().softmax(1).requires_grad_()),
    "FP64 probabilities": lambda x, t: (x, x.double().softmax(1)),
    "FP32 logits": lambda x, t: (x.float(), t),
}


@pytest.mark.parametrize("kind", SERVED_BY_TORCH)
def test_what_the_blocks_do_not_know_has_torchs_numbers(patched: Any, kind: str) -> None:
    given = SERVED_BY_TORCH[kind](*logits_and_target())
    wide = [each.float() if torch.is_tensor(each) and each.dtype in LOW else each for each in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the older arguments
        mine, theirs = patched(*given), torchs(*wide)
    assert same(mine, theirs)
    if given[1].requires_grad:
        assert same(*(torch.autograd.grad(each, given[1])[0] for each in (mine, theirs)))


def test_second_derivatives(patched: Any) -> None:
    logits, target = logits_and_target()
    results = []
    for call in (patched, lambda x, t: torchs(x.float(), t)):
        x = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(x, target), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), x)
        results.append((first, second))
    assert all(same(mine, theirs) for mine, theirs in zip(*results, strict=True))


def test_batched_gradients_and_a_graph_that_is_kept(patched: Any) -> None:
    logits, target = logits_and_target()
    x = logits.clone().requires_grad_()
    found = patched(x, target, reduction="none")
    wanted = torchs(x.float(), target, reduction="none")
    rows = torch.eye(20)
    mine, theirs = (
        torch.autograd.grad(each, x, rows, is_grads_batched=True, retain_graph=True)[0] for each in (found, wanted)
    )
    assert same(mine, theirs)
    for _ in range(2):
        (again,) = torch.autograd.grad(found, x, rows[3], retain_graph=True)
        assert same(again, theirs[3])


def test_function_transforms_and_forward_mode(patched: Any) -> None:
    logits, target = logits_and_target()
    mine, theirs = (
        torch.func.grad(lambda x, call=call: call(x, target))(logits)
        for call in (patched, lambda x, t: torchs(x.float(), t))
    )
    assert same(mine, theirs)
    many = torch.func.vmap(lambda x: patched(x, target))(torch.stack([logits, -logits]))
    assert many.dtype is torch.float32
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own use of torch.jit
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        both = patched(dual, target), torchs(dual.float(), target)
        tangents = [forward_ad.unpack_dual(each).tangent for each in both]
    assert same(*tangents)


def test_subclasses_modes_and_tensors_without_values_take_torchs_way(patched: Any) -> None:
    class Own(Tensor):
        pass

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    logits, target = logits_and_target()
    names: list[str] = []
    assert type(patched(logits.as_subclass(Own), target)) is Own
    with Calls():
        patched(logits, target)
    assert names == ["float", "cross_entropy"] or names[-1] == "cross_entropy"
    assert patched(logits.to("meta"), target.to("meta")).device.type == "meta"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of torch.jit
        traced = torch.jit.trace(patched, (logits, target), check_trace=False)
    assert same(traced(-logits, target), torchs(-logits.float(), target))


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(patched: Any, reentrant: bool) -> None:
    logits, target = logits_and_target()
    grads = []
    recomputed = functools.partial(checkpoint, patched, use_reentrant=reentrant)
    for call in (recomputed, lambda x, t: torchs(x.float(), t)):
        x = logits.clone().requires_grad_()
        call(x, target).backward()
        grads.append(x.grad)
    assert same(*grads)


def test_logits_written_between_loss_and_backward_are_an_error(patched: Any) -> None:
    logits, target = logits_and_target()
    x = logits.requires_grad_() * 1
    loss = patched(x, target)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------------------------------------------------------
# Levels


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 30, bias=False)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> tuple[Tensor, Any]:
        logits = self.head(hidden)
        return logits, None if target is None else self.loss(logits, target)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5", "O6", "O7"])
@pytest.mark.parametrize("inside", [True, False])
def test_each_level_gives_the_fp32_loss_of_its_logits(wrappers: str, level: str, inside: bool) -> None:
    torch.manual_seed(0)
    model = Head()
    low = torch.float16 if level in ("O1", "O2", "O3") else torch.bfloat16
    outputs = {} if level in ("O1", "O4", "O6") or inside else {"cast_model_outputs": low}
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=4.0, verbosity=0, **outputs
    )
    hidden, target = torch.randn(20, 4), torch.randint(30, (20,))

    def call() -> Any:
        logits, loss = model(hidden, target if inside else None)
        return logits, loss if inside else nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target)

    (logits, loss), saved = saved_types(call)
    assert (low, logits.numel()) in saved
    assert (torch.float32, logits.numel()) not in saved
    assert same(loss, torchs(logits.float(), target, label_smoothing=0.1))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    z = logits.detach().float().requires_grad_()
    (gradient,) = torch.autograd.grad(4 * torchs(z, target, label_smoothing=0.1), z)
    wanted = gradient.to(low).float().T @ hidden.to(low).float() / 4
    error = 0.1 if level in ("O6", "O7") else 0.01  # products in FP8
    assert (model.head.weight.grad.float() - wanted).norm() <= error * wanted.norm()


def test_who_asks_for_low_precision_gets_it(patched: Any) -> None:
    logits, target = logits_and_target()
    with amp.disable_casts():
        assert functional.cross_entropy(logits, target).dtype is torch.bfloat16
    assert functional.cross_entropy(logits, target).dtype is torch.float32


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_compiled_it_is_one_graph(level: str, fresh_compiler: None) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    model, _ = amp.initialize(Head(), torch.optim.SGD(Head().parameters(), lr=0.1), opt_level=level, verbosity=0)
    hidden, target = torch.randn(20, 4), torch.randint(30, (20,))
    _, wanted = model(hidden, target)
    _, found = torch.compile(model, backend=backend, fullgraph=True)(hidden, target)
    assert len(graphs) == 1
    assert same(found, wanted)
