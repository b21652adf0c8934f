"""Step strategies other than one call of the optimizer's own step: one pass, portions, and steps in backward.

Files, the first one to read first:

- `one_pass.py`: the step strategy of the optimizers in `KERNELS`: unscale, clip, moments, master and weight in one
  pass over memory
- `batch.py`: `Batch`: the parameters of one kernel call, with the tensors and settings that the kernel reads and
  writes
- `portions.py`: runs the own step of optimizers that have no kernel (one_pass.py) on one cache-sized portion of
  parameters at a time
- `per_parameter.py`: the registry of other packages' optimizer classes that step each parameter independently, and
  their partial steps
- `partial_step.py`: a step of the optimizer's own code on some parameters, used by these ways
- `gradient_release.py`: steps during backward
"""
