"""The name `amp_patch.amp` of the package: `from amp_patch import amp`, `from amp_patch.amp import GradScaler`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_patch import *  # noqa: F403
else:
    sys.modules[__name__] = sys.modules["amp_patch"]
