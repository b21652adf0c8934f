"""Which products stay 16 bits wide at O6 and O7: the first layer's and the head's, or those that are named."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossed import crossed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch import amp
from amp_patch.model.keep_high import HighModule

LEVELS = ("O6", "O7")


class Products(TorchDispatchMode):
    """Counts low-bit products by the rows of their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.amp_patch.low_bit_product.default:
            self.rows.append(args[1].shape[-2])
        return function(*args, **(kwargs or {}))


def rows_of(model: nn.Module, x: Tensor) -> list[int]:
    with Products() as products:
        model(x)
    return products.rows


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 5)]
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """A language model whose head multiplies by the embedding's weight, in one of the usual forms."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8))
        if head == "module":
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.table.weight
        self.how = head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.table(tokens))
        if self.how == "module":
            return self.head(x)
        return F.linear(x, self.table.weight) if self.how == "linear" else x @ self.table.weight.t()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y @ y.mT @ x


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_layer_and_the_head_stay_high(level):
    model = amp.initialize(mlp(), opt_level=level, verbosity=0)
    assert rows_of(model, X) == [24, 32]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["module", "linear", "matmul"])
def test_a_tied_head_stays_high_and_behind_an_embedding_there_is_no_first_layer(how, level):
    model = amp.initialize(Tied(how), opt_level=level, verbosity=0)
    found = rows_of(model, torch.tensor([[1, 2, 3]]))
    assert found == ([16, 8, 8] if how == "module" else [16, 8])  # without a head of its own the last layer counts too


def test_behind_a_convolution_there_is_no_first_layer():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 16), nn.Linear(16, 24), nn.Linear(24, 5))
    model = amp.initialize(model, opt_level="O6", verbosity=0)
    assert rows_of(model, torch.randn(1, 1, 4, 4)) == [16, 24]


@pytest.mark.parametrize("level", LEVELS)
def test_keep_high_names_others(level):
    for rules, expected in {
        (): [16, 24, 32, 5],
        "2": [16, 32, 5],
        ("0", "6"): [24, 32],
        nn.Linear: [],
        (lambda name, module: name in ("4", "6")): [16, 24],
    }.items():
        model = amp.initialize(mlp(), opt_level=level, keep_high=rules, verbosity=0)
        assert rows_of(model, X) == expected
        amp.restore()


@pytest.mark.parametrize("level", LEVELS)
def test_products_inside_of_a_kept_module_stay_high_too(level):
    model = nn.Sequential(nn.Linear(8, 8), Attention(), Attention(), nn.Linear(8, 8))
    kept = amp.initialize(copy.deepcopy(model), opt_level=level, keep_high="1", verbosity=0)
    assert len(rows_of(kept, X)) == 1 + 3 + 1
    assert len(rows_of(amp.initialize(model, opt_level=level, keep_high=(), verbosity=0), X)) == 1 + 6 + 1


def test_a_kept_weight_that_an_attention_reads_without_its_module():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), X[None]
    model = amp.initialize(attention, opt_level="O6", keep_high="out_proj", verbosity=0)
    with Products() as products:
        model(x, x, x, need_weights=False)
    assert products.rows == [24]


@pytest.mark.parametrize("level", LEVELS)
def test_copies_keep_high_and_restore_takes_everything_away(level):
    model = mlp()
    before = [type(module) for module in model.modules()], model(X)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, _ = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert isinstance(model[0], HighModule) and not isinstance(model[2], HighModule)
    for copied in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert rows_of(copied, X) == [24, 32] and torch.equal(copied(X), model(X))
    amp.restore()
    assert [type(module) for module in model.modules()] == before[0] and torch.equal(model(X), before[1])
    assert not any(vars(param) for param in model.parameters())


def reloaded(model: nn.Module, optimizer: Any, assign: bool = False) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=assign)
    return model


def swapped(model: nn.Module, optimizer: Any) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return reloaded(model, optimizer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def functional(model: nn.Module, optimizer: Any) -> Any:
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, values, (x,))


SURVIVED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
    "deepcopy of the pair": lambda model, optimizer: copy.deepcopy((model, optimizer))[0],
    "pickle": lambda model, optimizer: pickle.loads(pickle.dumps(model)),
    "swap": swapped,
    "functional_call": functional,
    "assign": lambda model, optimizer: reloaded(model, optimizer, assign=True),
}
TOKENS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("way", "level"),  # weights with masters are neither assigned nor swapped
    [(way, level) for way in SURVIVED for level in LEVELS if level != "O7" or way not in ("assign", "swap")],
)
@pytest.mark.parametrize("how", ["linear", "matmul"])
def test_a_tied_head_stays_high_when_its_weight_becomes_another_tensor(how, way, level):
    model = Tied(how)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    assert rows_of(SURVIVED[way](model, optimizer), TOKENS) == [16, 8]


@crossed({"how": ["module", "linear", "matmul"], "level": LEVELS}, meet=1)
def test_compiled_models_and_their_compiled_copies_keep_a_tied_head(how, level):
    torch._dynamo.reset()
    model = amp.initialize(Tied(how), opt_level=level, verbosity=0)
    copied = copy.deepcopy(model)
    for each in model, copied:
        found = torch.compile(each, backend="aot_eager", fullgraph=True)(TOKENS)
        assert torch.equal(found, model(TOKENS))


def test_another_training_forgets_what_the_first_one_kept():
    model = amp.initialize(mlp(), opt_level="O6", keep_high="4", verbosity=0)
    model = amp.initialize(model, opt_level="O6", keep_high=(), verbosity=0)
    assert rows_of(model, X) == [16, 24, 32, 5]
    model = amp.initialize(model, opt_level="O4", verbosity=0)
    assert not rows_of(model, X) and not any(isinstance(module, HighModule) for module in model.modules())


def test_kept_fp32_modules_are_not_multiplied_low_and_stay_fp32():
    model = amp.initialize(mlp(), opt_level="O7", keep_fp32="2", keep_high=["2", "4"], verbosity=0)
    assert rows_of(model, X) == [16, 5] and model[2].weight.dtype is torch.float32


def test_mistakes_are_named_before_anything_changes():
    model = mlp()
    with pytest.raises(ValueError, match=r"^initialize: keep_high names 'nothing', which matches no module"):
        amp.initialize(model, opt_level="O6", keep_high="nothing", verbosity=0)
    with pytest.raises(TypeError, match=r"^initialize: keep_high holds 3; wanted module names"):
        amp.initialize(model, opt_level="O6", keep_high=[3], verbosity=0)  # type: ignore[list-item]
    assert type(model) is nn.Sequential
