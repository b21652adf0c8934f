"""tree.py: containers keep their type, and their identity where nothing changed."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from conftest import DEVICES, DTYPES
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from amp_patch.support.tree import cast_floats, map_tensors, tensors

LOW = [dtype for dtype in DTYPES if dtype in (torch.float16, torch.bfloat16)]
Point = namedtuple("Point", "x y")


class Pair(tuple):
    """A tuple whose constructor takes something else than its items."""

    def __new__(cls, left: Any, right: Any) -> Pair:
        self = tuple.__new__(cls, (left, right))
        self.note = "kept"
        return self


class Stack(list):
    def __init__(self, note: str) -> None:
        self.note = note


@dataclasses.dataclass
class Batch:
    image: Tensor
    label: Tensor
    note: str = "n"
    derived: Tensor = dataclasses.field(init=False)
    unset: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.derived = self.image + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Tensor


class Output(OrderedDict):
    """As the output classes of transformers: a dict and a dataclass, each value in both."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass
class ModelOutput(Output):
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Encoding(UserDict):
    """As transformers' BatchEncoding: a UserDict with attributes of its own."""

    def __init__(self, data: dict[str, Any], note: str) -> None:
        super().__init__(data)
        self.note = note


class Graph:
    """A batch class of the user's."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> Graph:
        return Graph(self.x.to(dtype))


class DeviceOnly:
    def to(self, device: str) -> DeviceOnly:
        if not isinstance(device, str):
            raise TypeError("a device")
        return self


def twice(tensor: Tensor) -> Tensor:
    return tensor * 2


def ones(*shape: int) -> Tensor:
    return torch.ones(shape or (2,))


def containers() -> list[Any]:
    deque_like = Stack("kept")
    deque_like.append(ones())
    return [
        (ones(), 1),
        [ones(), "text"],
        {"a": ones(), "b": None},
        OrderedDict(a=ones()),
        defaultdict(list, a=ones()),
        Point(ones(), 2),
        Pair(ones(), "right"),
        deque_like,
        torch.return_types.max((ones(), torch.zeros(2, dtype=torch.int64))),
        Batch(ones(), torch.zeros(2, dtype=torch.int64)),
        Frozen(ones()),
        ModelOutput(ones(), (ones(), ones())),
        Encoding({"ids": ones()}, "kept"),
        pack_padded_sequence(ones(3, 2, 4), torch.tensor([3, 2])),
    ]


@pytest.mark.parametrize("value", containers(), ids=lambda value: type(value).__name__)
def test_type_is_kept_and_tensors_are_mapped(value: Any) -> None:
    before = [tensor.clone() for tensor in tensors(value)]
    assert before, "the walk found no tensor in the container"
    mapped = map_tensors(twice, value)
    assert type(mapped) is type(value) and mapped is not value
    torch.testing.assert_close(tensors(mapped), [tensor * 2 for tensor in before], rtol=0, atol=0)
    torch.testing.assert_close(tensors(value), before, rtol=0, atol=0)  # the original is left alone


@pytest.mark.parametrize("value", containers(), ids=lambda value: type(value).__name__)
def test_unchanged_container_is_itself(value: Any) -> None:
    assert map_tensors(lambda tensor: tensor, value) is value
    assert map_tensors(lambda tensor: tensor, [value])[0] is value


def test_containers_keep_their_other_attributes() -> None:
    assert map_tensors(twice, Pair(ones(), "right")).note == "kept"
    stack = Stack("kept")
    stack.append(ones())
    assert map_tensors(twice, stack).note == "kept"
    assert map_tensors(twice, Encoding({"ids": ones()}, "kept")).note == "kept"
    assert map_tensors(twice, defaultdict(list, a=ones()))["missing"] == []
    assert list(map_tensors(twice, OrderedDict(b=ones(), a=ones()))) == ["b", "a"]


def test_dataclass_fields() -> None:
    batch = Batch(ones(), ones())
    mapped = map_tensors(twice, batch)
    assert mapped.note == "n" and not hasattr(mapped, "unset")
    assert mapped.derived.tolist() == [4.0, 4.0], "a field with init=False was computed anew"
    assert map_tensors(twice, Frozen(ones())).image.tolist() == [2.0, 2.0]
    assert map_tensors(twice, Batch) is Batch  # the class itself is no container


def test_dict_that_is_a_dataclass_keeps_its_two_halves_equal() -> None:
    mapped = map_tensors(twice, ModelOutput(ones(), (ones(),)))
    assert mapped["logits"] is mapped.logits and mapped.logits.tolist() == [2.0, 2.0]
    assert mapped["hidden"] is mapped.hidden and mapped.hidden[0].tolist() == [2.0, 2.0]


def test_only_changed_branches_are_rebuilt() -> None:
    changed, kept = [ones()], {"label": torch.zeros(2, dtype=torch.int64)}
    mapped = cast_floats((changed, kept), torch.float16)
    assert mapped[0] is not changed and mapped[1] is kept


def test_packed_sequence_keeps_its_index() -> None:
    packed = pack_padded_sequence(ones(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    mapped = cast_floats(packed, torch.float16)
    assert isinstance(mapped, PackedSequence) and mapped.data.dtype is torch.float16
    assert map_tensors(twice, packed).batch_sizes is packed.batch_sizes
    assert mapped.sorted_indices is packed.sorted_indices and mapped.unsorted_indices is packed.unsorted_indices


def test_unknown_objects_pass_through() -> None:
    for value in (None, 1, "text", object(), nn.Linear(2, 2), {ones()}, range(3), torch.float16):
        assert map_tensors(twice, value) is value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_cast_floats_casts_floats_only(device: str, dtype: torch.dtype) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
    values = [torch.ones(2, dtype=kind, device=device) for kind in kinds]
    cast = cast_floats(values, dtype)
    assert [tensor.dtype for tensor in cast] == [dtype] * 4 + [torch.int64, torch.bool, torch.complex64]
    assert all(tensor.device == values[0].device for tensor in cast)
    assert all(new is old for new, old in zip(cast, values, strict=True) if old.dtype is new.dtype)
    only = cast_floats(values, dtype, only=[torch.float32])
    assert [tensor.dtype for tensor in only] == [torch.float16, torch.bfloat16, dtype, *kinds[3:]]


@pytest.mark.parametrize("dtype", LOW)
def test_cast_floats_is_differentiable(dtype: torch.dtype) -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floats({"x": x}, dtype)["x"].sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


def test_one_tensor_twice_stays_one() -> None:
    x = ones()
    query, (key, value) = cast_floats((x, [x, x]), torch.float16)
    assert query is key is value


@pytest.mark.parametrize("dtype", LOW)
def test_objects_with_to(dtype: torch.dtype) -> None:
    graph, device_only, module = Graph(ones()), DeviceOnly(), nn.Linear(2, 2)
    cast = cast_floats([graph, device_only, module, Graph], dtype)
    assert isinstance(cast[0], Graph) and cast[0].x.dtype is dtype and graph.x.dtype is torch.float32
    assert cast[1] is device_only and cast[2] is module and cast[3] is Graph
    assert module.weight.dtype is torch.float32


def test_the_tensors_in_the_order_of_the_walk() -> None:
    first, second, third = (torch.full((1,), value) for value in (1.0, 2.0, 3.0))
    value = {"a": [first, 7, (second,)], "b": Batch(third, first), "c": "text"}
    assert [each.item() for each in tensors(value)] == [1.0, 2.0, 3.0, 1.0, 4.0], "the dataclass derives its last"
    assert tensors(None) == []
