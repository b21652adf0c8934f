"""Trainings whose masters are on the host, and the same trainings with masters beside the weights.

`python offloaded.py FOLDER` builds the device of other_device.py in FOLDER, and prints JSON: what trainings there have
copied and held, and which of them differ from the same training with masters on the device, or of the model on a CPU.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from training import backward

from amp_patch import amp, optimizers
from amp_patch.masters import on_host

CPU = torch.device("cpu")


class Signs(torch.optim.Optimizer):
    """An optimizer of another package: a step along the sign of an average, for all parameters at once."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    param.sub_(average.lerp_(param.grad, 0.1).sign(), alpha=group["lr"])


MAKERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, 1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, 1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 1e-2),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, 1e-2),
    "of another package": Signs,
}
if hasattr(torch.optim, "Muon"):
    MAKERS["Muon"] = lambda params: torch.optim.Muon([param for param in params if param.ndim == 2], 1e-2)


def net(norm: bool = True) -> nn.Sequential:
    """A model with and without a batch norm, whose parameters stay FP32 and have no masters."""
    torch.manual_seed(0)
    first = [nn.Linear(16, 32), nn.BatchNorm1d(32)] if norm else [nn.Linear(16, 32)]
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Training:
    """A model and its optimizer, and what a way to train has noted."""

    def __init__(self, make: Callable[[list[Tensor]], Any], device: torch.device, norm: bool, **options: Any) -> None:
        self.device, self.noted = device, list[Tensor]()
        model = net(norm).to(device)
        optimizer = make(list(model.parameters()))
        self.model, self.optimizer = amp.initialize(model, optimizer, verbosity=0, cpu_half="native", **options)

    def loss(self, step: int) -> Tensor:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        return self.model(inputs.to(self.device)).float().square().mean()

    def backward(self, step: int, **options: Any) -> None:
        backward(self.loss(step), self.optimizer, **options)

    def iterate(self, between: Callable[[int], Any] = lambda step: None, steps: int = 4) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward(step)
            between(step)
            self.optimizer.step()

    def results(self) -> list[Tensor]:
        """Return weights, masters, state and state dicts, and after `restore` weights and state, all on the CPU."""

        def present() -> list[Tensor]:
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            held = [*self.model.parameters(), *amp.master_params(self.optimizer), *states]
            return [value.detach().cpu().clone() for value in held if isinstance(value, Tensor)]

        found = present() + [value.cpu().clone() for value in self.model.state_dict().values()] + self.noted
        amp.restore()
        places = {tensor.device.type for tensor in (*self.model.parameters(), *amp.master_params(self.optimizer))}
        assert places == {self.device.type}
        return found + present()

    def note(self, tensors: Any) -> None:
        self.noted += [tensor.detach().cpu().clone() for tensor in tensors]


# ----------------------------------------------------------------------------------------------------------------------
# Ways to train


def plain(t: Training) -> None:
    t.iterate()


def clipped(t: Training) -> None:
    t.iterate(lambda _: nn.utils.clip_grad_norm_(t.model.parameters(), 0.01))


def clipped_on_masters(t: Training) -> None:
    t.iterate(lambda _: nn.utils.clip_grad_norm_(amp.master_params(t.optimizer), 0.01))


def clipped_by_value(t: Training) -> None:
    t.iterate(lambda _: nn.utils.clip_grad_value_(t.model.parameters(), 1e-3))


def accumulated(t: Training) -> None:
    t.iterate(lambda step: [t.backward(100 + 2 * step + more) for more in range(2)])


def accumulated_in_low_precision(t: Training) -> None:
    for step in range(4):
        t.optimizer.zero_grad()
        for part in range(3):
            t.backward(3 * step + part, delay_unscale=part < 2)
        t.optimizer.step()


def overflowing(t: Training) -> None:
    for step in range(6):
        t.optimizer.zero_grad()
        backward(t.loss(step) * (torch.inf if step == 2 else 1), t.optimizer)
        t.optimizer.step()


def scheduled(t: Training) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5)
    for step in range(4):
        t.optimizer.zero_grad()
        t.backward(step)
        t.optimizer.step()
        scheduler.step()


def with_another_group(t: Training) -> None:
    t.iterate()
    torch.manual_seed(1)
    layer = nn.Linear(4, 4, bias=False).to(t.device, t.model[0].weight.dtype)
    t.model.append(layer)
    t.optimizer.add_param_group({"params": list(layer.parameters())})
    t.iterate()


def with_a_grad_scaler(t: Training) -> None:
    scaler = amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        t.optimizer.zero_grad()
        scaler.scale(t.loss(step) * (torch.inf if step == 2 else 1)).backward()
        if step % 2:
            scaler.unscale_(t.optimizer)
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        scaler.step(t.optimizer)
        scaler.update()


@torch.no_grad()
def _edit(t: Training, step: int) -> None:
    weight = t.model[0].weight
    if step == 0:
        weight.clamp_(-0.1, 0.1)
    elif step == 1:
        weight.data.copy_(weight.data.clamp(-0.05, 0.05))
    elif step == 2:
        weight.data = weight.data * 0.5
    elif step == 3:
        weight.data.mul_(0.999)
        next(iter(amp.master_params(t.optimizer))).add_(0.01)


def edited(t: Training) -> None:
    held = t.model[-1].weight.data
    for step in range(6):
        t.iterate(steps=1)
        _edit(t, step)
        held.copy_(held.clamp(-0.1, 0.1))


def penalized(t: Training) -> None:
    for step in range(4):
        t.optimizer.zero_grad()
        masters = [p for p in amp.master_params(t.optimizer) if p.requires_grad]
        penalty = sum(p.square().sum().to(t.device) for p in masters)
        backward(t.loss(step) + 1e-2 * penalty, t.optimizer)
        t.optimizer.step()


def changed_in_the_body(t: Training) -> None:
    for step in range(4):
        t.optimizer.zero_grad()
        with amp.scale_loss(t.loss(step), t.optimizer) as scaled:
            scaled.backward(retain_graph=True)
            for param in t.model.parameters():
                if param.grad is not None:
                    param.grad.data.mul_(0.5)
            if step % 2:
                scaled.backward()
        t.optimizer.step()


def failing(t: Training) -> None:
    for step in range(4):
        t.optimizer.zero_grad()
        try:
            with amp.scale_loss(t.loss(step + 50), t.optimizer) as scaled:
                scaled.backward()
                raise KeyError
        except KeyError:
            t.backward(step)
        t.optimizer.step()


def watched(t: Training) -> None:
    """Gradients are read before and after the step, and cleared by no call."""
    for step in range(4):
        t.backward(step)
        t.note(p.grad for p in t.model.parameters() if p.grad is not None)
        t.optimizer.step()
        t.note(p.grad for p in t.model.parameters() if p.grad is not None)


def as_vectors(t: Training) -> None:
    t.iterate()
    vector = nn.utils.parameters_to_vector(t.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, t.model.parameters())
    t.iterate()


def averaged(t: Training) -> None:
    average = torch.optim.swa_utils.AveragedModel(t.model)
    for _ in range(2):
        t.iterate(steps=2)
        average.update_parameters(t.model)
    t.note(average.parameters())


def copied(t: Training) -> None:
    t.iterate()
    other = copy.copy(t)
    other.model, other.optimizer = copy.deepcopy((t.model, t.optimizer))
    other.iterate()
    alone = copy.deepcopy(t.model)
    t.note([*other.model.parameters(), *amp.master_params(other.optimizer), *alone.parameters()])
    t.iterate()


def resumed(t: Training) -> None:
    t.iterate()
    states = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))
    t.iterate()
    t.model.load_state_dict(states[0])
    t.optimizer.load_state_dict(states[1])
    t.iterate()


def entered_again(t: Training) -> None:
    """The masters move to the weights and back, with their state and without `restore`."""
    level = "O2" if t.model[0].weight.dtype is torch.float16 else "O5"
    options: dict[str, Any] = {"opt_level": level, "verbosity": 0, "cpu_half": "native", "loss_scale": 1.0}
    apart = on_host.is_apart
    for device in (None, "cpu"):
        t.iterate()
        on_host.is_apart = apart if device else _is_elsewhere
        amp.initialize(t.model, t.optimizer, master_device=device, **options)
    t.iterate()


def thawed(t: Training) -> None:
    t.model[0].weight.requires_grad_(False)
    t.iterate()
    t.model[0].weight.requires_grad_(True)
    t.iterate()


def hooked(t: Training) -> None:
    """A hook of the user writes each complete gradient, after its copy was queued; another clears one."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in t.model.parameters():
        param.register_post_accumulate_grad_hook(halve)
    t.model[0].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    t.iterate()


def copied_before_the_step(t: Training) -> None:
    t.iterate(steps=1)
    t.optimizer.zero_grad()
    t.backward(1)
    model, optimizer = copy.deepcopy((t.model, t.optimizer))
    optimizer.step()
    t.optimizer.step()
    t.note(model.parameters())


WAYS = (
    *(plain, clipped, clipped_on_masters, clipped_by_value, accumulated, accumulated_in_low_precision, overflowing),
    *(scheduled, with_another_group, with_a_grad_scaler, edited, penalized, changed_in_the_body, failing, watched),
    *(as_vectors, averaged, copied, resumed, entered_again, thawed),
    *(hooked, copied_before_the_step),
)
FEW = (plain, clipped, edited, with_a_grad_scaler)
LEVELS: dict[str, dict[str, Any]] = {
    "O5": {"opt_level": "O5"},
    "O5, checked": {"opt_level": "O5", "skip_nonfinite": True},
    "O2": {"opt_level": "O2", "max_loss_scale": 256.0},
}


def differ(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Tell whether two results differ in a bit or a type; any two NaNs are equal."""
    if [a.dtype for a in found] != [b.dtype for b in wanted]:
        return True
    return not all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(found, wanted, strict=True)
    )


def _is_elsewhere(param: Tensor, master: Tensor) -> bool:
    return param.device != master.device


def train(way: Callable[[Training], None], name: str, device: torch.device = CPU, **options: Any) -> list[Tensor]:
    """Return the results of a training; `norm=False` is one without a batch norm."""
    norm = options.pop("norm", name != "Muon")
    try:
        training = Training(MAKERS[name], device, norm, **options)
        way(training)
        return training.results()
    finally:
        amp.restore()
        on_host.is_apart = _is_elsewhere


def train_apart(way: Callable[[Training], None], name: str, **options: Any) -> list[Tensor]:
    """Train on the CPU as if its weights were on a device: each gradient and weight is copied."""
    on_host.is_apart = lambda param, master: True
    return train(way, name, master_device="cpu", **options)


# ----------------------------------------------------------------------------------------------------------------------
# On a device of its own


def counted(device: Any, place: torch.device, **options: Any) -> dict[str, Any]:
    """Return what the third iteration has copied and held, in bytes: of large layers, of which none has a bias."""
    torch.manual_seed(0)
    gc.collect()
    before = device.counts().get("held", 0)  # of earlier trainings
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6))).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, cpu_half="native", **options)
    for _ in range(3):
        inputs = torch.randn(1, 256).to(place)
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean()
        device.forget_counts()
        device.refuse_reads(True)
        backward(loss, optimizer)
        after_backward = device.counts()
        optimizer.step()
        device.refuse_reads(False)
    found = device.counts()
    skipped = amp.state_dict(optimizer)["loss_scaler0"]
    amp.restore()
    for counts in (after_backward, found):
        counts |= {name: counts[name] - before for name in ("held", "peak")}
    return {"elements": 6 * 2**16, "backward": after_backward, "step": found, "scale": skipped["loss_scale"]}


def main(folder: str) -> None:
    from offloaded_scenes import RELEASED, SCENES, scene
    from other_device import NAME, built

    from amp_patch import multi_tensor

    device, place = built(folder), torch.device(NAME, 0)
    device.allow_fp64(True)
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"differ": [], "counts": {}, "trained": 0}
    everything = [("O5", "AdamW"), ("O2", "AdamW"), ("O2", "of another package")]
    for level, options in LEVELS.items():
        for name in MAKERS if level != "O5, checked" else ("AdamW",):
            for way in WAYS if (level, name) in everything else FEW:
                case = f"{level} {name} {way.__name__}"
                if way not in (averaged, entered_again):  # the device has a part in their FP32 arithmetic
                    here = train(way, name, place, norm=False, master_device="cpu", **options)
                    if differ(here, train(way, name, norm=False, **options)):
                        found["differ"].append(f"{case}, of a CPU")
                if name not in ("NAdam", "FusedAdam"):  # whose default there is foreach, or not fused
                    with multi_tensor.use_backend("torch"):
                        here = train(way, name, place, master_device="cpu", **options)
                        if differ(here, train(way, name, place, **options)):
                            found["differ"].append(f"{case}, of masters on the device")
                found["trained"] += 1
    for level, options in LEVELS.items():
        for way in SCENES[:-1] if level != "O5, checked" else ():
            for release in (False, True) if level == "O5" and way in RELEASED else (False,):
                with multi_tensor.use_backend("torch"):
                    wanted = scene(way, place, **options)
                    if differ(scene(way, place, master_device="cpu", gradient_release=release, **options), wanted):
                        found["differ"].append(f"{level} {way.__name__}, release {release}")
    for level, options in LEVELS.items():
        found["counts"][level] = counted(device, place, master_device="cpu", **options)
    released = {"opt_level": "O5", "gradient_release": True}
    found["counts"]["released"] = counted(device, place, master_device="cpu", **released)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
