"""What a run leaves behind: `record`, `log`, and the files and tables of it."""

from __future__ import annotations
