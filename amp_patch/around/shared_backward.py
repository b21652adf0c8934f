"""The context manager of `scale_loss` for trainings with several optimizers, or with parameters in no optimizer.

During a body it sets aside the gradients of parameters that are not the body's, so that backward cannot add to them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from amp_patch.masters import gradients
from amp_patch.masters.grad_field import drop_gradients, with_gradient
from amp_patch.masters.held_gradients import DirectGradients
from amp_patch.masters.of_optimizer import GroupParams
from amp_patch.masters.record import Record
from amp_patch.model import forward as model_forward
from amp_patch.support import distributed
from amp_patch.support.blocks import without_grad
from amp_patch.training.scaled_backward import ScaledBackward
from amp_patch.training.stash import Stash, known_stash, sharing, siblings, stash_of
from amp_patch.training.unscale import unscale_pending


class _Bystander(NamedTuple):
    """A parameter of the training that belongs to no optimizer of this call, while its gradient is set aside.

    Attributes:
        aside: the gradient that was set aside, or None.
        stash: the stash of the parameter's optimizer, or None if it has no optimizer.
        bodies: the number of `scale_loss` bodies of that optimizer when the gradient was set aside.
        cleared: the number of `zero_grad` calls of that optimizer when the gradient was set aside.
    """

    param: Tensor
    aside: gradients.Aside | None
    stash: Stash | None
    bodies: int
    cleared: int


class SharedBackward(ScaledBackward):
    """A scaled backward in a training that has further optimizers, or parameters without an optimizer.

    Attributes:
        bystanders: the training's other parameters, whose gradients are set aside until the exit.
        siblings: the training's other optimizers, with their stashes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bystanders: list[_Bystander] = []
        self.siblings: list[tuple[Any, Stash]] = []
        self._direct: list[tuple[Stash, DirectGradients]] = []  # of the siblings' masters

    def prepare(self) -> None:
        """Prepare as `ScaledBackward` does, for a call of `scale_loss` in a training with other optimizers.

        Also raise if this call is in the body of another `scale_loss` that checks gradients, and that body's backward
        has left scaled gradients on parameters of this call's optimizers. If an optimizer outside this call shares
        parameters with an optimizer of this call, and a delayed exit has left its gradients scaled, unscale them now;
        raise if `no_sync()` or fully_shard holds them back.
        """
        super().prepare()
        both = list(zip(self.optimizers, self.stashes, strict=True))
        own = {stash.neighbours for stash in self.stashes}
        if any(stash.neighbours.checking_body() and _is_reached(optimizer) for optimizer, stash in both):
            raise RuntimeError(
                "scale_loss: called in the body of another scale_loss whose scaled backward has already reached "
                "parameters of this call's optimizers; end that body first, or call zero_grad() on them"
            )
        for optimizer, stash in both:
            left = [known.pending for _, known in sharing(stash) if known.pending and known.neighbours not in own]
            if any(pending.local or pending.held_back for pending in left):
                raise RuntimeError(
                    "scale_loss: optimizers that share parameters with this call's wait for gradients of theirs, which "
                    "no_sync() or fully_shard holds back, to be reduced with later ones; give those optimizers too"
                )
            if left:
                unscale_pending(optimizer)

    def claim_other_gradients(self) -> None:
        """Notify the training's other optimizers that they cannot step in this body, and set gradients aside.

        If this body checks gradients, the gradients of all parameters that another optimizer or no optimizer holds are
        set aside until `release_other_gradients`. If a parameter has a master, its gradient is on the master already,
        and is not set aside, unless it is a scaled gradient that a delayed exit has left on the parameter.
        """
        if not self.checking and not any(stash.policy.master_weights for stash in self.stashes):
            return
        for stash in self.stashes:  # if this body is inside of another one
            stash.masters.end_direct()
        known = {stash.neighbours: (other, stash) for own in self.stashes for other, stash in siblings(own)}
        for own in self.stashes:
            known.pop(own.neighbours, None)
        self.siblings = list(known.values())
        for _, stash in self.siblings:
            stash.neighbours.other_bodies.append(weakref.ref(self))
        if self.checking:
            model_forward.bodies.add(self)
            self._set_bystanders_aside()

    def _set_bystanders_aside(self) -> None:
        held = [stash.masters.known(o.param_groups) for o, stash in zip(self.optimizers, self.stashes, strict=True)]
        known = {param for each in held for param in each.params}
        linked = {record for each in held for record in each.linked}
        for other, stash in self.siblings:
            self._set_masters_aside(stash, linked)
            for param, master in stash.masters.of_groups(other.param_groups).pairs:
                if param not in known:
                    known.add(param)
                    if stash.neighbours.body() is None and (param is master or stash.pending is not None):
                        self._set_aside(param, stash)
        for param in self.stashes[0].neighbours.siblings.unowned:
            if param not in known:
                known.add(param)
                self._set_aside(param, None)

    def _set_masters_aside(self, stash: Stash, known: set[Record]) -> None:
        records = [record for record in stash.masters.links.records if record not in known]
        known.update(records)
        free = stash.neighbours.body() is None and stash.masters.direct is None
        if records and free and self.inverse is not None:
            note = functools.partial(self._note_found, stash)
            stash.masters.direct = direct = DirectGradients(stash.masters.waiting, records, self.inverse, note)
            self._direct.append((stash, direct))

    def _note_found(self, stash: Stash, found: gradients.FoundInf) -> None:
        for found_inf in found.values():
            stash.note_found(self.scaler, found_inf.to(self.scale.device))

    def _set_aside(self, param: Tensor, stash: Stash | None) -> None:
        before = (0, 0) if stash is None else (stash.bodies, stash.masters.cleared)
        self.bystanders.append(_Bystander(param, gradients.take(param), stash, *before))

    def release_other_gradients(self) -> None:
        """Restore the gradients of the bystanders, and add the unscaled gradients of this backward."""
        for other, known in self.siblings:
            bodies = [ref for ref in known.neighbours.other_bodies if (body := ref()) is not None and body is not self]
            known.neighbours.other_bodies = bodies
            if stash_of(other) is known:
                self._drop_strays(other, known)
        for stash, direct in self._direct:
            if stash.masters.direct is direct:  # else a step or a body of the sibling has ended it
                stash.masters.end_direct()
        while self.bystanders:
            owner = self.bystanders[-1].stash
            self._bring_back([bystander for bystander in self.bystanders if bystander.stash is owner])
            self.bystanders = [bystander for bystander in self.bystanders if bystander.stash is not owner]

    def _drop_strays(self, other: Any, stash: Stash) -> None:
        """Drop the scaled gradients that this backward has left on cast parameters of a sibling; no step uses them.

        Without this, clipping or logging over all parameters of the models would include these gradients. If the
        sibling has a running body, or a delayed exit has left its gradients scaled, do nothing: a step of the sibling
        uses them.
        """
        if stash.neighbours.body() is not None or stash.pending is not None:
            return
        known = stash.masters.known(other.param_groups)
        if stray := with_gradient(known.low):
            own = {record for part in self.parts for record in part.linked}
            stray = [index for index in stray if known.linked[index] not in own]
            stash.masters.strays += [known.linked[index] for index in stray]
            drop_gradients([known.low[index] for index in stray])

    def _bring_back(self, group: list[_Bystander]) -> None:
        """Unscale the gradients that this backward has added to the bystanders of one optimizer, or of no optimizer.

        Then add the gradients that were set aside, unless the optimizer's `zero_grad` was called in the body. If the
        optimizer has scaled gradients of a delayed exit, the added gradients are dropped instead of unscaled.
        """
        params, (owner, bodies, cleared) = [bystander.param for bystander in group], group[0][2:]
        if owner is not None and owner.pending is not None:
            for param in params:
                param.grad = None
        added = [param for param in params if param.grad is not None]
        uncleared = owner is None or owner.masters.cleared == cleared
        kept = {b.param: b.aside for b in group if b.aside and uncleared}
        # If the owner has begun a body inside this one, that body has already unscaled the added gradients.
        own = owner is not None and owner.bodies != bodies
        inverse = None if own else self.inverse
        try:
            if owner is None:
                _clear_not_finite(aside.value for aside in kept.values())
            found = gradients.gather([(param, param) for param in params], inverse, aside=kept)
            if owner is None:
                gradients.clear_overflowed(params, found)  # no step clears these gradients
            elif added and not own:
                self._note_found(owner, distributed.agree(found, added))
        except BaseException:  # gradients may still be scaled, or have overflowed: drop them
            for param in params:
                param.grad = None
            raise

    def forget_taken(self, params: set[Tensor]) -> None:
        super().forget_taken(params)
        self.bystanders = [b._replace(aside=None) if b.param in params else b for b in self.bystanders]

    def find_parts(self) -> None:
        """Set `parts` for several optimizers.

        If one of two optimizers that hold a parameter has scaled gradients of a delayed exit, the parameter is in the
        part of that optimizer.
        """
        if len(self.optimizers) == 1:
            super().find_parts()
            return
        held = [stash.masters.known(o.param_groups) for o, stash in zip(self.optimizers, self.stashes, strict=True)]
        seen: set[Tensor] = set()
        parts = dict[int, GroupParams]()
        for index in sorted(range(len(held)), key=lambda index: self.stashes[index].pending is None):
            parts[index] = held[index].without(seen)
            seen.update(held[index].params)
        self.parts = [part for _, part in sorted(parts.items())]
        self.params = [param for part in self.parts for param in part.distinct_params]


@without_grad
def _clear_not_finite(grads: Iterable[Tensor]) -> None:
    """Fill each gradient that has an inf or NaN with 0, in place; no sync.

    `grads` belong to unowned parameters, so no step skips or clears them. Without this, clipping them together with
    gradients of optimizers would multiply all gradients by NaN.
    """
    for grad in map(gradients.held, grads):
        grad.masked_fill_(~grad.isfinite().all(), 0)


def _is_reached(optimizer: Any) -> bool:
    """Tell whether an outer body's backward has left scaled gradients on parameters of `optimizer`.

    The outer body has set all earlier gradients aside, so any gradient found here is its own.
    """
    stash = known_stash(optimizer)
    known = stash.masters.known(optimizer.param_groups)
    return bool(with_gradient(known.params if stash.pending is not None else [param for param, _ in known.own]))
