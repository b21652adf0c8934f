"""`torch.__future__.set_swap_module_params_on_conversion(True)`: parameters get their new contents by a swap."""

from __future__ import annotations

import pytest
import torch
import training
from training import ADAM, convnet

from amp_patch import amp

KINDS = {level: {"opt_level": level} for level in ("O2", "O5")} | {
    form: {"opt_level": "O5", "master_weights": form} for form in ("split", "stochastic")
}
CHANGES = {
    "to": lambda model: model.to("cpu", memory_format=torch.channels_last),
    "to, a part": lambda model: model.body.to("cpu", memory_format=torch.channels_last),
    "load": lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
}


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_refuses_to_swap_weights_with_masters_and_the_training_goes_on(kind, change, swapping):
    model = convnet()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), **KINDS[kind])
    alone = convnet()
    alone, its = amp.initialize(alone, ADAM(alone.parameters()), **KINDS[kind])
    for each in ((model, optimizer), (alone, its)):
        training.train(*each, 2)
    with pytest.raises(RuntimeError, match="swap"):
        CHANGES[change](model)
    for each in ((model, optimizer), (alone, its)):
        training.train(*each, range(2, 4))
    assert training.same(training.weights(model), training.weights(alone))
    amp.restore()
    CHANGES["to"](model)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_weights_without_masters_are_swapped(level, swapping):
    model = convnet()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level)
    for change in CHANGES.values():
        change(model)
        training.train(model, optimizer, 1)
