"""The whole experiment: the same training at every opt level. One string changes between two rows of the table.

A convnet on handwritten digits and a small GPT on Python's manual (tasks.py), each from the same seed, at O0 to O5.
Ends with a table per task and the loss curves in one picture.

    python examples/opt_levels.py                       # everything: a few minutes on two cores
    python examples/opt_levels.py --task digits --levels O0 O2 --steps 100
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tasks import TASKS, Task
from torch import Tensor, nn

from amp_patch import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


@dataclass
class Result:
    """One training: a row of the table and a curve of the picture."""

    task: str
    metric: str
    level: str
    losses: list[float]
    held_out: float
    step_ms: float
    weights: int  # bytes, as the next two
    masters: int
    state: int
    loss_scale: float
    skipped: int

    @property
    def final_loss(self) -> float:
        """The mean over the last twentieth: a single batch says little."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 20) :])


def train(task: Task, level: str, steps: int, seed: int, progress: Progress) -> Result:
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    # Up for a tenth of the steps, down to nothing at the end.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
    )
    bar = progress.add_task(f"{task.name} {level}", total=steps, loss="")
    losses, times, skipped = [], [], 0
    for _ in range(steps):
        start = time.perf_counter()
        inputs, targets = task.batch(batches)
        loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        skipped += optimizer._amp_stash.step_skipped
        progress.update(bar, advance=1, loss=f"loss {losses[-1]:.3f}")

    model.eval()
    with torch.no_grad():
        held_out = task.evaluate(model)
    weights, masters, state = memory(model, optimizer)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    amp.restore()  # the next level starts from an untouched torch
    ms = 1000 * statistics.median(times)
    return Result(task.name, task.metric, level, losses, held_out, ms, weights, masters, state, scale, skipped)


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Bytes of the weights, of the masters that are tensors of their own, and of the optimizer's state."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    weights = {id(weight): weight for weight in model.parameters()}
    masters = [master for master in amp.master_params(optimizer) if id(master) not in weights]
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return size(weights.values()), size(masters), size(state)


def table(results: list[Result]) -> Table:
    title = f"{results[0].task}, {len(results[0].losses)} steps"
    rows = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    metric = results[0].metric.replace(" per ", " per\n")  # the whole table fits 80 columns
    rows.add_column("level", no_wrap=True)
    numbers = ("final\nloss", f"held-out\n{metric}", "ms per\nstep")
    for heading in (*numbers, "weights\nKiB", "masters\nKiB", "state\nKiB", "loss\nscale", "skipped\nsteps"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        rows.add_row(
            r.level,
            f"{r.final_loss:.4f}",
            f"{r.held_out:.2f}",
            f"{r.step_ms:.1f}",
            *(f"{part / 1024:.0f}" for part in (r.weights, r.masters, r.state)),
            f"{r.loss_scale:g}",
            str(r.skipped),
        )
    return rows


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=(*TASKS, "all"), default="all")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS, metavar="LEVEL")
    parser.add_argument("--steps", type=int, help="training steps of each run (the default is each task's own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/opt_levels.png"), help="where the picture goes")
    args = parser.parse_args(arguments)

    console = Console()
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: dict[str, list[Result]] = {}
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        for name in TASKS if args.task == "all" else [args.task]:
            task = TASKS[name](args.device)
            results[name] = [train(task, level, args.steps or task.steps, args.seed, progress) for level in args.levels]
    for rows in results.values():
        console.print(table(rows))

    from curves import plot  # here, because matplotlib takes a second that --help need not wait for

    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot(results, args.out)
    console.print(f"Loss curves: {args.out}")
    return [result for rows in results.values() for result in rows]


if __name__ == "__main__":
    main()
