"""O1's casts: installation, wrappers, rules, regions, the weight cache, decorators, registration."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import itertools
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES, DTYPES, original
from other_thread import run_in_thread
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_names import differences, namespaces

from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import functions, install, regions, rules, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.casts.oplists import OPLISTS
from amp_patch.policy import Policy

LOW = [dtype for dtype in DTYPES if dtype in (torch.float16, torch.bfloat16)]
HALF, FULL = torch.float16, torch.float32


def o1(dtype: torch.dtype = HALF, **options: Any) -> Policy:
    return Policy("O1", dtype=dtype, patch_torch_functions=True, **options)


OFF = Policy("O2", cast_model_type=HALF)


@pytest.fixture(autouse=True)
def _clean(clean_casts: None) -> Iterator[None]:
    registered = dict(install._registered)
    yield
    install._registered.clear()
    install._registered.update(registered)


@pytest.fixture
def installed() -> Iterator[None]:
    install.install()
    yield


needs_install = pytest.mark.usefixtures("installed")


# ---------------------------------------------------------------------------------------------------------------------
# Installation


def test_importing_patches_nothing_and_touches_no_cuda() -> None:
    code = (
        "import torch; before = torch.exp, torch.Tensor.__pow__, dict(vars(torch.nn.functional))\n"
        "from amp_patch.casts import autocast, install\n"
        "assert before == (torch.exp, torch.Tensor.__pow__, dict(vars(torch.nn.functional)))\n"
        "assert not install.installed() and not torch.cuda.is_initialized()\n"
        "install.install(); autocast.autocast().__enter__()\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


def test_undo_is_exact() -> None:
    before = namespaces()
    x = torch.ones(2, 2)
    for _ in range(2):
        install.install()
        assert install.installed() and differences(before, namespaces())
        install.install()  # idempotent: no second layer
        assert original(torch.exp) is before[repr(torch)]["exp"]
        with regions.region(o1()):
            assert (x @ x).dtype is HALF
        install.uninstall()
        install.uninstall()
        assert not install.installed()
        assert differences(before, namespaces()) == []
    with regions.region(o1()):
        assert (x @ x).dtype is FULL


def test_a_failing_install_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setitem(OPLISTS, "torch.nothing_of_this_name", {"lower": ("mm",)})
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        install.install()
    assert not install.installed() and differences(before, namespaces()) == []


def test_a_name_that_this_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPLISTS, "torch.fft", {"fp32": ("fft", "fft_of_tomorrow")})
    install.install()
    assert original(torch.fft.fft) is not torch.fft.fft and not hasattr(torch.fft, "fft_of_tomorrow")


def test_wrappers_are_made_once() -> None:
    install.install()
    first = torch.exp, torch.Tensor.exp, F.softmax
    install.uninstall()
    install.install()
    assert (torch.exp, torch.Tensor.exp, F.softmax) == first
    assert torch.conv2d is F.conv2d and torch.einsum is torch.functional.einsum, "one original, one wrapper"


@pytest.mark.parametrize("path", ["exp", "einsum", "Tensor.exp", "Tensor.__matmul__", "nn.functional.softmax"])
def test_wrappers_look_like_their_originals(path: str) -> None:
    def find() -> Any:
        owner, _, name = path.rpartition(".")
        return getattr(install.resolve_address(f"torch.{owner}" if owner else "torch"), name)

    found = find()
    install.install()
    wrapper = find()
    assert wrapper is not found and original(wrapper) is found
    assert (wrapper.__name__, wrapper.__doc__) == (found.__name__, found.__doc__)
    if inspect.isfunction(found):
        assert inspect.isfunction(wrapper) and inspect.signature(wrapper) == inspect.signature(found)
        assert (wrapper.__module__, wrapper.__qualname__) == (found.__module__, found.__qualname__)


@needs_install
def test_wrapped_builtins_do_not_bind_as_methods() -> None:
    class Module:
        act = torch.exp
        project = F.linear
        method = torch.Tensor.exp

    x = torch.ones(2, 2, dtype=HALF)
    with regions.region(o1()):
        assert Module().act(x).dtype is FULL and Module.act(x).dtype is FULL
        assert Module().project(x, x).dtype is HALF
        assert Module.act is Module().act is torch.exp
        assert x.exp().dtype is FULL and torch.Tensor.exp(x).dtype is FULL


def test_binding_is_the_originals(installed: None) -> None:
    class Module:
        def half(self) -> Tensor:
            return torch.ones(2, dtype=HALF)

    module = Module()
    module.half = types.MethodType(torch.Tensor.exp, torch.ones(2, dtype=HALF))  # type: ignore[method-assign]
    with regions.region(o1()):
        assert module.half().dtype is FULL


@pytest.mark.parametrize(
    "path",
    [
        "torch:exp", "torch:einsum", "torch:Tensor.exp", "torch:Tensor.norm", "torch.nn.functional:linear",
        "torch.nn.functional:softmax", "torch._VF:lstm", "torch.linalg:inv",
    ],
)  # fmt: skip
def test_copies_and_pickles(path: str) -> None:
    module, _, name = path.partition(":")

    def find() -> Any:
        found = install.resolve_address(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    found = find()
    install.install()
    wrapper = find()
    assert copy.deepcopy(wrapper) is wrapper and copy.copy(wrapper) is wrapper
    assert copy.deepcopy({"f": wrapper})["f"] is wrapper
    data = pickle.dumps(wrapper)
    assert b"amp_patch" not in data, "the pickle would need amp_patch where it is loaded"
    assert pickle.loads(data) is wrapper
    install.uninstall()
    assert pickle.loads(data) is found or pickle.loads(data) == found


@needs_install
def test_module_holding_a_wrapper_is_picklable_after_uninstall() -> None:
    module = nn.Linear(2, 2)
    module.act = torch.exp
    install.uninstall()
    assert pickle.loads(pickle.dumps(module)).act is torch.exp
    assert copy.deepcopy(module).act(torch.zeros(1)).item() == 1.0


def test_backends_are_named_and_checked(wrappers: str) -> None:
    assert cast_wrappers.backend() == wrappers
    with pytest.raises(ValueError, match="use_backend: 'torch' is none of cpp, python"), install.use_backend("torch"):
        pass
    install.install()
    with pytest.raises(RuntimeError, match=f"use_backend: the {wrappers} wrappers are installed"):
        install.use_backend("python").__enter__()
    install.uninstall()
    casts_state.set_default(policy := o1())
    with install.use_backend("python"):
        assert cast_wrappers.backend() == "python" and casts_state.current() is policy
        install.install()
        assert type(torch.exp) is cast_wrappers.CastFunction
    assert cast_wrappers.backend() == wrappers and not install.installed() and casts_state.current() is policy


def test_who_never_compiles_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; before = 'torch._dynamo' in sys.modules\n"
        "from amp_patch import amp\n"
        "with amp.autocast('cpu'): torch.exp(torch.ones(2, 2) @ torch.ones(2, 2))\n"
        "assert ('torch._dynamo' in sys.modules) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


COMPILED = """
import torch, torch.nn.functional as F
from torch import nn
from amp_patch.casts import install, regions
from amp_patch.policy import Policy

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4))

    def forward(self, x):
        x = self.layers(x)
        return F.softmax(x, dim=-1) + torch.exp(x) + x.exp() + (x @ x.T).sum()

torch.manual_seed(0)
model, x = Model(), torch.randn(4, 2, 4, 4)
with install.use_backend(BACKEND):
    install.install()
    compiled = torch.compile(model, backend="eager")
    for dtype in (torch.float16, torch.bfloat16) * 2:
        with regions.region(Policy("O1", dtype=dtype, patch_torch_functions=True)):
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import torch._dynamo"], ids=["installed first", "compiler first"])
def test_compiled_models_give_the_same_numbers(first: str, wrappers: str) -> None:
    """In a process of its own: the compiler keeps what it finds in torch's namespace when it is imported."""
    code = f"{first}\nBACKEND = {wrappers!r}\n{COMPILED}"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


def test_torch_jit_forgets_a_wrapper_that_is_gone() -> None:
    """It knows builtins by their id, which another function may have next: that one was compiled as `torch.eye`."""
    table = importlib.import_module("torch.jit._builtins")._get_builtin_table()

    def wrapper(*args: Any) -> Any:
        return torch.eye(*args)

    known = len(table)
    cast_wrappers.register_with_jit(wrapper, torch.eye)
    assert table[id(wrapper)] == "aten::eye" and len(table) == known + 1
    del wrapper
    gc.collect()
    assert len(table) == known


@needs_install
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torch_jit_script_compiles_through_the_wrappers() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(dim=-1))
    x = torch.randn(2, 4)
    expected = module(x)
    torch.testing.assert_close(torch.jit.script(module)(x), expected, rtol=0, atol=0)
    assert torch.jit.script(_exponential)(x).dtype is FULL


def _exponential(x: Tensor) -> Tensor:
    return torch.exp(x) + F.softmax(x, dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# The rules in a call


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_what_is_never_cast(dtype: torch.dtype) -> None:
    wide, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    with regions.region(o1(dtype)):
        assert torch.mm(wide, wide).dtype is torch.float64 and (wide**2).dtype is torch.float64
        assert torch.mm(whole, whole).dtype is torch.int64 and (whole**2).dtype is torch.int64
        assert torch.sum(whole).dtype is torch.int64
        out = torch.empty(2, 2)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=out) is out and out.tolist() == [[2.0, 2.0]] * 2
        low = torch.ones(2, dtype=dtype)
        assert torch.sum(low, dtype=dtype).dtype is dtype, "an explicit type is the user's word"
        assert F.softmax(low, dim=0, dtype=torch.float64).dtype is torch.float64


@needs_install
def test_arguments_that_need_no_cast_arrive_as_they_are() -> None:
    seen: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    x, items = torch.ones(2, dtype=HALF), [torch.ones(2, dtype=HALF)]
    full = torch.ones(2, dtype=FULL)
    rules.RULES["fp32"].apply(function, (x, full), {"dtype": FULL}, o1())
    assert seen.pop()[0] == (x, full), "an explicit type asks for no cast before the call"
    for rule in ("lower", "widest", "match_self"):
        rules.RULES[rule].apply(function, (x, items), {"y": items}, o1())
        args, kwargs = seen.pop()
        assert args[0] is x and args[1] is items and kwargs["y"] is items


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_arguments_in_sequences_and_keywords(dtype: torch.dtype) -> None:
    a = torch.ones(2, 2)
    with regions.region(o1(dtype)):
        assert torch.linalg.multi_dot([a, a, a]).dtype is dtype
        assert torch.einsum("ij,jk->ik", [a, a]).dtype is dtype
        assert F.linear(input=a, weight=a, bias=None).dtype is dtype
        assert torch.dot(input=a[0], tensor=a[0].to(dtype)).dtype is FULL


@needs_install
def test_keywords_that_are_none_ask_for_nothing() -> None:
    full, low = torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)
    with regions.region(o1()):
        assert torch.mm(full, full, out=None).dtype is HALF
        assert torch.sum(low, dtype=None).dtype is F.softmax(low, dim=0, dtype=None).dtype is FULL
        assert F.group_norm(low, 1, weight=None).dtype is FULL


@needs_install
@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_keep_their_kind(kind: type) -> None:
    seen: list[Any] = []

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(arg for arg in args if arg is not low and not isinstance(arg, (torch.dtype, Tensor)))
            seen.extend(arg for arg in args if func is Tensor.to and arg is low)
            return func(*args, **(kwargs or {}))

    low = torch.ones(2, dtype=HALF)
    with regions.region(o1()), Recording():
        torch.sum(low, dtype=HALF)
        assert seen == [], "an explicit type asks for no cast before the call"
        torch.linalg.multi_dot(kind([torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)]))
    (matrices,) = [arg for arg in seen if isinstance(arg, (list, tuple))]
    assert type(matrices) is kind and [matrix.dtype for matrix in matrices] == [HALF, HALF]


@needs_install
def test_tensors_without_dimensions_do_not_widen() -> None:
    x, scalar = torch.ones(3, dtype=HALF), torch.tensor(2.0)
    with regions.region(o1()):
        assert torch.addcmul(x, x, scalar).dtype is HALF
        assert torch.lerp(x, x, scalar).dtype is HALF
        assert torch.isclose(scalar, scalar.half())


NORMS = {
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_batch_and_instance_norms_are_torch_autocast_s(name: str, dims: int, dtype: torch.dtype, device: str) -> None:
    """The input's type in and out, weights and statistics FP32: forward, backward and double backward, to the bit."""

    def run(norm: nn.Module, given: Tensor, area: Any) -> list[Tensor]:
        x = given.clone(memory_format=torch.preserve_format).requires_grad_()
        weights = list(norm.parameters())
        with area:
            y = norm(x)
        gradients = torch.autograd.grad(y.float().pow(3).sum(), [x, *weights], create_graph=True)
        twice = torch.autograd.grad(gradients[0].float().square().sum(), [x, *weights[:1]])
        return [y, *gradients, *twice, *norm.buffers()]

    torch.manual_seed(0)
    given = torch.randn(4, 3, *(5, 4, 3)[:dims]).to(device=device, dtype=dtype)
    formats = [given, given.contiguous(memory_format=LAST[dims])] if dims in LAST else [given]
    for affine, tracked, training in itertools.product((True, False), repeat=3):
        if not (training or tracked):
            continue  # as in training
        made = NORMS[name][dims - 1](3, affine=affine, track_running_stats=tracked).to(device).train(training)
        for weight in made.parameters():
            nn.init.uniform_(weight)
        for x in formats:
            ours, theirs = (copy.deepcopy(made) for _ in range(2))
            found = run(ours, x, regions.region(o1(dtype)))
            assert found[0].dtype is dtype and {weight.dtype for weight in ours.parameters()} <= {FULL}
            assert {value.dtype for value in ours.buffers()} <= {FULL, torch.int64}
            wanted = run(theirs, x, torch.autocast(x.device.type, dtype))
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            # Of FP32 numbers of the same values: what is rounded is the result and its input's gradient.
            exact = run(copy.deepcopy(made), x.float(), contextlib.nullcontext())
            torch.testing.assert_close(found[0], exact[0].to(dtype), rtol=2**-7, atol=2**-7)
            if affine or name == "batch_norm":  # else a CPU computes the statistics in the input's type
                statistics = list(ours.buffers())
                torch.testing.assert_close(statistics, exact[len(exact) - len(statistics) :])


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_norms_that_are_called_by_name(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(8, 3, 4, 4, device=device)
    none = dict.fromkeys(("weight", "bias", "running_mean", "running_var"))
    options = {"momentum": 0.1, "eps": 1e-5}
    weights, statistics = (
        [torch.ones(3, device=device)] * 2,
        [torch.zeros(3, device=device), torch.ones(3, device=device)],
    )
    with regions.region(o1(dtype)):
        for given in (x.to(dtype), x, x.double()):  # whatever comes in comes out
            named = [
                torch.batch_norm(input=given, **none, training=True, cudnn_enabled=False, **options),
                torch.instance_norm(given, **none, use_input_stats=True, cudnn_enabled=False, **options),
                torch.native_batch_norm(given, None, None, None, None, True, 0.1, 1e-5)[0],
                F.batch_norm(given, None, None, training=True),
                F.instance_norm(given),
            ]
            assert {result.dtype for result in named} == {given.dtype}
        assert F.batch_norm(x.to(dtype), *statistics, *weights, training=False).dtype is dtype
        assert nn.SyncBatchNorm(3).to(device).eval()(x.to(dtype)).dtype is dtype
        low = nn.BatchNorm2d(3).to(device=device, dtype=dtype)  # cast as a module, as at O3
        low(x.to(dtype))
    assert low.running_mean.abs().sum() > 0, "the update of the statistics went to a copy"


@needs_install
def test_errors_are_the_originals() -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    itself: list[Any] = []
    itself.append(itself)
    with regions.region(o1()):
        for call in (lambda: x @ y, lambda: torch.mm(x, y), lambda: F.linear(x, y.T), lambda: torch.bmm(x, y)):
            with pytest.raises(RuntimeError):
                call()
        for call in (torch.exp, lambda: torch.exp("x"), lambda: F.linear(x), lambda: F.linear(x, y, y, y)):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(TypeError, match="unsupported operand"):
            x @ "y"
        with pytest.raises(RecursionError):
            torch.linalg.multi_dot(itself)
        itself.insert(0, x)  # something to cast in front
        with pytest.raises(RecursionError):
            torch.linalg.multi_dot(itself)
        set_item = torch.Tensor.__setitem__
        for call in (torch.Tensor.addmm_, lambda: torch.Tensor.addmm_("x", x, y), lambda: set_item(3, 0, 1)):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(RuntimeError):  # integers are not what the others are cast to
            torch.ones(2, dtype=torch.int64).index_add_(0, torch.tensor([0]), x[0, :1])
    with pytest.raises(TypeError):
        set_item(3, 0, 1)  # outside of regions too


def test_functions_of_others_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have replaced what the lists name before us."""
    seen: list[torch.dtype] = []
    linear = F.linear

    def counted(*args: Any) -> Tensor:
        seen.extend(arg.dtype for arg in args if arg is not None)
        return linear(*args)

    monkeypatch.setattr(F, "linear", counted)
    install.install()
    with regions.region(o1()):
        assert nn.Linear(2, 2, bias=False)(torch.ones(1, 2)).dtype is HALF
    install.uninstall()  # before monkeypatch puts its original back
    assert seen == [HALF, HALF]


@needs_install
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_their_gradients(bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, offset = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(5, 4)), torch.randn(5)
    extra = (offset,) if bias else (None,)
    low = [t.detach().half().requires_grad_() for t in (x, weight)]
    expected = F.linear(*low, offset.half() if bias else None)
    expected.sum().backward()
    with regions.region(o1()):
        for result in (F.linear(x, weight, *extra), F.linear(x, weight=weight, bias=extra[0])):
            x.grad = weight.grad = None
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
            result.sum().backward()
            torch.testing.assert_close(x.grad, low[0].grad.float(), rtol=0, atol=0)
            torch.testing.assert_close(weight.grad, low[1].grad.float(), rtol=0, atol=0)


@needs_install
def test_no_references_are_lost_or_kept() -> None:
    x, y, weight = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64), nn.Parameter(torch.ones(2, 2))
    low, items, policy = x.half(), [x, x.half()], o1()
    index = (0, 1)
    counted = (x, y, weight, low, items, index, policy, original(torch.exp), original(torch.Tensor.exp), F.softmax)

    def round_of_calls() -> None:
        with regions.region(policy):
            for _ in range(50):
                x @ weight, torch.mm(x, x), F.linear(x, weight), F.linear(x, weight, None), torch.exp(low), low.exp()
                torch.linalg.multi_dot(items), torch.dot(x[0], other := low[0]), F.softmax(low, dim=0), low**2
                F.layer_norm(low, (2,), weight=None), torch.sum(low, dtype=FULL), torch.sum(low, 0, out=torch.ones(2))
                x.index_add_(0, torch.tensor([0]), other.reshape(1, 2)), x.__setitem__(index, low[0, 0])
                x[0] = low[0]
                for wrong in (lambda: x @ y, lambda: torch.exp(low, low, low), lambda: x.lerp_(low)):
                    with contextlib.suppress(RuntimeError, TypeError):
                        wrong()

    round_of_calls()
    gc.collect()
    before = [sys.getrefcount(item) for item in counted], len(gc.get_objects())
    for _ in range(3):
        round_of_calls()
    gc.collect()
    after = [sys.getrefcount(item) for item in counted], len(gc.get_objects())
    assert after[0] == before[0]
    assert after[1] - before[1] < 20, "fewer are what earlier tests had left"


@needs_install
def test_subclasses_and_torch_function_objects() -> None:
    class Logged(Tensor):
        calls: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func

    x = torch.ones(2, 2).as_subclass(Logged)
    with regions.region(o1()):
        result = torch.mm(x, x)
        assert torch.exp(Duck()) is original(torch.exp)
    assert type(result) is Logged and result.dtype is HALF
    assert original(torch.mm) in Logged.calls


# ---------------------------------------------------------------------------------------------------------------------
# Regions


@needs_install
def test_regions_and_the_default() -> None:
    outer, inner = o1(HALF), o1(torch.bfloat16)
    assert casts_state.current() is None and casts_state.entered() is None
    casts_state.set_default(outer)
    assert casts_state.current() is outer and casts_state.entered() is None
    with regions.region(inner):
        assert casts_state.current() is inner and casts_state.entered() is inner
        with regions.region(OFF):
            assert casts_state.current() is None and casts_state.entered() is OFF
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is FULL
        with casts_autocast.disable_casts():
            assert casts_state.current() is None and casts_state.entered() is inner, "disable_casts is transparent"
        assert casts_state.current() is inner
    assert casts_state.current() is outer
    casts_state.set_default(OFF)
    assert casts_state.current() is None


@pytest.mark.parametrize(
    "make", [lambda: regions.region(o1()), casts_autocast.disable_casts, lambda: regions.process_wide_region(o1())]
)
def test_an_exception_restores(make: Callable[[], Any]) -> None:
    outer = o1(torch.bfloat16)
    casts_state.set_default(outer)
    with pytest.raises(KeyError), make():
        raise KeyError
    assert casts_state.current() is outer and run_in_thread(casts_state.current) is outer


def test_one_object_nested_and_in_threads() -> None:
    shared = regions.region(o1())
    with shared, shared:
        assert casts_state.current() is shared.policy
    assert casts_state.current() is None
    with shared:
        assert run_in_thread(casts_state.current) is None, "regions are the thread's"
        barrier = threading.Barrier(4)

        def work() -> bool:
            for _ in range(200):
                with shared:
                    if casts_state.current() is not shared.policy:
                        return False
                if casts_state.current() is not None:
                    return False
            barrier.wait()
            return True

        results: list[bool] = []
        threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 4
        assert casts_state.current() is shared.policy


def test_regions_that_end_out_of_order() -> None:
    first, second = o1(HALF), o1(torch.bfloat16)

    def generator() -> Iterator[None]:
        with regions.region(first):
            yield

    suspended = generator()
    next(suspended)
    with regions.region(second):
        suspended.close()
        assert casts_state.current() is second
    assert casts_state.current() is None


def suspended_in(block: regions.region) -> Iterator[None]:
    """A generator that is suspended in `block`, and started."""

    def generator() -> Iterator[None]:
        with block:
            yield

    started = generator()
    next(started)
    return started


REGIONS: dict[str, Callable[[], regions.region]] = {
    "region": lambda: regions.region(None),
    "process_wide_region": lambda: regions.process_wide_region(None),
    "no_casts_within": regions.no_casts_within,
}


@pytest.mark.parametrize("kind", REGIONS)
def test_a_region_that_ends_while_another_one_is_left_takes_itself_away(kind: str) -> None:
    """As where the garbage collector finds a suspended generator in the middle of an exit."""

    class EndsAnother(regions.region):
        def on_exit(self, entry: Any) -> None:
            other.close()

    other = suspended_in(REGIONS[kind]())
    with EndsAnother(None):
        pass
    assert casts_state.outside()
    assert not thread_state.this_thread.uncastable_entries
    assert not casts_state.overrides


def test_regions_end_wherever_the_garbage_collector_finds_their_generators() -> None:
    def forget_one() -> None:
        cycle: list[Any] = [suspended_in(regions.process_wide_region(None))]
        cycle.append(cycle)

    thresholds = gc.get_threshold()
    try:
        for allocations in range(1, 120):
            gc.set_threshold(100_000)
            forget_one()
            with regions.process_wide_region(None), regions.no_casts_within():
                gc.set_threshold(allocations)
            gc.set_threshold(*thresholds)
            gc.collect()
            assert casts_state.outside(), allocations
            assert not thread_state.this_thread.uncastable_entries, allocations
            assert not casts_state.overrides, allocations
    finally:
        gc.set_threshold(*thresholds)


def test_a_generator_that_ends_on_another_thread_takes_its_region_away() -> None:
    suspended = suspended_in(regions.process_wide_region(o1(torch.bfloat16)))
    assert casts_state.current() is not None
    run_in_thread(suspended.close)
    assert not casts_state.overrides, "the process default is as before, at once"
    with regions.region(None):
        pass
    assert casts_state.outside(), "the thread's own share went with its next region"
    assert casts_state.current() is None


def test_everywhere_is_the_default_of_other_threads() -> None:
    policy, base = o1(), o1(torch.bfloat16)
    with regions.process_wide_region(policy):
        assert casts_state.current() is policy and casts_state.entered() is policy
        assert run_in_thread(casts_state.current) is policy
        with regions.process_wide_region(OFF):
            assert run_in_thread(casts_state.current) is None and casts_state.entered() is OFF
        assert run_in_thread(casts_state.current) is policy
        casts_state.set_default(base)  # initialize() in the body: holds from the end of it on
        assert run_in_thread(casts_state.current) is policy
    assert casts_state.current() is base and run_in_thread(casts_state.current) is base


def test_everywhere_may_end_in_any_order() -> None:
    first, second = regions.process_wide_region(o1(HALF)), regions.process_wide_region(o1(torch.bfloat16))
    run_in_thread(first.__enter__)
    run_in_thread(second.__enter__)
    first.__exit__(None, None, None)
    assert casts_state.current() is second.policy
    second.__exit__(None, None, None)
    assert casts_state.current() is None


@needs_install
def test_region_as_decorator() -> None:
    a = torch.ones(2, 2)

    class Model:
        @casts_autocast.autocast(dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

        @casts_autocast.autocast(dtype=torch.bfloat16)
        def steps(self, x: Tensor) -> Iterator[Any]:
            try:
                received = yield x @ x
            except KeyError:
                received = "caught"
            yield received, (x @ x).dtype

    assert Model().forward(a).dtype is torch.bfloat16
    assert Model.forward.__name__ == "forward"
    steps = Model().steps(a)
    assert next(steps).dtype is torch.bfloat16
    assert casts_state.current() is None, "the region leaked out of the suspended generator"
    assert steps.send("sent") == ("sent", torch.bfloat16)
    steps = Model().steps(a)
    next(steps)
    assert steps.throw(KeyError) == ("caught", torch.bfloat16)
    steps.close()

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match=r"autocast: .*coroutine is async"):
        casts_autocast.autocast()(coroutine)


def test_autocast_arguments() -> None:
    assert casts_autocast.autocast("cpu").policy.dtype is torch.get_autocast_dtype("cpu")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    assert casts_autocast.autocast().policy.dtype is torch.get_autocast_dtype(default)
    assert casts_autocast.autocast("cpu", HALF, True, False).policy.dtype is HALF
    with pytest.raises(ValueError, match="autocast: device_type is 'gpu'"):
        casts_autocast.autocast("gpu")
    with pytest.raises(TypeError, match="autocast: device_type is 3"):
        casts_autocast.autocast(3)  # type: ignore[arg-type]
    for wrong in (FULL, torch.int8, "half"):
        with pytest.raises(ValueError, match=r"autocast: dtype is .*; wanted torch.float16 or torch.bfloat16"):
            casts_autocast.autocast(dtype=wrong)  # type: ignore[arg-type]


def test_autocast_installs_and_nests() -> None:
    a = torch.ones(2, 2)
    with casts_autocast.autocast(enabled=False):
        assert not install.installed()
    with casts_autocast.autocast(dtype=HALF):
        assert install.installed() and (a @ a).dtype is HALF
        with casts_autocast.autocast(enabled=False):
            assert (a @ a).dtype is FULL
            with casts_autocast.autocast(dtype=torch.bfloat16):
                assert (a @ a).dtype is torch.bfloat16
        assert (a @ a).dtype is HALF
    assert (a @ a).dtype is FULL


# ---------------------------------------------------------------------------------------------------------------------
# The weight cache


def cached() -> int:
    return casts_state.state().cached()


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_a_weight_is_cast_once_a_region(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    plain, activation = torch.ones(2, 2), weight * 1
    with regions.region(o1(dtype)):
        assert casts_state.cast_weight(weight, dtype) is casts_state.cast_weight(weight, dtype)
        assert casts_state.cast_weight(frozen, dtype) is casts_state.cast_weight(frozen, dtype)
        assert casts_state.cast_weight(plain, dtype) is not casts_state.cast_weight(plain, dtype), (
            "activations are not kept"
        )
        assert casts_state.cast_weight(activation, dtype) is not casts_state.cast_weight(activation, dtype)
        with regions.region(OFF), regions.region(o1(dtype)):
            pass
        assert cached() == 2, "an inner region's end dropped the outer one's casts"
        casts_state.drop_cache()
        assert cached() == 0
        casts_state.cast_weight(weight, dtype)
    assert cached() == 0, "the outermost region's end keeps casts"
    casts_state.cast_weight(weight, dtype)
    assert cached() == 0, "outside regions nothing says when to forget"
    with regions.region(o1(dtype)):
        casts_state.cast_weight(weight, dtype)
        with regions.process_wide_region(o1(dtype)):
            pass
        assert cached() == 0
    with casts_autocast.autocast(dtype=dtype, cache_enabled=False):
        assert casts_state.cast_weight(weight, dtype) is not casts_state.cast_weight(weight, dtype)


@needs_install
def test_a_weight_is_remembered_in_each_type() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with regions.region(o1(HALF)):
        assert F.linear(x, weight).dtype is HALF
        with regions.region(o1(torch.bfloat16)):
            assert F.linear(x, weight).dtype is torch.bfloat16
        assert F.linear(x, weight).dtype is HALF and cached() == 2


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_exist_after_a_forward_without(guard: Any, dtype: torch.dtype, device: str) -> None:
    """pytorch#65766."""
    layer = nn.Linear(3, 3, device=device)
    x = torch.ones(2, 3, device=device)
    with regions.region(o1(dtype)):
        with guard():
            layer(x)
        loss = layer(x).sum()
        with guard():
            assert not layer(x).requires_grad
        loss.backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
    assert layer.weight.grad.dtype is FULL


@needs_install
def test_casts_made_in_inference_mode_stay_there() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    x = torch.ones(1, 2, requires_grad=True)
    with torch.inference_mode():
        born_there = nn.Linear(2, 2)
    with regions.region(o1()):
        with torch.inference_mode():
            frozen(x)
            assert born_there(x).dtype is HALF  # its weights count no versions
        frozen(x).sum().backward()  # an inference tensor could not be saved for this
    assert x.grad is not None


@needs_install
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_casts_made_in_a_trace_are_not_kept() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with regions.region(o1()):
        layer(x)
        traced = torch.jit.trace(layer, x, check_trace=False)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
            assert traced(x).abs().sum() == 0, "the trace holds a cast weight as a constant"


@needs_install
def test_thawed_and_frozen_weights() -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with regions.region(o1()):
        layer.requires_grad_(False)
        assert not layer(x).requires_grad
        layer.requires_grad_(True)
        assert layer(x).requires_grad
        layer.requires_grad_(False)
        assert not layer(x).requires_grad


@needs_install
def test_edited_weights_are_cast_again() -> None:
    weight = nn.Parameter(torch.ones(1, 1))
    x = torch.ones(1, 1)
    with regions.region(o1()):
        assert (x @ weight).item() == 1.0
        with torch.no_grad():
            weight.fill_(2.0)
        assert (x @ weight).item() == 2.0
        layer = nn.Linear(1, 1, bias=False)
        layer(x)
        layer.load_state_dict({"weight": torch.full((1, 1), 3.0)})
        assert layer(x).item() == 3.0


class During(TorchFunctionMode):
    """Runs `action` after each call of `Tensor.to`, as another thread may while a cast runs."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__()
        self.action = action

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to:
            self.action()
        return result


@needs_install
def test_a_weight_edited_while_it_is_cast_is_cast_again() -> None:
    weight, x = nn.Parameter(torch.ones(1, 1), requires_grad=False), torch.ones(1, 1, dtype=HALF)
    with regions.region(o1()):
        with During(lambda: weight.add_(1)):
            assert (x @ weight).item() == 1.0
        assert (x @ weight).item() == 2.0


@needs_install
def test_a_region_left_while_a_weight_is_cast_leaves_nothing() -> None:
    weight, region = nn.Parameter(torch.ones(1, 1)), regions.region(o1())
    region.__enter__()
    with During(lambda: region.__exit__(None, None, None)):
        torch.ones(1, 1, dtype=HALF) @ weight
    assert cached() == 0


@needs_install
def test_entries_die_with_their_tensors() -> None:
    with regions.region(o1()), torch.no_grad():
        weight = nn.Parameter(torch.ones(2, 2))
        cast = weakref.ref(casts_state.cast_weight(weight, HALF))
        assert cached() == 1 and cast() is not None
        del weight
        gc.collect()
        assert cached() == 0 and cast() is None


@needs_install
def test_a_weight_may_die_anywhere() -> None:
    """In another thread; after the region; after the thread that cast it; while somebody holds our weak reference."""
    weights = [nn.Parameter(torch.ones(2, 2), requires_grad=False) for _ in range(4)]
    held: list[Any] = []

    def cast(weight: Tensor) -> None:
        casts_state.cast_weight(weight, HALF)
        held.extend(weakref.getweakrefs(weight))

    with regions.region(o1()):
        cast(weights[0])
        run_in_thread(lambda: weights.__delitem__(0))
        assert cached() == 0
        cast(weights[0])
        casts_state.drop_cache()
        del weights[0]
        cast(weights[0])
    del weights[0]

    def leave_a_region_open() -> None:
        regions.region(o1()).__enter__()
        cast(weights[0])

    run_in_thread(leave_a_region_open)
    del weights[0]
    gc.collect()
    assert cached() == 0 and [reference() for reference in held] == [None] * len(held)


@needs_install
def test_nothing_grows_over_evaluations() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with regions.region(o1()), torch.no_grad():
        layer(x)
        before = cached()
        for _ in range(100):
            layer(x)
            nn.Linear(4, 4)(x)  # a new model each time
        gc.collect()
        assert cached() == before == 2


@needs_install
def test_stand_ins_are_not_kept() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    with regions.region(o1()):
        torch.func.grad(lambda y: (y @ weight).sum().float())(x)
        torch.func.vmap(lambda y: y @ weight)(x)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            mode.from_tensor(x) @ weight
        assert cached() == 0
        (x @ weight).sum().backward()
    assert weight.grad is not None


# ---------------------------------------------------------------------------------------------------------------------
# Modules, gradients, threads


def reference_and_casts(module: nn.Module, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Any]:
    expected = module(*inputs)
    with regions.region(o1(dtype)):
        return expected, module(*inputs)


def close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """A few roundings to `dtype` of numbers of the size of 1: eps is 2**-10 for FP16, 2**-7 for BF16; we allow 8."""
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("given", ["float32", "low", "packed"])
def test_recurrent_networks(kind: Any, given: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    network = kind(4, 5, num_layers=2, bidirectional=True).to(device)
    x = torch.randn(6, 3, 4, device=device)
    expected = network(x)[0]
    with regions.region(o1(dtype)):
        if given == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 6, 6]))
            result = nn.utils.rnn.pad_packed_sequence(network(packed)[0])[0]
        else:
            result = network(x.to(dtype) if given == "low" else x)[0]
    assert result.dtype is dtype
    close(result, expected, dtype)
    result.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FULL for p in network.parameters())


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(kind: Any, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    cell = kind(4, 5).to(device)
    x = torch.randn(3, 4, device=device)
    expected, result = reference_and_casts(cell, dtype, x)
    expected, result = (out[0] if isinstance(out, tuple) else out for out in (expected, result))
    assert result.dtype is dtype
    close(result, expected, dtype)


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("training", [True, False])
def test_attention(training: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, device=device)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, device=device).train(training)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, device=device)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    expected = attention(x, x, x)[0], encoder(x)
    with torch.set_grad_enabled(training), regions.region(o1(dtype)), Products() as products:
        result = attention(x, x, x)[0], encoder(x)
    close(result[0], expected[0], dtype)
    close(result[1], expected[1], dtype)
    assert result[0].dtype is dtype
    assert result[1].dtype is FULL, "a layer norm comes last"
    assert set(products.types) == {dtype} and len(products.types) >= 10, "a fused path went round the lists"


class Products(TorchDispatchMode):
    """The types of the matrix products in the block, each as torch's kernel gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in ("mm.", "dot_product", "attention", "encoder_layer")):
            self.types.append((result[0] if isinstance(result, tuple) else result).dtype)
        return result


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_double_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4))
    x = torch.randn(4, 2, 4, 4, requires_grad=True)

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).exp().sum(), x, create_graph=True)
        model.zero_grad()
        (gradient.norm() - 1).square().backward()
        return model[0].weight.grad.clone()

    expected = penalty()
    with regions.region(o1(dtype)):
        result = penalty()
    assert result.dtype is FULL and result.abs().sum() > 0
    torch.testing.assert_close(result, expected, rtol=0.2, atol=0.05 * float(expected.abs().max()))


@needs_install
def test_threads_have_their_own_policies_and_caches() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    failures: list[str] = []

    def work(dtype: torch.dtype) -> None:
        for _ in range(50):
            with regions.region(o1(dtype)):
                if layer(x).dtype is not dtype or layer(x).dtype is not dtype:
                    failures.append(f"not {dtype}")
                if cached() != 2:
                    failures.append(f"{cached()} casts")
            if layer(x).dtype is not FULL:
                failures.append("casts outside")

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (HALF, torch.bfloat16) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@needs_install
def test_threads_that_share_weights_under_stress() -> None:
    """Regions, casts and caches while weights change, die and are collected by other threads."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x, shared, failures = torch.ones(2, 4), [torch.ones(4, 4)], []
    barrier = threading.Barrier(5)

    def work(dtype: torch.dtype) -> None:
        barrier.wait()
        for step in range(150):
            with regions.region(o1(dtype)), torch.set_grad_enabled(step % 3 > 0):
                result = model(x)
                frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
                shared[0] = frozen  # the one before dies in this thread
                types = [result.dtype, (x @ frozen).dtype, torch.exp(result).dtype, F.linear(x, shared[0]).dtype]
                if types != [dtype, dtype, FULL, dtype]:
                    failures.append(types)
                if step % 10 == 0:
                    casts_state.drop_cache()
            if model(x).dtype is not FULL or cached():
                failures.append("casts outside")

    def disturb() -> None:
        barrier.wait()
        for _ in range(60):
            with torch.no_grad():
                model[0].weight.mul_(1)
            gc.collect()

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (HALF, torch.bfloat16) * 2]
    threads.append(threading.Thread(target=disturb))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


class Examples(torch.utils.data.Dataset):
    """Each example is what a worker process finds: the types of a product outside regions, inside one, and outside."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        x, weight = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
        types = [(x @ weight).dtype]
        with casts_autocast.autocast("cpu", dtype=HALF):
            types += [(x @ weight).dtype, run_in_thread(lambda: (x @ weight).dtype)]
        return [str(dtype) for dtype in (*types, (x @ weight).dtype)]


@needs_install
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader(start: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    outside, inside = str(FULL), str(HALF)
    # A worker that is forked inside a region is inside it, as threads' state is copied; one that is spawned is not.
    within = str(torch.bfloat16) if start == "fork" else outside
    with regions.region(o1(torch.bfloat16)):
        casts_state.cast_weight(weight, torch.bfloat16)
        loader = torch.utils.data.DataLoader(
            Examples(), batch_size=None, num_workers=1, multiprocessing_context=start, collate_fn=list
        )
        assert list(loader) == [[within, inside, outside, within]] * 4
        assert cached() == 1


@needs_install
def test_data_parallel_threads() -> None:
    """What DataParallel's threads do: the same module, each thread in the region of its own forward."""
    model = nn.Linear(4, 4)
    forward = regions.region(o1())(model.forward)
    results: list[torch.dtype] = []
    threads = [threading.Thread(target=lambda: results.append(forward(torch.ones(2, 4)).dtype)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [HALF] * 8


@needs_install
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_the_same(reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)

    def gradient(use: bool) -> Tensor:
        layer.zero_grad()
        with regions.region(o1()):
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant) if use else layer(x)
        with regions.process_wide_region(o1()):
            out.float().sum().backward()
        return layer.weight.grad.clone()

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


@needs_install
@pytest.mark.parametrize("cpu_fp16", ["native", "emulate"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_under_the_casts_of_the_first_time(reentrant: bool, cpu_fp16: str) -> None:
    """Wherever backward runs: outside of regions, as torch advises for autocast, and under other casts."""
    x, seen = torch.ones(2, 4, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        seen.append((casts_state.current(), (x @ x.T).dtype))
        return (x @ x.T).float()

    inside, policies = o1(cpu_fp16=cpu_fp16), (o1(cpu_fp16=cpu_fp16), o1(torch.bfloat16), OFF, None)
    for policy in policies:
        with regions.region(inside), regions.region(policy):
            out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        out.sum().backward()
        with regions.region(inside), regions.region(policy):
            out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        with regions.process_wide_region(o1(torch.bfloat16)):
            out.sum().backward()
        assert seen == [seen[0]] * 4, "twice forward and recomputation"
        seen.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Decorators and registration

DECORATORS = [
    (functions.half_function, HALF),
    (functions.float_function, FULL),
    (functions.promote_function, FULL),
]


def types_of(*args: Any) -> list[torch.dtype]:
    return [arg.dtype for arg in args]


@pytest.mark.parametrize(("decorator", "expected"), DECORATORS)
def test_decorators_act_while_casts_are_on(decorator: Any, expected: torch.dtype) -> None:
    function = decorator(types_of)
    args = torch.ones(1), torch.ones(1, dtype=HALF), torch.ones(1, dtype=torch.int64)
    assert function(*args) == types_of(*args)
    with regions.region(o1()):
        assert function(*args) == [expected, expected, torch.int64]
        with casts_autocast.disable_casts():
            assert function(*args) == types_of(*args)
    assert function.__name__ == "types_of" and function.__wrapped__ is types_of
    assert inspect.signature(function) == inspect.signature(types_of)


class Callables:
    @functions.half_function
    def method(self, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @functions.half_function
    def static(x: Tensor) -> Tensor:
        return x

    @functions.half_function
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return x

    @functions.half_function
    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        assert cls is Callables
        return x

    def plain(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    @functions.half_function
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seen = x.dtype
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert gradient.dtype is ctx.seen
        return gradient * 2


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    "function",
    [
        Callables().method,
        Callables.static,
        Callables.static_inside,
        Callables().static_inside,
        Callables.of_class,
        functions.half_function(Callables().plain),
        functions.half_function(Callables()),
        functions.half_function(Plain.apply),
        functions.half_function(torch._C._nn.gelu),
        functions.half_function(torch.Tensor.relu),
        functions.half_function(functions.half_function(torch.relu)),
    ],
)
def test_kinds_of_callables(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, requires_grad=True)
    assert function(x).dtype is FULL
    with regions.region(o1()):
        result = function(x)
    assert result.dtype is HALF
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype is FULL


def test_decorated_callables_keep_their_way_of_binding() -> None:
    class Module:
        builtin = functions.float_function(torch._C._nn.gelu)
        bound = functions.float_function(Callables().plain)
        twice = functions.float_function(functions.half_function(torch._C._nn.gelu))

        @functions.float_function
        def method(self, x: Tensor) -> Tensor:
            assert isinstance(self, Module)
            return x

    x = torch.ones(2, dtype=HALF)
    with regions.region(o1()):
        assert Module().builtin(x).dtype is Module().bound(x).dtype is Module().method(x).dtype is FULL
        assert Module().twice(x).dtype is HALF


def test_decorated_builtins_copy_and_pickle() -> None:
    gelu = functions.float_function(torch._C._nn.gelu)
    assert copy.deepcopy(gelu) is gelu
    loaded = pickle.loads(pickle.dumps(gelu))
    with regions.region(o1()):
        assert loaded(torch.ones(1, dtype=HALF)).dtype is FULL


def test_autograd_function_gradients_arrive_in_the_types_of_the_inputs() -> None:
    x = torch.ones(2, requires_grad=True)
    with regions.region(o1()):
        y = Doubled.apply(x)
        assert y.dtype is HALF
        y.sum().backward()
    assert x.grad.dtype is FULL and x.grad.tolist() == [2.0, 2.0]


def test_decorators_look_into_containers() -> None:
    seen: dict[str, Any] = {}

    @functions.half_function
    def function(batch: dict[str, Any], *, extra: Any) -> None:
        seen.update(batch=batch, extra=extra)

    with regions.region(o1()):
        function({"x": (torch.ones(1), 3)}, extra=[torch.ones(1)])
    assert seen["batch"]["x"][0].dtype is HALF and seen["batch"]["x"][1] == 3 and seen["extra"][0].dtype is HALF


def test_decorators_refuse_what_is_no_function() -> None:
    for decorator, _ in DECORATORS:
        with pytest.raises(TypeError, match=f"{decorator.__name__}: wanted a function, got 3"):
            decorator(3)


@contextlib.contextmanager
def temporary_module() -> Iterator[Any]:
    module = types.ModuleType("temporary_module")
    module.function = types_of
    yield module


@pytest.mark.parametrize("before", [True, False])
def test_registration_before_and_after_install(before: bool) -> None:
    x = torch.ones(1, dtype=HALF)
    with temporary_module() as module:
        if not before:
            install.install()
        functions.register_float_function(module, "function")
        if before:
            assert module.function is types_of
            install.install()
        with regions.region(o1()):
            assert module.function(x) == [FULL]
        install.uninstall()
        assert module.function is types_of
        install.install()
        with regions.region(o1()):
            assert module.function(x) == [FULL], "registration ended with uninstall"


@pytest.mark.parametrize("when", ["before", "after"])
def test_registration_overrides_the_lists(when: str) -> None:
    before = namespaces()
    if when == "after":
        install.install()
    functions.register_float_function(torch, "einsum")
    functions.register_half_function(torch, "sigmoid")
    functions.register_promote_function(torch, "mm")
    functions.register_half_function(torch, "mm")  # a later word holds
    functions.register_promote_function(torch, "mm")
    install.install()
    a = torch.ones(2, 2)
    with regions.region(o1()):
        assert torch.einsum("ij,jk->ik", a.half(), a.half()).dtype is FULL
        assert torch.sigmoid(a).dtype is HALF
        assert torch.mm(a, a.half()).dtype is FULL
        assert (a @ a).dtype is HALF
    install.uninstall()
    assert differences(before, namespaces()) == []


def test_registration_on_classes() -> None:
    class Base:
        def method(self, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def static(x: Tensor) -> Tensor:
            return x

        @classmethod
        def of_class(cls, x: Tensor) -> Tensor:
            assert cls is Derived
            return x

    class Derived(Base):
        pass

    for name in ("method", "static", "of_class"):
        functions.register_half_function(Derived, name)
    install.install()
    with regions.region(o1()):
        x = torch.ones(1)
        assert {getattr(Derived(), name)(x).dtype for name in ("method", "static", "of_class")} == {HALF}
        assert Base().method(x).dtype is FULL
    install.uninstall()
    assert not {"method", "static", "of_class"} & set(vars(Derived))


def test_registration_errors() -> None:
    register = {
        "register_half_function": functions.register_half_function,
        "register_float_function": functions.register_float_function,
        "register_promote_function": functions.register_promote_function,
    }
    for name, function in register.items():
        with pytest.raises(ValueError, match=f"{name}: torch has no function named 'nothing'"):
            function(torch, "nothing")
        with pytest.raises(TypeError, match=f"{name}: torch.float16 is not a function"):
            function(torch, "float16")
