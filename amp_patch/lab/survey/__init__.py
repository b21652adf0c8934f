"""The survey: it follows one FP32 step operation by operation, to find the lines of user code that a level breaks.

Words of this package: a *kind of levels* (`Kind`) is the levels that give each tensor the same type, such as O2 and O3.
The *facts* of a tensor (`Facts`) are its type and numbers at each kind. A tensor is *learned* if it depends on a
parameter; only the numbers of other tensors are computed at each kind.
"""

from __future__ import annotations
