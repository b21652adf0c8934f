"""The process of one run of a comparison: `python -m amp_patch run`, recorded."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from amp_patch.comparison.outcome import failure
from amp_patch.comparison.seeds import seeded
from amp_patch.diagnose.recording.recorder import Recorder
from amp_patch.diagnose.recording.run import UNTRAINED, Event, Failure, Run, dumps
from amp_patch.diagnose.recording.sinks import JsonLines
from amp_patch.environment import LEVEL, asked_level
from amp_patch.run import run as runner
from amp_patch.run.check_run import SurveyedScript
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript
from amp_patch.support.files import write_whole


@contextmanager
def recorded(
    path: str,
    *,
    steps: int | None,
    shift: bool,
    native: bool = False,
    batch_dim: int = 0,
    modules: bool = False,
) -> Iterator[None]:
    """Record the training in the body: write the events to `path`, and at the end the failure, if the training failed.

    The level and the seed are in the environment: AMP_PATCH_OPT_LEVEL, AMP_PATCH_SEED.
    """
    run, recorder, error = Run(os.environ[LEVEL], int(os.environ["AMP_PATCH_SEED"])), None, None
    script = UneditedScript(asked_level() or run.level, native=native)
    try:
        with seeded(run.seed, shift=shift):
            recorder = Recorder(
                [JsonLines(path), run],
                stop_after=steps,
                batch_dim=batch_dim,
                modules=modules,
            )
            with recorder, script:
                yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if recorder is not None and recorder.process == os.getpid():  # a fork must not end its parent's record
            refused = error if isinstance(error, ScriptRefused) and not recorder.has_enough else None
            failed = failure(recorder, run, error)
            if failed is not None and error is None:
                refused = script.missing()
                if script.loaders.words and not (recorder.losses or recorder.is_in_a_step):
                    failed = Failure(f"no batch came: {script.loaders.words}", UNTRAINED)
            if refused is not None:
                failed = Failure(str(refused), "" if error is not None else UNTRAINED)
            last: list[Event] = [{"event": "note", "text": note} for note in script.notes]
            words, kind, where = failed or (None, "", "")
            told = {"error": words, "error_kind": kind, "error_where": where, "refused": refused is not None}
            of_script = {"edited": script.has_begun and not script.applies(), "replaced": [*script.native.seen]}
            last.append({"event": "end", **told, **of_script, "native": bool(script.native.seen)})
            recorder.close(*last)


@contextmanager
def surveyed(path: str, *, shift: bool, levels: Sequence[str]) -> Iterator[None]:
    """Write the survey of the first step of the training in the body to `path`, as JSON, and end the body there.

    The step is measured at `levels`.

    Raises:
        SystemExit: the body has made no step; the message says why.
    """
    first, process = SurveyedScript(), os.getpid()
    try:
        with seeded(int(os.environ["AMP_PATCH_SEED"]), shift=shift), first:
            yield
    finally:
        if first.stepped and os.getpid() == process:
            first.measure(levels)
            write_whole(path, dumps(first.report.to_json()) + "\n")
    if not first.stepped:
        raise SystemExit(first.why_nothing)


def main() -> None:
    """Run a script, recorded, with the options from the command line of `compare`."""
    parser = argparse.ArgumentParser(prog="python -m amp_patch.comparison.commands.compare_worker", allow_abbrev=False)
    parser.add_argument("--recorded", type=json.loads, help="the arguments of `recorded`, as JSON")
    parser.add_argument("--surveyed", type=json.loads, help="the arguments of `surveyed`, as JSON")
    runner.add_arguments(parser)
    args = parser.parse_args()
    runner.run(args, recorded(**args.recorded) if args.surveyed is None else surveyed(**args.surveyed))


if __name__ == "__main__":
    main()
