"""Trainings: loss scale, `scale_loss`, unscaling, the optimizer's step, and its skip after an overflow.

Files, the first one to read first:

- `training.py`: a model and optimizer enter and leave a training
- `scale_loss.py`: `scale_loss`, the scaled backward pass of one loss, and `loss_scale`, the factor
- `scaled_backward.py`: the context manager of `scale_loss`: it prepares gradients before a backward pass, and
  unscales them after it
- `unscale.py`: unscales gradients: the model's scaled gradients become FP32 gradients of the masters, and overflow
  is recorded
- `step.py`: around `optimizer.step()`
- `overflow.py`: skipped steps
- `stash.py`: the state stored with an optimizer
- `optimizer.py`: the generated class of an optimizer, and its hooks
- `loss_scaler.py`: LossScaler: the factor that keeps small gradients above FP16's underflow, raised and lowered
  during training
- `innermost.py`: the optimizer inside LARC or SAM
- `arguments.py`: types of users' arguments
- `observers.py`: observers: objects that are notified of bodies of `scale_loss`, of steps and of calls of
  GradScalers
- `joints.py`: lists of callbacks for guests
"""
