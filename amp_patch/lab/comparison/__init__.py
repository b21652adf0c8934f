"""Levels compared: their figures, the verdict, the report as text and as a page."""

from __future__ import annotations
