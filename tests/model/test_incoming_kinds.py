"""Models in low precision at `initialize`: later unfrozen, refused, trained on several ranks; their bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from low_models import CAST, Peak, every_half, iterate_low, loss_of, net
from ranks import RankError
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import LEVELS, SGD, backward, linear, same, trained

from amp_patch import amp
from amp_patch.masters.masters import master_of

# ---------------------------------------------------------------------------------------------------------------------
# Thawed weights


@every_half
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_thawed_weight_gets_its_master_when_it_is_trained(split, half):
    model = net(half)
    options = {"master_weights": "split"} if split else {}
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)
    iterate_low(model, optimizer, 2)
    was = model.frozen.weight.detach().float().clone()
    model.frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'frozen.weight' came frozen .*call scale_loss"):
        optimizer.step()
    loss = loss_of(model, 5)
    with amp.scale_loss(loss, optimizer) as scaled:
        master = master_of(model.frozen.weight)
        assert master is not None and torch.equal(master, was)
        scaled.backward()
    gradient = model.frozen.weight.grad
    optimizer.step()
    assert gradient.dtype is torch.float32 and torch.equal(master.detach(), was.add(gradient, alpha=-0.05))


@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
@pytest.mark.parametrize("first", ["thawed", "loaded"])
def test_the_state_that_is_loaded_for_a_thawed_weight_stays_fp32(first, level):
    """At O4 until `initialize` is called again, which makes the weight FP32."""

    def start(frozen: bool) -> tuple[Any, Any]:
        model = net(torch.bfloat16)
        model.frozen.requires_grad_(not frozen)
        return amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=1.0, verbosity=0)

    model, optimizer = start(frozen=False)
    iterate_low(model, optimizer, 2)
    saved, loaded = optimizer.state_dict(), copy.deepcopy(buffers(optimizer))
    model, optimizer = start(frozen=True)
    if first == "thawed":
        model.frozen.requires_grad_(True)
    optimizer.load_state_dict(saved)
    model.frozen.requires_grad_(True)
    if level == "O4":
        amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    backward(loss_of(model, 5) * 0, optimizer)
    assert same(buffers(optimizer), loaded)
    optimizer.step()
    assert same(buffers(optimizer), [buffer * 0.9 for buffer in loaded])


def buffers(optimizer: Any) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for _, state in sorted(optimizer.state_dict()["state"].items())]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_thawed_weight_is_refused_where_trained_ones_are_fp32(level):
    model = net(torch.bfloat16)
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'frozen.weight' came frozen .*initialize\(\) again"):
        backward(loss_of(model, 0), optimizer)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.frozen.weight.dtype is torch.float32
    iterate_low(model, optimizer, 2)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("cleared", [False, True])
def test_an_unfrozen_weight_appended_to_a_group_gets_a_master(level, cleared):
    model = net(torch.bfloat16)
    optimizer = SGD(trained(model))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    iterate_low(model, optimizer, 1)
    model.frozen.requires_grad_(True)
    optimizer.param_groups[0]["params"] += list(model.frozen.parameters())
    if cleared:
        optimizer.zero_grad()
    backward(loss_of(model, 0), optimizer)
    assert master_of(model.frozen.weight) is not None
    optimizer.step()


@every_half
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_low_precision_weights_of_a_new_group_are_fp32_under_casts(level, half):
    model = net(half)
    optimizer = SGD(trained(model))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.leave = nn.Sequential(model.leave, nn.Linear(3, 3).to(half))
    model.frozen.requires_grad_(True)
    alien = nn.Parameter(torch.ones(3, dtype=half))
    new = [*model.leave[1].parameters(), *model.frozen.parameters()]
    values = [p.detach().float() for p in new]
    optimizer.add_param_group({"params": [*new, alien]})
    assert same(new, values) and alien.dtype is half
    iterate_low(model, optimizer, 2)
    assert not any(map(torch.equal, new, values))


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be taken


@pytest.mark.parametrize("frozen", [False, True])
def test_a_value_that_fp16_cannot_hold_is_refused_by_name_before_anything_is_written(frozen):
    model = nn.Sequential(linear([[1.0]]), linear([[1e5]])).bfloat16()
    model[1].requires_grad_(not frozen)
    before = [p.detach().clone() for p in model.parameters()]
    for level in ("O2", "O3"):
        with pytest.raises(ValueError, match=r"'1.weight' of Sequential .*99840.*opt_level='O5'"):
            amp.initialize(model, SGD(model.parameters()), opt_level=level)
    assert same(model.parameters(), before) and type(model) is nn.Sequential
    model[1].weight.data.fill_(float("inf"))  # no finite value is lost
    amp.initialize(model, SGD(model.parameters()), opt_level="O2")


class Params4bit(nn.Parameter):
    """As bitsandbytes'."""


class AffineQuantizedTensor(torch.Tensor):
    """As torchao's."""


AffineQuantizedTensor.__module__ = "torchao.dtypes"


def quantized(kind: str, *, trained: bool = False) -> nn.Linear:
    model = nn.Linear(4, 4, bias=False)
    if kind == "torchao":
        weight = torch.ones(4, 4).as_subclass(AffineQuantizedTensor)
        model.weight = nn.Parameter(weight, requires_grad=trained)
    elif kind == "bitsandbytes":
        model.weight = Params4bit(torch.ones(4, 4, dtype=torch.float16), requires_grad=trained)
    else:
        dtype = {"FP8": torch.float8_e4m3fn, "int8": torch.int8}[kind]
        model.weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=trained)
    return model


@crossed({"level": LEVELS, "kind": ["FP8", "int8", "bitsandbytes", "torchao"]}, meet=1)
def test_quantized_weights_are_left_alone(level, kind):
    model = nn.Sequential(nn.Linear(4, 4), quantized(kind))
    weight, place, dtype = model[1].weight, model[1].weight.data_ptr(), model[1].weight.dtype
    amp.initialize(model, SGD(model[0].parameters()), opt_level=level)
    assert model[1].weight is weight and (weight.data_ptr(), weight.dtype) == (place, dtype)
    assert model.state_dict()["1.weight"].dtype is dtype
    amp.restore()
    assert model[1].weight is weight and (weight.data_ptr(), weight.dtype) == (place, dtype)


@crossed({"level": ["O1", "O2", "O3", "O4", "O5"], "kind": ["FP8", "bitsandbytes", "torchao"]}, meet=1)
def test_quantized_weights_that_are_trained_are_refused_by_name(level, kind):
    model = nn.Sequential(nn.Linear(4, 4), quantized(kind, trained=True))
    with pytest.raises(ValueError, match=r"'1.weight' of Sequential is quantized .*requires_grad_\(False\)"):
        amp.initialize(model, SGD(model[0].parameters()), opt_level=level)
    assert type(model) is nn.Sequential


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


@pytest.mark.parametrize(
    ("level", "half", "split", "bytes_each"),
    [("O5", torch.bfloat16, True, 2), ("O5", torch.bfloat16, False, 4), ("O2", torch.float16, False, 4)],
)
def test_initialize_peaks_at_its_kept_memory_and_one_tensor(level, half, split, bytes_each):
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(16)]).to(half)
    size, one = 16 * 128 * 128, 128 * 128
    options = {"master_weights": "split"} if split else {}
    optimizer = SGD(model.parameters())
    with Peak(model) as peak:
        amp.initialize(model, optimizer, opt_level=level, **options)
    kept = bytes_each * size
    assert kept <= peak.peak <= kept + 8 * one + 4096


def test_without_an_optimizer_the_state_dict_has_the_weights_themselves():
    model = amp.initialize(net(torch.bfloat16), opt_level="O5")
    state = model.state_dict()
    assert state["enter.weight"].data_ptr() == model.enter.weight.data_ptr()
    assert state["norm.weight"].dtype is torch.float32 and state["offset"].dtype is torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# Several processes


def wrapped_first(level: str, half: torch.dtype, widen: bool) -> list[torch.Tensor]:
    model = net(half)
    model = model.float() if widen else model
    ddp = DistributedDataParallel(model)
    optimizer = SGD(trained(model))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(ddp, 2 * step + dist.get_rank()), optimizer)
        optimizer.step()
    found = [master.detach().clone() for master in amp.master_params(optimizer)]
    amp.restore()
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.float32 if widen else half}
    loss = ddp(torch.ones(4, 6, dtype=dtypes.pop())).float().square().mean()
    loss.backward()  # whose buckets have the types of now
    return found


@crossed(every_half, {"level": ["O1", "O2", "O4", "O5"]}, meet=1)
def test_a_model_in_ddp_is_reduced_in_the_types_that_it_gets(ranks, level, half):
    mine, others = ranks(wrapped_first, level, half, False)
    assert same(mine, others)
    if level in CAST:  # at O1 and O4 a frozen layer computes on what it came in
        assert same(mine, ranks(wrapped_first, level, half, True)[0])


def sharded(level: str, frozen: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16).bfloat16().requires_grad_(not frozen), nn.Tanh(), nn.Linear(16, 3))
    for module in (model[0], model[2]):
        fully_shard(module, mp_policy=amp.fsdp_policy(level))
    fully_shard(model, mp_policy=amp.fsdp_policy(level))
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    before = model[0].weight.to_local().clone()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = iterate_low(model, optimizer, 10)
    assert losses[-1] < losses[0] and torch.equal(model[0].weight.to_local(), before)
    return [torch.tensor(losses)]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_frozen_shards_in_bf16_stay_and_trained_ones_are_refused_by_name(ranks, level):
    ranks(sharded, level, True)
    with pytest.raises(RankError, match=r"'0.weight' of .* is sharded and torch.bfloat16"):
        ranks(sharded, level, False)
