"""inspect: statistics of a model's numbers during training, and the call that made the first non-finite one."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch.diagnose.call_log import CallLog, Frame, on_gradient
from amp_patch.diagnose.culprit import Call, StepLog
from amp_patch.diagnose.found_scaler import FoundScaler
from amp_patch.diagnose.histogram import Histogram
from amp_patch.diagnose.inspection import Inspection, NotFinite
from amp_patch.diagnose.module_error import distance, floats, in_fp32, is_random, relative_error
from amp_patch.diagnose.survey.kinds import KINDS
from amp_patch.diagnose.survey.measured import measure
from amp_patch.diagnose.survey.replay import Replay
from amp_patch.model.forward import policy_of
from amp_patch.model.keep_high import HighModule
from amp_patch.model.kept_module import KeptModule
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import distributed, tree
from amp_patch.support.compiled import in_backward
from amp_patch.support.devices import widest
from amp_patch.support.words import of_class
from amp_patch.training import observers
from amp_patch.training.innermost import as_list, innermost
from amp_patch.watch import questions, scaler_events

_TENSOR: Any = Tensor
_GRAD = _TENSOR.grad.__get__
_ATTRIBUTES = ("__get__", "__set__", "__delete__")  # `x.data`, `x.grad`


@contextmanager
def inspect(model: nn.Module, optimizers: Any = None, *, scaler: Any = None, line: bool = True) -> Iterator[Inspection]:
    """Inspect the numbers of `model` in the training steps that run in the block::

        with amp.inspect(model, optimizer) as seen:
            train_step()
        print(seen)

    Works at any level, and without `initialize`. At O0 the gradients are FP32, and
    `seen.gradients[name].flushed(s)` is the share of them that FP16 would lose at the loss scale s.

    Cost of a step: a pass over all activations and gradients; for `errors`, an FP32 forward of each module that calls
    no other; for `output_error`, a forward of an FP32 copy of the model; a sync when the optimizer begins to step.
    Compiled code runs eagerly in the block, because a compiled graph hides its functions. After the block nothing stays
    installed, and no tensor of a step is referenced.

    Args:
        model: the model that `initialize` returned, or any module. A wrapper (DataParallel) is replaced by its module.
        optimizers: one or more optimizers of the model. Their loss scale is divided out of the gradients, and their
            steps are counted. Without them, gradients stay scaled and the whole block is one step.
        line: whether to search the line that gives the model's output an error above 5 %, for up to 60 seconds.
        scaler: the scaler of the loss. Needed only if its class does not derive from torch.amp.GradScaler: those are
            found automatically. A step that the scaler skips is counted too.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model is sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect: model is {of_class(model)}; wanted a torch.nn.Module")
    distributed.refuse(model, "inspect")
    while [name for name, _ in model.named_children()] == ["module"] and not [*model.parameters(recurse=False)]:
        model = model.get_submodule("module")
    targets = [innermost(each) for each in as_list(optimizers)]
    seen = Inspection()
    if (policy := policy_of(model)) is not None and policy.product_format is not None:
        seen.high = [_plain(name) for name, module in model.named_modules() if isinstance(module, HighModule)]
    with ExitStack() as stack:
        log = _NumberLog(model, targets, scaler, seen, stack)
        stack.callback((replay := Replay(model, {})).end)
        if line and log.compares:
            replay.watch()
        try:
            with log:
                yield seen
        finally:
            log.conclude()
            if log.scale is not None:
                seen.scale = float(log.scale)
            elif log.found.scaler is not None:
                seen.scale = log.found.scaler.get_scale()
            else:
                scales = (scale for target in targets if (scale := questions.loss_scale_of(target)) is not None)
                seen.scale = next(scales, seen.scale)
    if line and policy is not None and seen.is_off:
        seen.cause = _cause_of(replay, policy)


def _cause_of(replay: Replay, policy: Policy) -> str:
    """Return the line that the error of the model's output comes from, with its figures; "" if none is found.

    If no loss was seen, the gradients of the output stand for it.
    """
    casts = policy.cast_model_type is not None
    level = next(kind.levels[0] for kind in KINDS if (kind.casts, kind.dtype) == (casts, policy.dtype))
    case = replay.case()
    cause = None if case is None else next(measure(case, (level,), seconds=60.0)).cause
    return "" if cause is None or cause.line is None else f"{cause.line.shown}: {cause}"


def _can_compare(model: nn.Module) -> bool:
    """Return whether an FP32 copy of `model` may run beside it: the model's level casts, and no module has a hook.

    In the copy a hook of user code would run once more, and might store the tensors that it receives. False too if a
    module draws random numbers, such as dropout: copy and model would draw different ones.
    """
    policy = policy_of(model)
    if policy is None or policy.changes_nothing:
        return False
    return not any(is_random(m) or vars(m)["_forward_hooks"] or vars(m)["_forward_pre_hooks"] for m in model.modules())


class _unlogged:
    """A block in which no log records calls: the code in it computes for a log, not for the model."""

    def __enter__(self) -> None:
        self.before, _NumberLog.busy = _NumberLog.busy, True

    def __exit__(self, *_: Any) -> None:
        _NumberLog.busy = self.before


class _NumberLog(CallLog, observers.Observer):
    """Logs the calls of a step, and the lowest and highest value of each tensor in them and of its gradient.

    Does not sync before `conclude`. Several logs may be active at once; they share `busy`.
    """

    busy = False  # True while a log computes for itself. All logs and threads share it: tensor hooks run on others.

    def __init__(self, model: nn.Module, targets: list[Any], scaler: Any, seen: Inspection, stack: ExitStack) -> None:
        super().__init__()
        self.seen, self.targets = seen, targets
        self.found = FoundScaler(scaler)
        for observer in (self.found, self):
            observers.add(observer)
            stack.callback(observers.remove, observer)
        self.steps_before = 0  # `seen.step` when a scaler began a step
        self.model = model
        self.called: set[str] = set()
        self.compares = _can_compare(model)
        self.scale: Tensor | None = None  # loss scale of the last backward
        self.stepping = False  # in an optimizer's step, or after one that an exception has ended
        self.handles: list[Any] = []
        self.forget()
        for name, param in model.named_parameters():
            name = _plain(name)
            seen.weights.setdefault(name, Histogram()).add(param)
            if param.requires_grad:
                stack.callback(on_gradient(param, self._gradient_of(name)).remove)
        self.hook(((_plain(name), module) for name, module in model.named_modules()), stack)
        for target in targets:
            if isinstance(target, torch.optim.Optimizer):
                # Read the log before the optimizer computes: its calls are not the model's.
                stack.callback(target.register_step_pre_hook(self._conclude_step).remove)
                stack.callback(target.register_step_post_hook(self._stepped).remove)

    def forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.calls: list[Call] = []
        self.keys = WeakTensorKeyDictionary()  # tensor -> (its key, its version when it got the key)
        self.nodes: dict[tuple[int, int], int] = {}  # (number of a graph node, output) -> the key of the tensor
        self.hooked: set[int] = set()
        self.outside: set[int] = set()  # keys of tensors that neither a call of the model nor a cast of O1 made
        self.values: list[Tensor] = []  # key -> lowest and highest value
        self.gradients: dict[int, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
        self.output_errors: list[Tensor] = []
        self.exact: list[Tensor] | None = None  # the outputs of an FP32 copy, while a forward of the model runs

    def is_logging(self) -> bool:
        return not _NumberLog.busy

    def passes_over(self, func: Any) -> bool:
        is_attribute = getattr(func, "__name__", "") in _ATTRIBUTES and func != _GRAD
        is_over = self.seen.not_finite is not None or self.stepping
        return is_over or is_attribute or scaler_events.runs() or in_backward()

    def log(self, func: Any, args: Any, kwargs: Any) -> Any:
        op = getattr(func, "__name__", str(func))
        with _unlogged():
            given = [self._key(t) for t in _given((args, kwargs))]
        result = func(*args, **kwargs)
        if op == "backward":
            return result
        with _unlogged():
            outputs = _given(args[0] if op == "__setitem__" else result)
            if func == _GRAD:  # `.grad` makes no tensor: backward has made it
                self.outside.update(self._key(grad) for grad in outputs)
            elif outputs:
                made = [self._key(t, new=True) for t in outputs]
                infinite = any(isinstance(c, float) and not math.isfinite(c) for c in (*args, *kwargs.values()))
                self.calls.append(Call(self.module_name(), op, given, made, not given or "empty" in op or infinite))
        return result

    def _key(self, tensor: Tensor, new: bool = False) -> int:
        """Return the tensor's key in the log, the index of its values.

        The tensor gets a new key if a call has just made it (`new`), or has written to it since it got its last key.
        """
        key, version = self.keys.get(tensor, (None, 0))
        changed = key is not None and version != _version(tensor)  # for example by a write through a view
        if new or changed or key is None:
            key = len(self.values)
            self.seen.low.update({tensor.dtype}.intersection(LOW_PRECISION))
            self.keys[tensor] = key, _version(tensor)
            self.values.append(_range(tensor))
            # A tensor that no logged call made comes from outside: no call of the model is to blame for its infinity.
            # FP16 tensors are excepted. An unlogged cast of O1 may have overflowed in one, so the search must continue
            # to the call that uses it.
            if not new and (changed or tensor.dtype is not torch.float16) and not isinstance(tensor, nn.Parameter):
                self.outside.add(key)
        if tensor.requires_grad and key not in self.hooked:
            self.hooked.add(key)
            gradients = self.gradients  # bound here: a graph can outlive the log, and `forget` replaces the dict
            handle = on_gradient(tensor, lambda grad: gradients.__setitem__(key, _range(grad)))
            node = tensor.grad_fn
            if node is None:
                self.handles.append(handle)
            else:
                if not new:
                    self._note_unseen(node, key, changed)
                self.nodes.setdefault((node._sequence_nr(), tensor.output_nr), key)
        return key

    def _note_unseen(self, made_by: Any, key: int, changed: bool) -> None:
        """Log the maker of a tensor that `__torch_function__` did not receive: a cast of O1 or an autograd function.

        Autograd's graph has the maker and its inputs. It is read at once, because a reference to its nodes would keep
        alive the tensors that they saved for backward.
        """
        given, todo = [], [made_by]
        for node in todo:
            for source, place in node.next_functions:
                if source is None:
                    continue
                if hasattr(source, "variable"):
                    found: int | None = self._key(source.variable)
                else:
                    found = self.nodes.get((source._sequence_nr(), place))
                if found is not None:
                    given.append(found)
                elif len(todo) < 16:  # bounded, since no node of a graph from before the block is known
                    todo.append(source)
        if given and key not in given:
            op = re.sub(r"Backward\d*$|^.*::", "", made_by.name())
            self.calls.append(Call(self.module_name(), op, given, [key], harmless=changed))

    def _factor(self) -> float | Tensor:
        """Return the factor that unscales the gradients of the running backward pass, and store the scale in `scale`.

        The factor is 1 / loss scale, or 1.0 if the loss is not scaled.
        """
        scale = self.found.scale()
        if scale is None:
            scale = next((body.scale for body in map(questions.body_of, self.targets) if body is not None), None)
        self.scale = self.scale if scale is None else scale.clone()
        return 1.0 if scale is None else scale.to(widest(scale.device)).reciprocal()

    def _gradient_of(self, name: str) -> Any:
        def hook(grad: Tensor) -> None:
            self.seen.gradients.setdefault(name, Histogram()).add(_values(grad), self._factor())

        return hook

    def forward_begins(self, frame: Frame, args: Any, kwargs: Any) -> None:
        self.stepping = False
        if self.running:
            self.running[-1].calls_others = True
        else:
            self._note_outside(args, kwargs)
            compares = not frame.name and self.compares and torch.is_grad_enabled() and not in_backward()
            with _unlogged():
                self.exact = in_fp32(self.model, args, kwargs) if compares else None
        self.called.add(frame.name)
        frame.inputs = [(tensor, _version(tensor)) for tensor in floats((args, kwargs))]

    def forward_ends(self, frame: Frame, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, seen = frame.name, self.seen

        def gradient_arrives(grad: Tensor) -> None:
            seen.activation_gradients.setdefault(name, Histogram()).add(_values(grad))

        with _unlogged():
            outputs = floats(output)
            for tensor in (tensor for tensor in outputs if tensor.requires_grad):
                if seen.not_finite is None and not in_backward():
                    self._key(tensor)  # logs an autograd function, hidden from modes, as a call of this module
                on_gradient(tensor, gradient_arrives)
            if in_backward():  # a checkpoint recomputes a forward that was already counted
                return
            for tensor in outputs:
                seen.activations.setdefault(name, Histogram()).add(tensor)
            exact = (self.exact or []) if len(self.running) == 1 else []
            if exact and [t.shape for t in exact] == [t.shape for t in outputs]:
                self.output_errors.append(distance(outputs, exact))
            # `relative_error` runs the module again. If the module has written to its input, the result would differ.
            in_place = any(_version(tensor) != version for tensor, version in frame.inputs)
            if outputs and not (frame.calls_others or in_place or is_random(module)):
                error = relative_error(module, args, kwargs, outputs)
                if error is not None:
                    self.errors[name] = torch.maximum(error, self.errors.get(name, error).to(error.device))

    def _note_outside(self, args: Any, kwargs: Any) -> None:
        """Mark the model's arguments and buffers as made outside: no call of the model is to blame for their -inf."""
        if in_backward() or self.seen.not_finite is not None:
            return
        with _unlogged():
            for tensor in floats((args, kwargs, [*self.model.buffers()])):
                self.outside.add(self._key(tensor))

    def _conclude_step(self, optimizer: Any, *_: Any) -> None:
        self.conclude()
        self.stepping = True

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self.stepping = False
        self.seen.step += 1

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        self.steps_before = self.seen.step
        if innermost(optimizer) in self.targets:
            self.conclude()

    def scaler_stepped(self, scaler: Any, optimizer: Any, skipped: Any) -> None:
        was_skipped = skipped is not None and self.seen.step == self.steps_before  # the optimizer's hook did not run
        self.seen.step += was_skipped and innermost(optimizer) in self.targets

    def conclude(self) -> None:
        """Find the call that made this step's first non-finite number, and read the modules' errors. Syncs once."""
        with _unlogged():
            pairs = [*self.values, *self.gradients.values(), *self.errors.values(), *self.output_errors]
            if pairs:
                every = torch.stack([pair.to(pairs[0].device) for pair in pairs]).tolist()
                values, later = every[: len(self.values)], every[len(self.values) :]
                gradients = dict(zip(self.gradients, later, strict=False))
                later = later[len(gradients) :]
                self._note_errors(dict(zip(self.errors, later, strict=False)))
                off = [error for error, _ in later[len(self.errors) :]]
                self.seen.output_error = max([self.seen.output_error, *off])
                if self.seen.not_finite is None:
                    self.seen.not_finite = self._culprit(StepLog(self.calls, values, gradients, self.outside))
        self.forget()

    def _note_errors(self, errors: dict[str, list[float]]) -> None:
        for name, (error, too_large) in errors.items():
            self.seen.errors[name] = max(self.seen.errors.get(name, 0.0), error)
            if too_large:
                self.seen.too_large.add(name)

    def _culprit(self, log: StepLog) -> NotFinite | None:
        call, direction = log.forward_culprit(), "forward"
        if call is None:
            call, direction = log.backward_culprit(), "backward"
        if call is None:
            return None
        pairs = [log.gradients[k] for k in call.made if k in log.gradients]
        if direction == "forward":
            pairs = [log.values[k] for k in call.given]
        span = min((low for low, _ in pairs), default=0.0), max((high for _, high in pairs), default=0.0)
        return NotFinite(
            call.module, call.op, direction, self.seen.step, span, self._remedy(log.touching(call, direction))
        )

    def _remedy(self, modules: list[str | None]) -> tuple[str, ...]:
        """Return the names of modules for `keep_fp32=` with which the numbers passed between `modules` would be FP32.

        The tuple is empty if no module inside the model would do, or if all computation was FP32 already.
        """
        if self.seen.all_fp32:
            return ()
        kept = [_plain(name) for name, module in self.model.named_modules() if isinstance(module, KeptModule)]
        if not any(param.dtype in LOW_PRECISION for param in self.model.parameters()):
            # At O1 the output of a kept module stays FP32, so each module can be kept separately.
            return tuple(dict.fromkeys(name for name in modules if name and not _is_inside(name, kept)))
        # In a cast model the output of a kept module is cast back: only a module around all of them keeps the numbers
        # between them in FP32.
        if None in modules:
            return ()
        common = posixpath.commonpath((name or "").replace(".", "/") for name in modules).split("/")
        while common and ".".join(common) not in self.called:  # a ModuleList has no forward, so it cannot be kept
            common = common[:-1]
        return (".".join(common),) if any(common) and not _is_inside(".".join(common), kept) else ()


def _is_inside(name: str, outer: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in outer)


def _plain(name: str) -> str:
    """Return a qualified name without the part that torch.compile's wrapper adds, as `keep_fp32` needs it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _given(value: Any) -> list[Tensor]:
    """Return the floating and complex tensors among a function's arguments, or in its result."""
    return [
        each
        for each in tree.tensors(value)
        if (each.is_floating_point() or each.is_complex()) and each.layout is torch.strided and not each.is_nested
    ]


@torch.no_grad()
def _range(tensor: Tensor) -> Tensor:
    """Return the tensor's lowest and highest value as a tensor of shape [2].

    If one value is NaN, both are NaN. If the tensor is empty, both are 0.
    """
    values = _values(tensor.detach())
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return torch.stack(torch.aminmax(values)) if values.numel() else values.new_zeros(2)


def _version(tensor: Tensor) -> int:
    """Return the tensor's version counter; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
