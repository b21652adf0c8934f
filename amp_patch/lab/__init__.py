"""Tools around a training: causes (diagnose), records, comparisons, commands, unedited scripts.

No lower floor imports it. It subscribes to trainings, and `amp_patch` loads it at the first use of one of its names.
"""

from __future__ import annotations
