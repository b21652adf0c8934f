"""Objects with tensors as inputs of a cast model: batches of users' classes."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import types
import weakref
from collections import UserDict
from typing import Any

import torch
from crossed import crossed
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.support.tree import cast_floats

LOW = torch.bfloat16


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class OfDevices(Plain):
    """As BatchEncoding and many batches of datasets: `.to` takes a device."""

    def to(self, device: str | torch.device) -> OfDevices:
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"device is {device!r}")
        return type(self)(**{name: value.to(device) for name, value in vars(self).items()})


@dataclasses.dataclass
class Fields:
    x: Tensor
    index: Tensor


class Store:
    """The layout of PyTorch Geometric: tensors are in a dict of a store, which references its owner."""

    def __init__(self, parent: Any) -> None:
        self._mapping: dict[str, Any] = {}
        self._parent = weakref.ref(parent)

    def __copy__(self) -> Store:
        out = self.__class__.__new__(self.__class__)
        vars(out).update(vars(self), _mapping=copy.copy(self._mapping))
        return out


class Data:
    def __init__(self, **values: Any) -> None:
        self.__dict__["_store"] = Store(self)
        self._store._mapping.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store._mapping[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._store._mapping[name] = value

    def __copy__(self) -> Data:
        out = self.__class__.__new__(self.__class__)
        vars(out)["_store"] = copy.copy(self._store)
        out._store._parent = weakref.ref(out)
        return out

    def to(self, device: Any) -> Data:
        for name, value in self._store._mapping.items():
            self._store._mapping[name] = value.to(device=device)
        return self


class Encoding(UserDict):
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


KINDS = [Plain, OfDevices, Fields, Data, Encoding, types.SimpleNamespace, argparse.Namespace]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> Tensor:
        self.seen = [batch.x.dtype, batch.index.dtype]
        out: Tensor = self.layer(batch.x)[batch.index]
        if not isinstance(batch, Encoding):
            batch.x = out
            batch.more = 2 * out
        return out


def made(kind: Any) -> Any:
    return kind(x=torch.ones(2, 4), index=torch.tensor([1, 0]))


@crossed({"kind": KINDS, "level": ["O0", "O2", "O3", "O4", "O5"]}, meet=1)
def test_they_are_cast_and_edits_reach_the_caller(kind: Any, level: str) -> None:
    net = Net()
    low = {"O2": torch.float16, "O3": torch.float16, "O5": LOW}.get(level, torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    batch = made(kind)
    x, index = batch.x, batch.index
    out = net(batch)
    assert net.seen == [low, torch.int64] and x.dtype is torch.float32
    assert type(batch) is kind and batch.index is index
    if kind is Encoding:
        assert batch.x is x
    else:
        assert torch.equal(batch.x, out) and batch.x.dtype is out.dtype and batch.more.dtype is out.dtype


def test_a_store_of_a_copy_knows_the_copy() -> None:
    data = made(Data)
    cast = cast_floats(data, LOW)
    assert cast is not data and cast.x.dtype is LOW and data.x.dtype is torch.float32
    assert cast._store._parent() is cast and data._store._parent() is data
    cast.x = 1
    assert data.x.dtype is torch.float32


class Refuses(Plain):
    def __copy__(self) -> Any:
        raise RuntimeError("not to be copied")


def test_objects_without_floats_and_uncopyable_ones_are_passed_unchanged() -> None:
    ring = Plain(index=torch.tensor([1]))
    ring.again = [ring]
    deep = Plain(a=Plain(a=Plain(a=Plain(x=torch.ones(1)))))
    generator = torch.Generator()
    for value in (ring, Plain(name="a"), Refuses(x=torch.ones(1)), deep, generator, Plain, len, torch.float32):
        assert cast_floats(value, LOW) is value
    loop = Plain(x=torch.ones(1))
    loop.again = loop
    found = cast_floats([loop], LOW)[0]
    assert found.x.dtype is LOW and found.again is loop
