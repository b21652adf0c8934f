"""Kernels that make a whole optimizer step in one pass: unscaling, moments, FP32 masters and low-precision weights.

With torch's functions a step takes several passes over memory: cast the gradients, unscale and check them, step, cast
the masters.

The lists of tensors in one call are equally long. The tensors at the same index have the same shape and strides, dense
and without overlap (contiguous, channels_last or transposed). Other tensors are refused before the first write, so that
the caller can use another implementation instead.

On the CPU, with the extension, results have the bits of torch's fused kernels on FP32 tensors (``torch._fused_adamw_``
and similar, as compiled into the wheels of torch 2.13 for x86-64). On CUDA and in plain torch they may differ by
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from amp_patch.multi_tensor import plain_codes, plain_steps
from amp_patch.multi_tensor.backends import run
from amp_patch.multi_tensor.checks import (
    BF16,
    CODES,
    FP32,
    INT16,
    LOW,
    SIGNED,
    UNSIGNED,
    Argument,
    Contract,
    Number,
    TensorList,
    Tensors,
    floats,
    number,
)

_state = partial(TensorList, dtypes=FP32, written=True)
_GRADS = TensorList("grads", (*FP32, *LOW))
_PARAMS = TensorList("params", (*FP32, *INT16, *BF16), written=True, weights="low")
_LOW = TensorList("low", LOW, written=True, optional=True)
_BUFFERS = _state("momentum_buffers", dtypes=(*FP32, *SIGNED))
_AVERAGES = (
    _state("exp_avgs", dtypes=(*FP32, *SIGNED)),
    _state("exp_avg_sqs", dtypes=(*FP32, *UNSIGNED)),
    _state("max_exp_avg_sqs", optional=True),
)
_SCALES = partial(TensorList, "scales", FP32, written=True, optional=True)
_FACTORS, _FOUND_INF = number("factors", several=True), Argument("found_inf", FP32, optional=True)

_ADAM = Contract(
    "multi_tensor_adam",
    (
        *(_GRADS, _PARAMS, *_AVERAGES, _state("steps", optional=True, is_counts=True), _LOW),
        *(_SCALES(scales_of=name) for name in ("exp_avgs", "exp_avg_sqs")),
    ),
    (number("lr"), number("steps"), _FACTORS, _FOUND_INF, *floats("beta1", "beta2", "eps", "weight_decay")),
    lead=1,
    dense=True,
    rounds=True,
)
_SGD = Contract(
    "multi_tensor_sgd",
    (_GRADS, _PARAMS, _BUFFERS, _LOW, _SCALES(scales_of="momentum_buffers")),
    (number("lr"), _FACTORS, _FOUND_INF, *floats("momentum", "dampening", "weight_decay")),
    lead=1,
    dense=True,
    rounds=True,
)
_SGD_WITHOUT_MOMENTUM = replace(_SGD, lists=(_GRADS, _PARAMS, replace(_BUFFERS, optional=True), *_SGD.lists[3:]))
_MASTERS, _WEIGHTS, _HALVES = TensorList("masters", FP32), TensorList("weights", BF16), TensorList("halves", INT16)
_SPLIT = Contract(
    "multi_tensor_split", (_MASTERS, replace(_WEIGHTS, written=True), replace(_HALVES, written=True)), dense=True
)
_JOIN = Contract("multi_tensor_join", (_WEIGHTS, _HALVES, replace(_MASTERS, written=True)), lead=2, dense=True)
_STOCHASTIC_ROUND = Contract(
    "multi_tensor_stochastic_round", (_MASTERS, replace(_WEIGHTS, written=True)), lead=1, dense=True, rounds=True
)
_VALUES, _CODES = TensorList("values", (*FP32, *LOW)), TensorList("codes", CODES)
_OF_CODES = TensorList("scales", FP32, scales_of="codes")
_ENCODE = Contract(
    "multi_tensor_encode",
    (_VALUES, replace(_CODES, written=True), replace(_OF_CODES, written=True)),
    lead=1,
    dense=True,
)
_DECODE = Contract("multi_tensor_decode", (_CODES, replace(_VALUES, written=True), _OF_CODES), dense=True)


def multi_tensor_adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors | None,
    steps: Tensors | Number | None,
    low: Tensors | None = None,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    bias_correction: bool = True,
    factors: Sequence[Number] = (),
    found_inf: Tensor | None = None,
    seed: int = 0,
    draws: Sequence[int] = (),
    scales: Sequence[Tensors] = (),
) -> None:
    """Make a step of Adam (Kingma and Ba, arXiv:1412.6980), or of AdamW (arXiv:1711.05101) if ``decoupled``::

        p = low where low != round(p)                        # the user edited the published weight
        g = grad * factors[0] * factors[1]                   # -g, to maximize
        p = p * (1 - lr * weight_decay)                      # if decoupled, else g = g + weight_decay * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g                  # with amsgrad: max_v = max(max_v, v), used below for v
        step = step + 1
        p = p - lr / (1 - beta1 ** step) * m / (sqrt(v) / sqrt(1 - beta2 ** step) + eps)
        low = round(p)

    Args:
        grads: the gradients, float32, float16 or bfloat16 in any mix; only read.
        params: tensors of three types, in any mix. float32: a master. int16: the low half of a split master, whose
            bfloat16 weight is in ``low`` (`multi_tensor_split`); the weight is a part of this master, so no edit of it
            is adopted. bfloat16: a weight without master, into which the new p is rounded stochastically
            (`multi_tensor_stochastic_round`). This list and all lists below are written in place.
        exp_avgs, exp_avg_sqs: m and v, float32; or codes (`multi_tensor_encode`), int8 for m and uint8 for v.
        max_exp_avg_sqs: max_v, float32, for amsgrad; None or empty without it.
        steps: the number of steps before this one. A list of float32 tensors of one element, on the CPU or on the
            params' device, as in torch's ``state["step"]``; the counts may differ. Or one number for all tensors (a
            float, or a float32 or float64 tensor of one element on the lists' device), which is only read. Without
            ``bias_correction`` it may be None.
        low: the weights of the masters, float16 or bfloat16; None or empty if there are none.
        lr: a float, or a float32 or float64 tensor of one element on the lists' device, read without a sync.
        bias_correction: divide m by ``1 - beta1 ** step``, and v by ``1 - beta2 ** step``.
        factors: up to two numbers like lr. Each gradient is multiplied by one after the other, usually the inverse loss
            scale and the clipping coefficient; each product is rounded to FP32.
        found_inf: a float32 tensor of one element on the lists' device. If it is not 0, nothing changes, ``steps``
            included. On CUDA it requires that ``steps`` are there.
        seed, draws: for bfloat16 params, as in `multi_tensor_stochastic_round`. Entries for other params are ignored.
        scales: if some of m or v are codes: (list of the scales of m, list of the scales of v). The entry for a float32
            tensor has no elements.

    Nothing syncs with the device.

    Raises:
        ValueError, TypeError: a tensor breaks this contract. Nothing was changed.
    """
    if steps is None and bias_correction:
        raise TypeError(
            "multi_tensor_adam: steps is None, which bias_correction=False allows; hand over the counts of steps"
        )
    counts, count = (steps, 0.0) if isinstance(steps, (list, tuple)) else ((), 0.0 if steps is None else steps)
    max_v = () if max_exp_avg_sqs is None else max_exp_avg_sqs
    run(
        _ADAM,
        plain_steps.adam,
        (grads, params, exp_avgs, exp_avg_sqs, max_v, counts, () if low is None else low, *(scales or ((), ()))),
        (
            *(lr, count, factors, found_inf, beta1, beta2, eps, weight_decay),
            *(decoupled, maximize, bias_correction, seed, draws),
        ),
    )


def multi_tensor_stochastic_round(masters: Tensors, weights: Tensors, seed: int, draws: Sequence[int]) -> None:
    """Round FP32 ``masters`` into BF16 ``weights``, in place, stochastically: up or down at random.

    The probabilities are such that the mean of many roundings is the exact number. A number that BF16 represents
    exactly, a NaN and an infinity do not change. Finite numbers beyond BF16's largest become the largest.

    The random bits are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of three
    numbers: ``seed``, the tensor's entry in ``draws``, and the element's index in memory. The same three numbers give
    the same bits on every device, with any number of threads and at every replay. So give each rounding of a tensor
    another draw.

    Both lists are like those of `multi_tensor_split`. ``seed`` and the entries of ``draws`` are ints of 64 bits.
    """
    run(_STOCHASTIC_ROUND, plain_steps.stochastic_round, (masters, weights), (seed, draws))


def multi_tensor_encode(values: Tensors, codes: Tensors, scales: Tensors) -> None:
    """Quantize ``values`` to eight bits each, into ``codes`` and ``scales``, which are written in place.

    The values are float32, float16 or bfloat16.

    int8 codes are for numbers of both signs, and have the format of `torch.float8_e4m3fn`. uint8 codes are for squares,
    and have the format E5M3 without a sign; a negative number becomes its magnitude. float8_e4m3fn codes are for
    activations: as int8 codes, but only 0 is rounded to 0, so that signs and zeros are exact. A block of 256 elements,
    consecutive in memory, shares a float32 scale, the largest magnitude in the block. Elements of that magnitude are
    exact. Every other element is rounded to one of the two nearest codes, chosen by the element's own lowest bits, so
    that rounding has no bias.

    If a square were rounded to zero, Adam would divide its momentum by eps alone. So in a block of squares that is not
    all zero, elements below 2^-32 of the largest become 2^-32 of it. If the largest is below 2^-94, all elements become
    the largest, which is raised to 2^-109 if it is below. A signed block whose largest magnitude is below 2^-109
    becomes zeros. A block with a NaN, an infinity or a magnitude of 2^126 or more becomes NaN; of activations only one
    with a NaN does, and magnitudes of 2^126 or more become infinite.

    ``scales`` has a tensor of shape [ceil(elements / 256)] for each tensor. The tensors of values and codes at one
    index have one shape and the same strides, as for `multi_tensor_adam`, whose errors this raises. Encoding the
    results of `multi_tensor_decode` gives the same codes and scales. Nothing syncs with the device.
    """
    run(_ENCODE, plain_codes.encode, (values, codes, scales), ())


def multi_tensor_decode(codes: Tensors, values: Tensors, scales: Tensors) -> None:
    """Dequantize the codes and scales of `multi_tensor_encode` into ``values`` of any of its types, in place."""
    run(_DECODE, plain_codes.decode, (codes, values, scales), ())


def multi_tensor_split(masters: Tensors, weights: Tensors, halves: Tensors) -> None:
    """Split FP32 ``masters`` into BF16 ``weights`` and int16 ``halves``, their low 16 bits; write both in place.

    A weight is the master's high 16 bits, plus one if the low half, read as an int16, is negative. So the weight is the
    master rounded to nearest, with ties away from zero (torch's cast differs only in exact ties). `multi_tensor_join`
    restores every number and infinity to the bit, except that numbers below 2^-134, whose weight is 0, become 0. A NaN
    becomes the NaN whose half is 0.

    The tensors at one index have one shape and the same strides, as for `multi_tensor_adam`, whose errors this raises.
    """
    run(_SPLIT, plain_steps.split, (masters, weights, halves), ())


def multi_tensor_join(weights: Tensors, halves: Tensors, masters: Tensors) -> None:
    """Join the results of `multi_tensor_split` into FP32 ``masters``, in place.

    If user code has written a weight, it becomes the master's high half, and the old low half stays: the master is
    within a unit in the last place of the weight. The low half is ignored if the weight is zero, or if the result would
    be a NaN. A weight of infinity with a negative half gives the finite master that rounds to infinity.
    """
    run(_JOIN, plain_steps.join, (weights, halves, masters), ())


def multi_tensor_sgd(
    grads: Tensors,
    params: Tensors,
    momentum_buffers: Tensors | None,
    low: Tensors | None = None,
    *,
    lr: Number,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool = False,
    first_run: bool = False,
    factors: Sequence[Number] = (),
    found_inf: Tensor | None = None,
    seed: int = 0,
    draws: Sequence[int] = (),
    scales: Sequence[Tensors] = (),
) -> None:
    """Make a step of SGD by the formulas of torch.optim.SGD::

        p = low where low != round(p)                        # the user edited the published weight
        g = grad * factors[0] * factors[1]                   # -g, to maximize
        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g               # b = g on the first run
        g = g + momentum * b if nesterov else b              # where momentum is not 0
        p = p - lr * g
        low = round(p)

    ``momentum_buffers`` are b: float32, or int8 codes. It is None or empty if and only if ``momentum`` is 0. With
    ``first_run`` it is only written. If some are codes, ``scales`` is (list of their scales,). All other arguments are
    as in ``multi_tensor_adam``.
    """
    buffers = () if momentum_buffers is None else momentum_buffers
    if momentum == 0 and len(buffers):
        raise ValueError("multi_tensor_sgd: momentum is 0, but there are momentum_buffers: hand over None")
    run(
        _SGD if momentum != 0 else _SGD_WITHOUT_MOMENTUM,
        plain_steps.sgd,
        (grads, params, buffers, () if low is None else low, *(scales or ((),))),
        (lr, factors, found_inf, momentum, dampening, weight_decay, nesterov, maximize, first_run, seed, draws),
    )
