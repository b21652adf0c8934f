"""The generated classes: for models and optimizers of any class, whatever stands before nn.Module in it."""

from __future__ import annotations

import abc
import copy
import dataclasses
import pickle
from typing import Generic, Protocol, TypeVar

import pytest
import torch
import training
from torch import nn
from torch.nn.utils import parametrize
from training import SGD, backward, linear

from amp_patch import amp

T = TypeVar("T")
made: list[str] = []


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = training.convnet()

    def forward(self, images):
        return self.net(images)


class Abstract(abc.ABC, nn.Module):
    @abc.abstractmethod
    def forward(self, images): ...


class Concrete(Abstract, Plain):
    def forward(self, images):
        return self.net(images)


class AfterGeneric(Generic[T], Plain):
    pass


class BeforeGeneric(Plain, Generic[T]):
    pass


class Encodes(Protocol):
    def encode(self, images): ...


class AfterProtocol(Encodes, Plain):
    def __init__(self) -> None:
        Plain.__init__(self)


class NoSlots:
    __slots__ = ()


class AfterNoSlots(NoSlots, Plain):
    pass


class Slots:
    __slots__ = ("first", "second")


class AfterSlots(Slots, Plain):
    pass


class BeforeSlots(Plain, Slots):
    pass


class DictSlot:
    __slots__ = ("__dict__",)


class AfterDictSlot(DictSlot, Plain):
    pass


class Registering(abc.ABCMeta):
    """Wants an argument, and keeps a list."""

    def __new__(cls, name, bases, names, *, listed):
        made.append(name)
        return super().__new__(cls, name, bases, names)

    def __init__(cls, name, bases, names, *, listed):
        super().__init__(name, bases, names)


class Registered(Plain, metaclass=Registering, listed=True):
    pass


@dataclasses.dataclass(eq=False)
class Data(abc.ABC, Plain):
    width: int = 4

    def __post_init__(self) -> None:
        super().__init__()


KINDS = [
    *(Plain, Concrete, AfterGeneric, BeforeGeneric, AfterGeneric[int], AfterProtocol, AfterNoSlots, AfterSlots),
    *(BeforeSlots, AfterDictSlot, Registered, Data),
]


def trained(kind, level):
    model = kind()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=128.0)
    training.train(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind).split(".")[-1].strip("'>"))
def test_a_model_of_any_class_trains_copies_and_comes_back(kind, level):
    own = type(kind())
    expected = training.weights(trained(Plain, level)[0])
    model, optimizer = trained(kind, level)
    assert training.same(training.weights(model), expected)
    assert isinstance(model, own) and type(model) is not own and type(model).__name__ == own.__name__
    assert not isinstance(Plain(), type(model)) and isinstance(kind(), own)  # the caches of ABCs are kept apart
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    training.train(model, optimizer, 2)
    for net, opt in copies:
        assert type(net) is type(model)
        training.train(net, opt, 2)
        assert training.same(training.weights(net), training.weights(model))
    amp.restore()
    assert type(model) is own


def test_a_metaclass_of_the_user_s_makes_no_generated_class():
    before = list(made)
    trained(Registered, "O2")
    assert made == before


def test_a_class_made_from_a_generated_one_has_the_usual_order():
    model = amp.initialize(linear([[1.0]]), opt_level="O1")
    generated = type(model)

    class Mixed(Slots, generated):
        pass

    assert Mixed.__mro__ == (Mixed, Slots, *generated.__mro__)
    kept = Concrete()
    amp.initialize(kept, opt_level="O1")
    parametrize.register_parametrization(kept.net.head, "weight", nn.Identity())
    kept(training.images(0)[0]).sum().backward()


class AbstractSGD(abc.ABC, torch.optim.SGD):
    pass


class GenericSGD(Generic[T], torch.optim.SGD):
    pass


class Stepping(abc.ABC):
    @abc.abstractmethod
    def step(self): ...


class AbstractStepper(Stepping):
    """Not torch's: a duck."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param -= param.grad

    def zero_grad(self):
        for param in self.param_groups[0]["params"]:
            param.grad = None


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", [AbstractSGD, GenericSGD, AbstractStepper])
def test_an_optimizer_of_any_class_steps_skips_copies_and_comes_back(kind, level):
    model = linear([[2.0]])
    optimizer = kind(model.parameters()) if kind is AbstractStepper else kind(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)

    def step(net, opt, value):
        opt.zero_grad()
        backward(net(torch.full((1, 1), value)).sum(), opt)
        opt.step()
        return next(iter(amp.master_params(opt))).item()

    assert isinstance(optimizer, kind)
    assert step(model, optimizer, 0.5) == 1.5
    assert step(model, optimizer, float("inf")) == 1.5
    for twin in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert step(*twin, 0.25) == 1.25
    assert step(model, optimizer, 0.25) == 1.25
    amp.restore()
    assert type(optimizer) is kind and optimizer.param_groups[0]["params"][0] is model.weight
    assert model.weight.item() == 1.25


def test_an_optimizer_that_has_no_room_for_a_training_is_refused_by_name():
    class Cramped:
        __slots__ = ("param_groups",)

        def step(self):
            raise AssertionError

    model, optimizer = linear([[1.0]]), Cramped()
    optimizer.param_groups = [{"params": list(model.parameters())}]
    with pytest.raises(TypeError) as refused:
        amp.initialize(model, optimizer, opt_level="O2")
    assert str(refused.value) == (
        "initialize: optimizers holds a Cramped, whose __slots__ leave its instances no __dict__ for masters and loss "
        "scale; add '__dict__' and '__weakref__' to its __slots__, or leave these out"
    )
    assert model.weight.dtype is torch.float32
