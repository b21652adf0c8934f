"""Overflow storms: infinities anywhere, at any time, over random models and options, against training by hand.

Each case is one program: models, optimizers, losses with scales of their own, micro-batches, clipping, skipped steps.
amp_patch runs it, reference_training.py runs it, and after every line of it the two must agree to the bit: gradients,
weights, masters, optimizer state, buffers, scales, skips.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import reference_training as by_hand
import torch
from hunts import hunt
from hypothesis import strategies as st
from reference_model import PLAIN, WIDTH, CastByHand, Plant, Stack, Weight, level_of, places, sown
from reference_training import Owner, Scale, Trainer
from same_bits import check, check_state
from torch import Tensor, nn
from torch_optimizers import RECIPES

from amp_patch import amp
from amp_patch.masters.masters import has_gradient
from amp_patch.multi_tensor import backend

ROWS = 3

OPTIMIZERS = ("SGD", "momentum", "Adam", "Adam foreach", "AdamW fused", "Adagrad", "RMSprop")
IN_ONE_PASS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # with masters, whatever they were told, as fused
RATES = (0.125, 0.0625)  # of the two groups


# ---------------------------------------------------------------------------------------------------------------------
# A case


@dataclass(frozen=True)
class Model:
    """A `Stack`, and per layer whose its parameters are: an optimizer's, "nobody"'s, or the first's and "frozen"."""

    kinds: tuple[str, ...]
    owners: tuple[int | str | None, ...]
    kept: frozenset[int]  # the layers that `keep_fp32` names


@dataclass(frozen=True)
class Loss:
    """Which models it runs through, one after the other, and which optimizers `scale_loss` is told."""

    models: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    loss: int
    factor: float  # of the loss
    plant: Plant | None
    micro_batches: int  # all but the last with delay_unscale
    waits: bool  # the last one too: the step finds scaled gradients
    later: bool  # delay_overflow_check
    raises: str  # before the last micro-batch an exception leaves a body, "before" or "after" its backward; or ""
    once_more: bool  # on the output of the backward before, if that had the same models


@dataclass(frozen=True)
class Iteration:
    backwards: tuple[Backward, ...]
    clips: str  # "", "norm" or "value"
    steps: tuple[bool, ...]  # per optimizer
    zeroes: str  # "none", "zeros", "model": how gradients are cleared where a step was taken
    throws_away: bool  # gradients are cleared in place of all steps
    reloads: bool  # begins with a round trip of all state dicts
    scale: float | None  # what loss 0 is set to first


@dataclass(frozen=True)
class Case:
    options: dict[str, Any]
    interval: int
    models: tuple[Model, ...]
    optimizers: tuple[str, ...]
    losses: tuple[Loss, ...]
    iterations: tuple[Iteration, ...]
    seed: int


def powers(lowest: int, highest: int) -> Any:
    return st.integers(lowest, highest).map(lambda exponent: 2.0**exponent)


@st.composite
def options(draw: Any) -> dict[str, Any]:
    level = draw(st.sampled_from(["O1", "O1", "O2", "O2", "O2", "O0", "O3", "O4", "O5"]))
    chosen: dict[str, Any] = {"opt_level": level, "cpu_half": draw(st.sampled_from(["emulate", "native"]))}
    if level in ("O1", "O2", "O3") and draw(st.integers(0, 3)) == 3:
        chosen["dtype"] = torch.bfloat16
    scale = draw(st.sampled_from(["as the level has it", "dynamic", "dynamic", "dynamic", "static"]))
    if scale != "as the level has it":
        chosen["loss_scale"] = draw(powers(-8, 14)) if scale == "static" else scale
    for name, value in (("min_loss_scale", powers(-20, 10)), ("max_loss_scale", powers(10, 20))):
        if draw(st.integers(0, 3)) == 3:
            chosen[name] = draw(value)
    if level in ("O2", "O3", "O5") and draw(st.integers(0, 3)) == 3:
        chosen["keep_batchnorm_fp32"] = draw(st.booleans())
        chosen["master_weights"] = draw(st.booleans())
    if level in ("O1", "O4") and draw(st.integers(0, 7)) == 7:
        chosen["patch_torch_functions"] = False
    return chosen


owners = st.sampled_from([0, 0, 0, 1, 1, "nobody", "frozen"])


@st.composite
def models(draw: Any, first: bool) -> Model:
    kinds = draw(
        st.lists(
            st.sampled_from(["linear", "conv", "tied", "alias", "batch", "layer", "group", "times", "block", *PLAIN]),
            max_size=4,
        )
    )
    if first and draw(st.integers(0, 3)) == 3:
        kinds.insert(0, "embedding")
    row = tuple(
        "linear" if kind in ("tied", "alias") and "linear" not in kinds[:i] else kind for i, kind in enumerate(kinds)
    )
    row = (*row, "linear")
    own = [i for i, kind in enumerate(row) if places(row)[i] == i and kind not in PLAIN]
    whose = {i: draw(owners) for i in own[:-1]} | {own[-1]: draw(st.sampled_from([0, 1]))}
    # A weight of two modules is kept by both or by none.
    kept = [i for i in own if row[i] != "batch"] if draw(st.integers(0, 3)) == 3 and "alias" not in row else []
    return Model(row, tuple(whose.get(i) for i in range(len(row))), frozenset(i for i in kept if draw(st.booleans())))


values = st.sampled_from([math.inf, -math.inf, math.nan, 2.0**12, 1e30])
factors = st.sampled_from([1.0] * 5 + [2.0**-10, 2.0**8, 2.0**14, math.inf, math.nan])
rarely = st.integers(0, 5).map(lambda number: number == 5)


@st.composite
def backwards(draw: Any, losses: tuple[Loss, ...], rows: tuple[Model, ...], last: bool) -> Backward:
    index = draw(st.integers(0, len(losses) - 1))
    loss, plant = losses[index], None
    if draw(st.integers(0, 2)) == 2:
        model = draw(st.sampled_from(loss.models))
        layer = draw(st.integers(0, len(rows[model].kinds) - 1))
        plant = Plant(model, layer, draw(st.booleans()), draw(st.integers(0, 11)), draw(values))
    micro_batches = draw(st.sampled_from([1, 1, 1, 2, 3]))
    waits = last and len(loss.targets) == 1 and draw(rarely)
    raises = draw(st.sampled_from([""] * 6 + ["before", "after"]))
    return Backward(index, draw(factors), plant, micro_batches, waits, draw(rarely), raises, draw(rarely))


@st.composite
def iterations(draw: Any, losses: tuple[Loss, ...], rows: tuple[Model, ...], count: int) -> Iteration:
    how_many = draw(st.sampled_from([1, 1, 2, 2, 3]))
    passes = tuple(draw(backwards(losses, rows, number == how_many - 1)) for number in range(how_many))
    waits = passes[-1].waits
    return Iteration(
        passes,
        "" if waits else draw(st.sampled_from(["", "", "norm", "value"])),
        (True,) * count if waits else tuple(draw(st.sampled_from([True, True, True, False])) for _ in range(count)),
        draw(st.sampled_from(["none", "none", "zeros"] + ([] if waits else ["model"]))),
        draw(rarely),
        draw(rarely),
        draw(powers(0, 10)) if draw(rarely) else None,
    )


@st.composite
def cases(draw: Any) -> Case:
    rows = tuple(draw(models(first)) for first in [True, False][: draw(st.sampled_from([1, 2]))])
    held = sorted({owner for model in rows for owner in model.owners if isinstance(owner, int)})
    rows = tuple(  # optimizers by number, from 0
        Model(m.kinds, tuple(held.index(o) if isinstance(o, int) else o for o in m.owners), m.kept) for m in rows
    )
    chain = st.sampled_from([(0,)] if len(rows) == 1 else [(0,), (1,), (0, 1)])
    targets = st.sampled_from([(0,)] if len(held) == 1 else [(0,), (1,), (0, 1), (0, 1), (1, 0)])
    losses = tuple(draw(st.lists(st.builds(Loss, chain, targets), min_size=1, max_size=3)))
    return Case(
        draw(options()),
        draw(st.sampled_from([1, 2, 3, 2000])),
        rows,
        tuple(draw(st.sampled_from(sorted(OPTIMIZERS))) for _ in held),
        losses,
        tuple(draw(iterations(losses, rows, len(held))) for _ in range(draw(st.integers(1, 4)))),
        draw(st.integers(0, 2**16)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The two trainings of a case


class Both:
    """The models and optimizers of a case, trained by amp_patch and by hand."""

    def __init__(self, case: Case) -> None:
        self.case, level = case, level_of(case.options)
        torch.manual_seed(case.seed)
        self.models = [Stack(model.kinds) for model in case.models]
        nets: list[CastByHand] = []
        groups: list[list[list[tuple[Tensor, Weight]]]] = [[[], []] for _ in case.optimizers]
        for stack, model in zip(self.models, case.models, strict=True):
            layer_of = {name: int(name.split(".")[1]) for name, _ in stack.named_parameters()}
            for name, param in stack.named_parameters():
                param.requires_grad_(model.owners[layer_of[name]] != "frozen")
            owner_of = {name: {"frozen": 0}.get(model.owners[i], model.owners[i]) for name, i in layer_of.items()}
            nets.append(
                CastByHand(stack, level, model.kept, lambda name, owner_of=owner_of: owner_of[name] != "nobody")
            )
            for name, param in stack.named_parameters():
                if owner_of[name] != "nobody":
                    groups[owner_of[name]][layer_of[name] % 2].append((param, nets[-1].weights[name]))
            for index in model.kept:
                stack.layers[index].kept = True

        optimizers, owners = [], []
        for kind, both in zip(case.optimizers, groups, strict=True):
            kept = [(lr, group) for lr, group in zip(RATES, both, strict=True) if group]
            optimizers.append(RECIPES[kind]([{"params": [p for p, _ in group], "lr": lr} for lr, group in kept]))
            fused = RECIPES[kind].func in IN_ONE_PASS and level.masters and backend() == "cpp"
            by_itself = partial(RECIPES[kind], foreach=False, fused=True) if fused else RECIPES[kind]
            owners.append(Owner(by_itself, [(lr, [w for _, w in group]) for lr, group in kept]))
        scales = [Scale(level, case.interval) for _ in case.losses]
        self.trainer = Trainer(level, nets, owners, scales)
        _, self.optimizers = amp.initialize(
            self.models,
            optimizers,
            num_losses=len(case.losses),
            keep_fp32=lambda name, module: getattr(module, "kept", False),
            verbosity=0,
            **case.options,
        )
        for scaler in self.optimizers[0]._amp_stash.scalers:
            scaler.growth_interval = case.interval
        weights = self.trainer.weights
        params = (param for stack in self.models for param in stack.parameters())
        self.params = dict(zip(weights, params, strict=True))
        # The models of the last forward, and what came out of it.
        self.outputs: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def run(self) -> None:
        for number, iteration in enumerate(self.case.iterations):
            self.outputs = None
            if iteration.reloads:
                self.reload()
            if iteration.scale is not None:
                self.set_scale(iteration.scale)
            for index, backward in enumerate(iteration.backwards):
                self.backward(backward, seed=self.case.seed + 97 * number + 7 * index)
            if iteration.throws_away:
                for optimizer, owner in zip(self.optimizers, self.trainer.owners, strict=True):
                    self.zero_grad(optimizer, owner, iteration.zeroes)
            else:
                self.clip(iteration.clips)
                self.step(iteration)
            self.check(everything=True)

    def backward(self, backward: Backward, seed: int) -> None:
        loss, loss_id = self.case.losses[backward.loss], backward.loss
        for micro in range(backward.micro_batches):
            last = micro == backward.micro_batches - 1
            ours, theirs = self.forward(backward, torch.Generator().manual_seed(seed + micro), micro == 0)
            optimizers = [self.optimizers[i] for i in loss.targets]
            owners = [self.trainer.owners[i] for i in loss.targets]
            if last and backward.raises:
                with pytest.raises(KeyError), amp.scale_loss(ours, optimizers, loss_id) as scaled_loss:
                    if backward.raises == "after":
                        scaled_loss.backward(retain_graph=True)
                    raise KeyError
                self.trainer.fail(theirs, loss_id, owners, after=backward.raises == "after")
                self.check()
            delay = not last or backward.waits
            with (
                sown(backward.plant, self.models),
                amp.scale_loss(ours, optimizers, loss_id, None, delay, backward.later) as scaled_loss,
            ):
                scaled_loss.backward(retain_graph=True)
            with sown(backward.plant, self.trainer.nets):
                self.trainer.backward(theirs, loss_id, owners, delay=delay, later=backward.later)
            self.check()

    def forward(self, backward: Backward, generator: torch.Generator, may_repeat: bool) -> tuple[Tensor, Tensor]:
        """The losses of the two."""
        chain = self.case.losses[backward.loss].models
        if not (may_repeat and backward.once_more and self.outputs is not None and self.outputs[0] == chain):
            if self.case.models[chain[0]].kinds[0] == "embedding":
                x = torch.randint(5, (ROWS,), generator=generator)
            else:
                x = torch.randn(ROWS, WIDTH, generator=generator)
            plants = {backward.plant.model: backward.plant} if backward.plant is not None else {}
            y = z = x
            for index in chain:
                self.models[index].plant = plants.get(index)
                y = self.models[index](y)
                with amp.disable_casts():
                    z = self.trainer.nets[index](z, plants.get(index))
            check(y.detach(), z.detach())
            self.outputs = chain, y, z
        target = torch.randn(ROWS, WIDTH, generator=generator)
        _, y, z = self.outputs
        return tuple(((t.float() - target) * (t.float() - target)).sum() * backward.factor for t in (y, z))

    def clip(self, how: str) -> None:
        if how == "norm":
            for optimizer, owner in zip(self.optimizers, self.trainer.owners, strict=True):
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
                low = [weight.has_master for weight in owner.weights]
                self.trainer.clip(owner.weights, lambda masters, low=low: by_hand.clip_grad_norm(masters, low, 0.5))
        elif how == "value" and any(weight.grad is not None for weight in self.trainer.weights):  # torch wants some
            nn.utils.clip_grad_value_(list(self.params.values()), 0.25)
            self.trainer.clip(self.trainer.weights, lambda masters: nn.utils.clip_grad_value_(masters, 0.25))

    def step(self, iteration: Iteration) -> None:
        for optimizer, owner, wanted in zip(self.optimizers, self.trainer.owners, iteration.steps, strict=True):
            if wanted:
                optimizer.step()
                self.trainer.step(owner)
                assert optimizer._amp_stash.step_skipped is owner.skipped
                SEEN["skipped" if owner.skipped else "stepped"] += 1
                self.check()
                if iteration.zeroes != "model":
                    self.zero_grad(optimizer, owner, iteration.zeroes)
        if iteration.zeroes == "model":
            for model in self.models:
                model.zero_grad()
            for weight in self.trainer.weights:
                weight.grad = None

    def zero_grad(self, optimizer: Any, owner: Owner, how: str) -> None:
        optimizer.zero_grad(set_to_none=how != "zeros")
        owner.zero_grad(set_to_none=how != "zeros")

    def reload(self) -> None:
        """A round trip of every state dict, which changes nothing."""
        saved = copy.deepcopy([m.state_dict() for m in self.models]), amp.state_dict()
        for model, state in zip(self.models, saved[0], strict=True):
            model.load_state_dict(state)
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        amp.load_state_dict(saved[1])

    def set_scale(self, value: float) -> None:
        state = amp.state_dict()
        amp.load_state_dict({**state, "loss_scaler0": {"loss_scale": value, "unskipped": 0}})
        self.trainer.scales[0].value, self.trainer.scales[0].unskipped = value, 0

    def check(self, everything: bool = False) -> None:
        """Compare the two trainings to the bit; at the end of an iteration also the values that only steps change."""
        for optimizer, owner in zip(self.optimizers, self.trainer.owners, strict=True):
            waits = owner.waits_for is not None
            for master, weight in zip(amp.master_params(optimizer), owner.weights, strict=True):
                check(master.detach(), weight.master.detach())
                if waits:
                    check(self.params[weight].grad, weight.waiting)
                if weight.has_master or not waits:
                    # By `has_gradient`: what a step is done with can still be read, and is in no later one.
                    check(master.grad if has_gradient(master) else None, weight.grad)
                if everything:
                    check_state(optimizer.state[master], owner.optimizer.state[weight.master])
        scales = [{"loss_scale": scale.value, "unskipped": scale.unskipped} for scale in self.trainer.scales]
        assert list(amp.state_dict().values()) == scales, self.trainer.scales
        if everything:
            for weight, param in self.params.items():
                check(param.detach(), weight.value.detach())
                if not any(weight is w for owner in self.trainer.owners for w in owner.weights):
                    check(param.grad, weight.grad)
            for model, net in zip(self.models, self.trainer.nets, strict=True):
                for name, buffer in model.named_buffers():
                    check(buffer, net.buffers[name])


SEEN: Counter[str] = Counter()  # steps of all cases


@pytest.fixture(scope="module", autouse=True)
def storms_are_storms() -> Iterator[None]:
    """They prove nothing where all steps are taken, or all are skipped."""
    yield
    assert min(SEEN["skipped"], SEEN["stepped"]) > 0.2 * SEEN.total(), SEEN


@hunt(60, many=2_000, fresh=False, case=cases())
@pytest.mark.filterwarnings("ignore:.*gathered for this optimizer", "ignore:.*loss depends on no parameter")
def test_a_storm(case: Case) -> None:
    """Weights, masters, gradients, state, buffers, scales and skips are those of the training by hand."""
    try:
        Both(case).run()
    finally:
        amp.restore()  # kernels that an emulating case registered would serve the next one's backward passes by hand
