"""Each function of torch is on an op list, or has a reason not to be. A new function of torch fails a test here."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_calls import resolve, result_types

from amp_patch.casts.oplists import OPLISTS

AS_IT_CAME = "elementwise, sorting and choosing: gives the type that came, and its range is that of what came"
PROMOTES = "promotes by itself"

_UNLISTED = {
    AS_IT_CAME: """
        abs absolute acosh aminmax amax amin arccosh arcsinh arctan arctanh asinh atan atanh ceil celu clone cos cov
        corrcoef deg2rad diff digamma elu erf erfc fix floor frac gammaln gelu hardshrink hardsigmoid hardswish
        hardtanh i0 i0e i1 i1e leaky_relu lgamma logit logsigmoid mean median mish msort nan_to_num nanmean nanmedian
        ndtr neg negative norm_except_dim positive psi rad2deg relu relu6 round selu sgn sigmoid sign silu sin sinc
        softshrink softsign sort sqrt square tanh tanhshrink trunc entr mode histc trace tril triu
        """,
    "the same, of several arguments: they are of one type, or numbers": """
        clamp clip cummax cummin fill frexp gather gradient glu index_fill index_select kthvalue masked_fill index
        masked_select mvlgamma multigammaln polygamma rrelu select_scatter slice_scatter slice_inverse
        diagonal_scatter as_strided_scatter take take_along_dim threshold topk cumulative_trapezoid trapezoid trapz
        constant_pad_nd pad rot90 roll unique unique_consecutive segment_reduce embedding embedding_renorm_ bernoulli
        poisson multinomial normal binomial vander combinations outer ger
        """,
    PROMOTES: """
        add clamp_max clamp_min copysign div divide floor_divide fmax fmin fmod gammainc gammaincc hypot igamma
        igammac kron ldexp logaddexp logaddexp2 max maximum min minimum mul multiply nextafter remainder rsub sub
        subtract true_divide xlog1py xlogy
        """,
    "promotes by itself, in lists of tensors and where a condition chooses": """
        block_diag cat column_stack concat concatenate dstack hstack row_stack stack vstack where
        """,
    "computes in FP64 whatever comes": "float_power",
    "gives integers, truth values or no tensor": """
        all any argmax argmin argsort argwhere bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor bucketize can_cast count_nonzero eq equal gcd ge greater greater_equal gt
        hash_tensor is_complex is_conj is_distributed is_floating_point is_inference is_neg is_nonzero is_same_size
        is_signed is_storage is_tensor isfinite isin isinf isnan isneginf isposinf isreal lcm le less less_equal
        logical_and logical_not logical_or logical_xor lt ne nonzero nonzero_static not_equal numel one_hot
        promote_types result_type searchsorted signbit tril_indices triu_indices unravel_index histogram histogramdd
        """,
    "shapes and views: no value changes": """
        adjoint alias_copy as_strided atleast_1d atleast_2d atleast_3d broadcast_shapes broadcast_tensors broadcast_to
        channel_shuffle chunk contiguous detach diag diag_embed diagflat diagonal dsplit expand expand_as flatten flip
        fliplr flipud hsplit moveaxis movedim narrow native_channel_shuffle permute pixel_shuffle pixel_unshuffle
        ravel repeat repeat_interleave reshape reshape_as select split split_with_sizes squeeze sum_to_size swapaxes
        swapdims t tensor_split tile transpose unbind unflatten unfold unsafe_chunk unsafe_split
        unsafe_split_with_sizes unsqueeze view view_as vsplit fftshift ifftshift resize resize_as set_
        resize_as_sparse_ slice_copy fold
        """,
    "complex numbers, whose types are torch's to choose": """
        angle conj conj_physical imag istft real resolve_conj resolve_neg view_as_complex view_as_real
        """,
    "makes tensors, of the type that it is told": """
        affine_grid affine_grid_generator arange as_tensor asarray bartlett_window blackman_window empty empty_like
        empty_permuted empty_quantized empty_strided eye fftfreq from_dlpack from_file from_numpy frombuffer full
        full_like hamming_window hann_window kaiser_window linspace logspace new new_empty new_empty_strided new_full
        new_ones new_tensor new_zeros ones ones_like rand rand_like randint randint_like randn randn_like randperm
        range rfftfreq scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
        sparse_csc_tensor sparse_csr_tensor tensor zeros zeros_like
        """,
    "converts, and the user has said to what": """
        as_subclass bfloat16 bool byte cdouble cfloat chalf char cpu cuda double float half int ipu long mtia numpy
        short to to_dense to_mkldnn to_padded_tensor to_sparse to_sparse_bsc to_sparse_bsr to_sparse_coo to_sparse_csc
        to_sparse_csr tolist type type_as xpu item
        """,
    "pooling and dropout: gives the type that came": """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d
        adaptive_max_pool3d_with_indices alpha_dropout avg_pool1d avg_pool2d avg_pool3d dropout dropout1d dropout2d
        dropout3d feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool2d_with_indices
        fractional_max_pool3d fractional_max_pool3d_with_indices max_pool1d max_pool1d_with_indices max_pool2d
        max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
        native_dropout
        """,
    "norms whose kernels take 16 bits beside FP32 weights and statistics": """
        batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
        batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats cudnn_batch_norm instance_norm
        miopen_batch_norm native_batch_norm
        """,
    "calls functions on the lists": """
        flex_attention grouped_mm lp_pool1d lp_pool2d lp_pool3d multi_head_attention_forward pca_lowrank svd_lowrank
        upsample upsample_bilinear upsample_nearest varlen_attn varlen_attn_out
        """,
    "a kernel's own name: who calls it has chosen the types": """
        cudnn_affine_grid_generator cudnn_convolution cudnn_convolution_add_relu cudnn_convolution_relu
        cudnn_convolution_transpose cudnn_grid_sampler cudnn_is_acceptable grid_sampler_2d grid_sampler_3d
        miopen_convolution miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose
        miopen_ctc_loss miopen_depthwise_convolution miopen_rnn mkldnn_adaptive_avg_pool2d mkldnn_convolution
        mkldnn_linear_backward_weights mkldnn_max_pool2d mkldnn_max_pool3d mkldnn_rnn_layer native_group_norm
        native_norm
        """,
    "FP8 operands and their scales, which the user has made by hand": "scaled_addmm scaled_grouped_mm scaled_mm",
    "quantized: the types are a part of what is asked for": """
        choose_qparams_optimized dequantize fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
        fbgemm_pack_quantized_matrix int_repr q_per_channel_axis q_per_channel_scales
        q_per_channel_zero_points q_scale q_zero_point qscheme quantize_per_channel quantize_per_tensor
        quantize_per_tensor_dynamic quantized_batch_norm quantized_gru quantized_gru_cell quantized_lstm
        quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell
        quantized_rnn_tanh_cell
        """,
    "sparse matrices: torch's lists leave them out": """
        hsmm sparse_mask coalesce indices values ccol_indices col_indices
        crow_indices row_indices sparse_dim dense_dim is_coalesced
        """,
    "no kernels for 16 bits: torch says so by the type's name, and its lists leave them out": """
        airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
        chebyshev_polynomial_v chebyshev_polynomial_w cholesky erfcx geqrf hermite_polynomial_h hermite_polynomial_he
        householder_product laguerre_polynomial_l ldl_factor ldl_factor_ex ldl_solve legendre_polynomial_p lobpcg
        log_ndtr lu lu_solve lu_unpack modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
        ndtri orgqr ormqr qr scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t
        shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
        spherical_bessel_j0 svd triangular_solve zeta
        """,
    "a power of whole exponent: products of the matrix with itself, in the type that came": "matrix_power",
    "torch has taken it away, and says what to use": "eig lstsq matrix_rank solve symeig",
    "says which positions see each other, which is no number": """
        and_masks create_block_mask create_mask noop_mask or_masks causal_lower_right causal_upper_left
        """,
    "settings, tools, files and the compiler": """
        activate_flash_attention_impl are_deterministic_algorithms_enabled assert_int_or_pair
        autocast_decrement_nesting autocast_increment_nesting boolean_dispatch classproperty clear_autocast_cache
        compile compiled_with_cxx11_abi cond current_flash_attention_impl fork get_autocast_cpu_dtype
        get_autocast_dtype get_autocast_gpu_dtype get_autocast_ipu_dtype get_autocast_xla_dtype get_default_device
        get_default_dtype get_deterministic_debug_mode get_device get_device_module get_file_path
        get_float32_matmul_precision get_num_interop_threads get_num_threads get_rng_state handle_torch_function
        has_torch_function has_torch_function_unary has_torch_function_variadic import_ir_module
        import_ir_module_from_buffer init_num_threads initial_seed is_anomaly_check_nan_enabled is_anomaly_enabled
        is_autocast_cache_enabled is_autocast_cpu_enabled is_autocast_enabled is_autocast_ipu_enabled
        is_autocast_xla_enabled is_deterministic_algorithms_warn_only_enabled is_grad_enabled
        is_inference_mode_enabled is_vulkan_available is_warn_always_enabled list_flash_attention_impls load
        manual_seed merge_type_from_type_comment overload parse_ir parse_schema parse_type_comment
        prepare_multiprocessing_environment profiler_allow_cudagraph_cupti_lazy_reinit_cuda12
        register_flash_attention_impl restore_flash_attention_impl save sdpa_kernel seed set_anomaly_enabled
        set_autocast_cache_enabled set_autocast_cpu_dtype set_autocast_cpu_enabled set_autocast_dtype
        set_autocast_enabled set_autocast_gpu_dtype set_autocast_ipu_dtype set_autocast_ipu_enabled
        set_autocast_xla_dtype set_autocast_xla_enabled set_default_device set_default_dtype set_default_tensor_type
        set_deterministic_debug_mode set_float32_matmul_precision set_flush_denormal set_num_interop_threads
        set_num_threads set_printoptions set_rng_state set_warn_always sym_constrain_range
        sym_constrain_range_for_size sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum
        thread_safe_generator to_dlpack typename unify_type_list use_deterministic_algorithms vmap wait while_loop
        """,
    "what a tensor is, and where its storage is": """
        apply_ backward cauchy_ const_data_ptr copy_ data_ptr dim dim_order element_size exponential_ fill_diagonal_
        geometric_ is_contiguous is_pinned is_set_to is_shared log_normal_ map2_ map_ module_load ndimension nelement
        pin_memory random_ record_stream register_hook register_post_accumulate_grad_hook reinforce requires_grad_
        retain_grad share_memory_ size sparse_resize_ sparse_resize_and_clear_ storage storage_offset storage_type
        stride uniform_ untyped_storage zero_
        """,
}

UNLISTED = {reason: names.split() for reason, names in _UNLISTED.items()}

# A name with one of these endings is its name without it, and follows what is said of that.
ENDINGS = {
    "_": "in place: the result has the type of the first argument, and torch says which others it takes",
    "_copy": "a view, copied",
}


# Those of torch.nn.attention by what they say is public: they import from each other.
OWNERS = (
    "torch",
    "torch.Tensor",
    "torch.nn.functional",
    "torch.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
)
ATTENTION = (
    "torch.nn.attention",
    "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen",
    "torch.nn.attention.bias",
)
REASONS = {name: reason for reason, names in UNLISTED.items() for name in names}
# The torch of the table. What an older one has beside, it has lost since.
TABLE_OF = (2, 13)
THIS = tuple(int(part) for part in torch.__version__.split(".")[:2])


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # varlen is younger than torch 2.6
        return None


def functions() -> Iterator[tuple[str, str]]:
    """(owner, name) of torch's public functions."""
    for owner in OWNERS:
        for name in dir(resolve(owner)):
            found = getattr(resolve(owner), name)
            of_torch = (getattr(found, "__module__", None) or "torch").partition(".")[0] in ("torch", "builtins")
            if not name.startswith("_") and callable(found) and not isinstance(found, type) and of_torch:
                yield owner, name
    for owner in ATTENTION:
        for name in getattr(module(owner), "__all__", ()):
            if callable(found := getattr(module(owner), name)) and not isinstance(found, type):
                yield owner, name


def known(owner: str, name: str) -> bool:
    listed = any(name in names for names in OPLISTS.get(owner, {}).values())
    return listed or name in REASONS or any(known(owner, bare) for bare in without_ending(name))


def without_ending(name: str) -> list[str]:
    return [bare for ending in ENDINGS if (bare := name.removesuffix(ending)) != name]


@pytest.mark.skipif(THIS < TABLE_OF, reason="names that torch had before the table's")
def test_every_function_is_listed_or_left_out_for_a_reason() -> None:
    new = [f"{owner}.{name}" for owner, name in functions() if not known(owner, name)]
    assert not new, "add each to OPLISTS in amp_patch/casts/oplists.py, or to _UNLISTED above under a reason"


def test_a_function_that_torch_gets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "attention_of_tomorrow", torch.exp, raising=False)
    new = [(owner, name) for owner, name in functions() if not known(owner, name)]
    assert ("torch.nn.functional", "attention_of_tomorrow") in new


def test_a_name_has_one_reason_and_is_not_listed_everywhere() -> None:
    assert not [
        name for name, times in Counter(name for names in UNLISTED.values() for name in names).items() if times > 1
    ]
    here = {name for owner, name in functions() if not any(name in names for names in OPLISTS.get(owner, {}).values())}
    everywhere = {name for _, name in functions()}
    assert not [name for name in REASONS if name in everywhere and name not in here]


def of_matrices(name: str, *dtypes: torch.dtype) -> set[torch.dtype]:
    owner = next((found for found in OWNERS if hasattr(resolve(found), name)), None)
    if owner is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    values = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) / 2 + 1
    return result_types(getattr(resolve(owner), name)(*(values.to(dtype) for dtype in dtypes)))


@pytest.mark.parametrize("name", [name for name in UNLISTED[AS_IT_CAME] if name != "norm_except_dim"])
def test_unlisted_functions_return_the_incoming_type(name: str) -> None:
    assert of_matrices(name, torch.bfloat16) == {torch.bfloat16}
    assert of_matrices(name, torch.float32) == {torch.float32}


@pytest.mark.parametrize("name", UNLISTED[PROMOTES])
def test_unlisted_functions_promote_to_fp32(name: str) -> None:
    assert of_matrices(name, torch.bfloat16, torch.float32) == {torch.float32}
    assert of_matrices(name, torch.float32, torch.bfloat16) == {torch.float32}
