"""What `load_state_dict` puts into models with children: all bits of the checkpoint, in masters and weights."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from crossed import crossed
from split_masters import high_half
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from training import iterate, same

from amp_patch import amp

LEVELS = {
    **{level: {"opt_level": level} for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O2 in bfloat16, split": {"opt_level": "O2", "dtype": torch.bfloat16, "master_weights": "split"},
}


def parent_loads(model: nn.Module, state: dict[str, Any]) -> None:
    nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": value for name, value in state.items()})


WAYS = {
    "load_state_dict": lambda model, state: model.load_state_dict(state),
    "of a parent": parent_loads,
    "set_model_state_dict": set_model_state_dict,
    "set_model_state_dict, full": lambda model, state: set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True)
    ),
}
every_way = pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)


class Tower(nn.Module):
    """2 million parameters: its own, those of children and theirs, with batch norms, and one that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(256) / 16 + 1)
        self.words = nn.Embedding(2000, 256)
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))
        self.head = nn.Linear(256, 2000, bias=False)
        self.head.weight = self.words.weight

    @staticmethod
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(words) * self.gain))


def start_tower(seed: int, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)
    return amp.initialize(model, optimizer, verbosity=0, **options)


def train_words(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    def loss_of(step: int) -> Tensor:
        words = torch.randint(0, 2000, (16,), generator=torch.Generator().manual_seed(step))
        return nn.functional.cross_entropy(model(words).float(), words)

    return iterate(optimizer, loss_of, steps)


def all_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    found = [*model.parameters(), *model.buffers(), *amp.master_params(optimizer), *model.state_dict().values()]
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize("level", LEVELS)
def test_a_training_is_resumed_to_the_bit(level):
    model, optimizer = start_tower(0, LEVELS[level])
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 2.5e6
    train_words(model, optimizer, range(2))
    file, before = io.BytesIO(), all_of(model, optimizer)
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], file)
    losses, after = train_words(model, optimizer, range(2, 12)), all_of(model, optimizer)
    amp.restore()
    model, optimizer = start_tower(1, LEVELS[level])
    file.seek(0)
    states = torch.load(file)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    amp.load_state_dict(states[2])
    assert same(all_of(model, optimizer), before)
    assert train_words(model, optimizer, range(2, 12)) == losses
    assert same(all_of(model, optimizer), after)


# ---------------------------------------------------------------------------------------------------------------------
# Payloads


def every_low_half() -> Tensor:
    """FP32 numbers of some BF16 high halves, odd and even, of both signs, each with all 2**16 low halves."""
    high = torch.tensor([0, 1, 2, 0x7F, 0x80, 0x3F80, 0x3F81, 0x4B7F, 0x4B80, 0x7F7E, 0x7F7F])
    bits = torch.cat([high, high + 2**15])[:, None] * 2**16 + torch.arange(2**16)
    return bits.flatten().to(torch.int32).view(torch.float32)


def every_number_of(dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    return numbers[~numbers.isnan()]


PAYLOADS = {
    "FP32": every_low_half,
    "FP16": lambda: every_number_of(torch.float16),
    "BF16": lambda: every_number_of(torch.bfloat16),
}


class Rows(nn.Module):
    """Weights of a module, of its child and of the child's child; the last two share one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(count))
        self.child = nn.Sequential(nn.Linear(1, count), nn.Linear(1, count, bias=False))
        self.child[1].weight = self.child[0].weight


def rows(count: int, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Rows(count)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0, **options)


@crossed({"level": ["O5", "O5, split"], "payload": list(PAYLOADS)}, every_way)
def test_every_payload_comes_back(level, payload, load):
    value = PAYLOADS[payload]()
    model, optimizer = rows(len(value), LEVELS[level])
    state = {name: value.reshape(old.shape) for name, old in model.state_dict().items()}
    load(model, state)
    if level == "O5":
        wanted, weight = value, value.bfloat16()
    else:  # a number whose BF16 weight is 0 is 0
        wanted, weight = torch.where(value.abs() < 2.0**-134, 0 * value, value), high_half(value)
    masters = list(amp.master_params(optimizer))
    found = [*model.state_dict().values(), *get_model_state_dict(model).values(), *masters]
    assert len(found) == 4 + 4 + 3
    assert all(torch.equal(t.detach().flatten().view(torch.int32), wanted.view(torch.int32)) for t in found)
    assert all(torch.equal(p.flatten().view(torch.int16), weight.view(torch.int16)) for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5", "O5, split"])
def test_a_part_of_a_checkpoint_leaves_the_rest(level):
    model, optimizer = rows(2**16, LEVELS[level])
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    value = every_low_half()[5 * 2**16 : 6 * 2**16]
    model.load_state_dict({"child.0.bias": value, "another": value}, strict=False)
    own, weight, bias = amp.master_params(optimizer)
    assert same([own, weight, bias], [*before[:2], value])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"own": value})


@pytest.mark.parametrize("level", ["O2", "O5", "O5, split", "O5, stochastic"])
def test_a_checkpoint_of_the_model_s_own_tensors_that_were_written(level):
    model, optimizer = rows(
        64, {**LEVELS, "O5, stochastic": {"opt_level": "O5", "master_weights": "stochastic"}}[level]
    )
    state = model.state_dict()
    for value in state.values():
        value.fill_(1.5)
    model.load_state_dict(state)
    assert all((tensor == 1.5).all() for tensor in [*all_of(model, optimizer), *state.values()])


PARTS = {
    "a child": lambda model, state: model.child.load_state_dict(state),
    "assign": lambda model, state: model.child.load_state_dict(state, assign=True),
    "a list of children": lambda model, state: nn.ModuleList(model.child).load_state_dict(state),
    "a grandchild": lambda model, state: [
        layer.load_state_dict({n.removeprefix(f"{i}."): v for n, v in state.items() if n.startswith(f"{i}.")})
        for i, layer in enumerate(model.child)
    ],
}


@pytest.mark.parametrize("load", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("level", ["O2", "O5", "O5, split"])
def test_a_child_s_load_state_dict_sets_the_masters(level, load):
    model, optimizer = rows(2**16, LEVELS[level])
    own, *_ = (master.detach().clone() for master in amp.master_params(optimizer))
    params = list(model.parameters())
    value = every_low_half()[5 * 2**16 : 6 * 2**16]
    load(model, {name: value.view_as(old) for name, old in model.child.state_dict().items()})
    assert all(
        torch.equal(m.flatten(), v) for m, v in zip(amp.master_params(optimizer), [own, value, value], strict=True)
    )
    assert all(before is now for before, now in zip(params, model.parameters(), strict=True))
    model.child.load_state_dict(model.child.state_dict())  # low precision: the masters keep what it lacks
    assert all(
        torch.equal(m.flatten(), v) for m, v in zip(amp.master_params(optimizer), [own, value, value], strict=True)
    )
    amp.restore()
    assert "served" not in nn.Module.load_state_dict.__qualname__ and not model.child._load_state_dict_pre_hooks
