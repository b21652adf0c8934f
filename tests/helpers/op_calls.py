"""A call of each function that the op lists name: its arguments, and the types of its result, in Apex too."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_patch.casts import install, regions
from amp_patch.casts.oplists import LATE
from amp_patch.policy import Policy

Make = Callable[..., Tensor]  # shape -> the next floating tensor of the call
Sample = Callable[[Make], tuple[Any, ...]]

# Names of the lists ("owner.name") that some torch since 2.6 lacks.
OPTIONAL: frozenset[str] = frozenset(
    {
        "torch.Tensor.__rdiv__",  # an operator of Python 2, which newer versions of torch have removed
        "torch._grouped_mm",
        "torch.linalg.matrix_sqrth",
        "torch.linalg.polar",
        "torch.linalg.solve_ex",
        "torch.nn.attention.flex_attention._validate_sdpa_input",
        "torch.nn.attention.flex_attention.flex_attention_hop",
        "torch.nn.functional.linear_cross_entropy",
        "torch.ops.torch_attn._varlen_attn",
        "torch.ops.torch_attn._varlen_attn_out",
        "torch.pairwise_distance",
    }
)


def resolve(address: str) -> Any:
    with suppress(ImportError):  # varlen is younger than torch 2.6
        importlib.import_module(LATE.get(address, "torch"))
    owner: Any = importlib.import_module("torch")
    for part in address.split(".")[1:]:
        owner = getattr(owner, part)
    return owner


def index(*values: int) -> Tensor:
    return torch.tensor(values or (0, 1))


def mask() -> Tensor:
    return torch.tensor([True, False, True])


def cell(gates: int, state: Callable[[Make], Any]) -> Sample:
    return lambda t: (t(2, 3), state(t), t(gates * 3, 3), t(gates * 3, 3), t(gates * 3), t(gates * 3))


def network(gates: int, state: Callable[[Make], Any]) -> Sample:
    def sample(t: Make) -> tuple[Any, ...]:
        weights = [t(gates * 3, 3), t(gates * 3, 3), t(gates * 3), t(gates * 3)]
        return t(4, 2, 3), state(t), weights, True, 1, 0.0, False, False, False

    return sample


def convolution(dims: int) -> Sample:
    return lambda t: (t(1, 2, *(5,) * dims), t(2, 2, *(3,) * dims), t(2))


def two(t: Make) -> tuple[Any, ...]:
    return t(3, 3), t(3, 3)


def vectors(t: Make) -> tuple[Any, ...]:
    return t(3), t(3)


def along(dim: int) -> Sample:
    return lambda t: (t(3, 3), dim)


def labelled(t: Make) -> tuple[Any, ...]:
    return t(3, 3), index(0, 1, 2)


# Arguments by the name of the function, or by its address where one name means several signatures. A dict at the end
# holds keyword arguments. Other functions are called with one square matrix.
SAMPLES: dict[str, Sample] = {
    # GEMMs
    "addbmm": lambda t: (t(3, 3), t(2, 3, 3), t(2, 3, 3)),
    "addmm": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "addmv": lambda t: (t(3), t(3, 3), t(3)),
    "addr": lambda t: (t(3, 3), t(3), t(3)),
    "baddbmm": lambda t: (t(2, 3, 3), t(2, 3, 3), t(2, 3, 3)),
    "bmm": lambda t: (t(2, 3, 3), t(2, 3, 3)),
    **dict.fromkeys(("matmul", "mm", "__matmul__", "__rmatmul__", "vecdot"), two),
    "mv": lambda t: (t(3, 3), t(3)),
    "chain_matmul": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "multi_dot": lambda t: ([t(3, 3), t(3, 3), t(3, 3)],),
    "einsum": lambda t: ("ij,jk->ik", t(3, 3), t(3, 3)),
    "linear": lambda t: (t(2, 3), t(4, 3), t(4)),
    "prelu": lambda t: (t(3, 3), t(1)),
    "scaled_dot_product_attention": lambda t: (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4), t(3, 3)),
    "_grouped_mm": lambda t: (t(4, 8), t(2, 8, 16), {"offs": torch.tensor([2, 4], dtype=torch.int32)}),
    # convolutions
    **{f"conv{'_transpose' * back}{dims}d": convolution(dims) for dims in (1, 2, 3) for back in (0, 1)},
    "conv_tbc": lambda t: (t(5, 1, 2), t(3, 2, 2), t(2)),
    "convolution": lambda t: (*convolution(2)(t), (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
    "_convolution": lambda t: (*convolution(2)(t), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, False, True, True),
    # recurrent
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell"), cell(1, lambda t: t(2, 3))),
    "gru_cell": cell(3, lambda t: t(2, 3)),
    "lstm_cell": cell(4, lambda t: (t(2, 3), t(2, 3))),
    **dict.fromkeys(("rnn_tanh", "rnn_relu"), network(1, lambda t: t(1, 2, 3))),
    "gru": network(3, lambda t: t(1, 2, 3)),
    "lstm": network(4, lambda t: (t(1, 2, 3), t(1, 2, 3))),
    # exp, log, pow
    **dict.fromkeys(("pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__"), lambda t: (t(3, 3), 2.0)),
    **dict.fromkeys(("logcumsumexp", "logsumexp", "cumprod", "cumsum", "softmax", "log_softmax", "softmin"), along(0)),
    "gumbel_softmax": lambda t: (t(3, 3),),
    # reductions and norms
    **dict.fromkeys(("dist", "cdist", "cosine_similarity", "pairwise_distance"), two),
    "renorm": lambda t: (t(3, 3), 2, 0, 1.0),
    "frobenius_norm": lambda t: (t(3, 3), (0, 1)),
    "native_layer_norm": lambda t: (t(3, 3), (3,), None, None, 1e-5),
    "layer_norm": lambda t: (t(3, 3), (3,)),
    "rms_norm": lambda t: (t(3, 3), (3,)),
    "group_norm": lambda t: (t(3, 4), 2),
    "local_response_norm": lambda t: (t(1, 3, 4), 2),
    "interpolate": lambda t: (t(1, 1, 3, 3), {"scale_factor": 2.0}),
    # losses
    **dict.fromkeys(
        ("binary_cross_entropy_with_logits", "gaussian_nll_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss"), two
    ),
    **dict.fromkeys(("poisson_nll_loss", "smooth_l1_loss", "multilabel_soft_margin_loss"), two),
    "soft_margin_loss": two,
    "gaussian_nll_loss": lambda t: (t(3), t(3), t(3)),
    "torch.kl_div": two,
    "torch.poisson_nll_loss": lambda t: (t(3, 3), t(3, 3), True, False, 1e-8, 1),
    **dict.fromkeys(("cross_entropy", "nll_loss", "multi_margin_loss"), labelled),
    "multilabel_margin_loss": lambda t: (t(3, 3), torch.zeros(3, 3, dtype=torch.int64)),
    "cosine_embedding_loss": lambda t: (t(3, 3), t(3, 3), torch.ones(3, dtype=torch.int64)),
    "hinge_embedding_loss": lambda t: (t(3), torch.ones(3, dtype=torch.int64)),
    "margin_ranking_loss": lambda t: (t(3), t(3), torch.ones(3, dtype=torch.int64)),
    "triplet_margin_loss": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "triplet_margin_with_distance_loss": lambda t: (t(3, 3), t(3, 3), t(3, 3)),
    "ctc_loss": lambda t: (t(4, 1, 3).log(), index(1, 2).view(1, 2), index(4), index(2)),
    "linear_cross_entropy": lambda t: (t(3, 4), t(5, 4), index(0, 1, 2)),
    "binary_cross_entropy": lambda t: (t(3) / 2, t(3) / 2),
    # linear algebra, FFT
    **dict.fromkeys(("cholesky_solve", "solve", "solve_ex", "lstsq"), two),
    "lu_solve": lambda t: (t(3, 3), torch.tensor([1, 2, 3], dtype=torch.int32), t(3, 3)),
    "solve_triangular": lambda t: (t(3, 3), t(3, 3), {"upper": True}),
    "torch.linalg.polar": lambda t: (t(3, 3),),
    "tensorinv": lambda t: (t(2, 3, 6),),
    "tensorsolve": lambda t: (t(2, 3, 6), t(2, 3)),
    "stft": lambda t: (t(16), 4, {"window": t(4), "return_complex": True}),
    **dict.fromkeys(("quantile", "nanquantile"), lambda t: (t(3, 3), 0.5)),
    "fused_moving_avg_obs_fake_quant": lambda t: (
        t(3, 3),
        *(
            torch.ones(1),
            torch.ones(1),
            torch.zeros(1),
            torch.ones(1),
            torch.ones(1),
            torch.zeros(1, dtype=torch.int32),
        ),
        *(0.01, 0, 255, 0),
    ),
    # sparse
    **dict.fromkeys(("smm", "hspmm"), lambda t: (t(3, 3).to_sparse(), t(3, 3))),
    **dict.fromkeys(("sspaddmm", "saddmm"), lambda t: (t(3, 3).to_sparse(), t(3, 3).to_sparse(), t(3, 3))),
    **dict.fromkeys(("torch.sparse.softmax", "torch.sparse.log_softmax"), lambda t: (t(3, 3).to_sparse(), 1)),
    "sampled_addmm": lambda t: (t(3, 3).to_sparse_csr(), t(3, 3), t(3, 3)),
    # widest
    **dict.fromkeys(("addcdiv", "addcmul"), lambda t: (t(3), t(3), t(3))),
    **dict.fromkeys(("allclose", "isclose", "atan2", "arctan2", "dot", "vdot", "inner", "heaviside", "polar"), vectors),
    **dict.fromkeys(("cartesian_prod", "complex"), vectors),
    "cross": lambda t: (t(3, 3), t(3, 3), {"dim": 0}),
    **dict.fromkeys(("index_add", "index_copy"), lambda t: (t(3, 3), 0, index(), t(2, 3))),
    "index_put": lambda t: (t(3), (index(),), t(2)),
    "index_reduce": lambda t: (t(3, 3), 0, index(), t(2, 3), "amax"),
    "lerp": lambda t: (t(3), t(3), 0.5),
    "masked_scatter": lambda t: (t(3), mask(), t(3)),
    "put": lambda t: (t(3), index(), t(2)),
    **dict.fromkeys(("scatter", "scatter_add"), lambda t: (t(3), 0, index(), t(2))),
    "scatter_reduce": lambda t: (t(3), 0, index(), t(2), "sum"),
    "meshgrid": lambda t: (t(3), t(3), {"indexing": "ij"}),
    "tensordot": lambda t: (t(3, 3), t(3, 3), {"dims": 1}),
    "bilinear": lambda t: (t(2, 3), t(2, 3), t(4, 3, 3), t(4)),
    "embedding_bag": lambda t: (index().view(1, 2), t(3, 4), {"per_sample_weights": t(1, 2), "mode": "sum"}),
    "torch.embedding_bag": lambda t: (t(3, 4), index(), index(0), False, 0, False, t(2)),
    "grid_sampler": lambda t: (t(1, 1, 3, 3), t(1, 3, 3, 2), 0, 0, False),
    "grid_sample": lambda t: (t(1, 1, 3, 3), t(1, 3, 3, 2), {"align_corners": False}),
    # match_self: as the function without the underscore, and
    "__setitem__": lambda t: (t(3), index(), t(2)),
}


def sample(owner: str, name: str, dtypes: list[torch.dtype], device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one call. The first floating tensor has the first of `dtypes`, the others the last."""
    count = 0

    def make(*shape: int) -> Tensor:
        nonlocal count
        dtype = dtypes[min(count, len(dtypes) - 1)]
        count += 1
        values = torch.rand(shape, generator=torch.Generator().manual_seed(count)) + 0.1
        if len(shape) == 2 and shape[0] == shape[1]:
            values = values + values.T + 3 * torch.eye(shape[0])  # positive definite, for linear algebra
        return values.to(dtype)

    arguments = next(
        (SAMPLES[key] for key in (f"{owner}.{name}", name, name.rstrip("_")) if key in SAMPLES),
        lambda t: (t(3, 3),),
    )(make)

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return type(value)(move(item) for item in value) if isinstance(value, (list, tuple)) else value

    kwargs = arguments[-1] if isinstance(arguments[-1], dict) else {}
    args = arguments[:-1] if kwargs else arguments
    return move(args), {key: move(value) for key, value in kwargs.items()}


def call(owner: str, name: str, dtypes: list[torch.dtype], device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these are deprecated or in beta; they are listed all the same
        args, kwargs = sample(owner, name, dtypes, device)
        result = getattr(resolve(owner), name)(*args, **kwargs)
    return args[0] if result is None else result  # __setitem__


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # the real type of a complex type


def result_types(value: Any) -> set[torch.dtype]:
    """Return the types of the floating and complex results."""
    found = {REAL.get(tensor.dtype, tensor.dtype) for tensor in flat(value)}
    return {dtype for dtype in found if dtype.is_floating_point}


HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

NATIVE = Policy("O1", patch_torch_functions=True)
APEXS = replace(NATIVE, op_lists="apex")


@pytest.fixture(name="installed", autouse=True)
def installed_fixture(clean_casts: None) -> Iterator[None]:
    registered = dict(install._registered)
    install.install("apex")
    yield
    install._registered.clear()
    install._registered.update(registered)


inside = regions.region(APEXS)

KINDS: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "half": (HALF, HALF, HALF),
    "float": (FULL, FULL, FULL),
    "widest": (HALF, FULL, FULL),
    "self": (HALF, FULL, HALF),  # in place; batch norms: the type of what comes in, whatever their weights are
}

POINTWISE = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan"
ARITHMETIC = "add mul div __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __div__"
AUGMENTED = "__iadd__ __isub__ __imul__ __itruediv__ __idiv__"
COMPARISONS = {
    "torch": "eq equal ge gt le lt ne",
    "torch.Tensor": "eq equal ge gt le lt ne __eq__ __ge__ __gt__ __le__ __lt__ __ne__",
}
CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
BLAS = "addmm addmv addr matmul mm mv addbmm baddbmm bmm prelu"
REDUCTIONS = "cumprod cumsum dist norm prod std sum var renorm pow"

TABLE: dict[str, dict[str, str]] = {
    "torch.nn.functional": {
        "half": f"{CONVOLUTIONS} linear",
        "float": """
            interpolate grid_sample softplus softmin log_softmax softmax layer_norm group_norm local_response_norm
            normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div
            l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss
            nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss
        """,
        "widest": "pairwise_distance bilinear relu gelu tanh",
        "self": "batch_norm instance_norm",
    },
    "torch": {
        "half": f"{CONVOLUTIONS} {BLAS}",
        "float": f"{POINTWISE} {REDUCTIONS}",
        "self": "batch_norm instance_norm",
        "widest": """
            binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss kl_div margin_ranking_loss
            poisson_nll_loss triplet_margin_loss
            add mul div addcdiv addcmul atan2 cross bilinear dot cat stack
            einsum chain_matmul log1p logsumexp softmax log_softmax std_mean var_mean pairwise_distance layer_norm
            group_norm native_layer_norm cosine_similarity frobenius_norm mean sigmoid sqrt
        """,
    },
    "torch.Tensor": {
        "half": f"{BLAS} __matmul__",
        "float": f"{POINTWISE} {REDUCTIONS} __pow__ __rpow__ __ipow__ cpu",
        "widest": f"{ARITHMETIC} {AUGMENTED} addcdiv addcmul atan2 cross dot log1p logsumexp softmax log_softmax mean",
        "self": "add_ mul_ div_ addcdiv_ addcmul_ atan2_ addmm_ addmv_ addr_ addbmm_ baddbmm_",
    },
}

ROWS = [
    pytest.param(owner, names.split(), KINDS[kind], id=f"{owner}, {kind}")
    for owner, kinds in TABLE.items()
    for kind, names in kinds.items()
]

# Arguments of what test_oplists.py has none for.
TWO = {*ARITHMETIC.split(), *AUGMENTED.split(), *COMPARISONS["torch.Tensor"].split(), "add_", "mul_", "div_"}


def arguments(owner: str, name: str, dtypes: list[torch.dtype], device: str) -> tuple[list[Any], dict[str, Any]]:
    if name in TWO:
        args, kwargs = sample("torch", "mm", dtypes, device)
    elif name in ("cat", "stack"):
        args, kwargs = (list(sample("torch", "mm", dtypes, device)[0]),), {}
    elif name == "__ipow__":
        args, kwargs = sample("torch", "pow", dtypes, device)
    elif name in ("batch_norm", "instance_norm"):
        x = torch.rand(2, 3, 4).to(device=device, dtype=dtypes[0])
        weights = [torch.ones(3, device=device, dtype=dtypes[-1]) for _ in range(4)]
        args, kwargs = (x, *weights, True), {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
        if owner != "torch":
            args, kwargs = (x, *weights, True), {}
    else:
        args, kwargs = sample(owner, name, dtypes, device)
    return list(args), kwargs


def call_of(owner: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        return getattr(resolve(owner), name)(*args, **kwargs)
