"""Time a compiled training step of the small GPT at our levels and with torch.autocast and a GradScaler.

    python benchmarks/compile.py [--dtype bf16|fp16] [--size 12m|100m] [--models gpt convnet] [--batches 4]
                                 [--rivals ...] [--threads N] [--device cuda] [--repeats N] [--json PATH]

The steps, options and table are those of step.py, but each rival compiles its model.
"""

from __future__ import annotations

import step

if __name__ == "__main__":
    step.main(__doc__, models=("gpt",), batches=(4,), compiled=True)
