"""One scaled backward pass: what `scale_loss` does to the gradients of its optimizers, and of the others, around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from amp_patch import masters, shards
from amp_patch.optimizer import Pending, Stash, distinct_pairs, recover, unscale
from amp_patch.policy import LOW_PRECISION
from amp_patch.scaler import LossScaler, inverse_of

Pair = tuple[Tensor, Tensor]  # (param, master)


class _SetAside(NamedTuple):
    param: Tensor
    grad: Tensor | None
    stash: Stash | None  # of the optimizer that it belongs to, if any
    bodies: int  # how many bodies that one had begun


class ScaledBackward:
    """The stages of one `scale_loss`: `begin`, `scaled`, the body, then `delay`, `finish` or `abandon`; `close` always.

    Nothing here syncs with the device.

    Args:
        optimizers: those that take part, each once.
        scaler: of the loss.
        scaling: False where the loss is not multiplied: then nothing is unscaled and nothing is checked.
    """

    def __init__(self, optimizers: list[Any], scaler: LossScaler, scaling: bool) -> None:
        self.optimizers = optimizers
        self.stashes: list[Stash] = [optimizer._amp_stash for optimizer in optimizers]
        self.scaler = scaler
        self.scaling = scaling
        self.now = Pending(scaler)  # an inner body may move the scaler before this one ends
        self.scale = self.now.scale
        self.set_aside: list[_SetAside] = []
        self.had_grad: set[int] = set()
        self.begun = False

    def begin(self) -> None:
        """Leave in the model's gradients only what this backward may be added to.

        Gradients with masters that the optimizer's last delayed exit did not leave there come from somewhere else (a
        GAN's generator loss fills the discriminator's) and are dropped. Gradients that an earlier exit unscaled in
        place are scaled again, so that what backward adds has the same unit.
        """
        if any(stash.open for stash in self.stashes):
            raise RuntimeError(
                "scale_loss: an optimizer of this call is in the body of another scale_loss already; end that one "
                "first (gradients add up over several), or add the losses"
            )
        held = [stash.pending for stash in self.stashes if stash.pending is not None and stash.pending.held_back]
        if not all(pending.has_scale_of(self.scaler) for pending in held):
            raise RuntimeError(
                "scale_loss: fully_shard holds gradients of an earlier micro-batch back that were scaled otherwise "
                "than this loss is; give all losses of such an iteration one loss_id, or call "
                "model.set_requires_gradient_sync(True) before the last backward with another loss_id"
            )
        self.begun = True
        if self.scaling:
            self._set_bystanders_aside()
        for optimizer, stash in zip(self.optimizers, self.stashes, strict=True):
            stash.open, stash.scale = True, self.scale
            stash.bodies += 1
            recover(optimizer, stash)
        for stash, pairs, new in self._parts():
            if stash.pending is None:
                for param, master in pairs:
                    if param is not master:
                        param.grad = None
                if all(master.grad is None for _, master in pairs):
                    stash.clear_found()
                if self.scaling:
                    masters.rescale(new, self.scale, own_only=True)
            elif not stash.pending.has_scale_of(self.scaler):
                factor = (self.scale.double() / stash.pending.scale.double()).float()
                masters.rescale(new, factor, own_only=False)
                stash.pending = self.now
        self.had_grad = {id(param) for param, _ in distinct_pairs(self.optimizers) if param.grad is not None}

    def scaled(self, loss: Tensor) -> Tensor:
        """What the body runs backward on: the loss times the scale, FP32 (FP64 for an FP64 loss)."""
        if self.scaling:
            return self.scaler.scale(loss)
        return loss.float() if loss.dtype in LOW_PRECISION else loss

    def must_delay(self) -> bool:
        """Whether FSDP modules hold gradients back, so that only a later backward can bring them all."""
        modules = {id(m): m for stash in self.stashes for ref in stash.sharded if (m := ref()) is not None}
        self.now.held_back = self.scaling and shards.hold_gradients_back(modules.values())
        return self.now.held_back

    def delay(self) -> None:
        """The gradients stay where they are, scaled, and are known to be so."""
        for stash in self.stashes:
            stash.pending = self.now

    def finish(self) -> None:
        """Unscaled gradients in the masters; overflow recorded on the device."""
        unscale(self.optimizers, self.scaler, inverse_of(self.scale) if self.scaling else None)

    def abandon(self) -> None:
        """After an exception in the body: no scaled gradient stays, the scale and the overflows are as before.

        Gradients that existed on entry are unscaled again, with whatever backward added before it failed; all others
        are dropped.
        """
        for stash, _, new in self._parts():
            for param, _ in new:
                if id(param) not in self.had_grad:
                    param.grad = None
            if stash.pending is None and self.scaling:
                masters.rescale(new, inverse_of(self.scale), own_only=True)

    def close(self) -> None:
        """Bring back what was set aside, with this backward's share of it unscaled."""
        if not self.begun:
            return
        for stash in self.stashes:
            stash.open, stash.scale = False, None
        inverse = inverse_of(self.scale) if self.set_aside else None
        for param, earlier, owner, bodies in self.set_aside:
            if param.grad is None or (owner is not None and owner.pending is not None):
                param.grad = earlier
                continue
            if owner is None or owner.bodies == bodies:  # else a body of its own, inside this one, has unscaled it
                found = masters.gather([(param, param)], inverse)
                if owner is not None:
                    found = shards.agree(found, [param])
                    owner.note_found(self.scaler, found[param.grad.device].to(self.scale.device))
            if earlier is not None:
                param.grad = param.grad + earlier

    def _parts(self) -> Iterator[tuple[Stash, list[Pair], list[Pair]]]:
        """Per optimizer its stash, its pairs, and those of them that no optimizer before it holds."""
        seen: set[int] = set()
        for optimizer, stash in zip(self.optimizers, self.stashes, strict=True):
            pairs = stash.masters.pairs(optimizer.param_groups)
            yield stash, pairs, [pair for pair in pairs if id(pair[0]) not in seen]
            seen.update(id(param) for param, _ in pairs)

    def _set_bystanders_aside(self) -> None:
        """Take the gradients of the training's other parameters out of reach of this backward.

        Of their parameters with masters, `begin` drops what other losses left; unless they wait, scaled, for the rest
        of a delayed iteration: then they come back as they are.
        """
        known = {id(param) for param, _ in distinct_pairs(self.optimizers)}
        siblings = {
            id(other): other for stash in self.stashes for ref in stash.siblings if (other := ref()) is not None
        }
        for other in siblings.values():
            stash: Stash | None = getattr(other, "_amp_stash", None)
            if stash is None or any(other is optimizer for optimizer in self.optimizers):
                continue
            for param, master in stash.masters.pairs(other.param_groups):
                if id(param) not in known:
                    known.add(id(param))
                    if not stash.open and (param is master or stash.pending is not None):
                        self._set_aside(param, stash)
        for stash in self.stashes:
            for param in stash.unowned:
                if id(param) not in known:
                    known.add(id(param))
                    self._set_aside(param, None)

    def _set_aside(self, param: Tensor, stash: Stash | None) -> None:
        grad = param.grad
        if grad is not None and grad._is_view():  # a part of a DDP's bucket, into which that reduces the next gradient
            grad = grad.clone()
        self.set_aside.append(_SetAside(param, grad, stash, 0 if stash is None else stash.bodies))
        param.grad = None
