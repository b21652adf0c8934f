"""Lists of callbacks through which optional features extend every training; `amp_patch/guests.py` fills them.

The core calls the registered functions in order, and imports no feature. In a training with one optimizer, the steps
after the first ones read none of these lists except `forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from amp_patch.masters.closed_master import Form
from amp_patch.policy import Policy


class Optimizer(Protocol):
    """The optimizer of a training, inside of all wrappers: one of torch.optim, or an object with these attributes."""

    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def step(self) -> Callable[..., Any]: ...


# Options --------------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """An argument of `initialize` that belongs to a feature.

    Attributes:
        name: of the argument.
        check: receives (value, models, optimizers, the innermost of each, policy). Raises before `initialize` changes
            anything, or returns what `enter` receives.
        enter: receives (innermost optimizers, result of `check`), after these have entered their training.
    """

    name: str
    check: Callable[[Any, list[nn.Module], list[Any], list[Any], Policy], Any]
    enter: Callable[[list[Any], Any], None]


options: list[Option] = []

# Forms of storage -----------------------------------------------------------------------------------------------------

# A value of Policy.master_weights -> a function that receives `LossScaler.beside`, and returns the compressed form of
# the masters, or None for plain FP32.
forms: dict[Any, Callable[[dict[str, Any]], Form | None]] = {}
# Each function receives a policy, and returns {name in the state dict: object}: the objects whose state is saved with
# the first loss scale of a training of that policy.
beside_scale: list[Callable[[Policy], dict[str, Any]]] = []
# Each function receives the class of an optimizer whose state is stored in the form of Policy.optimizer_state, and
# returns methods for its generated class.
of_state: list[Callable[[Any], dict[str, Any]]] = []

# Ways to step ---------------------------------------------------------------------------------------------------------


class Strategy:
    """A way to make the steps of a class of optimizers.

    Attributes:
        waits: whether the strategy takes deferred gradients, so that no FP32 ones are made before the step. If so,
            `suits` is called only for optimizers whose gradients may be deferred.
    """

    waits = True

    def suits_class(self, base: Any) -> bool:
        """Tell whether optimizers of the class `base` have this strategy by default."""
        return False

    def knows(self, optimizer: Optimizer, stash: Any) -> bool:
        """Tell whether the strategy takes deferred gradients at the optimizer's present settings; if not, log why."""
        return False

    def drop(self) -> None:
        """Forget what the strategy has noted in a body of `scale_loss` that an exception has ended."""

    def suits(self, optimizer: Optimizer, stash: Any, given: bool) -> bool:
        """Tell whether the strategy can make the coming step; if not, log why. `given`: as in `Step` (step.py)."""
        raise NotImplementedError

    def run(self, step: Any, plain: Callable[..., Any]) -> Any:
        """Make the step and return its result; no sync with the device.

        The strategy first syncs weights and masters that user code has edited. If it leaves masters that are not
        rounded into their weights, it stores them in `step.unpublished`.
        """
        raise NotImplementedError


ways: list[Strategy] = []  # an optimizer gets the first that suits its class

# Surroundings ---------------------------------------------------------------------------------------------------------

# Each function receives (models, policy, modules that stay FP32, the parameters whose dtype will change,
# process_group). If a feature cannot work with these models, the function raises before `initialize` changes anything.
check_models: list[Callable[[list[nn.Module], Policy, list[nn.Module], set[Tensor], Any], None]] = []
enter_models: list[Callable[[Any, list[nn.Module], list[Any]], None]] = []  # (training, models, targets), at the end
retyped: list[Callable[[Collection[Tensor]], None]] = []  # the parameters whose dtype has changed
unpickled: list[Callable[[], None]] = []  # masters were unpickled or copied, maybe into another process
regrouped: list[Callable[[Any], None]] = []  # masters were put into an optimizer's groups, or taken out
wrapped: list[Callable[[Any], None]] = []  # (optimizer): `initialize` or `scale_loss` was given it, maybe a wrapper
# One class: the subclass of `ScaledBackward` for trainings with several optimizers, or with parameters in no optimizer.
shared_backward: list[Any] = []
captured: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), at the start of a step that a CUDA graph captures

# Moments at which a training may have a mistake; a steady iteration has none of them ----------------------------------

first_loss: list[Callable[[Tensor], None]] = []  # the loss of the optimizer's first `scale_loss`, before it is scaled
first_body: list[Callable[[Any, Tensor], None]] = []  # (body, scaled loss) of the optimizers' first body
dropped: list[Callable[[Any, list[Tensor]], None]] = []  # (stash, parameters): their gradients are about to be dropped
body_left: list[Callable[[Any], None]] = []  # a first body ends, or one that has not used the scaled loss
nothing_unscaled: list[Callable[[Any], None]] = []  # a body has made no gradient for its first optimizer
doubtful_step: list[Callable[[Any, Any, Any], None]] = []  # (optimizer, stash, links): no body, or gradients left
no_body: list[Callable[[Any, Any], None]] = []  # (optimizer, stash) of a step whose gradients came through no body

# Moments of an optimizer ----------------------------------------------------------------------------------------------

check_optimizer: list[Callable[[Any, Policy], None]] = []  # (optimizer, policy): raise before any change
check_group: list[Callable[[Any, Any, list[Tensor]], None]] = []  # (optimizer, stash, params) of `add_param_group`
group_gets_masters: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), in `add_param_group`
group_added: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), at the end of `add_param_group`
enter_optimizer: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), new in a training, copied or loaded
leave_optimizer: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), before its masters are detached


def tell(listeners: list[Callable[..., None]], *args: Any) -> None:
    """Call each function of `listeners`, one of the lists of this file, with `args`."""
    for listener in listeners:
        listener(*args)
