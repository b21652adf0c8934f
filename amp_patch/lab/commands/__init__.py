"""The commands of `python -m amp_patch`: one file for each (run, check, compare, search, report), and its helpers."""

from __future__ import annotations
