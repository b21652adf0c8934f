"""Casts by Apex's op lists."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_calls import resolve, sample

from amp_patch.casts import install, regions
from amp_patch.policy import Policy

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
