"""O1: the casts around torch's functions. Op lists, their rules, wrappers, and the regions in which they act."""

from __future__ import annotations
