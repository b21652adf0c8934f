"""An ordinary training script with a switch for the opt level, for `python -m amp_patch compare` to run.

    python -m amp_patch compare --levels O0,O1,O2,O3,O4,O5 --seeds 3 examples/train.py -- --task gpt
    python examples/train.py --task lstm --opt-level O2         # by itself

A convnet on handwritten digits, or a small GPT or an LSTM on Python's manual (tasks.py). The lines marked "amp" are all
that mixed precision adds, and `amp.log` is all that the comparison does: without it, levels are compared by the
training loss.
"""

from __future__ import annotations

import argparse

import torch
from tasks import TASKS

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--task", choices=TASKS, default="digits")
parser.add_argument("--opt-level", default="O1", help="O0 to O5")
parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="of O1 to O3 (default: float16)")
parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches; the held-out data stay")
parser.add_argument("--steps", type=int, help="of the whole training (the default is each task's own)")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

task = TASKS[args.task](args.device)
steps = args.steps or task.steps
torch.manual_seed(args.seed)
batches = torch.Generator().manual_seed(args.seed)
model = task.model()
optimizer = task.optimizer(model)
dtype = getattr(torch, args.dtype) if args.dtype else None
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, dtype=dtype)  # amp
# Up for a tenth of the steps, down to nothing at the end: what is evaluated has come to rest.
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
)


def evaluate() -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        figures = task.evaluate(model)
    model.train()
    amp.log(**figures)
    return figures


evaluate()  # before the training too: a gap between levels is judged by what that gains
for _ in range(steps):
    inputs, targets = task.batch(batches)
    loss = task.loss(model(inputs), targets)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp
        scaled_loss.backward()  # amp: was loss.backward()
    optimizer.step()
    schedule.step()

told = (f"{name} {value:.4f}" for name, value in evaluate().items())
print(f"{task.name}, {steps} steps, seed {args.seed}:", *told)
