"""apex.parallel on two processes: DistributedDataParallel, Reducer, SyncBatchNorm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import LEVELS, backward, convnet, images, linear, skipped

from amp_patch import amp
from amp_patch.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from amp_patch.apex.parallel.LARC import LARC


def _mean_of_both(make_loss, model):
    """Return the gradients of a new copy of `model`, averaged over those of each rank's data."""
    sums = {}
    for rank in range(2):
        alone = copy.deepcopy(model)
        make_loss(alone, rank).backward()
        for name, param in alone.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, 0) + param.grad / 2
    return sums


class Branches(nn.Module):
    """`spare` is never used; `extra` is returned but in no loss; `chosen` is used on request."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.spare, self.extra, self.chosen = (nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("own", torch.tensor(float(seed)))

    def forward(self, x, choose=True):
        hidden = self.body(x)
        return self.chosen(hidden) if choose else hidden, self.extra(x)


def _batch(rank, step=0):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def _ddp():
    rank = dist.get_rank()
    for kwargs, factor in (
        ({}, 1),
        ({"message_size": 1}, 1),
        ({"delay_allreduce": True}, 1),
        ({"allreduce_always_fp32": True}, 1),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"gradient_average": False}, 2),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.5),  # as Apex has it
    ):
        model = Branches(seed=rank)
        ddp = DistributedDataParallel(model, **kwargs)
        start = Branches(seed=0)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
        for step in range(5):

            def loss(net, number, step=step):
                return net(_batch(number, step), choose=step != 3)[0].square().sum()

            model.zero_grad()
            loss(ddp, rank).backward()
            wanted = _mean_of_both(loss, model)
            for name, param in model.named_parameters():
                if name in wanted:
                    torch.testing.assert_close(param.grad, wanted[name] * factor, msg=f"{kwargs} {step} {name}")
                else:
                    assert param.grad is None, (kwargs, step, name)

    # Two forwards and one backward; then accumulation without and with reductions in between.
    model = Branches(seed=rank)
    ddp = DistributedDataParallel(model)

    def both(net, number):
        return sum(net(_batch(number, step))[0].square().sum() for step in range(2))

    wanted = _mean_of_both(both, model)
    for way in ("one backward", "silent first", "two backwards"):
        model.zero_grad()
        if way == "one backward":
            both(ddp, rank).backward()
        else:
            for step in range(2):
                ddp.disable_allreduce() if way == "silent first" and step == 0 else ddp.enable_allreduce()
                ddp(_batch(rank, step))[0].square().sum().backward()
        for name, value in wanted.items():
            torch.testing.assert_close(model.get_parameter(name).grad, value, msg=f"{way} {name}")

    # FP16 gradients whose sum is past FP16.
    for kwargs in ({"allreduce_always_fp32": True}, {"gradient_predivide_factor": 2.0}):
        half = linear([[1.0]]).half()
        ddp = DistributedDataParallel(half, **kwargs)
        ddp(torch.full((1, 1), 60000.0).half()).sum().backward()
        assert half.weight.grad.tolist() == [[60000.0]], kwargs


def _reducer():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1).half()])
    reducer = Reducer(model)
    torch.manual_seed(0)
    start = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1).half()])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    for param in model.parameters():
        param.grad = torch.full_like(param, rank + 1.0)
    reducer.reduce()
    assert all((param.grad == 1.5).all() for param in model.parameters())
    gradient = torch.tensor([4.0 * rank])
    Reducer([gradient]).reduce()
    assert gradient.item() == 2.0


def _syncbn():
    rank = dist.get_rank()
    groups = create_syncbn_process_group(2), None, create_syncbn_process_group(0)
    with pytest.raises(ValueError, match="wanted a divisor of the 2 processes"):
        create_syncbn_process_group(3)
    sizes = (3, 5)  # the ranks' batches may differ
    for dtype in (torch.float32, torch.float64, torch.float16):
        for shape, kwargs in (
            ((4,), {"process_group": groups[0]}),
            ((4, 3), {"momentum": None}),
            ((4, 2, 3), {"affine": False}),
            ((2, 3, 4), {"channel_last": True}),
            ((4, 2), {"track_running_stats": False}),
            ((4, 2), {"eps": 0.1, "momentum": 0.5, "fuse_relu": True}),
        ):
            torch.manual_seed(1)
            last, relu = kwargs.get("channel_last"), kwargs.get("fuse_relu")
            whole = (torch.randn(8, *shape) * 3 + 5).to(dtype)
            seeds = torch.randn(8, *shape).to(dtype)
            theirs = {k: v for k, v in kwargs.items() if k in ("momentum", "affine", "track_running_stats", "eps")}
            reference = nn.BatchNorm1d(4, **theirs).double()
            ours = SyncBatchNorm(4, **kwargs).to(torch.float64 if dtype is torch.float64 else torch.float32)
            if reference.affine:
                with torch.no_grad():
                    for norm in (reference, ours):
                        norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
                        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
            tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3}[dtype]
            mine = slice(0, 3) if rank == 0 else slice(3, 8)
            for _ in range(2):
                full = whole.to(torch.float64, copy=True).requires_grad_()
                channels = full.movedim(-1, 1) if last else full
                wanted = reference(channels.flatten(2) if channels.dim() > 2 else channels).view(channels.shape)
                wanted = wanted.relu() if relu else wanted
                wanted = wanted.movedim(1, -1) if last else wanted
                part = whole[mine].clone().requires_grad_()
                got = ours(part)
                assert got.dtype is dtype and len(got) == sizes[rank]
                close = {"rtol": tolerance, "atol": tolerance, "msg": f"{dtype} {shape} {kwargs}"}
                torch.testing.assert_close(got.double(), wanted[mine], **close)
                reference.zero_grad()
                ours.zero_grad()
                (wanted * seeds.double()).sum().backward()
                (got * seeds[mine]).sum().backward()
                torch.testing.assert_close(part.grad.double(), full.grad[mine], **close)
                for param, truth in zip(ours.parameters(), reference.parameters(), strict=True):
                    dist.all_reduce(param.grad)
                    close["atol"] = 10 * tolerance
                    torch.testing.assert_close(param.grad.double(), truth.grad, **close)
            for name, buffer in reference.named_buffers():
                torch.testing.assert_close(ours.get_buffer(name).double(), buffer.double(), **close)
            ours.eval(), reference.eval()
            if reference.running_mean is not None and not last:  # no process waits for another now
                flat = whole[mine].double()
                wanted = reference(flat.flatten(2) if flat.dim() > 2 else flat).view(flat.shape)
                wanted = wanted.relu() if relu else wanted
                torch.testing.assert_close(ours(whole[mine]).double(), wanted, **close)
    _syncbn_alone(rank)
    _syncbn_double_backward(rank)


def _syncbn_alone(rank):
    """In groups of one process it is a batch norm."""
    alone = SyncBatchNorm(4, process_group=create_syncbn_process_group(1))
    x = _batch(rank) @ torch.ones(3, 4) + torch.randn(4, 4)
    torch.testing.assert_close(alone(x), nn.BatchNorm1d(4)(x))


def _syncbn_double_backward(rank):
    """A gradient of a gradient."""
    norm, reference = SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)).double()
    values = []
    for net, x in ((norm, whole[4 * rank : 4 * rank + 4].clone()), (reference, whole.clone())):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), x)
        values.append(curve)
    torch.testing.assert_close(values[0], values[1][4 * rank : 4 * rank + 4])


def _training():
    """Self-supervised style: converted batch norms, LARC, initialize, DDP; as one process with the whole batch."""
    rank = dist.get_rank()

    def train(level, alone):
        model = convnet()
        if not alone:
            model = convert_syncbn_model(model, process_group=create_syncbn_process_group(2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        optimizer = LARC(optimizer=sgd, trust_coefficient=0.1, clip=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        net = model if alone else DistributedDataParallel(model, delay_allreduce=True)
        losses = []
        for step in range(6):
            inputs, targets = images(step)
            part = slice(None) if alone else slice(4 * rank, 4 * rank + 4)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs[part]), targets[part])
            backward(loss * (math.inf if step == 4 and (alone or rank == 1) else 1.0), optimizer)
            optimizer.step()
            assert skipped(optimizer) is (step == 4), "on both ranks or on none"
            loss = loss.detach()
            if not alone:
                dist.all_reduce(loss)
                loss /= 2
            losses.append(loss.item())
        return losses, torch.cat([p.detach().float().flatten() for p in amp.master_params(optimizer)])

    for level in LEVELS[:4]:
        losses, weights = train(level, alone=False)
        wanted, _ = train(level, alone=True)
        tolerance = 1e-5 if level == "O0" else 0.02
        assert losses == pytest.approx(wanted, rel=tolerance, abs=tolerance), level
        both = [torch.empty_like(weights), torch.empty_like(weights)]
        dist.all_gather(both, weights)
        assert torch.equal(*both), level


@pytest.mark.parametrize("check", [_ddp, _reducer, _syncbn, _training])
def test_two_processes(ranks, check):
    ranks(check)
