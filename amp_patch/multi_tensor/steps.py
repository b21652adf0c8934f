"""Optimizer steps for mixed precision: unscaling, moments, FP32 master and low-precision weight in one pass.

torch takes five passes (cast and unscale the gradients, step, cast the masters). Each of these kernels takes one, over
all tensors of the call. All lists have one length. The tensors at one index have one shape and one memory order: the
same strides, dense and without overlap (contiguous, channels_last or transposed alike). Other tensors are refused
before the first write, so that the caller can fall back to another implementation.

On the CPU, with the extension, results equal torch's fused kernels (``torch._fused_adamw_`` and similar, as compiled
into the wheels of torch 2.13 for x86-64) on FP32 tensors, to the bit. On CUDA and in plain torch they are within
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
_VALUES, _CODES = TensorList("values", FP32), TensorList("codes", CODES)
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
    starts: Sequence[int] = (),
    scales: Sequence[Tensors] = (),
) -> None:
    """One step of Adam (Kingma and Ba, arXiv:1412.6980), or of AdamW (arXiv:1711.05101) if ``decoupled``::

        p = low where low != round(p)                        # the user edited the published weight
        g = grad * factors[0] * factors[1]                   # -g, to maximize
        p = p * (1 - lr * weight_decay)                      # if decoupled, else g = g + weight_decay * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g                  # with amsgrad: max_v = max(max_v, v), used below for v
        step = step + 1
        p = p - lr / (1 - beta1 ** step) * m / (sqrt(v) / sqrt(1 - beta2 ** step) + eps)
        low = round(p)

    Args:
        grads: float32, float16 or bfloat16, mixed as you like; only read.
        params: float32, the masters; or int16, the low halves of split masters, whose weights, bfloat16, are in ``low``
            (`multi_tensor_split`). Written in place, as are all lists below. Nothing is adopted from a split master's
            weight: it is a part of the master. Or bfloat16, weights without masters: p is the weight, and is rounded
            stochastically into it (`multi_tensor_stochastic_round`).
        exp_avgs, exp_avg_sqs: m and v, float32; or codes (`multi_tensor_encode`): int8 for m, uint8 for v.
        max_exp_avg_sqs: max_v, float32, for amsgrad; None or empty without it.
        steps: float32 tensors of one element, on the CPU or on the params' device, as in torch's ``state["step"]``: how
            many steps there were before this one. They may differ. Or one number for all tensors (a float, or a tensor
            of one element on the lists' device, float32 or float64), which is only read. May be None without
            ``bias_correction``.
        low: the published weights, float16 or bfloat16; None or empty where there are none.
        lr: a float, or a float32 or float64 tensor of one element on the lists' device, read there.
        bias_correction: divide m and v by the ``1 - beta ** step``.
        factors: up to two numbers like lr (float32 on the device) by which a gradient is multiplied, one after the
            other, each product rounded to FP32: the inverse loss scale, then the clipping coefficient.
        found_inf: a float32 tensor of one element on the lists' device. Where it is not 0 nothing changes, the steps
            neither. On CUDA it needs ``steps`` there.
        seed, draws, starts: of params that are bfloat16, as in `multi_tensor_stochastic_round`; there may be draws for
            others.
        scales: where m or v of some are codes, the list of their scales for m, and that for v; a tensor without
            elements beside what is float32.

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
            *(decoupled, maximize, bias_correction, seed, draws, starts),
        ),
    )


def multi_tensor_stochastic_round(
    masters: Tensors, weights: Tensors, seed: int, draws: Sequence[int], starts: Sequence[int] = ()
) -> None:
    """FP32 ``masters`` into BF16 ``weights``, in place: up or down by chance, in proportion to how near each is.

    So the mean of many roundings is the number. A number that BF16 has stays, a NaN or infinity too. Finite numbers
    beyond the largest of BF16 become that one.

    The chance comes from a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    2011) of the ``seed``, the tensor's number in ``draws``, and the element's place in memory. The same three give the
    same bits: on every device, with any number of threads, at every replay. So no two roundings of one tensor may have
    the same draw. A part of a tensor is rounded as in the whole one where ``starts`` has the place of its first element
    there; it is empty where all are whole.

    Both lists are as those of `multi_tensor_split`. ``seed`` and each of ``draws`` and ``starts`` are ints of 64 bits.
    """
    run(_STOCHASTIC_ROUND, plain_steps.stochastic_round, (masters, weights), (seed, draws, starts))


def multi_tensor_encode(values: Tensors, codes: Tensors, scales: Tensors) -> None:
    """FP32 ``values`` in eight bits each: into ``codes`` and ``scales``, which are written in place.

    Codes of int8 are the bytes of `torch.float8_e4m3fn`, for numbers of both signs. Codes of uint8 are E5M3 without a
    sign, for squares; a negative number becomes its magnitude. 256 consecutive elements in memory share a float32
    scale, their largest magnitude; elements of that magnitude are exact. Every other element is rounded to one of the
    two nearest codes, chosen by its own lowest bits, so that rounding has no bias. A block of squares that is not all
    zero decodes to no zero: elements below 2^-32 of the largest are raised to that. If the largest is below 2^-94, all
    elements become the largest, which is then at least 2^-109. A block of momenta below 2^-109 becomes zeros. A block
    with a NaN, an infinity or a number from 2^126 on becomes NaN.

    ``scales`` has for each tensor one of shape [ceil(elements / 256)]. Tensors of values and codes at a place have one
    shape and one memory order, as for `multi_tensor_adam`, whose errors this raises. Encoding what
    `multi_tensor_decode` returned gives the same codes and scales. Nothing syncs with the device.
    """
    run(_ENCODE, plain_codes.encode, (values, codes, scales), ())


def multi_tensor_decode(codes: Tensors, values: Tensors, scales: Tensors) -> None:
    """The FP32 ``values`` of codes and scales that `multi_tensor_encode` made; written in place."""
    run(_DECODE, plain_codes.decode, (codes, values, scales), ())


def multi_tensor_split(masters: Tensors, weights: Tensors, halves: Tensors) -> None:
    """FP32 ``masters`` into BF16 ``weights`` and int16 ``halves``, the low 16 bits; both are written in place.

    A weight is the master's high 16 bits, one more where the low half is negative: so the master is rounded to the
    nearest, ties away from zero (as torch's cast, but for exact ties). `multi_tensor_join` gives the master back: every
    number and infinity to the bit. A NaN becomes the one NaN whose half is 0.

    The tensors at a place have one shape and one memory order, as for `multi_tensor_adam`, whose errors this raises.
    """
    run(_SPLIT, plain_steps.split, (masters, weights, halves), ())


def multi_tensor_join(weights: Tensors, halves: Tensors, masters: Tensors) -> None:
    """The FP32 ``masters`` of `multi_tensor_split`, written in place.

    A weight that a user wrote is the master's high half: the master is within a unit in the last place of it. Where
    its old low half would make a NaN of a zero or an infinity, that half is ignored; a NaN stays a NaN. An infinity
    beside a negative half is the finite master that rounds to it.
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
    starts: Sequence[int] = (),
    scales: Sequence[Tensors] = (),
) -> None:
    """One step of SGD as torch.optim.SGD has it::

        p = low where low != round(p)                        # the user edited the published weight
        g = grad * factors[0] * factors[1]                   # -g, to maximize
        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g               # b = g on the first run
        g = g + momentum * b if nesterov else b              # where momentum is not 0
        p = p - lr * g
        low = round(p)

    ``momentum_buffers`` (b, float32, or codes of int8, the list of whose scales is the one of ``scales``) is None or
    empty if and only if ``momentum`` is 0. With ``first_run`` nothing is read from it. All else is as in
    ``multi_tensor_adam``.
    """
    buffers = () if momentum_buffers is None else momentum_buffers
    if momentum == 0 and len(buffers):
        raise ValueError("multi_tensor_sgd: momentum is 0, but there are momentum_buffers: hand over None")
    run(
        _SGD if momentum != 0 else _SGD_WITHOUT_MOMENTUM,
        plain_steps.sgd,
        (grads, params, buffers, () if low is None else low, *(scales or ((),))),
        (lr, factors, found_inf, momentum, dampening, weight_decay, nesterov, maximize, first_run, seed, draws, starts),
    )
