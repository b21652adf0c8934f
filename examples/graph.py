"""A graph beside the eager loop: the same training, once as a compiled call a step, once in the words of torch.amp.

Both start from the same weights and see the same batches; the two losses of an epoch agree up to rounding, because the
compiler fuses what eager torch rounds between.
"""

from __future__ import annotations

import argparse
import copy

import torch
from data import digits
from torch import Tensor, nn

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--backend", default="inductor", help="of torch.compile; eager: no compiler is needed")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
(images, labels), (test_images, test_labels) = digits(device)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
eager_model = copy.deepcopy(model)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
eager_optimizer = torch.optim.SGD(eager_model.parameters(), lr=0.1, momentum=0.9)
eager_scaler = amp.GradScaler(init_scale=3000, growth_interval=1000)


class TrainGraph(amp.graph.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.config.enable_amp(True, dtype=torch.float16)
        self.config.compile(backend=args.backend)
        self.add_optimizer(optimizer)
        self.set_grad_scaler(amp.GradScaler(init_scale=3000, growth_interval=1000))

    def build(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        return loss


class EvalGraph(amp.graph.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = model
        self.config.compile(backend=args.backend)

    def build(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def eager_step(inputs: Tensor, targets: Tensor) -> Tensor:
    """What one call of the graph does."""
    with amp.autocast(device, dtype=torch.float16):
        loss = loss_fn(eager_model(inputs), targets)
    eager_scaler.scale(loss).backward()
    eager_scaler.step(eager_optimizer)
    eager_scaler.update()
    eager_optimizer.zero_grad()
    return loss.detach()


train_graph, eval_graph = TrainGraph(), EvalGraph()
for epoch in range(args.epochs):
    # A static graph wants batches of one shape: what is left over waits for another epoch.
    for batch in torch.randperm(len(images), device=device).split(64)[:-1]:
        loss = train_graph(images[batch], labels[batch])
        eager_loss = eager_step(images[batch], labels[batch])
    print(f"epoch {epoch + 1:2}  graph {loss.item():.4f}  eager {eager_loss.item():.4f}")

model.eval()
accuracy = (eval_graph(test_images).argmax(1) == test_labels).float().mean().item()
print(f"held-out accuracy {accuracy:.2%}")
