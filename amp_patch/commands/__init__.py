"""`python -m amp_patch ...`: one file a command."""

from __future__ import annotations
