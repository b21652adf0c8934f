"""Recordings of trainings: `record`, `log`, and their files and tables."""

from __future__ import annotations

from amp_patch.casts import dynamo

dynamo.never_trace("lab.recording")  # compiled forwards call a recorder's hooks
