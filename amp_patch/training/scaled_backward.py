"""The stages of one `scale_loss`: what happens to the gradients of a training before and after a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from amp_patch.masters import gradients
from amp_patch.masters.master import own_grad
from amp_patch.masters.of_optimizer import Pair
from amp_patch.masters.walks import drop_gradients, with_gradient
from amp_patch.model import forward as model_forward
from amp_patch.model import fsdp
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import distributed
from amp_patch.support.blocks import Block, when_left
from amp_patch.training import observers
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import (
    BackwardState,
    Pending,
    Stash,
    distinct_pairs,
    known_stash,
    sharing,
    siblings,
    stash_of,
)
from amp_patch.training.step import recover
from amp_patch.training.unscale import unscale, unscale_pending


class _Bystander(NamedTuple):
    """A parameter of the training that belongs to no optimizer of this call, while its gradient is taken away.

    Attributes:
        earlier: the gradient that was taken off it, if it had one.
        stash: of the optimizer that it belongs to, if any.
        bodies: how many bodies that optimizer had begun then.
        cleared: how often its `zero_grad` had been called then.
    """

    param: Tensor
    earlier: gradients.Earlier | None
    stash: Stash | None
    bodies: int
    cleared: int


class ScaledBackward(Block):
    """The stages of one `scale_loss`: in its `with` block `scaled`, the body, then `delay` or `finish`.

    Nothing here syncs with the device. An exception anywhere in the block, also at the entry of `__exit__`, abandons
    what the body did.

    Args:
        optimizers: those that take part, each once.
        scaler: of the loss.

    Attributes:
        now: how this body scales its gradients; an inner body may move the scaler before this one ends.
        checking: False where the loss is not multiplied and gradients are not checked either.
        bystanders: the training's other parameters, whose gradients are away.
        siblings: the training's other optimizers.
        models: the models of all these optimizers, each with how often it had cleared its gradients.
        had_grad: ids of the parameters that had a gradient when the body began; None before that.
        begun: whether there is something to close.
        done: whether `delay`, `finish` or `abandon` has dealt with the gradients of the body.
        failed: whether an exception has ended the body.
    """

    def __init__(self, optimizers: list[Any], scaler: LossScaler) -> None:
        self.optimizers = optimizers
        self.stashes = [known_stash(optimizer) for optimizer in optimizers]
        self.scaler = scaler
        self.now = Pending(scaler)
        self.scale, self.checking = self.now.scale, self.now.checking
        self.bystanders: list[_Bystander] = []
        self.siblings: list[Any] = []
        self.models: dict[int, tuple[nn.Module, int]] = {}
        self.had_grad: set[int] | None = None
        self.begun = self.done = self.failed = False
        self._announced = False  # whether observers wait for its end
        self._left: Any = None

    def __enter__(self) -> ScaledBackward:
        self._left = when_left(self, lambda _: self.close())
        self.begin()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    def begin(self) -> None:
        """Leave on the model only gradients that this backward may be added to.

        What a delayed exit left stays, rescaled if the scale has moved: a DDP must reduce the sum. Other gradients of
        parameters with masters come from somewhere else (a GAN's generator loss fills the discriminator's) and are
        dropped. Other gradients of parameters that are their own master were unscaled by an earlier exit. They are
        taken away, so that what this backward makes is checked by itself; `finish` adds the two.
        """
        self._announced = True
        observers.tell("body_begins", self)
        self._refuse_mixtures()
        self._unscale_shared()
        self.begun = True
        BackwardState.turns += 1
        if self.checking or any(stash.policy.master_weights for stash in self.stashes):
            self._tell_siblings()
        if self.checking:
            for stash in self.stashes:
                self._note_models(stash)
            self._set_bystanders_aside()
        for optimizer, stash in self._both():
            own = stash.backward
            own.open, own.scale, own.checking = True, self.scale, self.checking
            stash.route_grads()
            stash.masters.drop_spent()
            stash.backward.strays.clear()
            stash.bodies += 1
            recover(optimizer, stash)
        accumulating = []
        for stash, pairs, new in self._parts():
            if stash.pending is None:
                drop_gradients([param for param, master in new if param is not master])
                if not stash.masters.waiting and not with_gradient([master for _, master in pairs]):
                    stash.clear_found()
                elif self.checking:
                    accumulating.append((stash, new))
                continue
            stash.forget_cleared(pairs)
            if not stash.pending.has_scale_of(self.scaler):
                gradients.rescale(new, (self.scale.double() / stash.pending.scale.double()).float())
                stash.pending = self.now
        for stash, new in accumulating:  # after all stashes were asked above: they may share parameters
            for param, master in new:
                if param is master and (earlier := gradients.take(param)) is not None:
                    stash.backward.earlier[id(param)] = earlier
        params = [param for param, _ in distinct_pairs(self.optimizers)]
        self.had_grad = {id(params[index]) for index in with_gradient(params)}

    def _refuse_mixtures(self) -> None:
        """Raise where gradients of two bodies, or of two scales, would be added up."""
        if any(stash.backward.open for stash in self.stashes):
            raise RuntimeError(
                "scale_loss: an optimizer of this call is in the body of another scale_loss already; end that one "
                "first (gradients add up over several), or add the losses"
            )
        if any(any(stash.backward.beside.values()) and self._is_reached(o) for o, stash in self._both()):
            raise RuntimeError(
                "scale_loss: called in the body of another scale_loss whose scaled backward has already reached "
                "parameters of this call's optimizers; end that body first, or call zero_grad() on them"
            )
        held = [stash.pending for stash in self.stashes if stash.pending is not None and stash.pending.held_back]
        if not all(pending.has_scale_of(self.scaler) for pending in held):
            raise RuntimeError(
                "scale_loss: fully_shard holds gradients of an earlier micro-batch back that were scaled otherwise "
                "than this loss is; give all losses of such an iteration one loss_id, or call "
                "model.set_requires_gradient_sync(True) before the last backward with another loss_id"
            )

    def _unscale_shared(self) -> None:
        """Unscale what a delayed exit left for other optimizers, where they share parameters with this call's."""
        own = set(map(id, self.stashes))
        for optimizer, stash in self._both():
            left = [known.pending for _, known in sharing(stash) if known.pending is not None and id(known) not in own]
            if any(pending.local or pending.held_back for pending in left):
                raise RuntimeError(
                    "scale_loss: optimizers that share parameters with this call's wait for gradients of theirs, which "
                    "no_sync() or fully_shard holds back, to be reduced with later ones; give those optimizers too"
                )
            if left:
                unscale_pending(optimizer)

    def _both(self) -> Iterator[tuple[Any, Stash]]:
        return zip(self.optimizers, self.stashes, strict=True)

    @staticmethod
    def _is_reached(optimizer: Any) -> bool:
        """Whether an outer body's backward has left scaled gradients on parameters of this optimizer.

        What was there before the outer body began is away, so that any gradient that this backward would be added to is
        of that body.
        """
        stash = known_stash(optimizer)
        pairs = stash.masters.pairs(optimizer.param_groups)
        return any(own_grad(p) is not None and (p is master or stash.pending is not None) for p, master in pairs)

    def scaled(self, loss: Tensor) -> Tensor:
        """What the body runs backward on: the loss times the scale, FP32 (FP64 for an FP64 loss)."""
        observers.tell("loss_scaled", self, loss)
        if self.now.scaling:
            return self.scaler.scale(loss)
        return loss.float() if loss.dtype in LOW_PRECISION else loss

    def must_delay(self) -> bool:
        """Whether only a later backward can bring all gradients: FSDP modules hold some back, or DDP reduces none yet.

        DDP does not under its `no_sync()`.
        """
        around = [stash.around for stash in self.stashes]
        models = [model for those in around for ref in those.models if (model := ref()) is not None]
        modules = {id(m): m for those in around for ref in those.sharded if (m := ref()) is not None}
        self.now.local = any(map(model_forward.gradients_stay_local, models))
        self.now.held_back = self.now.scaling and fsdp.hold_gradients_back(modules.values())
        return self.now.local or self.now.held_back

    def delay(self) -> None:
        """Leave the gradients scaled where they are and note how; add to them, scaled, what `begin` has taken."""
        self._forget_cleared()
        for stash, param, earlier in self._taken():
            stash.backward.earlier[id(param)] = gradients.put_back_scaled(param, earlier, self.scale)
        for stash in self.stashes:
            stash.pending = self.now
        self.done = True

    def finish(self) -> None:
        """Unscale the gradients into the masters', add the earlier ones, and record overflow on the device."""
        self._forget_cleared()
        unscale(self.optimizers, self.scaler, self.now.inverse())
        self.done = True

    def abandon(self) -> None:
        """After an exception in the body: leave no scaled gradient of it, and the scale and the overflows as before.

        Gradients that an earlier exit unscaled are again what they were, bit for bit. Those that wait, scaled, for the
        rest of a delayed iteration stay, with whatever backward added before it failed. All others are dropped.
        """
        self.failed = True
        self._forget_cleared()
        for _, _, new in self._parts():
            for param, _ in new:
                if self.had_grad is not None and id(param) not in self.had_grad:
                    param.grad = None
        self._put_back()

    def close(self) -> None:
        """End the body: give the bystanders their gradients again, with what this backward adds to them, unscaled.

        A body that was neither delayed nor finished is abandoned. After an exception in here the next call does the
        rest.
        """
        try:
            self._close()
        finally:
            if self._announced:
                self._announced = self.begun
                observers.tell("body_ends", self)

    def _close(self) -> None:
        if not self.begun:
            return
        if not self.done:
            self.abandon()
            self.done = True
        BackwardState.turns += 1
        for stash in self.stashes:
            own = stash.backward
            own.open, own.scale, own.checking, own.ended = False, None, False, BackwardState.turns
            stash.route_grads()
        for other in self.siblings:
            if (left := stash_of(other)) is not None:
                left.backward.beside.pop(id(self), None)
                self._drop_strays(other, left)
        while self.bystanders:
            owner = self.bystanders[-1].stash
            self._bring_back([bystander for bystander in self.bystanders if bystander.stash is owner])
            self.bystanders = [bystander for bystander in self.bystanders if bystander.stash is not owner]
        self.begun, self._left = False, None

    def _drop_strays(self, other: Any, stash: Stash) -> None:
        """Drop what this backward has left on cast parameters of a sibling: scaled, and for no step of that one.

        Clipping and loggers that pass over all parameters of the models would take them for gradients.
        """
        if stash.backward.open or stash.pending is not None:
            return
        own = {id(param) for param, _ in distinct_pairs(self.optimizers)}
        low = [param for param in stash.masters.of_groups(other.param_groups).low if id(param) not in own]
        stray = [low[index] for index in with_gradient(low)]
        stash.backward.strays.update(map(id, stray))
        drop_gradients(stray)

    def _bring_back(self, group: list[_Bystander]) -> None:
        """Give bystanders of one optimizer, or of none, their gradients again, with what this backward adds."""
        params, (owner, bodies, cleared) = [bystander.param for bystander in group], group[0][2:]
        if owner is not None and owner.pending is not None:
            for param in params:
                param.grad = None
        added = [param for param in params if param.grad is not None]
        uncleared = owner is None or owner.backward.cleared == cleared
        kept = {id(b.param): b.earlier for b in group if b.earlier and uncleared}
        # Whether a body of the owner's, inside this one, has unscaled what this backward had added.
        own = owner is not None and owner.bodies != bodies
        inverse = None if own else self.now.inverse()
        try:
            found = gradients.gather([(param, param) for param in params], inverse, earlier=kept)
            if owner is None:
                gradients.clear_overflowed(params, found)  # no step would drop them
            elif added and not own:
                for found_inf in distributed.agree(found, added).values():
                    owner.note_found(self.scaler, found_inf.to(self.scale.device))
        except BaseException:  # no gradient is better than one that may be scaled, or have overflowed unnoticed
            for param in params:
                param.grad = None
            raise

    def _note_models(self, stash: Stash) -> None:
        for ref in stash.around.models:
            if (model := ref()) is not None:
                self.models[id(model)] = model, model_forward.times_cleared(model)

    def _forget_cleared(self) -> None:
        """Drop what was taken off the parameters of models whose `zero_grad()` the body has called, as that would."""
        cleared = (model for model, before in self.models.values() if model_forward.times_cleared(model) != before)
        gone = {id(param) for model in cleared for param in model.parameters()}
        if gone:
            for stash in self.stashes:
                taken = stash.backward.earlier
                stash.backward.earlier = {key: earlier for key, earlier in taken.items() if key not in gone}
            self.bystanders = [b._replace(earlier=None) if id(b.param) in gone else b for b in self.bystanders]

    def _taken(self) -> list[tuple[Stash, Tensor, gradients.Earlier]]:
        """What `begin` took away and nothing has brought back."""
        if not any(stash.backward.earlier for stash in self.stashes):
            return []
        return [
            (stash, param, stash.backward.earlier[id(param)])
            for stash, _, new in self._parts()
            for param, _ in new
            if stash.pending is None and id(param) in stash.backward.earlier
        ]

    def _put_back(self) -> None:
        for stash, param, earlier in self._taken():
            gradients.put_back(param, earlier)
            del stash.backward.earlier[id(param)]

    def _parts(self) -> Iterator[tuple[Stash, Sequence[Pair], Sequence[Pair]]]:
        """Per optimizer its stash, its pairs, and those of them that no optimizer before it holds.

        Optimizers whose gradients wait, scaled, come first, so that a parameter which they share with others is theirs.
        """
        if len(self.optimizers) == 1:
            known = self.stashes[0].masters.of_groups(self.optimizers[0].param_groups)
            yield self.stashes[0], known.pairs, known.distinct
            return
        seen: set[int] = set()
        for optimizer, stash in sorted(self._both(), key=lambda both: both[1].pending is None):
            pairs = stash.masters.pairs(optimizer.param_groups)
            yield stash, pairs, [pair for pair in pairs if id(pair[0]) not in seen]
            seen.update(id(param) for param, _ in pairs)

    def _tell_siblings(self) -> None:
        """Let the training's other optimizers know of the body, in which they cannot step."""
        own = set(map(id, self.optimizers))
        others = {id(other): (other, known) for stash in self.stashes for other, known in siblings(stash)}
        for key, (other, known) in others.items():
            if key not in own:
                self.siblings.append(other)
                known.backward.beside[id(self)] = self.checking

    def _set_bystanders_aside(self) -> None:
        """Take the gradients of the training's other parameters out of reach of this backward, until `close`.

        Gradients of a parameter with a master are on that. Those that wait, scaled, for the rest of a delayed iteration
        are taken too.
        """
        if not self.siblings and not any(stash.around.unowned for stash in self.stashes):
            return
        known = {id(param) for param, _ in distinct_pairs(self.optimizers)}
        for other in self.siblings:
            stash = known_stash(other)
            self._note_models(stash)
            for param, master in stash.masters.pairs(other.param_groups):
                if id(param) not in known:
                    known.add(id(param))
                    if not stash.backward.open and (param is master or stash.pending is not None):
                        self._set_aside(param, stash)
        for stash in self.stashes:
            for param in stash.around.unowned:
                if id(param) not in known:
                    known.add(id(param))
                    self._set_aside(param, None)

    def _set_aside(self, param: Tensor, stash: Stash | None) -> None:
        before = (0, 0) if stash is None else (stash.bodies, stash.backward.cleared)
        self.bystanders.append(_Bystander(param, gradients.take(param), stash, *before))
