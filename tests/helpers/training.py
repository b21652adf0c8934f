"""Small models and loops that the tests share."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.policy import OPT_LEVELS
from amp_patch.training.innermost import innermost
from amp_patch.watch.questions import count_skips, last_skip

# The levels of 16 bits and FP32: levels whose products have no format of fewer bits.
LEVELS = tuple(level for level, policy in OPT_LEVELS.items() if policy.product_format is None)

SGD = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
ADAM = lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4)  # noqa: E731  eps that FP16 can hold, for O3
ADAMW = lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1)  # noqa: E731


class ConvNet(nn.Module):
    """Two convolutions with a batch norm, and a linear head: each kind of layer that a level treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(36, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1))

    @staticmethod
    def classes() -> int:
        return 5

    def encode(self, images: Tensor) -> Tensor:
        return self.body(images).flatten(1)


def convnet(seed: int = 0, device: str = "cpu") -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet().to(device)


def images(step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the batch of a step: eight 8x8 images and their classes."""
    generator = torch.Generator().manual_seed(1000 + step)
    return (
        torch.randn(8, 1, 8, 8, generator=generator).to(device),
        torch.randint(5, (8,), generator=generator).to(device),
    )


def linear(weight: list[list[float]], device: str = "cpu") -> nn.Linear:
    """Return a linear layer without bias with the given weight, so that a test knows every gradient."""
    value = torch.tensor(weight)
    layer = nn.Linear(value.shape[1], value.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(value)
    return layer.to(device)


def mm_dtype() -> torch.dtype:
    """Return the type of a product of two new FP32 tensors at this point of the code."""
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int | range,
    batch: Callable[[int], tuple[Tensor, Tensor]] = images,
) -> list[float]:
    """Train by the loop of the README; return the loss of each step."""

    def loss_of(step: int) -> Tensor:
        inputs, targets = batch(step)
        return nn.functional.cross_entropy(model(inputs), targets)

    return iterate(optimizer, loss_of, range(steps) if isinstance(steps, int) else steps)


def iterate(optimizer: torch.optim.Optimizer, loss_of: Callable[[int], Tensor], steps: Iterable[int]) -> list[float]:
    """Make a step on the loss of each number; return the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(step)
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's parameters and buffers."""
    return [tensor.detach().clone() for tensor in model.state_dict(keep_vars=False).values()]


def masters_of(optimizer: Any) -> list[Tensor]:
    """Return copies of the tensors that the step updates: masters, and parameters without a master."""
    return [param.detach().clone() for param in amp.master_params(optimizer)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Tell whether all tensors are equal to the bit, dtypes included."""
    left, right = list(left), list(right)
    return len(left) == len(right) and all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def backward(loss: Tensor, optimizer: torch.optim.Optimizer, **kwargs: object) -> None:
    """Run `scaled_loss.backward()` in the body of `scale_loss`."""
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:  # type: ignore[arg-type]
        scaled_loss.backward()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return copies of all that a step changes: weights, masters, the optimizer's state and its groups."""
    masters = list(amp.master_params(optimizer))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return (
        [p.detach().clone() for p in (*model.parameters(), *masters)],
        copy.deepcopy([dict(optimizer.state[p]) for p in masters]),
        copy.deepcopy(groups),
    )


def assert_unchanged(before: Any, after: Any) -> None:
    """Assert that two snapshots, or parts of them, have the same bits."""
    assert type(before) is type(after)
    if isinstance(before, Tensor):
        assert before.dtype is after.dtype and torch.equal(before, after), (before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert_unchanged(value, after[key])
    elif isinstance(before, (list, tuple, deque)):
        assert len(before) == len(after)
        for value, other in zip(before, after, strict=True):
            assert_unchanged(value, other)
    elif type(before).__eq__ is object.__eq__ and hasattr(before, "__dict__"):
        assert_unchanged(vars(before), vars(after))
    else:
        assert before == after


def skipped(optimizer: Any) -> bool:
    """Tell whether the optimizer's last step, or that of the one inside of it, was skipped. Syncs."""
    count_skips(inner := innermost(optimizer))
    return bool(last_skip(inner))


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


DUPLICATES = [copy.deepcopy, through_pickle, through_torch]


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(actual: Any, expected: Any, name: str = "") -> None:
    """Assert equal types and bits, signs of zeros included. Any two NaNs are equal."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        assert actual.dtype is expected.dtype, (name, actual.dtype, expected.dtype)
        if not torch.equal(_bits(actual), _bits(expected)):
            same = (_bits(actual) == _bits(expected)) | (actual.isnan() & expected.isnan())
            assert same.all(), (name, actual, expected)
    else:
        assert type(actual) is type(expected) and actual == expected, (name, actual, expected)


def check_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, value in actual.items():
        check(value, expected[name], name)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def exact(actual: object, expected: object) -> None:
    """The same numbers and types; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def run_in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, called on a new thread."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(function()))
    thread.start()
    thread.join()
    return box[0]
