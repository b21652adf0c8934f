"""amp_patch inside other trainers. Each module imports its package; `import amp_patch` imports none of them."""

from __future__ import annotations
