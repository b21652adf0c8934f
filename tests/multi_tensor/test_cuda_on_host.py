"""The CUDA kernels with their launches (csrc/kernels/*.cu), run on the host: numbers, grids, captures, failures."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import coded_cases
import emulated
import pytest
import reference
import torch
from coded_cases import FORMS, MAPS, OF_KERNEL, decoded, drawn, encoded, same_bits, states, stepped
from coded_cases import SIZES as CODED_SIZES
from paths import ROOT, TESTS
from reference import ADAM, SGD, State, draw
from torch.utils import cpp_extension

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import backends

if emulated.COMPILER is None:
    pytest.skip("no C++ compiler here to build tests/cuda/on_host.cpp with", allow_module_level=True)

pytestmark = pytest.mark.slow  # a compiler works for a minute

SIZES = [0, 5, 8, 4097, (3, 0), (6, 20), 0]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cuda_on_host"))


@pytest.fixture(autouse=True)
def gpu(library, monkeypatch):
    """Replace the extension by the module; tensors of the CPU stand in for those of a GPU."""
    monkeypatch.setattr(backends, "_C", library)
    monkeypatch.setattr(backends, "active", library)
    library.fail_at(-1)
    with torch.no_grad():
        yield library
    library.fail_at(-1)
    library.cuda_metadata("auto")
    library.most_blocks(2**31 - 1)
    for switch in (library.capture, library.steps_on_host, library.run_backwards):
        switch(False)


def assert_rounded_alike(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        rtol = 1e-5 if a.dtype == torch.float32 else 2 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)


WAYS = ("auto", "arguments", "buffer", "capture", "backwards")


@pytest.fixture(params=WAYS)
def way(request, gpu):
    """Parametrize over the ways to pass rows to a launch, and over the order of blocks and threads."""
    if request.param == "capture":
        gpu.capture(True)
    elif request.param == "backwards":
        gpu.run_backwards(True)
    else:
        gpu.cuda_metadata(request.param)
    return request.param


def test_a_build_raises_its_own_refusals_beside_another(gpu):
    extension = pytest.importorskip("amp_patch._C", reason="the extension is not built")
    for build in (gpu, extension):
        with pytest.raises(build.Refused, match="dtype"):
            build.l2norm([torch.ones(2, dtype=torch.bool)], 1.0, None)


@pytest.mark.parametrize("count", [2, 700])  # fewer and more rows than arguments hold
def test_the_kernels(way, count):
    src = [*draw([1 + i % 50 for i in range(count)], 1), *(t.t() for t in draw([(9, 7), (0, 3)], 2))]
    half, found = [t.half() for t in src], torch.zeros(())
    out = [torch.full(t.shape, math.nan) for t in src]
    mt.multi_tensor_scale(half, out, 1 / 3, found)
    for h, o in zip(half, out, strict=True):
        assert torch.equal(o, reference.scale(h, torch.float32, 1 / 3))
    mt.multi_tensor_axpby(0.5, half, 2.0, out, out, found)
    for h, o in zip(half, out, strict=True):
        assert torch.equal(o, 0.5 * h.float() + 2.0 * reference.scale(h, torch.float32, 1 / 3))
    total, norms = mt.multi_tensor_l2norm(src, per_tensor=True)
    assert_rounded_alike(
        [total, norms], [reference.l2norm(src).float(), torch.stack([reference.l2norm([t]) for t in src]).float()]
    )
    assert found == 0
    half[-2][3, 3] = math.inf
    mt.multi_tensor_unscale_l2norm(half, torch.tensor(0.5), found)
    assert found == 1
    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    mt.update_scale(scale, tracker, found)
    assert scale == 4


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 80])
@pytest.mark.parametrize(
    ("way", "host"),
    [(way, host) for way in WAYS for host in (False, True) if not (host and way == "capture")],  # which is refused
    indirect=["way"],
)
def test_the_steps(way, gpu, low, count, host):
    gpu.steps_on_host(host)
    ours, theirs = State(SIZES * count, low), State(SIZES * count, low)
    for k in range(3):
        for state in (ours, theirs):
            state.gradients(k)
        ours.adam(**ADAM | {"weight_decay": 0.1}, amsgrad=True, factors=(0.3,))
        theirs.reference_adam(**ADAM | {"weight_decay": 0.1}, amsgrad=True, factors=(0.3,))
        ours.sgd(**SGD, factors=(0.3,))
        theirs.reference_sgd(**SGD, factors=(0.3,))
    assert_rounded_alike(ours.everything(), theirs.everything())
    before = [t.clone() for t in ours.everything()]
    ours.sgd(**SGD, found_inf=torch.ones(()))
    if not host:
        ours.adam(**ADAM, found_inf=torch.ones(()))
    assert all(map(torch.equal, before, ours.everything()))


def test_halves(way):
    masters = draw(SIZES * 70, 3)
    weights, halves = [m.bfloat16() for m in masters], [torch.empty(m.shape, dtype=torch.int16) for m in masters]
    back = [torch.empty_like(m) for m in masters]
    mt.multi_tensor_split(masters, weights, halves)
    mt.multi_tensor_join(weights, halves, back)
    assert all(map(torch.equal, masters, back))


def test_stochastic_rounding_has_the_cpus_bits(way):
    masters = draw(SIZES * 70, 4)
    draws = [number << 40 | 5 for number in range(len(masters))]
    ours, theirs = ([torch.empty_like(m, dtype=torch.bfloat16) for m in masters] for _ in range(2))
    mt.multi_tensor_stochastic_round(masters, ours, 3, draws)
    with mt.use_backend("torch"):
        mt.multi_tensor_stochastic_round(masters, theirs, 3, draws)
    assert all(map(torch.equal, ours, theirs))
    grads, whole = draw(SIZES * 70, 5), [weight.float() for weight in ours]
    options = SGD | {"momentum": 0.0}
    mt.multi_tensor_sgd(grads, ours, None, **options, seed=3, draws=draws)
    mt.multi_tensor_sgd(grads, whole, None, **options)
    mt.multi_tensor_stochastic_round(whole, theirs, 3, draws)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("of_values", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [*MAPS, torch.float8_e4m3fn])
def test_codes_have_the_bits_of_plain_torch(way, dtype, of_values, offset):
    sizes = [*CODED_SIZES, *[5] * 250, 9000]  # more rows than arguments hold, and more chunks than one
    values = [drawn(size + offset, dtype, seed)[offset:] for seed, size in enumerate(sizes)]
    values[5][3], values[6][256:], values[7][:256] = math.inf, 0.0, 1e-45
    values = [value.to(of_values) for value in values]
    codes = [[torch.empty_like(value, dtype=dtype) for value in values] for _ in range(2)]
    scales = [[torch.empty(-(-value.numel() // 256)) for value in values] for _ in range(2)]
    numbers = [[torch.empty_like(value) for value in values] for _ in range(2)]
    for backend, *lists in zip(("cpp", "torch"), codes, scales, numbers, strict=True):
        with mt.use_backend(backend):
            mt.multi_tensor_encode(values, *lists[:2])
            mt.multi_tensor_decode(lists[0], lists[2], lists[1])
    for ours, theirs in ([[code.view(torch.uint8) for code in each] for each in codes], scales):
        assert all(map(same_bits, ours, theirs))
    for ours, theirs in zip(*numbers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["auto", "backwards"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", list(OF_KERNEL))
def test_a_step_on_codes_is_decode_step_encode_to_the_bit(way, form, kernel, monkeypatch):
    monkeypatch.setattr(coded_cases, "STATE_SIZES", [3000, 17, 9000])
    for ours, wanted in zip(stepped(form, kernel, True), stepped(form, kernel, False), strict=True):
        assert all(map(same_bits, ours, wanted))
    *_, codes = stepped(form, kernel, True, found_inf=torch.ones(()))
    for i, state in enumerate(states(OF_KERNEL[kernel][-1])):
        if i != 1:  # FP32
            assert all(map(same_bits, codes[2 * i : 2 * i + 2], state))


@pytest.mark.parametrize("offset", [0, 1])
def test_no_warp_waits_for_another_wherever_a_gradient_begins(gpu, offset):
    """As in a DDP bucket behind a tensor of an odd size."""
    grad, param, (codes, scales) = torch.randn(9000), torch.randn(9000), encoded(torch.randn(9000), torch.int8)
    wanted = [each.clone() for each in (param, codes, scales)]
    before = gpu.barriers()
    mt.multi_tensor_sgd([torch.cat([grad[:offset], grad])[offset:]], [param], [codes], scales=[[scales]], **SGD)
    assert gpu.barriers() == before
    with mt.use_backend("torch"):
        mt.multi_tensor_sgd([grad], wanted[:1], wanted[1:2], scales=[wanted[2:]], **SGD)
    assert_rounded_alike([param, scales], [wanted[0], wanted[2]])


def test_a_tensor_in_several_launches_has_its_own_scales(gpu):
    values = [drawn(size, torch.uint8, size) for size in (5000, 20_000)]
    wanted = [encoded(value, torch.uint8) for value in values]
    gpu.most_blocks(3)
    for value, (codes, scales) in zip(values, wanted, strict=True):
        again, its_scales = encoded(value, torch.uint8)
        assert same_bits(again, codes) and same_bits(its_scales, scales)
        assert same_bits(decoded(again, its_scales), decoded(codes, scales))


def test_a_step_on_codes_takes_two_launches(gpu, monkeypatch):
    monkeypatch.setattr(coded_cases, "STATE_SIZES", [3000, 17, 300])
    gpu.fail_at(-1)
    stepped("published", "adam", True)
    encoded_first = 2 * 3 + 1  # the codes of two states of three tensors, and one of them decoded
    assert gpu.seen()[1] == encoded_first + 2


@pytest.mark.parametrize("shapes", [[], [0], [(3, 0), 0]])
def test_nothing_to_do(way, gpu, shapes):
    state, found = State(shapes, torch.bfloat16), torch.zeros(())
    state.gradients(1)
    halves = [torch.empty(p.shape, dtype=torch.int16) for p in state.params]
    mt.multi_tensor_split(state.params, state.low, halves)
    mt.multi_tensor_join(state.low, halves, state.params)
    mt.multi_tensor_stochastic_round(state.params, state.low, 0, [0] * len(shapes))
    state.sgd(**SGD)
    mt.multi_tensor_scale(state.grads, state.params, 2.0, found)
    mt.multi_tensor_adopt(state.low, state.params)
    assert mt.multi_tensor_unscale_l2norm(state.grads, 0.5, found) == 0
    assert gpu.seen() == (0, 0)
    state.adam(**ADAM)  # which counts
    assert [float(step) for step in state.steps] == [1.0] * len(shapes)


def test_a_capture_takes_no_memory_of_the_host_and_refuses_steps_there(gpu):
    state = State([3] * 1000)
    state.gradients(1)
    gpu.capture(True)
    state.adam(**ADAM)
    assert gpu.seen() == (1, 2 * 4)  # the rates; 1,000 rows are four launches, two kernels each
    gpu.steps_on_host(True)
    before = [t.clone() for t in state.everything()]
    with pytest.raises(ValueError, match="steps on the host in a capture"):
        state.adam(**ADAM)
    assert all(map(torch.equal, before, state.everything()))


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("sizes", [[3, 70], [3, 0, 70, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("route", ["arguments", "buffer"])
def test_a_failure_half_way_makes_no_step(gpu, host, sizes, route):
    """No memory for one of the allocations, or a kernel that is not launched."""
    gpu.steps_on_host(host)
    gpu.cuda_metadata(route)
    state = State(sizes, torch.bfloat16)
    state.gradients(1)
    gpu.fail_at(-1)
    other = State(sizes, torch.bfloat16)
    other.gradients(1)
    other.adam(**ADAM)
    events = sum(gpu.seen())
    before = [t.clone() for t in (*state.params, *state.m, *state.v, *state.low)]
    for event in range(events):
        gpu.fail_at(event)
        steps = [step.clone() for step in state.steps]
        with pytest.raises(RuntimeError, match="out of memory, says the test"):
            state.adam(**ADAM)
        assert all(map(torch.equal, before, (*state.params, *state.m, *state.v, *state.low))), event
        if host:
            assert all(map(torch.equal, steps, state.steps)), event
    gpu.fail_at(-1)
    state.adam(**ADAM)
    if host:
        assert_rounded_alike(state.everything(), other.everything())


LAUNCH = re.compile(r"(\w+(?:<[\w:, ]+>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
# (file, what is there, what is put in its place): each must be there.
CHANGES = [
    ("*.cu cuda_launch.h", r"#include <c10/cuda/\w+\.h>", ""),
    ("*.cu", r"c10::DeviceType::CUDA", "c10::DeviceType::CPU"),
    ("*.cu", LAUNCH.pattern, r"host::launch(\2, [&](const auto&... a) { \1(a...); }, "),
    ("*.cu cuda_launch.h", r"\bat::empty\(", "host::empty("),
    ("steps_cuda.cu cuda_launch.h", r"\.pinned_memory\(true\)", ""),
    (
        "cuda_launch.h",
        r"constexpr (int64_t kMaxBlocks = )std::numeric_limits<int32_t>::max\(\)",
        r"const \1host::most_blocks",
    ),
    (
        "step_ops.h",
        r"job\.host_steps = counted_on != job\.device;",
        "job.host_steps = !steps.empty() && host::steps_on_host;",
    ),
]


def build(folder: Path) -> Any:
    """The module, whose functions are those of `amp_patch._C`; on_host.cpp says what else it has."""
    for path in (ROOT / "csrc" / "kernels").iterdir():
        text = path.read_text()
        for files, there, instead in CHANGES:
            if any(path.match(file) for file in files.split()):
                text, count = re.subn(there, instead, text, flags=re.DOTALL)
                assert count, f"{path.name} has no {there}"
        (folder / path.name).write_text(text)
    source = folder / "on_host.cpp"
    source.write_text((TESTS / "cuda" / "on_host.cpp").read_text())
    flags = ["-O1", "-ffp-contract=off", "-std=c++20"]
    return cpp_extension.load("cuda_on_host", [str(source)], extra_cflags=flags, build_directory=str(folder))
