"""Record trainings, compare them over opt levels, and say what came out: a table, a page, a verdict."""

from __future__ import annotations
