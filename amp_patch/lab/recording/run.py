"""Run: what was recorded of one training, made of events, which are also the JSON lines of a recording."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from amp_patch.lab.diagnose.lost_updates import Updates, share_lost
from amp_patch.lab.wording import figure

# The parts of a step, in order: until the model's first forward; from there to scale_loss; its body and the
# unscaling; until optimizer.step (clipping, zero_grad); optimizer.step. Their times add up to the step's.
PARTS = ("data", "forward", "backward", "between", "optimizer")

# The level of a run with the script's own torch.autocast and GradScaler.
NATIVE = "native"

# Kinds of errors; "" is any other.
# INTERRUPTED: the user's Ctrl-C, no fault of the level. KILLED: SIGKILL, perhaps for memory. EXITED: sys.exit with a
# status.
INTERRUPTED, OUT_OF_MEMORY, KILLED, EXITED = "interrupted", "out of memory", "killed", "exited"

# Low-precision types, the coarser first -> their significant bits.
LOW_TYPES = {"bfloat16": 8, "float16": 11}

Event = dict[str, Any]


class Failure(NamedTuple):
    """Why a run gave no figures, or fewer than asked for: in one line, of which kind, and the script's line."""

    words: str
    kind: str = ""
    where: str = ""


@dataclass
class Look:
    """What `amp.inspect` saw of one step.

    Attributes:
        step: how many optimizer steps there had been before.
        scale, best_scale: the loss scale in use, and the largest at which no parameter's gradient overflows FP16.
        counts: "weights", "activations", "gradients" (unscaled) and "activation_gradients" (scaled) of the whole model
            -> {"zeros": n, "not_finite": n, "exponents": {"-24": n, ...}}.
        flushed, overflowed: name of a parameter -> the shares of its gradient's numbers that FP16 would lose at the
            scale in use, at 1, and at the best one.
        errors: name of a module -> the relative error of its output against FP32, as in `Inspection.errors`.
        not_finite: where the first number that is not finite appeared, in words; None if all were finite.
        keep_fp32: the modules that `initialize(keep_fp32=...)` would best keep in FP32.
    """

    step: int
    scale: float
    best_scale: float
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    flushed: dict[str, list[float]] = field(default_factory=dict)
    overflowed: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    not_finite: str | None = None
    keep_fp32: list[str] = field(default_factory=list)


@dataclass(repr=False)
class Run:
    """One training at one level, from one seed. Lists have one entry a step; times are in seconds, sizes in bytes.

    Attributes:
        level: "O0" to "O7", with rungs where masters or state are kept in fewer bytes ("O5+split"), or NATIVE.
        seed: which of the repetitions, from 0.
        dtype: the low-precision type, "float16" or "bfloat16"; None at O0.
        policy: the resolved policy in words.
        weights_type: at O0 the low-precision type in which the script's own optimizer steps most of its weights,
            "bfloat16" say: it has no masters. "" at other levels, and where they are FP32.
        device: of the model's first parameter, "cpu" or "cuda".
        lost_eps: the optimizer's eps (Adam's), if that is 0 in the type of its parameters: it divides by 0 then.
        error: why there are no figures, or fewer than asked for, in one line; None if all went well.
        error_kind: INTERRUPTED, OUT_OF_MEMORY, KILLED, EXITED, or "" for any other error, and for none.
        error_where: the line of the script's that raised it, "train.py, line 31"; "" where that is not known.
        log: the path of the file that has what the run printed; "" without one.
        refused: whether that is because the script cannot be trained at another level unedited.
        native: whether the script has mixed precision of torch's own (torch.autocast, GradScaler).
        notes: what the reader should know of a run that went well, a line each.
        loss: the sum over the loss_ids of the mean over the micro-batches of what went into `scale_loss`, unscaled.
        loss_types: of "bfloat16" and "float16" those that have every loss exactly: it was rounded to such a type before
            it was recorded, as in a model that computes it by itself. None where that is not known.
        objectives: how many sets of optimizers a step's losses were for, at most: of a GAN's, two.
        seconds: the time of a step.
        parts: name in PARTS -> the part of that time.
        scale: the loss scale (of loss_id 0, where there are several) that the step's gradients were scaled by.
        skipped: whether an overflow made the optimizer skip the step.
        samples: the first dimension of the model's first tensor (or the one that the recording was told), summed over
            the micro-batches; 0 where unknown.
        given: the sizes of that tensor, in the first step.
        epoch_samples: the samples of an epoch, if the script iterates a DataLoader of known length; else 0.
        weights, masters, gradients, state: what the model's parameters, the masters that are tensors of their own, the
            gradients at the end of a step's backward (of either), and the optimizer's state take.
        activations: what autograd had saved for the backward pass of one step (the third, or the last of fewer), where
            that was most. Each storage counts once, for as long as it lives; parameters, buffers and what the model was
            given do not. None where it was not measured: another's saved-tensor hooks are around the loop, the step
            uses torch.func, a CUDA graph is replayed, there was one step alone, or torch is older than 2.8.
        step_peak: on CUDA, by how much the allocated memory grew within that step, at most.
        peak_memory: the largest that CUDA's allocator held; on a CPU what the process came to hold (its resident set)
            over what it held when the recording began. None where the system does not tell.
        logged: name -> [step, value] of what the script gave to `amp.log`.
        looks: what `amp.inspect` saw, a step each.
        updates: what some of the steps changed in FP32 weights or masters, and what of that would be lost without:
            `lost_updates`. Empty where there are none. Of a training without a low-precision type, in both types.
        modules: in a search the names of the models' modules, each behind those inside it.
        advice: sizes of layers that would better be other ones, in words, a line each; on a GPU alone.
    """

    level: str
    seed: int = 0
    dtype: str | None = None
    policy: str = ""
    weights_type: str = ""
    device: str = ""
    lost_eps: float | None = None
    error: str | None = None
    error_kind: str = ""
    error_where: str = ""
    log: str = ""
    refused: bool = False
    native: bool = False
    notes: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    loss_types: list[str] | None = None
    objectives: int = 1
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    scale: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    epoch_samples: int = 0
    weights: int = 0
    masters: int = 0
    gradients: int = 0
    state: int = 0
    activations: int | None = None
    step_peak: int | None = None
    peak_memory: int | None = None
    logged: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    updates: list[Updates] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        last = f", last loss {figure(self.loss[-1])}" if self.loss else ""
        return f"Run({self.level} seed {self.seed}: {self.steps} steps{last}{', ' + self.error if self.error else ''})"

    def lost_updates(self, module: str = "", dtype: str | None = None) -> float | None:
        """Which share of the changes that the measured steps made to FP32 weights low-precision ones would lose.

        Of the whole model, or of one of its modules by name; None where no step was measured, or none changed anything.
        In the type "bfloat16" or "float16", unless given the training's, and BF16 where it has none.
        """
        return share_lost(self.updates, module, dtype or self.dtype or "bfloat16")

    @property
    def error_in_full(self) -> str:
        """The error of a run that failed: "ValueError: no (train.py, line 31; see runs/O2-seed0.log)"."""
        return self._with_place(self.error or "recorded no step")

    @property
    def error_in_short(self) -> str:
        """`error_in_full` with its message in one line, cut."""
        return self._with_place(textwrap.shorten(self.error or "recorded no step", 110, placeholder=" ..."))

    @property
    def overflows(self) -> list[Look]:
        """The looks that saw a number that is not finite, and after which no look of this run saw none.

        What a later look is free of is over: a dynamic loss scale begins too high and comes down.
        """
        return self.looks[self._last_finite + 1 :]

    @property
    def keep_fp32(self) -> list[str]:
        """What its looks advise to keep in FP32, each module once; not against what is over, as in `overflows`."""
        until = self._last_finite
        lasting = [look for i, look in enumerate(self.looks) if i > until or look.not_finite is None]
        return [*dict.fromkeys(name for look in lasting for name in look.keep_fp32)]

    def _with_place(self, words: str) -> str:
        where = "; ".join(filter(None, [self.error_where, f"see {self.log}" if self.log else ""]))
        return words + (f" ({where})" if where and not self.refused else "")

    @property
    def _last_finite(self) -> int:
        """The place of the last look that saw finite numbers alone; -1 without one."""
        return max((i for i, look in enumerate(self.looks) if look.not_finite is None), default=-1)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self.loss)

    def add(self, event: Event) -> None:
        """Take what one event of a recording tells.

        "begin" (once initialize was called), "end" and "outcome" (what the process that started the run says of it)
        carry attributes of this class by their names; "step" one entry of each list; "log" a step, a name and a value;
        "look" the attributes of a `Look`, "updates" those of an `Updates`; "memory" what one step took; "advice" lines;
        "modules" names; "note" a text.
        """
        event = dict(event)
        kind = event.pop("event")
        if kind in ("begin", "end", "outcome"):
            for name, value in event.items():
                setattr(self, name, value)
        elif kind == "step":
            for name in ("loss", "seconds", "scale", "skipped", "samples"):
                getattr(self, name).append(event[name])
            self.objectives = max(self.objectives, event.get("objectives", 1))
            if (types := event.get("loss_types")) is not None:
                kept = types if self.loss_types is None else self.loss_types
                self.loss_types = [each for each in kept if each in types]
            for part in PARTS:
                self.parts[part].append(event["parts"][part])
        elif kind == "log":
            self.logged.setdefault(event["name"], []).append((event["step"], event["value"]))
        elif kind == "look":
            self.looks.append(Look(**event))
        elif kind == "updates":
            self.updates.append(Updates(**event))
        elif kind == "memory":
            self.activations, self.step_peak = event["activations"], event["step_peak"]
        elif kind == "advice":
            self.advice += [line for line in event["lines"] if line not in self.advice]
        elif kind == "modules":
            self.modules += [name for name in event["names"] if name not in self.modules]
        elif kind == "note":
            self.notes.append(event["text"])
        else:
            kinds = "begin, step, log, look, updates, memory, advice, modules, note, end or outcome"
            raise ValueError(f"Run.add: event is {kind!r}; wanted {kinds}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """The run that `to_dict` was called on, also after JSON."""
        values = dict(values)
        values["looks"] = [Look(**look) for look in values.get("looks", [])]
        values["updates"] = [Updates(**each) for each in values.get("updates", [])]
        values["logged"] = {name: [(s, v) for s, v in pairs] for name, pairs in values.get("logged", {}).items()}
        return cls(**values)


# JSON has no literal for a number that is not finite; Python's float() reads these strings.
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


def dumps(value: Any, **options: Any) -> str:
    """Strict JSON of containers and numbers; numbers that are not finite become "NaN", "Infinity" and "-Infinity"."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # a number is not finite, which is rare: to copy all of them takes longer than to write them
        return json.dumps(_named(value), allow_nan=False, **options)


def loads(text: str) -> Any:
    """What `dumps` was given."""
    return _numbers(json.loads(text))


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _NAMES.get(value, "NaN")
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    return [_named(each) for each in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Any:
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return [_numbers(each) for each in value] if isinstance(value, list) else value
