"""Recordings of trainings: `record`, `log`, and their files and tables.

Words of this package: an *event* is a dict, one line of JSON in a file. A *sink* receives events. A *body* is the block
of one `scale_loss`. *Samples* are counted in the model's first input tensor.

Files:

- `recorder.py`: `amp.record`: observes trainings
- `run.py`: the figures of a recording, built from events
- `step.py`: one step, and losses that a GradScaler has scaled
- `step_clock.py`: which part of a step runs, and its time
- `activations.py`: the bytes that autograd saves in one step
- `sampled_updates.py`: lost updates, in sampled steps
- `sizes.py`: bytes of the training's tensors
- `peak_memory.py`: peak memory, from CUDA or the operating system
- `module_names.py`: modules that can be kept in another precision
- `forward_hooks.py`: notification of the beginning of a forward, eager or compiled
- `outbox.py`: events that wait for copies from the device
- `sinks.py`: files of JSON lines, and TensorBoard
"""

from __future__ import annotations

from amp_patch.casts import dynamo

dynamo.never_trace("diagnose.recording")  # compiled forwards call a recorder's hooks
