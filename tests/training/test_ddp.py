"""DistributedDataParallel and its kin at every level, in two processes: `ranks` runs the functions above the tests.

Ranks are told apart by their data alone, and what both must hold alike is compared bit by bit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, LEVELS, SGD, backward, convnet, images, linear, same

from amp_patch import amp

SCALED = {"loss_scale": 1024.0}
HALVED = {"loss_scale": 32768.0, "unskipped": 0}


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5))


def mine(step: int) -> tuple[Tensor, Tensor]:
    """This rank's half of the batch of a step."""
    return tuple(tensor.chunk(2)[dist.get_rank()] for tensor in images(step))  # type: ignore[return-value]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def learned(model: nn.Module) -> list[Tensor]:
    """The parameters, FP32 as a checkpoint has them. (Batch norms' statistics are each rank's own between forwards.)"""
    state = model.state_dict()
    return [state[name].clone() for name, _ in model.named_parameters()]


def sgd(params: Any) -> torch.optim.Optimizer:
    return SGD(params)


def adam(params: Any) -> torch.optim.Optimizer:
    return ADAM(params)


def masters(optimizer: Any) -> list[Tensor]:
    return [param.detach().clone() for param in amp.master_params(optimizer)]


def gradients(optimizer: Any) -> list[Tensor]:
    return [param.grad.clone() for param in amp.master_params(optimizer)]


def both_alike(results: list[list[Tensor]]) -> list[Tensor]:
    """What both ranks returned."""
    assert same(*results), "the ranks differ"
    return results[0]


def close(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


# Training


def train(
    level: str | None,
    steps: int = 50,
    make: Any = mlp,
    optim: Any = adam,
    seed_by_rank: bool = False,
    hook: bool = False,
    ddp: dict[str, Any] | None = None,
    **initialize: Any,
) -> list[Tensor]:
    """The weights (the masters') after so many steps; None: plain DDP without a line of ours."""
    model = make(dist.get_rank() if seed_by_rank else 0)
    optimizer = optim(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, **initialize)
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, mine(step))
        if level is None:
            loss.backward()
        else:
            backward(loss, optimizer)
        optimizer.step()
    return learned(model)


def train_alone(level: str, steps: int, **initialize: Any) -> list[Tensor]:
    """The same batches in one process."""
    model = mlp()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level, **initialize)
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(model, images(step)), optimizer)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_hold_the_same_bits_after_50_steps_though_they_began_with_other_weights(ranks, level):
    end = both_alike(ranks(train, level, make=convnet, seed_by_rank=True))
    start = both_alike(ranks(train, level, 0, make=convnet, seed_by_rank=True))
    assert not same(end, start)
    if level == "O0":
        assert same(end, both_alike(ranks(train, None, make=convnet, seed_by_rank=True)))


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_train_as_one_process_does(ranks, level):
    together = both_alike(ranks(train, level, 20))
    # FP32 differs by the order of its sums; low-precision gradients are rounded before they are added.
    tolerance = {"O0": 1e-5, "O1": 1e-2, "O2": 1e-2, "O3": 3e-2}.get(level, 6e-2)
    close(together, train_alone(level, 20), tolerance)


# Ways to make a DDP. The order of two terms of a sum is no matter, so none of them changes a bit.


class Branches(nn.Module):
    """A branch that no forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.left = mlp(), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.taken(inputs)


def branches(seed: int) -> nn.Module:
    return Branches()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_options_of_ddp_change_no_bit(ranks, level):
    plain = both_alike(ranks(train, level, 5))
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}):
        assert same(both_alike(ranks(train, level, 5, ddp=options)), plain), options
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    unused = both_alike(ranks(train, level, 5, make=branches, ddp=options))
    assert same(unused[:4], plain)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_communication_hook_that_compresses(ranks, level):
    plain = both_alike(ranks(train, level, 5))
    compressed = both_alike(ranks(train, level, 5, hook=True))
    close(compressed, plain, 1e-2)
    assert same(compressed, plain) == (level == "O2"), "O2's gradients are FP16 as they are; O1's were rounded"


def checkpointed(level: str, use_reentrant: bool | None) -> list[Tensor]:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.body[1](self.body[0](inputs))
            if use_reentrant is None:
                return self.body[3](self.body[2](hidden))
            return checkpoint(lambda x: self.body[3](self.body[2](x)), hidden, use_reentrant=use_reentrant)

    return train(level, 4, make=lambda seed: Checkpointed())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_activation_checkpointing_changes_no_bit(ranks, level):
    plain = both_alike(ranks(checkpointed, level, None))
    for use_reentrant in (True, False):
        assert same(both_alike(ranks(checkpointed, level, use_reentrant)), plain)


def wrapped_first(level: str) -> str:
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel") as refused:
        amp.initialize(DistributedDataParallel(mlp()), opt_level=level)
    return str(refused.value)


def test_a_model_that_ddp_wraps_already_is_refused_with_the_way_out(ranks):  # Apex's issue 1135
    for told in ranks(wrapped_first, "O1"):
        assert "pass the model itself and wrap what initialize() returns" in told


# A DDP that is there before initialize: inside of the model, around it, or hooks of Horovod's kind


class Wrapping(nn.Module):
    """A DistributedDataParallel inside of a model, and a head that it does not have."""

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        self.body = DistributedDataParallel(mlp())
        self.head = nn.Linear(5, 5) if head else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


def inside(level: str | None, micro_batches: int = 1) -> list[Tensor]:
    """Trained with the DDP inside; None: with one around, at O1. One rank overflows in the second step."""
    model: Any = mlp() if level is None else Wrapping()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level or "O1", verbosity=0)
    wrapped = DistributedDataParallel(model) if level is None else model
    ddp, skipped = wrapped if level is None else model.body, []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inputs, targets = mine(micro_batches * step + micro)
            if (step, micro) == (1, 0) and dist.get_rank() == 1:
                inputs[0, 0, 0, 0] = float("inf")
            with ddp.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
                backward(nn.functional.cross_entropy(wrapped(inputs), targets), optimizer)
        optimizer.step()
        skipped.append(optimizer._amp_stash.step_skipped)
    assert skipped == [False, level != "O0" and level != "O4", False, False]
    assert level in ("O0", "O4") or amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 2}}
    return learned(model)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_ddp_inside_of_the_model_trains_where_no_weight_is_cast(ranks, micro_batches):
    around = both_alike(ranks(inside, None, micro_batches))
    assert same(both_alike(ranks(inside, "O1", micro_batches)), around)


def kept_inside() -> list[Tensor]:
    """O2, but for what is in the DDP."""
    torch.manual_seed(0)
    model = Wrapping(head=True)
    model.head.requires_grad_(False)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", keep_fp32="body", **SCALED)
    assert model.head.weight.dtype is torch.float16
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, mine(step)), optimizer)
        optimizer.step()
    return [param.detach().clone() for param in model.body.parameters()]


def test_a_ddp_inside_of_the_model_trains_at_o2_where_it_is_kept_in_fp32(ranks):
    both_alike(ranks(kept_inside))


def wrapped(level: str, kind: str) -> Any:
    """The weights of every step with a DDP made before `initialize` ("around", "inside") or "after" it.

    One rank overflows in the second step. What was wrapped before is restored then, and trains on in FP32.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(convnet(), nn.Identity())
    if kind == "inside":
        model[0] = DistributedDataParallel(model[0])
    called = DistributedDataParallel(model) if kind == "around" else model
    optimizer = ADAM(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if kind == "after":
        called = DistributedDataParallel(model)
    scaled, weights = level in ("O1", "O2"), []
    for step in range(5):
        inputs, targets = mine(step)
        if scaled and (step, dist.get_rank()) == (1, 1):
            inputs[0, 0, 0, 0] = float("inf")
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(called(inputs), targets), optimizer)
        optimizer.step()
        assert optimizer._amp_stash.step_skipped is (scaled and step == 1)
        weights.append([p.detach().clone() for p in model.parameters()])
    amp.restore()
    for step in range(5, 7 if kind != "after" else 5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(mine(step)[0]), mine(step)[1]).backward()
        optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    return weights


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["inside", "around"])
def test_a_ddp_that_is_there_first_reduces_what_is_cast(ranks, kind, level):
    expected, *_ = ranks(wrapped, level, "after")
    found, other = ranks(wrapped, level, kind)
    assert all(same(*step) for step in zip(found, other, strict=True)), "the ranks differ"
    assert all(same(*step) for step in zip(found, expected, strict=False)) and len(found) == len(expected) + 2
    assert not same(found[-1], found[-2])


def options_kept(builtin: bool) -> list[str]:
    """What DDP says of itself once its weights were cast, and its communication hook was called."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, called = mlp(), []
    ddp = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)

    def hook(state, bucket):  # DDP reads annotations
        called.append(state)
        return fp16_compress_hook(None, bucket)

    if builtin:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        ddp.register_comm_hook("its state", hook)
    before = ddp._get_ddp_logging_data()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", verbosity=0)
    assert ddp._get_ddp_logging_data()["comm_hook"] == before["comm_hook"]
    backward(loss_of(ddp, mine(0)), optimizer)
    optimizer.step()
    after = ddp._get_ddp_logging_data()
    assert [after[key] for key in ("static_graph", "gradient_as_bucket_view")] == [1, 1]
    assert builtin or set(called) == {"its state"}
    return learned(model)


@pytest.mark.parametrize("builtin", [False, True])
def test_a_ddp_that_is_there_first_keeps_its_options_and_hooks(ranks, builtin):
    both_alike(ranks(options_kept, builtin))


def ddp_refused(level: str) -> str:
    from torch.nn.parallel.distributed import _MixedPrecision

    model = mlp()
    ddp = DistributedDataParallel(model)
    ddp.mixed_precision = _MixedPrecision(param_dtype=torch.float16)
    optimizer = SGD(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="DistributedDataParallel") as refused:
        amp.initialize(model, optimizer, opt_level=level)
    assert same([param.detach() for param in model.parameters()], before) and not hasattr(optimizer, "_amp_stash")
    return str(refused.value)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_ddp_with_casts_of_its_own_is_refused_with_the_way_out(ranks, level):
    for told in ranks(ddp_refused, level):
        assert told == (
            "initialize: a Sequential is in a DistributedDataParallel with mixed_precision=, and "
            f"opt_level {level!r} changes the type of its parameters, which that option keeps copies of: "
            "call initialize() first, then wrap the model, or leave the option out"
        )


def ddp_gone() -> None:
    """The wrapper is garbage that is not collected yet."""
    gc.disable()
    try:
        model = mlp()
        wrapped = DistributedDataParallel(model)
        wrapped.itself = [wrapped]
        del wrapped
        amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    finally:
        gc.enable()


def test_a_ddp_that_was_around_the_model_once_is_no_reason_to_refuse_it(ranks):
    ranks(ddp_gone)


def partly_inside(level: str, grouped: bool, frozen: bool) -> Any:
    """The head is each rank's own, and overflows on the second in the second step."""
    torch.manual_seed(0)
    model = Wrapping(head=True)
    model.head.requires_grad_(not frozen)
    group = dist.group.WORLD if grouped else None
    try:
        model, optimizer = amp.initialize(
            model, SGD(model.parameters()), opt_level=level, verbosity=0, process_group=group
        )
    except ValueError as refused:
        return str(refused)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, mine(step))
        if step == 1 and dist.get_rank() == 1 and not frozen:
            model.head.weight.register_hook(lambda grad: grad * float("inf"))
        backward(loss, optimizer)
        optimizer.step()
    return [param.detach().clone() for param in model.body.parameters()]


def test_what_trains_beside_a_ddp_inside_of_the_model_wants_a_process_group_for_its_overflow(ranks):
    for told in ranks(partly_inside, "O1", False, False):
        assert told == (
            "initialize: parameter 'head.weight' of Wrapping is in none of the model's DistributedDataParallels, so "
            "that an overflow of its gradient would be one process's alone, which would skip a step that the others "
            "take; pass process_group=torch.distributed.group.WORLD, or wrap the whole model instead"
        )
    both_alike(ranks(partly_inside, "O1", True, False))
    both_alike(ranks(partly_inside, "O1", False, True))
    both_alike(ranks(partly_inside, "O4", False, True))


def horovods_way(level: str, before: bool) -> list[Tensor]:
    """Each gradient is averaged as soon as it is there, by a hook on its accumulation node."""
    model, nodes = mlp(), []

    def average(param: Tensor) -> None:
        param.grad /= 2
        dist.all_reduce(param.grad)

    def hook() -> None:
        for param in model.parameters():
            node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, param=param: average(param))
            nodes.append(node)

    if before:
        hook()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, **SCALED)
    if not before:
        hook()
    for step in range(5):
        optimizer.zero_grad()
        backward(loss_of(model, mine(step)), optimizer)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_on_accumulation_nodes_average_gradients_as_ddp_does_though_they_were_there_first(ranks, level):
    averaged = both_alike(ranks(horovods_way, level, True))
    assert same(averaged, both_alike(ranks(horovods_way, level, False)))
    assert same(averaged, both_alike(ranks(train, level, 5, optim=sgd, **SCALED)))


def fsdp1_inside() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match="FSDP2") as refused:
        amp.initialize(model, opt_level="O1")
    return str(refused.value)


def test_fsdp1_inside_of_the_model_is_refused_with_the_way_out(ranks):
    for told in ranks(fsdp1_inside):
        assert told == (
            "initialize: '0' of the model is wrapped in FullyShardedDataParallel, whose flattened shards no overflow "
            "check of ours agrees on; shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead, then call "
            "initialize()"
        )


# Accumulation under no_sync


def accumulate_plainly(low: torch.dtype | None) -> list[Tensor]:
    """Plain DDP, its loss scaled by hand, its gradients divided at the end: by a power of two, exactly."""
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
    return collected + masters(optimizer)


def accumulate(level: str, delay: bool, way: str = "together", options: dict[str, Any] | None = None) -> list[Tensor]:
    """The optimizer's gradients after two micro-batches under no_sync and a third that reduces, then its weights."""
    model = mlp()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, **SCALED)
    wrapped = DistributedDataParallel(model, **(options or {}))
    collected = []
    for iteration in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            apart = micro < 2
            with contextlib.ExitStack() as stack:
                if apart:
                    stack.enter_context(wrapped.no_sync())
                loss = loss_of(wrapped, mine(3 * iteration + micro))
                if way == "forward alone":  # as in torch, it decides
                    stack.close()
                backward(loss, optimizer, delay_unscale=delay and apart)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e3)
        collected += gradients(optimizer)
        optimizer.step()
    return collected + masters(optimizer)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_under_no_sync(ranks, level, delay):
    """amp sees no_sync by itself: with and without delay_unscale the same gradients, plain DDP's, on both ranks."""
    plain = both_alike(ranks(accumulate_plainly, {"O1": torch.float16, "O4": torch.bfloat16}.get(level)))
    for way, options in (("together", {}), ("forward alone", {}), ("together", {"gradient_as_bucket_view": True})):
        ours = both_alike(ranks(accumulate, level, delay, way, options))
        if level in ("O0", "O1", "O4"):
            assert same(ours, plain)
        close(ours, plain, 2e-2 if level == "O5" else 3e-3)


def overflow_before_the_reduction(level: str, rank: int) -> dict[str, Any]:
    """One rank overflows in a micro-batch under no_sync, which only the backward after it tells the other."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, verbosity=0, loss_scale="dynamic"
    )
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        loss = loss_of(wrapped, mine(0))
        backward(loss * float("inf") if dist.get_rank() == rank else loss, optimizer)
    backward(loss_of(wrapped, mine(1)), optimizer)
    optimizer.step()
    return amp.state_dict()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_under_no_sync_moves_the_scale_alike_on_all_ranks(ranks, level, rank):
    assert ranks(overflow_before_the_reduction, level, rank) == [{"loss_scaler0": HALVED}] * 2


def never_reduced(level: str) -> list[Tensor]:
    """Each rank by itself, for a step; what averages the weights now and then is not ours."""
    model = mlp()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, **SCALED)
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        backward(loss_of(wrapped, mine(0)), optimizer)
        optimizer.step()
    return masters(optimizer)


def stepped_alone(level: str) -> list[Tensor]:
    model = mlp()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, **SCALED)
    backward(loss_of(model, mine(0)), optimizer)
    optimizer.step()
    return masters(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_under_no_sync_is_each_ranks_own(ranks, level):
    steps = ranks(never_reduced, level)
    assert not same(*steps)
    for rank, alone in enumerate(ranks(stepped_alone, level)):
        assert same(steps[rank], alone)


# Overflow


def overflow(level: str, dtype: torch.dtype) -> dict[str, Any]:
    """Three steps, with an infinity in one rank's batch of the second."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, ADAM(model.parameters()), opt_level=level, dtype=dtype, loss_scale="dynamic", verbosity=0
    )
    wrapped = DistributedDataParallel(model)
    seen: dict[str, Any] = {"skipped": [], "scales": [], "weights": []}
    for step in range(3):
        inputs, targets = mine(step)
        if step == 1 and dist.get_rank() == 1:
            inputs[0, 0, 0, 0] = float("inf")
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(wrapped(inputs), targets), optimizer)
        optimizer.step()
        seen["skipped"].append(optimizer._amp_stash.step_skipped)
        seen["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        seen["weights"].append(learned(model))
    return seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_overflow_on_one_rank_skips_on_all(ranks, level, dtype):
    results = ranks(overflow, level, dtype)
    for seen in results:
        assert seen["skipped"] == [False, True, False]
        assert seen["scales"] == [65536.0, 32768.0, 32768.0]
        assert same(seen["weights"][0], seen["weights"][1]) and not same(seen["weights"][1], seen["weights"][2])
    both_alike([seen["weights"][2] for seen in results])


def two_losses(level: str | None, options: dict[str, Any], apart: bool, bad: bool) -> dict[str, Any]:
    """Loss 0, which overflows on rank 1 if `bad`, then loss 1: `apart`, its first half is not reduced by itself."""
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
        "weights": masters(optimizer),
        "scales": None if level is None else [tuple(state.values()) for state in amp.state_dict().values()],
        "skipped": level is not None and optimizer._amp_stash.step_skipped,
    }


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradients_of_another_loss_that_are_reduced_already_are_added_to(ranks, level, apart, options):
    plain = ranks(two_losses, None, {}, apart, False)[0]
    results = ranks(two_losses, level, options, apart, False)
    for key in ("gradients", "weights"):
        close(both_alike([seen[key] for seen in results]), plain[key], 1e-6 if level == "O0" else 5e-3)
    for seen in results:
        assert seen["scales"] == [(1024.0, 1), (1024.0, 1 if apart else 2)] and not seen["skipped"]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
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


# Several models, losses and optimizers


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


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_gan_under_two_ddps(ranks, level, options):
    """What the generator's loss gives to the discriminator is added, as in torch; masters do not get it."""
    plain = both_alike(ranks(gan, None, {}, dropping=level in ("O2", "O5")))
    close(both_alike(ranks(gan, level, options)), plain, {"O0": 1e-6, "O5": 3e-2}.get(level, 5e-3))


def clipped(level: str | None) -> tuple[float, list[Tensor]]:
    model = mlp()
    optimizer = SGD(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SCALED)
    wrapped = DistributedDataParallel(model)
    loss = loss_of(wrapped, mine(0))
    loss.backward() if level is None else backward(loss, optimizer)
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
    optimizer.step()
    return norm.item(), masters(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_clipping_by_the_norm_of_the_reduced_gradients(ranks, level):
    (norm, plain), _ = ranks(clipped, None)
    results = ranks(clipped, level)
    assert norm > 0.5 and results[0][0] == results[1][0] == pytest.approx(norm, rel=0 if level == "O0" else 1e-2)
    close(both_alike([weights for _, weights in results]), plain, 0 if level == "O0" else 1e-3)


# ZeroRedundancyOptimizer


SETTINGS = {  # fused, as torch.optim's own classes step at O2
    "SGD": {"lr": 0.05, "momentum": 0.9, "fused": True},
    "Adam": {"lr": 1e-2, "eps": 1e-4, "fused": True},
}


def zero_of(params: Any, kind: str = "Adam", **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, getattr(torch.optim, kind), **SETTINGS[kind], **options)


def zero(
    level: str, steps: int = 50, sharded: bool = True, kind: str = "Adam", clip: bool = False, **options: Any
) -> dict[str, Any]:
    model = convnet()
    optimizer = (
        zero_of(model.parameters(), kind, **options)
        if sharded
        else getattr(torch.optim, kind)(model.parameters(), **SETTINGS[kind])
    )
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    wrapped = DistributedDataParallel(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(wrapped, mine(step)), optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        scheduler.step()
    state = optimizer.optim.state if sharded else optimizer.state
    held = sum(value.numel() for entry in state.values() for value in entry.values() if value.dim())
    amp.restore()
    share = [param for group in (optimizer.optim if sharded else optimizer).param_groups for param in group["params"]]
    owned = {*map(id, share)} <= {*map(id, model.parameters())}
    return {"learned": learned(model), "held": held, "owned": owned}


@pytest.mark.parametrize("level", LEVELS)
def test_zero_redundancy_optimizer_does_what_the_plain_one_does_with_half_the_state(ranks, level):
    plain = ranks(zero, level, sharded=False)
    sharded = ranks(zero, level)
    assert same(both_alike([result["learned"] for result in sharded]), plain[0]["learned"])
    assert sum(result["held"] for result in sharded) == plain[0]["held"]
    assert all(0 < result["held"] < plain[0]["held"] for result in sharded)
    assert all(result["owned"] for result in sharded), "restore gives the share its parameters back"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_redundancy_optimizer_with_clipping_and_parameters_in_buckets(ranks, level):
    for kind in ("SGD", "Adam"):
        plain = ranks(zero, level, 5, sharded=False, kind=kind, clip=True)
        sharded = ranks(zero, level, 5, kind=kind, clip=True, parameters_as_bucket_view=True)
        assert same(both_alike([result["learned"] for result in sharded]), plain[0]["learned"])


def zero_overflow(level: str) -> dict[str, Any]:
    model = mlp()
    model, optimizer = amp.initialize(
        model, zero_of(model.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    wrapped = DistributedDataParallel(model)
    seen: dict[str, Any] = {"skipped": [], "weights": []}
    for step in range(3):
        inputs, targets = mine(step)
        if step == 1 and dist.get_rank() == 1:
            inputs[0, 0, 0, 0] = float("nan")
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(wrapped(inputs), targets), optimizer)
        optimizer.step()
        seen["skipped"].append(optimizer._amp_stash.step_skipped)
        seen["weights"].append(learned(model))
    seen["steps"] = [int(entry["step"]) for entry in optimizer.optim.state.values()]
    return seen


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_zero_redundancy_optimizer_skips_on_all_ranks(ranks, level):
    results = ranks(zero_overflow, level)
    for seen in results:
        assert seen["skipped"] == [False, True, False]
        assert same(seen["weights"][0], seen["weights"][1]) and not same(seen["weights"][1], seen["weights"][2])
        assert seen["steps"] and set(seen["steps"]) == {2}
    both_alike([seen["weights"][2] for seen in results])


def zero_resume(level: str, order: str) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of a run, and of one that was saved half way and went on from the file, in new objects."""
    from io import BytesIO

    def build(saved: BytesIO | None) -> Any:
        model = mlp()
        optimizer = zero_of(model.parameters())
        checkpoint = torch.load(saved) if saved else None
        if checkpoint and order == "load first":
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        if checkpoint:
            if order == "initialize first":
                model.load_state_dict(checkpoint["model"])
                optimizer.load_state_dict(checkpoint["optimizer"])
            amp.load_state_dict(checkpoint["amp"])
        return model, optimizer, DistributedDataParallel(model)

    def run(model: Any, optimizer: Any, wrapped: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(loss_of(wrapped, mine(step)), optimizer)
            optimizer.step()

    model, optimizer, wrapped = build(None)
    run(model, optimizer, wrapped, range(3))
    saved = [BytesIO()]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, saved[0]
        )
    run(model, optimizer, wrapped, range(3, 6))
    straight = learned(model)
    dist.broadcast_object_list(saved, src=0)
    saved[0].seek(0)
    model, optimizer, wrapped = build(saved[0])
    run(model, optimizer, wrapped, range(3, 6))
    return straight, learned(model)


@pytest.mark.parametrize("order", ["initialize first", "load first"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_zero_redundancy_optimizer_is_consolidated_and_resumed(ranks, level, order):
    for straight, resumed in ranks(zero_resume, level, order):
        assert same(straight, resumed)


def zero_grows(level: str, sharded: bool) -> list[Tensor]:
    """A head that thaws: its group is added after some steps."""
    model = mlp()
    body, head = list(model[1].parameters()), list(model[3].parameters())
    optimizer = zero_of(body, "SGD") if sharded else SGD(body)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SCALED)
    wrapped = DistributedDataParallel(model)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": head, "lr": 0.01})
        optimizer.zero_grad()
        backward(loss_of(wrapped, mine(step)), optimizer)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_is_added_to_a_zero_redundancy_optimizer(ranks, level):
    assert same(both_alike(ranks(zero_grows, level, True)), both_alike(ranks(zero_grows, level, False)))


def zero_refused() -> None:
    for level in ("O1", "O2", "O3", "O5"):
        with pytest.raises(ValueError, match=r"overlap_with_ddp=True.*overlap_with_ddp=False, or use O0 or O4"):
            model = mlp()
            amp.initialize(model, zero_of(model.parameters(), overlap_with_ddp=True), opt_level=level)
    model = mlp()
    with pytest.raises(ValueError, match=r"parameters_as_bucket_view=True.*, or use O2"):
        amp.initialize(model, zero_of(model.parameters(), parameters_as_bucket_view=True), opt_level="O3")
    model = mlp()
    optimizer = zero_of(model[1].parameters(), parameters_as_bucket_view=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    with pytest.raises(ValueError, match=r"add_param_group.*parameters_as_bucket_view=False"):
        optimizer.add_param_group({"params": list(model[3].parameters())})


def test_what_a_zero_redundancy_optimizer_cannot_do_is_refused_with_the_way_out(ranks):
    ranks(zero_refused)


# Gradients that DDP does not reduce


def halves(level: str) -> dict[str, Any]:
    """Each rank trains a part of its own, and the second overflows in the second step."""
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model,
        SGD(model.parameters()),
        opt_level=level,
        loss_scale="dynamic",
        process_group=dist.group.WORLD,
        verbosity=0,
    )
    seen: dict[str, Any] = {"skipped": [], "scales": []}
    for step in range(3):
        optimizer.zero_grad()
        value = float("inf") if step == 1 and dist.get_rank() == 1 else 0.25
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer)
        optimizer.step()
        seen["skipped"].append(optimizer._amp_stash.step_skipped)
        seen["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    return seen


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_process_group_skips_together(ranks, level):  # Apex's issue 237
    for seen in ranks(halves, level):
        assert seen == {"skipped": [False, True, False], "scales": [65536.0, 32768.0, 32768.0]}


def reduced_by_hand(level: str) -> list[Tensor]:
    """Horovod's way: the scaled gradients of the model are averaged in the body of scale_loss."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, process_group=dist.group.WORLD, **SCALED
    )
    for step in range(5):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, mine(step)), optimizer) as scaled_loss:
            scaled_loss.backward()
            for param in model.parameters():
                param.grad /= 2
                dist.all_reduce(param.grad)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_averaged_by_hand_inside_scale_loss_train_as_under_ddp(ranks, level):
    assert same(both_alike(ranks(reduced_by_hand, level)), both_alike(ranks(train, level, 5, optim=sgd, **SCALED)))


def native_halves(grouped: bool, kind: str) -> list[Any]:
    model = linear([[1.0]])
    optimizer = {"SGD": SGD, "fused": lambda p: torch.optim.Adam(p, fused=True), "O2": SGD}[kind](model.parameters())
    if kind == "O2":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=1.0)
    scaler = amp.GradScaler("cpu", process_group=dist.group.WORLD if grouped else None)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        value = float("inf") if step == 1 and dist.get_rank() == 1 else 0.25
        loss = scaler.scale(model(torch.full((1, 1), value)).sum() / 4)
        if step != 2 or dist.get_rank() == 1:  # one without gradients takes part
            loss.backward()
        if step == 3:
            scaler.unscale_(optimizer)
        before = masters(optimizer)[0]
        scaler.step(optimizer)
        scaler.update()
        seen.append((not torch.equal(before, masters(optimizer)[0]), scaler.get_scale()))
    return seen


@pytest.mark.parametrize("kind", ["SGD", "fused", "O2"])
def test_native_scaling_over_a_process_group(ranks, kind):
    apart = ranks(native_halves, False, kind)
    assert apart[0][1] == (True, 65536.0) and apart[1][1] == (False, 32768.0)
    for seen in ranks(native_halves, True, kind):
        assert [scale for _, scale in seen] == [65536.0, 32768.0, 32768.0, 32768.0]
        assert not seen[1][0] and seen[3][0]


def native(dtype: torch.dtype) -> dict[str, Any]:
    """The loop of torch's tutorial, under DDP, an overflow on one rank included."""
    model = mlp()
    wrapped, optimizer = DistributedDataParallel(model), SGD(model.parameters())
    scaler = amp.GradScaler("cpu")
    seen: dict[str, Any] = {"stepped": [], "scales": []}
    for step in range(5):
        inputs, targets = mine(step)
        if step == 1 and dist.get_rank() == 1:
            inputs[0, 0, 0, 0] = float("inf")
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(wrapped(inputs), targets)
        scaler.scale(loss).backward()
        seen["stepped"].append(scaler.step(optimizer))
        scaler.update()
        seen["scales"].append(scaler.get_scale())
    seen["learned"] = learned(model)
    return seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_native_loop_under_ddp(ranks, dtype):
    results = ranks(native, dtype)
    for seen in results:
        assert seen["stepped"] == [True, False, True, True, True]
        assert seen["scales"] == [65536.0, *[32768.0] * 4]
    both_alike([seen["learned"] for seen in results])


# Uneven inputs


def uneven(level: str) -> dict[str, Any]:
    """The second rank has two batches more, and an overflow in the last of them."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    wrapped = DistributedDataParallel(model)
    for epoch in range(2):
        with wrapped.join():
            for step in range(3 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                inputs, targets = mine(10 * epoch + step)
                if step == 4:
                    inputs[0, 0, 0, 0] = float("inf")
                backward(nn.functional.cross_entropy(wrapped(inputs), targets), optimizer)
                optimizer.step()
    return {"learned": learned(model), "masters": masters(optimizer), "scale": amp.state_dict()["loss_scaler0"]}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_join_takes_uneven_inputs_and_leaves_the_ranks_alike(ranks, level):
    results = ranks(uneven, level)
    both_alike([result["learned"] for result in results])
    both_alike([result["masters"] for result in results])
    for result in results:  # the second rank's, which has seen all: a gradient averaged has one scale
        assert result["scale"] == {"loss_scale": 16384.0, "unskipped": 0}


# Killed and resumed


def killable(level: str, folder: str, killed: tuple[int, int] | None) -> list[Tensor]:
    """Twenty steps with a checkpoint after every fifth; goes on from the last one that is there."""
    path = os.path.join(folder, "checkpoint.pt")
    model = mlp()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level)
    wrapped, first = DistributedDataParallel(model), 0
    if os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        first = checkpoint["step"]
    for step in range(first, 20):
        optimizer.zero_grad()
        loss = loss_of(wrapped, mine(step))
        if (dist.get_rank(), step) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(loss, optimizer)
        optimizer.step()
        if step % 5 == 4 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            torch.save({**state, "step": step + 1}, path + ".new")
            os.replace(path + ".new", path)
    return learned(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_bits(ranks, level, tmp_path):
    (tmp_path / "straight").mkdir()
    (tmp_path / "killed").mkdir()
    straight = both_alike(ranks(killable, level, str(tmp_path / "straight"), None))
    with pytest.raises(RankError, match="rank 1: died, exit code -9"):
        ranks(killable, level, str(tmp_path / "killed"), (1, 12))
    assert torch.load(tmp_path / "killed" / "checkpoint.pt")["step"] == 10
    assert same(both_alike(ranks(killable, level, str(tmp_path / "killed"), None)), straight)
