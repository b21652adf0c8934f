"""Which registered classes step a part of a parameter as the same part of the whole, found out on small parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from in_portions import Each
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.ways.trial_of_parts import reason_against_parts

pytestmark = pytest.mark.usefixtures("registrations")

OTHERWISE = "it steps a part of a parameter differently from the same part within the whole"


def tried(
    direction: Any, shapes: Sequence[tuple[int, ...]] = ((200, 150), (5000,), (16, 8, 3, 3)), **settings: Any
) -> Any:
    """What is said of a class that moves each parameter along `direction(state, param)`."""

    class Tried(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            return direction(self.state[param], param)

    amp.register_per_parameter_optimizer(Tried)
    return reason_against_parts(Tried([nn.Parameter(torch.ones(shape)) for shape in shapes], **settings))


# ----------------------------------------------------------------------------------------------------------------------
# That step each element by itself


def lion(state: Any, param: Tensor) -> Tensor:
    average = state.setdefault("exp_avg", torch.zeros_like(param))
    update = average.lerp(param.grad, 0.1).sign_()
    average.lerp_(param.grad, 0.01)
    return update


def adam(state: Any, param: Tensor) -> Tensor:
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        state.setdefault(name, torch.zeros_like(param))
    state["step"] = state.get("step", torch.tensor(0.0)) + 1
    state["exp_avg"].lerp_(param.grad, 0.1)
    state["exp_avg_sq"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
    torch.maximum(state["max_exp_avg_sq"], state["exp_avg_sq"], out=state["max_exp_avg_sq"])
    return state["exp_avg"] / (state["max_exp_avg_sq"].sqrt() / math.sqrt(1 - 0.99 ** int(state["step"])) + 1e-8)


def average_of_weights(state: Any, param: Tensor) -> Tensor:
    return state.setdefault("z", param.clone()).lerp_(param, 0.5) - param.grad


def of_other_bits_in_a_tail(state: Any, param: Tensor) -> Tensor:
    """torch's loops round these otherwise for what is left of a vector."""
    scale = param.grad.abs().pow(0.37) + torch.sigmoid(param)
    return torch.atan2(state.setdefault("m", torch.zeros_like(param)).lerp_(param.grad, 0.1), scale)


def clipped_by_element(state: Any, param: Tensor) -> Tensor:
    return param.grad.clamp(-1.0, 1.0) * (param.grad * param > 0)


def refuses_infinities(state: Any, param: Tensor) -> Tensor:
    if not param.grad.isfinite().all():
        raise ArithmeticError("not finite")
    return param.grad


def buffered(state: Any, param: Tensor) -> Tensor:
    state.setdefault("buffer", [[None, 1.0], {"seen": 0}])[1]["seen"] += 1
    return param.grad


GOOD = [lion, adam, average_of_weights, of_other_bits_in_a_tail, clipped_by_element, refuses_infinities, buffered]


@pytest.mark.parametrize("direction", GOOD)
def test_one_that_steps_each_element_by_itself_is_taken(direction):
    assert tried(direction) is None


# ----------------------------------------------------------------------------------------------------------------------
# That look at more than an element, each in a way that is not seen everywhere


def norm_clamped_above(state: Any, param: Tensor) -> Tensor:
    """LAMB's ratio."""
    return param.grad * (param.norm().clamp(0, 10) / (param.grad.norm() + 1e-6)).clamp(0.01, 10)


def clips_large_norms(state: Any, param: Tensor) -> Tensor:
    return param.grad / (param.grad.norm() / 1e4).clamp(min=1)


def divides_by_tiny_norms(state: Any, param: Tensor) -> Tensor:
    return param.grad / param.grad.norm().clamp(1e-12, 1e-6)


def norm_in_powers_of_two(state: Any, param: Tensor) -> Tensor:
    return param.grad * 2.0 ** param.grad.norm().log2().round()


def halves_large_gradients(state: Any, param: Tensor) -> Tensor:
    """By their mean, which is the same for all parts of gradients that are alike."""
    finite = param.grad[param.grad.isfinite()]
    return param.grad / 2 if finite.square().mean() > 2e12 else param.grad


def norm_at_each_twentieth_step(state: Any, param: Tensor) -> Tensor:
    state["step"] = state.get("step", 0) + 1
    return param.grad / param.grad.norm() if state["step"] % 20 == 0 else param.grad


def largest(state: Any, param: Tensor) -> Tensor:
    return param.grad / param.grad.abs().max().clamp(min=1.0)


def median(state: Any, param: Tensor) -> Tensor:
    return param.grad * (param.grad.abs() <= param.grad.abs().median())


def cautious(state: Any, param: Tensor) -> Tensor:
    mask = (lion(state, param) * param.grad > 0).to(param.dtype)
    return param.grad * mask / mask.mean().clamp(min=1e-3)


def factored_from_128(state: Any, param: Tensor) -> Tensor:
    if param.dim() < 2 or min(param.shape) < 128:
        return param.grad
    square = param.grad.square()
    return param.grad / (square.mean(0, keepdim=True) * square.mean(1, keepdim=True)).sqrt().sqrt().clamp(min=1e-9)


def of_4096_in_blocks(state: Any, param: Tensor) -> Tensor:
    if param.numel() < 4096:
        return param.grad
    blocks = param.grad.flatten().split(256)
    return torch.cat([block / (block.abs().max() + 1e-9) for block in blocks]).view_as(param)


def matrices_by_rows(state: Any, param: Tensor) -> Tensor:
    return param.grad / param.grad.abs().amax(1, keepdim=True).clamp(min=1e-9) if param.dim() == 2 else param.grad


def matrices_by_columns(state: Any, param: Tensor) -> Tensor:
    return param.grad / param.grad.abs().amax(0, keepdim=True).clamp(min=1e-9) if param.dim() == 2 else param.grad


def kernels(state: Any, param: Tensor) -> Tensor:
    """The mean over what a convolution has behind rows and columns."""
    return param.grad - param.grad.mean((2, 3), keepdim=True) if param.dim() == 4 else param.grad


def vectors(state: Any, param: Tensor) -> Tensor:
    return param.grad / param.grad.norm() if param.dim() == 1 else param.grad


def vectors_by_little(state: Any, param: Tensor) -> Tensor:
    return param.grad * (1 + 1e-13 * param.grad.norm().tanh()) if param.dim() == 1 else param.grad


def products(state: Any, param: Tensor) -> Tensor:
    return param.grad @ param.grad.T @ param.grad if param.dim() == 2 else param.grad


def by_fan_out(state: Any, param: Tensor) -> Tensor:
    return param.grad / param.shape[0]


def taller_than_wide(state: Any, param: Tensor) -> Tensor:
    return param.grad * max(1.0, param.shape[0] / param.numel() * param.shape[0]) ** 0.5


def one_row_as_a_vector(state: Any, param: Tensor) -> Tensor:
    return param.grad if param.squeeze().dim() == param.dim() else param.grad.sign()


def one_element_by_itself(state: Any, param: Tensor) -> Tensor:
    return param.grad.sign() if param.numel() == 1 else param.grad


def every_other_element(state: Any, param: Tensor) -> Tensor:
    grad = param.grad.clone()
    grad.view(-1)[::2] = 0
    return grad


def skips_zeros(state: Any, param: Tensor) -> Tensor:
    """Of its decay, where all gradients are zero."""
    return param.grad + 0.1 * param if param.grad.any() else param.grad


def skips_infinities(state: Any, param: Tensor) -> Tensor:
    return param.grad if param.grad.isfinite().all() else torch.zeros_like(param)


def mean_in_a_tensor_of_its_state(state: Any, param: Tensor) -> Tensor:
    """As the next, in a tensor of the parameter's shape."""
    state["mean"] = torch.full_like(param, float(param.grad.mean()))
    return param.grad


def other_state_of_one_column(state: Any, param: Tensor) -> Tensor:
    if param.dim() == 2 and param.shape[1] == 1:
        state["few"] = True
    return param.grad


def norm_in_its_state(state: Any, param: Tensor) -> Tensor:
    """That the step takes only later."""
    state["norm"] = param.grad.norm()
    return param.grad


NASTY = [
    norm_clamped_above,
    clips_large_norms,
    divides_by_tiny_norms,
    norm_in_powers_of_two,
    halves_large_gradients,
    norm_at_each_twentieth_step,
    largest,
    median,
    cautious,
    factored_from_128,
    of_4096_in_blocks,
    matrices_by_rows,
    matrices_by_columns,
    kernels,
    vectors,
    vectors_by_little,
    products,
    by_fan_out,
    taller_than_wide,
    one_row_as_a_vector,
    one_element_by_itself,
    every_other_element,
    skips_zeros,
    skips_infinities,
    mean_in_a_tensor_of_its_state,
    other_state_of_one_column,
    norm_in_its_state,
]


@pytest.mark.parametrize("direction", NASTY)
def test_one_that_looks_at_more_than_an_element_is_refused(direction):
    assert str(tried(direction)).startswith(OTHERWISE)


def test_what_it_does_to_kinds_that_the_user_has_none_of_does_not_count():
    assert tried(matrices_by_rows, [(50,)]) is None and tried(vectors, [(8, 8)]) is None
    assert tried(factored_from_128, [(127, 300)]) is None and tried(factored_from_128, [(128, 300)]) is not None
    assert tried(lion, [(1,), (2, 1), (1, 1, 1)]) is None, "smaller than the toys"


def test_a_setting_that_makes_it_step_each_element_by_itself_counts():
    class Scaled(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            return param.grad / param.grad.norm() if group["scaled"] else param.grad

    amp.register_per_parameter_optimizer(Scaled)
    groups = [{"params": [nn.Parameter(torch.ones(shape))], "scaled": False} for shape in ((4, 4), (5, 4))]
    assert reason_against_parts(Scaled(groups, scaled=True)) is None
    groups[1]["scaled"] = True
    assert str(reason_against_parts(Scaled(groups))).startswith(OTHERWISE)


def test_of_groups_that_are_alike_one_is_tried():
    seen: set[float] = set()

    class Decayed(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            seen.add(group["lr"])
            return param.grad / param.grad.norm() if group["weight_decay"] else param.grad

    amp.register_per_parameter_optimizer(Decayed)
    groups = [{"params": [nn.Parameter(torch.ones(4, 4))], "lr": lr} for lr in (0.1, 0.2, 0.3)]
    assert reason_against_parts(Decayed(groups, weight_decay=0.0)) is None and seen == {0.1}
    groups[2]["weight_decay"] = 0.1
    assert str(reason_against_parts(Decayed(groups, weight_decay=0.0))).startswith(OTHERWISE)


@pytest.mark.parametrize(
    "value",
    [
        lambda param: torch.ones(1),
        lambda param: torch.ones(param.shape[1:] if param.dim() > 1 else (3,)),
        lambda param: [torch.zeros_like(param)],
        lambda param: {"m": (torch.zeros_like(param),)},
    ],
    ids=["one element", "a column", "list", "dict"],
)
def test_state_of_which_nobody_could_say_whose_it_is_is_refused(value):
    def direction(state: Any, param: Tensor) -> Tensor:
        state.setdefault("m", value(param))
        return param.grad

    assert tried(direction) == "its state 'm' is neither a number nor a tensor of its parameter's shape"


def test_one_that_fails_for_parts_is_refused_with_what_it_said():
    def of_none(state: Any, param: Tensor) -> Tensor:
        param.grad.amax()
        return param.grad

    def of_one(state: Any, param: Tensor) -> Tensor:
        if 1 in param.shape:
            raise ArithmeticError("one row")
        return param.grad

    assert str(tried(of_none)).startswith("its step of a part without elements fails (")
    assert tried(of_one, [(8, 8)]) == "its step of a part of a parameter fails (ArithmeticError: one row)"


def test_numbers_that_are_kept_elsewhere_are_compared_too():
    class Sized(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            group["smallest"] = min(param.numel(), group.get("smallest", math.inf))
            return param.grad

    amp.register_per_parameter_optimizer(Sized)
    assert str(reason_against_parts(Sized([nn.Parameter(torch.ones(8, 8))]))).startswith(OTHERWISE)


def test_the_trial_leaves_the_optimizer_and_torchs_generator_alone():
    class Drawing(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            return torch.rand_like(param)

    amp.register_per_parameter_optimizer(Drawing)
    optimizer = Drawing([weight := nn.Parameter(torch.ones(8, 8))])
    before = torch.get_rng_state()
    assert str(reason_against_parts(optimizer)).startswith(OTHERWISE)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state and weight.grad is None and bool((weight == 1).all())
