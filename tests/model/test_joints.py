"""The joints of a model's forward: a guest's five events, in every kind of call; models without guests."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import ExitStack

import pytest
import torch
from conftest import DEVICES
from low_models import CAST
from paths import ROOT
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.model import joints
from amp_patch.support.generated_class import subclasses

ALL = ["enter", "cast_in", "call", "cast_out", "leave"]
EVENTS: list[str] = []  # of the guests of all models


class Noting(joints.ForwardGuest):
    """Notes its events, and the types that it sees."""

    def __init__(self, name="", raises=""):
        self.name, self.raises, self.types = name, raises, []

    def note(self, event):
        EVENTS.append(self.name + event)
        if event == self.raises:
            raise ValueError(event)

    def enter(self, call):
        self.note("enter")
        self.types = [call.args[0].dtype]

    def cast_in(self, call):
        self.note("cast_in")
        assert call.given[0][0].dtype is self.types[0]
        self.types.append(call.args[0].dtype)

    def call(self, call, method):
        self.note("call")
        return method

    def cast_out(self, call, output, result):
        self.note("cast_out")
        self.types += [output.dtype, result.dtype]
        return result

    def leave(self, call):
        self.note("leave")


class Left(Noting):
    copied = False


class Packing(joints.ForwardGuest):
    """Stores what autograd saves as BF16, as a guest that stores activations in fewer bits does."""

    def __init__(self):
        self.packed = 0

    def pack(self, x):
        self.packed += 1
        return (x.dtype, x.bfloat16())

    def enter(self, call):
        call.notes["packing"] = stack = ExitStack()
        stack.enter_context(saved_tensors_hooks(self.pack, lambda packed: packed[1].to(packed[0])))

    def leave(self, call):
        call.notes["packing"].close()


class Inner(nn.Module):
    """A linear layer by hand, which can fail."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise RuntimeError("a slip")
        return x @ self.weight


class Outer(nn.Module):
    """Calls another model, checkpointed if `recomputes`; `again` calls the forward."""

    def __init__(self, inner, recomputes=False):
        super().__init__()
        self.inner, self.recomputes = inner, recomputes
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        x = x @ self.weight
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)

    def again(self, x):
        return self.forward(x)


@pytest.fixture
def register(monkeypatch):
    EVENTS.clear()
    monkeypatch.setattr(joints, "choosers", list(joints.choosers))
    return joints.choosers.append


def entered(models, level="O2", **options):
    params = (models if isinstance(models, nn.Module) else nn.ModuleList(models)).parameters()
    return amp.initialize(models, torch.optim.SGD(params, 0.5), opt_level=level, verbosity=0, **options)


def ones(device="cpu"):
    return torch.ones(2, 4, device=device)


def heard(call):
    EVENTS.clear()
    call()
    return list(EVENTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", *CAST])
def test_a_guest_sees_five_events_and_the_types_around_both_casts(register, level, device):
    guest = Noting()
    register(lambda model, entry: guest)
    model, _ = entered(Inner().to(device), level)
    assert heard(lambda: model(ones(device))) == ALL
    low = CAST.get(level, torch.float32)
    own = torch.float16 if level == "O1" else low  # O1 casts the product
    returned = torch.float32 if level in CAST else torch.float16
    assert guest.types == [torch.float32, low, own, returned]


def test_guests_nest_the_first_is_the_outermost(register):
    register(lambda model, entry: Noting("a "))
    register(lambda model, entry: Noting("b "))
    model, _ = entered(Inner())
    assert heard(lambda: model(ones())) == [
        *("a enter", "b enter", "a cast_in", "b cast_in", "b call", "a call"),
        *("b cast_out", "a cast_out", "b leave", "a leave"),
    ]


def test_a_chooser_gives_guests_to_some_models_and_learns_the_policy(register):
    register(lambda model, entry: Noting() if isinstance(model, Inner) and entry.policy.opt_level == "O5" else None)
    (inner, outer), _ = entered([Inner(), Outer(nn.Linear(4, 4))], "O5")
    assert heard(lambda: outer(ones())) == [] and heard(lambda: inner(ones())) == ALL


@pytest.mark.parametrize(
    ("raises", "events"),
    [
        ("enter", ["a enter", "b enter", "a leave"]),
        ("cast_in", ["a enter", "b enter", "a cast_in", "b cast_in", "b leave", "a leave"]),
        ("call", ["a enter", "b enter", "a cast_in", "b cast_in", "b call", "b leave", "a leave"]),
        ("cast_out", [*("a enter", "b enter", "a cast_in", "b cast_in", "b call", "a call", "b cast_out"), "b leave"]),
        ("leave", [*("a enter", "b enter", "a cast_in", "b cast_in", "b call", "a call", "b cast_out"), "a cast_out"]),
    ],
)
def test_after_an_error_of_a_guest_every_guest_that_has_entered_leaves(register, raises, events):
    guest = Noting("b ", raises)
    register(lambda model, entry: Noting("a "))
    register(lambda model, entry: guest)
    model, _ = entered(Inner())
    EVENTS.clear()
    with pytest.raises(ValueError, match=raises):
        model(ones())
    ends = {"cast_out": ["a leave"], "leave": ["b leave", "a leave"]}
    assert events + ends.get(raises, []) == EVENTS
    guest.raises = ""
    assert len(heard(lambda: model(ones()))) == 2 * len(ALL)  # no state of the broken call is left
    assert torch.equal(model(ones()), ones())


def test_after_an_error_of_the_forward_a_guest_leaves_and_casts_nothing_out(register):
    register(lambda model, entry: Noting())
    model, _ = entered(Inner())
    model.fails, kept = True, heard
    with pytest.raises(RuntimeError, match="a slip"):
        kept(lambda: model(ones()))
    assert EVENTS == ["enter", "cast_in", "call", "leave"]
    model.fails = False
    assert heard(lambda: model(ones())) == ALL


def test_in_a_call_inside_of_a_call_of_the_training_the_guest_may_wrap_the_method_alone(register):
    register(lambda model, entry: Noting(f"{type(model).__name__} "))
    inner = Inner()
    (outer, inner), _ = entered([Outer(inner), inner], methods=("again",))
    first, last = [f"Outer {event}" for event in ALL[:3]], [f"Outer {event}" for event in ALL[3:]]
    assert heard(lambda: outer(ones())) == [*first, "Inner call", *last]
    assert heard(lambda: outer.again(ones())) == [*first, "Outer call", "Inner call", *last]


def test_a_recomputed_part_has_one_event_and_a_recomputed_forward_has_all(register):
    register(lambda model, entry: Noting(f"{type(model).__name__} "))
    inner = Inner()
    (outer, inner), optimizer = entered([Outer(inner, recomputes=True), inner], "O5")
    x = ones().requires_grad_()
    with amp.scale_loss(outer(x).sum(), optimizer) as loss:
        assert heard(loss.backward) == ["Inner call"]
    outer.recomputes = False
    with amp.scale_loss(checkpoint(outer, x, use_reentrant=False).sum(), optimizer) as loss:
        assert "Outer enter" in heard(loss.backward)
    assert x.grad.eq(2).all() and inner.weight.grad.isfinite().all()


def test_a_wrapped_method_runs_in_place_of_the_method(register):
    class Doubling(joints.ForwardGuest):
        def call(self, call, method):
            return lambda model, x: method(model, 2 * x)

        def cast_out(self, call, output, result):
            assert output.dtype is torch.bfloat16
            return result + 1

    register(lambda model, entry: Doubling())
    model, _ = entered(Inner(), "O5")
    assert torch.equal(model(ones()), 2 * ones() + 1)


def test_hooks_on_saved_tensors_around_a_forward_serve_its_backward_alone(register):
    def gradients():
        torch.manual_seed(0)
        model, optimizer = entered(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "O5")
        with amp.scale_loss(model(torch.randn(2, 4)).square().sum(), optimizer) as loss:
            loss.backward()
        return [param.grad.clone() for param in amp.master_params(optimizer)]

    wanted, guest = gradients(), Packing()
    register(lambda model, entry: guest)
    found = gradients()
    assert guest.packed > 0 and all(map(torch.equal, found, wanted))  # a cast model saves BF16 tensors
    packed = guest.packed
    (torch.ones(2, requires_grad=True) ** 2).sum().backward()
    assert guest.packed == packed


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("level", CAST)
def test_a_copy_has_a_guest_of_its_own_unless_the_guest_stays_behind(register, twin_of, level):
    register(lambda model, entry: Noting("kept "))
    register(lambda model, entry: Left("left "))
    model, _ = entered(Inner(), level)
    twin = twin_of(model)
    events = [f"kept {event}" for event in ALL]
    assert heard(lambda: twin(ones())) == events and heard(lambda: twin_of(twin)(ones())) == events
    assert len(heard(lambda: model(ones()))) == 2 * len(ALL)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(twin(ones()), ones()) and twin.weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", *CAST])
def test_calls_of_a_plain_model_have_no_guest_after_the_first_three(level):
    model, _ = entered(Inner(), level)
    for _ in range(3):
        model(ones())
    guests = vars(model)["_amp"].guests
    assert guests.of_kind.get(("forward", True, True, True), guests.all) == ()


def test_no_file_names_a_guest_that_it_does_not_define():
    guests = [cls for cls in subclasses(joints.ForwardGuest) if cls.__module__.startswith("amp_patch.")]
    core = {"ForwardGuest", "FirstCalls"}
    assert len(guests) > 6
    for path in (ROOT / "amp_patch").rglob("*.py"):
        for cls in guests:
            own = path.with_suffix("").parts[-2:] == tuple(cls.__module__.split(".")[-2:])
            assert own or cls.__name__ in core or not re.search(rf"\b{cls.__name__}\b", path.read_text()), path
