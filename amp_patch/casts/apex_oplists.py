"""Apex's variant of the op lists, for scripts written for it (`Policy.op_lists`): only what differs from OPLISTS.

A name here has this rule in the variant, all others have that of OPLISTS. The rules differ where a call that ran in
Apex gave another type there: Apex left the function alone (torch.softmax, einsum), or listed what torch promotes by
itself. What raised in Apex (mixed types, no half kernel) keeps today's rule, and so does what torch has got since
Apex's lists were last edited, in 2020 (attention, linalg, rms_norm, huber_loss and others).
"""

from __future__ import annotations

_COMPARISONS = ("eq", "equal", "ge", "gt", "le", "lt", "ne")

_APEX_MIXED = ("add", "addcdiv", "addcmul", "atan2", "cross", "div", "mul", *_COMPARISONS)

# The in-place forms of Apex's FP32 list.
_APEX_IN_PLACE = (
    "acos_",
    "asin_",
    "cosh_",
    "exp_",
    "expm1_",
    "log10_",
    "log2_",
    "log_",
    "reciprocal_",
    "rsqrt_",
    "sinh_",
    "tan_",
)

# Tensor methods and torch functions that Apex left alone: its lists named F.softmax, F.log_softmax and so on only.
_APEX_UNLISTED = ("log1p", "log_softmax", "logsumexp", "softmax")

APEX: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {
        "einsum_widest": ("einsum",),
        "widest": (
            *_APEX_UNLISTED,
            "binary_cross_entropy_with_logits",
            "chain_matmul",
            "cosine_embedding_loss",
            "cosine_similarity",
            "frobenius_norm",
            "group_norm",
            "hinge_embedding_loss",
            "kl_div",
            "layer_norm",
            "margin_ranking_loss",
            "native_layer_norm",
            "pairwise_distance",
            "poisson_nll_loss",
            "std_mean",
            "triplet_margin_loss",
            "var_mean",
        ),
        "mixed_fp32": _APEX_MIXED,
        "in_place_fp32": _APEX_IN_PLACE,
    },
    "torch.functional": {"einsum_widest": ("einsum",), "widest": ("chain_matmul",)},
    "torch.nn.functional": {
        "fp32": ("grid_sample",),
        "widest": ("pairwise_distance",),
    },
    "torch.Tensor": {
        # `x **= 2` makes a new tensor of a low-precision x; so do `x += y` and the like, of mixed types.
        "fp32": ("__ipow__", "cpu"),
        "widest": _APEX_UNLISTED,
        "mixed_fp32": (
            *_APEX_MIXED,
            "__add__",
            "__div__",
            "__eq__",
            "__ge__",
            "__gt__",
            "__iadd__",
            "__idiv__",
            "__imul__",
            "__isub__",
            "__itruediv__",
            "__le__",
            "__lt__",
            "__mul__",
            "__ne__",
            "__radd__",
            "__rmul__",
            "__rsub__",
            "__sub__",
            "__truediv__",
        ),
        "match_self": ("addr_",),  # backward of addr_ fails on mixed types; other arithmetic in place is torch's
        "in_place_fp32": (*_APEX_IN_PLACE, "cumprod_", "cumsum_", "erfinv_", "pow_", "renorm_"),
    },
}
