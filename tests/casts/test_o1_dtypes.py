"""O1's and O4's types are ours, and the same on every torch: a table of what layers and functions give.

The lists of torch.autocast move: 2.12 put rms_norm among what runs in FP32, and no script was told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES
from torch import Tensor, nn

from amp_patch import amp

LOW, FP32, AS_GIVEN = "the level's type", "FP32", "the type of the input"

# Of an input of shape (4, 8, 8). Names of torch.nn.functional or torch; a torch that lacks one leaves it out.
FUNCTIONS = {
    LOW: "addmm baddbmm bmm conv1d conv_transpose1d einsum linear matmul mm prelu scaled_dot_product_attention",
    FP32: """
        acos asin cdist cosh cosine_similarity cross_entropy cumprod cumsum det dist erfinv exp exp2 expm1 group_norm
        huber_loss interpolate inverse kl_div l1_loss layer_norm local_response_norm log log10 log1p log2 log_softmax
        logsumexp lp_pool2d mse_loss norm normalize pdist pow prod quantile reciprocal renorm rms_norm rsqrt sinh
        smooth_l1_loss softmax softmin softplus std sum tan var
    """,
    AS_GIVEN: """
        abs adaptive_avg_pool2d add addcmul amax atan avg_pool1d avg_pool2d batch_norm cat celu clamp cos cross div dot
        dropout elu erf gelu glu hardsigmoid hardswish hardtanh inner instance_norm leaky_relu lerp logsigmoid max
        max_pool2d mean median min mish mul outer pad pixel_shuffle relu selu sigmoid silu sin softsign sqrt square
        stack sub tanh tanhshrink unfold where
    """,
}
CASES = [(kind, name) for kind, names in FUNCTIONS.items() for name in names.split()]

# How they are called, where it is not with the input alone.
TWICE = "add bmm cdist cosine_similarity dist div huber_loss inner l1_loss matmul mse_loss mul smooth_l1_loss sub"
ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    **dict.fromkeys(TWICE.split(), lambda x: (x, x)),
    "kl_div": lambda x: (x, x, None, None, "sum"),
    "mm": lambda x: (x[0], x[0]),
    "pdist": lambda x: (x[0],),
    **dict.fromkeys(("cumprod", "cumsum", "log_softmax", "logsumexp", "softmax", "softmin"), lambda x: (x, -1)),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d"), lambda x: (x, 2)),
    **dict.fromkeys(("group_norm", "local_response_norm", "pixel_shuffle", "pow"), lambda x: (x, 2)),
    **dict.fromkeys(("layer_norm", "rms_norm"), lambda x: (x, (8,))),
    **dict.fromkeys(("cat", "stack"), lambda x: ([x, x],)),
    **dict.fromkeys(("det", "inverse"), lambda x: (x + 9 * torch.eye(8).to(x),)),
    **dict.fromkeys(("dot", "outer"), lambda x: (x[0, 0], x[0, 0])),
    **dict.fromkeys(("addcmul", "baddbmm", "scaled_dot_product_attention"), lambda x: (x, x, x)),
    "addmm": lambda x: (x[0], x[0], x[0]),
    "batch_norm": lambda x: (x, torch.zeros(8), torch.ones(8)),
    "clamp": lambda x: (x, 0.0, 1.0),
    "conv1d": lambda x: (x, torch.ones(4, 8, 3)),
    "conv_transpose1d": lambda x: (x, torch.ones(8, 4, 3)),
    "cross": lambda x: (x[..., :3], x[..., :3], -1),
    "cross_entropy": lambda x: (x[0], torch.zeros(8, dtype=torch.int64)),
    "einsum": lambda x: ("bij,bjk->bik", x, x),
    "interpolate": lambda x: (x, 4),
    "lerp": lambda x: (x, x, 0.5),
    "linear": lambda x: (x, torch.ones(4, 8)),
    "lp_pool2d": lambda x: (x, 2.0, 2),
    "pad": lambda x: (x, (1, 1)),
    "prelu": lambda x: (x, torch.ones(1)),
    "quantile": lambda x: (x, 0.5),
    "renorm": lambda x: (x, 2, 0, 1.0),
    "unfold": lambda x: (x[None], 2),
    "where": lambda x: (x > 0.5, x, x),
}

LAYERS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    LOW: {
        "Linear": lambda: nn.Linear(8, 8),
        "Conv1d": lambda: nn.Conv1d(8, 4, 3),
        "ConvTranspose1d": lambda: nn.ConvTranspose1d(8, 4, 3),
        "LSTM": lambda: nn.LSTM(8, 8),
        "GRU": lambda: nn.GRU(8, 8),
        "MultiheadAttention": lambda: OfOne(nn.MultiheadAttention(8, 2)),
    },
    FP32: {
        "LayerNorm": lambda: nn.LayerNorm(8),
        "RMSNorm": lambda: nn.RMSNorm(8),
        "GroupNorm": lambda: nn.GroupNorm(2, 8),
        "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    },
    AS_GIVEN: {"BatchNorm1d": lambda: nn.BatchNorm1d(8), "InstanceNorm1d": lambda: nn.InstanceNorm1d(8, affine=True)},
}


class OfOne(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)


class Call(nn.Module):
    """A model that calls one function, and records the type of its result before the outputs are cast."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.seen = function, None

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        result = self.function(x.to(dtype))
        self.seen = (result[0] if isinstance(result, tuple) else result).dtype
        return x


def types_of(function: Callable[[Tensor], Any], level: str, low: torch.dtype, device: str) -> list[torch.dtype | None]:
    """The types of its results for an input in FP32, and for one in the level's own type."""
    model = amp.initialize(Call(function).to(device), opt_level=level, verbosity=0)
    seen = []
    for dtype in (torch.float32, low):
        model(torch.rand(4, 8, 8, device=device) * 0.8 + 0.1, dtype)
        seen.append(model.seen)
    return seen


def wanted(kind: str, low: torch.dtype) -> list[torch.dtype]:
    return {LOW: [low, low], FP32: [torch.float32] * 2, AS_GIVEN: [torch.float32, low]}[kind]


LEVELS = pytest.mark.parametrize(("level", "low"), [("O1", torch.float16), ("O4", torch.bfloat16)])


@pytest.mark.parametrize("device", DEVICES)
@LEVELS
@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if hasattr(F, case[1]) or hasattr(torch, case[1])])
def test_functions(kind: str, name: str, level: str, low: torch.dtype, device: str) -> None:
    def function(x: Tensor) -> Any:
        arguments = ARGUMENTS.get(name, lambda x: (x,))(x)
        on_device = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
        return getattr(F if hasattr(F, name) else torch, name)(*on_device)

    assert types_of(function, level, low, device) == wanted(kind, low)


@pytest.mark.parametrize("device", DEVICES)
@LEVELS
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, layers in LAYERS.items() for name in layers])
def test_layers(kind: str, name: str, level: str, low: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    assert types_of(LAYERS[kind][name](), level, low, device) == wanted(kind, low)
