"""CUDA-only scripts on the CPU: the calls of torch.cuda that such scripts make."""

from __future__ import annotations

import threading

import pytest
import torch
from scripts import (
    cpu_fixture,  # noqa: F401  the fixture `cpu`
    on_cpu,
)
from torch import nn

from amp_patch.run import no_cuda

CUDA = [0, "cuda", "cuda:0", "cuda:3", torch.device("cuda"), torch.device("cuda", 1)]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("device", CUDA, ids=repr)
def test_factories_with_a_cuda_device_make_cpu_tensors(cpu, device):
    like = torch.ones(3)
    made = [
        torch.zeros(3, device=device),
        torch.empty(3, device=device, pin_memory=True),
        torch.full((2,), 1.0, device=device),
        torch.tensor([1.0], device=device),
        torch.as_tensor([1], device=device),
        torch.asarray([1], device=device),
        torch.arange(3, device=device),
        torch.randn(3, device=device),
        torch.randint(3, (2,), device=device),
        torch.randperm(3, device=device),
        torch.normal(0.0, 1.0, (2,), device=device),
        torch.linspace(0, 1, 3, device=device),
        torch.eye(2, device=device),
        torch.zeros_like(like, device=device),
        torch.rand_like(like, device=device),
        torch.fft.fftfreq(4, device=device),
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), device=device),
        torch.hann_window(4, device=device),
        like.new_zeros(3, device=device),
        like.new_tensor([1.0], device=device),
        like.new_full((2,), 3.0, device=device),
        nn.Parameter(torch.ones(2, device=device)),
        nn.Linear(2, 2, device=device).weight,
    ]
    assert on_cpu(*made)


def test_every_factory_with_a_device_argument_is_patched(cpu):
    """The list of factories is torch's own."""
    makers = {function.__name__ for function in torch.utils._device._device_constructors()}
    left = {name for name in makers if hasattr(torch, name) and not hasattr(getattr(torch, name), "__wrapped__")}
    assert len(makers) > 20 and left <= {"fill", "vander"}, "torch 2.6 lists these two, which take no device"


@pytest.mark.parametrize("device", CUDA, ids=repr)
def test_moves_to_cuda_stay_on_the_cpu_and_apply_dtypes(cpu, device):
    x = torch.ones(2)
    moved = [
        x.to(device),
        x.to(device, torch.half),
        x.to(device=device, dtype=torch.half, non_blocking=True),
        x.to(device, non_blocking=True),
        x.to(device, torch.float32, False, True),
        x.cuda(),
        x.cuda(device),
        x.cuda(device, non_blocking=True),
        x.cuda(non_blocking=True),
        x.pin_memory().cuda(),
        nn.Linear(2, 2).to(device).weight,
        nn.BatchNorm1d(2).cuda(device).running_mean,
        nn.LSTM(2, 2).to(device, torch.half).weight_ih_l0,
        nn.utils.rnn.pack_sequence([x]).to(device).data,
        nn.utils.rnn.pack_sequence([x]).cuda(device).data,
    ]
    assert on_cpu(*moved)
    assert moved[1].dtype == moved[2].dtype == moved[-3].dtype == torch.half
    # Other conversions are unchanged.
    assert x.to(torch.half).dtype == torch.half and x.to("cpu") is x and x.to(x) is x
    assert x.to("meta").device.type == "meta"


def test_a_moved_tensor_is_a_copy_unless_gradients_flow(cpu):
    batch = torch.ones(2)
    batch.cuda().sub_(1)
    batch.to("cuda").sub_(1)
    assert batch.tolist() == [1, 1]
    weight = nn.Parameter(torch.ones(2))
    assert weight.cuda() is weight.to("cuda") is weight
    layer = nn.Linear(2, 2)
    parameters = list(layer.parameters())
    assert all(a is b for a, b in zip(layer.cuda().parameters(), parameters, strict=True))
    (weight * 2).cuda().sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_a_tensor_made_for_cuda_reports_the_cpu(cpu):
    x = torch.zeros(1, device="cuda")
    assert not x.is_cuda and x.device == torch.device("cpu") and x.get_device() == -1
    assert torch.zeros(1, device=x.get_device()).cuda(x.get_device()).to(x.get_device()) == 0
    assert torch.device("cuda").type == "cuda" and isinstance(torch.device("cuda"), torch.device)
    assert not x.is_pinned()
    x.record_stream(torch.cuda.current_stream())


def test_cuda_tensor_types_are_cpu_types_with_cuda_names(cpu):
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    for name in ("Float", "Half", "Double", "Int", "Long", "Byte", "Bool", "BFloat16"):
        kind = getattr(torch.cuda, f"{name}Tensor")
        made = kind([0])
        assert isinstance(made, kind) and isinstance(made, getattr(torch, f"{name}Tensor"))
        for cast in torch.ones(2).type(kind), torch.ones(2).type(f"torch.cuda.{name}Tensor"):
            assert isinstance(cast, kind)
            assert cast.type() == f"torch.cuda.{name}Tensor" and cast.type() == f"torch.{name}Tensor"
            assert cast.type() in ["torch.cuda.CharTensor", f"torch.cuda.{name}Tensor"]
            assert cast.type() != "torch.cuda.CharTensor" and torch.ones(1).type(cast.type()).dtype == cast.dtype
    assert {torch.ones(1).type(): 1}[torch.ones(2).type()] == 1
    assert nn.Linear(1, 1).type(torch.cuda.HalfTensor).weight.dtype == torch.half


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_cuda_type_or_device_makes_cpu_tensors(cpu):
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        assert torch.ones(1).dtype == torch.double
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        assert torch.ones(1).dtype == torch.float
        torch.set_default_device("cuda")
        assert on_cpu(torch.ones(1), torch.tensor(1.0))
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert on_cpu(torch.ones(1), nn.Linear(1, 1).weight)
    with torch.device("meta"):
        assert torch.ones(1).device.type == "meta"


def test_torch_cuda_describes_one_available_device(cpu):
    cuda = torch.cuda
    assert cuda.is_available() and cuda.device_count() == 1 and cuda.current_device() == 0
    assert cuda.get_device_capability() == cuda.get_device_capability(0) == (7, 0)
    assert cuda.get_device_name(0) == cuda.get_device_properties(0).name
    assert cuda.get_device_properties("cuda").total_memory > 2**20 and cuda.mem_get_info()[1] > 2**20
    cuda.set_device(2)
    cuda.synchronize(), cuda.empty_cache(), cuda.init(), cuda.ipc_collect()
    cuda.manual_seed(1), cuda.manual_seed_all(1), torch.manual_seed(1)
    cuda.set_rng_state(cuda.get_rng_state())
    cuda.set_rng_state_all(cuda.get_rng_state_all())
    with torch.random.fork_rng():
        torch.rand(1)
    with cuda.device(1), cuda.device_of(torch.ones(1)):
        pass
    with cuda.nvtx.range("step"), cuda.profiler.profile():
        cuda.nvtx.range_push("forward"), cuda.nvtx.range_pop(), cuda.nvtx.mark("here")
    cuda.profiler.start(), cuda.profiler.stop(), cuda.cudart().cudaProfilerStart()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark


def test_the_versions_of_a_build_for_cuda_can_be_split_and_compared():
    before = torch.version.cuda, torch.backends.cudnn.version()
    no_cuda.install()
    try:
        assert tuple(map(int, torch.version.cuda.split("."))) >= (11, 0)
        assert torch.backends.cudnn.version() >= 7603 and torch.cuda.nccl.version() >= (2, 10)
        assert before[0] in (None, torch.version.cuda), "a build for CUDA keeps its own"
    finally:
        no_cuda.uninstall()
    assert (torch.version.cuda, torch.backends.cudnn.version()) == before


def test_cuda_has_no_memory_in_use(cpu):
    cuda = torch.cuda
    held = torch.ones(2**20, device="cuda")
    cuda.reset_peak_memory_stats()
    numbers = cuda.memory_allocated(0), cuda.memory.memory_reserved(), cuda.max_memory_allocated(held.device)
    assert {*numbers, cuda.memory_stats("cuda")["allocated_bytes.all.peak"]} == {0}
    assert "no memory of CUDA" in cuda.memory_summary(abbreviated=True)
    free, total = cuda.mem_get_info()
    assert 0 < free < total


def test_streams_and_events_measure_time_on_the_cpu(cpu):
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    with torch.cuda.stream(stream):
        threading.Event().wait(0.01)
        assert isinstance(stream.record_event(), torch.cuda.Event) and stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.default_stream().wait_event(end)
    end.record(torch.cuda.current_stream())
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 10 and end.elapsed_time(start) <= -10


def test_cuda_generators_draw_the_numbers_of_cpu_generators(cpu):
    generators = [torch.Generator(device) for device in ("cuda", "cuda:0", torch.device("cuda"), "cpu")]
    generators += [torch.Generator(device="cuda"), torch.Generator()]
    drawn = [torch.rand(2, generator=generator.manual_seed(3), device="cuda") for generator in generators]
    assert all(torch.equal(numbers, drawn[0]) for numbers in drawn)
    assert all(isinstance(generator, torch.Generator) for generator in generators)
    assert isinstance(torch.default_generator, torch.Generator) and not isinstance(3, torch.Generator)


def test_checkpoints_saved_on_cuda_load_on_the_cpu(cpu, tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:2")
    torch.save(nn.Linear(2, 2).state_dict(), path)
    assert b"cuda:2" in path.read_bytes()
    places = [None, "cuda", "cuda:0", torch.device("cuda"), "cpu", {"cuda:2": "cuda:0"}]
    places += [lambda storage, location: storage.cuda(), lambda storage, location: storage]
    for place in places:
        assert on_cpu(*torch.load(path, map_location=place, weights_only=True).values())
    assert torch.ones(2).untyped_storage().to(device="cuda").device.type == "cpu"


def test_loaders_with_pinned_memory_give_cpu_batches(cpu):
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    for (batch,) in torch.utils.data.DataLoader(data, 2, pin_memory=True):
        assert batch.cuda(non_blocking=True).shape == (2, 2)
