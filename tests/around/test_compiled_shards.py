"""`torch.compile` of models that went through `fully_shard`: the whole model, or its parts before they are sharded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from torch import Tensor, nn
from training import backward, same

from amp_patch import amp

pytestmark = [
    pytest.mark.program,
    pytest.mark.skipif(
        torch.__version__.startswith("2.6."),
        reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event",
    ),
]
KINDS = [("O0", None), ("O1", torch.float16), ("O1", torch.bfloat16), ("O2", torch.float16), ("O4", None), ("O5", None)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def weights(level: str, dtype: Any, compiled: str) -> list[Tensor]:
    """The weights of this rank after three steps; `compiled`: "no", "all" or "parts"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # What torch's own tracing does, in plain scripts too.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 1))
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), amp.fsdp_policy(level, dtype=dtype)
    for index in (1, 2):
        if compiled == "parts":
            model[index].compile(backend="aot_eager")
        fully_shard(model[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    options = {} if level == "O0" else {"loss_scale": 256.0}
    amp.initialize(model, optimizer, opt_level=level, dtype=dtype, cpu_half="emulate", verbosity=0, **options)
    called = torch.compile(model, backend="aot_eager") if compiled == "all" else model
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        backward(called(torch.randn(4, 6, generator=generator)).float().square().mean(), optimizer)
        optimizer.step()
    return [value.full_tensor().clone() for value in model.state_dict().values()]


@crossed(pytest.mark.parametrize("level, dtype", KINDS), {"compiled": ["all", "parts"]}, meet=1)
def test_compiled_shards_train_as_in_eager(ranks, level, dtype, compiled):
    expected, found = ranks(weights, level, dtype, "no"), ranks(weights, level, dtype, compiled)
    assert same(*found)
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 if dtype is not None or level != "O0" else 1e-6)
