"""Weights of recurrent networks are in one block of memory, which cuDNN needs. On a CPU a stand-in makes the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from torch.nn import functional as F
from training import ADAM, check, iterate

from amp_patch import amp
from amp_patch.casts import install, regions
from amp_patch.casts.state import cast_weight
from amp_patch.policy import resolve

pytestmark = pytest.mark.usefixtures("clean_casts")

LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
NETWORKS: dict[str, Callable[[], nn.RNNBase]] = {
    "RNN": lambda: nn.RNN(3, 4),
    "RNN of relu": lambda: nn.RNN(3, 4, 2, nonlinearity="relu", bias=False),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "LSTM of projections": lambda: nn.LSTM(3, 4, proj_size=2),
    "GRU": lambda: nn.GRU(3, 4, bidirectional=True),
}
MODES = ["RNN_RELU", "RNN_TANH", "LSTM", "GRU"]  # cuDNN's numbers are the indices
every_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
on_every_device = pytest.mark.parametrize("device", DEVICES)


class Blocks:
    """A stand-in for cuDNN on a CPU: it notes the arguments of each call that makes a block."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        patch.setattr(torch, "cudnn_is_acceptable", lambda tensor: True)
        patch.setattr(torch, "_cudnn_rnn_flatten_weight", self.flatten)

    def flatten(self, weights: list[Tensor], *geometry: Any) -> None:
        block = torch.cat([weight.flatten() for weight in weights])
        for weight, part in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
            weight.set_(part.view_as(weight))  # type: ignore[call-overload]
        self.calls.append(geometry)


@pytest.fixture
def on_cudnn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Blocks | None]:
    return lambda device: Blocks(monkeypatch) if device == "cpu" else None


def acting(level: str) -> regions.region:
    install.install()
    return regions.region(replace(resolve(level), cpu_half="native"))


def one_block(weights: list[Tensor]) -> bool:
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def results(network: nn.RNNBase, x: Any) -> list[Any]:
    """Return the output and the gradients of the weights."""
    network.zero_grad()
    output = network(x)[0]
    output = output if isinstance(output, Tensor) else output.data
    output.float().square().sum().backward()
    return [output.detach(), *(weight.grad for weight in network.parameters())]


# torch says so in BF16 on a CPU with arithmetic for it.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@on_every_device
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("packed", [False, True])
@every_network
def test_casts_of_the_weights_are_in_one_block_and_give_the_same_numbers(
    make: Any, packed: bool, level: str, device: str, on_cudnn: Any
) -> None:
    torch.manual_seed(0)
    network, given = make().to(device), torch.randn(4, 4, 3).to(device)
    if packed:
        given = nn.utils.rnn.pack_padded_sequence(given, [4] * 4, batch_first=network.batch_first)
    with acting(level):
        expected = results(network, given) if device == "cpu" else None
    blocks = on_cudnn(device)
    with acting(level):
        found = results(network, given)
        casts = [cast_weight(weight, LEVELS[level]) for weight in network.parameters()]
        assert one_block(casts) and found[0].dtype is LEVELS[level]
        again = results(network, given)
    for one, other in zip(expected or found, found, strict=True):
        check(one, other)
    for one, other in zip(found, again, strict=True):
        check(one, other)
    weights_of_a_layer = len(network._all_weights[0])
    mode, both = MODES.index(network.mode), network.bidirectional
    geometry = (3, mode, 4, network.proj_size, network.num_layers, False, both)
    assert blocks is None or blocks.calls == [(weights_of_a_layer, *geometry)], "the second call uses the same block"


@on_every_device
def test_a_cast_that_a_backward_needs_may_be_moved(device: str, on_cudnn: Any) -> None:
    network, x = nn.GRU(3, 4).to(device), torch.randn(2, 5, 3, device=device, requires_grad=True)
    on_cudnn(device)
    with acting("O4"):
        tied = F.linear(x, network.weight_ih_l0)
        (network(x)[0].float().sum() + tied.float().sum()).backward()
    assert network.weight_ih_l0.grad is not None


@on_every_device
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
@pytest.mark.parametrize("own", ["all", "one", "shared"])
def test_weights_of_the_user_stay_where_they_are(own: str, device: str, on_cudnn: Any) -> None:
    network, x = nn.GRU(4, 4).to(device), torch.randn(2, 5, 4).to(device)
    weights: list[Tensor] = list(network._flat_weights)
    if own == "shared":
        weights[1] = weights[0]
    else:
        count = 1 if own == "one" else 4
        weights[:count] = [weight.detach().bfloat16() for weight in weights[:count]]
    before, blocks = [weight.data_ptr() for weight in weights], on_cudnn(device)
    numbers = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False}
    hidden = torch.zeros(1, 5, 4, device=device)
    with acting("O4"):
        torch.gru(x, hidden, weights, *numbers.values(), False)
        torch.gru(x, hx=hidden, params=list(network._flat_weights), **numbers, batch_first=False)
    assert [weight.data_ptr() for weight in weights] == before
    assert blocks is None or not blocks.calls


@on_every_device
@pytest.mark.parametrize("options", [{}, {"master_weights": "split"}, {"master_weights": False}], ids=str)
def test_bf16_weights_of_a_cast_model_are_in_one_block_and_train_alike(
    options: dict[str, Any], device: str, on_cudnn: Any
) -> None:
    def trained() -> nn.Module:
        torch.manual_seed(0)
        network = nn.LSTM(3, 4, 2).to(device)
        model, optimizer = amp.initialize(
            network, ADAM(network.parameters()), opt_level="O5", cpu_half="native", verbosity=0, **options
        )

        def loss_of(step: int) -> Tensor:
            x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(step)).to(device)
            return model(x)[0].float().square().mean()

        iterate(optimizer, loss_of, range(3))
        return model

    expected = [weight.detach().clone() for weight in trained().parameters()]
    on_cudnn(device)
    weights = list(trained().parameters())
    assert one_block(weights) and {weight.dtype for weight in weights} == {torch.bfloat16}
    for one, other in zip(weights, expected, strict=True):
        check(one.detach(), other)
