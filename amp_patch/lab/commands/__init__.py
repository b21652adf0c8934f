"""`python -m amp_patch ...`: a file a command (run, check, compare), beside it what that needs."""

from __future__ import annotations
