"""What a step saves for its backward is counted to the byte, and counting it changes nothing of the step."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from training import SGD, backward

from amp_patch import amp
from amp_patch.diagnose.recording.activations import SavedBytes
from amp_patch.diagnose.recording.recorder import Enough, Recorder
from amp_patch.diagnose.recording.run import Run

torch_hooks = torch._C._autograd
if not hasattr(torch_hooks, "_top_saved_tensors_default_hooks"):
    pytestmark = pytest.mark.skip(reason="this torch does not tell whose saved-tensor hooks are there")

WIDTH, BATCH, BLOCKS = 16, 8, 3
NUMBERS = WIDTH * BATCH  # in one activation
WEIGHT = WIDTH * WIDTH


@pytest.fixture(autouse=True)
def nothing_left():
    functions = dict(vars(torch_hooks))
    yield
    assert vars(torch_hooks) == functions and torch_hooks._top_saved_tensors_default_hooks(True) is None


class Stack(nn.Module):
    """Linear layers, each with a function whose output is its own and the next layer's saved tensor."""

    def __init__(self, checkpointed=None, **options):
        super().__init__()
        layers = [[nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU()] for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in layers)
        self.checkpointed, self.options = checkpointed, options

    def forward(self, hidden):
        for block in self.blocks:
            if self.checkpointed is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointed, **self.options)
        return hidden


def squares(model, inputs):
    return model(inputs).float().square().mean()


def train_recorded(model, level="O0", loss_fn=squares, steps=4, record=True, device="cpu", **options):
    """The run, and the weights after it."""
    torch.manual_seed(0)
    model = model.to(device)
    with amp.record(activations=record) as run:
        model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            backward(loss_fn(model, torch.randn(BATCH, WIDTH, device=device)), optimizer)
            optimizer.step()
    return run, [param.detach().clone() for param in model.parameters()]


def made(**options):
    torch.manual_seed(0)
    return Stack(**options)


# Of the FP32 stack: six outputs; the batch was there before. In half precision: the batch's cast and six outputs, and
# of the last of them an FP32 copy, the squares' own; of O2 the loss scale, too. O4 has casts of the weights besides, of
# all but the first, whose input needs no gradient.
HAND = {
    "O0": 4 * 6 * NUMBERS,
    "O2": 2 * 7 * NUMBERS + 4 * NUMBERS + 4,
    "O4": 2 * 7 * NUMBERS + 4 * NUMBERS + 5 * 2 * WEIGHT,
    "O5": 2 * 7 * NUMBERS + 4 * NUMBERS,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("level", "options"), [*((level, {}) for level in HAND), ("O2", {"cpu_half": "emulate"})], ids=str
)
def test_the_bytes_equal_a_hand_count(level, options, device):
    options = {"loss_scale": 8.0, **options} if level == "O2" else {}
    run, weights = train_recorded(made(), level, device=device, **options)
    without, same = train_recorded(made(), level, device=device, record=False, **options)
    assert run.activations == HAND[level] and without.activations is None
    assert [seconds != seconds for seconds in run.seconds] == [False, False, True, False], "only the third was watched"
    assert run.loss == without.loss and all(map(torch.equal, weights, same))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_recomputed_by_a_checkpoint_count(reentrant):
    def from_a_clone(model, inputs):  # a reentrant checkpoint wants an input that requires a gradient
        return squares(model, inputs.clone().requires_grad_())

    whole, weights = train_recorded(made(), loss_fn=from_a_clone)
    run, same = train_recorded(made(checkpointed=reentrant), loss_fn=from_a_clone)
    assert whole.activations == HAND["O0"]
    # After the forward the inputs of two blocks and the squares', whose backward frees it; then the third block
    # computes its two again.
    assert run.activations == 4 * 4 * NUMBERS
    assert run.loss == whole.loss and all(map(torch.equal, weights, same))


def test_a_compiled_model_tells_what_its_graph_saves(fresh_compiler):
    model = made()
    backend = CompileCounterWithBackend("aot_eager")
    run, _ = train_recorded(torch.compile(model, backend=backend))
    assert run.activations == HAND["O0"]
    assert backend.frame_count == 1, "it was not compiled again for the count"


def test_tensors_saved_by_a_script_s_hooks_count():
    seen = []

    def offloaded(model, inputs):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t.clone())[1], lambda t: t):
            return squares(model, inputs)

    run, weights = train_recorded(made(), loss_fn=offloaded)
    _, same = train_recorded(made(), record=False)
    assert all(map(torch.equal, weights, same))
    assert len(seen) % 4 == 0, "its hooks are called in each step alike"
    # What each layer saves is a copy of its own here, the weights (of all layers but the first) too.
    assert run.activations == 4 * (6 + 6 + 1) * NUMBERS + 4 * 5 * WEIGHT


def test_hooks_around_the_loop_are_left_alone():
    calls = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append(1), t.detach())[1], lambda t: t):
        run, _ = train_recorded(made())
    assert run.activations is None and len(calls) % 4 == 0


@pytest.mark.parametrize(("steps", "counted"), [(1, False), (2, True), (3, True)])
def test_a_recording_of_few_steps_counts_the_last(steps, counted):
    with pytest.raises(Enough), Recorder([run := Run("")], stop_after=steps):
        train_recorded(made(), record=False)
    assert run.activations == (HAND["O0"] if counted else None)
    assert run.steps == steps


def test_memory_counts_once_and_while_it_lives():
    seen = SavedBytes()
    rest = torch.ones(4)
    weight = nn.Parameter(torch.ones(100, 100))
    seen.leave_out([rest])
    assert seen.peak is None, "nothing was saved: perhaps a graph was replayed"
    large = torch.ones(1024)
    for saved in (large, large[3:], large.view(32, 32), weight, weight.t(), rest.view(2, 2)):
        seen.count(saved)
    assert seen.peak == 4096
    del large, saved
    seen.count(small := torch.ones(512))
    assert seen.peak == 4096
    seen.count(other := torch.ones(1024))
    assert seen.peak == 2048 + 4096
    seen.count(sparse := torch.eye(8).to_sparse())
    assert seen.peak == 2048 + 4096 + 8 * 4 + 2 * 8 * 8
    del small, other, sparse
    seen.count(torch.ones(1).to_mkldnn())
    assert seen.peak is None
