"""Errors of torch about types, in models that are cast: each names what is to be changed, the input or the model."""

from __future__ import annotations

import re

import pytest
import torch
from crossed import crossed
from torch import nn

from amp_patch import amp
from amp_patch.model.type_errors import is_about_types

CAST = ["O2", "O3", "O5", "O7"]
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
MEANT = re.escape("the cause is the input, not the opt level")


class Net(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.char = layer  # a name that is the name of a type, too

    def forward(self, x):
        return self.char(x)

    def encode(self, x):
        return self.char(x)

    def drive(self, x):
        return self(x)


class Mixing(Net):
    def forward(self, x):
        return self.char(torch.ones(2, 8))


LAYERS = {
    "Linear": (lambda: nn.Linear(8, 2), (2, 8)),
    "Linear, no bias": (lambda: nn.Linear(8, 2, bias=False), (2, 8)),
    "Conv2d": (lambda: nn.Conv2d(1, 1, 1), (2, 1, 4, 4)),
    "MultiheadAttention": (lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), (2, 3, 8)),
}


def error_of(function, *args) -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        function(*args)
    return caught.value


@crossed({"level": CAST, "layer": list(LAYERS), "dtype": INTEGERS})
def test_integers_given_to_a_layer_of_floats_are_named_and_not_the_level(level, layer, dtype):
    make, shape = LAYERS[layer]
    model, inputs = Net(make()), torch.ones(shape, dtype=dtype)
    error_of(model, inputs)  # without amp_patch it fails, too
    amp.initialize(model, opt_level=level, verbosity=0)
    for call in (model, model.encode, model.drive):
        error = error_of(call, inputs)
        pattern = rf"^{re.escape(str(error.__cause__))}\nIn (module 'char.*' of )?Net.* integers meet floats, .*{MEANT}"
        assert re.search(pattern, str(error)) and re.search(r"Pass x\.float\(\) for numbers", str(error))
        assert str(error).count("\n") == 1 and not re.search(r"mixes types|methods=|keep_fp32", str(error))
    model(inputs.float())


@pytest.mark.parametrize("level", CAST)
def test_floats_given_where_indices_belong_are_named_and_not_the_level(level):
    model = amp.initialize(Net(nn.Embedding(4, 2)), opt_level=level, verbosity=0)
    assert re.search(rf"In module 'char' of Net .*{MEANT}.* int64 for indices$", str(error_of(model, torch.ones(2))))
    model(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("level", CAST)
def test_a_module_with_the_name_of_an_integer_type_is_still_told_of_mixed_floats(level):
    model = amp.initialize(Mixing(nn.Linear(8, 2)), opt_level=level, verbosity=0)
    error = error_of(model, torch.ones(2, 8))
    words = str(error)
    assert is_about_types(error)
    assert re.search(r"The forward of module 'char' of Mixing \(.*\) mixes types: .*keep_fp32", words)
    assert not re.search(MEANT, words)


@pytest.mark.parametrize("level", CAST)
def test_a_method_called_outside_of_forward_still_names_methods(level):
    model = amp.initialize(Net(nn.Linear(8, 2)), opt_level=level, verbosity=0)
    words = str(error_of(model.encode, torch.ones(2, 8)))
    assert re.search(r"Net\.encode\(\) was called directly, .*methods=\('encode',\)\)$", words)
