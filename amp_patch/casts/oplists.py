"""The op lists, which give the cast rule of each torch function at O1: owner -> rule -> names.

The lists contain the functions of torch's autocast op reference for CUDA, for every device here, and functions of
Apex's lists that torch's autocast does not need to list. apex_oplists.py has the functions that returned another type
in Apex. The rules:

    lower       FP32 tensors, and tensors of the other half type, become `policy.dtype`. For products, which are fast in
                this type and are summed in FP32.
    product     as lower, for matrices; with `policy.product_format` the product is in FP8 or FP4 (low_bit.py).
    sparse      products with a sparse tensor: computed in FP32, and a dense result becomes `policy.dtype`. Functions
                under `lower` follow this rule if an operand is sparse.
    einsum      as lower, for two or more operands: with one operand nothing is multiplied.
    fused       as lower, for attention's fused operators.
    rnn         as lower, for fused recurrent networks, whose weights form one buffer.
    fp32        FP16 and BF16 tensors become FP32. For exponentials, logarithms and powers, which overflow soon (exp(12)
                in FP16), and for sums over many elements (softmax, norms, losses), which lose small addends.
    loss        as fp32, but autograd saves the low-precision logits, not FP32 copies (lean_loss.py). Also while no
                casts act: low-precision logits give an FP32 loss.
    norm        as fp32; with `policy.low_precision_norms` the result has the type of an FP16 or BF16 input.
    widest      all floating tensors become the widest floating type among them.
    match_self  for functions that change their first argument in place: the other floating tensors become its type.
    sigmoid     with `policy.allow_banned`, as fp32: a binary cross entropy may follow, and low precision rounds
                probabilities near 0 and 1 to 0 and 1, whose logarithms are infinite. Otherwise not cast.
    direction   as fp32; rows of zeros in FP16 get no gradient (see in_fp32.py). Also while no casts act: computed in
                FP32, since FP16 rounds eps to 0, and rounded to the operands' type.
    inexact     as fp32. Also while no casts act: computed in FP32, since torch's low-precision kernels return wrong
                numbers, and rounded to the operands' type.
    banned      no safe low-precision form: low-precision tensors are refused (`policy.allow_banned`: run as fp32).
    scripted    code compiled by torch.jit runs as under a torch.autocast to `policy.dtype`.
    rnn_input   a check by torch.nn's RNNs that input and weights have one type. It must pass, because the call that
                follows casts both.
    fused_input a check that the operands of attention have one type. Its arguments are cast as the call that follows
                casts them.
    disabled    a query whether a fused path is allowed. It returns False, because that path would bypass the lists.

In Apex's variant only:

    einsum_widest   as widest, for two or more operands.
    mixed_fp32      as widest, but tensors without dimensions count, and FP64 with low precision is refused.
    in_place_fp32   for functions that change their first argument in place. If it is low precision, the call is
                    refused. Otherwise the other tensors become FP32.

Functions in which torch promotes mixed types (arithmetic, comparisons, `cat`, `stack`, `where`, most two-tensor math)
are not listed, so that they cost nothing. Batch and instance norms are not listed either: their kernels take FP16 and
BF16 inputs with FP32 weights and statistics, compute in FP32 and return the input's type. (Without weights and
statistics a CPU also rounds its means to the input's type, as under torch.autocast.) `tests/casts/test_oplists.py`
calls every name here, `tests/apex_surface/test_apex_lists.py` every name of `APEX`.
"""

from __future__ import annotations

from amp_patch.casts.apex_oplists import APEX, split

_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss
    kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
"""

_CONVOLUTIONS = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"

# Products that are both functions of torch and methods of a tensor: `_PRODUCTS` can be in FP8 and FP4, `_GEMMS` cannot.
_PRODUCTS = "addmm baddbmm bmm matmul mm"
_GEMMS = "addbmm addmv addr mv"

_EXP_LOG_POW = """
    acos arccos arcsin asin cosh erfinv exp exp2 expm1 log log10 log1p log2 logcumsumexp logsumexp pow reciprocal rsqrt
    sinh tan
"""

# `mean` is not listed, nor do torch and today's Apex list it: a mean does not leave the range of its input. A variance
# may leave that range, so `std` and `var` are listed, as in Apex. `nansum` has the rule of `sum`.
_REDUCTIONS = "cumprod cumsum dist nansum norm prod renorm std sum var"

# Functions without half kernels, on some devices or all (quantile, linear algebra, FFT).
_NO_HALF_KERNEL = "cholesky_inverse cholesky_solve det inverse logdet nanquantile pinverse quantile slogdet stft"

_DOTS = "dot inner vdot"

# Functions that raise on mixed types, as measured on torch 2.13. addcdiv, addcmul and atan2 do not raise, but torch
# lists them.
_WIDEST = """
    addcdiv addcmul allclose arctan2 atan2 cross heaviside index_add index_copy index_put index_reduce isclose lerp
    masked_scatter put scatter scatter_add scatter_reduce
"""

_NAMES: dict[str, dict[str, str]] = {
    "torch": {
        "product": _PRODUCTS,
        "lower": f"""
            {_GEMMS} {_CONVOLUTIONS} _convolution chain_matmul convolution gru_cell lstm_cell prelu rnn_relu_cell
            rnn_tanh_cell
        """,
        "sparse": "dsmm spmm",
        "einsum": "einsum",
        "fused": "_grouped_mm",  # called by F.grouped_mm
        "rnn": "gru lstm rnn_relu rnn_tanh",
        "fp32": f"""
            {_EXP_LOG_POW} {_REDUCTIONS} {_NO_HALF_KERNEL} binary_cross_entropy_with_logits cdist cosine_embedding_loss
            ctc_loss frobenius_norm fused_moving_avg_obs_fake_quant hinge_embedding_loss hspmm kl_div log_softmax
            margin_ranking_loss nuclear_norm pairwise_distance pdist poisson_nll_loss saddmm smm softmax sspaddmm
            std_mean triplet_margin_loss var_mean
        """,
        "norm": "group_norm layer_norm native_layer_norm rms_norm",
        "sigmoid": "sigmoid",
        "direction": "cosine_similarity",
        "inexact": "matrix_exp",
        "widest": f"""
            {_WIDEST} {_DOTS} bilinear cartesian_prod complex embedding_bag grid_sampler meshgrid polar tensordot
        """,
    },
    # Also attributes of torch; some callers import them from torch.functional.
    "torch.functional": {
        "lower": "chain_matmul",
        "einsum": "einsum",
        "fp32": "cdist norm stft",
        "widest": "cartesian_prod meshgrid tensordot",
    },
    # Called by torch.nn's recurrent modules.
    "torch._VF": {
        "lower": "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell",
        "rnn": "gru lstm rnn_relu rnn_tanh",
    },
    # Called by the functions of torch.nn.attention's modules, which users import by name.
    "torch.nn.attention.flex_attention": {
        "fused": "flex_attention_hop",
        "fused_input": "_validate_sdpa_input",  # raises on mixed types in some versions of torch
    },
    "torch.ops.torch_attn": {"fused": "_varlen_attn", "match_self": "_varlen_attn_out"},
    "torch._C.ScriptFunction": {"scripted": "__call__"},
    "torch._C.ScriptMethod": {"scripted": "__call__"},
    "torch.nn.RNNBase": {"rnn_input": "check_input"},
    "torch.backends.mha": {"disabled": "get_fastpath_enabled"},
    "torch.nn.functional": {
        "product": "linear",
        "lower": f"{_CONVOLUTIONS} prelu scaled_dot_product_attention",
        # The F.linear inside linear_cross_entropy follows its own rule, so its product is in the low type. If
        # linear_cross_entropy computes in chunks, the product is in FP32.
        "fp32": f"""
            {_LOSSES} gumbel_softmax interpolate linear_cross_entropy local_response_norm log_softmax pairwise_distance
            pdist softmax softmin softplus
        """,
        "loss": "cross_entropy",
        "norm": "group_norm layer_norm rms_norm",
        "widest": "bilinear embedding_bag grid_sample",
        "direction": "cosine_similarity normalize",
        "banned": "binary_cross_entropy",
    },
    "torch.Tensor": {
        "product": f"{_PRODUCTS} __matmul__ __rmatmul__",
        "lower": f"{_GEMMS} prelu",
        "fp32": f"""
            {_EXP_LOG_POW} {_REDUCTIONS} {_NO_HALF_KERNEL} __pow__ __rdiv__ __rpow__ __rtruediv__ log_softmax smm
            softmax sspaddmm
        """,
        "sigmoid": "sigmoid",
        "inexact": "matrix_exp",
        "widest": f"{_WIDEST} {_DOTS}",
        "match_self": """
            addbmm_ addmm_ addmv_ baddbmm_ __setitem__ heaviside_ index_add_ index_copy_ index_put_ index_reduce_ lerp_
            masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_
        """,
    },
    "torch.linalg": {
        "product": "matmul",
        "lower": "multi_dot vecdot",
        "fp32": """
            cholesky cholesky_ex cond det eig eigh eigvals eigvalsh inv inv_ex lstsq lu lu_factor lu_factor_ex lu_solve
            matrix_norm matrix_rank matrix_sqrth norm pinv polar qr slogdet solve solve_ex solve_triangular svd svdvals
            tensorinv tensorsolve vector_norm
        """,
        "inexact": "matrix_exp",
        "widest": "cross",
    },
    "torch.sparse": {"sparse": "addmm mm", "fp32": "log_softmax sampled_addmm softmax"},
    "torch.special": {
        "fp32": "erfinv exp2 expm1 log1p log_softmax logsumexp softmax",
        "sigmoid": "expit",
    },
    "torch.fft": {
        "fp32": """
            fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft rfft2 rfftn
        """,
    },
}
OPLISTS = split(_NAMES)

# Owner -> the module that must be imported before the owner has its functions. `import torch` does not import these
# modules. Nor does amp_patch, because this takes seconds: it replaces the functions after user code imports the module.
LATE: dict[str, str] = {
    "torch.nn.attention.flex_attention": "torch.nn.attention.flex_attention",
    "torch.ops.torch_attn": "torch.nn.attention.varlen",
}


def rules_by_name(op_lists: str) -> dict[tuple[str, str], str]:
    """Return {(owner, name): rule} in the variant ``"torch"`` (OPLISTS) or ``"apex"`` (OPLISTS, overridden by APEX)."""
    tables = {"torch": (OPLISTS,), "apex": (OPLISTS, APEX)}[op_lists]
    return {
        (owner, name): rule
        for table in tables
        for owner, rules in table.items()
        for rule, names in rules.items()
        for name in names
    }
