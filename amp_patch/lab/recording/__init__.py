"""What a run leaves behind: `record`, `log`, and the files and tables of it."""

from __future__ import annotations

from amp_patch.casts import dynamo

dynamo.never_trace("lab.recording")  # compiled forwards call a recorder's hooks
