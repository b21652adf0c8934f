"""A story (stories.py), run by amp_patch and by hand; after each event both must agree to the bit.

Nothing by hand is amp_patch's but one number: the norm that `clip_grad_norm_` returns, the order of whose sum is ours.
It is held to FP64's within a rounding and then used.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from edits import Edits
from life import Groups, Life, Saved, reread, rescheduled
from reference_model import WIDTH, Plant, Stack, sown
from stories import RATES, Story
from torch import Tensor
from torch_optimizers import RECIPES
from training import check, check_state, skipped

from amp_patch import amp

ROWS = 3


class Lives(Edits):
    """The current training of a story, and earlier trainings that were copied. The methods are the events."""

    def __init__(self, story: Story) -> None:
        self.story = story
        stack = self._stack(story.seed)
        groups: Groups = [[(lr, []) for lr in RATES] for _ in story.optimizers]
        for name, param in stack.named_parameters():
            layer = int(name.split(".")[1])
            owner = story.owners[layer]
            param.requires_grad_(owner != "frozen")
            if owner != "nobody":
                groups[self._taker(0 if owner == "frozen" else int(owner), param)][layer % 2][1].append(name)
        self.now = Life(story, story.options, [[g for g in own if g[1]] for own in groups], stack)
        self.others: list[Life] = []
        self.saved: Saved | None = None

    def _stack(self, seed: int) -> Stack:
        torch.manual_seed(seed)
        stack = Stack(self.story.kinds)
        for index in self.story.kept:
            stack.layers[index].kept = True
        return stack

    def live(self) -> None:
        self.now.check(look=True)
        for event in self.story.events:
            getattr(self, event.what)(**event.how)
            self.now.check()
        for life in [*self.others, self.now]:
            life.check(look=True)
            life.save("memory")
        amp.restore()
        if not self.now.copied:
            check_state(dict(self.now.model.state_dict()), self.now.values())

    # ------------------------------------------------------------------------------------------------------------------
    # Iterations

    def backward(
        self,
        loss: int,
        targets: tuple[int, ...],
        micro_batches: int,
        delays: bool,
        waits: bool,
        later: bool,
        plant: Plant | None,
        factor: float,
        raises: str,
        seed: int,
        once_more: bool = False,
    ) -> None:
        """Run micro-batches; with `once_more`, the graph of the last one is used twice."""
        life = self.now
        for index, owner in enumerate(life.trainer.owners):
            if owner.waits_for is not None:  # the rest of a delayed iteration is for the same optimizer
                targets = (index,)
        waits = waits and len(targets) == 1
        optimizers = [life.optimizers[i] for i in targets]
        owners = [life.trainer.owners[i] for i in targets]
        bodies = micro_batches + once_more
        for body in range(bodies):
            last = body == bodies - 1
            if body < micro_batches:
                ours, theirs = self._forward(plant, factor, torch.Generator().manual_seed(seed + body))
            if last and raises:
                with pytest.raises(KeyError), amp.scale_loss(ours, optimizers, loss) as scaled_loss:
                    if raises == "after":
                        scaled_loss.backward(retain_graph=True)
                    raise KeyError
                with amp.disable_casts():
                    life.trainer.fail(theirs, loss, owners, after=raises == "after")
            delay = waits if last else delays
            with sown(plant, [life.model]), amp.scale_loss(ours, optimizers, loss, None, delay, later) as scaled_loss:
                scaled_loss.backward(retain_graph=body >= micro_batches - 1)
            # Without `disable_casts`, another training that emulates would have these products emulated too.
            with sown(plant, [life.net]), amp.disable_casts():
                life.trainer.backward(theirs, loss, owners, delay=delay, later=later)

    def _forward(self, plant: Plant | None, factor: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Run both forwards; return both losses."""
        life = self.now
        x = self._inputs(generator)
        target = torch.randn(ROWS, WIDTH, generator=generator)
        life.model.plant = plant
        y, z = self._both(x, plant)
        life.model.plant = None
        return tuple(((t.float() - target) * (t.float() - target)).sum() * factor for t in (y, z))  # type: ignore[return-value]

    def _inputs(self, generator: torch.Generator) -> Tensor:
        if self.story.kinds[0] == "embedding":
            return torch.randint(5, (ROWS,), generator=generator)
        return torch.randn(ROWS, WIDTH, generator=generator)

    def _both(self, x: Tensor, plant: Plant | None) -> tuple[Tensor, Tensor]:
        y = self.now.model(x)
        for weight in self.now.net.weights.values():
            if weight.edited == "master":  # a forward publishes it
                weight.publish()
        with amp.disable_casts():
            z = self.now.net(x, plant)
        check(y.detach(), z.detach(), "outputs")
        return y, z

    def evaluate(self, seed: int) -> None:
        self.now.model.eval()
        self.now.net.training = False
        with torch.no_grad():
            self._both(self._inputs(torch.Generator().manual_seed(seed)), None)
        self.now.model.train()
        self.now.net.training = True

    def step(self, which: tuple[int, ...], guarded: bool) -> None:
        for index in which:
            optimizer, owner = self.now.optimizers[index], self.now.trainer.owners[index]
            if guarded and owner.waits_for is None:
                grads = [master.grad for master in amp.master_params(optimizer) if master.grad is not None]
                fine = all(bool(grad.isfinite().all()) for grad in grads)
                assert fine == all(w.grad is None or bool(w.grad.isfinite().all()) for w in owner.weights)
                if not fine:
                    optimizer.zero_grad()
                    owner.zero_grad(True)
                    continue
            if any(weight.lacks_master and weight.grad is not None for weight in owner.weights):
                with pytest.raises(RuntimeError, match=r"came frozen .* call scale_loss"):
                    optimizer.step()  # the gradient is of another optimizer's loss
                continue
            optimizer.step()
            with amp.disable_casts():  # which the newest O1 training would have done in all of the process
                self.now.trainer.step(owner)
            assert skipped(optimizer) is owner.skipped, f"skipped: {owner.skipped}"
            self.now.check()

    def zero_grad(self, by: str, to_none: bool) -> None:
        life = self.now
        if by == "optimizer" or life.waits:
            for optimizer, owner in zip(life.optimizers, life.trainer.owners, strict=True):
                optimizer.zero_grad(set_to_none=to_none)
                owner.zero_grad(to_none)
        elif by == "model":
            life.model.zero_grad(set_to_none=to_none)
            for weight in life.net.weights.values():
                weight.grad = None if to_none or weight.grad is None else torch.zeros_like(weight.held)
        else:
            for tensor in (*life.model.parameters(), *(master for master, _ in life.masters)):
                tensor.grad = None
            for weight in life.net.weights.values():
                weight.grad = None
        for param, weight in life.unowned:
            param.grad = weight.grad = None

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints and copies

    def save(self, by: str, seed: int = 0) -> None:
        self.saved = self.now.save(by)

    def load(self, seed: int) -> None:
        life = self.now
        if self.saved is None or self.saved.groups != life.groups or life.waits:
            return
        life.load(self.saved)

    def resume(self, options: dict[str, Any] | None, load: str, seed: int) -> None:
        """Continue the training from a checkpoint in a new model with new optimizers, possibly at another level."""
        life = self.now
        if life.waits:
            return
        saved = life.save("file")
        options = options or life.options
        stack = self._stack(seed)
        for name, param in stack.named_parameters():
            param.requires_grad_(life.params[name].requires_grad)
        self.now = Life(self.story, options, life.groups, stack, saved, load)

    def copy(self, by: str, go_on: str) -> None:
        """Copy the model and the optimizers, without gradients, and continue with the copies."""
        life = self.now
        if life.waits:
            return
        twin = copy.copy(life)
        pair = (life.model, life.optimizers)
        if by == "file":
            twin.model, twin.optimizers = reread(pair, weights_only=False)
        else:
            twin.model, twin.optimizers = copy.deepcopy(pair) if by == "deepcopy" else pickle.loads(pickle.dumps(pair))
        twin.copied, twin.held = True, []
        twin.groups = copy.deepcopy(life.groups)
        twin.trainer = life.trainer.copied()
        twin.net = twin.trainer.nets[0]
        twin.schedulers = rescheduled(life.schedulers, twin.optimizers)
        twin.their_schedulers = rescheduled(life.their_schedulers, [o.optimizer for o in twin.trainer.owners])
        self.others = [*self.others, twin if go_on == "original" else life][-2:]
        self.now = twin if go_on == "copy" else life
        self.others[-1].check()

    def turn(self, seed: int) -> None:
        """Continue with another of the trainings: an original or its copy."""
        if self.others:
            index = seed % len(self.others)
            self.now, self.others[index] = self.others[index], self.now

    def again(self, options: dict[str, Any] | None, restore: bool, keeps: bool, steps: bool, seed: int) -> None:
        """Call `initialize` again, possibly at another level, possibly after `restore()` and a plain step in FP32."""
        life = self.now
        if life.waits:
            return
        restore = restore and not life.copied  # it knows the trainings that initialize() has made
        keeps = keeps and restore
        options = options or life.options
        if not keeps:
            self.zero_grad("optimizer", True)
        for param, weight in life.unowned:
            param.grad = weight.grad = None
        if restore:
            self.others = []
            self._restore(steps, seed)
        edited = {name: weight.edited for name, weight in life.net.weights.items()}
        life.live_on_by_hand(options)
        life.initialize(options)
        for name, weight in life.net.weights.items():
            weight.edited = edited[name] if weight.has_master else ""  # may be settled later
        life.copied, life.held = False, []

    def export(self, seed: int) -> None:
        """Compare the FP32 values of copies of the model."""
        life = self.now
        life.settle(life.net.weights.values())
        values = life.values()
        plain = amp.fp32_copy(life.model)
        check_state(dict(plain.state_dict()), values)
        expected = self._stack(seed)
        expected.load_state_dict(values)
        x = self._inputs(torch.Generator().manual_seed(seed))
        with torch.no_grad(), amp.disable_casts():
            check(plain.eval()(x), expected.eval()(x), "outputs of the copy")
        check_state(dict(copy.deepcopy(life.model).state_dict()), values)
        check_state(dict(life.model.state_dict()), values)

    def _restore(self, steps: bool, seed: int) -> None:
        life = self.now
        life.held = []
        amp.restore()
        assert type(life.model) is Stack
        assert [type(optimizer) for optimizer in life.optimizers] == [RECIPES[k].func for k in self.story.optimizers]
        life.live_on_by_hand(None)
        life.check(look=True)
        if not steps:
            return
        ours, theirs = self._forward(None, 1.0, torch.Generator().manual_seed(seed))
        ours.backward()
        life.trainer.backward(theirs, 0, life.trainer.owners, delay=False, later=False)
        for optimizer, owner in zip(life.optimizers, life.trainer.owners, strict=True):
            optimizer.step()
            life.trainer.step(owner)
        life.check(look=True)
        for param, weight in life.unowned:
            param.grad = weight.grad = None


def tell(story: Story) -> None:
    """Run a story; raise at the first difference between the two trainings."""
    amp.restore()
    try:
        Lives(story).live()
    finally:
        amp.restore()
