"""The comparison of levels: their figures, the verdicts, and the report as text and as a page."""

from __future__ import annotations
