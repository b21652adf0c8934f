"""Trainings under torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn

from amp_patch import amp, optimizers

averaged = pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="fully_shard of torch 2.8 sums gradients over gloo, and averages none"
)


def SGD(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def ADAM(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


MAKERS: dict[str, Callable[..., Any]] = {
    "SGD": SGD,
    "Adam": ADAM,
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2),
    "FusedAdagrad": optimizers.FusedAdagrad,
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # 7 rows on two ranks are 4 and 3, and 1 row is 1 and none.
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 7), nn.Linear(7, 1))


def fully_shard(module: Any, mesh: Any = None, **kwargs: Any) -> Any:
    """Shard over all ranks on the CPU. Without this mesh, torch would use an existing GPU over gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)), **kwargs)


def shard(model: nn.Sequential, level: str = "O1", dtype: Any = None, **kwargs: Any) -> nn.Sequential:
    policy = amp.fsdp_policy(level, dtype=dtype, **{k: kwargs.pop(k) for k in ("reduce_dtype",) if k in kwargs})
    fully_shard(model[0], mp_policy=policy, **kwargs)
    return fully_shard(model, mp_policy=policy, **kwargs)


def sharded_training(level: str, dtype: Any, maker: str, shards: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    model = shard(network(), level, dtype, **(shards or {}))
    return amp.initialize(model, MAKERS[maker](model.parameters()), opt_level=level, dtype=dtype, verbosity=0, **kwargs)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs, targets = batch(step, rank)
    return nn.functional.mse_loss(model(inputs).float(), targets)


def checkpoint_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """The states of a training, as `torch.distributed.checkpoint` takes them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "amp": amp.state_dict()}


def save_checkpoint(model: Any, optimizer: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(checkpoint_of(model, optimizer), checkpoint_id=path)


def load_checkpoint(model: Any, optimizer: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    found = checkpoint_of(model, optimizer)
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    amp.load_state_dict(found["amp"])


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def weights(model: nn.Module) -> list[Tensor]:
    return [full(value).detach().clone() for value in model.state_dict().values()]


@pytest.fixture(name="restored", autouse=True)
def restored_fixture() -> Iterator[None]:
    yield
    amp.restore()


@pytest.fixture(name="one", scope="module")
def one_fixture() -> Iterator[Ranks]:
    with Ranks(1) as processes:
        yield processes


@pytest.fixture(name="four", scope="module")
def four_fixture() -> Iterator[Ranks]:
    with Ranks(4) as processes:
        yield processes
