"""torch's errors about types, in a forward or the body of scale_loss: the line, the level and the way out are added."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from crossed import crossed
from torch import Tensor, nn
from torch.nn import functional

from amp_patch import amp
from amp_patch.casts import install

INDEX = torch.zeros(4, 4, dtype=torch.int64)
OVERFLOWS: dict[str, Callable[[Tensor], Any]] = {
    "masked_fill": lambda x: x.masked_fill(x > 0, -1e9),
    "full_like": lambda x: torch.full_like(x, 1e9),
    "fill_": lambda x: x.clone().fill_(-1e9),
}
PARTNERS: dict[str, Callable[[Tensor], Any]] = {
    "scatter_add": lambda x: x.scatter_add(0, INDEX, torch.ones(4, 4)),
    "scatter_reduce": lambda x: x.scatter_reduce(0, INDEX, torch.ones(4, 4), "sum"),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.ones(4)),
    "lerp": lambda x: torch.lerp(x, torch.ones(4, 4), 0.5),
    "prelu": lambda x: functional.prelu(x, torch.ones(1)),
    "embedding_bag": lambda x: functional.embedding_bag(INDEX, x, per_sample_weights=torch.ones(4, 4), mode="sum"),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1, 4, 4), x[None], x[None]),
}
MISSING: dict[str, Callable[[Tensor], Any]] = {
    "ctc_loss": lambda x: functional.ctc_loss(x[:, None], INDEX[:1, :1] + 1, torch.tensor([4]), torch.tensor([1])),
    "solve": lambda x: torch.linalg.solve(x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "inv": lambda x: torch.linalg.inv(x),
    "pinv": lambda x: torch.linalg.pinv(x),
    "svd": lambda x: torch.linalg.svd(x),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "fft": lambda x: torch.fft.fft(x),
    "stft": lambda x: torch.stft(x.flatten(), 4, window=torch.ones(4, dtype=x.dtype), return_complex=True),
}


class Inner(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        self.call(hidden)
        return hidden


def trained(call: Callable[[Tensor], Any], level: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(Inner(call))
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)


def words_of(call: Callable[[Tensor], Any], level: str) -> str:
    model, _ = trained(call, level)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, 4))
    words, cause = str(caught.value), caught.value.__cause__
    assert str(cause) in words and isinstance(
        caught.value, RuntimeError if isinstance(cause, KeyError) else type(cause)
    )
    assert (
        f"The forward of module '0' of Sequential (test_type_errors.py, line {call.__code__.co_firstlineno})" in words
    )
    return words


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_number_beyond_the_range_of_fp16_is_explained(name: str, level: str) -> None:
    words = words_of(OVERFLOWS[name], level)
    assert f"{level} makes tensors torch.float16" in words and "torch.finfo(x.dtype).min" in words


@pytest.mark.parametrize("way", ["around the call", "in place of forward, as Accelerate does"])
@pytest.mark.parametrize(
    ("level", "low", "other"), [("O2", torch.float16, torch.bfloat16), ("O5", torch.bfloat16, torch.float16)]
)
def test_an_autocast_around_a_cast_model_is_named_and_no_tensor_of_forward(level, low, other, way) -> None:
    def put(x: Tensor) -> None:
        torch.zeros(4, 4, dtype=low)[torch.arange(4)] = x @ x

    model, _ = trained(put, level)
    autocast = torch.autocast("cpu", other)
    if way != "around the call":
        model.forward = autocast(model.forward)
    with (
        autocast if way == "around the call" else nullcontext(),
        pytest.raises(RuntimeError, match=r"torch.autocast around it casts to types of its own") as caught,
    ):
        model(torch.randn(4, 4))
    assert "forward makes" not in str(caught.value)
    amp.restore()
    model, _ = trained(put, level)
    assert model(torch.randn(4, 4)).dtype is torch.float32, "without it nothing mixes"


@pytest.mark.parametrize(("level", "low"), [("O2", "float16"), ("O5", "bfloat16")])
@pytest.mark.parametrize("name", PARTNERS)
def test_fp32_partner_in_a_cast_model_is_explained(name: str, level: str, low: str) -> None:
    words = words_of(PARTNERS[name], level)
    assert f"mixes types: initialize() cast the model to torch.{low}" in words and "other.to(x.dtype)" in words


@crossed({"name": list(MISSING), "level, low": [("O2", "float16"), ("O5", "bfloat16")]}, meet=1)
def test_function_without_a_low_precision_kernel_is_explained(name: str, level: str, low: str) -> None:
    words = words_of(MISSING[name], level)
    assert f"torch does not have for torch.{low}, the type of {level}" in words
    assert "x.float()" in words and "keep_fp32=[...]" in words


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.complex(x, x) @ torch.complex(x, x),
        lambda x: torch.complex(x, x).exp(),
        lambda x: torch.polar(x.abs(), x),
        lambda x: torch.einsum("ij,jk->ik", *[torch.complex(x, x)] * 2),
    ],
)
def test_complex_numbers_of_half_the_precision_are_explained(call: Callable[[Tensor], Any], level: str) -> None:
    words = words_of(call, level)
    assert f", the type of {level}: give it " in words and "keep_fp32=[...]" in words
    assert ("z.to(torch.complex64)" in words) is ("ComplexHalf" in words), "x.float() would drop the imaginary part"


def test_a_view_as_complex_of_bf16_is_no_mixture_of_types() -> None:
    words = words_of(lambda x: torch.view_as_complex(x.reshape(4, 2, 2)), "O5")
    assert "does not have for torch.bfloat16" in words and "mixes types" not in words


def test_cdist_of_bf16_is_explained() -> None:
    assert "torch does not have for torch.bfloat16" in words_of(lambda x: torch.cdist(x, x), "O5")


@pytest.mark.parametrize(
    ("level", "way"), [("O1", "`with amp.disable_casts"), ("O2", "keep_fp32=["), ("O3", "keep_fp32=[")]
)
def test_function_with_a_table_of_types_is_explained(level: str, way: str) -> None:
    words = words_of(lambda x: torch.lobpcg(x @ x.T + 4 * torch.eye(4, dtype=x.dtype), k=1), level)
    assert "torch does not have for torch.float16" in words and "x.float()" in words and way in words


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_batch_norm_under_vmap_is_explained_with_a_way_out_that_works(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_registered", {})  # what the way out registers would hold for later tests
    casts_model = level in ("O2", "O5")

    def calls(**options: Any) -> Callable[[], Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        # Where batch norms in the low type are computed with FP32 parameters, they run under vmap.
        model = amp.initialize(model, opt_level=level, cpu_half="native", **options)
        return lambda: torch.vmap(model)(torch.ones(2, 3, 4))

    way = "keep_batchnorm_fp32=False" if casts_model else r"amp.register_float_function\(.*'batch_norm'\)"
    with pytest.raises(RuntimeError, match=f"module '1' .* batch norm under torch.vmap, .*{way}"):
        calls()()
    amp.restore()
    if not casts_model:
        amp.register_float_function(functional, "batch_norm")
    calls(**({"keep_batchnorm_fp32": False} if casts_model else {}))()


@pytest.mark.parametrize(("level", "low"), [("O1", "float16"), ("O4", "bfloat16")])
def test_function_that_the_lists_do_not_know_is_explained(level: str, low: str) -> None:
    words = words_of(lambda x: torch.ops.aten.mm(x, torch.ones(4, 4)), level)
    assert f"mixes types: {level} makes tensors torch.{low}" in words and "amp.register_float_function" in words


def test_function_that_a_local_variable_holds_since_before_initialize_is_explained() -> None:
    product = functional.linear
    model, optimizer = trained(lambda x: x, "O1")
    outputs = model(torch.randn(4, 4))
    advice = pytest.raises(RuntimeError, match=r"a local variable .* assign it after initialize")
    with advice, amp.scale_loss(outputs.float().sum(), optimizer):
        product(outputs, torch.ones(4, 4))


@crossed({"name": [*PARTNERS, *MISSING], "level": ["O1", "O4"]}, meet=1)
def test_o1_and_o4_cast_what_cast_models_explain(name: str, level: str) -> None:
    call = {**PARTNERS, **MISSING}[name]
    model, _ = trained(lambda x: call(x @ x.T + 4 * torch.eye(4)), level)
    model(torch.randn(4, 4))


def test_error_in_the_body_of_scale_loss_is_explained() -> None:
    model, optimizer = trained(lambda x: None, "O1")
    output = model(torch.randn(4, 4))
    where = r"The body of scale_loss \(test_type_errors.py, line \d+\) fills a tensor"
    with pytest.raises(RuntimeError, match=where), amp.scale_loss(output.float().sum(), optimizer):
        output.masked_fill(output > 0, -1e9)
    with amp.scale_loss(output.float().sum(), optimizer) as scaled:
        scaled.backward()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_part_of_a_model_called_in_the_body_is_named_with_the_way_out(level: str) -> None:
    model, optimizer = trained(lambda x: None, level)
    way_out = "call the model, or move the call into a method and name it"
    with pytest.raises(RuntimeError, match=way_out), amp.scale_loss(model(torch.randn(4, 4)).sum(), optimizer):
        model[0].layer(torch.randn(4, 4))


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_other_errors_are_raised_as_they_are(level: str, kind: type[Exception]) -> None:
    error = kind("planted")

    def fails(_: Tensor) -> None:
        raise error

    model, optimizer = trained(fails, level)
    with pytest.raises(kind) as caught:
        model(torch.randn(4, 4))
    assert caught.value is error
    with pytest.raises(kind) as caught, amp.scale_loss(torch.ones(()), optimizer):
        raise error
    assert caught.value is error


# ---------------------------------------------------------------------------------------------------------------------
# Integers

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
