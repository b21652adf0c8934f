"""An opt level for Lightning's Trainer, of the package `lightning`::

    from lightning.pytorch import Trainer
    from amp_patch.integrations.lightning import OptLevelPrecision

    trainer = Trainer(plugins=OptLevelPrecision("O2", dtype=torch.bfloat16))
    trainer.fit(module)

Scripts that import `pytorch_lightning` take it from `amp_patch.integrations.pytorch_lightning`. Written for lightning
2.4 or newer.
"""

from __future__ import annotations

from lightning.pytorch.plugins import Precision

from amp_patch.integrations.opt_level import OptLevel


class OptLevelPrecision(OptLevel, Precision):
    __doc__ = OptLevel.__doc__
