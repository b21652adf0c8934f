"""How parameters are updated, beside the optimizer's own step on all at once: guests of the road."""

from __future__ import annotations
