"""The commands of `python -m amp_patch` that train a script several times.

Words of this package: `compare` trains each *run* (one level, one seed) in its own process, one run after the other.
The *record* of a run is its file of events, one line of JSON each. *Asked* steps, levels and runs are those that the
user requested; the script may have made others. A *trial* is one attempt of a search, with one batch or with one set of
kept modules.

Files:

- `compare.py`: the command `compare`
- `compare_arguments.py`: its arguments, the plan that they describe, refusal of ranks
- `compare_folder.py`: arguments and records on disk
- `run_sequence.py`: the order of the runs
- `compare_child.py`: a run, or the survey of a script, in the parent process
- `compare_worker.py`: a run, in its own process
- `compare_progress.py`: printed progress
- `long_steps.py`: ends a run whose step does not
- `compare_baseline.py`: `--baseline`
- `batch_search.py`: the largest batch
- `search.py`: the command `search`: modules that a level must keep
- `report.py`: the command `report`
- `interrupts.py`: signals
- `guard.py`: a process that ends the child processes of a killed parent
"""
