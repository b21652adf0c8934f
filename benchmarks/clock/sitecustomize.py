"""A clock of quick_programs.py: the processor's time of a process after each optimizer step, in STEP_CLOCK/LEVEL.txt.

Python imports this module at its start if its folder is on PYTHONPATH. It reads no clock of amp_patch. The time is that
of the process alone, so that other work on the machine does not count.
"""

from __future__ import annotations

import os
import time
from typing import Any

LEVEL = os.environ.get("AMP_PATCH_OPT_LEVEL")  # `compare` sets it for the processes that train

if "STEP_CLOCK" in os.environ and LEVEL:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # Opened once: `compare` lets a process that opens a file during its training run to its end.
    _file = os.open(f"{os.environ['STEP_CLOCK']}/{LEVEL}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _note(*_: Any) -> None:
        os.write(_file, f"{time.process_time()}\n".encode())

    register_optimizer_step_post_hook(_note)
