"""What somebody asks about a training: causes (diagnose), records, comparisons, commands, unedited scripts.

Nothing of the floors below imports it: it subscribes to trainings, and `amp_patch` loads it at the first use of a name.
"""

from __future__ import annotations
