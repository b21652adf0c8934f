"""Random recordings: a file is read back up to its last whole line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hunts import hunt
from hypothesis import strategies as st

from amp_patch.comparison.commands.compare_folder import add_events
from amp_patch.diagnose.recording.run import PARTS, Run, dumps, loads
from amp_patch.diagnose.recording.sinks import JsonLines

# The words that stand for numbers in JSON are read as these, and no script's name is one.
words = st.text(max_size=6).filter(lambda word: word not in ("NaN", "Infinity", "-Infinity"))
numbers = st.floats()
counts = st.integers(0, 2**53)
by_name = st.dictionaries(words, numbers, max_size=2)
shares = st.dictionaries(words, st.lists(numbers, min_size=3, max_size=3), max_size=2)


def of_kind(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"event": st.just(kind), **fields})


sizes = dict.fromkeys(("weights", "masters", "gradients", "state", "peak_memory"), counts)
events = st.lists(
    st.one_of(
        of_kind("begin", dtype=st.sampled_from([None, "float16", "bfloat16"]), policy=words, device=words),
        of_kind(
            "step",
            **dict.fromkeys(("loss", "seconds", "scale"), numbers),
            skipped=st.booleans(),
            samples=counts,
            parts=st.fixed_dictionaries(dict.fromkeys(PARTS, numbers)),
        ),
        of_kind("log", step=counts, name=words, value=numbers),
        of_kind(
            "updates",
            step=counts,
            dtype=st.sampled_from(["float16", "bfloat16"]),
            counts=st.dictionaries(words, st.lists(counts, min_size=2, max_size=2), max_size=2),
        ),
        of_kind("memory", activations=st.none() | counts),
        of_kind("modules", names=st.lists(words, max_size=3)),
        of_kind("note", text=words),
        of_kind("end", **sizes),
    ),
    max_size=8,
)


def folded(events: list[dict[str, Any]]) -> Run:
    run = Run("O2", 1)
    for event in events:
        run.add(event)
    return run


def written(events: list[dict[str, Any]], flushed_after: set[int]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        sink = JsonLines(path)
        for index, event in enumerate(events):
            sink.add(event)
            if index in flushed_after:
                sink.flush()
        sink.close()
        return path.read_bytes()


@hunt(60, events=events, flushed_after=st.sets(st.integers(0, 7)))
def test_a_record_file_is_read_back_as_the_run(events: list[dict[str, Any]], flushed_after: set[int]) -> None:
    run, expected = Run("O2", 1), folded(events)
    assert add_events(run, written(events, flushed_after)) == b""
    # As texts, which are exact: numbers that are not finite differ from themselves.
    for each in (run, Run.from_dict(loads(dumps(expected.to_dict())))):
        assert dumps(each.to_dict()) == dumps(expected.to_dict())


@hunt(60, events=events, cut=st.floats(0, 1))
def test_a_record_file_that_is_cut_at_any_byte_is_read_to_its_last_whole_line(
    events: list[dict[str, Any]], cut: float
) -> None:
    whole, run = written(events, set()), Run("O2", 1)
    at = round(cut * len(whole))
    rest = add_events(run, whole[:at])
    lines = whole[:at].count(b"\n")
    assert dumps(run.to_dict()) == dumps(folded(events[:lines]).to_dict())
    assert whole[:at].endswith(rest) and b"\n" not in rest
    assert add_events(run, rest + whole[at:]) == b"", "the rest is the beginning of what comes later"
    assert dumps(run.to_dict()) == dumps(folded(events).to_dict())
