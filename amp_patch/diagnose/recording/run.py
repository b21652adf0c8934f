"""Run: the recorded figures of one training, built from events, which are also the JSON lines of a recording."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from amp_patch.diagnose.lost_updates import Updates, share_lost
from amp_patch.diagnose.wording import figure, level_name

# The parts of a step, in order, whose times add up to the step's. "data": until the model's first forward. "forward":
# until scale_loss. "backward": the body of scale_loss, and the unscaling. "between": until optimizer.step (clipping,
# zero_grad). "optimizer": optimizer.step.
PARTS = ("data", "forward", "backward", "between", "optimizer")

# The level of a run with the script's own torch.autocast and GradScaler.
NATIVE = "native"

# Kinds of errors; "" is any other.
# INTERRUPTED: the user's Ctrl-C, no fault of the level. KILLED: SIGKILL, possibly by the system for lack of
# memory. EXITED: sys.exit with a status. OVERDUE: `compare` ended it, because a step took far too long. UNTRAINED: the
# script ended well, and made no step.
INTERRUPTED, OUT_OF_MEMORY, KILLED, EXITED, OVERDUE = "interrupted", "out of memory", "killed", "exited", "overdue"
UNTRAINED = "untrained"

# Low-precision types, the coarser first -> their significant bits.
LOW_TYPES = {"bfloat16": 8, "float16": 11}

Event = dict[str, Any]


class Failure(NamedTuple):
    """The reason for a run without figures, or with fewer than requested.

    Attributes:
        words: the reason in one line.
        kind: as `Run.error_kind`.
        where: as `Run.error_where`.
    """

    words: str
    kind: str = ""
    where: str = ""


@dataclass(repr=False)
class Run:
    """One training at one level, from one seed. Lists have one entry a step; times are in seconds, sizes in bytes.

    Attributes:
        level: "O0" to "O7", with suffixes if masters or state are stored in fewer bytes ("O5+split"); or NATIVE.
        seed: the number of the repetition, from 0.
        dtype: the low-precision type, "float16" or "bfloat16"; None at O0.
        policy: the resolved policy in words.
        weights_type: at O0, the type of most weights that the script's optimizer steps, if it is not FP32: "bfloat16"
            or "float16", which then have no masters, or "float64". "" at other levels, and if most weights are FP32.
        maximized: "all" if the optimizers maximize the loss (`maximize=True`), "some" if only some of their groups do;
            else "".
        device: the device of the model's first parameter, "cpu" or "cuda".
        lost_eps: the optimizer's eps (Adam's), if it is 0 in the type of its parameters, so that Adam divides by 0;
            otherwise None.
        error: the reason for a run without figures, or with fewer than requested, in one line; None if there is none.
        error_kind: INTERRUPTED, OUT_OF_MEMORY, KILLED, EXITED, OVERDUE, or "" for any other error, and for none.
        error_where: the script's line that raised the error, "train.py, line 31"; "" if it is not known.
        log: the path of the file with the run's output; "" if there is none.
        refused: whether the error is that the unedited script cannot be trained at another level.
        native: whether the script uses torch's own mixed precision (torch.autocast, GradScaler).
        unfinished: whether the recording ended between a forward of the training and the step that was to follow.
        forwards: how often a model was called with gradients; 0 if unknown.
        caught: the line of the log that names an error, if the run made fewer steps than O0's of its seed, or left out
            batches; else "".
        start: some weights and inputs of the first forward.
        replaced: the names and lines of these autocasts and GradScalers, in words.
        edited: whether the script chooses its level by amp_patch or Apex.
        notes: remarks for the reader of a run without an error, one line each.
        loss: the unscaled loss given to `scale_loss`: its mean over the micro-batches, summed over the loss_ids.
        loss_types: the types of "bfloat16" and "float16" that represent every loss exactly. If there is one, the loss
            was rounded to it before it was recorded, as in a model that returns its loss. None if it is not known.
        objectives: the largest number of sets of optimizers that had losses in one step; 2 in a GAN.
        seconds: the time of a step; NaN if the step was measured for `activations`.
        cpu_seconds: the CPU time of the process in a step, summed over its threads; NaN as in `seconds`.
        parts: name in PARTS -> the seconds of that part of each step.
        scale: the loss scale of the step's gradients (of loss_id 0 if there are several).
        skipped: whether an overflow made the optimizer skip the step.
        samples: the size of the model's first input tensor in its first dimension (or in `batch_dim` of the recorder),
            summed over the micro-batches; 0 if unknown.
        weights, masters, gradients, state: the bytes of the model's parameters, of the masters that have memory of
            their own, of all gradients at the end of a step's backward, and of the optimizer's state.
        activations: the peak of the bytes that autograd saved for the backward of one step (the third, or the last of
            fewer), with each storage counted once. Parameters, buffers and the model's inputs are not counted. None if
            other saved-tensor hooks are around the loop, the step uses torch.func, a CUDA graph is replayed, there was
            only one step, or torch is older than 2.8.
        peak_memory: on CUDA, the peak of the allocated memory; on a CPU, the largest growth of the process (its
            resident set) since the recording began. None if the system does not report it.
        other_work: the share of all cores that other work took while the run trained; 0 if it took little.
        logged: name -> (step, value) of each call of `amp.log`.
        updates: for some steps, the changes of FP32 weights or masters, and the share that low-precision weights would
            lose (`lost_updates`). Both types are measured in a training without a low-precision type.
        modules: in a search, the names of the models' modules, each after the modules inside it.
    """

    level: str
    seed: int = 0
    dtype: str | None = None
    policy: str = ""
    weights_type: str = ""
    maximized: str = ""
    device: str = ""
    lost_eps: float | None = None
    error: str | None = None
    error_kind: str = ""
    error_where: str = ""
    log: str = ""
    refused: bool = False
    native: bool = False
    unfinished: bool = False
    forwards: int = 0
    caught: str = ""
    start: list[float] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    edited: bool = False
    notes: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    loss_types: list[str] | None = None
    objectives: int = 1
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    scale: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    weights: int = 0
    masters: int = 0
    gradients: int = 0
    state: int = 0
    activations: int | None = None
    peak_memory: int | None = None
    other_work: float = 0.0
    logged: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    updates: list[Updates] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        last = f", last loss {figure(self.loss[-1])}" if self.loss else ""
        return f"Run({self.level} seed {self.seed}: {self.steps} steps{last}{', ' + self.error if self.error else ''})"

    def lost_updates(self, module: str = "", dtype: str | None = None) -> float | None:
        """Return the share of the FP32 weights' changes in the measured steps that low-precision weights would lose.

        Args:
            module: the name of a module; "": the whole model.
            dtype: "bfloat16" or "float16"; None: the training's low-precision type, or BF16 if it has none.

        Returns:
            The share, from 0 to 1; None if no step was measured, or no measured step changed a weight.
        """
        return share_lost(self.updates, module, dtype or self.dtype or "bfloat16")

    @property
    def name(self) -> str:
        """The level and the seed: "O2 seed 0"."""
        return f"{level_name(self.level, None)} seed {self.seed}"

    @property
    def error_in_full(self) -> str:
        """The error of a run that failed: "ValueError: no (train.py, line 31; see runs/O2-seed0.log)"."""
        return self._with_place(self.error or "recorded no step")

    @property
    def error_in_short(self) -> str:
        """`error_in_full`, with the message shortened to one line."""
        return self._with_place(textwrap.shorten(self.error or "recorded no step", 110, placeholder=" ..."))

    def _with_place(self, words: str) -> str:
        where = "; ".join(filter(None, [self.error_where, f"see {self.log}" if self.log else ""]))
        return words + (f" ({where})" if where and not self.refused else "")

    @property
    def steps(self) -> int:
        """The number of recorded steps."""
        return len(self.loss)

    def add(self, event: Event) -> None:
        """Add one event of a recording to the figures.

        "begin" (after `initialize`), "end" and "outcome" (from the process that started the run) have attributes of
        this class by name. "step" has one entry of each list, "log" a step, a name and a value, "updates" the
        attributes of an `Updates`, "memory" the bytes of one step, "modules" names, "note" a text.
        """
        event = dict(event)
        kind = event.pop("event")
        if kind in ("begin", "end", "outcome"):
            for name, value in event.items():
                setattr(self, name, value)
        elif kind == "step":
            for name in ("loss", "seconds", "scale", "skipped", "samples"):
                getattr(self, name).append(event[name])
            self.cpu_seconds.append(event.get("cpu_seconds", math.nan))
            self.objectives = max(self.objectives, event.get("objectives", 1))
            if (types := event.get("loss_types")) is not None:
                kept = types if self.loss_types is None else self.loss_types
                self.loss_types = [each for each in kept if each in types]
            for part in PARTS:
                self.parts[part].append(event["parts"][part])
        elif kind == "log":
            self.logged.setdefault(event["name"], []).append((event["step"], event["value"]))
        elif kind == "updates":
            self.updates.append(Updates(**event))
        elif kind == "memory":
            self.activations = event["activations"]
        elif kind == "modules":
            self.modules += [name for name in event["names"] if name not in self.modules]
        elif kind == "note":
            self.notes.append(event["text"])
        else:
            kinds = "begin, step, log, updates, memory, modules, note, end or outcome"
            raise ValueError(f"Run.add: event is {kind!r}; wanted {kinds}")

    def to_dict(self) -> dict[str, Any]:
        """Return {name of an attribute: its value} for JSON; `from_dict` reads the dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """Make a run from the result of `to_dict`, as it is or written to JSON and read back.

        Raises:
            ValueError: a value has another type.
        """
        known = {each.name for each in fields(cls)}  # an older report has more
        values = {name: value for name, value in values.items() if name in known}
        check_types(cls, values)
        values["updates"] = [Updates(**each) for each in values.get("updates", [])]
        values["logged"] = {name: [(s, v) for s, v in pairs] for name, pairs in values.get("logged", {}).items()}
        return cls(**values)


def check_types(owner: type, values: dict[str, Any]) -> None:
    """Check that values, as JSON has them, have the types of the fields of the dataclass `owner`.

    Raises:
        ValueError: a value has another type.
    """
    hints = get_type_hints(owner)
    for name, value in values.items():
        if name not in hints or not _has_type(value, hints[name]):
            raise ValueError(
                f"{name} of a {owner.__name__} is {value!r:.60}; wanted {hints.get(name, 'no such field')}"
            )


def _has_type(value: Any, hint: Any) -> bool:
    inner = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_has_type(value, each) for each in inner)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_has_type(each, inner[0]) for each in value)
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_has_type, value, inner))
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_has_type(each, inner[1]) for each in value.values())
    if is_dataclass(hint):
        if isinstance(value, dict):
            check_types(cast(type, hint), value)
        return isinstance(value, dict)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


# JSON has no literal for a number that is not finite; Python's float() reads these strings.
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


def dumps(value: Any, **options: Any) -> str:
    """Return strict JSON of containers and numbers; "NaN", "Infinity" and "-Infinity" are strings in it."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # a number is not finite, which is rare; copying `value` takes longer than writing it
        return json.dumps(_named(value), allow_nan=False, **options)


def loads(text: str) -> Any:
    """Return the value that `dumps` has written."""
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
