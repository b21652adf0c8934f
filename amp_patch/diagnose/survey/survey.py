"""survey: which lines of a training a level would break, from one step in FP32."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.diagnose.call_log import on_gradient
from amp_patch.diagnose.lost_updates import UpdateMeter
from amp_patch.diagnose.survey import measured
from amp_patch.diagnose.survey.calls import LOWERING, Call, Finding, running_module, running_optimizer, user_line
from amp_patch.diagnose.survey.kinds import CASTING, KINDS, LEVELS, STORED, Place
from amp_patch.diagnose.survey.report import Line, Report
from amp_patch.diagnose.survey.rules import RULES
from amp_patch.diagnose.survey.steps import Case
from amp_patch.diagnose.survey.visit import Visitor
from amp_patch.diagnose.trial_forward import state_restored
from amp_patch.model.forward import policy_of
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS
from amp_patch.support import distributed
from amp_patch.support.patches import Patches
from amp_patch.support.words import of_class

_SHARE = 0.1  # a larger share of gradients that become 0 in FP16 is reported
_UNSCALED = "O3"  # the FP16 level with a loss scale of 1, and without masters
_WITH_MASTERS = tuple(level for level in LEVELS if OPT_LEVELS[level].master_weights)
_FP16 = next(kind for kind in KINDS if _UNSCALED in kind.levels)


class Surveyor:
    """A `with` block that applies the rules to each torch call in the training of the followed models (`follow`).

    Attributes:
        report: the findings so far.
        unedited: whether the script is not edited, so that findings that `run` serves break no level.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.unedited = False
        self._visitor = Visitor(self._look, self._take)
        self._patches = Patches()
        self._flushed: dict[tuple[Place, str], Tensor] = {}
        self._meter: UpdateMeter | None = None
        self._optimizer: Any = None
        self._names: dict[int, str] = {}  # id of a module -> its name
        self._stored: dict[int, Any] = {}  # id -> attribute of a parameter that was there before the training

    def __enter__(self) -> Surveyor:
        autocast = torch.amp.autocast_mode.autocast
        self._patches.set(autocast, "__enter__", self._passing(autocast.__enter__, 1))
        self._patches.set(autocast, "__exit__", self._passing(autocast.__exit__, -1))
        self._patches.set(torch.autograd.Function, "apply", self._applying())
        self._patches.set(nn.Module, "__setattr__", self._assigning())
        self._visitor.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        visitor = self._visitor
        visitor.active = False
        visitor.__exit__(None, None, None)
        visitor.stack.close()
        self._patches.remove()
        self._read_gradients()

    def follow(self, model: nn.Module, trained: Iterable[Tensor]) -> None:
        """Apply the rules also to the training of `model`. `trained` has the parameters that optimizers hold."""
        trained = tuple(trained)
        self._names |= {id(module): name for name, module in model.named_modules()}
        self._stored |= {id(value): value for param in trained for value in vars(param).values()}
        self._visitor.follow(model, trained)

    # Rules.

    def _look(self, call: Call) -> None:
        if "empty" in call.op:  # memory whose numbers are not made yet
            return
        if self._optimizer is not None and call.op != "grad":  # an optimizer computes with FP32 masters
            return
        for rule in RULES:
            for finding in rule(call):
                self._note(call, finding)
        if call.inside and call.rule in LOWERING:
            for tensor, facts in call.outputs:
                kinds = [k for k in facts.low if k.dtype is torch.float16 and k.casts]
                if kinds and facts.learned and tensor.requires_grad and tensor.dim() > 1:
                    self._watch(tensor, call)

    def _note(self, call: Call, finding: Finding) -> None:
        levels = [level for kind in finding.kinds for level in kind.levels]
        modules = [name] if (name := running_module(self._names)) else []
        op, breaks = finding.op or call.op, not (finding.served and self.unedited)
        line = Line(*(finding.line or call.line), op, levels, finding.what, finding.edit, modules, breaks=breaks)
        line.raises, line.served = finding.raises, finding.served
        self.report.add(line)

    def _take(self, tensor: Tensor) -> None:
        """Report an attribute that a hook of the backward has stored in a parameter, if an optimizer's method reads it.

        Only levels with masters have a line: their optimizers hold other tensors than the model.
        """
        optimizer = running_optimizer()
        held = () if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        name = next((name for p in held for name, value in vars(p).items() if value is tensor), None)
        if name is not None and id(tensor) not in self._stored:
            what = f"the backward stores {name!r} in the model's parameters; the optimizer holds masters, which lack it"
            edit = f"read {name!r} from the model's parameters, and give the optimizer's a gradient; or O3"
            self.report.add(Line(*user_line(), name, [*_WITH_MASTERS], what, edit, raises=True))
            self._visitor.facts[tensor] = STORED

    # Gradients.

    def _watch(self, tensor: Tensor, call: Call) -> None:
        key, flushed = (call.line, call.op), self._flushed

        def gradient_arrives(grad: Tensor) -> None:
            with torch.no_grad():
                size = grad.detach().float().abs()
                sums = torch.stack([size.sum(), torch.where(size <= 2.0**-25, size, 0.0).sum()])
                flushed[key] = sums + flushed[key] if key in flushed else sums

        on_gradient(tensor, gradient_arrives)

    def _read_gradients(self) -> None:
        # A layer with much smaller gradients than the other layers hardly learns in FP32 either. So a finding needs the
        # share of lost gradients to be large in the whole model too.
        read = {key: sums.tolist() for key, sums in self._flushed.items()}
        every, gone = (sum(each[at] for each in read.values()) for at in (0, 1))
        for (line, op), (total, lost) in read.items():
            if lost > _SHARE * total > 0 and gone > _SHARE * every:
                what = (
                    f"{100 * lost / total:.0f} % of the gradient of {op} is below FP16's smallest at a loss scale of 1"
                )
                edit = 'loss_scale="dynamic", which O1 and O2 have'
                self.report.add(Line(*line, op, [_UNSCALED], what, edit))

    # Updates.

    def step_begins(self, optimizer: Any) -> None:
        """Before the first step, store samples of the weights, and pause the rules while the optimizer computes.

        If the step is user code, attributes of parameters and assigned gradients are still reported. Before later steps
        do nothing. An `eps` that is 0 in FP16 is reported for each optimizer.
        """
        if not getattr(optimizer, "computes_in_fp32", False):
            for eps in [group.get("eps") for group in optimizer.param_groups]:
                if isinstance(eps, float) and _FP16.vanishes(eps):
                    what = f"eps={eps:g} of {type(optimizer).__name__} is 0 in FP16, and a gradient of 0 gives 0 / 0"
                    edit = "eps=1e-4, or O2, which steps in FP32"
                    self.report.add(Line(*user_line(), "step", [_UNSCALED], what, edit))
        if self._meter is None and self._visitor.active:
            names = {id(p): name for model in self._visitor.models for name, p in model.named_parameters()}
            self._visitor.active = not type(optimizer).step.__module__.startswith("torch.")
            self._visitor.plain += 1  # no level casts in a step
            self._meter, self._optimizer = UpdateMeter(optimizer, names), optimizer

    def step_ends(self, optimizer: Any) -> None:
        """Count the updates of the first step that low-precision weights would lose, and resume the survey."""
        if self._meter is None or optimizer is not self._optimizer:
            return
        for dtype, counts in self._meter.counts_in(LOW_PRECISION).items():
            changed, lost = (sum(int(each[at]) for each in counts.values()) for at in (0, 1))
            if changed:
                self.report.lost[str(dtype).removeprefix("torch.")] = lost / changed
        self._visitor.plain -= 1
        self._visitor.active, self._optimizer = True, None

    # Requests for FP32.

    def _passing(self, original: Callable[..., Any], by: int) -> Callable[..., Any]:
        """Return `__enter__` (`by` is 1) or `__exit__` (-1) of torch.autocast, which counts the entered regions."""
        visitor = self._visitor

        @functools.wraps(original)
        def passing(region: Any, *args: Any) -> Any:
            if region.fast_dtype is torch.float32:
                visitor.asked[:] = [*visitor.asked, user_line()] if by > 0 else visitor.asked[:-1]
            visitor.plain += by * _casts_nothing(region)
            return original(region, *args)

        return passing

    def _assigning(self) -> Any:
        original, visitor = nn.Module.__setattr__, self._visitor

        @functools.wraps(original)
        def __setattr__(module: nn.Module, name: str, value: Any) -> None:
            before = module.__dict__.get("_buffers", {}).get(name)
            original(module, name, value)
            if visitor.active and before is not None and isinstance(value, Tensor) and before.shape == value.shape:
                path = visitor.untrained.get(before.untyped_storage().data_ptr())
                if path is not None and value.is_floating_point():
                    visitor.untrained[value.untyped_storage().data_ptr()] = path
                    call = Call(None, (value,), inputs=[(value, visitor.of(value))], name=name)
                    visitor.note_write(call, before)
                    self._look(call)

        return __setattr__

    def _applying(self) -> Any:
        visitor, look = self._visitor, self._look
        slot = inspect.getattr_static(torch.autograd.Function, "apply")  # a class method, from torch 2.15 on of C

        def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return slot.__get__(None, cls)(*args, **kwargs)

        @functools.wraps(torch.autograd.Function.apply)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not (visitor.active and visitor.depth):
                return original(cls, *args, **kwargs)
            given = [(t, visitor.of(t)) for t in args if isinstance(t, Tensor) and t.is_floating_point()]
            if not _asks_for_fp32(cls.forward):
                result = original(cls, *args, **kwargs)
                if any(facts.learned for _, facts in given):
                    visitor.has_learned(result)
                return result
            look(Call(None, inputs=given, inside=True, name="custom_fwd"))
            for tensor, facts in given:  # custom_fwd casts them to FP32 at O1 and O4, not in a cast model
                visitor.facts[tensor] = replace(facts, low=facts.low & CASTING)
            visitor.plain += 1
            try:
                return original(cls, *args, **kwargs)
            finally:
                visitor.plain -= 1
                for tensor, facts in given:
                    visitor.facts[tensor] = facts

        return classmethod(apply)


def _casts_nothing(region: Any) -> bool:
    """Return whether a torch.autocast is disabled or asks for FP32, so that O1 and O4 cast nothing inside of it."""
    return not region._enabled or region.fast_dtype not in LOW_PRECISION


def _asks_for_fp32(forward: Any) -> bool:
    """Return whether torch's custom_fwd has decorated `forward`, with cast_inputs=torch.float32."""
    code, cells = getattr(forward, "__code__", None), getattr(forward, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return any(n == "cast_inputs" and c.cell_contents is torch.float32 for n, c in zip(names, cells, strict=False))


def survey(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Any, optimizer: Any = None, *, measure: bool = True
) -> Report:
    """Run one step of an FP32 training, and tell which of its lines a level would break::

        print(amp.survey(model, torch.nn.functional.cross_entropy, (inputs, targets)))

    The report has a line for each problem that was found: file and line, the operation, the levels, and an edit. It
    judges one forward and backward, and trains nothing: parameters, gradients, buffers, the optimizer's state and the
    random generators are restored. Syncs with the device.

    Rules judge the lines of the FP32 step first. Then copies of the model make the step at O1, O2, O4 and O5, and their
    gradients are compared with FP32's: an error above 5 %, and above 5 times the error that rounding the weights and
    each layer's output once gives, is told with its cause. All levels take at most 16 steps, and a level at most 40 if
    something is told. Two copies of the model are in memory at a time, and after two minutes no further level is
    measured.

    Args:
        model: in FP32, before `initialize`.
        loss_fn: takes the model's output, and the targets if it has a second argument, and returns the loss.
        inputs: a tuple of the model's inputs, followed by the targets if `loss_fn` takes them. If `loss_fn` takes the
            output alone, also a single tensor, or a dict of inputs by name.
        optimizer: if given, the report also has the share of the updates that would be lost without masters. For this,
            one step is made and undone.
        measure: whether levels are measured too, and not judged by rules alone.

    Raises:
        TypeError: `model` is no module, `inputs` has another type, or `loss_fn` returned no loss.
        ValueError: the model went through `initialize` at a level that casts, or is low precision, or is sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"survey: model is {of_class(model)}; wanted a torch.nn.Module")
    distributed.refuse(model, "survey")
    policy = policy_of(model)
    if (policy is not None and not policy.changes_nothing) or any(p.dtype in LOW_PRECISION for p in model.parameters()):
        level = "low precision" if policy is None else f"at opt_level {policy.opt_level!r}"
        raise ValueError(
            f"survey: this {type(model).__name__} is {level}, and the survey looks at an FP32 step: call it before "
            "initialize(), or give it amp.fp32_copy(model)"
        )
    named = inputs if isinstance(inputs, Mapping) else {}
    given = () if named else (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(given, tuple | list):
        raise TypeError(f"survey: inputs is {of_class(inputs)}; wanted a tuple, a tensor or a dict")
    targets = given[-1:] if len(given) > 1 and _takes_two(loss_fn) else ()
    params = [*model.parameters()]
    grads = [param.grad for param in params]
    surveyor = Surveyor()
    with state_restored(model), torch.enable_grad():
        try:
            for param in params:
                param.grad = None
            with surveyor:
                surveyor.follow(model, [p for p in params if p.requires_grad])
                loss = loss_fn(model(*given[: len(given) - len(targets)], **named), *targets)
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise TypeError("survey: loss_fn did not return a loss, a tensor of one element with a gradient")
                loss.backward()
                if optimizer is not None:
                    _step(surveyor, optimizer)
        finally:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
    report = surveyor.report
    if measure:
        case = Case(model, loss_fn, tuple(given[: len(given) - len(targets)]), named, tuple(targets))
        for found in measured.measure(case, known=report.broken):
            report.add_measured(found)
    return report


def _step(surveyor: Surveyor, optimizer: Any) -> None:
    """Step the optimizer once, to measure the share of updates that O3 would lose, and undo the step."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in held]
    state = {key: {name: _copied(value) for name, value in each.items()} for key, each in optimizer.state.items()}
    try:
        surveyor.step_begins(optimizer)
        optimizer.step()
        surveyor.step_ends(optimizer)
    finally:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for param, value in zip(held, before, strict=True):
                param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _takes_two(loss_fn: Any) -> bool:
    """Return whether `loss_fn` takes the targets too: it cannot be called with one argument, the model's output.

    True for a builtin without a signature.
    """
    try:
        inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).bind(None)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return True
    return False
