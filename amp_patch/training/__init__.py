"""Trainings: loss scale, `scale_loss`, unscaling, the optimizer's step, and its skip after an overflow."""
