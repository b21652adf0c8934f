"""Regions of ours beside torch.autocast: the inner one wins. And `amp.` in the place of `torch.amp.`."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import DEVICES
from half_kernels import half_kernels
from other_thread import run_in_thread
from torch import Tensor, nn
from training import LEVELS, SGD, convnet, images

from amp_patch import amp
from amp_patch.casts import install, regions
from amp_patch.casts import state as casts_state

pytestmark = pytest.mark.usefixtures("clean_casts")

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
a = torch.ones(2, 2)

# Who has the word tells the type of a product: ours FP16, torch's BF16.
KINDS: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "ours": (lambda: amp.autocast("cpu", HALF), HALF),
    "ours, off": (lambda: amp.autocast("cpu", enabled=False), FULL),
    "disable_casts": (lambda: amp.disable_casts(), FULL),
    "torch's": (lambda: torch.autocast("cpu", BF16), BF16),
    "torch's, off": (lambda: torch.autocast("cpu", enabled=False), FULL),
}
DEFAULTS = [None, "O1"]


@pytest.fixture
def default(request: pytest.FixtureRequest) -> torch.dtype:
    """The process default of that level; the type of a product outside of all regions."""
    if request.param is None:
        return FULL
    amp.initialize(nn.Linear(1, 1), opt_level=request.param)
    return HALF


def product() -> torch.dtype:
    made = a @ a
    linear = F.linear(a, a)
    assert made.dtype is linear.dtype and torch.equal(made, linear)
    return made.dtype


@pytest.mark.parametrize("default", DEFAULTS, indirect=True)
def test_the_inner_one_wins(default: torch.dtype) -> None:
    for names in itertools.product(KINDS, repeat=3):
        assert product() is default
        with ExitStack() as stack:
            for name in names:
                make, dtype = KINDS[name]
                stack.enter_context(make())
                assert product() is dtype, names
            for depth in (2, 1):
                inner = stack._exit_callbacks.pop()[1]  # type: ignore[attr-defined]
                inner(None, None, None)
                assert product() is KINDS[names[depth - 1]][1], names
    assert product() is default and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("names", list(itertools.permutations(KINDS, 2)))
def test_an_exception_restores(names: tuple[str, str]) -> None:
    (outer, dtype), (inner, _) = (KINDS[name] for name in names)
    with outer():
        with pytest.raises(KeyError), inner():
            raise KeyError("planted")
        assert product() is dtype
    assert product() is FULL and not torch.is_autocast_enabled("cpu")


def test_what_casts_to_fp32_is_the_inner_one_s_too() -> None:
    """torch's list for the CPU has this pool and leaves exp alone; ours, which is CUDA's, the other way round."""
    low = torch.ones(2).to(BF16)

    def pool() -> torch.Tensor:
        return F.adaptive_avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=BF16), 1)

    with torch.autocast("cpu", BF16):
        assert torch.exp(low).dtype is BF16 and pool().dtype is FULL
        with amp.autocast("cpu", BF16):
            assert torch.exp(low).dtype is FULL and pool().dtype is BF16
            with torch.autocast("cpu", BF16):
                assert torch.exp(low).dtype is BF16 and pool().dtype is FULL


@pytest.mark.parametrize("make", [KINDS[name][0] for name in ("ours", "ours, off", "disable_casts")])
def test_torch_s_is_off_inside_for_all_device_types_and_on_afterwards(make: Callable[[], Any]) -> None:
    types = ["cpu", "cuda", "xpu", "mps", "privateuseone"]
    for kind in types:
        torch.set_autocast_enabled(kind, True)
    try:
        with make():
            assert not any(torch.is_autocast_enabled(kind) for kind in types)
            assert torch.get_autocast_dtype("cpu") is BF16, "torch's types are left alone"
        assert all(torch.is_autocast_enabled(kind) for kind in types)
    finally:
        for kind in types:
            torch.set_autocast_enabled(kind, False)


def test_decorated_functions_and_generators() -> None:
    ours, theirs = amp.autocast("cpu", HALF), torch.autocast("cpu", BF16)
    assert ours(theirs(product))() is BF16 and theirs(ours(product))() is HALF

    @amp.autocast("cpu", HALF)
    def steps() -> Iterator[torch.dtype]:
        yield product()
        with torch.autocast("cpu", BF16):
            seen = product()
        yield seen
        yield product()

    with torch.autocast("cpu", BF16):
        for expected, seen in zip((HALF, BF16, HALF), steps(), strict=True):
            assert seen is expected
            assert product() is BF16, "nothing of the region is left between two steps"
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Regions that end in any order


def test_regions_of_ours_end_in_any_order_inside_torch_s() -> None:
    for order in itertools.permutations(range(3)):
        with torch.autocast("cpu", BF16):
            opened = [amp.autocast("cpu", HALF), amp.disable_casts(), amp.autocast("cpu", BF16)]
            for region in opened:
                region.__enter__()
            for index in order:
                assert not torch.is_autocast_enabled("cpu")
                opened[index].__exit__(None, None, None)
            assert product() is BF16 and torch.is_autocast_enabled("cpu")
        assert product() is FULL and not torch.is_autocast_enabled("cpu")


def test_a_passing_region_that_outlives_a_claiming_one_gives_torch_s_back() -> None:
    with torch.autocast("cpu", BF16):
        claiming, passing = amp.autocast("cpu", HALF), regions.region(None)
        claiming.__enter__()
        passing.__enter__()
        claiming.__exit__(None, None, None)
        assert product() is BF16
        passing.__exit__(None, None, None)
        assert product() is BF16
    assert product() is FULL


def test_a_region_that_outlives_torch_s_does_not_turn_it_on_again() -> None:
    def suspended() -> Iterator[None]:
        with amp.autocast("cpu", HALF):
            yield

    steps = suspended()
    with torch.autocast("cpu", BF16):
        next(steps)
    assert product() is HALF
    steps.close()
    assert product() is FULL and not torch.is_autocast_enabled("cpu")


def test_torch_s_that_outlives_a_region_of_ours() -> None:
    ours, theirs = amp.autocast("cpu", HALF), torch.autocast("cpu", BF16)
    ours.__enter__()
    theirs.__enter__()
    ours.__exit__(None, None, None)
    assert product() is BF16
    theirs.__exit__(None, None, None)
    assert product() is FULL


# ---------------------------------------------------------------------------------------------------------------------
# Trainings


class Telling(nn.Module):
    """A linear layer that notes the type of its product, and whether torch's autocast is on."""

    def __init__(self, within: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.layer, self.within = nn.Linear(2, 2), within

    def forward(self, x: Tensor) -> Tensor:
        with self.within():
            out = self.layer(x)
        self.seen = out.dtype, torch.is_autocast_enabled("cpu")
        return out


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (BF16, True)),
        ("O1", (HALF, False)),
        ("O2", (BF16, True)),
        ("O3", (BF16, True)),
        ("O4", (BF16, False)),
        ("O5", (BF16, True)),
    ],
)
def test_the_forward_of_a_training_inside_torch_s(level: str, expected: tuple[torch.dtype, bool]) -> None:
    """O1 and O4 are a region of ours; a model that was cast is what any model in low precision is to torch."""
    model = amp.initialize(Telling(), opt_level=level)
    with torch.autocast("cpu", BF16):
        model(a)
        assert model.seen == expected
        assert product() is BF16
    with torch.autocast("cpu", enabled=False):
        model(a)
        assert model.seen[0] is {"O0": FULL, "O4": BF16, "O5": BF16}.get(level, HALF)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("name", ["torch's", "torch's, off"])
def test_torch_s_inside_the_forward_of_a_training(level: str, name: str) -> None:
    make, dtype = KINDS[name]
    model = amp.initialize(Telling(make), opt_level=level)
    for outside in (nullcontext, *(make for make, _ in KINDS.values())):
        with outside():
            model(a)
            assert model.seen[0] is dtype


def test_a_module_kept_in_fp32_is_fp32_inside_torch_s() -> None:
    for level, expected in (("O1", FULL), ("O2", FULL), ("O0", BF16)):
        model = nn.Sequential(Telling())
        model = amp.initialize(model, opt_level=level, keep_fp32=Telling)
        with torch.autocast("cpu", BF16):
            model(a)
        assert model[0].seen[0] is expected


def losses(level: str | None, around: Callable[[], Any] = nullcontext, forward: Callable[[], Any] = nullcontext):
    """Four steps; `around` the whole iteration, `forward` around the call of the model and of the loss."""
    model = convnet()
    optimizer = SGD(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
    seen = []
    for step in range(4):
        x, y = images(step)
        with around():
            with forward():
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        seen.append(loss.item())
    amp.restore()
    return seen


def test_O0_inside_torch_s_is_the_plain_script_inside_torch_s_to_the_bit() -> None:
    theirs = KINDS["torch's"][0]
    plain, inside = losses(None), losses(None, forward=theirs)
    assert plain != inside
    assert losses("O0", forward=theirs) == inside and losses("O0", around=theirs) == losses(None, around=theirs)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_O1_inside_torch_s_trains_as_without(level: str) -> None:
    alone = losses(level)
    for make in (KINDS["torch's"][0], KINDS["torch's, off"][0]):
        assert losses(level, around=make) == alone and losses(level, forward=make) == alone


def test_trainings_of_many_levels_interleave_inside_torch_s() -> None:
    models = {level: amp.initialize(Telling(), opt_level=level) for level in LEVELS}
    for _ in range(2):
        for level, model in models.items():
            with torch.autocast("cpu", BF16):
                model(a)
            assert model.seen[1] is (level not in ("O1", "O4"))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_fp16_is_emulated_where_torch_s_is_switched_off(level: str) -> None:
    low = a.half()
    model = amp.initialize(Telling(lambda: torch.autocast("cpu", enabled=False)), opt_level=level, cpu_fp16="emulate")
    model.layer.half()
    model.layer.forward = lambda x: low @ low  # type: ignore[method-assign]
    assert half_kernels(lambda: model(low)) == []
    with torch.autocast("cpu", BF16):
        assert half_kernels(lambda: model(low)) == []


# ---------------------------------------------------------------------------------------------------------------------
# Threads, caches


@pytest.mark.parametrize("default", ["O1"], indirect=True)
def test_a_thread_that_has_torch_s_without_having_entered_it(default: torch.dtype) -> None:
    """So it is on autograd's threads of a device: they get the state of backward's caller, and not its count."""

    def work() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        before = product()
        torch.set_autocast_enabled("cpu", True)
        assert product() is BF16
        inside = torch.exp(torch.ones(1, dtype=BF16)).dtype  # ours would raise it first
        with amp.autocast("cpu", HALF):
            return before, inside, product()

    assert run_in_thread(work) == (default, BF16, HALF)


@pytest.mark.parametrize("names", list(itertools.permutations(("ours", "torch's"), 2)))
def test_neither_reaches_another_thread(names: tuple[str, str]) -> None:
    (outer, _), (inner, dtype) = (KINDS[name] for name in names)

    def work() -> tuple[torch.dtype, torch.dtype]:
        before = product()
        with outer(), inner():
            return before, product()

    with outer(), inner():
        assert run_in_thread(work) == (FULL, dtype)
        assert product() is dtype


@pytest.mark.parametrize("names", list(itertools.permutations(("ours", "torch's"), 2)))
@pytest.mark.parametrize("device", DEVICES)
def test_neither_cache_leaks_into_the_other(names: tuple[str, str], device: str) -> None:
    weight = nn.Parameter(torch.full((2, 2), 2.0, device=device))
    x = torch.ones(2, 2, device=device)
    make = {"ours": lambda: amp.autocast(device, HALF), "torch's": lambda: torch.autocast(device, BF16)}
    outer, inner = (make[name] for name in names)
    with outer():
        with torch.no_grad():
            (x @ weight).sum()
            with inner():
                (x @ weight).sum()
        if names[0] == "torch's":
            torch.clear_autocast_cache()  # in torch 2.6 its own cache keeps casts that were made under no_grad
        for region in (inner, nullcontext, inner):
            weight.grad = None
            with region():
                out = x @ weight
                out.float().sum().backward()
            assert torch.equal(weight.grad, torch.full_like(weight, 2.0)), "a cast made under no_grad has no way back"
            with torch.no_grad():
                weight.add_(0.0)
    with inner():
        assert (x @ weight).dtype is KINDS[names[1]][1]
    assert casts_state.state().cached() == 0


def test_cast_weights_die_with_the_region_inside_torch_s() -> None:
    with torch.autocast("cpu", BF16):
        for _ in range(3):
            weight = nn.Parameter(torch.ones(2, 2))
            with amp.autocast("cpu", HALF):
                a @ weight
                assert casts_state.state().cached() == 1
            assert casts_state.state().cached() == 0
            del weight
        gc.collect()


# ---------------------------------------------------------------------------------------------------------------------
# Backward


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("names", list(itertools.product(KINDS, repeat=2)))
def test_checkpoint_recomputes_under_the_mixture_of_the_first_time(names: tuple[str, str], reentrant: bool) -> None:
    """Wherever backward runs; the block may enter regions of its own."""
    (outer, _), (inner, expected) = (KINDS[name] for name in names)
    seen: list[tuple[torch.dtype, ...]] = []

    def block(x: Tensor) -> Tensor:
        out = x @ x
        with KINDS["torch's, off"][0]():
            off = (x @ x).dtype
        with KINDS["torch's"][0]():
            on = (x @ x).dtype
        with KINDS["ours"][0]():
            ours = (x @ x).dtype
        seen.append((off, on, ours, out.dtype))
        return out.float() + x * x  # recomputation ends with the last tensor that is saved

    install.install()
    for around in (nullcontext, *(make for make, _ in KINDS.values())):
        x = a.clone().requires_grad_()
        with outer(), inner():
            out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        with around():
            out.sum().backward()
        assert torch.equal(x.grad, torch.full((2, 2), 6.0))
    assert set(seen) == {(FULL, BF16, HALF, expected)} and len(seen) == 12


# ---------------------------------------------------------------------------------------------------------------------
# The words of torch.amp


def test_the_forms_of_a_call() -> None:
    for region in (
        amp.autocast("cpu", HALF),
        amp.autocast("cpu", HALF, True, False),
        amp.autocast(device_type="cpu", dtype=HALF, enabled=True, cache_enabled=None),
    ):
        with torch.autocast("cpu", BF16), region:
            assert product() is HALF
    with pytest.raises(TypeError, match="autocast: device_type is True"):
        amp.autocast(True, HALF)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_cuda_by_name_casts_nothing_where_there_is_none() -> None:
    """As in torch, where a script's GradScaler is off then too."""
    with pytest.warns(UserWarning, match="autocast: device_type is 'cuda', but CUDA is not available"):
        region = amp.autocast("cuda")
    with region:
        assert product() is torch.float32
    with amp.autocast("cuda", enabled=False):
        assert product() is torch.float32


def test_cache_enabled_none_is_torch_s_around() -> None:
    for enabled in (True, False):
        with torch.autocast("cpu", BF16, cache_enabled=enabled):
            assert amp.autocast("cpu", cache_enabled=None).caches is enabled


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.* is deprecated:FutureWarning")
def test_torch_s_older_names_are_torch_s() -> None:
    older = torch.cpu.amp.autocast(True, BF16)
    with amp.autocast("cpu", HALF):
        with older:
            assert product() is BF16
            with amp.autocast("cpu", HALF):
                assert product() is HALF
        assert product() is HALF


# `torch.amp.__all__` of torch 2.13; 2.11 and older have none.
THEIRS = ("autocast", "custom_bwd", "custom_fwd", "is_autocast_available", "GradScaler")


def test_every_name_of_torch_amp_is_here_and_takes_the_same_arguments() -> None:
    for name in getattr(torch.amp, "__all__", THEIRS):
        ours, theirs = getattr(amp, name), getattr(torch.amp, name)
        assert name in amp.__all__
        assert set(inspect.signature(theirs).parameters) - {"fwd", "bwd"} <= set(inspect.signature(ours).parameters)
    methods = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    assert len(methods) > 10 and methods <= set(dir(amp.GradScaler))
    for name in methods:
        theirs = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
        assert list(theirs) == list(inspect.signature(getattr(amp.GradScaler, name)).parameters)[: len(theirs)]


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_is_autocast_available(device: str) -> None:
    assert amp.is_autocast_available(device) is torch.amp.is_autocast_available(device)
