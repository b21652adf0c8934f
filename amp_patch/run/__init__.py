"""The runner of users' scripts: `python -m amp_patch run` and `check`, and unedited scripts at a level.

Files:

- `run.py`: the command `run`
- `run_summary.py`: its last line
- `check.py`: the command `check`: the names of Apex that files use
- `check_run.py`: `check --run`: the survey of a script's first step
- `apex_served.py`: the status of a name of Apex
- `apex_surface.py`: differences from Apex, as data
- `machine.py`: the processor, devices and types of this machine
- `installation.py`: which amp_patch is in use, for `info`
- `unedited/`: training of a script that uses torch alone, at a level
- `no_cuda/`: `run --device cpu`: CUDA's functions on another device
"""
