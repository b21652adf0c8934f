"""Step strategies other than one call of the optimizer's own step: one pass, portions, and steps in backward."""
