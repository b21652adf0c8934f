"""The table of options and surroundings (supported.py): each yes trains, each no is refused with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_trainings import both_alike
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import backward, same

from amp_patch import amp
from amp_patch.support import device_sync
from amp_patch.supported import OPTIONS, SUPPORTED, SURROUNDINGS, reason

ROOT = Path(__file__).resolve().parents[2]
OF_OPTION: dict[str, dict[str, Any]] = {
    "split": {"opt_level": "O5", "master_weights": "split"},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "8bit": {"opt_level": "O5", "optimizer_state": "8bit"},
    "act8": {"opt_level": "O5", "saved_activations": "8bit"},
    "offload": {"opt_level": "O5", "master_device": "cpu"},
    "gradient_release": {"opt_level": "O5", "gradient_release": True},
    "formats": {"opt_level": "O7"},
}
YES = [cell for cell, why in SUPPORTED.items() if why is None]
NO = [cell for cell, why in SUPPORTED.items() if why is not None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 16), nn.Linear(16, 4))


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def loss_of(model: Any, step: int) -> Tensor:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return (model(inputs).float() - inputs[:, :4].sin()).square().mean()


def train(option: str, make: Callable[[Any], Any] = sgd, wrap: Callable[[Any], Any] = lambda model: model) -> Any:
    """The weights after two plain iterations."""
    model = net()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks do not draw from it
    model, optimizer = amp.initialize(model, make(model.parameters()), **OF_OPTION[option], verbosity=0)
    wrapped = wrap(model)
    for step in range(2):
        optimizer.zero_grad()
        backward(loss_of(wrapped, step), optimizer)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    found = [p.detach().clone() for p in model.parameters()]
    amp.restore()
    return found


def with_a_closure(option: str) -> list[Tensor]:
    model = net()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), **OF_OPTION[option], verbosity=0)
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            backward(loss, optimizer)
            return loss

        optimizer.step(closure)
    return weights(model)


def with_several_optimizers(option: str) -> list[Tensor]:
    model = net()
    both = [sgd(model[:1].parameters()), sgd(model[1:].parameters())]
    model, both = amp.initialize(model, both, **OF_OPTION[option], verbosity=0)
    for step in range(2):
        for optimizer in both:
            optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, step), both) as scaled:
            scaled.backward()
        for optimizer in both:
            optimizer.step()
    return weights(model)


class Around:
    """A wrapper that does nothing more."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Registered(torch.optim.SGD):
    pass


def with_cuda_graphs(option: str) -> list[Tensor]:
    """A second step that believes to be captured: it asks nothing of the host."""
    with pytest.MonkeyPatch.context() as patch:
        model = net()
        model, optimizer = amp.initialize(model, sgd(model.parameters()), **OF_OPTION[option], verbosity=0)
        for step in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, step), optimizer)
            if step:
                patch.setattr(device_sync, "is_capturing", lambda: True)
            optimizer.step()
        patch.undo()
        return weights(model)


def zero_of(params: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05, momentum=0.9)


def registered(option: str) -> list[Tensor]:
    amp.register_per_parameter_optimizer(Registered)
    return train(option, lambda params: Registered(params, lr=0.05, momentum=0.9))


WAYS: dict[str, Callable[[str], list[Tensor]]] = {
    "a closure": with_a_closure,
    "ZeRO": lambda option: train(option, zero_of, DistributedDataParallel),
    "DDP": lambda option: train(option, wrap=DistributedDataParallel),
    "several optimizers": with_several_optimizers,
    "wrappers": lambda option: train(option, lambda params: Around(sgd(params))),
    "CUDA graphs": with_cuda_graphs,
    "registered classes": registered,
}


def in_a_rank(option: str, surrounding: str) -> list[Tensor]:
    return WAYS[surrounding](option)


@pytest.mark.parametrize(("option", "surrounding"), YES)
def test_what_goes_together_trains_as_the_option_does_alone(option, surrounding, request, registrations):
    if surrounding in ("DDP", "ZeRO"):
        found = both_alike(request.getfixturevalue("ranks")(in_a_rank, option, surrounding))
    else:
        found = WAYS[surrounding](option)
    wanted, start = train(option), [p.detach() for p in net().parameters()]
    assert same(found, wanted)
    assert not any(map(torch.equal, start, [p.float() for p in wanted]))


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


def refused_in_a_rank(option: str, surrounding: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as refused:
        if surrounding == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            model = net()
            fully_shard(model, mp_policy=amp.fsdp_policy("O5"))
            amp.initialize(model, sgd(model.parameters()), **OF_OPTION[option], verbosity=0)
        else:
            WAYS[surrounding](option)
    amp.restore()
    return str(refused.value)


@pytest.mark.parametrize(("option", "surrounding"), NO)
def test_what_does_not_go_together_is_refused_with_its_reason(option, surrounding, request):
    if surrounding in ("DDP", "ZeRO", "FSDP2"):
        messages = request.getfixturevalue("ranks")(refused_in_a_rank, option, surrounding)
    else:
        with pytest.raises((ValueError, RuntimeError)) as refused:
            in_a_capture(option) if surrounding == "CUDA graphs" else WAYS[surrounding](option)
        messages = [str(refused.value)]
    assert all(reason(option, surrounding) in message for message in messages)


def in_a_capture(option: str) -> None:
    """A second iteration, of which backward or step believes to be captured; it changes no weight."""
    model = net()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), **OF_OPTION[option], verbosity=0)
    backward(loss_of(model, 0), optimizer)
    optimizer.step()
    loss, before = loss_of(model, 1), [p.detach().clone() for p in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        try:
            with amp.scale_loss(loss, optimizer) as scaled:
                if option == "gradient_release":
                    patch.setattr(device_sync, "is_capturing", lambda: True)
                scaled.backward()
            patch.setattr(device_sync, "is_capturing", lambda: True)
            optimizer.step()
        finally:
            patch.undo()
            assert same(model.parameters(), before)


def test_a_reason_is_asked_for_of_what_is_refused_alone():
    with pytest.raises(KeyError, match="'split' goes with 'DDP'"):
        reason("split", "DDP")


# ----------------------------------------------------------------------------------------------------------------------
# The page


def page() -> str:
    head = "| | " + " | ".join(SURROUNDINGS) + " |\n|---" + "|---" * len(SURROUNDINGS) + "|\n"
    rows = [
        f"| {name} | " + " | ".join("no" if SUPPORTED[option, each] else "yes" for each in SURROUNDINGS) + " |\n"
        for option, name in OPTIONS.items()
    ]
    whys: dict[str, list[str]] = {}
    for (option, surrounding), why in SUPPORTED.items():
        if why is not None:
            whys.setdefault(f"{OPTIONS[option]}, %s: {why}.", []).append(surrounding)
    return head + "".join(rows) + "\n" + "".join(f"- {why % ', '.join(of)}\n" for why, of in whys.items())


def test_the_page_of_limits_has_the_table():
    text = re.search(r"## Options and what is around them\n\n.*?\n\n(\|.*?)\n\n## ", LIMITS.read_text(), re.DOTALL)
    assert text is not None and text[1] + "\n" == page()


LIMITS = ROOT / "docs" / "limits.md"
