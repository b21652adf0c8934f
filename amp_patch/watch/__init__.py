"""What looks at a training and changes no numbers of it: guests of the road."""

from __future__ import annotations
