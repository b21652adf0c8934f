"""A compiled training step of the small GPT: our levels beside torch.autocast with a GradScaler, compiled too.

    python benchmarks/compile.py [--dtype bf16|fp16] [--size 12m|100m] [--models gpt convnet] [--batches 4]
                                 [--rivals ...] [--threads N] [--device cuda] [--repeats N] [--json PATH]

The steps, the options and the table are those of step.py, with `torch.compile(model)` in each step; every rival has a
process of its own, and they run in turns.
"""

from __future__ import annotations

import step

if __name__ == "__main__":
    step.main(__doc__, models=("gpt",), batches=(4,), compiled=True)
