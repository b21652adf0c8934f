"""What a recording holds: events fold into a Run, and a Run survives JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from amp_patch.diagnose.lost_updates import Updates
from amp_patch.diagnose.recording.run import PARTS, Run, dumps, loads


def step(loss: float, seconds: float = 0.5) -> dict:
    parts = {part: seconds / 8 * (i + 1) for i, part in enumerate(PARTS)}
    return {
        "event": "step",
        "loss": loss,
        "seconds": seconds,
        "cpu_seconds": 2 * seconds,
        "parts": parts,
        "scale": 128.0,
        "skipped": math.isinf(loss),
        "samples": 4,
    }


# Every field has a value that is not its default, and every kind of number is there.
RUN = Run(
    level="O2",
    seed=3,
    dtype="bfloat16",
    policy="O2 (torch.bfloat16)",
    weights_type="bfloat16",
    maximized="all",
    unfinished=True,
    forwards=7,
    start=[0.5],
    caught="RuntimeError: no",
    device="cuda",
    error="it broke",
    error_kind="killed",
    error_where="train.py, line 3",
    log="runs/O2-seed3.log",
    loss_types=["bfloat16"],
    objectives=2,
    refused=True,
    native=True,
    replaced=["GradScaler (train.py, line 9)"],
    edited=True,
    notes=["one", "two"],
    lost_eps=1e-8,
    loss=[1.5, math.nan, math.inf, -math.inf, 1e-320, 0.1],
    seconds=[0.25, math.nan],
    cpu_seconds=[0.5, math.nan],
    parts={part: [0.125, math.nan] for part in PARTS},
    scale=[65536.0, math.inf],
    skipped=[True, False],
    samples=[8, 0],
    weights=2**40,
    masters=2,
    gradients=3,
    state=4,
    activations=6,
    other_work=0.25,
    peak_memory=5,
    logged={"accuracy": [(1, 0.5), (7, math.nan)]},
    updates=[Updates("float16", {"a.weight": [9, 4], "b": [0, 0]}, 2), Updates("float16", {"a.weight": [1, 1]}, 4)],
    modules=["head"],
)


def same_values(a: object, b: object) -> bool:
    """Equal to the type and the bit, NaN to NaN."""
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same_values(vars(a), vars(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and [*a] == [*b] and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_values, a, b))
    return type(a) is type(b) and a == b


def test_events_fold_into_a_run():
    run = Run("O2", 1)
    events = [
        {"event": "begin", "dtype": "float16", "policy": "O2", "device": "cpu"},
        step(2.0),
        {"event": "log", "step": 1, "name": "accuracy", "value": 0.25},
        step(math.inf, seconds=1.0),
        {"event": "log", "step": 2, "name": "accuracy", "value": 0.5},
        {"event": "memory", "step": 2, "activations": 6},
        {"event": "note", "text": "no batch"},
        {"event": "modules", "names": ["body.0", "body"]},
        {"event": "modules", "names": ["body", "head"]},
        {"event": "end", "weights": 1, "masters": 2, "gradients": 3, "state": 4, "peak_memory": 5},
    ]
    kept = json.dumps(events[0])
    for event in events:
        run.add(event)
    assert json.dumps(events[0]) == kept, "the event is another sink's too"
    assert run == Run(
        "O2",
        1,
        dtype="float16",
        policy="O2",
        device="cpu",
        notes=["no batch"],
        loss=[2.0, math.inf],
        seconds=[0.5, 1.0],
        cpu_seconds=[1.0, 2.0],
        parts={part: [(i + 1) / 16, (i + 1) / 8] for i, part in enumerate(PARTS)},
        scale=[128.0, 128.0],
        skipped=[False, True],
        samples=[4, 4],
        weights=1,
        masters=2,
        gradients=3,
        state=4,
        activations=6,
        peak_memory=5,
        logged={"accuracy": [(1, 0.25), (2, 0.5)]},
        modules=["body.0", "body", "head"],
    )
    assert run.steps == 2


def test_a_failed_run_says_why_and_where_in_one_line():
    run = Run("O2", error="ValueError: no", error_where="train.py, line 3", log="runs/O2-seed0.log")
    assert run.error_in_full == "ValueError: no (train.py, line 3; see runs/O2-seed0.log)"
    run.error_where = ""
    assert run.error_in_full == "ValueError: no (see runs/O2-seed0.log)"
    run.refused = True
    assert run.error_in_full == "ValueError: no", "the message of a refusal names its place"
    assert Run("O2").error_in_full == "recorded no step"
    run.add({"event": "outcome", "level": "O1", "seed": 2, "error": None, "notes": ["one"], "log": ""})
    assert (run.level, run.seed, run.error, run.notes) == ("O1", 2, None, ["one"])


def test_an_event_of_no_known_kind_is_refused():
    with pytest.raises(
        ValueError,
        match=r"event is 'stop'; wanted begin, step, log, updates, memory, modules, note, end or outcome",
    ):
        Run("O0").add({"event": "stop"})


def test_every_field_of_a_run_survives_json():
    default = Run("O0")
    for field in dataclasses.fields(Run):
        assert not same_values(getattr(RUN, field.name), getattr(default, field.name)), f"{field.name} shows nothing"
    text = dumps(RUN.to_dict())
    json.loads(text, parse_constant=pytest.fail)  # strict: no bare NaN
    back = Run.from_dict(loads(text))
    assert same_values(back, RUN)
    back.loss.append(1.0)
    assert same_values(Run.from_dict(loads(text)), RUN), "two runs share what they hold"


def test_from_dict_reads_what_an_older_report_left_out():
    assert Run.from_dict({"level": "O1", "loss": [1.0]}) == Run("O1", loss=[1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, [], {}, None, True, "text", 2**70])
def test_values_survive_json(value):
    assert same_values(loads(dumps({"a": [value, [value]]})), {"a": [value, [value]]})
