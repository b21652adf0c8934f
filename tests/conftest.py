"""What every test file shares: the devices and types of this machine, and a process that each test leaves clean."""

from __future__ import annotations

import pytest
import torch

from amp_patch import amp

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# What only a GPU can show.
collect_ignore = [] if torch.cuda.is_available() else ["test_cuda.py"]

# The models here are tiny: a second thread only waits for the first, twenty times as long where a core is busy.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restored():
    """Torch's namespace is process-wide: whatever a test installed goes when it ends."""
    yield
    amp.restore()
