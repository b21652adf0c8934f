"""The op lists that `Policy.op_lists="apex"` selects, as differences from OPLISTS (oplists.py).

A policy with these lists uses the rule given here for each name below, and the rule of OPLISTS for all other names. A
name is here if its calls returned another type in Apex than they do under OPLISTS: either Apex did not patch the
function (torch.softmax, einsum), or Apex patched a function that torch promotes without help today. A name is not here
if the call raised in Apex (mixed types, no half kernel), or if the function is younger than Apex's lists, which were
last edited in 2020 (attention, linalg, rms_norm, huber_loss and others).
"""

from __future__ import annotations

_APEX_MIXED = "add addcdiv addcmul atan2 cross div mul eq equal ge gt le lt ne"

# The in-place forms of Apex's FP32 list.
_APEX_IN_PLACE = "acos_ asin_ cosh_ exp_ expm1_ log10_ log2_ log_ reciprocal_ rsqrt_ sinh_ tan_"

# Tensor methods and torch functions that Apex did not patch: its lists named only F.softmax, F.log_softmax and so on.
_APEX_UNLISTED = "log1p log_softmax logsumexp softmax"

_NAMES: dict[str, dict[str, str]] = {
    "torch": {
        "einsum_widest": "einsum",
        "widest": f"""
            {_APEX_UNLISTED} binary_cross_entropy_with_logits chain_matmul cosine_embedding_loss cosine_similarity
            frobenius_norm group_norm hinge_embedding_loss kl_div layer_norm margin_ranking_loss native_layer_norm
            pairwise_distance poisson_nll_loss std_mean triplet_margin_loss var_mean
        """,
        "mixed_fp32": _APEX_MIXED,
        "in_place_fp32": _APEX_IN_PLACE,
    },
    "torch.functional": {"einsum_widest": "einsum", "widest": "chain_matmul"},
    "torch.nn.functional": {"fp32": "grid_sample", "widest": "pairwise_distance"},
    "torch.Tensor": {
        # `x **= 2` makes a new tensor if x is low precision, as `x += y` and similar operators do with mixed types.
        "fp32": "__ipow__ cpu",
        "widest": _APEX_UNLISTED,
        "mixed_fp32": f"""
            {_APEX_MIXED} __add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__
            __lt__ __mul__ __ne__ __radd__ __rmul__ __rsub__ __sub__ __truediv__
        """,
        "match_self": "addr_",  # backward of addr_ fails on mixed types; other in-place arithmetic promotes
        "in_place_fp32": f"{_APEX_IN_PLACE} cumprod_ cumsum_ erfinv_ pow_ renorm_",
    },
}


def split(lists: dict[str, dict[str, str]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return `lists` with a tuple of names in place of each string, in which spaces are between the names."""
    return {owner: {rule: tuple(names.split()) for rule, names in rules.items()} for owner, rules in lists.items()}


APEX = split(_NAMES)
