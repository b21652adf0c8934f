"""CUDA-only code on a machine without CUDA: trainings, autocast regions and process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from python_forks import python
from scripts import (
    cpu_fixture,  # noqa: F401  the fixture `cpu`
    on_cpu,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import mm_dtype

from amp_patch import amp
from amp_patch.casts import cpu_half, install
from amp_patch.casts import state as casts_state
from amp_patch.run import no_cuda

pytestmark = pytest.mark.program


@pytest.fixture(params=[True, False], ids=["arithmetic", "emulated"])
def arithmetic(request, monkeypatch):
    """Whether this CPU computes in FP16."""
    monkeypatch.setattr(cpu_half, "has_arithmetic", lambda dtype: request.param)
    return request.param


class Products(TorchDispatchMode):
    """The types that matrix products are computed in."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        emulated = casts_state.in_use.emulated_calls()
        result = func(*args, **(kwargs or {}))
        if "mm." in str(func):
            self.types.append(FP32 if casts_state.in_use.emulated_calls() > emulated else result.dtype)
        return result


HALF, BF16, FP32 = torch.half, torch.bfloat16, torch.float
AREAS = {
    "amp.autocast()": lambda **options: amp.autocast(**options),
    "amp.autocast('cuda')": lambda **options: amp.autocast("cuda", **options),
    "amp_patch.cuda.amp.autocast()": lambda **options: amp.cuda.amp.autocast(**options),
    "torch.autocast('cuda')": lambda **options: torch.autocast("cuda", **options),
    "torch.amp.autocast('cuda:0')": lambda **options: torch.amp.autocast("cuda:0", **options),
    "torch.cuda.amp.autocast()": lambda **options: torch.cuda.amp.autocast(**options),
}


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast.* is deprecated:FutureWarning")
@pytest.mark.parametrize("area", AREAS)
def test_fp16_regions_are_emulated_on_a_cpu_without_fp16(cpu, arithmetic, area):
    """If this CPU has no FP16 arithmetic, values are FP16 and products are FP32, in forward and backward."""
    make, x, layer = AREAS[area], torch.ones(2, 4, device="cuda"), nn.Linear(4, 4).cuda()
    with Products() as seen:
        with make():
            y = layer(x)
        y.sum().backward()
    assert y.dtype == HALF and len(seen.types) >= 2 and set(seen.types) == {HALF if arithmetic else FP32}
    native = area.startswith("torch.")
    with make(), make(enabled=False):
        assert mm_dtype() == FP32 and not torch.is_autocast_enabled()
    with make(dtype=BF16):
        assert mm_dtype() == BF16
        if native:
            assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") == BF16
        with make():
            assert mm_dtype() == (BF16 if area.startswith("torch.a") else HALF), "torch's default is the type around"
        with make(dtype=HALF):
            assert mm_dtype() == HALF
            if native:
                assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == HALF
        with make(), torch.autocast("cpu", BF16):
            assert mm_dtype() == BF16 and torch.get_autocast_dtype("cpu") == BF16
    assert make()(mm_dtype)() == HALF, "as a decorator"
    with pytest.raises(ZeroDivisionError), make():
        1 / 0  # noqa: B018
    assert mm_dtype() == FP32 and not torch.is_autocast_enabled() and casts_state.outside()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_recomputed_in_its_autocast_type(cpu, arithmetic, reentrant):
    layer, types = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda module, args: types.append(mm_dtype()))
    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cuda"):
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    y.sum().backward()
    assert types == [HALF, HALF] and x.grad.dtype == FP32


def test_a_native_cuda_training_runs_on_the_cpu(cpu, arithmetic):
    net = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(FutureWarning, match="torch.cuda.amp.GradScaler"):
        scaler = torch.cuda.amp.GradScaler()
    losses = []
    x, y = torch.randn(8, 4, device="cuda"), torch.randint(2, (8,), device="cuda")
    for _ in range(20):
        with torch.autocast("cuda"), torch.amp.autocast(device_type="cuda"):
            out = net(x)
            assert out.dtype == torch.half and torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda", enabled=False):
        assert net(x).dtype == torch.float


def test_custom_functions_cast_inputs_under_autocast(cpu, arithmetic):
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, torch.is_autocast_enabled()))
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, dtype=torch.half, requires_grad=True)
    with torch.autocast("cuda"):
        Double.apply(x).sum().backward()
    assert seen == [(torch.float32, False)] and x.grad.tolist() == [2, 2]


def test_a_process_group_over_nccl_uses_gloo(cpu, tmp_path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        assert dist.get_backend() == dist.get_backend(dist.new_group([0], backend="nccl")) == "gloo"
        layer = nn.Linear(2, 2).cuda()
        for given in {"device_ids": [0], "output_device": 0}, {"device_ids": [torch.cuda.current_device()]}, {}:
            parallel = nn.parallel.DistributedDataParallel(layer, **given)
            parallel(torch.ones(1, 2).cuda()).sum().backward()
        assert on_cpu(layer.weight.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_a_training_on_cuda_gives_the_losses_of_the_cpu(opt_level):
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer = amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0)
        losses = []
        for _ in range(5):
            loss = nn.functional.cross_entropy(net(torch.randn(8, 4).to(device)), torch.randint(2, (8,)).to(device))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
        amp.restore()
        return losses

    plain = train("cpu")
    no_cuda.install()
    try:
        assert train("cuda") == plain
    finally:
        no_cuda.uninstall()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_functions_keep_their_operators(cpu):
    @torch.jit.script
    def plus_zeros(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float32) + x

    assert plus_zeros(torch.ones(2)).tolist() == [1, 1]


def snapshot() -> dict[tuple[str, str], int]:
    owners = [torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.amp, torch.fft, dist]
    owners += [torch.Tensor, torch.storage._StorageBase, torch.storage.TypedStorage, nn.DataParallel]
    owners += [nn.parallel.DistributedDataParallel, torch.utils.data.DataLoader, torch.amp.autocast, install]
    seen = {(repr(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}
    return seen | {("registry", ""): hash(tuple(torch.serialization._package_registry))}


def test_uninstall_restores_torch():
    before = snapshot()
    no_cuda.install()
    no_cuda.install()
    assert snapshot() != before
    no_cuda.uninstall()
    no_cuda.uninstall()
    assert snapshot() == before


def test_a_failed_install_restores_torch(monkeypatch):
    before = snapshot()
    monkeypatch.setattr(no_cuda.Patches, "apply", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        no_cuda.install()
    monkeypatch.undo()
    assert snapshot() == before


SCRIPT = """
import multiprocessing, sys, torch
from apex import amp
assert torch.cuda.is_available()

def work():
    assert torch.zeros(1).cuda().to("cuda:0").sum() == 0

if __name__ == "__main__":
    work()
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    print(process.exitcode, sys.argv[1:])
"""


def test_run_with_device_cpu_says_so_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = python("-m", "amp_patch", "run", "--device", "cpu", tmp_path / "train.py", "--device", "0")
    assert ran.stderr.count("\n") == 1 and "the CPU" in ran.stderr, ran.stderr
    assert ran.stdout == "0 ['--device', '0']\n"
