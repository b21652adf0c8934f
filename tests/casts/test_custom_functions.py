"""custom_fwd and custom_bwd: backward under the casts of its forward."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
import torch.utils.checkpoint
from conftest import DEVICES
from crossed import crossed
from torch import nn

from amp_patch import amp

pytestmark = pytest.mark.usefixtures("clean_casts")


class Product(torch.autograd.Function):
    """a @ b, which notes the dtypes of the products that it computes."""

    seen: list[torch.dtype]

    @staticmethod
    @amp.custom_fwd
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @amp.custom_bwd
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        left, right = grad.float() @ b.float().T, a.float().T @ grad.float()
        Product.seen.append(left.dtype)
        return left.to(a.dtype), right.to(b.dtype)


class Separate(torch.autograd.Function):
    """The form with setup_context."""

    @staticmethod
    @amp.custom_fwd
    def forward(a):
        return a @ a

    @staticmethod
    @amp.custom_fwd
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @amp.custom_bwd
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        Product.seen.append((a.float() @ a.float()).dtype)
        return grad.float() @ a.T.float() + a.T.float() @ grad.float()


class Undecorated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    @amp.custom_bwd
    def backward(ctx, grad):
        return grad * 2


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    monkeypatch.setattr(Product, "seen", [], raising=False)
    return Product.seen


def leaves(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.eye(2, device=device).mul_(k).requires_grad_() for k in (1, 2))


REGIONS = {
    "ours": lambda device, dtype: amp.autocast(device, dtype),
    "torch's": lambda device, dtype: torch.autocast(device, dtype),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_runs_under_the_casts_of_its_forward(device, kind, dtype, seen):
    a, b = leaves(device)
    with REGIONS[kind](device, dtype):
        out = Product.apply(a, b)
    assert out.dtype is dtype
    out.float().sum().backward()
    assert seen == [dtype]
    assert torch.equal(a.grad, torch.full_like(a, 2)) and torch.equal(b.grad, torch.full_like(b, 1))


def test_with_setup_context(seen):
    a, _ = leaves()
    with amp.autocast("cpu", torch.bfloat16):
        out = Separate.apply(a)
    out.float().sum().backward()
    assert seen == [torch.bfloat16] and a.grad is not None


def test_errors():
    with pytest.raises(TypeError, match="floating dtype"):
        amp.custom_fwd(cast_inputs=torch.int32)
    with pytest.raises(TypeError, match="below @staticmethod"):
        amp.custom_bwd(3)
    out = Undecorated.apply(leaves()[0]).sum()
    with pytest.raises(RuntimeError, match="decorate it with custom_fwd"):
        out.backward()


# ---------------------------------------------------------------------------------------------------------------------
# Ours and torch's, functions and regions, mixed


def noting(fwd, bwd, **options):
    """A product whose forward and backward note the type of the products in them, decorated."""

    class Noting(torch.autograd.Function):
        @staticmethod
        @fwd(device_type="cpu", **options)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            out = a @ b
            Product.seen.append(out.dtype)
            return out

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            Product.seen.append((a.float() @ b.float()).dtype)
            left, right = grad.float() @ b.float().T, a.float().T @ grad.float()
            return left.to(a.dtype), right.to(b.dtype)

    return Noting


KINDS = {
    "none": contextlib.nullcontext,
    "ours": lambda: amp.autocast("cpu", torch.float16),
    "ours, off": lambda: amp.autocast("cpu", enabled=False),
    "torch's": lambda: torch.autocast("cpu", torch.bfloat16),
    "torch's, off": lambda: torch.autocast("cpu", enabled=False),
}
SAYS = {"ours": torch.float16, "torch's": torch.bfloat16}


@crossed({"names": list(itertools.product(KINDS, repeat=2)), "elsewhere": [False, True]}, meet=1)
def test_backward_has_the_mixture_of_its_forward_wherever_it_runs(names, elsewhere, seen):
    """The innermost region of the forward also decides in backward, inside every region and on every thread."""
    expected = next((SAYS.get(name, torch.float32) for name in reversed(names) if name != "none"), torch.float32)
    function = noting(amp.custom_fwd, amp.custom_bwd)
    for around in KINDS.values():
        a, b = leaves()
        with KINDS[names[0]](), KINDS[names[1]]():
            out = function.apply(a, b).float().sum()

        def backward(out=out, around=around, a=a, b=b):
            with around():
                before = (a @ b).dtype
                out.backward()
                assert (a @ b).dtype is before, "what acted around is back"

        if elsewhere:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        else:
            backward()
        assert seen == [expected] * 2
        assert torch.equal(a.grad, torch.full_like(a, 2)) and torch.equal(b.grad, torch.full_like(b, 1))
        seen.clear()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_torch_s_decorators_in_a_training_keep_the_casts_of_the_training_in_backward(level, seen):
    """torch's custom_bwd disables torch.autocast if the forward ran without it. This does not turn our casts off."""
    function = noting(torch.amp.custom_fwd, torch.amp.custom_bwd)

    class Net(nn.Linear):
        def forward(self, x):
            return function.apply(x, self.weight)

    model = Net(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)
    low = torch.bfloat16 if level == "O4" else torch.float16
    for checkpointed in (False, True):
        x = torch.ones(2, 2, requires_grad=True)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        else:
            out = model(x)
        with amp.scale_loss(out.float().sum() / 1024, optimizer) as scaled:
            scaled.backward()
        assert seen == [low] * (3 if checkpointed else 2)
        seen.clear()
        with amp.autocast("cpu", low), torch.autocast("cpu", torch.bfloat16):
            out = function.apply(x, model.weight)
        with amp.scale_loss(out.float().sum() / 1024, optimizer) as scaled:
            scaled.backward()
        assert seen == [torch.bfloat16] * 2
        seen.clear()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_cast_inputs_does_nothing_in_a_cast_model(level, seen):
    """Nothing is cast there while it runs, also where FP16 on a CPU is emulated."""
    function = noting(amp.custom_fwd, amp.custom_bwd, cast_inputs=torch.float32)

    class Net(nn.Linear):
        def forward(self, x):
            return function.apply(x, self.weight)

    for cpu_half in ("native", "emulate"):
        model = amp.initialize(Net(2, 2), opt_level=level, cpu_half=cpu_half)
        model(torch.ones(2, 2))
        assert seen.pop() is torch.float16


def of_torchs(kind: str, cast_inputs: torch.dtype | None = torch.float32) -> type[torch.autograd.Function]:
    """A product of a library that knows torch's decorators alone."""

    class Theirs(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=kind, cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            Product.seen += [a.dtype, b.dtype, (a @ b).dtype]
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type=kind)
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            Product.seen.append((grad @ b.T).dtype)
            return grad @ b.T, a.T @ grad

    return Theirs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_cast_inputs_of_torchs_custom_fwd_are_honored(when, level, device, seen):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return theirs.apply(self.layer(x), self.layer.weight)

    theirs = of_torchs(device) if when == "before" else None
    model = Net().to(device)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)
    theirs = theirs or of_torchs(device)
    with amp.scale_loss(model(torch.ones(2, 2, device=device)).sum(), optimizer) as scaled:
        scaled.backward()
    assert seen == [torch.float32] * 4 and model.layer.weight.grad.dtype is torch.float32


def test_torchs_custom_fwd_is_torchs_again_after_restore_and_heeds_torchs_autocast(seen):
    own = torch.amp.custom_fwd, torch.amp.custom_bwd
    before = of_torchs("cpu")
    forward = before.forward
    amp.initialize(nn.Linear(1, 1), opt_level="O4")
    assert before.forward is not forward and torch.amp.custom_fwd is not own[0]
    after = of_torchs("cpu")
    amp.restore()
    assert before.forward is forward and (torch.amp.custom_fwd, torch.amp.custom_bwd) == own
    for theirs in before, after:
        with torch.autocast("cpu", torch.bfloat16):
            out = theirs.apply(*(leaf.bfloat16() for leaf in leaves()))
        out.sum().backward()
    assert seen == [torch.float32] * 8


def test_torchs_custom_fwd_without_cast_inputs_keeps_the_casts(seen):
    theirs = of_torchs("cpu", cast_inputs=None)
    with amp.autocast("cpu", torch.bfloat16):
        theirs.apply(*leaves())
    assert seen == [torch.float32, torch.float32, torch.bfloat16]
