"""The handle by which `compare` controls one run: a child process that trains the script."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from amp_patch.comparison.commands.compare_folder import add_events, keep_outcome, record_of, survey_path
from amp_patch.comparison.commands.guard import Guard
from amp_patch.comparison.level_result import left_out
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.outcome import interrupted
from amp_patch.comparison.plan import BASELINE, Plan, name_as_asked
from amp_patch.diagnose.recording.run import EXITED, KILLED, NATIVE, OVERDUE, Failure, Run, dumps
from amp_patch.diagnose.wording import without_control_codes
from amp_patch.run.run import wanted_cuda
from amp_patch.support.files import fresh, write_whole

_END = 8.0  # seconds to wait until the guard process has ended a run; it needs less
_POLL = 0.2  # seconds between two reads of a record
_NUMBER = re.compile(r"[-+\d.]+")
# Names of exceptions; and words of errors, which a script that stops early may use too ("validation error").
_RAISED = re.compile(r"[A-Za-z](Error|Exception)\b|^Traceback|\b(nan|inf)\b", re.IGNORECASE)
_WORDS = "error|exception|expected|fail|cannot|can't|must|mismatch|unsupported|not (implemented|supported|finite)"
_NAMES_ERROR, _NOTE = re.compile(f"{_RAISED.pattern}|{_WORDS}", re.IGNORECASE), re.compile("^amp_patch: |Warning")
_GRACE = 10.0  # seconds after the last step until a run is killed: a script may catch SystemExit and train on


class Child:
    """A process that runs the script at the level and seed of `run`. The handle adds its events and failure to `run`.

    Args:
        load: measures other work on the machine while the process trains.
        more: (name of the log and record files, further arguments of the script). None for the files' default name, and
            no further arguments.
        survey: if given, a path and names of levels. The process ends after the script's first step, and writes the
            survey of that step, measured at these levels, to the path.
    """

    def __init__(
        self,
        plan: Plan,
        args: argparse.Namespace,
        run: Run,
        load: OtherWork,
        more: tuple[str, Sequence[str]] | None = None,
        survey: tuple[Path, Sequence[str]] | None = None,
    ) -> None:
        self.run = run
        self._asked = copy.deepcopy(run)
        self._args = args
        self._steps = plan.steps
        self._enough_since: float | None = None
        self._load = OtherWork(load)
        name, arguments = more or (record_of(args.out, run).stem, ())
        # `fresh` removes an earlier comparison's file, or a link to elsewhere.
        self._log = fresh(args.out / "runs" / f"{name}.log")
        self._record = fresh(self._log.with_suffix(".jsonl").absolute())  # absolute: the script may change directory
        self._record.open("xb").close()
        self._lines = self._record.open("rb")
        self._rest = b""
        # One hash seed for all levels: the order of a set of strings depends on it.
        environment = {"PYTHONHASHSEED": "0", **os.environ, **plan.environment(run)}
        self._guard = Guard()
        try:
            with open(self._log, "xb") as output:
                self._process = subprocess.Popen(
                    [*_command(plan, args, self._record, self._asked, survey), *arguments],
                    env={**environment, **self._guard.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # `_signal` reaches the group, with the children of the script
                )
            self._guard.watch(-self._process.pid)
        except BaseException:
            self._guard.join()
            raise

    def train(self, look: Callable[[Run], str | None]) -> None:
        """Wait until the process ends.

        Args:
            look: called repeatedly with `self.run`, which has the events so far. If it returns words, the process is
                ended, and the words are its error. If `look` raises, the process runs on.
        """
        self._load.watch(self._process.pid)
        while True:
            ended = self._has_ended(_POLL)
            self._rest = add_events(self.run, self._rest + self._lines.read())
            self._load.read()
            overdue = look(self.run)
            if ended:
                self._close()
                self._conclude()
                return
            if overdue is not None:
                self.kill()
                self.run.log = str(self._log)
                self.run.error, self.run.error_kind = overdue, OVERDUE
                return
            if self._trains_past_its_steps():
                self.kill()
                self.run.log = str(self._log)
                self.run.notes.append(f"the script ran on after the {self._steps} steps asked for, and was ended")
                return

    def train_alone(self, check: Callable[[], None]) -> None:
        """Wait until the process ends. Kill it if `check`, which is called repeatedly, raises (after Ctrl-C)."""
        try:
            self.train(lambda _: check())
        except BaseException:
            self.kill()
            raise

    def interrupt(self, until: float, hurried: Callable[[], bool]) -> None:
        """Send SIGINT to the process group, wait for its end, else kill it, and record the interrupt as its failure.

        Ctrl-C does not reach the group: it has no terminal. The wait ends at `until` (of `time.monotonic`), or when
        `hurried` returns True.
        """
        self._signal(signal.SIGINT)
        while not (hurried() or self._has_ended(min(_POLL, until - time.monotonic()))) and time.monotonic() < until:
            pass
        self.kill()
        self.run.error, self.run.error_kind, self.run.error_where = interrupted(self.run)

    def keep_outcome(self) -> None:
        """Append the "outcome" event to the record of the run. Call it after the process has ended."""
        self.run.other_work = self._load.share
        with suppress(OSError):  # if the disk is full, only the report has the outcome
            keep_outcome(self._record, self.run)

    def kill(self) -> None:
        """End the process and all its descendants, in other sessions too."""
        if not self._has_ended(0):
            self._guard.end()
            if not self._has_ended(_END):
                self._signal(signal.SIGKILL)
                self._process.wait()
        self._guard.join()
        self._close()

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            if os.name == "posix":
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _has_ended(self, seconds: float) -> bool:
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _close(self) -> None:
        self._signal(signal.SIGKILL)  # else processes that the script has started would run on during other runs
        self._guard.release()
        self._guard.join()
        self._rest = add_events(self.run, self._rest + self._lines.read())
        self._lines.close()
        name_as_asked(self.run, self._asked)

    def _has_enough(self) -> bool:
        return self._steps is not None and self.run.steps >= self._steps

    def _trains_past_its_steps(self) -> bool:
        """Return whether the run took its last requested step more than `_GRACE` seconds ago.

        False if the script decides the number of steps. The caller has found that the process still runs.
        """
        if self._enough_since is None and self._has_enough():
            self._enough_since = time.monotonic()
        return self._enough_since is not None and time.monotonic() - self._enough_since > _GRACE

    def _conclude(self) -> None:
        run, code = self.run, self._process.returncode
        run.log = str(self._log)
        if run.error is not None and run.error_kind == EXITED and (last := _last_line(self._log)):
            run.error = f"{run.error}: {last}"[:300]  # argparse prints the reason before it exits
        elif run.error is None and code and not self._has_enough():
            run.error, run.error_kind, run.error_where = _died(code, self._log)
        elif run.error is None and not _is_whole(self._record):
            run.error = (
                f"the recording breaks off after {run.steps} steps: by os._exit or exec in the script, or a full disk"
            )
        if run.error is not None and not run.refused and self._args.device is None and wanted_cuda(run.error):
            run.error += "; --device cpu takes the CPU instead"


def survey_script(plan: Plan, args: argparse.Namespace, check: Callable[[], None], levels: Sequence[str]) -> None:
    """Run the script at O0 until its first step is over, and store the survey of that step in the folder `args.out`.

    The step is measured at `levels`. If the script fails, or makes no step, {"failed": the reason} is stored. The
    process is ended if `check`, which is called repeatedly, raises.

    A survey inside of O0's run would change the run: compiled code would run eagerly, and on a GPU the survey would
    take memory, by whose free amount cuDNN chooses algorithms. O0's numbers, times and memory therefore come from a
    process without a survey.
    """
    path, run = survey_path(args.out), Run(BASELINE)
    Child(plan, args, run, OtherWork(), ("survey", ()), (path, levels)).train_alone(check)
    if not path.exists():
        with suppress(OSError):  # a full disk: the report has no survey
            write_whole(path, dumps({"failed": run.error or "it made no step"}) + "\n")


def note_caught(run: Run, o0: Run) -> None:
    """Set `run.caught` to the last line of its log that names an error and is not in the log of `o0`, if there is one.

    This is for runs that lack steps, batches or a metric of O0's. A run that ends after a whole step may have stopped
    by itself: the line must name an exception. If the run made no step, the line becomes its error: O0 shows that the
    script trains.
    """
    lacks = run.steps < o0.steps or left_out(run, o0) or {*o0.logged} - {*run.logged}
    if not lacks or (run.level == o0.level and run.steps):
        return
    known = {_NUMBER.sub("", line) for line in _lines(Path(o0.log))}
    by_itself = 0 < run.steps < o0.steps and not (run.unfinished or left_out(run, o0))
    names = _RAISED if by_itself else _NAMES_ERROR
    own = (line for line in reversed(_lines(Path(run.log))) if _NUMBER.sub("", line) not in known)
    run.caught = next((line[:300] for line in own if names.search(line) and not _NOTE.search(line)), "")
    if run.error is not None:
        why = run.caught or "its log names no error; perhaps it goes on from a checkpoint that the first run wrote"
        run.error, run.refused = f"it made no step, where O0 made {o0.steps}: {why}", False


def _is_whole(record: Path) -> bool:
    return re.search(rb'^\{"event": "end"', record.read_bytes(), re.MULTILINE) is not None


def _command(
    plan: Plan, args: argparse.Namespace, record: Path, run: Run, survey: tuple[Path, Sequence[str]] | None
) -> list[str]:
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    shift, native = args.seed_flag is None, run.level == NATIVE
    recorded = {
        "path": str(record),
        "steps": plan.steps,
        "shift": shift,
        "native": native,
        "batch_dim": args.batch_dim or 0,
        "modules": plan.keep is not None,
    }
    surveyed = None if survey is None else {"path": str(survey[0].absolute()), "levels": [*survey[1]], "shift": shift}
    options = ["--recorded", json.dumps(recorded), "--surveyed", json.dumps(surveyed)]
    options += [] if args.device is None else ["--device", args.device]
    options += ["-m"] if args.module else []
    own = [args.seed_flag, str(run.seed)] if args.seed_flag is not None else []
    return [*python, "-m", "amp_patch.comparison.commands.compare_worker", *options, args.script, *args.arguments, *own]


def _died(code: int, log: Path) -> Failure:
    """Return the failure of a process that recorded none, from its exit status and the last line of its log."""
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else ""
        words = f"killed by signal {-code} ({name})"
        return Failure(f"{words}, perhaps for memory", KILLED) if -code == signal.SIGKILL else Failure(words)
    return Failure(f"exit status {code}: {_last_line(log)}"[:300])


def _last_line(log: Path) -> str:
    return next(reversed(_lines(log)), "")


def _lines(log: Path) -> list[str]:
    """Return the lines of a log that are not empty."""
    printed = re.split(r"[\r\n]", log.read_text(errors="replace")) if log.is_file() else []
    return [*filter(None, (without_control_codes(line).strip() for line in printed))]
