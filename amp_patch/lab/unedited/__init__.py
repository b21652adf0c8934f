"""Training scripts that never heard of amp_patch, at an opt level as they are. The one to read first is `script.py`."""

from __future__ import annotations
