"""A script in a folder of its own, started as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT


def start_script(folder: Path, script: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python [command] train.py` in `folder`, train.py being `script`: on one thread, without our variables."""
    (folder / "train.py").write_text(script)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {name: value for name, value in os.environ.items() if not name.startswith("AMP_PATCH_")}
    return subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder,
        env={**found, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
