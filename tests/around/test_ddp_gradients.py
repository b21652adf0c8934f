"""Under DistributedDataParallel: accumulation, overflows of one rank, several losses, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from ddp_trainings import (
    SCALED,
    assert_skipped_by_all,
    both_alike,
    close,
    learned,
    loss_of,
    mine,
    mlp,
    overflow_on_one_rank,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, LEVELS, SGD, backward, masters_of, same, skipped

from amp_patch import amp

HALVED = {"loss_scale": 32768.0, "unskipped": 0}


def gradients(optimizer: Any) -> list[Tensor]:
    return [param.grad.clone() for param in amp.master_params(optimizer)]


def accumulate_plainly(low: torch.dtype | None) -> list[Tensor]:
    """Train with plain DDP. The loss is scaled, and gradients are divided at the end, by a power of two: exact."""
    model = mlp()
    optimizer, wrapped, collected = SGD(model.parameters()), DistributedDataParallel(model), []
    for iteration in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            apart = wrapped.no_sync() if micro < 2 else contextlib.nullcontext()
            with apart, amp.autocast("cpu", low) if low else contextlib.nullcontext():
                loss = loss_of(wrapped, mine(3 * iteration + micro))
                (loss * SCALED["loss_scale"]).backward()
        for param in model.parameters():
            param.grad /= SCALED["loss_scale"]
        collected += gradients(optimizer)
        optimizer.step()
    return collected + masters_of(optimizer)


# How a loop says that a micro-batch is not reduced. As in torch, the forward alone decides.
FLAGS = ["flag", "flag of the next forward", "replicate"]
WAYS = ["no_sync", "no_sync of the forward", *FLAGS]


def begin(level: str, way: str, options: dict[str, Any] | None = None, **scaled: Any) -> tuple[Any, Any]:
    """The model in DDP, and its optimizer."""
    model = mlp()
    if way == "replicate":
        from torch.distributed._composable.replicate import replicate

        replicate(model, **(options or {}))
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0, **scaled)
    return model if way == "replicate" else DistributedDataParallel(model, **(options or {})), optimizer


@contextlib.contextmanager
def micro_batch(wrapped: Any, way: str, apart: bool) -> Iterator[Callable[[], None]]:
    """The function that the body calls is for the end of the forward."""
    if way == "replicate":
        wrapped.set_requires_gradient_sync(not apart)
    elif way in FLAGS:
        wrapped.require_backward_grad_sync = not apart
    with contextlib.ExitStack() as stack:
        if apart and way not in FLAGS:
            stack.enter_context(wrapped.no_sync())
        flipped = lambda: setattr(wrapped, "require_backward_grad_sync", apart)  # noqa: E731
        yield {"no_sync of the forward": stack.close, "flag of the next forward": flipped}.get(way, lambda: None)


def accumulate(level: str, delay: bool, way: str = "no_sync", options: dict[str, Any] | None = None) -> list[Tensor]:
    """The optimizer's gradients after two micro-batches without a reduction and one with it, then its weights."""
    wrapped, optimizer = begin(level, way, options, **SCALED)
    collected = []
    for iteration in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            apart = micro < 2
            with micro_batch(wrapped, way, apart) as forward_ends:
                loss = loss_of(wrapped, mine(3 * iteration + micro))
                forward_ends()
                backward(loss, optimizer, delay_unscale=delay and apart)
            with torch.no_grad():
                loss_of(wrapped, mine(0))  # no backward pass follows
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e3)
        collected += gradients(optimizer)
        optimizer.step()
    return collected + masters_of(optimizer)


@crossed({"level": [*LEVELS, "O5+split"], "delay": [False, True]}, meet=1)
def test_accumulation_without_a_reduction(ranks, level, delay):
    """amp sees it by itself: with and without delay_unscale the same gradients, plain DDP's, on both ranks."""
    plain = both_alike(ranks(accumulate_plainly, {"O1": torch.float16, "O4": torch.bfloat16}.get(level)))
    for way, options in (*((way, {}) for way in WAYS), ("flag", {"gradient_as_bucket_view": True})):
        ours = both_alike(ranks(accumulate, level, delay, way, options))
        if level in ("O0", "O1", "O4"):
            assert same(ours, plain), way
        close(ours, plain, 2e-2 if "O5" in level else 3e-3)


def overflow_before_the_reduction(level: str, rank: int, way: str) -> dict[str, Any]:
    """One rank overflows in a micro-batch without a reduction. The other rank learns of it in the next backward."""
    wrapped, optimizer = begin(level, way, loss_scale="dynamic")
    with micro_batch(wrapped, way, True):
        loss = loss_of(wrapped, mine(0))
        backward(loss * float("inf") if dist.get_rank() == rank else loss, optimizer)
    with micro_batch(wrapped, way, False):
        backward(loss_of(wrapped, mine(1)), optimizer)
    optimizer.step()
    return amp.state_dict()


@crossed({"level": LEVELS, "rank": [0, 1], "way": WAYS}, meet=1)
def test_an_overflow_without_a_reduction_moves_the_scale_alike_on_all_ranks(ranks, level, rank, way):
    assert ranks(overflow_before_the_reduction, level, rank, way) == [{"loss_scaler0": HALVED}] * 2


def overflow(level: str, dtype: torch.dtype) -> dict[str, Any]:
    return overflow_on_one_rank(level, ADAM, float("inf"), dtype=dtype)[0]


@crossed({"level": ["O0", "O1", "O2", "O3"], "dtype": [torch.float16, torch.bfloat16]}, meet=1)
def test_an_overflow_on_one_rank_skips_on_all(ranks, level, dtype):
    assert_skipped_by_all(ranks(overflow, level, dtype))


def two_losses(level: str | None, options: dict[str, Any], apart: bool, bad: bool) -> dict[str, Any]:
    """Train on loss 0, which overflows on rank 1 if `bad`, then on loss 1; `apart`: its first half is not reduced."""
    model = mlp()
    optimizer = SGD(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, num_losses=2, verbosity=0, loss_scale="dynamic", max_loss_scale=1024.0
        )
    wrapped = DistributedDataParallel(model, **options)
    for micro in range(3):
        with wrapped.no_sync() if apart and micro == 1 else contextlib.nullcontext():
            loss = loss_of(wrapped, mine(micro))
            if bad and micro == 0 and dist.get_rank() == 1:
                loss = loss * float("inf")
            if level is None:
                loss.backward()
            else:
                backward(loss, optimizer, loss_id=min(micro, 1))
    seen: dict[str, Any] = {"gradients": gradients(optimizer)}
    optimizer.step()
    return {
        **seen,
        "weights": masters_of(optimizer),
        "scales": None if level is None else [tuple(state.values()) for state in amp.state_dict().values()],
        "skipped": level is not None and skipped(optimizer),
    }


@crossed({"level": ["O0", "O1", "O2"], "apart": [False, True], "options": [{}, {"gradient_as_bucket_view": True}]})
def test_gradients_of_another_loss_that_are_reduced_already_are_added_to(ranks, level, apart, options):
    plain = ranks(two_losses, None, {}, apart, False)[0]
    results = ranks(two_losses, level, options, apart, False)
    for key in ("gradients", "weights"):
        close(both_alike([seen[key] for seen in results]), plain[key], 1e-6 if level == "O0" else 5e-3)
    for seen in results:
        assert seen["scales"] == [(1024.0, 1), (1024.0, 1 if apart else 2)] and not seen["skipped"]


@crossed({"level": ["O0", "O1", "O2"], "apart": [False, True], "options": [{}, {"gradient_as_bucket_view": True}]})
def test_an_overflow_of_another_loss_on_one_rank_is_blamed_on_that_loss_on_all(ranks, level, apart, options):
    start = [param.detach() for param in mlp().parameters()]
    for seen in ranks(two_losses, level, options, apart, True):
        assert seen["scales"] == [(512.0, 0), (1024.0, 1 if apart else 2)] and seen["skipped"]
        assert not all(grad.isfinite().all() for grad in seen["gradients"])
        assert same(seen["weights"], start)


def beside_ddp(level: str) -> list[Tensor]:
    """The first of two losses does not go through DDP's forward."""
    model = mlp()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, **SCALED)
    wrapped = DistributedDataParallel(model)
    backward(loss_of(model, mine(0)), optimizer, delay_unscale=True)
    backward(loss_of(wrapped, mine(1)), optimizer)
    return gradients(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_delayed_gradients_that_ddp_did_not_reduce_are_in_its_next_reduction(ranks, level):
    both_alike(ranks(beside_ddp, level))


def gan(level: str | None, options: dict[str, Any], dropping: bool = False) -> list[Tensor]:
    """A generator and a discriminator under a DDP each: the discriminator's gradients wait, while the generator's loss
    goes through it."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 8), nn.Linear(8, 1)]
    optimizers = [SGD(model.parameters()) for model in models]
    if level is not None:
        models, optimizers = amp.initialize(models, optimizers, opt_level=level, num_losses=2, **SCALED)
    generator, discriminator = (DistributedDataParallel(model, **options) for model in models)
    for step in range(4):
        generate = torch.Generator().manual_seed(10 * step + dist.get_rank())
        real, noise = torch.randn(4, 8, generator=generate), torch.randn(4, 4, generator=generate)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = discriminator(generator(noise).detach()).mean() - discriminator(real).mean()
        if level is None:
            loss.backward()
        else:
            backward(loss, optimizers[1], loss_id=0)
        if level is None:
            kept = [param.grad.clone() for param in models[1].parameters()]
            (-discriminator(generator(noise)).mean()).backward()
            for param, grad in zip(models[1].parameters(), kept, strict=True):
                param.grad = grad if dropping else param.grad
        else:
            backward(-discriminator(generator(noise)).mean(), optimizers[0], loss_id=1)
        for optimizer in optimizers:
            optimizer.step()
    return [tensor for model in models for tensor in learned(model)]


@crossed({"level": ["O0", "O1", "O2", "O5"], "options": [{}, {"gradient_as_bucket_view": True}]}, meet=1)
def test_a_gan_under_two_ddps(ranks, level, options):
    """Gradients of the generator's loss in the discriminator are added up, as in torch; masters do not receive them."""
    plain = both_alike(ranks(gan, None, {}, dropping=level in ("O2", "O5")))
    close(both_alike(ranks(gan, level, options)), plain, {"O0": 1e-6, "O5": 3e-2}.get(level, 5e-3))
